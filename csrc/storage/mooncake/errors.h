// What Mooncake's error codes say to a tier. They are those of its ErrorCode, which its clients return as
// they are.
#pragma once

#include <cstdint>
#include <string_view>

#include "base/status.h"

namespace kv_offload::mooncake {

inline constexpr std::int64_t kHolderGone = -101, kNoSpaceLeft = -200, kBadLength = -600, kNotComplete = -703,
                              kNoObject = -704;

// REQUIRES: code < 0. `text`: what the process adds, which may be empty.
Status refusal(std::int64_t code, std::string_view text);

}  // namespace kv_offload::mooncake
