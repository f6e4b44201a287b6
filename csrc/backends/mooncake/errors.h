// SPDX-License-Identifier: Apache-2.0
// The meaning of Mooncake's error codes for a tier. The codes are those of its ErrorCode, which its clients
// return unchanged.
#pragma once

#include <cstdint>
#include <string_view>

#include "base/status.h"

namespace kv_offload::mooncake {

inline constexpr std::int64_t kHolderGone = -101, kNoSpaceLeft = -200, kBadLength = -600, kNotComplete = -703,
                              kNoObject = -704;

// REQUIRES: code < 0. `text`: the process's description, which may be empty.
Status refusal(std::int64_t code, std::string_view text);

}  // namespace kv_offload::mooncake
