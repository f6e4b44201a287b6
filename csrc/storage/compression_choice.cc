#include "storage/compression_choice.h"

#include <algorithm>
#include <cmath>

namespace kv_offload {
namespace {

constexpr double kFade = 0.95;  // of what ops before the last one count
constexpr double kFadeOfShares = 0.995;
constexpr double kWeight = 0.1;  // of the last payload beside those before

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
  }
  return "unknown";
}

void CodecComparison::add(bool is_encoded, double seconds_per_byte) {
  Sum& sum = is_encoded ? encoded_ : raw_;
  sum.logarithms += std::log(seconds_per_byte);
  ++sum.ops;
  if (raw_.ops > 0 && encoded_.ops > 0) {
    if (raw_.ops + encoded_.ops < kOpsInBlock) return;
    constexpr double kFadeOfBlocks = 0.95;
    const double most = std::log(2);
    faded_ = faded_ * kFadeOfBlocks + std::clamp(raw_.mean() - encoded_.mean(), -most, most);
    weight_ = weight_ * kFadeOfBlocks + 1;
    blocks_ = std::min(blocks_ + 1, kBlocksToKnow);
  } else if (sum.ops < kMostOpsInBlock) {
    return;
  }
  raw_ = encoded_ = {};
}

double CodecComparison::gain() const { return blocks_ < kBlocksToKnow ? 0 : std::exp(faded_ / weight_); }

// What is known of ops is not exact to the last nanosecond: some time is always left.
double CompressionChoice::Moved::seconds_per_stored_byte() const {
  constexpr double kLeast = 0.05;
  const double stored = std::max(raw_bytes - saved_bytes, raw_bytes * kLeast);
  return stored > 0 ? std::max(seconds - codec_seconds, seconds * kLeast) / stored : 0;
}

CompressionChoice::CompressionChoice(const CompressionOptions& options) : options_(options) {
  begun_.reserve(kMostBegun);  // an op that was stored does not fail for want of memory
}

// Until it is known: yes.
bool CompressionChoice::gains(std::uint32_t group) const {
  if (group >= groups_.size()) return true;
  const Group& known = groups_[group];
  return known.tried < kRecordsToKnow || known.ratio >= PayloadCodec::kMinRatio;
}

CompressionChoice::Group& CompressionChoice::group_of(std::uint32_t group) {
  if (group >= groups_.size()) groups_.resize(group + 1);
  return groups_[group];
}

bool CompressionChoice::is_to_encode(const ChunkKey& key, std::uint32_t group) {
  if (options_.compress == Compress::kNone) return false;
  const MutexLock lock(mutex_);
  if (options_.compress == Compress::kAuto) {
    if (!is_float(group)) return false;
    const bool other_way = is_compared(key) && reckoned(options_.expected.decode).gain() >= kHopeless;
    if (on_ == other_way) return false;
  }
  if (gains(group)) return true;
  Group& known = groups_[group];
  known.passed_over = (known.passed_over + 1) % kTryAgain;
  return known.passed_over == 0;
}

void CompressionChoice::begin(const Begun& begun) {
  if (begun_.size() == kMostBegun) begun_.erase(begun_.begin());
  begun_.push_back(begun);
}

std::optional<CompressionChoice::Begun> CompressionChoice::take(OpId op) {
  const auto found = std::find_if(begun_.rbegin(), begun_.rend(), [&](const Begun& b) { return b.op == op; });
  if (found == begun_.rend()) return std::nullopt;
  const Begun begun = *found;
  std::erase_if(begun_, [&](const Begun& each) { return each.op == op; });
  return begun;
}

void CompressionChoice::encoded(const TierOp& op, std::uint64_t raw_bytes, std::uint64_t stored_bytes,
                                double seconds) {
  if (raw_bytes == 0 || stored_bytes == 0) return;
  const MutexLock lock(mutex_);
  const double raw = static_cast<double>(raw_bytes), stored = static_cast<double>(stored_bytes);
  Group& of_group = group_of(op.group);
  of_group.tried = std::min(of_group.tried + 1, kRecordsToKnow);
  of_group.ratio = mean(of_group.ratio, raw / stored);
  if (seconds > 0) speed_.encode = mean(speed_.encode, raw / seconds);
  begin({.op = op.id, .group = op.group, .codec_seconds = seconds, .saved_bytes = raw - stored});
  stats_.encode_seconds += seconds;
  if (stored_bytes >= raw_bytes) return;
  ratio_ = mean(ratio_, raw / stored);
  stats_.encoded_raw_bytes += raw_bytes;
  stats_.encoded_stored_bytes += stored_bytes;
}

bool CompressionChoice::is_comparable(const TierOp& op, bool is_encoded) const {
  return is_float(op.group) && gains(op.group) && is_encoded == (on_ != is_compared(op.key));
}

void CompressionChoice::decoded(const TierOp& op, std::uint64_t raw_bytes, std::uint64_t stored_bytes,
                                double seconds) {
  const MutexLock lock(mutex_);
  if (seconds > 0) speed_.decode = mean(speed_.decode, static_cast<double>(raw_bytes) / seconds);
  begin({.op = op.id,
         .group = op.group,
         .codec_seconds = seconds,
         .saved_bytes = static_cast<double>(raw_bytes) - static_cast<double>(stored_bytes),
         .is_compared = is_comparable(op, true),
         .is_encoded = true});
  stats_.decode_seconds += seconds;
}

void CompressionChoice::found_raw(const TierOp& op) {
  const MutexLock lock(mutex_);
  if (is_comparable(op, false)) begin({.op = op.id, .group = op.group, .is_compared = true});
}

void CompressionChoice::failed(OpId op) {
  const MutexLock lock(mutex_);
  (void)take(op);
}

void CompressionChoice::moved(OpId op, OpKind kind, std::uint64_t raw_bytes, double seconds) {
  {
    const MutexLock lock(mutex_);
    const std::optional<Begun> begun = take(op);
    if (raw_bytes == 0 || seconds <= 0) return;
    const double raw = static_cast<double>(raw_bytes);
    Moved& moved = of(kind);
    moved.seconds += seconds;
    moved.raw_bytes += raw;
    if (begun) {
      moved.codec_seconds += begun->codec_seconds;
      moved.saved_bytes += begun->saved_bytes;
      if (kind == OpKind::kRead && begun->is_compared) {
        Group& group = group_of(begun->group);
        group.comparison.add(begun->is_encoded, seconds / raw);
        group.read_bytes += raw;
        for (Group& each : groups_) each.read_bytes *= kFadeOfShares;
      }
    }
    for (double* sum : {&moved.seconds, &moved.raw_bytes, &moved.codec_seconds, &moved.saved_bytes})
      *sum *= kFade;
    moved.ops = std::min(moved.ops + 1, kOpsToKnow);
    if (!is_to_decide()) return;
    deciding_ = true;
  }
  // It may read a file, and stats() is asked by threads that wait for none.
  double idle_cores = -1;
  try {
    if (options_.idle_cores) idle_cores = options_.idle_cores();
  } catch (...) {  // not known, then
  }
  const MutexLock lock(mutex_);
  deciding_ = false;
  decide(idle_cores);
}

CompressionChoice::Times CompressionChoice::reckoned(OpKind kind, double least_speed) const {
  const Moved& moved = moved_[static_cast<std::size_t>(kind)];
  if (moved.ops < kOpsToKnow) return {};
  const bool reads = kind == OpKind::kRead;
  const double known = reads ? speed_.decode : speed_.encode;
  const double expected = reads ? options_.expected.decode : options_.expected.encode;
  const double speed = std::max(known > 0 ? known : expected, least_speed);
  const double stored = moved.seconds_per_stored_byte();
  return {stored, stored / ratio_ + 1 / speed};
}

CompressionChoice::Times CompressionChoice::reckoned(double least_speed) const {
  const Times reads = reckoned(OpKind::kRead, least_speed);
  return reads.raw > 0 ? reads : reckoned(OpKind::kWrite, least_speed);
}

double CompressionChoice::compared() const {
  double sum = 0, weight = 0;
  for (const Group& group : groups_) {
    const double gain = group.comparison.gain();
    if (gain <= 0) continue;
    sum += group.read_bytes * std::log(gain);
    weight += group.read_bytes;
  }
  return weight > 0 ? std::exp(sum / weight) : 0;
}

double CompressionChoice::gain() const {
  const double expected = reckoned().gain(), seen = compared();
  return seen > 0 && seen < (on_ ? kLoss.off : kLoss.on) ? std::min(expected, seen) : expected;
}

bool CompressionChoice::is_to_decide() {
  if (options_.compress != Compress::kAuto || deciding_ || reckoned().raw == 0) return false;
  if (ops_until_decision_ == 0) return true;
  --ops_until_decision_;
  return false;
}

void CompressionChoice::decide(double idle_cores) {
  const Times writes = reckoned(OpKind::kWrite);
  // While it is on, the codec itself may be what keeps the last core busy.
  cores_are_scarce_ = idle_cores >= 0 && idle_cores < 1 && (!on_ || cores_are_scarce_);
  const Gain needed = cores_are_scarce_ ? kWithoutIdleCores : kWithIdleCores;
  const bool too_slow = writes.raw > 0 && writes.gain() * kSlowestWrites < 1;
  const bool on = !too_slow && gain() > (on_ ? needed.off : needed.on);
  if (on == on_) return;
  on_ = on;
  ops_until_decision_ = kOpsToSettle;
}

CompressionStats CompressionChoice::stats() const {
  const MutexLock lock(mutex_);
  CompressionStats stats = stats_;
  stats.on = options_.compress == Compress::kZstd || (options_.compress == Compress::kAuto && on_);
  return stats;
}

std::string CompressionChoice::reason() const {
  if (options_.compress != Compress::kAuto) {
    return options_.compress == Compress::kZstd ? "on: compress is zstd" : "off: compress is none";
  }
  if (std::none_of(options_.elements.begin(), options_.elements.end(),
                   [](Element element) { return element != Element::kBytes; })) {
    return "off: the KV cache is neither bfloat16 nor float16";
  }
  const MutexLock lock(mutex_);
  const Times times = reckoned(), writes = reckoned(OpKind::kWrite);
  if (times.raw == 0) return "off: too little was read or written to know the tier's speed";
  std::string why = fmt::format("{}: a {} of 1 MiB takes {:.2f} ms raw and {:.2f} ms encoded (ratio {:.2f})",
                                on_ ? "on" : "off", reckoned(OpKind::kRead).raw > 0 ? "read" : "write",
                                per_mib_ms(times.raw), per_mib_ms(times.encoded), ratio_);
  if (const double seen = compared(); seen > 0) {
    why += fmt::format("; side by side, encoded reads are {:.2f} times as fast", seen);
  }
  if (writes.raw > 0 && writes.gain() * kSlowestWrites < 1) {
    why += fmt::format(", but a write {:.2f} ms instead of {:.2f} ms", per_mib_ms(writes.encoded),
                       per_mib_ms(writes.raw));
  }
  if (cores_are_scarce_) {
    why += fmt::format("; less than a core {} idle, so it has to be {:.2f} times as fast", on_ ? "was" : "is",
                       on_ ? kWithoutIdleCores.off : kWithoutIdleCores.on);
  }
  return why;
}

}  // namespace kv_offload
