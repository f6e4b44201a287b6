// SPDX-License-Identifier: Apache-2.0
#include "cache/store_path.h"

#include "cache/parts.h"

namespace kv_offload {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class StorePathTest : public ::testing::Test {
 protected:
  explicit StorePathTest(PartsOptions options = {})
      : parts_(std::move(options)),
        stores_({parts_.groups, parts_.chunks, parts_.key_history, parts_.tickets, parts_.costs,
                 parts_.row_provider, parts_.write_back, parts_.requests, parts_.metrics}) {}
  static std::vector<ChunkKey> keys(const Names& names) {
    std::vector<ChunkKey> result;
    for (const auto& name : names) result.push_back(key_of(name));
    return result;
  }
  StoreGrant prepare(const Names& names) { return stores_.prepare(request_, keys(names), {}); }

  RequestParts parts_;
  StorePath stores_;
  const RequestHandle request_ = parts_.requests.begin({});
};

TEST_F(StorePathTest, a_chunk_is_resident_when_all_ranks_reported_it) {
  const StoreGrant grant = prepare({"a"});
  EXPECT_THAT(grant.accepted, ElementsAre(0));
  EXPECT_EQ(parts_.chunks.resident(), 0u);
  parts_.report(grant.transfer.ticket);
  stores_.complete(keys({"a"}), true);
  EXPECT_EQ(parts_.chunks.resident(), 1u);
  EXPECT_EQ(parts_.tier->queued_writes(), 1u);
}

TEST_F(StorePathTest, a_refused_first_chunk_does_not_fail_the_rest_of_its_job) {
  const StoreGrant grant = prepare({"a", "b"});
  parts_.report(grant.transfer.ticket, std::uint64_t{1} << 32);
  stores_.complete(keys({"b", "a"}), true);  // vLLM passes the keys in any order
  EXPECT_EQ(parts_.chunks.find(key_of("a")), nullptr);
  EXPECT_NE(parts_.chunks.find(key_of("b")), nullptr);
  EXPECT_EQ(parts_.metrics.value("kv_offload_failures_total", {"cpu", "store", "device"}), 0);
}

TEST_F(StorePathTest, a_chunk_that_failed_is_absent_and_its_row_waits_for_the_report) {
  const StoreGrant grant = prepare({"a", "b"});
  stores_.complete(keys({"a"}), true);  // no report yet
  parts_.report(grant.transfer.ticket, 1);
  stores_.complete(keys({"b"}), true);  // its group failed
  EXPECT_EQ(parts_.chunks.resident(), 0u);
  EXPECT_EQ(parts_.metrics.value("kv_offload_failures_total", {"cpu", "store", "device"}), 1);
  EXPECT_GT(parts_.metrics.value("kv_offload_dropped_bytes_total", {"cpu", "incomplete"}), 0);
  EXPECT_EQ(parts_.free_rows(), 3u);
  parts_.chunks.poll();
  EXPECT_EQ(parts_.free_rows(), 4u);
}

TEST_F(StorePathTest, keys_after_a_declined_key_are_declined_until_its_next_offer) {
  EXPECT_THAT(prepare({"a", "b", "c", "d", "e", "f"}).accepted, ElementsAre(0, 1, 2, 3));
  EXPECT_EQ(parts_.metrics.value("kv_offload_dropped_bytes_total", {"cpu", "pressure"}), 2 * kPageBytes);
  stores_.complete(keys({"a", "b"}), false);
  parts_.report(1);
  parts_.chunks.poll();
  EXPECT_THAT(prepare({"f"}).accepted, IsEmpty()) << "without e there would be a gap";
  EXPECT_THAT(prepare({"e", "f"}).accepted, ElementsAre(0, 1));
}

TEST_F(StorePathTest, an_offer_that_throws_has_accepted_nothing) {
  for (const char* name : {"w", "x", "y", "z"}) parts_.resident(name);
  int calls = 0;
  parts_.tier->on_touch = [&] {
    if (++calls == 3) throw std::runtime_error("planted");
  };
  EXPECT_THROW(prepare({"a", "b", "c"}), std::runtime_error);
  EXPECT_FALSE(parts_.has("a"));
  EXPECT_FALSE(parts_.has("b"));
  EXPECT_EQ(parts_.free_rows(), 2u);
  EXPECT_TRUE(parts_.has("z"));
}

// Rank 1 runs on another host, so vLLM may complete a store before its report arrives.
class StoresOnHosts : public StorePathTest {
 protected:
  StoresOnHosts() : StorePathTest({.spans_hosts = true}) {}
};

TEST_F(StoresOnHosts, a_chunk_is_resident_when_a_late_report_has_arrived) {
  const StoreGrant grant = prepare({"a", "b"});
  parts_.report(grant.transfer.ticket);
  stores_.complete(keys({"a", "b"}), true);
  stores_.poll();
  EXPECT_EQ(parts_.chunks.resident(), 0u);
  EXPECT_TRUE(parts_.has("a"));
  parts_.report_from_afar(grant.transfer.ticket);
  stores_.poll();
  EXPECT_EQ(parts_.chunks.resident(), 2u);
  EXPECT_EQ(parts_.metrics.value("kv_offload_failures_total", {"cpu", "store", "device"}), 0);
}

TEST_F(StoresOnHosts, a_chunk_that_failed_on_another_host_is_absent) {
  const StoreGrant grant = prepare({"a"});
  parts_.report(grant.transfer.ticket);
  stores_.complete(keys({"a"}), true);
  parts_.report_from_afar(grant.transfer.ticket, ~std::uint64_t{0});
  stores_.poll();
  EXPECT_FALSE(parts_.has("a"));
  EXPECT_EQ(parts_.metrics.value("kv_offload_failures_total", {"cpu", "store", "device"}), 1);
}

TEST_F(StoresOnHosts, several_late_stores_end_in_any_order) {
  const Ticket first = prepare({"a"}).transfer.ticket, second = prepare({"b"}).transfer.ticket;
  stores_.complete(keys({"a"}), true);
  stores_.complete(keys({"b"}), true);
  parts_.report(second);
  parts_.report_from_afar(second);
  stores_.poll();
  EXPECT_EQ(parts_.chunks.resident(), 1u);
  parts_.report(first);
  parts_.report_from_afar(first);
  stores_.poll();
  EXPECT_EQ(parts_.chunks.resident(), 2u);
}

TEST_F(StoresOnHosts, a_late_report_of_a_forgotten_store_does_not_end_a_new_one) {
  const Ticket old = prepare({"a"}).transfer.ticket;
  stores_.complete(keys({"a"}), true);
  parts_.chunks.discard_store(parts_.chunks.slot_of(parts_.chunks.find(key_of("a"))));
  const Ticket fresh = prepare({"a"}).transfer.ticket;
  EXPECT_NE(old, fresh);
  parts_.report(fresh);
  parts_.report_from_afar(fresh);
  parts_.report(old);
  parts_.report_from_afar(old);
  stores_.poll();
  EXPECT_EQ(parts_.chunks.resident(), 0u) << "vLLM has not completed the new store";
  stores_.complete(keys({"a"}), true);
  EXPECT_EQ(parts_.chunks.resident(), 1u);
}

TEST_F(StoresOnHosts, nothing_is_stored_while_a_host_is_lost) {
  parts_.region->set_cut_off(true);
  EXPECT_THAT(prepare({"a", "b"}).accepted, IsEmpty());
  EXPECT_EQ(parts_.metrics.value("kv_offload_dropped_bytes_total", {"cpu", "host_lost"}), 2 * kPageBytes);
  parts_.region->set_cut_off(false);
  EXPECT_THAT(prepare({"b"}).accepted, IsEmpty()) << "without a there would be a gap";
  EXPECT_THAT(prepare({"a", "b"}).accepted, ElementsAre(0, 1));
}

TEST_F(StorePathTest, nothing_is_accepted_after_close) {
  stores_.close();
  EXPECT_THAT(prepare({"a"}).accepted, IsEmpty());
}

}  // namespace
}  // namespace kv_offload
