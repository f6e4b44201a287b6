// SPDX-License-Identifier: Apache-2.0
// Prompts on a shared root. An eviction is judged by the prompts that it leaves: a chunk can be loaded only
// if all earlier chunks are stored.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "backends/fs/store.h"
#include "faulty_file_ops.h"
#include "fixture.h"
#include "sim_disk.h"

namespace kv_offload::testing {

// Files get the time of their naming, one nanosecond apart. No real clock is that fine.
class TimedDisk : public SimDisk {
 public:
  int move(int from_directory, const std::string& from, int to_directory, const std::string& to,
           bool keep_existing) override {
    const int rc = SimDisk::move(from_directory, from, to_directory, to, keep_existing);
    if (rc == 0 && to.ends_with(".rec")) (void)SimDisk::set_mtime(to_directory, to, ++time_);
    return rc;
  }

 private:
  std::int64_t time_ = 1'000'000'000;
};

inline constexpr std::uint32_t kChunks = 100;  // per prompt
inline constexpr std::uint64_t kPromptShard = 4096;
inline constexpr std::uint64_t kPromptRecord = 2 * 4096;

inline ChunkKey chunk_of(std::uint32_t prompt, std::uint32_t chunk) {
  return key_of(prompt * kChunks + chunk);
}

// A root's records of prompts, and the loadable ones among them.
struct Held {
  std::size_t records = 0, usable = 0;
};
inline Held held_in(const SimDisk& disk, const std::string& below, std::uint32_t prompts) {
  std::set<std::string> keys;
  for (const std::string& path : disk.files()) {
    const std::string name = path.substr(path.rfind('/') + 1);
    const auto record = layout::parse_record(name);
    if (record && path.find(below) != std::string::npos) keys.insert(record->key.hex());
  }
  Held held{keys.size(), 0};
  for (std::uint32_t prompt = 0; prompt < prompts; ++prompt) {
    std::uint32_t chunk = 0;
    while (chunk < kChunks && keys.contains(chunk_of(prompt, chunk).hex())) ++chunk;
    held.usable += chunk;
  }
  return held;
}

// A server without threads: its ticks and writes happen only when a test calls them.
class PromptServer {
 public:
  PromptServer(const FsTierOptions& options, FileOps& ops, const Clock& clock)
      : store_(std::make_unique<FsStore>(options, ops, clock)) {
    store_->start();
    store_->maintain();
  }
  ~PromptServer() {
    if (store_) store_->close();
  }
  FsStore& store() { return *store_; }
  void tick() { store_->maintain(); }
  Status write(std::uint32_t prompt, std::uint32_t chunk) {
    TierOp op;
    op.kind = OpKind::kWrite;
    op.key = chunk_of(prompt, chunk);
    op.entry_info.depth = chunk + 1;
    op.entry_info.request = prompt + 1;
    if (chunk > 0) op.entry_info.parent = chunk_id(chunk_of(prompt, chunk - 1));
    op.may_decline = true;  // like a chunk that was just stored
    op.shards = row_.shards();
    std::uint64_t moved = 0;
    Status status = store_->write(op, store_->epoch(), &moved);
    return status.kind() == StatusKind::kDeclined ? Status::ok() : status;
  }
  // Writes the next chunk of endless prompts.
  Status write_next() {
    const std::uint32_t number = next_++;
    return write(number / kChunks, number % kChunks);
  }
  std::uint32_t prompts() const { return next_ / kChunks + 1; }
  TierStats stats() {
    TierStats stats;
    store_->figures(&stats);
    return stats;
  }

 private:
  Row row_{{kPromptShard}};
  std::unique_ptr<FsStore> store_;
  std::uint32_t next_ = 0;
};

}  // namespace kv_offload::testing
