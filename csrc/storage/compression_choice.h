// CompressionChoice: is the next record of a tier to be encoded (payload_codec.h). The setting says yes or
// no, or leaves it to what was measured: the time that a read takes raw against what it would take encoded,
// with decoding. Reads decide, because requests wait for them; writes may become slower by kSlowestWrites at
// most. Until there were reads, the speed of writes stands for theirs.
//
// Switching has a threshold each way, and settles for a number of ops, so that a decision is not undone by
// its own effect. Where fewer than one core is idle, more has to be gained: the codec takes a core from the
// engine. Cores that become busy while it is on change nothing: the codec itself may be what keeps them busy.
//
// It measures nothing and knows no tier: who moves and encodes records says here what came of it. Threads:
// any.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/thread_annotations.h"
#include "storage/payload_codec.h"
#include "storage/tier.h"

namespace kv_offload {

enum class Compress : std::uint8_t { kNone, kZstd, kAuto };

// Bytes of raw payload per second, of one thread.
struct CodecSpeed {
  double encode = 0, decode = 0;
};

struct CompressionOptions {
  Compress compress = Compress::kNone;
  // By position of the group; of a group that is not named, kBytes.
  std::vector<Element> elements{};
  // What kAuto expects until records were encoded and decoded.
  CodecSpeed expected{1.2e9, 2.5e9};
  // How many cores nobody uses; asked before every decision, by one thread at a time that holds no lock, so
  // that it may wait. Null: enough.
  std::function<double()> idle_cores{};
  // Who encodes and decodes measures by it. Outlives the choice. Null: a steady clock.
  const Clock* clock = nullptr;
};

struct CompressionStats {
  bool on = false;            // would a record be encoded now
  double encode_seconds = 0;  // all of these: since the start
  double decode_seconds = 0;
  std::uint64_t encoded_raw_bytes = 0;     // of records that were stored encoded: what they were
  std::uint64_t encoded_stored_bytes = 0;  // and what they became
};

class CompressionChoice {
 public:
  static constexpr double kExpectedRatio = 1.45;  // of K/V in bf16
  // On above the first, off again below the second: time raw over time encoded.
  struct Gain {
    double on, off;
  };
  static constexpr Gain kWithIdleCores{1.10, 1.03};
  static constexpr Gain kWithoutIdleCores{1.25, 1.15};
  static constexpr double kSlowestWrites = 2;    // time encoded over time raw
  static constexpr unsigned kOpsToKnow = 8;      // of a kind, before its speed counts
  static constexpr unsigned kOpsToSettle = 64;   // of both kinds, between two decisions
  static constexpr unsigned kRecordsToKnow = 8;  // of a group, before what it gains counts
  // Of a group that gained too little: which of its records are tried again, one in so many.
  static constexpr unsigned kTryAgain = 64;

  explicit CompressionChoice(const CompressionOptions& options) : options_(options) {}

  Compress setting() const { return options_.compress; }
  const Clock& clock() const { return options_.clock != nullptr ? *options_.clock : steady_; }
  Element element(std::uint32_t group) const {
    return group < options_.elements.size() ? options_.elements[group] : Element::kBytes;
  }
  // Before a record of the group is written.
  bool next_is_encoded(std::uint32_t group) EXCLUDES(mutex_);
  // A payload went through the codec in so many seconds, for an op of which moved() will be told.
  // stored_bytes: raw_bytes where it gained nothing.
  void encoded(std::uint32_t group, std::uint64_t raw_bytes, std::uint64_t stored_bytes, double seconds)
      EXCLUDES(mutex_);
  void decoded(std::uint64_t raw_bytes, std::uint64_t stored_bytes, double seconds) EXCLUDES(mutex_);
  // An op ended well in so many seconds, those of the codec among them. May ask for idle cores.
  void moved(OpKind kind, std::uint64_t raw_bytes, double seconds) EXCLUDES(mutex_);

  CompressionStats stats() const EXCLUDES(mutex_);
  // "on: a read of 1 MiB takes 2.10 ms raw and 1.75 ms encoded (...)". What is on, and why.
  std::string reason() const EXCLUDES(mutex_);

 private:
  // Of one kind of op; older ones fade.
  struct Moved {
    double seconds = 0, raw_bytes = 0;
    double codec_seconds = 0, saved_bytes = 0;
    unsigned ops = 0;
    double seconds_per_stored_byte() const;
  };
  struct Group {
    double ratio = 0;    // 0: none was tried
    unsigned tried = 0;  // up to kRecordsToKnow
    unsigned passed_over = 0;
  };
  // Seconds for a byte of raw payload.
  struct Times {
    double raw = 0, encoded = 0;
    double gain() const { return encoded > 0 ? raw / encoded : 0; }
  };

  bool is_float(std::uint32_t group) const { return element(group) != Element::kBytes; }
  Times times(OpKind kind) const REQUIRES(mutex_);
  bool is_to_decide() REQUIRES(mutex_);
  void decide(double idle_cores) REQUIRES(mutex_);
  Moved& of(OpKind kind) REQUIRES(mutex_) { return moved_[static_cast<std::size_t>(kind)]; }

  const CompressionOptions options_;
  const SteadyClock steady_{};
  mutable Mutex mutex_;
  bool on_ GUARDED_BY(mutex_) = false;  // of kAuto
  unsigned ops_until_decision_ GUARDED_BY(mutex_) = 0;
  bool deciding_ GUARDED_BY(mutex_) = false;          // a thread asks for idle cores, and decides then
  bool cores_are_scarce_ GUARDED_BY(mutex_) = false;  // at the last decision; while on, as it was before
  std::array<Moved, 2> moved_ GUARDED_BY(mutex_);
  double ratio_ GUARDED_BY(mutex_) = kExpectedRatio;
  CodecSpeed speed_ GUARDED_BY(mutex_){};  // 0: not known
  std::vector<Group> groups_ GUARDED_BY(mutex_);
  CompressionStats stats_ GUARDED_BY(mutex_);
};

// "auto", "none", "zstd".
const char* to_string(Compress compress);

}  // namespace kv_offload
