// SPDX-License-Identifier: Apache-2.0
// ReuseSampler: when entries were last used, for a sample of all entries seen in a long while, whether they
// are still here or not. Feeds a ReusePredictor: at which age entries were reused, and which age they reached
// without reuse.
//
// Bounded: at most kMaxSamples, whatever the number of entries. If they do not reach back `horizon` uses,
// every other id is excluded from the sample from then on (by hash: always or never for one id).
#pragma once

#include <array>
#include <vector>

#include "base/segmented_vector.h"
#include "policy/eviction_policy.h"
#include "policy/id_table.h"
#include "policy/recency_list.h"
#include "policy/request_classes.h"
#include "policy/reuse_predictor.h"

namespace kv_offload {

class ReuseSampler {
 public:
  static constexpr std::size_t kMaxSamples = std::size_t{1} << 18;
  static_assert(kMaxSamples <= IdTable::kIdsOfSpareBits, "samples must be spread over the whole table");

  ReuseSampler(ReusePredictor& predictor, RequestClasses& classes)
      : predictor_(predictor), classes_(classes) {
    crossed_.fill(kNone);
  }

  struct Use {
    RequestClasses::Record record = 0;  // of the request
    std::uint64_t now = 0;              // never decreases
    bool end = false;                   // see ReusePredictor::class_of, from now on
    bool used = false;
    bool branched = false;  // the head of several prefixes, whose reuse predicts nothing about others
  };

  // An entry was stored or hit.
  void used(ChunkId id, const Use& use);
  // Used without a request for it: its age restarts.
  void renewed(ChunkId id, const Use& use);
  // The request of `record`, which used this entry, continued after it.
  void extended(ChunkId id, RequestClasses::Record record);
  bool sampled(ChunkId id) const { return id != 0 && (IdTable::spare_bits(id) & skip_mask_) == 0; }
  bool is_tracked(ChunkId id) const { return sampled(id) && find(id) != kNone; }
  void prefetch(ChunkId id) const { by_id_.prefetch(id); }
  // Advances the time: samples reach higher ages, and some of the oldest beyond `horizon` are dropped.
  // (Emptying the cache shortens the horizon at once; later calls drop the rest.)
  void advance(std::uint64_t now, std::uint64_t horizon);
  std::size_t size() const { return by_id_.size(); }
  std::size_t longest_probe() const { return by_id_.longest_probe(); }

 private:
  static constexpr std::uint32_t kNone = IdTable::kNone;
  static constexpr int kDropsPerAdvance = 64;  // more samples than arrive between two advances
  static constexpr std::size_t kSweepsPerAdvance = 4;
  static constexpr int kCrossingsPerBucket = 128;  // samples of the same time arrive together
  struct Sample {
    ChunkId id = 0;
    std::uint64_t time = 0;
    RequestClasses::Record record = 0;
    std::uint32_t newer = kNone;
    std::uint32_t older = kNone;
    std::uint8_t bucket = 0;
    bool end = false;
    bool used = false;
  };
  auto id_of() const {
    return [this](std::uint32_t at) { return samples_[at].id; };
  }
  std::uint32_t find(ChunkId id) const { return by_id_.find(id, id_of()); }
  unsigned class_of(const Sample& sample) const {
    return ReusePredictor::class_of(classes_.class_of(sample.record), sample.end, sample.used);
  }
  void restart_sample(std::uint32_t at, const Use& use);
  void catch_up(Sample& sample, unsigned bucket);
  void add(ChunkId id, const Use& use);
  std::uint32_t take_free();
  void sweep();  // drops samples whose ids are no longer sampled
  void drop(std::uint32_t at);
  void link(std::uint32_t at);
  void unlink(std::uint32_t at);
  void cross(unsigned bucket, std::uint64_t now);

  ReusePredictor& predictor_;
  RequestClasses& classes_;
  SegmentedVector<Sample> samples_;
  // Free samples, linked by `newer` and reused in the order in which they were freed. So samples that are
  // close in time end up close in memory.
  std::uint32_t first_free_ = kNone;
  std::uint32_t last_free_ = kNone;
  IdTable by_id_;
  // All samples by time, so bucket numbers decrease from the oldest to the newest.
  RecencyList by_time_;
  std::array<std::uint32_t, ReusePredictor::kBuckets> crossed_;  // [b]: the newest sample older than bucket b
  std::array<std::uint64_t, ReusePredictor::kBuckets>
      due_{};  // [b]: no further sample outgrows b before then
  std::uint64_t skip_mask_ = 0;
  std::size_t swept_ = 0;  // samples below this index were checked since the mask changed
};

}  // namespace kv_offload
