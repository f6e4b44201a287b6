// SPDX-License-Identifier: Apache-2.0
#include "cache/retention.h"

#include <algorithm>

#include "cache/parts.h"
#include "out_of_memory.h"

namespace kv_offload {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr SessionId kFirst{2, 1}, kSecond{2, 2}, kThird{2, 3};
constexpr std::uint64_t kRow = kPageBytes;

class RetentionTest : public ::testing::Test {
 protected:
  // 16 rows; hints may pin 8 of them, of one client 4.
  RetentionTest() : retention_({parts_.groups, parts_.chunks, parts_.clock}, 8 * kRow) {}

  static PartsOptions with_rows(std::uint64_t rows) {
    PartsOptions made;
    made.rows = rows;
    return made;
  }
  // Stores chunks and returns their ids from the last to the first.
  std::vector<ChunkId> prompt(const Names& names) {
    std::vector<ChunkId> ids;
    for (const auto& name : names) {
      if (!parts_.has(name)) parts_.resident(name);
      ids.insert(ids.begin(), chunk_id(key_of(name)));
    }
    return ids;
  }
  HintOutcome retain(SessionId session, const std::vector<ChunkId>& chunks, double seconds,
                     std::int8_t priority = 0) {
    return retention_.retain({session, 1, priority, chunks}, seconds);
  }
  HintOutcome pin(SessionId session, const std::vector<ChunkId>& chunks, double seconds,
                  std::uint64_t bytes = 0, std::uint64_t client = 1) {
    return retention_.pin({session, client, 0, chunks}, seconds, bytes);
  }
  const ChunkEntry& at(const std::string& name) { return *parts_.chunks.find(key_of(name)); }
  std::vector<int> priorities(const Names& names) {
    std::vector<int> found;
    for (const auto& name : names) found.push_back(at(name).priority);
    return found;
  }
  // The names of all chunks that would be evicted, in order.
  Names victims() {
    Names names;
    for (const Slot slot : parts_.chunks.next_victims(100)) {
      const std::string name(parts_.chunks.at(slot).key.bytes().substr(0, 16));
      names.push_back(name.substr(0, name.find('-')));
    }
    return names;
  }
  void pass(int seconds) {
    parts_.clock.advance(std::chrono::seconds(seconds));
    retention_.end_step();
  }

  OpParts parts_{with_rows(16)};
  Retention retention_;
};

TEST_F(RetentionTest, a_retained_prompt_is_evicted_last_until_its_time_is_over) {
  const auto chunks = prompt({"a", "b"});
  prompt({"x", "y", "z"});
  EXPECT_EQ(retain(kFirst, chunks, 10), HintOutcome::kAccepted);
  EXPECT_THAT(victims(), ElementsAre("x", "y", "z", "b", "a"));
  pass(9);
  EXPECT_THAT(priorities({"a", "b"}), ElementsAre(2, 2));
  pass(1);
  EXPECT_THAT(priorities({"a", "b", "x"}), ElementsAre(0, 0, 0));
  parts_.chunks.access(parts_.chunks.slot_of(&at("x")), 1, 0);
  EXPECT_THAT(victims(), ElementsAre("y", "z", "b", "a", "x"));
}

TEST_F(RetentionTest, the_next_use_ends_the_retention) {
  const auto chunks = prompt({"a", "b"});
  retain(kFirst, chunks, 10);
  parts_.chunks.access(parts_.chunks.slot_of(&at("a")), 1, 0);
  EXPECT_THAT(priorities({"a", "b"}), ElementsAre(0, 2));
  pass(10);
  EXPECT_THAT(priorities({"a", "b"}), ElementsAre(0, 0));
}

TEST_F(RetentionTest, a_retention_keeps_pins_and_high_priorities) {
  const auto chunks = prompt({"a", "b"});
  const Slot a = parts_.chunks.slot_of(&at("a")), b = parts_.chunks.slot_of(&at("b"));
  parts_.chunks.pin(a);
  parts_.chunks.access(b, 1, 1);  // of a request with a high priority
  retain(kFirst, chunks, 10, -1);
  pass(10);
  EXPECT_THAT(priorities({"a", "b"}), ElementsAre(0, 1)) << "not below what other requests gave them";
  EXPECT_THAT(victims(), ElementsAre("b"));
  parts_.chunks.unpin(a);
  EXPECT_THAT(victims(), ElementsAre("a", "b"));
}

TEST_F(RetentionTest, a_new_retention_replaces_the_earlier_one) {
  const auto first = prompt({"a", "b"}), second = prompt({"a", "c"});
  retain(kFirst, first, 10);
  EXPECT_EQ(retain(kFirst, second, 20), HintOutcome::kAccepted);
  EXPECT_THAT(priorities({"a", "b", "c"}), ElementsAre(2, 0, 2));
  pass(10);
  EXPECT_THAT(priorities({"a", "b", "c"}), ElementsAre(2, 0, 2));
  retention_.end_retention(kFirst);
  EXPECT_THAT(priorities({"a", "b", "c"}), ElementsAre(0, 0, 0));
}

TEST_F(RetentionTest, a_chunk_is_retained_until_its_last_session_ends_that) {
  const auto first = prompt({"a", "b"}), second = prompt({"a", "c"});
  retain(kFirst, first, 10);
  retain(kSecond, second, 20);
  pass(10);
  EXPECT_THAT(priorities({"a", "b", "c"}), ElementsAre(2, 0, 2));
  retain(kFirst, first, 20);
  retention_.end(kSecond);
  EXPECT_THAT(priorities({"a", "b", "c"}), ElementsAre(2, 2, 0));
  retention_.end(kFirst);
  EXPECT_THAT(priorities({"a", "b", "c"}), ElementsAre(0, 0, 0));
  retain(kSecond, second, 10);
  pass(10);
  EXPECT_THAT(priorities({"a", "c"}), ElementsAre(0, 0)) << "nothing is left of the first session";
}

TEST_F(RetentionTest, a_step_ends_the_retention_of_a_bounded_number_of_chunks) {
  constexpr std::size_t kChunks = 3 * Retention::kEndedAtOnce / 2;
  OpParts parts(with_rows(kChunks));
  Retention retention({parts.groups, parts.chunks, parts.clock}, 0);
  std::vector<ChunkId> chunks;
  std::vector<Slot> slots;
  for (std::size_t i = 0; i < kChunks; ++i) {
    slots.push_back(parts.resident(fmt::format("c{}", i)));
    chunks.push_back(chunk_id(parts.chunks.at(slots.back()).key));
  }
  const auto raised = [&] {
    return static_cast<std::size_t>(std::count_if(
        slots.begin(), slots.end(), [&](Slot slot) { return parts.chunks.at(slot).priority > 0; }));
  };
  retention.retain({kFirst, 1, 0, chunks}, 1);
  EXPECT_EQ(raised(), kChunks);
  parts.clock.advance(std::chrono::seconds(1));
  retention.end_step();
  EXPECT_EQ(raised(), kChunks - Retention::kEndedAtOnce);
  retention.end_step();
  EXPECT_EQ(raised(), 0u);
}

TEST_F(RetentionTest, a_pinned_prompt_is_not_evicted_until_its_time_is_over) {
  const auto chunks = prompt({"a", "b"});
  prompt({"x"});
  EXPECT_EQ(pin(kFirst, chunks, 10), HintOutcome::kAccepted);
  EXPECT_EQ(retention_.pinned_bytes(), 2 * kRow);
  EXPECT_THAT(victims(), ElementsAre("x"));
  pass(9);
  EXPECT_THAT(victims(), ElementsAre("x"));
  pass(1);
  EXPECT_THAT(victims(), ElementsAre("a", "b", "x"));
  EXPECT_EQ(retention_.pinned_bytes(), 0u);
  EXPECT_EQ(parts_.chunks.pinned(), 0u);
}

TEST_F(RetentionTest, pins_are_bounded_for_each_client_and_for_all) {
  const auto long_prompt = prompt({"a", "b", "c", "d", "e", "f"});
  EXPECT_EQ(pin(kFirst, long_prompt, 10), HintOutcome::kClipped);
  EXPECT_EQ(retention_.pinned_bytes(), 4 * kRow);
  EXPECT_THAT(victims(), ElementsAre("e", "f"));                       // the head of the prompt is pinned
  EXPECT_EQ(pin(kSecond, prompt({"x"}), 10), HintOutcome::kRejected);  // the same client
  EXPECT_EQ(pin(kSecond, prompt({"u", "v", "w", "x", "y"}), 10, 0, 2), HintOutcome::kClipped);
  EXPECT_EQ(retention_.pinned_bytes(), 8 * kRow);
  EXPECT_EQ(pin(kThird, prompt({"z"}), 10, 0, 3), HintOutcome::kRejected);
  retention_.end(kFirst);
  EXPECT_EQ(pin(kThird, prompt({"z"}), 10, 0, 3), HintOutcome::kAccepted);
  EXPECT_EQ(retention_.pinned_bytes(), 5 * kRow);
}

TEST_F(RetentionTest, a_request_may_pin_fewer_bytes_than_its_prompt) {
  const auto chunks = prompt({"a", "b", "c"});
  EXPECT_EQ(pin(kFirst, chunks, 10, 2 * kRow), HintOutcome::kAccepted);
  EXPECT_THAT(victims(), ElementsAre("c"));
}

TEST_F(RetentionTest, a_new_pin_replaces_the_earlier_one_also_of_another_client) {
  const auto chunks = prompt({"a", "b"});
  pin(kFirst, chunks, 10, 0, 1);
  EXPECT_EQ(pin(kFirst, chunks, 30, kRow, 2), HintOutcome::kAccepted);
  EXPECT_EQ(retention_.pinned_bytes(), kRow);
  pass(10);
  EXPECT_EQ(retention_.pinned_bytes(), kRow);
  EXPECT_EQ(pin(kSecond, prompt({"c", "d", "e", "f"}), 10, 0, 1), HintOutcome::kAccepted);
  pass(20);
  EXPECT_EQ(retention_.pinned_bytes(), 0u);
}

TEST_F(RetentionTest, a_session_may_be_retained_and_pinned) {
  const auto chunks = prompt({"a"});
  pin(kFirst, chunks, 5);
  retain(kFirst, chunks, 10);
  pass(5);
  EXPECT_EQ(retention_.pinned_bytes(), 0u);
  EXPECT_EQ(at("a").priority, 2);
  pass(5);
  EXPECT_EQ(at("a").priority, 0);
}

TEST_F(RetentionTest, a_prompt_that_is_not_in_host_memory_is_missing) {
  const std::vector<ChunkId> chunks{chunk_id(key_of("a"))};
  EXPECT_EQ(retain(kFirst, chunks, 10), HintOutcome::kMissing);
  EXPECT_EQ(pin(kFirst, chunks, 10), HintOutcome::kMissing);
  pass(10);
  EXPECT_THAT(victims(), IsEmpty());
}

TEST_F(RetentionTest, a_chunk_that_is_being_copied_is_left_out) {
  const Slot slot = parts_.filling("a", kNoTicket);
  const std::vector<ChunkId> chunks{chunk_id(key_of("a"))};
  EXPECT_EQ(pin(kFirst, chunks, 10), HintOutcome::kMissing);
  EXPECT_EQ(retain(kFirst, chunks, 10), HintOutcome::kMissing);
  EXPECT_EQ(parts_.chunks.at(slot).pins, 1u);
  parts_.chunks.discard(slot);  // its copy failed
  pass(10);
}

TEST_F(RetentionTest, a_pin_that_runs_out_of_memory_ends_like_all_others) {
  const auto chunks = prompt({"a", "b", "c"});
  const unsigned failures =
      testing::fail_each_allocation([&] { pin(kFirst, chunks, 10); },
                                    [&] {
                                      EXPECT_EQ(retention_.pinned_bytes(), parts_.chunks.pinned() * kRow);
                                      pass(10);
                                      EXPECT_EQ(retention_.pinned_bytes(), 0u);
                                      EXPECT_EQ(parts_.chunks.pinned(), 0u);
                                    });
  EXPECT_GT(failures, 3u);
  EXPECT_EQ(retention_.pinned_bytes(), 3 * kRow);
  pass(10);
  EXPECT_EQ(pin(kSecond, prompt({"a", "b", "c", "d"}), 10), HintOutcome::kAccepted) << "no bytes are counted";
}

TEST_F(RetentionTest, a_retention_that_runs_out_of_memory_ends_like_all_others) {
  const auto chunks = prompt({"a", "b", "c"});
  const unsigned failures =
      testing::fail_each_allocation([&] { retain(kFirst, chunks, 10); },
                                    [&] {
                                      pass(10);
                                      EXPECT_THAT(priorities({"a", "b", "c"}), ElementsAre(0, 0, 0));
                                    });
  EXPECT_GT(failures, 3u);
  pass(10);
  EXPECT_THAT(priorities({"a", "b", "c"}), ElementsAre(0, 0, 0));
}

TEST_F(RetentionTest, the_end_of_a_retention_allocates_nothing) {
  const auto chunks = prompt({"a", "b"});
  for (const SessionId session : {kFirst, kSecond, kThird}) {
    pin(session, chunks, 10);
    retain(session, chunks, 20);
  }
  const testing::FailingAllocation failing(0);
  retention_.end_retention(kFirst);
  retention_.end(kSecond);
  pass(10);
  pass(10);
  EXPECT_FALSE(failing.came());
  EXPECT_EQ(retention_.pinned_bytes(), 0u);
  EXPECT_EQ(parts_.chunks.pinned(), 0u);
}

TEST_F(RetentionTest, a_reset_forgets_pins_with_their_chunks) {
  const auto chunks = prompt({"a", "b"});
  pin(kFirst, chunks, 10);
  retain(kFirst, chunks, 10);
  parts_.chunks.forget();
  retention_.forget();
  EXPECT_EQ(retention_.pinned_bytes(), 0u);
  const auto again = prompt({"a"});
  EXPECT_EQ(pin(kFirst, again, 10), HintOutcome::kAccepted);
  pass(10);
  EXPECT_EQ(parts_.chunks.pinned(), 0u);
}

}  // namespace
}  // namespace kv_offload
