// SPDX-License-Identifier: Apache-2.0
// ReusePredictor: how soon entries are reused, learned while serving, by class and age of the entry. Age is
// the number of entries stored since the last use, in half octaves: the model knows no unit of time and no
// capacity.
//
// A class combines the class of the request that used the entry last with the kind of entry: whether it had
// been used before, and whether it ends a prompt. A class with little data borrows from its request class and
// its kind in other classes, as factors of the average over all entries.
//
// worth(class, age) is the Gittins index of keeping such an entry: the largest rate of reuses per unit of
// age, over all spans for which it could be kept. Of two entries, evict the one worth less.
#pragma once

#include <array>
#include <bit>
#include <cstdint>

namespace kv_offload {

class ReusePredictor {
 public:
  static constexpr unsigned kRequestClasses = 17;
  static constexpr unsigned kKinds = 4;
  static constexpr unsigned kClasses = kRequestClasses * kKinds;
  static constexpr unsigned kBuckets = 40;  // the last one: 33 million and more

  ReusePredictor();

  // `end`: no chunk after it was ever seen. The half-full last block of a chat is filled up later and then
  // reused under another key. `used`: by a request other than the one that stored it.
  static constexpr unsigned class_of(unsigned of_request, bool end, bool used) {
    return of_request * kKinds + 2 * end + used;
  }
  static unsigned bucket_of(std::uint64_t age) {
    if (age < kUnit) return 0;
    const unsigned octave = static_cast<unsigned>(std::bit_width(age)) - 1;
    const unsigned half = static_cast<unsigned>(age >> (octave - 1)) & 1;
    const unsigned bucket = 1 + 2 * (octave - kUnitBits) + half;
    return bucket < kBuckets ? bucket : kBuckets - 1;
  }
  // The youngest age of a bucket.
  static constexpr std::uint64_t edge(unsigned bucket) {
    return bucket == 0 ? 0 : ((kUnit / 2) * (2 + (bucket - 1) % 2)) << ((bucket - 1) / 2);
  }

  // reached(): entries of this class reached this age. returned(): one was reused at this age.
  void reached(unsigned of_class, unsigned bucket, std::uint32_t entries = 1) {
    exposed_[of_class][bucket] += static_cast<float>(entries);
  }
  void returned(unsigned of_class, unsigned bucket) { returns_[of_class][bucket] += 1; }

  float worth(unsigned of_class, unsigned bucket) const { return worth_[of_class][bucket]; }
  // Updates worth() for one class; classes take turns. The learned data is then weighted with `keep`.
  void learn(float keep);

 private:
  static constexpr unsigned kUnitBits = 6;
  static constexpr std::uint64_t kUnit = 1u << kUnitBits;
  using Table = std::array<std::array<float, kBuckets>, kClasses>;

  void compare();
  void rate(unsigned of_class);

  Table exposed_{}, returns_{}, worth_{};
  // As of the last comparison of all classes: the share of all entries that is reused in each bucket, and
  // each class's reuse relative to all entries (= 1), from its factors.
  std::array<float, kBuckets> pooled_{};
  std::array<float, kClasses> factor_{};
  unsigned next_class_ = 0;
};

}  // namespace kv_offload
