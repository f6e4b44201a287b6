// ReturnHistory: when entries were used last, of a sample of all that came by in
// a long while, whether they are still here or not. Feeds a ReturnModel: what
// came back at which age, and what reached which age without.
//
// Bounded: at most kMaxSamples, whatever the number of entries. When they do not
// reach back `horizon` uses, every other id is left out of the sample from then on
// (by hash: all of an id or nothing of it).
#pragma once

#include <array>
#include <vector>

#include "base/segmented_vector.h"
#include "policy/eviction_policy.h"
#include "policy/id_table.h"
#include "policy/recency_list.h"
#include "policy/request_classes.h"
#include "policy/return_model.h"

namespace kv_offload {

class ReturnHistory {
 public:
  static constexpr std::size_t kMaxSamples = std::size_t{1} << 18;
  static_assert(kMaxSamples <= IdTable::kIdsOfSpareBits, "what is sampled must lie all over the table");

  ReturnHistory(ReturnModel& model, RequestClasses& classes) : model_(model), classes_(classes) {
    crossed_.fill(kNone);
  }

  struct Use {
    RequestClasses::Record record = 0;  // of the request
    std::uint64_t now = 0;              // grows
    bool end = false;                   // as of ReturnModel::class_of, from now on
    bool used = false;
    bool branched = false;  // the head of several prefixes, whose returns say nothing of others
  };

  // An entry was stored or hit.
  void used(ChunkId id, const Use& use);
  // Used, though not because it was asked for: its age begins again.
  void renewed(ChunkId id, const Use& use);
  // The request of `record`, which used this entry, went on behind it.
  void extended(ChunkId id, RequestClasses::Record record);
  bool sampled(ChunkId id) const { return id != 0 && (IdTable::spare_bits(id) & skip_mask_) == 0; }
  bool knows(ChunkId id) const { return sampled(id) && find(id) != kNone; }
  void prefetch(ChunkId id) const { by_id_.prefetch(id); }
  // Lets time pass: samples reach higher ages, some of the oldest beyond `horizon` are dropped (the horizon
  // of an emptied cache is short at once: the rest go in later calls).
  void advance(std::uint64_t now, std::uint64_t horizon);
  std::size_t size() const { return by_id_.size(); }
  std::size_t longest_probe() const { return by_id_.longest_probe(); }

 private:
  static constexpr std::uint32_t kNone = IdTable::kNone;
  static constexpr int kDroppedAtOnce = 64;  // more than come between two advances
  static constexpr std::size_t kSweepAtOnce = 4;
  static constexpr int kCrossedAtOnce = 128;  // of a bucket; those that were used at one time come together
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
    return ReturnModel::class_of(classes_.class_of(sample.record), sample.end, sample.used);
  }
  void begin_again(std::uint32_t at, const Use& use);
  void catch_up(Sample& sample, unsigned bucket);
  void add(ChunkId id, const Use& use);
  void sweep();  // drops what is in the sample no more
  void drop(std::uint32_t at);
  void link(std::uint32_t at);
  void unlink(std::uint32_t at);
  void cross(unsigned bucket, std::uint64_t now);

  ReturnModel& model_;
  RequestClasses& classes_;
  SegmentedVector<Sample> samples_;
  // Linked by `newer`, taken in the order in which they came: samples that follow each other in time
  // come to lie side by side.
  std::uint32_t first_free_ = kNone;
  std::uint32_t last_free_ = kNone;
  IdTable by_id_;
  // All by time, so buckets fall from the oldest to the newest.
  RecencyList by_time_;
  std::array<std::uint32_t, ReturnModel::kBuckets> crossed_;  // [b]: the newest sample older than bucket b
  std::array<std::uint64_t, ReturnModel::kBuckets> due_{};  // [b]: until then no other one gets older than b
  std::uint64_t skip_mask_ = 0;
  std::size_t swept_ = 0;  // samples below this one were looked at since the mask changed
};

}  // namespace kv_offload
