// SPDX-License-Identifier: Apache-2.0
// The real fs tier on a directory. Its ops run on the test's thread when the test calls for
// them. Maintenance still runs on the tier's own thread; the test's calls wait for it to end,
// so results are deterministic.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <memory>
#include <thread>
#include <utility>

#include "backends/fs/faulty_file_ops.h"
#include "backends/fs/fixture.h"
#include "base/aligned_buffer.h"
#include "cache/manual_tier.h"
#include "tier/io_pool.h"

namespace kv_offload {

// Must outlive the tiers that use it.
struct Disk {
  testing::TempDir directory;
  testing::FaultyFileOps ops;
  std::string root() const { return directory.path() + "/root"; }
};

class SteppedStore final : public ManualTier {
 public:
  SteppedStore(Disk& disk, FakeClock& clock) : disk_(disk), clock_(clock) {
    FsTierOptions options = testing::options_for(disk.root());
    options.file_ops = &disk.ops;
    options.clock = &clock;
    options.manual_pool = &pool_;
    tier_ = make_fs_tier(options);
    wait([&] { return tier_->stats().scan_complete; });
  }
  ~SteppedStore() override {
    disk_.ops.clear();
    close();
  }

  // ---- control by the test
  void finish(std::size_t n) override {
    for (; n > 0; --n) {
      const auto next = begin(reads_.empty() ? OpKind::kWrite : OpKind::kRead);
      if (!next) return;
      next();
    }
  }
  void start(OpKind kind) override {
    if (auto begun = begin(kind)) started_.push_back(std::move(begun));
  }
  void finish_started() override {
    for (const auto& begun : std::exchange(started_, {})) begun();
  }
  const std::deque<TierOp>& reads() const override { return reads_; }
  const std::deque<TierOp>& writes() const override { return writes_; }

  bool holds(const ChunkKey& key) override { return contains(key) == Presence::kPresent; }
  void take_away(const ChunkKey& key) override {
    EXPECT_TRUE(std::filesystem::remove(path_of(key)));
    if (reads_.empty()) run_own(OpKind::kRead, key);  // finds the record missing
  }
  void damage(const ChunkKey& key) override { testing::flip_a_bit(path_of(key)); }
  void fail(StatusKind kind) override {
    using testing::Call;
    if (kind == StatusKind::kOk) return disk_.ops.clear();
    const int error = kind == StatusKind::kNoSpace ? ENOSPC : EIO;
    disk_.ops.set_rule([error](Call call) {
      return call == Call::kPwritev || (error == EIO && call == Call::kPreadv) ? -error : 0;
    });
  }
  void fail_resets(bool fail) override {
    disk_.ops.set_rule(
        [fail](testing::Call call) { return fail && call == testing::Call::kMkdir ? -EIO : 0; });
  }
  void heal() override {
    clock_.advance(std::chrono::seconds(1));  // the next tick
    wait([&] { return tier_->stats().writable; });
  }
  void switch_off() override {
    start_own(OpKind::kWrite, ChunkKey(std::string(36, 's')));
    const auto stuck = pool_->begin_next(Lane::kWrite);
    clock_.advance(std::chrono::seconds(11));
    take_completions();  // detects stuck ops
    stuck();
  }
  bool is_closed() const override { return closed_; }

  // ---- Tier
  std::string_view name() const override { return tier_->name(); }
  void submit(std::vector<TierOp> ops) override {
    for (const TierOp& op : ops) (op.kind == OpKind::kRead ? reads_ : writes_).push_back(op);
    tier_->submit(std::move(ops));
  }
  bool cancel(OpId id) override {
    const bool cancelled = tier_->cancel(id);
    if (cancelled) forget(id);
    return cancelled;
  }
  void poll(std::vector<Completion>* completions, std::vector<TierRemoval>* removals) override {
    take_completions();
    for (Completion& completion : std::exchange(completions_, {}))
      completions->push_back(std::move(completion));
    for (const TierRemoval& removal : std::exchange(removals_, {})) removals->push_back(removal);
  }
  // The constructor waited for the scan, so no key is unknown.
  Presence contains(const ChunkKey& key) const override { return tier_->contains(key); }
  void forget_miss(const ChunkKey& key) override { tier_->forget_miss(key); }
  void prefetch_presence(std::vector<ChunkKey> keys, const LookupOptions& options) override {
    tier_->prefetch_presence(std::move(keys), options);
  }
  void touch(const ChunkKey& key) override { tier_->touch(key); }
  Status reset(std::uint64_t startup_id) override { return tier_->reset(startup_id); }
  TierStats stats() const override { return tier_->stats(); }
  void close() override {
    if (std::exchange(closed_, true)) return;
    finish_started();
    tier_->close();
  }
  double estimate_read_seconds(std::uint64_t) const override { return 0; }  // no device speed is simulated

 private:
  static constexpr OpId kOwn = OpId{1} << 40;  // larger than all op ids of the cache

  std::function<void()> begin(OpKind kind) {
    auto& queue = kind == OpKind::kRead ? reads_ : writes_;
    if (!queue.empty()) queue.pop_front();
    return pool_->begin_next(kind == OpKind::kRead ? Lane::kRead : Lane::kWrite);
  }
  void forget(OpId id) {
    for (auto* queue : {&reads_, &writes_})
      std::erase_if(*queue, [&](const TierOp& op) { return op.id == id; });
  }
  void take_completions() {
    std::vector<Completion> ended;
    tier_->poll(&ended, &removals_);
    for (Completion& completion : ended) {
      forget(completion.id);
      if (completion.id < kOwn) completions_.push_back(std::move(completion));
    }
  }
  // Starts an op of the test. Its completion is not reported to the cache.
  void start_own(OpKind kind, const ChunkKey& key) {
    TierOp op;
    op.id = kOwn + ++own_ops_;
    op.kind = kind;
    op.key = key;
    op.shards = {Shard(row_.data(), 300), Shard(row_.data() + kPageBytes, 300)};
    std::vector<TierOp> ops;
    ops.push_back(std::move(op));
    tier_->submit(std::move(ops));
  }
  void run_own(OpKind kind, const ChunkKey& key) {
    start_own(kind, key);
    pool_->begin_next(kind == OpKind::kRead ? Lane::kRead : Lane::kWrite)();
    take_completions();
  }
  std::string path_of(const ChunkKey& key) const {
    for (const auto& path : testing::records_in(disk_.root())) {
      if (path.filename().string().starts_with(key.hex())) return path.string();
    }
    ADD_FAILURE() << "no record of " << key.hex();
    return {};
  }
  void wait(const std::function<bool()>& condition) {
    const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(120);
    while (!condition()) {
      if (std::chrono::steady_clock::now() > give_up) {
        ADD_FAILURE() << "the tier's maintenance did not end";
        return;
      }
      take_completions();
      std::this_thread::yield();
    }
  }

  Disk& disk_;
  FakeClock& clock_;
  AlignedBuffer row_{2 * kPageBytes};
  IoPool* pool_ = nullptr;
  std::unique_ptr<Tier> tier_;
  std::deque<TierOp> reads_, writes_;  // copies; the tier holds the ops
  std::vector<std::function<void()>> started_;
  std::vector<Completion> completions_;
  std::vector<TierRemoval> removals_;
  std::uint64_t own_ops_ = 0;
  bool closed_ = false;
};

}  // namespace kv_offload
