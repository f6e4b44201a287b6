// SPDX-License-Identifier: Apache-2.0
#include "backends/mooncake/errors.h"

#include <algorithm>
#include <array>

namespace kv_offload::mooncake {
namespace {

struct ErrorMapping {
  std::int64_t code;
  StatusKind kind;
  std::string_view sentence;
};

constexpr std::array kErrorMappings{
    ErrorMapping{kNoSpaceLeft, StatusKind::kNoSpace,
                 "Mooncake's memory is full, and its objects were used too recently to be evicted"},
    ErrorMapping{kHolderGone, StatusKind::kIo, "the node that holds the object is down"},
    ErrorMapping{kBadLength, StatusKind::kIo, "Mooncake rejects this object"},
    ErrorMapping{kNotComplete, StatusKind::kNotFound, "another process is still writing the object"},
    ErrorMapping{kNoObject, StatusKind::kNotFound, "no record of this key"},
    ErrorMapping{-800, StatusKind::kIo, "the node that holds the object does not respond"},
    ErrorMapping{-900, StatusKind::kIo, "Mooncake's master does not answer"},
};

}  // namespace

Status refusal(std::int64_t code, std::string_view text) {
  const auto found = std::find_if(kErrorMappings.begin(), kErrorMappings.end(),
                                  [&](const ErrorMapping& one) { return one.code == code; });
  if (found == kErrorMappings.end()) {
    return Status::error(StatusKind::kIo, text.empty()
                                              ? fmt::format("Mooncake refused the request (code {})", code)
                                              : std::string(text));
  }
  return Status::error(found->kind, fmt::format("{} (code {})", found->sentence, code));
}

}  // namespace kv_offload::mooncake
