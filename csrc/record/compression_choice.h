// SPDX-License-Identifier: Apache-2.0
// CompressionChoice: decides whether to encode the next record of a tier (payload_codec.h). The setting says
// yes, no or auto. Auto compares the measured time of a raw read with the estimated time of an encoded read,
// decoding included. Reads decide, because requests wait for them; writes may become slower by at most
// kSlowestWrites. Until reads were measured, the speed of writes is used instead.
//
// Each direction of a switch has its own threshold, and a decision holds for a number of ops, so that it is
// not undone by its own effect. With less than one idle core the required gain is higher, because the codec
// takes a core from the engine. Cores that become busy while the codec is on do not raise it: the codec
// itself may be what keeps them busy.
//
// It measures nothing and knows no tier: the code that moves and encodes records reports the results.
// Threads: any.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/thread_annotations.h"
#include "record/lossy_codec.h"
#include "record/payload_codec.h"
#include "record/record_op.h"

namespace kv_offload {

enum class Compress : std::uint8_t { kNone, kZstd, kAuto, kLossy };

// Bytes of raw payload per second of one thread.
struct CodecSpeed {
  double encode = 0, decode = 0;
};

struct CompressionOptions {
  Compress compress = Compress::kNone;
  // kLossy only: the bounds of LossyCodec. Records of other elements, and records over a bound, are encoded
  // without loss.
  ErrorBounds bounds{};
  // By position of the group: lower the bounds of a calibrated tier. Null for a group without an entry.
  std::vector<std::shared_ptr<const BoundFactors>> factors{};
  // By position of the group: always encoded without loss. False for a group without an entry.
  std::vector<bool> exact{};
  // By position of the group; kBytes for a group without an entry.
  std::vector<Element> elements{};
  // The speeds that kAuto assumes until records were encoded and decoded.
  CodecSpeed expected{1.2e9, 2.5e9};
  // Returns the number of idle cores. Called before every decision, by one thread at a time that holds no
  // lock, so it may wait. Null: enough cores are idle.
  std::function<double()> idle_cores{};
  // Clock for measuring the codec. Must outlive the choice. Null: a steady clock.
  const Clock* clock = nullptr;
};

struct CompressionStats {
  bool on = false;            // a record would be encoded now
  double encode_seconds = 0;  // all of these: since the start
  double decode_seconds = 0;
  std::uint64_t encoded_raw_bytes = 0;     // records that were stored encoded: raw bytes
  std::uint64_t encoded_stored_bytes = 0;  // and encoded bytes
  // The largest relative errors of 64 elements in records that were stored with loss (Loss in lossy_codec.h).
  double largest_key_error = 0, largest_value_error = 0;
};

class CompressionChoice {
 public:
  static constexpr double kExpectedRatio = 1.45;  // of bf16 K/V
  // Turns on above `on` and off again below `off`: raw time over encoded time.
  struct Gain {
    double on, off;
  };
  static constexpr Gain kWithIdleCores{1.10, 1.03};
  static constexpr Gain kWithoutIdleCores{1.25, 1.15};
  static constexpr double kSlowestWrites = 2;      // encoded time over raw time
  static constexpr unsigned kMinOps = 8;           // of a kind, before its speed counts
  static constexpr unsigned kOpsPerDecision = 64;  // of both kinds, between two decisions
  static constexpr unsigned kMinRecords = 8;       // of a group, before its gain counts
  // A group that gained too little is retried with one record in this many.
  static constexpr unsigned kTryAgain = 64;

  explicit CompressionChoice(const CompressionOptions& options) : options_(options) {}

  Compress setting() const { return options_.compress; }
  // Zeros: records of this group must not lose anything.
  ErrorBounds bounds(std::uint32_t group) const {
    const bool exact = group < options_.exact.size() && options_.exact[group];
    return options_.compress == Compress::kLossy && !exact ? options_.bounds : ErrorBounds{};
  }
  // Null: none.
  const BoundFactors* factors(std::uint32_t group) const {
    return group < options_.factors.size() ? options_.factors[group].get() : nullptr;
  }
  const Clock& clock() const { return options_.clock != nullptr ? *options_.clock : steady_; }
  // Returns the element for the lossless codec, to which fp8 is bytes.
  Element lossless_element(std::uint32_t group) const {
    const Element found = element(group);
    return is_16_bit(found) ? found : Element::kBytes;
  }
  // Returns the element for the lossy codec; kBytes: records of this group are stored without loss.
  Element lossy_element(std::uint32_t group) const {
    return bounds(group).keys > 0 ? element(group) : Element::kBytes;
  }
  // Returns whether to encode the next record of the group. Call once before each write.
  bool next_is_encoded(std::uint32_t group) EXCLUDES(mutex_);
  // Reports that the codec processed a payload in `seconds`, for an op that will be reported with moved().
  // stored_bytes: equal to raw_bytes if encoding saved nothing.
  void encoded(std::uint32_t group, std::uint64_t raw_bytes, std::uint64_t stored_bytes, double seconds)
      EXCLUDES(mutex_);
  void decoded(std::uint64_t raw_bytes, std::uint64_t stored_bytes, double seconds) EXCLUDES(mutex_);
  // Reports that a record with this loss was stored.
  void lost(const Loss& loss) EXCLUDES(mutex_);
  // Reports that an op succeeded in `seconds`, codec time included. May ask for idle cores.
  void moved(OpKind kind, std::uint64_t raw_bytes, double seconds) EXCLUDES(mutex_);

  CompressionStats stats() const EXCLUDES(mutex_);
  // Returns the current choice and its reason: "on: a read of 1 MiB takes 2.10 ms raw and 1.75 ms compressed
  // (...)".
  std::string reason() const EXCLUDES(mutex_);

 private:
  // Sums over ops of one kind; older ops fade.
  struct Moved {
    double seconds = 0, raw_bytes = 0;
    double codec_seconds = 0, saved_bytes = 0;
    unsigned ops = 0;
    double seconds_per_stored_byte() const;
  };
  struct Group {
    double ratio = 0;    // 0: none was tried
    unsigned tried = 0;  // up to kMinRecords
    unsigned passed_over = 0;
  };
  // Seconds per byte of raw payload.
  struct Times {
    double raw = 0, encoded = 0;
    double gain() const { return encoded > 0 ? raw / encoded : 0; }
  };

  Element element(std::uint32_t group) const {
    return group < options_.elements.size() ? options_.elements[group] : Element::kBytes;
  }
  bool is_16_bit_float(std::uint32_t group) const { return is_16_bit(element(group)); }
  Times times(OpKind kind) const REQUIRES(mutex_);
  bool is_decision_due() REQUIRES(mutex_);
  void decide(double idle_cores) REQUIRES(mutex_);
  Moved& of(OpKind kind) REQUIRES(mutex_) { return moved_[static_cast<std::size_t>(kind)]; }

  const CompressionOptions options_;
  const SteadyClock steady_{};
  mutable Mutex mutex_;
  bool on_ GUARDED_BY(mutex_) = false;  // of kAuto
  unsigned ops_until_decision_ GUARDED_BY(mutex_) = 0;
  bool deciding_ GUARDED_BY(mutex_) = false;          // a thread is asking for idle cores and will decide
  bool cores_are_scarce_ GUARDED_BY(mutex_) = false;  // at the last decision; frozen while on
  std::array<Moved, 2> moved_ GUARDED_BY(mutex_);
  double ratio_ GUARDED_BY(mutex_) = kExpectedRatio;
  CodecSpeed speed_ GUARDED_BY(mutex_){};  // 0: not known
  std::vector<Group> groups_ GUARDED_BY(mutex_);
  CompressionStats stats_ GUARDED_BY(mutex_);
};

// Returns "auto", "none", "zstd" or "lossy".
const char* to_string(Compress compress);

}  // namespace kv_offload
