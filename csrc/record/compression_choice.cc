// SPDX-License-Identifier: Apache-2.0
#include "record/compression_choice.h"

#include <algorithm>

namespace kv_offload {
namespace {

constexpr double kFade = 0.95;   // weight of the earlier ops after each op
constexpr double kWeight = 0.1;  // weight of the last payload in the mean

double mean(double before, double last) { return before > 0 ? before + kWeight * (last - before) : last; }

double per_mib_ms(double seconds_per_byte) { return seconds_per_byte * (1 << 20) * 1e3; }

}  // namespace

const char* to_string(Compress compress) {
  switch (compress) {
    case Compress::kNone:
      return "none";
    case Compress::kZstd:
      return "zstd";
    case Compress::kAuto:
      return "auto";
    case Compress::kLossy:
      return "lossy";
  }
  return "unknown";
}

// Ops and codec results are reported separately and slightly out of step, so a minimum of time always
// remains.
double CompressionChoice::Moved::seconds_per_stored_byte() const {
  constexpr double kLeast = 0.05;
  const double stored = std::max(raw_bytes - saved_bytes, raw_bytes * kLeast);
  return stored > 0 ? std::max(seconds - codec_seconds, seconds * kLeast) / stored : 0;
}

bool CompressionChoice::next_is_encoded(std::uint32_t group) {
  if (options_.compress == Compress::kNone) return false;
  const MutexLock lock(mutex_);
  if (options_.compress == Compress::kAuto && (!on_ || !is_16_bit_float(group))) return false;
  if (group >= groups_.size()) return true;
  Group& known = groups_[group];
  if (known.tried < kMinRecords || known.ratio >= PayloadCodec::kMinRatio) return true;
  known.passed_over = (known.passed_over + 1) % kTryAgain;
  return known.passed_over == 0;
}

void CompressionChoice::encoded(std::uint32_t group, std::uint64_t raw_bytes, std::uint64_t stored_bytes,
                                double seconds) {
  if (raw_bytes == 0 || stored_bytes == 0) return;
  const MutexLock lock(mutex_);
  const double raw = static_cast<double>(raw_bytes), stored = static_cast<double>(stored_bytes);
  if (group >= groups_.size()) groups_.resize(group + 1);
  Group& of_group = groups_[group];
  of_group.tried = std::min(of_group.tried + 1, kMinRecords);
  of_group.ratio = mean(of_group.ratio, raw / stored);
  if (seconds > 0) speed_.encode = mean(speed_.encode, raw / seconds);
  of(OpKind::kWrite).codec_seconds += seconds;
  of(OpKind::kWrite).saved_bytes += raw - stored;
  stats_.encode_seconds += seconds;
  if (stored_bytes >= raw_bytes) return;
  ratio_ = mean(ratio_, raw / stored);
  stats_.encoded_raw_bytes += raw_bytes;
  stats_.encoded_stored_bytes += stored_bytes;
}

void CompressionChoice::decoded(std::uint64_t raw_bytes, std::uint64_t stored_bytes, double seconds) {
  const MutexLock lock(mutex_);
  if (seconds > 0) speed_.decode = mean(speed_.decode, static_cast<double>(raw_bytes) / seconds);
  of(OpKind::kRead).codec_seconds += seconds;
  of(OpKind::kRead).saved_bytes += static_cast<double>(raw_bytes) - static_cast<double>(stored_bytes);
  stats_.decode_seconds += seconds;
}

void CompressionChoice::lost(const Loss& loss) {
  const MutexLock lock(mutex_);
  stats_.largest_key_error = std::max(stats_.largest_key_error, double{loss.keys});
  stats_.largest_value_error = std::max(stats_.largest_value_error, double{loss.values});
}

void CompressionChoice::moved(OpKind kind, std::uint64_t raw_bytes, double seconds) {
  if (raw_bytes == 0 || seconds <= 0) return;
  {
    const MutexLock lock(mutex_);
    Moved& moved = of(kind);
    moved.seconds += seconds;
    moved.raw_bytes += static_cast<double>(raw_bytes);
    // Last, because the codec's result for this op was reported before.
    for (double* sum : {&moved.seconds, &moved.raw_bytes, &moved.codec_seconds, &moved.saved_bytes})
      *sum *= kFade;
    moved.ops = std::min(moved.ops + 1, kMinOps);
    if (!is_decision_due()) return;
    deciding_ = true;
  }
  // Without the lock: the callback may read a file, and threads that call stats() must not wait for that.
  double idle_cores = -1;
  try {
    if (options_.idle_cores) idle_cores = options_.idle_cores();
  } catch (...) {  // idle cores stay unknown
  }
  const MutexLock lock(mutex_);
  deciding_ = false;
  decide(idle_cores);
}

CompressionChoice::Times CompressionChoice::times(OpKind kind) const {
  const Moved& moved = moved_[static_cast<std::size_t>(kind)];
  if (moved.ops < kMinOps) return {};
  const bool reads = kind == OpKind::kRead;
  const double known = reads ? speed_.decode : speed_.encode;
  const double speed = known > 0 ? known : (reads ? options_.expected.decode : options_.expected.encode);
  const double stored = moved.seconds_per_stored_byte();
  return {stored, stored / ratio_ + 1 / speed};
}

bool CompressionChoice::is_decision_due() {
  if (options_.compress != Compress::kAuto || deciding_) return false;
  if (times(OpKind::kRead).raw == 0 && times(OpKind::kWrite).raw == 0) return false;
  if (ops_until_decision_ == 0) return true;
  --ops_until_decision_;
  return false;
}

void CompressionChoice::decide(double idle_cores) {
  const Times reads = times(OpKind::kRead), writes = times(OpKind::kWrite);
  const Times& deciding = reads.raw > 0 ? reads : writes;
  // While it is on, the codec itself may be what keeps the last core busy.
  cores_are_scarce_ = idle_cores >= 0 && idle_cores < 1 && (!on_ || cores_are_scarce_);
  const Gain needed = cores_are_scarce_ ? kWithoutIdleCores : kWithIdleCores;
  const bool too_slow = writes.raw > 0 && writes.gain() * kSlowestWrites < 1;
  const bool on = !too_slow && deciding.gain() > (on_ ? needed.off : needed.on);
  if (on == on_) return;
  on_ = on;
  ops_until_decision_ = kOpsPerDecision;
}

CompressionStats CompressionChoice::stats() const {
  const MutexLock lock(mutex_);
  CompressionStats stats = stats_;
  stats.on = options_.compress == Compress::kAuto ? on_ : options_.compress != Compress::kNone;
  return stats;
}

std::string CompressionChoice::reason() const {
  // A fixed setting is its own reason.
  if (options_.compress != Compress::kAuto) {
    return fmt::format("{}: compress is {}", options_.compress == Compress::kNone ? "off" : "on",
                       to_string(options_.compress));
  }
  // Auto encodes only floating-point groups.
  if (std::none_of(options_.elements.begin(), options_.elements.end(),
                   [](Element element) { return is_16_bit(element); })) {
    return "off: the KV cache is neither bfloat16 nor float16";
  }
  const MutexLock lock(mutex_);
  const Times reads = times(OpKind::kRead), writes = times(OpKind::kWrite);
  // The same order as decide(): reads, else writes, else nothing is known yet.
  const bool by_reads = reads.raw > 0;
  const Times& deciding = by_reads ? reads : writes;
  if (deciding.raw == 0) return "off: too little was read or written to know the tier's speed";
  std::string why = fmt::format(
      "{}: a {} of 1 MiB takes {:.2f} ms raw and {:.2f} ms compressed (ratio {:.2f})", on_ ? "on" : "off",
      by_reads ? "read" : "write", per_mib_ms(deciding.raw), per_mib_ms(deciding.encoded), ratio_);
  if (writes.raw > 0 && writes.gain() * kSlowestWrites < 1) {
    // Writes that would become too slow keep the codec off whatever reads gain.
    why += fmt::format(", but a write takes {:.2f} ms instead of {:.2f} ms", per_mib_ms(writes.encoded),
                       per_mib_ms(writes.raw));
  }
  if (cores_are_scarce_) {
    // Scarce cores raise the threshold.
    why += fmt::format("; less than one core {} idle, so it must be {:.2f} times as fast", on_ ? "was" : "is",
                       on_ ? kWithoutIdleCores.off : kWithoutIdleCores.on);
  }
  return why;
}

}  // namespace kv_offload
