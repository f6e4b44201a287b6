// CompressionChoice: is the next record of a tier to be encoded (payload_codec.h). The setting says yes or
// no, or leaves it to what was measured: the time that a read takes raw against what it would take encoded,
// with decoding. Reads decide, because requests wait for them; writes may become slower by kSlowestWrites at
// most. Until there were reads, the speed of writes stands for theirs.
//
// What the other way would take is reckoned: as if the device took all of a read's time, and each byte as
// much of it. It does not where threads wait for a core, or each request has a latency of its own. Therefore
// one record in kComparedOneIn, chosen by its key, is stored the other way, and reads of both are compared
// (CodecComparison). Only a clear loss that they show counts. What they gain does not: a read waits for
// others as well, which would be shorter if all were encoded, and neither way shows that. No record is stored
// the other way where even a codec as fast as expected would lose much (kHopeless).
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
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/thread_annotations.h"
#include "policy/eviction_policy.h"
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
  bool on = false;            // are records encoded now, but for those that are compared
  double encode_seconds = 0;  // all of these: since the start
  double decode_seconds = 0;
  std::uint64_t encoded_raw_bytes = 0;     // of records that were stored encoded: what they were
  std::uint64_t encoded_stored_bytes = 0;  // and what they became
};

// Reads of raw and of encoded records of one group, side by side: a block ends when there were reads of both.
// So what makes a tier slower or faster for a while does so for both, however rare one of them is. Means are
// of logarithms, and no block says more than a factor of two: a read that stood still changes little.
class CodecComparison {
 public:
  static constexpr unsigned kBlocksToKnow = 8;
  static constexpr unsigned kOpsInBlock = 16;       // or more, until there was one of each
  static constexpr unsigned kMostOpsInBlock = 256;  // of one way alone: it begins anew

  // REQUIRES: above 0.
  void add(bool is_encoded, double seconds_per_byte);
  // Time raw over time encoded, of bytes of raw payload; 0 until enough is known.
  double gain() const;

 private:
  struct Sum {
    double logarithms = 0;
    unsigned ops = 0;
    double mean() const { return logarithms / ops; }
  };
  Sum raw_, encoded_;              // of the block that has not ended
  double faded_ = 0, weight_ = 0;  // of the blocks before: logarithms of gains, older ones less
  unsigned blocks_ = 0;
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
  static constexpr unsigned kComparedOneIn = 32;  // of the records
  static constexpr double kHopeless = 0.8;        // reckoned time raw over time encoded
  // Compared, below this it is a loss: to switch it on, and while it is on. Not nearer to 1: on a device that
  // serves one read after another, encoded reads may be 0.9 times as fast as raw ones beside them, and all
  // would be faster if all were encoded.
  static constexpr Gain kLoss{0.90, 0.85};

  explicit CompressionChoice(const CompressionOptions& options);

  // Is it one of those that are stored the other way.
  static bool is_compared(const ChunkKey& key) {
    // Not by the lowest bits, by which a table may have chosen.
    return (chunk_id(key) >> 20) % kComparedOneIn == 0;
  }

  Compress setting() const { return options_.compress; }
  const Clock& clock() const { return options_.clock != nullptr ? *options_.clock : steady_; }
  Element element(std::uint32_t group) const {
    return group < options_.elements.size() ? options_.elements[group] : Element::kBytes;
  }
  // Before a record of the group is written.
  bool is_to_encode(const ChunkKey& key, std::uint32_t group) EXCLUDES(mutex_);
  // A payload went through the codec in so many seconds, for an op of which moved() or failed() will be told.
  // stored_bytes: raw_bytes where it gained nothing.
  void encoded(const TierOp& op, std::uint64_t raw_bytes, std::uint64_t stored_bytes, double seconds)
      EXCLUDES(mutex_);
  void decoded(const TierOp& op, std::uint64_t raw_bytes, std::uint64_t stored_bytes, double seconds)
      EXCLUDES(mutex_);
  // A read found a record raw that might have been encoded; as decoded().
  void found_raw(const TierOp& op) EXCLUDES(mutex_);
  // An op ended well in so many seconds, those of the codec among them. May ask for idle cores.
  void moved(OpId op, OpKind kind, std::uint64_t raw_bytes, double seconds) EXCLUDES(mutex_);
  void failed(OpId op) EXCLUDES(mutex_);

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
    double read_bytes = 0;  // lately, of those that are compared
    CodecComparison comparison;
  };
  // Seconds for a byte of raw payload.
  struct Times {
    double raw = 0, encoded = 0;  // 0: not known
    double gain() const { return encoded > 0 ? raw / encoded : 0; }
  };
  // What is known of an op before its end.
  struct Begun {
    OpId op = 0;
    std::uint32_t group = 0;
    double codec_seconds = 0, saved_bytes = 0;
    bool is_compared = false, is_encoded = false;
  };
  static constexpr std::size_t kMostBegun = 256;  // an op that is told of and never ends

  bool is_float(std::uint32_t group) const { return element(group) != Element::kBytes; }
  bool gains(std::uint32_t group) const REQUIRES(mutex_);
  Group& group_of(std::uint32_t group) REQUIRES(mutex_);
  // Is the form that a read found the one that the record would be given now. Others are of another age, too.
  bool is_comparable(const TierOp& op, bool is_encoded) const REQUIRES(mutex_);
  // With a codec at least as fast as that.
  Times reckoned(OpKind kind, double least_speed = 0) const REQUIRES(mutex_);
  // Of reads, else of writes.
  Times reckoned(double least_speed = 0) const REQUIRES(mutex_);
  double compared() const REQUIRES(mutex_);  // the gain; 0: not known
  double gain() const REQUIRES(mutex_);      // what decides
  void begin(const Begun& begun) REQUIRES(mutex_);
  std::optional<Begun> take(OpId op) REQUIRES(mutex_);
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
  std::vector<Begun> begun_ GUARDED_BY(mutex_);  // in the order of their beginning
  double ratio_ GUARDED_BY(mutex_) = kExpectedRatio;
  CodecSpeed speed_ GUARDED_BY(mutex_){};  // 0: not known
  std::vector<Group> groups_ GUARDED_BY(mutex_);
  CompressionStats stats_ GUARDED_BY(mutex_);
};

// "auto", "none", "zstd".
const char* to_string(Compress compress);

}  // namespace kv_offload
