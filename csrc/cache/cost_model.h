// SPDX-License-Identifier: Apache-2.0
// CostModel: decides whether loading a prefix is faster than recomputing it, and how much of it to load. Pure
// arithmetic on reported measurements; it has no clock and no tiers.
//
// Both sides are learned online: prefill_model.h learns from engine steps, transfer_model.h from every tier
// read and every copy to the device. A source of unknown speed is loaded from, because loading is how its
// speed is learned. Hysteresis keeps the current choice while the two sides are close. A tier that is no
// longer used is probed occasionally with reads that no request waits for.
//
// Threads: one.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/clock.h"
#include "cache/prefill_model.h"
#include "cache/transfer_model.h"
#include "policy/tenant_shares.h"

namespace kv_offload {

struct CostModelOptions {
  double margin = 0.93;  // switch only if the other side takes less than this share of the time
  // A tier judged too slow is probed this long after its last read.
  Nanos probe_interval{std::chrono::seconds(30)};
  // Loads from host memory stop only when copying takes at least this many times as long as recomputing.
  double host_slowdown_limit = 2;
  PrefillOptions prefill{};
};

// A part of a prefix whose chunks are all in the same place.
struct Stretch {
  static constexpr std::int32_t kHostMemory = -1;  // in host memory or already on its way there
  std::int32_t tier = kHostMemory;
  std::uint32_t chunks = 0;
  std::uint64_t tokens = 0;
  std::uint64_t bytes = 0;  // bytes to copy, and to read unless kHostMemory
};

struct Decision {
  enum class Choice : std::uint8_t { kLoad, kPartial, kRecompute };
  Choice choice = Choice::kLoad;
  std::uint32_t chunks = 0;    // how many chunks of the stretches to load, from the left
  double load_seconds = 0;     // estimated for those chunks (kRecompute: for all); 0 = unknown
  double compute_seconds = 0;  // likewise
};

// The tenant that reads, and its part of a tier's bandwidth while others read too.
struct Reader {
  TenantId tenant = 0;
  double weight = 1;
};

class CostModel {
 public:
  static constexpr std::size_t kMaxTiers = 8;

  explicit CostModel(std::size_t tiers, CostModelOptions options = {})
      : prefill(options.prefill), options_(options), tiers_(tiers) {}

  PrefillModel prefill;

  // ---- measurements
  // A read arrived `seconds` after its submission. `bytes_ahead`: bytes pending on the tier at submission,
  // including its own.
  void on_read(std::size_t tier, double bytes_ahead, double seconds, Nanos now);
  // A read has not arrived yet.
  void on_overdue_read(std::size_t tier, double bytes_ahead, double seconds_so_far, Nanos now);
  void on_copy(double bytes, double seconds) { copy_model_.observe(bytes, seconds); }

  // ---- estimates
  // Returns the seconds until `bytes` more have arrived, including what is already pending on the tier.
  // `hint`: the tier's own estimate, used until a measurement exists. 0 = unknown.
  double read_seconds(std::size_t tier, double bytes, double hint, const Reader& by = {}) const;
  double read_bytes_per_second(std::size_t tier) const { return tiers_[tier].reads.bytes_per_second(); }
  const TransferModel& copy() const { return copy_model_; }
  void add_waiting(std::size_t tier, double bytes, TenantId tenant = 0) {
    tiers_[tier].waiting_bytes += bytes;
    tiers_[tier].waiting_of[tenant] += bytes;
  }
  void remove_waiting(std::size_t tier, double bytes, TenantId tenant = 0) {
    add_waiting(tier, -bytes, tenant);
  }
  // Returns the bytes that the tier reads until `bytes` more of this reader have arrived, these included. Of
  // the other tenants' pending bytes, only those count that are read meanwhile.
  double bytes_ahead(std::size_t tier, double bytes, const Reader& by = {}) const;

  struct DecisionInput {
    Reader by{};
    std::span<const Stretch> stretches{};  // starts at the first chunk that is not in host memory
    std::span<const double> hints{};  // per tier: estimated seconds for all of its bytes, see read_seconds
    double context = 0;               // tokens before the stretches
    bool loads_anyway = false;        // chunks before the stretches are loaded
    bool divisible = true;            // a left part is useful without the rest
    double deadline_seconds = 0;      // data that arrives later is useless
  };
  Decision decide(const DecisionInput& input);
  // True if the last decision recomputed what this tier stores.
  bool prefers_recompute(std::size_t tier) const { return tiers_[tier].recompute; }
  // True if a tier that is not used should be probed now; it then counts as probed.
  bool should_probe(std::size_t tier, Nanos now);
  // Turns reads already in flight into a probe.
  void begin_probe(std::size_t tier, Nanos now);
  // False if copying from host memory takes clearly longer than recomputing.
  bool host_pays(double bytes_per_token, Nanos now);

 private:
  struct Tier {
    TransferModel reads;
    double waiting_bytes = 0;
    std::array<double, TenantShares::kMaxTenants> waiting_of{};  // of these, by tenant
    bool recompute = false;  // the last choice; the margin applies to a change
    bool probing = false;    // the next read replaces what was learned
    Nanos last_read{0};      // or last probe
  };
  // A prefix of the stretches and its estimated cost.
  struct Cut {
    std::uint32_t chunks = 0;
    double tokens = 0, copy_bytes = 0;
    std::array<double, kMaxTiers> tier_bytes{};
    double load_seconds = 0, compute_seconds = 0, gain = 0;
  };
  static void extend(Cut* cut, const Stretch& stretch, double chunks);
  void judge(Cut* cut, const DecisionInput& input) const;
  static bool in_time(const Cut& cut, const DecisionInput& input);
  Cut best_cut(const DecisionInput& input, Cut* whole) const;
  double hint(const DecisionInput& input, std::size_t tier) const;

  CostModelOptions options_;
  std::vector<Tier> tiers_;
  TransferModel copy_model_;
  Nanos last_host_load_{0};
  std::array<double, kMaxTiers> all_{};  // bytes of all stretches by tier; scratch of decide()
};

}  // namespace kv_offload
