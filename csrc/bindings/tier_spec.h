// TierSpec: a tier that TieredCache's constructor opens. Each kind binds a class of its own that derives from
// it.
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "cache/tiered_cache.h"
#include "storage/record.h"
#include "storage/record_form.h"

namespace kv_offload::bindings {

// Null for none.
inline std::shared_ptr<const SealingKeys> keys_from(const std::vector<std::string>& paths) {
  return paths.empty() ? nullptr : SealingKeys::from_files(paths);
}

struct TierSpec {
  TierSlotOptions slot;
  std::vector<std::string> encryption_key_files;  // empty: not sealed
  Compress compress = Compress::kNone;
  std::vector<Element> elements;  // by position of the group
  bool memory_outlives = false;   // see FsTierOptions
  virtual ~TierSpec() = default;
  // Without the GIL. Throws InvalidArgument or ResourceError.
  virtual std::unique_ptr<Tier> open() const = 0;
  // Reads the keys: throws as SealingKeys::from_files.
  RecordFormOptions form() const;
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
