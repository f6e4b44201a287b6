// SPDX-License-Identifier: Apache-2.0
#include "policy/reuse_sampler.h"

#include <algorithm>
#include <cassert>
#include <utility>

#include "base/steps.h"

namespace kv_offload {

void ReuseSampler::used(ChunkId id, const Use& use) {
  if (!sampled(id)) return;
  const std::uint32_t at = find(id);
  if (at == kNone) return add(id, use);
  unlink(at);
  if (!use.branched) {
    Sample& sample = samples_[at];
    const unsigned bucket = ReusePredictor::bucket_of(use.now - sample.time);
    catch_up(sample, bucket);
    const unsigned of_class = class_of(sample);
    if (bucket == 0) predictor_.reached(of_class, 0);
    predictor_.returned(of_class, bucket);
  }
  restart_sample(at, use);
}

void ReuseSampler::renewed(ChunkId id, const Use& use) {
  if (!sampled(id)) return;
  const std::uint32_t at = find(id);
  if (at == kNone) return add(id, use);
  unlink(at);
  restart_sample(at, use);
}

// An earlier request's use stays an end: that request ended here, even if another one continued. (Newly
// stored chunks are reported deepest first. So the use that brings this request here, and counts as a reuse,
// is yet to come.)
void ReuseSampler::extended(ChunkId id, RequestClasses::Record record) {
  if (!sampled(id)) return;
  const std::uint32_t at = find(id);
  if (at != kNone && samples_[at].record == record) samples_[at].end = false;
}

// REQUIRES: linked in no list.
void ReuseSampler::restart_sample(std::uint32_t at, const Use& use) {
  Sample& sample = samples_[at];
  classes_.release(std::exchange(sample.record, classes_.add_reference(use.record)));
  sample.time = use.now;
  sample.bucket = 0;
  sample.end = use.end;
  sample.used = use.used;
  link(at);
}

// Counts the ages that the sample reached since the last call. (The first age is counted when the sample
// leaves it: until then its request may still be growing.)
void ReuseSampler::catch_up(Sample& sample, unsigned bucket) {
  const unsigned of_class = class_of(sample);
  for (; sample.bucket < bucket; ++sample.bucket) {
    if (sample.bucket == 0) predictor_.reached(of_class, 0);
    predictor_.reached(of_class, sample.bucket + 1u);
  }
}

void ReuseSampler::advance(std::uint64_t now, std::uint64_t horizon) {
  for (unsigned b = 0; b + 1 < ReusePredictor::kBuckets; ++b) {
    if (now >= due_[b]) cross(b, now);
  }
  for (int dropped = 0; dropped < kDropsPerAdvance && by_time_.oldest != kNone; ++dropped) {
    const Sample& sample = samples_[by_time_.oldest];
    if (now - sample.time <= horizon && sampled(sample.id)) break;
    drop(by_time_.oldest);
  }
}

// Moves and counts the samples that have outgrown this bucket.
void ReuseSampler::cross(unsigned bucket, std::uint64_t now) {
  const std::uint64_t edge = ReusePredictor::edge(bucket + 1);
  std::array<std::uint32_t, ReusePredictor::kClasses> counts{};
  std::uint32_t at = crossed_[bucket] == kNone ? by_time_.oldest : samples_[crossed_[bucket]].newer;
  int left = kCrossingsPerBucket;
  // Samples that have not crossed the younger buckets yet must do that first.
  for (; at != kNone && now - samples_[at].time >= edge && samples_[at].bucket == bucket;
       at = samples_[at].newer) {
    if (left-- == 0) break;
    Sample& sample = samples_[at];
    __builtin_prefetch(&sample + 4);
    ++counts[class_of(sample)];
    sample.bucket = static_cast<std::uint8_t>(bucket + 1);
    crossed_[bucket] = at;
  }
  due_[bucket] = (at == kNone ? now : samples_[at].time) + edge;
  count_steps(static_cast<std::uint64_t>(kCrossingsPerBucket - std::max(left, 0)));
  for (unsigned c = 0; c < counts.size(); ++c) {
    if (counts[c] == 0) continue;
    if (bucket == 0) predictor_.reached(c, 0, counts[c]);
    predictor_.reached(c, bucket + 1, counts[c]);
  }
}

void ReuseSampler::add(ChunkId id, const Use& use) {
  sweep();
  if (by_id_.size() == kMaxSamples) {
    if (swept_ >= samples_.size()) {
      skip_mask_ = 2 * skip_mask_ + 1;
      swept_ = 0;
    }
    drop(by_time_.oldest);
    if (!sampled(id)) return;
  }
  const std::uint32_t at = by_id_.find_or_add(id, id_of(), [&] { return take_free(); });
  samples_[at] = {.id = id,
                  .time = use.now,
                  .record = classes_.add_reference(use.record),
                  .end = use.end,
                  .used = use.used};
  link(at);
  if (by_id_.size() == kMaxSamples) by_id_.prefetch(samples_[by_time_.oldest].id);  // the next to drop
}

std::uint32_t ReuseSampler::take_free() {
  const std::uint32_t at = first_free_;
  if (at == kNone) {
    samples_.push_back(Sample{});
    return static_cast<std::uint32_t>(samples_.size() - 1);
  }
  first_free_ = samples_[at].newer;
  if (first_free_ == kNone) last_free_ = kNone;
  return at;
}

// A few per new sample: sweeping all at once would take too long.
void ReuseSampler::sweep() {
  const std::size_t end = std::min(samples_.size(), swept_ + kSweepsPerAdvance);
  for (; swept_ < end; ++swept_) {
    const ChunkId id = samples_[swept_].id;
    if (id != 0 && !sampled(id)) drop(static_cast<std::uint32_t>(swept_));
  }
}

void ReuseSampler::drop(std::uint32_t at) {
  unlink(at);
  by_id_.erase(samples_[at].id, id_of());
  classes_.release(samples_[at].record);
  samples_[at].id = 0;
  samples_[at].newer = kNone;
  (last_free_ == kNone ? first_free_ : samples_[last_free_].newer) = at;
  last_free_ = at;
}

// Links the sample as the newest.
void ReuseSampler::link(std::uint32_t at) {
  assert(samples_[at].bucket == 0);
  by_time_.link_newest(samples_, at);
}

void ReuseSampler::unlink(std::uint32_t at) {
  const Sample& sample = samples_[at];
  for (unsigned b = sample.newer == kNone ? 0 : samples_[sample.newer].bucket; b < sample.bucket; ++b) {
    assert(crossed_[b] == at);
    crossed_[b] = sample.older;
  }
  by_time_.unlink(samples_, at);
}

}  // namespace kv_offload
