// SPDX-License-Identifier: Apache-2.0
#include "copy/host_copier.h"

#include <gtest/gtest.h>

#include <condition_variable>
#include <cstring>
#include <mutex>
#include <set>
#include <thread>

#include "copy/copy_cases.h"
#include "copy/host_memcpy.h"

namespace kv_offload {
namespace {

using testing::CopyCase;
using testing::draw_case;
using testing::expected_after;
using testing::snapshot;

TEST(CopyBytes, copy_bytes_equals_memcpy_at_any_length_and_alignment) {
  std::mt19937_64 random(3);
  std::vector<std::byte> from(3 * kNonTemporalBytes);
  for (std::byte& b : from) b = static_cast<std::byte>(random());
  for (int i = 0; i < 400; ++i) {
    const std::size_t bytes =
        i % 2 == 0 ? random() % 300 : kNonTemporalBytes - 8 + random() % kNonTemporalBytes;
    const std::size_t source = random() % 130;
    const std::size_t target = random() % 130;
    std::vector<std::byte> expected(from.size(), std::byte{0xEE});
    std::vector<std::byte> got = expected;
    std::memcpy(expected.data() + target, from.data() + source, bytes);
    copy_bytes(got.data() + target, from.data() + source, bytes);
    ASSERT_EQ(got, expected) << bytes << " bytes from " << source << " to " << target;
  }
}

// A copier whose runs all wait at a gate, and a log of the runs in order. One cache of 16 blocks of
// one slice each; the row of block b holds block b.
class HostCopierTest : public ::testing::Test {
 protected:
  static constexpr std::uint64_t kBlock = HostCopier::kSliceBytes;  // one block, one slice
  static constexpr std::uint64_t kBlocks = 16;

  HostCopierTest() : cache_(kBlock * kBlocks), area_(kBlock * kBlocks) {}

  void start(unsigned threads) {
    CopierOptions options;
    options.layout = {
        .tensors = {{cache_.data(), kBlocks, kBlock}}, .groups = {{{0, kBlock}}}, .blocks_per_chunk = 1};
    options.area = area_;
    options.threads = threads;
    copier_ = std::make_unique<HostCopier>(
        options, [this](std::byte* to, const std::byte* from, std::size_t bytes) {
          std::unique_lock lock(mutex_);
          const std::byte* base =
              to >= area_.data() && to < area_.data() + area_.size() ? area_.data() : cache_.data();
          const auto block = static_cast<std::uint64_t>(to - base) / kBlock;
          order_.push_back(block);
          by_.push_back(std::this_thread::get_id());
          reached_.notify_all();
          open_.wait(lock, [&] { return all_allowed_ || allowed_.contains(block); });
          lock.unlock();
          std::memcpy(to, from, bytes);
        });
  }

  void submit(std::uint64_t id, CopyDirection direction, std::vector<std::int64_t> blocks,
              bool expedited = false) {
    CopyJob job{.id = id, .ticket = 100 + id, .direction = direction, .expedited = expedited};
    job.group_sizes = {static_cast<std::uint32_t>(blocks.size())};
    job.group_rows = job.group_sizes;
    job.block_indices = {0};
    for (const std::int64_t b : blocks) job.rows.push_back(static_cast<RowId>(b * (kBlock / kPageBytes)));
    job.block_ids = std::move(blocks);
    copier_->submit(std::move(job));
  }
  void until_runs(std::size_t count) {
    std::unique_lock lock(mutex_);
    reached_.wait(lock, [&] { return order_.size() >= count; });
  }
  void allow(std::uint64_t block) {
    std::lock_guard lock(mutex_);
    allowed_.insert(block);
    open_.notify_all();
  }
  void allow_all() {
    std::lock_guard lock(mutex_);
    all_allowed_ = true;
    open_.notify_all();
  }
  std::vector<std::uint64_t> order() {
    std::lock_guard lock(mutex_);
    return order_;
  }
  std::vector<std::uint64_t> ids(const std::vector<CopyResult>& results) {
    std::vector<std::uint64_t> found;
    for (const CopyResult& r : results) found.push_back(r.job_id);
    return found;
  }
  void TearDown() override {
    allow_all();
    copier_.reset();
  }

  std::vector<std::byte> cache_;
  std::vector<std::byte> area_;
  std::mutex mutex_;
  std::condition_variable reached_;
  std::condition_variable open_;
  bool all_allowed_ = false;
  std::set<std::uint64_t> allowed_;
  std::vector<std::uint64_t> order_;
  std::vector<std::thread::id> by_;
  std::unique_ptr<HostCopier> copier_;
};

using Order = std::vector<std::uint64_t>;
using enum CopyDirection;

TEST_F(HostCopierTest, loads_overtake_a_running_store) {
  start(1);
  submit(1, kStore, {0, 1, 2, 3});
  until_runs(1);
  submit(2, kStore, {4});
  submit(3, kLoad, {5});
  submit(4, kLoad, {6}, /*expedited=*/true);
  allow_all();
  copier_->close();
  EXPECT_EQ(order(), (Order{0, 6, 5, 1, 2, 3, 4}));
  EXPECT_EQ(ids(copier_->poll()), (Order{4, 3, 1, 2}));
}

TEST_F(HostCopierTest, wait_runs_the_listed_store_on_its_own_thread) {
  start(1);
  submit(1, kStore, {0});
  until_runs(1);  // the only pool thread is held here
  submit(2, kLoad, {1});
  submit(3, kStore, {2});
  std::thread waiter([&] { copier_->wait(std::vector<std::uint64_t>{3, 77}); });
  until_runs(2);
  EXPECT_EQ(order(), (Order{0, 2}));
  {
    std::lock_guard lock(mutex_);
    EXPECT_EQ(by_.at(1), waiter.get_id());
  }
  allow_all();
  waiter.join();
}

TEST_F(HostCopierTest, wait_returns_while_unlisted_jobs_are_still_running) {
  start(1);
  submit(1, kStore, {0});
  until_runs(1);
  submit(2, kStore, {1});
  submit(3, kStore, {2});
  allow(1);
  copier_->wait(std::vector<std::uint64_t>{2});
  EXPECT_EQ(ids(copier_->poll()), (Order{2}));  // the other jobs are at the gate or queued
}

TEST_F(HostCopierTest, wait_for_unknown_or_finished_jobs_returns_at_once) {
  start(1);
  allow(0);
  submit(1, kStore, {0});
  copier_->wait(std::vector<std::uint64_t>{1});
  copier_->wait(std::vector<std::uint64_t>{1, 2, 3});
  EXPECT_EQ(ids(copier_->poll()), (Order{1}));
  EXPECT_TRUE(copier_->poll().empty());
}

TEST_F(HostCopierTest, all_threads_share_a_long_job) {
  start(3);
  submit(1, kStore, {0, 1, 2});
  until_runs(3);  // all three at the gate at once
  allow_all();
  copier_->close();
  std::lock_guard lock(mutex_);
  EXPECT_EQ(std::set(by_.begin(), by_.end()).size(), 3u);
}

TEST_F(HostCopierTest, close_finishes_queued_jobs_and_refuses_later_ones) {
  start(2);
  allow_all();
  for (std::uint64_t id = 0; id < kBlocks; ++id) submit(id, kStore, {static_cast<std::int64_t>(id)});
  copier_->close();
  submit(99, kStore, {0});
  copier_->wait(std::vector<std::uint64_t>{99});
  const auto results = copier_->poll();
  ASSERT_EQ(results.size(), kBlocks + 1);
  for (std::size_t i = 0; i < kBlocks; ++i) EXPECT_TRUE(results[i].status.is_ok());
  EXPECT_EQ(results.back().status.kind(), StatusKind::kUnavailable);
  EXPECT_EQ(results.back().failed_groups, ~std::uint64_t{0});
  EXPECT_EQ(cache_, area_);
}

TEST_F(HostCopierTest, an_empty_job_completes) {
  start(1);
  submit(5, kLoad, {});
  const auto results = copier_->poll();
  ASSERT_EQ(results.size(), 1u);
  EXPECT_EQ(results[0].ticket, 105u);
  EXPECT_EQ(results[0].bytes, 0u);
}

TEST_F(HostCopierTest, an_invalid_job_is_refused_and_leaves_no_result) {
  start(1);
  EXPECT_THROW(submit(1, kLoad, {1000}), InvalidArgument);
  copier_->wait(std::vector<std::uint64_t>{1});
  EXPECT_TRUE(copier_->poll().empty());
}

TEST(HostCopier, random_jobs_match_the_reference_copy_on_any_thread_count) {
  std::mt19937_64 random(99);
  for (int i = 0; i < 150; ++i) {
    CopyCase c = draw_case(random, i % 2 == 0 ? kStore : kLoad);
    const auto expected = expected_after(c);
    CopierOptions options;
    options.layout = c.layout;
    options.area = c.area;
    options.threads = 1 + i % 4;
    const auto copier = make_host_copier(options);
    copier->submit(c.job);
    copier->wait(std::vector<std::uint64_t>{c.job.id});
    const auto results = copier->poll();
    ASSERT_EQ(results.size(), 1u);
    ASSERT_EQ(results[0].ticket, c.job.ticket);
    ASSERT_TRUE(results[0].status.is_ok());
    ASSERT_TRUE(snapshot(c) == expected) << "case " << i;
  }
}

TEST(HostCopier, a_run_longer_than_a_slice_is_copied_completely) {
  std::mt19937_64 random(4);
  for (const CopyDirection direction : {kStore, kLoad}) {
    CopyCase c = draw_case(random, direction, {.max_blocks = 12, .max_page = 700'000});
    const auto expected = expected_after(c);
    CopierOptions options;
    options.layout = c.layout;
    options.area = c.area;
    options.threads = 3;
    const auto copier = make_host_copier(options);
    copier->submit(c.job);
    copier->close();
    ASSERT_TRUE(snapshot(c) == expected);
  }
}

TEST(HostCopier, zero_threads_or_an_invalid_layout_are_refused) {
  CopierOptions options;
  EXPECT_THROW(make_host_copier(options), InvalidArgument);
  std::vector<std::byte> cache(64);
  options.layout = {.tensors = {{cache.data(), 1, 64}}, .groups = {{{0, 64}}}, .blocks_per_chunk = 1};
  options.threads = 0;
  EXPECT_THROW(make_host_copier(options), InvalidArgument);
}

}  // namespace
}  // namespace kv_offload
