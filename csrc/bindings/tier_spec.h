// SPDX-License-Identifier: Apache-2.0
// TierSpec: a tier for TieredCache's constructor to open. Each type of tier binds its own derived class.
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "bindings/bindings.h"
#include "cache/tiered_cache.h"
#include "record/record.h"
#include "record/record_form.h"
#include "tier/record_store.h"

namespace kv_offload::bindings {

// Null if there are no paths.
inline std::shared_ptr<const EncryptionKeys> keys_from(
    const std::vector<std::string>& paths, const std::vector<std::vector<std::string>>& of_tenants = {}) {
  return paths.empty() ? nullptr : EncryptionKeys::from_files(paths, of_tenants);
}

struct TierSpec {
  TierSlotOptions slot;
  std::vector<std::string> encryption_key_files;           // empty: no encryption
  std::vector<std::vector<std::string>> tenant_key_files;  // by tenant; see EncryptionKeys
  Compress compress = Compress::kNone;
  ErrorBounds bounds;              // of kLossy
  ErrorBounds accepted;            // of records that are read: RecordFormOptions::bounds
  std::vector<Element> elements;   // by group position
  std::vector<bool> exact_groups;  // by group position: always stored without loss
  std::vector<KvRuns> runs;        // by group position
  std::vector<std::shared_ptr<const BoundFactors>> factors;  // by group position; of kLossy
  bool memory_outlives = false;                              // see FsTierOptions
  bool watch_removals = false;                               // see ThreadPoolTierOptions; only fs and redis
  EpochChoice epoch{};                                       // kinds whose epochs have no id ignore it
  std::vector<TenantOptions> tenants;  // of the cache that opens the tier, which sets them
  virtual ~TierSpec() = default;
  // Called without the GIL. Throws InvalidArgument or ResourceError.
  virtual std::unique_ptr<Tier> open() const = 0;
  // Opens the store alone, for RecordImporter. It evicts nothing for a write where it knows its bound. Throws
  // like open(), and InvalidArgument if records cannot be copied into this type of tier.
  virtual std::unique_ptr<RecordStore> open_for_import() const {
    throw_invalid("records cannot be copied into this type of tier");
  }
  // Reads the keys; throws like EncryptionKeys::from_files.
  RecordFormOptions form() const;
};

// Identifies the types that the core shares with a tier in another extension module. The sizes detect changed
// members; raise the number when a virtual function of Tier, TierSpec or a store is changed.
inline std::string tier_interface() {
  constexpr int kVirtualFunctions = 1;
  return fmt::format("{} {} {} {} {} {} {} {} {} {}", kVirtualFunctions, sizeof(TierSpec), sizeof(TierOp),
                     sizeof(Completion), sizeof(TierUse), sizeof(TierRemoval), sizeof(LookupOptions),
                     sizeof(TierStats), sizeof(TierAvailability), sizeof(TierPart));
}
// Imports the core into a module with a tier, before the module defines its types. Throws InvalidArgument
// unless both were compiled with the same headers: otherwise the process would crash when it opens the tier.
inline void require_core(const char* module) {
  const py::object core = py::module_::import("kv_offload._core");
  const std::string theirs =
      py::hasattr(core, "tier_interface") ? std::string(py::str(core.attr("tier_interface"))) : "none";
  if (theirs == tier_interface()) return;
  throw_invalid(
      "{} was compiled with other headers than the installed vllm-kv-offload (tier interface {}, "
      "installed {}): compile it again",
      module, tier_interface(), theirs);
}

// Opens all of them; epochs: by tier, or empty. Called without the GIL. Throws like TierSpec::open.
std::vector<std::unique_ptr<Tier>> open_all(const std::vector<std::shared_ptr<TierSpec>>& tiers,
                                            const std::vector<EpochChoice>& epochs);

// Parses "write_through", "on_evict", "reuse:N" or "read_only". Throws InvalidArgument that lists them.
TierSlotOptions write_policy_of(std::string_view write_policy);

// Throws InvalidArgument unless there are 32 bytes.
inline NamespaceId namespace_id_of(std::string_view bytes) {
  NamespaceId id{};
  if (bytes.size() != id.size()) {
    throw_invalid("namespace_id has {} bytes: give {}", bytes.size(), id.size());
  }
  std::copy(bytes.begin(), bytes.end(), id.begin());
  return id;
}

}  // namespace kv_offload::bindings
