// TierSpec: a tier that TieredCache's constructor opens. Each kind binds a class of its own that derives from
// it.
#pragma once

#include <algorithm>
#include <memory>
#include <string_view>

#include "base/status.h"
#include "cache/tiered_cache.h"
#include "storage/record.h"

namespace kv_offload::bindings {

struct TierSpec {
  TierSlotOptions slot;
  virtual ~TierSpec() = default;
  // Without the GIL. Throws InvalidArgument or ResourceError.
  virtual std::unique_ptr<Tier> open() const = 0;
};

// "through", "on_evict", "reuse:N", "never"; InvalidArgument naming them.
TierSlotOptions write_policy_of(std::string_view write_policy);

// InvalidArgument unless it has 32 bytes.
inline NamespaceId namespace_id_of(std::string_view bytes) {
  NamespaceId id{};
  if (bytes.size() != id.size()) {
    throw_invalid("namespace_id has {} bytes: give {}", bytes.size(), id.size());
  }
  std::copy(bytes.begin(), bytes.end(), id.begin());
  return id;
}

}  // namespace kv_offload::bindings
