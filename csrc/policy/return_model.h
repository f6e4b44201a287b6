// ReturnModel: how soon entries come back, learned while serving, by class of
// entry and by age. Ages are counted in entries that were stored since, in half
// octaves: the model knows no unit of time and no capacity.
//
// A class is the class of the request that used an entry last, and the kind of entry: whether
// it had been used before, and whether it is the end of a prompt. What little was seen of a
// class is filled up with what its request class and its kind show elsewhere, as factors of
// what all entries do.
//
// worth(class, age) is the Gittins index of keeping such an entry: the largest
// rate of returns per unit of age, over all spans for which it could be kept.
// Of two entries the one worth less is the one to let go.
#pragma once

#include <array>
#include <bit>
#include <cstdint>

namespace kv_offload {

class ReturnModel {
 public:
  static constexpr unsigned kRequestClasses = 17;
  static constexpr unsigned kKinds = 4;
  static constexpr unsigned kClasses = kRequestClasses * kKinds;
  static constexpr unsigned kBuckets = 40;  // the last one: 33 million and more

  ReturnModel();

  // `end`: nothing was ever seen behind it. A chat's last block, half full, comes back filled up and
  // under another key. `used`: by a request other than the one that stored it.
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

  // Entries of this class reached this age; and: one came back at this age.
  void reached(unsigned of_class, unsigned bucket, std::uint32_t entries = 1) {
    exposed_[of_class][bucket] += static_cast<float>(entries);
  }
  void returned(unsigned of_class, unsigned bucket) { returns_[of_class][bucket] += 1; }

  float worth(unsigned of_class, unsigned bucket) const { return worth_[of_class][bucket]; }
  // Works one class's figures into worth(); classes take turns. What was learned
  // counts `keep` of itself from now on.
  void learn(float keep);

 private:
  static constexpr unsigned kUnitBits = 6;
  static constexpr std::uint64_t kUnit = 1u << kUnitBits;
  using Table = std::array<std::array<float, kBuckets>, kClasses>;

  void compare();
  void rate(unsigned of_class);

  Table exposed_{}, returns_{}, worth_{};
  // As of the last time that all classes were compared: the share of all entries that comes back in
  // each bucket, and what a class returns by its factors, where all entries together return 1.
  std::array<float, kBuckets> pooled_{};
  std::array<float, kClasses> factor_{};
  unsigned next_class_ = 0;
};

}  // namespace kv_offload
