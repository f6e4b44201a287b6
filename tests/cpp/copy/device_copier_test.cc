// SPDX-License-Identifier: Apache-2.0
#include "copy/device_copier.h"

#include <gtest/gtest.h>

#include <map>

#include "copy/copy_cases.h"
#include "copy/fake_device.h"

namespace kv_offload {
namespace {

using testing::CopyCase;
using testing::draw_case;
using testing::expected_after;
using testing::FakeDevice;
using testing::FakeDeviceState;
using testing::snapshot;
using enum CopyDirection;
using Ids = std::vector<std::uint64_t>;

DeviceLimits draw_limits(std::mt19937_64& random, std::uint64_t staged_bytes) {
  return {.dma_bytes = 1 + random() % 20'000,
          .kernel_bytes = 1 + random() % 20'000,
          .sub_job_segments = static_cast<std::uint32_t>(1 + random() % 50),
          .staged_bytes = staged_bytes,
          .boundary = (1 + random() % 4) * kPageBytes};
}

// `fast` is four times as fast as DMA; the third path is unavailable.
CopyTable faster_than_dma(CopyPath fast) {
  CopyTable table;
  for (auto& paths : table.rates) {
    paths[static_cast<std::size_t>(CopyPath::kDma)].fill(10e9);
    paths[static_cast<std::size_t>(fast)].fill(40e9);
  }
  return table;
}

class DeviceCopierPaths : public ::testing::TestWithParam<CopyPath> {};
INSTANTIATE_TEST_SUITE_P(Every, DeviceCopierPaths,
                         ::testing::Values(CopyPath::kDma, CopyPath::kKernel, CopyPath::kStaged),
                         [](const auto& path) { return std::string(to_string(path.param)); });

TEST_P(DeviceCopierPaths, random_jobs_match_the_reference_copy_for_any_sub_jobs) {
  std::mt19937_64 random(17);
  for (int i = 0; i < 120; ++i) {
    CopyCase c = draw_case(random, i % 2 == 0 ? kStore : kLoad,
                           {.max_page = i % 8 == 0 ? 40'000u : 700u, .page_multiple = i % 3 == 0 ? 16u : 1u});
    const auto expected = expected_after(c);
    FakeDeviceState state;
    state.area = c.area;
    state.staging_capacity = 2048 + random() % 30'000;
    CopierOptions options;
    options.layout = c.layout;
    options.area = c.area;
    const DeviceLimits limits = draw_limits(random, state.staging_capacity);
    DeviceCopier copier(options, std::make_unique<FakeDevice>(&state), single_path_table(GetParam()), limits);
    copier.submit(c.job);
    copier.wait(Ids{c.job.id});
    const auto results = copier.poll();
    ASSERT_EQ(results.size(), 1u);
    ASSERT_TRUE(results[0].status.is_ok());
    ASSERT_EQ(results[0].ticket, c.job.ticket);
    ASSERT_TRUE(snapshot(c) == expected) << "case " << i;
    for (const DeviceCopy& copy : state.issued) ASSERT_EQ(copy.path, GetParam());
    ASSERT_TRUE(state.live_events.empty());
  }
}

// A wait that starts in the middle of a job changes the job's path but none of its bytes.
TEST(DeviceCopierPath, a_path_change_during_a_store_keeps_every_byte) {
  std::mt19937_64 random(23);
  std::map<CopyPath, std::size_t> changed;
  for (int i = 0; i < 120; ++i) {
    CopyCase c = draw_case(random, kStore, {.max_page = i % 4 == 0 ? 40'000u : 700u, .page_multiple = 16});
    std::vector<CopySegment> segments = make_copy_plan(c.layout, c.area.size(), c.job).segments;
    if (segments.empty()) continue;
    const auto expected = expected_after(c);
    FakeDeviceState state;
    state.area = c.area;
    state.staging_capacity = 2048 + random() % 30'000;
    state.automatic = false;
    CopierOptions options;
    options.layout = c.layout;
    options.area = c.area;
    const CopyPath hasty = i % 2 == 0 ? CopyPath::kKernel : CopyPath::kStaged;
    const DeviceLimits limits = draw_limits(random, state.staging_capacity);
    const std::size_t sub_jobs = split(&segments, split_limits_for(CopyPath::kDma, hasty, limits)).size();
    DeviceCopier copier(options, std::make_unique<FakeDevice>(&state), faster_than_dma(hasty), limits);
    copier.submit(c.job);
    state.until_issued(std::min<std::size_t>(sub_jobs, limits.in_flight));
    std::thread waiter([&] { copier.wait(Ids{c.job.id}); });
    if (sub_jobs > limits.in_flight)
      state.until_issued(limits.in_flight + 1);  // issued only after the wait begins
    state.end_everything();
    waiter.join();
    ASSERT_TRUE(copier.poll().at(0).status.is_ok());
    ASSERT_TRUE(snapshot(c) == expected) << "case " << i;
    for (const DeviceCopy& copy : state.issued) {
      ASSERT_TRUE(copy.path == CopyPath::kDma || copy.path == hasty);
      changed[copy.path] += 1;
    }
  }
  EXPECT_GT(changed[CopyPath::kKernel], 100u);
  EXPECT_GT(changed[CopyPath::kStaged], 100u);
}

TEST(SplitLimitsFor, each_path_has_its_limits_and_two_paths_the_smaller) {
  const DeviceLimits limits{
      .dma_bytes = 4000, .kernel_bytes = 3000, .sub_job_segments = 9, .staged_bytes = 1000};
  EXPECT_EQ(split_limits_for(CopyPath::kDma, limits).max_bytes, 4000u);
  EXPECT_EQ(split_limits_for(CopyPath::kKernel, limits).max_bytes, 3000u);
  EXPECT_LT(split_limits_for(CopyPath::kStaged, limits).max_bytes, 1000u);
  const auto both = split_limits_for(CopyPath::kDma, CopyPath::kStaged, limits);
  EXPECT_EQ(both.max_bytes, split_limits_for(CopyPath::kStaged, limits).max_bytes);
  EXPECT_EQ(both.max_segments, split_limits_for(CopyPath::kStaged, limits).max_segments);
  EXPECT_EQ(split_limits_for(CopyPath::kDma, CopyPath::kKernel, limits).max_bytes, 3000u);
  EXPECT_GT(DeviceLimits{}.dma_bytes, DeviceLimits{}.kernel_bytes);
}

// One cache of 64 blocks; one block is one sub-job. The row of block b is b.
class DeviceCopierTest : public ::testing::Test {
 protected:
  static constexpr std::uint64_t kBlocks = 64;
  static constexpr std::size_t kInFlight = 2;  // per lane while no thread waits
  DeviceCopierTest() : cache_(kBlocks * kPageBytes), area_(kBlocks * kPageBytes) {
    for (std::size_t i = 0; i < cache_.size(); ++i) cache_[i] = static_cast<std::byte>(i / kPageBytes + 1);
    state_.area = area_;
    state_.automatic = false;
    options_.layout = {.tensors = {{cache_.data(), kBlocks, kPageBytes}},
                       .groups = {{{0, kPageBytes}}},
                       .blocks_per_chunk = 1};
    options_.area = area_;
  }
  void start(const CopyTable& table = single_path_table(CopyPath::kDma)) {
    copier_ = std::make_unique<DeviceCopier>(options_, std::make_unique<FakeDevice>(&state_), table, limits_);
  }
  void submit(std::uint64_t id, CopyDirection direction, std::int64_t first, std::int64_t count,
              bool expedited = false) {
    CopyJob job;
    job.id = id;
    job.ticket = 100 + id;
    job.direction = direction;
    job.expedited = expedited;
    for (std::int64_t b = first; b < first + count; ++b) {
      job.block_ids.push_back(b);
      job.rows.push_back(static_cast<RowId>(b));
    }
    job.group_sizes = {static_cast<std::uint32_t>(count)};
    job.group_rows = job.group_sizes;
    job.block_indices = {0};
    copier_->submit(std::move(job));
  }
  // Returns the blocks in the order in which their copies were issued.
  Ids blocks() {
    std::lock_guard lock(state_.mutex);
    Ids blocks;
    for (const std::uint64_t offset : state_.offsets) blocks.push_back(offset / kPageBytes);
    return blocks;
  }
  // Returns the path of each copy issued so far.
  std::vector<CopyPath> paths() {
    std::lock_guard lock(state_.mutex);
    std::vector<CopyPath> paths;
    for (const DeviceCopy& copy : state_.issued) paths.push_back(copy.path);
    return paths;
  }
  void forget_the_copies() {  // REQUIRES: no copier
    state_.issued.clear();
    state_.offsets.clear();
    state_.ended.clear();
    state_.landed.clear();
    state_.automatic = false;
  }
  static Ids ids(const std::vector<CopyResult>& results) {
    Ids found;
    for (const CopyResult& r : results) found.push_back(r.job_id);
    return found;
  }
  void TearDown() override {
    state_.reach_events();
    state_.end_everything();
    copier_.reset();
    EXPECT_TRUE(state_.live_events.empty());
  }

  std::vector<std::byte> cache_;
  std::vector<std::byte> area_;
  FakeDeviceState state_;
  CopierOptions options_;
  DeviceLimits limits_{.dma_bytes = kPageBytes, .kernel_bytes = kPageBytes, .in_flight = kInFlight};
  std::unique_ptr<DeviceCopier> copier_;
};

TEST_F(DeviceCopierTest, a_long_job_keeps_only_a_few_copies_in_flight) {
  start();
  submit(1, kStore, 0, 10);
  state_.until_issued(kInFlight);
  state_.until_queried(3);
  EXPECT_EQ(blocks(), (Ids{0, 1}));
  state_.end(1);
  state_.until_issued(kInFlight + 1);
  state_.until_queried(3);
  EXPECT_EQ(blocks(), (Ids{0, 1, 2}));
  EXPECT_TRUE(copier_->poll().empty());
}

TEST_F(DeviceCopierTest, a_waited_job_uses_all_slots) {
  start();
  submit(1, kStore, 0, 10);
  state_.until_issued(kInFlight);
  std::thread waiter([&] { copier_->wait(Ids{1}); });
  state_.until_issued(kInFlight + kLaneSlots);  // the urgent lane's slots
  EXPECT_EQ(blocks(), (Ids{0, 1, 2, 3, 4, 5}));
  state_.end_everything();
  waiter.join();
}

TEST_F(DeviceCopierTest, a_store_without_waiters_uses_dma) {
  start(faster_than_dma(CopyPath::kKernel));
  submit(1, kStore, 0, 1);
  state_.until_issued(1);
  submit(2, kLoad, 1, 1);
  state_.until_issued(2);
  EXPECT_EQ(paths(), (std::vector{CopyPath::kDma, CopyPath::kKernel}));
  submit(3, kStore, 2, 1, true);
  state_.until_issued(3);
  EXPECT_EQ(paths().back(), CopyPath::kKernel);
}

TEST_F(DeviceCopierTest, the_rest_of_a_waited_store_uses_the_fastest_path) {
  using enum CopyPath;
  for (const CopyPath fast : {kKernel, kStaged}) {
    limits_.staged_bytes = state_.staging_capacity = 2 * kPageBytes;
    limits_.dma_bytes = 2 * kPageBytes;  // the other path has smaller sub-jobs
    start(faster_than_dma(fast));
    submit(1, kStore, 0, 10);
    state_.until_issued(kInFlight);
    std::thread waiter([&] { copier_->wait(Ids{1}); });
    state_.until_issued(kInFlight + kLaneSlots);
    EXPECT_EQ(paths(), (std::vector{kDma, kDma, fast, fast, fast, fast}));
    state_.end_everything();
    waiter.join();
    copier_.reset();
    forget_the_copies();
  }
}

TEST_F(DeviceCopierTest, failed_stores_do_not_count_as_in_flight) {
  limits_.max_background_seconds = 1.5 * kPageBytes / 10e9;
  start(faster_than_dma(CopyPath::kKernel));
  state_.automatic = true;
  for (std::uint64_t id = 1; id <= 3; ++id) {
    {
      std::lock_guard lock(state_.mutex);
      state_.issue_status = Status::error(StatusKind::kDevice, "refused");
    }
    submit(id, kStore, 0, 1);
    copier_->wait(Ids{id});
    EXPECT_FALSE(copier_->poll().at(0).status.is_ok());
    {
      std::lock_guard lock(state_.mutex);
      state_.issue_status = Status::ok();
    }
    submit(100 + id, kStore, 1, 1);
    state_.until_issued(id);
    EXPECT_EQ(paths().back(), CopyPath::kDma);
    copier_->wait(Ids{100 + id});
    EXPECT_TRUE(copier_->poll().at(0).status.is_ok());
  }
}

TEST_F(DeviceCopierTest, a_backlog_of_stores_uses_the_fastest_path_until_done) {
  limits_.max_background_seconds = 2.5 * kPageBytes / 10e9;
  start(faster_than_dma(CopyPath::kKernel));
  submit(1, kStore, 0, 1);
  submit(2, kStore, 1, 1);
  state_.until_issued(2);
  submit(3, kStore, 2, 1);
  state_.end(0);
  state_.until_issued(3);
  EXPECT_EQ(paths(), (std::vector{CopyPath::kDma, CopyPath::kDma, CopyPath::kKernel}));
  state_.end_everything();
  copier_->wait(Ids{1, 2, 3});
  EXPECT_EQ(copier_->poll().size(), 3u);
  submit(4, kStore, 3, 1);
  state_.until_issued(4);
  EXPECT_EQ(paths().back(), CopyPath::kDma);
}

TEST_F(DeviceCopierTest, each_store_in_flight_counts_with_its_own_page_rate) {
  CopyTable table = faster_than_dma(CopyPath::kKernel);
  auto& dma = table.rates[static_cast<std::size_t>(kStore)][static_cast<std::size_t>(CopyPath::kDma)];
  dma.fill(10e9);
  dma.front() = 6e9;  // for single pages
  limits_.dma_bytes = limits_.kernel_bytes = 1 << 20;
  const double page = kPageBytes / 6e9, pages = 16 * kPageBytes / 10e9;
  for (const bool page_first : {true, false}) {
    for (const bool patient : {true, false}) {
      limits_.max_background_seconds = (page + pages) * (patient ? 1.01 : 0.99);
      start(table);
      submit(1, kStore, 0, page_first ? 1 : 16);
      submit(2, kStore, 20, page_first ? 16 : 1);
      state_.until_issued(2);
      EXPECT_EQ(paths().back(), patient ? CopyPath::kDma : CopyPath::kKernel) << page_first;
      state_.end_everything();
      copier_.reset();
      forget_the_copies();
    }
  }
}

TEST_F(DeviceCopierTest, a_load_does_not_wait_for_a_long_store) {
  start();
  submit(1, kStore, 0, 20);
  state_.until_issued(kInFlight);
  submit(2, kLoad, 30, 1);
  state_.until_issued(kInFlight + 1);
  state_.end(kInFlight);
  copier_->wait(Ids{2});
  EXPECT_EQ(ids(copier_->poll()), (Ids{2}));
}

TEST_F(DeviceCopierTest, an_expedited_load_overtakes_earlier_loads) {
  start();
  submit(1, kLoad, 0, 20);
  state_.until_issued(kInFlight);
  submit(2, kLoad, 30, 1, /*expedited=*/true);
  state_.until_issued(kInFlight + 1);
  EXPECT_EQ(blocks().back(), 30u);
}

TEST_F(DeviceCopierTest, wait_expedites_its_store_and_returns_when_it_ends) {
  start();
  submit(1, kStore, 0, 20);
  submit(2, kStore, 30, 6);
  state_.until_issued(kInFlight);
  std::thread waiter([&] { copier_->wait(Ids{2, 99}); });
  for (std::size_t n = 0; n < 6; ++n) state_.end(state_.nth_issued_from(30 * kPageBytes, n));
  waiter.join();
  EXPECT_EQ(ids(copier_->poll()), (Ids{2}));
}

TEST_F(DeviceCopierTest, plain_stores_pause_while_urgent_stores_have_work) {
  start();
  submit(1, kStore, 0, 20);
  submit(2, kStore, 30, 20);
  state_.until_issued(kInFlight);
  std::thread waiter([&] { copier_->wait(Ids{2}); });
  // Some plain ones may be issued in between, until the copier sees that the compute stream has
  // reached job 2's event.
  const std::size_t urgent = state_.nth_issued_from(30 * kPageBytes, 0);
  const std::size_t last = state_.nth_issued_from(30 * kPageBytes, kLaneSlots - 1);
  state_.end(0);  // a slot of the plain lane is free again
  state_.end(urgent);
  EXPECT_EQ(state_.nth_issued_from(30 * kPageBytes, kLaneSlots), last + 1);
  state_.end_everything();
  waiter.join();
}

TEST_F(DeviceCopierTest, no_copy_is_issued_before_the_compute_event) {
  state_.automatic = true;
  state_.compute_runs_ahead = false;
  start();
  submit(1, kStore, 0, 2);
  state_.until_asked(3);
  EXPECT_TRUE(blocks().empty());
  cache_[5] = std::byte{0xAB};  // the compute stream is still writing it
  state_.reach_events();
  copier_->wait(Ids{1});
  EXPECT_EQ(area_[5], std::byte{0xAB});
}

// The control for the test above: it must fail without the event.
TEST_F(DeviceCopierTest, control_without_the_event_a_copy_is_too_early) {
  state_.automatic = true;
  state_.compute_runs_ahead = false;
  options_.order_after_compute = false;
  start();
  submit(1, kStore, 0, 2);
  copier_->wait(Ids{1});
  cache_[5] = std::byte{0xAB};
  EXPECT_NE(area_[5], std::byte{0xAB});
}

TEST_F(DeviceCopierTest, a_blocked_urgent_job_does_not_delay_other_jobs) {
  state_.automatic = true;
  start();
  submit(1, kLoad, 0, 2);
  copier_->wait(Ids{1});
  state_.stop_compute();
  submit(2, kLoad, 10, 2, /*expedited=*/true);
  state_.run_compute_for_later_marks();
  submit(3, kLoad, 20, 2);
  state_.until_issued(4);
  EXPECT_EQ(blocks(), (Ids{0, 1, 20, 21}));
}

TEST_F(DeviceCopierTest, a_failed_compute_event_query_fails_the_job_without_copies) {
  state_.automatic = true;  // a copy that is issued anyway ends, and the test reports it
  state_.reached_status = Status::error(StatusKind::kDevice, "query: context lost");
  start();
  submit(1, kStore, 0, 2);
  copier_->wait(Ids{1});
  const auto results = copier_->poll();
  ASSERT_EQ(results.size(), 1u);
  EXPECT_EQ(results[0].failed_groups, ~std::uint64_t{0});
  EXPECT_EQ(results[0].status.message(), "query: context lost");
  EXPECT_TRUE(blocks().empty());
}

TEST_F(DeviceCopierTest, without_staging_memory_staged_copies_use_dma) {
  state_.automatic = true;
  limits_.staged_bytes = 0;
  copier_ = std::make_unique<DeviceCopier>(options_, std::make_unique<FakeDevice>(&state_),
                                           single_path_table(CopyPath::kStaged), limits_);
  EXPECT_EQ(copier_->describe().find("staged"), std::string::npos) << copier_->describe();
  submit(1, kStore, 0, 2);
  copier_->wait(Ids{1});
  ASSERT_EQ(state_.count_issued(), 2u);
  for (const DeviceCopy& copy : state_.issued) EXPECT_EQ(copy.path, CopyPath::kDma);
}

TEST_F(DeviceCopierTest, a_result_counts_the_refused_batches_of_its_job) {
  state_.automatic = true;
  state_.refuse_batches = true;
  start();
  submit(1, kStore, 0, 3);
  submit(2, kStore, 10, 1);
  copier_->wait(Ids{1, 2});
  const auto results = copier_->poll();
  ASSERT_EQ(results.size(), 2u);
  EXPECT_EQ(results[0].refused_batches + results[1].refused_batches, 4u);
  EXPECT_EQ(results[results[0].job_id == 1 ? 0 : 1].refused_batches, 3u);
}

TEST_F(DeviceCopierTest, a_copy_that_cannot_be_issued_fails_only_its_job) {
  state_.automatic = true;
  start();
  submit(1, kStore, 0, 2);
  copier_->wait(Ids{1});
  {
    std::lock_guard lock(state_.mutex);
    state_.issue_status = Status::error(StatusKind::kDevice, "copy: refused");
  }
  submit(2, kStore, 4, 8);
  copier_->wait(Ids{2});
  {
    std::lock_guard lock(state_.mutex);
    state_.issue_status = Status::ok();
  }
  submit(3, kStore, 20, 2);
  copier_->wait(Ids{3});
  const auto results = copier_->poll();
  ASSERT_EQ(ids(results), (Ids{1, 2, 3}));
  EXPECT_TRUE(results[0].status.is_ok());
  EXPECT_EQ(results[1].status.message(), "copy: refused");
  EXPECT_EQ(results[1].failed_groups, ~std::uint64_t{0});
  EXPECT_EQ(results[1].ticket, 102u);
  EXPECT_TRUE(results[2].status.is_ok());
}

TEST_F(DeviceCopierTest, a_failed_job_ends_after_its_copies_in_flight) {
  start();
  submit(1, kStore, 0, 20);
  state_.until_issued(kInFlight);
  {
    std::lock_guard lock(state_.mutex);
    state_.query_status = Status::error(StatusKind::kDevice, "query: context lost");
  }
  copier_->wait(Ids{1});
  const auto results = copier_->poll();
  ASSERT_EQ(results.size(), 1u);
  EXPECT_EQ(results[0].status.kind(), StatusKind::kDevice);
  EXPECT_EQ(results[0].failed_groups, ~std::uint64_t{0});
  EXPECT_LE(blocks().size(), 20u);
  EXPECT_TRUE(state_.in_flight.empty());
}

TEST_F(DeviceCopierTest, a_compute_event_that_cannot_be_recorded_fails_the_job) {
  state_.mark_status = Status::error(StatusKind::kDevice, "mark: bad stream");
  start();
  submit(1, kStore, 0, 2);
  const auto results = copier_->poll();
  ASSERT_EQ(results.size(), 1u);
  EXPECT_EQ(results[0].failed_groups, ~std::uint64_t{0});
  EXPECT_TRUE(blocks().empty());
}

TEST_F(DeviceCopierTest, close_finishes_queued_jobs_and_refuses_later_ones) {
  state_.automatic = true;
  start();
  for (std::uint64_t id = 0; id < 32; ++id) submit(id, kStore, static_cast<std::int64_t>(id * 2), 2);
  copier_->close();
  EXPECT_EQ(cache_, area_);
  submit(99, kStore, 0, 1);
  copier_->wait(Ids{99});
  const auto results = copier_->poll();
  ASSERT_EQ(results.size(), 33u);
  EXPECT_EQ(results.back().status.kind(), StatusKind::kUnavailable);
}

TEST_F(DeviceCopierTest, empty_and_invalid_jobs_never_reach_the_device) {
  start();
  submit(1, kLoad, 0, 0);
  EXPECT_EQ(ids(copier_->poll()), (Ids{1}));
  EXPECT_THROW(submit(2, kLoad, 63, 2), InvalidArgument);
  copier_->wait(Ids{2});
  EXPECT_TRUE(blocks().empty());
}

}  // namespace
}  // namespace kv_offload
