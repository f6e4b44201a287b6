// SPDX-License-Identifier: Apache-2.0
#include "worker/rank_worker.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <map>
#include <optional>

#include "out_of_memory.h"

namespace kv_offload {
namespace {

using enum CopyDirection;
using ::testing::ElementsAre;
using ::testing::Field;
using ::testing::UnorderedElementsAre;

// A copier that records its calls and ends jobs when the test says so.
class FakeCopier final : public BlockCopier {
 public:
  std::string describe() const override { return "fake"; }
  void submit(CopyJob job) override {
    if (refuse_) throw_invalid("job {} contradicts itself", job.id);
    CopyResult& result = running_[job.id];
    result.job_id = job.id;
    result.ticket = job.ticket;
    result.direction = job.direction;
    result.bytes = 1000;
    result.segments = 3;
    result.refused_batches = 2;
  }
  std::vector<CopyResult> poll() override { return std::exchange(finished_, {}); }
  void wait(std::span<const std::uint64_t> job_ids) override {
    for (const std::uint64_t id : job_ids) finish(id);
  }
  void close() override {
    while (!running_.empty()) finish(running_.begin()->first);
  }

  void finish(std::uint64_t id, Status status = Status::ok(), std::uint64_t failed_groups = 0) {
    auto node = running_.extract(id);
    if (node.empty()) return;
    node.mapped().status = std::move(status);
    node.mapped().failed_groups = failed_groups;
    finished_.push_back(std::move(node.mapped()));
  }
  bool refuse_ = false;

 private:
  std::map<std::uint64_t, CopyResult> running_;
  std::vector<CopyResult> finished_;
};

class RankWorkerTest : public ::testing::Test {
 protected:
  RankWorkerTest() {
    static std::atomic<int> counter{0};
    RegionOptions options;
    options.engine_id = fmt::format("rank-worker-test-{}-{}", getpid(), counter++);
    options.bytes = 4 << 20;
    scheduler_ = HostRegion::attach_scheduler(options);
    region_ = HostRegion::attach_worker(options, 0, {.shard_bytes = {4096}, .fingerprint = "test"});
    auto copier = std::make_unique<FakeCopier>();
    copier_ = copier.get();
    worker_ = std::make_unique<RankWorker>(region_, 0, std::move(copier), metrics_,
                                           [this](const std::string& line) { lines_.push_back(line); });
  }
  void submit(std::uint64_t id, CopyDirection direction, Ticket ticket) {
    CopyJob job;
    job.id = id;
    job.direction = direction;
    job.ticket = ticket;
    worker_->submit(std::move(job));
  }
  // Returns the scheduler's view of a ticket; empty while the ticket is pending.
  std::optional<std::uint64_t> reported(Ticket ticket, TicketKind kind = TicketKind::kStore) {
    std::uint64_t failed = 0;
    if (scheduler_->result(ticket, &failed, kind) == TicketResult::kPending) return std::nullopt;
    return failed;
  }
  double failures(const char* direction) {
    return metrics_.value("kv_offload_copy_failures_total", {direction});
  }

  Metrics metrics_;
  std::vector<std::string> lines_;
  std::unique_ptr<HostRegion> scheduler_;
  std::shared_ptr<HostRegion> region_;
  FakeCopier* copier_ = nullptr;
  std::unique_ptr<RankWorker> worker_;
};

TEST_F(RankWorkerTest, the_ticket_is_reported_before_the_result_is_returned) {
  submit(1, kStore, 11);
  EXPECT_TRUE(worker_->poll().empty());
  EXPECT_EQ(reported(11), std::nullopt);
  copier_->finish(1);
  const auto results = worker_->poll();
  ASSERT_EQ(results.size(), 1u);
  EXPECT_EQ(results[0].job_id, 1u);
  EXPECT_EQ(reported(11), 0u);
  EXPECT_EQ(metrics_.value("kv_offload_copy_bytes_total", {"store"}), 1000);
  EXPECT_EQ(metrics_.value("kv_offload_copy_segments_total", {"store"}), 3);
  EXPECT_EQ(metrics_.value("kv_offload_copy_refused_batches_total", {"store"}), 2);
  EXPECT_EQ(failures("store"), 0);
}

TEST_F(RankWorkerTest, no_result_is_lost_when_memory_runs_out) {
  constexpr Ticket kSlots = HostRegion::kTicketSlots;
  for (std::uint64_t id = 1; id <= 4; ++id) submit(id, kStore, id);
  submit(5, kStore, 1 + kSlots);
  for (const std::uint64_t id : {2u, 3u, 4u, 5u}) copier_->finish(id);
  std::vector<CopyResult> results;
  const auto poll = [&] { results = worker_->poll(); };
  EXPECT_GT(testing::fail_each_allocation(poll, [&] { EXPECT_TRUE(results.empty()); }), 2u);
  const auto job = [](std::uint64_t id) { return Field(&CopyResult::job_id, id); };
  EXPECT_THAT(results, ElementsAre(job(2), job(3), job(4)));
  for (const Ticket ticket : {2u, 3u, 4u}) EXPECT_EQ(reported(ticket), 0u);
  EXPECT_EQ(reported(1 + kSlots), std::nullopt) << "it would take the slot of a running job";
  copier_->finish(1);
  poll();
  EXPECT_THAT(results, UnorderedElementsAre(job(1), job(5)));
  EXPECT_EQ(reported(1 + kSlots), 0u);
}

TEST_F(RankWorkerTest, wait_reports_at_once_and_keeps_the_result_for_poll) {
  submit(1, kStore, 11);
  worker_->wait(std::vector<std::uint64_t>{1, 99});
  EXPECT_EQ(reported(11), 0u);
  EXPECT_EQ(worker_->poll().size(), 1u);
  EXPECT_TRUE(worker_->poll().empty());
}

// The rows of a job that counts as reported are used for other chunks.
TEST_F(RankWorkerTest, no_report_takes_the_slot_of_a_running_job) {
  constexpr Ticket kSlots = HostRegion::kTicketSlots;
  submit(1, kLoad, 11);
  submit(2, kStore, 11 + kSlots - 1);
  submit(3, kStore, 11 + kSlots);
  submit(4, kLoad, 12 + kSlots);
  for (const std::uint64_t id : {2u, 3u}) copier_->finish(id);
  auto results = worker_->poll();
  ASSERT_EQ(results.size(), 1u);
  EXPECT_EQ(results[0].job_id, 2u);
  EXPECT_EQ(reported(11, TicketKind::kLoad), std::nullopt);
  EXPECT_EQ(reported(11 + kSlots), std::nullopt);
  copier_->finish(4, Status::error(StatusKind::kDevice, "copy: lost"));
  EXPECT_THROW((void)worker_->poll(), ResourceError) << "known at once";
  EXPECT_EQ(reported(11, TicketKind::kLoad), std::nullopt);
  copier_->finish(1);
  EXPECT_THROW((void)worker_->poll(), ResourceError);
  EXPECT_EQ(reported(11 + kSlots), 0u);
  EXPECT_EQ(reported(12 + kSlots, TicketKind::kLoad), ~std::uint64_t{0});
}

TEST_F(RankWorkerTest, incomplete_chunks_report_their_groups_without_a_failure) {
  submit(1, kStore, 11);
  copier_->finish(1, Status::ok(), 0b10);
  EXPECT_EQ(worker_->poll().size(), 1u);
  EXPECT_EQ(reported(11), 0b10u);
  EXPECT_EQ(failures("store"), 0);
  EXPECT_TRUE(lines_.empty());
}

TEST_F(RankWorkerTest, an_inconsistent_store_fails_in_every_group) {
  copier_->refuse_ = true;
  submit(1, kStore, 11);
  const auto results = worker_->poll();
  ASSERT_EQ(results.size(), 1u);
  EXPECT_EQ(results[0].job_id, 1u);
  EXPECT_FALSE(results[0].status.is_ok());
  EXPECT_EQ(reported(11), ~std::uint64_t{0});
  EXPECT_EQ(failures("store"), 1);
}

TEST_F(RankWorkerTest, a_device_failure_of_a_store_is_logged_once_and_always_counted) {
  for (std::uint64_t id = 1; id <= 3; ++id) {
    submit(id, kStore, 10 + id);
    copier_->finish(id, Status::error(StatusKind::kDevice, "copy: lost"));
  }
  EXPECT_EQ(worker_->poll().size(), 3u);
  EXPECT_EQ(failures("store"), 3);
  ASSERT_EQ(lines_.size(), 1u);
  EXPECT_NE(lines_[0].find("copy: lost"), std::string::npos);
}

TEST_F(RankWorkerTest, a_failed_load_is_never_reported_as_done) {
  submit(1, kStore, 11);
  submit(2, kLoad, 12);
  copier_->finish(2, Status::error(StatusKind::kDevice, "copy: lost"));
  EXPECT_THROW(worker_->wait(std::vector<std::uint64_t>{1}), ResourceError);
  EXPECT_THROW((void)worker_->poll(), ResourceError);
  EXPECT_EQ(reported(12, TicketKind::kLoad), ~std::uint64_t{0});
  EXPECT_EQ(reported(11), 0u);
  EXPECT_EQ(failures("load"), 1);
  EXPECT_EQ(lines_.size(), 1u);
}

TEST_F(RankWorkerTest, close_reports_running_jobs) {
  submit(1, kStore, 11);
  worker_->close();
  EXPECT_EQ(reported(11), 0u);
}

}  // namespace
}  // namespace kv_offload
