// SPDX-License-Identifier: Apache-2.0
// Regions of an engine whose ranks span several hosts. Each host of a test is a region with its own name.
#include <gmock/gmock.h>

#include <map>

#include "memory/host_region.h"
#include "memory/row_shards.h"
#include "memory/shm_fixture.h"

namespace kv_offload {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class RanksOnHosts : public ShmTest {
 protected:
  static constexpr std::uint32_t kRanks = 4;
  // Host 0 has ranks 0 and 1, host 1 has ranks 2 and 3.
  RegionOptions host(std::uint32_t number) const {
    RegionOptions made = options(4 * kMiB, kRanks, "engine host " + std::to_string(number));
    made.first_rank = 2 * number;
    made.local_ranks = 2;
    return made;
  }
  std::unique_ptr<HostRegion> worker(std::uint32_t rank) const {
    return HostRegion::attach_worker(host(rank / 2), rank, some_geometry(rank));
  }
  static std::map<Ticket, std::uint64_t> by_ticket(const std::vector<RankReport>& reports) {
    std::map<Ticket, std::uint64_t> found;
    for (const RankReport& report : reports) found[report.ticket] = report.failed_groups;
    return found;
  }
  static std::vector<RankReport> take(const HostRegion& region, ReportCursor* cursor) {
    std::vector<RankReport> reports;
    region.take_reports(cursor, &reports);
    return reports;
  }
};

TEST_F(RanksOnHosts, a_host_has_the_areas_of_its_own_ranks_only) {
  const auto scheduler = HostRegion::attach_scheduler(host(0));
  const auto rank = worker(3);
  EXPECT_TRUE(rank->spans_hosts());
  EXPECT_EQ(scheduler->area_bytes(), kMiB);
  EXPECT_EQ(rank->area_bytes(), kMiB);
  EXPECT_EQ(rank->area(3).size(), kMiB);
  rank->area(3).back() = std::byte{1};
  EXPECT_THAT(message_of<InvalidArgument>([&] { (void)rank->area(1); }),
              HasSubstr("area 1 is on another host; this one has 2 from 2 on"));
  EXPECT_THROW((void)scheduler->area(2), InvalidArgument);
  EXPECT_THROW((void)rank->area(4), InvalidArgument);
  std::uint64_t largest = 0;
  for (const auto& name : names())
    largest = std::max<std::uint64_t>(largest, std::filesystem::file_size(directory_ + "/" + name));
  EXPECT_LT(largest, 4 * kMiB + 2 * kMiB) << "the file has room for the areas of other hosts";
}

TEST_F(RanksOnHosts, areas_of_one_host_do_not_overlap) {
  const auto second = worker(2), third = worker(3);
  std::ranges::fill(second->area(2), std::byte{2});
  std::ranges::fill(third->area(3), std::byte{3});
  EXPECT_TRUE(std::ranges::all_of(third->area(2), [](std::byte value) { return value == std::byte{2}; }));
  EXPECT_TRUE(std::ranges::all_of(second->area(3), [](std::byte value) { return value == std::byte{3}; }));
}

TEST_F(RanksOnHosts, a_name_is_removed_when_all_processes_of_its_host_have_attached) {
  const auto scheduler = HostRegion::attach_scheduler(host(0));
  const auto first = worker(0), second = worker(1);
  EXPECT_TRUE(names().empty());
  const auto third = worker(2);
  EXPECT_EQ(names().size(), 1u);
  const auto fourth = worker(3);
  EXPECT_TRUE(names().empty());
}

TEST_F(RanksOnHosts, the_scheduler_waits_until_remote_ranks_are_published) {
  const auto scheduler = HostRegion::attach_scheduler(host(0));
  const auto first = worker(0), second = worker(1);
  EXPECT_THAT(scheduler->wait_for_ranks(std::chrono::nanoseconds(0)).message(), HasSubstr(": 2, 3"));
  scheduler->publish_remote(2, some_geometry(2));
  scheduler->publish_remote(3, some_geometry(3));
  scheduler->publish_remote(3, some_geometry(9));
  ASSERT_TRUE(scheduler->wait_for_ranks(std::chrono::nanoseconds(0)).is_ok());
  EXPECT_EQ(scheduler->geometry(3).fingerprint, "rank 3");
  EXPECT_THAT(message_of<InvalidArgument>([&] { scheduler->publish_remote(1, some_geometry(1)); }),
              HasSubstr("rank 1 runs on this host"));
}

TEST_F(RanksOnHosts, a_job_is_pending_until_ranks_of_all_hosts_have_reported) {
  const auto scheduler = HostRegion::attach_scheduler(host(0));
  std::uint64_t failed = 0;
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    EXPECT_EQ(scheduler->result(5, &failed), TicketResult::kPending);
    scheduler->report(rank, 5, std::uint64_t{1} << rank);
  }
  EXPECT_EQ(scheduler->result(5, &failed), TicketResult::kDone);
  EXPECT_EQ(failed, 0b1111u);
}

TEST_F(RanksOnHosts, reports_are_taken_once_by_each_reader) {
  const auto second = worker(2), third = worker(3);
  ReportCursor cursor, later;
  EXPECT_TRUE(take(*second, &cursor).empty());
  second->report(2, 7, 0b1);
  third->report(3, 8, 0b10);
  EXPECT_EQ(by_ticket(take(*second, &cursor)), (std::map<Ticket, std::uint64_t>{{7, 0b1}, {8, 0b10}}));
  EXPECT_TRUE(take(*second, &cursor).empty());
  second->report(2, 8, 0);
  const std::vector<RankReport> next = take(*second, &cursor);
  ASSERT_EQ(next.size(), 1u);
  EXPECT_EQ(next[0].rank, 2u);
  EXPECT_EQ(take(*second, &later).size(), 3u);
}

TEST_F(RanksOnHosts, a_reader_that_fell_behind_takes_all_results_of_the_ring) {
  const auto region = worker(2);
  ReportCursor cursor;
  region->report(2, 1, 1);
  EXPECT_EQ(take(*region, &cursor).size(), 1u);
  for (Ticket ticket = 2; ticket <= 1024; ++ticket) region->report(2, ticket, ticket);
  EXPECT_EQ(take(*region, &cursor).size(), 1023u) << "those of the journal";
  // The journal has 1,024 entries. The oldest of them may be overwritten by a report that is not counted yet.
  for (Ticket ticket = 1025; ticket <= 2048; ++ticket) region->report(2, ticket, ticket);
  const auto all = by_ticket(take(*region, &cursor));
  EXPECT_EQ(all.size(), 2048u) << "the journal was used";
  for (const auto& [ticket, failed] : all) ASSERT_EQ(failed, ticket);
}

TEST_F(RanksOnHosts, an_endpoint_of_another_host_is_set_once) {
  const auto scheduler = HostRegion::attach_scheduler(host(0));
  const auto first = worker(0);
  EXPECT_EQ(scheduler->endpoint(2), "");
  first->set_endpoint(2, "somewhere");
  first->set_endpoint(2, "elsewhere");
  EXPECT_EQ(scheduler->endpoint(2), "somewhere");
  EXPECT_THROW(first->set_endpoint(3, ""), InvalidArgument);
  EXPECT_THROW(first->set_endpoint(3, std::string(256, 'x')), InvalidArgument);
}

TEST_F(RanksOnHosts, ranks_outside_the_engine_or_the_host_are_refused) {
  RegionOptions wrong = host(1);
  wrong.local_ranks = 3;
  EXPECT_THAT(message_of<InvalidArgument>([&] { HostRegion::attach_worker(wrong, 2, some_geometry()); }),
              HasSubstr("3 ranks of this host from rank 2 on were given; the engine has ranks 0 to 3"));
  EXPECT_THAT(message_of<InvalidArgument>([&] { HostRegion::attach_worker(host(1), 1, some_geometry()); }),
              HasSubstr("rank 1 was given; this host has 2 ranks from rank 2 on"));
  EXPECT_THAT(message_of<InvalidArgument>([&] { HostRegion::attach_scheduler(host(1)); }),
              HasSubstr("it runs on the host of rank 0"));
  EXPECT_TRUE(names().empty());
}

TEST_F(RanksOnHosts, areas_over_several_hosts_and_shared_memory_are_refused) {
  RegionOptions one_area = host(0), shared = host(0), last_three = host(1);
  one_area.num_areas = 1;
  shared.share_for = "model";
  last_three.num_areas = 2;
  last_three.first_rank = 1;
  last_three.local_ranks = 3;
  EXPECT_THAT(message_of<InvalidArgument>([&] { HostRegion::attach_scheduler(one_area); }),
              HasSubstr("1 areas for 4 ranks were given, and this host has 2 ranks from rank 0 on"));
  EXPECT_THAT(message_of<InvalidArgument>([&] { HostRegion::attach_worker(last_three, 1, some_geometry()); }),
              HasSubstr("3 ranks from rank 1 on: ranks on several hosts cannot share an area"));
  EXPECT_THAT(message_of<InvalidArgument>([&] { HostRegion::attach_scheduler(shared); }),
              HasSubstr("cannot be shared"));
}

// The ranks of each host hold the same bytes: one area per host.
class SharedAreas : public RanksOnHosts {
 protected:
  RegionOptions host(std::uint32_t number) const {
    RegionOptions made = RanksOnHosts::host(number);
    made.num_areas = 2;
    return made;
  }
  std::unique_ptr<HostRegion> worker(std::uint32_t rank) const {
    return HostRegion::attach_worker(host(rank / 2), rank, some_geometry(rank));
  }
};

TEST_F(SharedAreas, the_ranks_of_a_host_have_one_area) {
  const auto second = worker(2);
  EXPECT_LT(std::filesystem::file_size(directory_ + "/" + names().at(0)), 5 * kMiB)
      << "the file has room for an area of each rank";
  const auto third = worker(3);
  EXPECT_EQ(third->ranks_per_area(), 2u);
  EXPECT_EQ(third->first_area(), 1u);
  EXPECT_EQ(third->local_areas(), 1u);
  EXPECT_EQ(third->area_bytes(), 2 * kMiB);
  second->area(1).back() = std::byte{5};
  EXPECT_EQ(third->area(1).back(), std::byte{5});
  EXPECT_EQ(third->window().size(), 2 * kMiB);
  EXPECT_THAT(message_of<InvalidArgument>([&] { (void)third->area(0); }),
              HasSubstr("area 0 is on another host; this one has 1 from 1 on"));
}

TEST_F(SharedAreas, a_store_needs_the_first_rank_of_each_host_and_a_load_all_ranks) {
  const auto scheduler = HostRegion::attach_scheduler(host(0));
  std::uint64_t failed = 0;
  scheduler->report(0, 5, 0b1);
  scheduler->report(1, 5, 0b1000);
  EXPECT_EQ(scheduler->result(5, &failed), TicketResult::kPending);
  scheduler->report(2, 5, 0b10);
  EXPECT_EQ(scheduler->result(5, &failed), TicketResult::kDone);
  EXPECT_EQ(failed, 0b11u);
  EXPECT_EQ(scheduler->result(5, &failed, TicketKind::kLoad), TicketResult::kPending);
  scheduler->report(3, 5, 0b100);
  EXPECT_EQ(scheduler->result(5, &failed, TicketKind::kLoad), TicketResult::kDone);
  EXPECT_EQ(failed, 0b1111u);
}

TEST_F(SharedAreas, a_scheduler_learns_the_areas_from_a_worker) {
  const auto rank = worker(1);
  RegionOptions unknown = RanksOnHosts::host(0);
  unknown.local_ranks = 0;
  const auto scheduler = HostRegion::attach_scheduler(unknown);
  EXPECT_EQ(scheduler->num_areas(), 2u);
  EXPECT_EQ(scheduler->options().num_areas, 2u);
  scheduler->area(0).back() = std::byte{7};
  EXPECT_EQ(rank->area(0).back(), std::byte{7});
}

TEST_F(SharedAreas, a_rank_with_other_areas_is_refused) {
  const auto first = worker(2);
  EXPECT_THAT(message_of<InvalidArgument>(
                  [&] { HostRegion::attach_worker(RanksOnHosts::host(1), 3, some_geometry()); }),
              AllOf(HasSubstr("reports 4 areas of host memory for the engine's 4 ranks"),
                    HasSubstr("(of ranks 2 to 3) reports 2"), HasSubstr("start all ranks with the same")));
}

TEST_F(SharedAreas, a_kept_region_with_other_areas_is_replaced) {
  for (const bool is_shared : {false, true}) {
    RegionOptions made = is_shared ? host(1) : RanksOnHosts::host(1);
    made.keep_for = "model";
    const auto rank = HostRegion::attach_worker(made, 2, some_geometry());
    EXPECT_EQ(rank->kept().origin, is_shared ? RegionOrigin::kReplaced : RegionOrigin::kNew);
    EXPECT_TRUE(rank->keep());
  }
}

TEST_F(SharedAreas, a_row_has_one_shard_on_each_host) {
  const auto scheduler = HostRegion::attach_scheduler(host(0));
  const auto rank = worker(3);
  const std::uint64_t bytes[] = {4096, 8192};
  const std::vector<Shard> first = shards_of_row(*scheduler, 3, bytes, 1),
                           other = shards_of_row(*rank, 3, bytes, 1);
  ASSERT_EQ(first.size(), 1u);
  ASSERT_EQ(other.size(), 1u);
  EXPECT_EQ(first[0].size(), 4096u);
  EXPECT_EQ(other[0].size(), 8192u);
  EXPECT_EQ(other[0].data(), rank->area(1).data() + 3 * kPageBytes);
  EXPECT_TRUE(fits_area(*rank, 510, bytes));
  EXPECT_FALSE(fits_area(*rank, 511, bytes));
}

// Two stages of a pipeline with two tensor-parallel ranks each, on one host.
TEST_F(SharedAreas, a_host_may_have_several_shared_areas) {
  RegionOptions made = options(6 * kMiB, 6, "stages");
  made.num_areas = 3;
  made.local_ranks = 4;
  const auto rank = HostRegion::attach_worker(made, 3, some_geometry());
  EXPECT_EQ(rank->local_areas(), 2u);
  EXPECT_EQ(rank->window().data(), rank->area(1).data());
  EXPECT_EQ(rank->area(1).data() - rank->area(0).data(), 2 * static_cast<std::ptrdiff_t>(kMiB));
  const std::uint64_t bytes[] = {4096, 8192, 4096};
  EXPECT_EQ(shards_of_row(*rank, 0, bytes, 1).size(), 2u);
}

// The hosts may be containers with one /dev/shm.
TEST_F(RanksOnHosts, each_host_adopts_its_own_kept_region_with_its_set) {
  const auto kept = [&](std::uint32_t rank) {
    RegionOptions made = host(rank / 2);
    made.keep_for = "model";
    return HostRegion::attach_worker(made, rank, some_geometry(rank));
  };
  for (const std::uint32_t first : {0u, 2u}) {
    const auto rank = kept(first), second = kept(first + 1);
    EXPECT_EQ(rank->kept(), (kv_offload::KeptRegion{RegionOrigin::kNew, {}}));
    std::ranges::fill(second->area(first + 1), std::byte{static_cast<unsigned char>(first)});
    rank->set_region_set({first + 1, 5});
    EXPECT_TRUE(rank->keep());
  }
  EXPECT_EQ(names().size(), 2u);
  for (const std::uint32_t first : {2u, 0u}) {
    const auto rank = kept(first), second = kept(first + 1);
    EXPECT_EQ(second->kept(), (kv_offload::KeptRegion{RegionOrigin::kAdopted, {first + 1, 5}}));
    EXPECT_EQ(second->area(first + 1).back(), std::byte{static_cast<unsigned char>(first)});
    EXPECT_TRUE(rank->keep());
  }
}

TEST_F(RanksOnHosts, a_kept_region_of_other_ranks_is_replaced) {
  RegionOptions made = host(1);
  made.keep_for = "model";
  {
    const auto rank = HostRegion::attach_worker(made, 2, some_geometry());
    rank->set_region_set({1, 5});
    EXPECT_TRUE(rank->keep());
  }
  made.local_ranks = 1;
  const auto rank = HostRegion::attach_worker(made, 2, some_geometry());
  EXPECT_EQ(rank->kept(), (kv_offload::KeptRegion{RegionOrigin::kReplaced, {}}));
}

TEST_F(RanksOnHosts, processes_of_one_host_must_agree_on_its_ranks) {
  const auto rank = worker(2);
  RegionOptions other = host(1);
  other.local_ranks = 1;
  other.first_rank = 3;
  EXPECT_THAT(message_of<InvalidArgument>([&] { HostRegion::attach_worker(other, 3, some_geometry()); }),
              HasSubstr("the first rank of this host is 3 in this process and 2"));
}

TEST_F(RanksOnHosts, a_scheduler_learns_the_ranks_of_its_host_from_a_worker) {
  const auto rank = worker(1);
  RegionOptions unknown = host(0);
  unknown.local_ranks = 0;
  const auto scheduler = HostRegion::attach_scheduler(unknown);
  EXPECT_EQ(scheduler->local_ranks(), 2u);
  EXPECT_TRUE(scheduler->spans_hosts());
  scheduler->area(1).back() = std::byte{7};
  EXPECT_EQ(rank->area(1).back(), std::byte{7});
  EXPECT_THROW((void)scheduler->area(2), InvalidArgument);
}

TEST_F(RanksOnHosts, a_host_without_enough_memory_names_its_ranks_and_its_bytes) {
  RegionOptions huge = host(1);
  huge.bytes = std::uint64_t{1} << 58;
  EXPECT_THAT(message_of<ResourceError>([&] { HostRegion::attach_worker(huge, 2, some_geometry()); }),
              AllOf(HasSubstr("cpu_bytes_to_use for 4 ranks, of which this host has 2, 1441151880"),
                    HasSubstr(" bytes here with the control page")));
}

TEST_F(RanksOnHosts, a_rank_reports_that_the_scheduler_started_first) {
  RegionOptions unknown = host(0);
  unknown.local_ranks = 0;
  const auto scheduler = HostRegion::attach_scheduler(unknown);
  EXPECT_THAT(
      message_of<InvalidArgument>([&] { worker(0); }),
      HasSubstr("this host has 2 of the 4 ranks, but the host memory region was created for all ranks: the "
                "scheduler started before"));
}

TEST_F(RanksOnHosts, a_region_of_one_host_has_all_ranks) {
  const auto scheduler = HostRegion::attach_scheduler(options(8 * kMiB, 2));
  EXPECT_FALSE(scheduler->spans_hosts());
  EXPECT_EQ(scheduler->local_ranks(), 2u);
}

}  // namespace
}  // namespace kv_offload
