// SPDX-License-Identifier: Apache-2.0
#include "memory/control_page.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <thread>

#include "memory/shm_fixture.h"

namespace kv_offload {
namespace {

constexpr std::uint64_t kAllGroups = ~std::uint64_t{0};

// One scheduler and two workers in one process; they share the mapping.
class Tickets : public ShmTest {
 protected:
  TicketResult result(Ticket ticket) { return region_->result(ticket, &failed_); }
  void report(Ticket ticket, std::uint64_t failed = 0) {
    region_->report(0, ticket, failed);
    region_->report(1, ticket, failed);
  }
  std::unique_ptr<HostRegion> region_ = HostRegion::attach_scheduler(options(8 * kMiB, 2));
  std::uint64_t failed_ = 0;
};

TEST_F(Tickets, a_ticket_is_pending_until_every_rank_reported) {
  EXPECT_EQ(result(1), TicketResult::kPending);
  region_->report(1, 1, 0);
  EXPECT_EQ(result(1), TicketResult::kPending);
  region_->report(0, 1, 0);
  EXPECT_EQ(result(1), TicketResult::kDone);
  EXPECT_EQ(failed_, 0u);
  EXPECT_EQ(result(2), TicketResult::kPending);
}

TEST_F(Tickets, a_group_that_failed_on_any_rank_has_failed) {
  region_->report(0, 9, 0b0110);
  region_->report(1, 9, 0b1100);
  EXPECT_EQ(result(9), TicketResult::kDone);
  EXPECT_EQ(failed_, 0b1110u);
}

TEST_F(Tickets, tickets_may_be_reported_in_any_order) {
  report(7, 7);
  report(3, 3);
  EXPECT_EQ(result(3), TicketResult::kDone);
  EXPECT_EQ(failed_, 3u);
  EXPECT_EQ(result(7), TicketResult::kDone);
  EXPECT_EQ(failed_, 7u);
}

TEST_F(Tickets, a_ticket_overwritten_in_the_ring_failed_in_every_group) {
  report(5, 0);
  report(5 + HostRegion::kTicketSlots, 0b1);
  EXPECT_EQ(result(5), TicketResult::kDone);
  EXPECT_EQ(failed_, kAllGroups);
  EXPECT_EQ(result(5 + HostRegion::kTicketSlots), TicketResult::kDone);
  EXPECT_EQ(failed_, 0b1u);
}

TEST_F(Tickets, a_late_report_does_not_hide_the_newer_ticket) {
  report(5 + HostRegion::kTicketSlots, 0b1);
  report(5, 0);
  EXPECT_EQ(result(5), TicketResult::kDone);
  EXPECT_EQ(failed_, kAllGroups);
  EXPECT_EQ(result(5 + HostRegion::kTicketSlots), TicketResult::kDone);
  EXPECT_EQ(failed_, 0b1u);
}

TEST_F(Tickets, each_ticket_of_a_full_ring_keeps_its_result) {
  for (Ticket ticket = 1; ticket <= HostRegion::kTicketSlots; ++ticket) report(ticket, ticket);
  for (Ticket ticket = 1; ticket <= HostRegion::kTicketSlots; ++ticket) {
    ASSERT_EQ(result(ticket), TicketResult::kDone);
    ASSERT_EQ(failed_, ticket);
  }
}

TEST_F(Tickets, an_invalid_ticket_or_rank_is_refused) {
  EXPECT_THROW(result(kNoTicket), std::logic_error);
  EXPECT_THROW(region_->report(2, 1, 0), InvalidArgument);
}

TEST_F(Tickets, a_replicated_store_needs_rank_0_and_a_load_every_rank) {
  RegionOptions replicated = options(8 * kMiB, 2, "replicated");
  replicated.num_areas = 1;
  const auto region = HostRegion::attach_scheduler(replicated);
  region->report(0, 4, 0);
  EXPECT_EQ(region->result(4, &failed_), TicketResult::kDone);
  EXPECT_EQ(region->result(4, &failed_, TicketKind::kLoad), TicketResult::kPending);
  region->report(1, 4, 0b1);
  EXPECT_EQ(region->result(4, &failed_, TicketKind::kLoad), TicketResult::kDone);
  EXPECT_EQ(failed_, 0b1u);
}

TEST(ControlPage, the_page_takes_at_most_2_percent_of_64_mib) {
  EXPECT_LE(ControlPage::bytes(1), 64 * kMiB / 50);
  EXPECT_LE(ControlPage::bytes(4), 64 * kMiB / 50);
  EXPECT_EQ(ControlPage::padded_bytes(64) % kHugePageBytes, 0u);
}

TEST(ControlPage, memory_without_a_control_page_is_refused) {
  alignas(4096) static std::byte page[4096]{};
  EXPECT_THROW(ControlPage(page, {4096, 4096, 1, 1}), ResourceError);
}

// One scheduler and two workers, which follow its requests when the test says so.
class NeighbourSlots : public ::testing::Test {
 protected:
  static constexpr std::uint32_t kWorkers = 2;
  NeighbourSlots() {
    std::memset(memory_.get(), 0, kBytes);
    ControlPage::initialise(memory_.get(), kSizes);
    page_ = ControlPage(memory_.get(), kSizes);
  }
  void follow(std::uint32_t rank) { page_.set_done(0, rank, page_.neighbour(0)->generation); }

  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };
  static constexpr ControlPage::Sizes kSizes{
      .bytes = 2 * kMiB, .area_bytes = kMiB, .num_areas = kWorkers, .num_workers = kWorkers};
  const std::size_t kBytes = round_up(ControlPage::bytes(kWorkers), kPageBytes);
  std::unique_ptr<std::byte, Free> memory_{static_cast<std::byte*>(std::aligned_alloc(kPageBytes, kBytes))};
  ControlPage page_;
};

TEST_F(NeighbourSlots, a_request_counts_once_every_worker_has_carried_it_out) {
  EXPECT_TRUE(page_.has_unmapped(0));
  EXPECT_FALSE(page_.has_mapped(0));
  page_.request_neighbour(0, {7, 1, 2});
  EXPECT_EQ(page_.neighbour(0)->area.inode, 7u);
  EXPECT_EQ(page_.neighbour(0)->area.number, 1u);
  EXPECT_EQ(page_.neighbour(0)->area.reader, 2u);
  follow(0);
  EXPECT_FALSE(page_.has_mapped(0));
  follow(1);
  EXPECT_TRUE(page_.has_mapped(0));
  EXPECT_FALSE(page_.has_unmapped(0));
  EXPECT_TRUE(page_.has_unmapped(1)) << "another slot";
}

TEST_F(NeighbourSlots, an_answer_to_an_earlier_request_does_not_count_for_a_later_one) {
  page_.request_neighbour(0, {7, 1, 2});
  const std::uint64_t first = page_.neighbour(0)->generation;
  follow(1);
  page_.dismiss_neighbour(0);
  EXPECT_FALSE(page_.has_unmapped(0)) << "no worker has answered";
  follow(1);
  EXPECT_FALSE(page_.has_unmapped(0)) << "the first worker may be mapping it";
  page_.request_neighbour(0, {8, 1, 2});
  follow(1);
  page_.set_done(0, 0, first);
  EXPECT_FALSE(page_.has_mapped(0));
  follow(0);
  EXPECT_TRUE(page_.has_mapped(0));
  page_.dismiss_neighbour(0);
  EXPECT_FALSE(page_.has_mapped(0));
}

TEST_F(NeighbourSlots, a_refusal_counts_until_the_worker_succeeds_or_the_request_ends) {
  EXPECT_FALSE(page_.is_refused(0));
  page_.request_neighbour(0, {7, 1, 2});
  page_.set_refused(0, 1, page_.neighbour(0)->generation);
  EXPECT_TRUE(page_.is_refused(0));
  follow(1);
  EXPECT_FALSE(page_.is_refused(0));
  page_.request_neighbour(0, {8, 1, 2});
  page_.set_refused(0, 1, page_.neighbour(0)->generation);
  page_.dismiss_neighbour(0);
  EXPECT_FALSE(page_.is_refused(0));
}

TEST_F(NeighbourSlots, no_worker_sees_parts_of_two_requests) {
  constexpr int kReads = 50000;
  std::atomic<bool> done{false};
  std::thread scheduler([&] {
    for (std::uint64_t i = 1; !done.load(std::memory_order_relaxed); ++i)
      page_.request_neighbour(0, {i, static_cast<std::uint8_t>(i), static_cast<std::uint8_t>(i >> 8)});
  });
  int torn = 0;
  for (int found = 0; found < kReads;) {
    const auto seen = page_.neighbour(0);
    if (!seen || seen->area.inode == 0) continue;  // no request yet
    const std::uint64_t i = seen->area.inode;
    const bool is_whole = seen->area.number == static_cast<std::uint8_t>(i) &&
                          seen->area.reader == static_cast<std::uint8_t>(i >> 8) && seen->generation == 2 * i;
    torn += is_whole ? 0 : 1;
    ++found;
  }
  done = true;
  scheduler.join();
  EXPECT_EQ(torn, 0);
}

}  // namespace
}  // namespace kv_offload
