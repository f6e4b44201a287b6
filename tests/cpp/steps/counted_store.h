// SPDX-License-Identifier: Apache-2.0
// A store with any number of records that takes no memory. A record exists if the number in its key
// is below `records`. Nothing is read or written.
#pragma once

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "record/record_form.h"
#include "tier/record_store.h"

namespace kv_offload::testing {

inline ChunkKey numbered_key(std::uint64_t number, std::uint32_t group = 0) {
  std::uint64_t mixed = (number + 1) * 0x9E3779B97F4A7C15ull;
  mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9ull;
  const std::uint64_t words[4] = {mixed ^ mixed >> 27, mixed * 0x94D049BB133111EBull, number, ~mixed};
  std::string bytes(reinterpret_cast<const char*>(words), sizeof(words));
  for (int shift = 24; shift >= 0; shift -= 8) bytes.push_back(static_cast<char>(group >> shift));
  return ChunkKey(bytes);
}

class CountedStore final : public RecordStore {
 public:
  explicit CountedStore(std::uint64_t records, StatusKind reads_end = StatusKind::kOk)
      : records_(records), reads_end_(reads_end) {}

  Status write(const TierOp&, const EpochPtr&, std::uint64_t* moved) override {
    *moved = 4096;
    return Status::ok();
  }
  Status read(const TierOp&, const EpochPtr&, std::uint64_t* moved) override {
    if (reads_end_ != StatusKind::kOk) return Status::error(reads_end_, "told to");
    *moved = 4096;
    return Status::ok();
  }
  Status locate(std::span<const ChunkKey> keys, KeyOrder, const EpochPtr&,
                std::vector<bool>* present) override {
    for (std::size_t i = 0; i < keys.size(); ++i) {
      std::uint64_t number = 0;
      std::memcpy(&number, keys[i].bytes().data() + 16, sizeof(number));
      (*present)[i] = number < records_;
    }
    return Status::ok();
  }
  std::size_t keys_per_locate(KeyOrder) const override { return 512; }
  void maintain() override {}
  Status begin_epoch() override {
    epoch_ = std::make_shared<Epoch>();
    return Status::ok();
  }
  EpochPtr epoch() const override { return epoch_; }
  void forget(std::uint64_t) override {}
  void close() override {}
  void figures(TierStats* stats) const override { stats->chunks = records_; }

 private:
  const std::uint64_t records_;
  const StatusKind reads_end_;
  EpochPtr epoch_ = std::make_shared<Epoch>();
};

}  // namespace kv_offload::testing
