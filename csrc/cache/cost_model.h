// CostModel: is it faster to load a prefix than to compute it again, and how
// much of it. Pure arithmetic on what it is told; no clock, no tier of its own.
//
// Both sides are learnt online: prefill_model.h from the steps of the engine,
// transfer_model.h from every read of a tier and every copy to the device. What
// is unknown is loaded: that is how it is learnt. A choice is kept while the
// sides are close. A tier that is not used any more is probed now and then by
// reads that nobody waits for.
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

namespace kv_offload {

struct CostModelOptions {
  double margin = 0.93;  // a choice is left only when the other side's time is below this share of its own
  // A tier that was judged too slow is probed this long after its last read.
  Nanos probe_interval{std::chrono::seconds(30)};
  // Host memory is given up only when copying takes this many times as long as computing.
  double host_slowdown_limit = 2;
  PrefillOptions prefill{};
};

// A stretch of a prefix whose chunks are in one place.
struct Stretch {
  static constexpr std::int32_t kHere = -1;  // in host memory, or on the way there already
  std::int32_t tier = kHere;
  std::uint32_t chunks = 0;
  std::uint64_t tokens = 0;
  std::uint64_t bytes = 0;  // to copy; to read as well unless kHere
};

struct Decision {
  enum class Choice : std::uint8_t { kLoad, kPartial, kRecompute };
  Choice choice = Choice::kLoad;
  std::uint32_t chunks = 0;    // of the stretches, from the left: how many to load
  double load_seconds = 0;     // estimated for those (kRecompute: for all); 0 = unknown
  double compute_seconds = 0;  // likewise
};

class CostModel {
 public:
  static constexpr std::size_t kMaxTiers = 8;

  explicit CostModel(std::size_t tiers, CostModelOptions options = {})
      : prefill(options.prefill), options_(options), tiers_(tiers) {}

  PrefillModel prefill;

  // ---- what was measured
  // A read had arrived so long after it was submitted; `bytes_ahead`: what waited
  // on the tier when it was submitted, its own bytes included.
  void note_read(std::size_t tier, double bytes_ahead, double seconds, Nanos now);
  // A read is still not there.
  void note_overdue_read(std::size_t tier, double bytes_ahead, double seconds_so_far, Nanos now);
  void note_copy(double bytes, double seconds) { copy_.note(bytes, seconds); }

  // ---- what follows
  // Until `bytes` more have arrived; what waits there already counts. `hint`: the
  // tier's own estimate, used until something was measured. 0 = unknown.
  double read_seconds(std::size_t tier, double bytes, double hint) const;
  double read_bytes_per_second(std::size_t tier) const { return tiers_[tier].reads.bytes_per_second(); }
  const TransferModel& copy() const { return copy_; }
  void note_submitted(std::size_t tier, double bytes) { tiers_[tier].waiting_bytes += bytes; }
  void note_ended(std::size_t tier, double bytes) { tiers_[tier].waiting_bytes -= bytes; }
  double waiting_bytes(std::size_t tier) const { return tiers_[tier].waiting_bytes; }

  struct Question {
    std::span<const Stretch> stretches{};  // from the first chunk that is not in host memory on
    std::span<const double> hints{};       // per tier: see read_seconds, for all of its bytes
    double context = 0;                    // tokens before the stretches
    bool loads_anyway = false;             // something before them is loaded
    bool divisible = true;                 // some of them from the left are of use without the rest
    double deadline_seconds = 0;           // what arrives later is of no use
  };
  Decision decide(const Question& question);
  // What lies on this tier was computed again, the last time that there was a choice.
  bool computes_instead_of(std::size_t tier) const { return tiers_[tier].recompute; }
  // Whether a tier that is not used should be probed now; then it counts as probed.
  bool should_probe(std::size_t tier, Nanos now);
  // Reads that are under way are a probe from now on.
  void begin_probe(std::size_t tier, Nanos now);
  // False when copying this from host memory takes clearly longer than computing it.
  bool host_pays(double bytes_per_token, Nanos now);

 private:
  struct Tier {
    TransferModel reads;
    double waiting_bytes = 0;
    bool recompute = false;  // the last choice: changing it takes the margin
    bool probing = false;    // the next read tells it anew
    Nanos last_read{0};      // or probe
  };
  // A prefix of the stretches, and what it would take.
  struct Cut {
    std::uint32_t chunks = 0;
    double tokens = 0, copy_bytes = 0;
    std::array<double, kMaxTiers> tier_bytes{};
    double load_seconds = 0, compute_seconds = 0, gain = 0;
  };
  static void extend(Cut* cut, const Stretch& stretch, double chunks);
  void judge(Cut* cut, const Question& question) const;
  static bool in_time(const Cut& cut, const Question& question);
  Cut best_cut(const Question& question, Cut* whole) const;
  double hint(const Question& question, std::size_t tier) const;

  CostModelOptions options_;
  std::vector<Tier> tiers_;
  TransferModel copy_;
  Nanos last_host_load_{0};
  std::array<double, kMaxTiers> all_{};  // bytes of all stretches, by tier: scratch of decide
};

}  // namespace kv_offload
