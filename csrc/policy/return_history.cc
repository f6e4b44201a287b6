#include "policy/return_history.h"

#include <algorithm>
#include <utility>

namespace kv_offload {

void ReturnHistory::used(ChunkId id, RequestClasses::Record record, std::uint64_t now, bool branched) {
  if (!sampled(id)) return;
  const std::uint32_t at = by_id_.find(id);
  if (at == kNone) return add(id, record, now);
  unlink(at);
  if (!branched) {
    Sample& sample = samples_[at];
    const unsigned bucket = ReturnModel::bucket_of(now - sample.time);
    catch_up(sample, bucket);
    const unsigned of_class = classes_.class_of(sample.record);
    if (bucket == 0) model_.reached(of_class, 0);
    model_.returned(of_class, bucket);
  }
  begin_again(at, record, now);
}

void ReturnHistory::renewed(ChunkId id, RequestClasses::Record record, std::uint64_t now) {
  if (!sampled(id)) return;
  const std::uint32_t at = by_id_.find(id);
  if (at == kNone) return add(id, record, now);
  unlink(at);
  begin_again(at, record, now);
}

// REQUIRES: in no queue.
void ReturnHistory::begin_again(std::uint32_t at, RequestClasses::Record record, std::uint64_t now) {
  Sample& sample = samples_[at];
  classes_.release(std::exchange(sample.record, classes_.refer_again(record)));
  sample.time = now;
  sample.bucket = 0;
  link(at);
}

// Counts the ages that it reached since it was looked at. (The first one is
// counted when it is left: until then its request may still be growing.)
void ReturnHistory::catch_up(Sample& sample, unsigned bucket) {
  const unsigned of_class = classes_.class_of(sample.record);
  for (; sample.bucket < bucket; ++sample.bucket) {
    if (sample.bucket == 0) model_.reached(of_class, 0);
    model_.reached(of_class, sample.bucket + 1u);
  }
}

void ReturnHistory::advance(std::uint64_t now, std::uint64_t horizon) {
  for (unsigned b = 0; b + 1 < ReturnModel::kBuckets; ++b) {
    for (std::uint32_t at = queues_[b].oldest; at != kNone; at = queues_[b].oldest) {
      const unsigned bucket = ReturnModel::bucket_of(now - samples_[at].time);
      if (bucket <= b) break;
      unlink(at);
      catch_up(samples_[at], bucket);
      link(at);
    }
  }
  while (by_id_.size() > 0) {
    const std::uint32_t at = oldest();
    if (now - samples_[at].time <= horizon && sampled(samples_[at].id)) break;
    drop(at);
  }
}

void ReturnHistory::add(ChunkId id, RequestClasses::Record record, std::uint64_t now) {
  sweep();
  if (by_id_.size() == kMaxSamples) {
    if (swept_ >= samples_.size()) {
      skip_mask_ = 2 * skip_mask_ + 1;
      swept_ = 0;
    }
    drop(oldest());
    if (!sampled(id)) return;
  }
  if (free_.empty()) {
    free_.push_back(static_cast<std::uint32_t>(samples_.size()));
    samples_.emplace_back();
  }
  const std::uint32_t at = free_.back();
  free_.pop_back();
  samples_[at] = {id, now, classes_.refer_again(record), kNone, kNone, 0};
  by_id_.at(id) = at;
  link(at);
}

// A little per sample: all at once would be a long call.
void ReturnHistory::sweep() {
  const std::size_t end = std::min(samples_.size(), swept_ + kSweepAtOnce);
  for (; swept_ < end; ++swept_) {
    const ChunkId id = samples_[swept_].id;
    if (id != 0 && !sampled(id)) drop(static_cast<std::uint32_t>(swept_));
  }
}

void ReturnHistory::drop(std::uint32_t at) {
  unlink(at);
  forget(at);
}

// REQUIRES: in no queue.
void ReturnHistory::forget(std::uint32_t at) {
  by_id_.erase(samples_[at].id);
  classes_.release(samples_[at].record);
  samples_[at].id = 0;
  free_.push_back(at);
}

void ReturnHistory::link(std::uint32_t at) {
  Sample& sample = samples_[at];
  Ends& ends = queues_[sample.bucket];
  sample.newer = kNone;
  sample.older = ends.newest;
  (ends.newest == kNone ? ends.oldest : samples_[ends.newest].newer) = at;
  ends.newest = at;
}

void ReturnHistory::unlink(std::uint32_t at) {
  const Sample& sample = samples_[at];
  Ends& ends = queues_[sample.bucket];
  (sample.newer == kNone ? ends.newest : samples_[sample.newer].older) = sample.older;
  (sample.older == kNone ? ends.oldest : samples_[sample.older].newer) = sample.newer;
}

std::uint32_t ReturnHistory::oldest() const {
  for (unsigned b = ReturnModel::kBuckets; b-- > 0;) {
    if (queues_[b].oldest != kNone) return queues_[b].oldest;
  }
  return kNone;
}

}  // namespace kv_offload
