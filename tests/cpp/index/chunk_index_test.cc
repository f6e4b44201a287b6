// SPDX-License-Identifier: Apache-2.0
#include "index/chunk_index.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <list>
#include <map>
#include <random>
#include <set>
#include <utility>

#include "out_of_memory.h"
#include "step_watch.h"
#include "test_iterations.h"

namespace kv_offload {
namespace {

ChunkKey key_of(std::string_view name, std::uint32_t group = 0) {
  std::string bytes = fmt::format("{:-<16}", name);
  for (int shift = 24; shift >= 0; shift -= 8) bytes.push_back(static_cast<char>(group >> shift));
  return ChunkKey(bytes);
}

void forget_and_erase(ChunkIndex& index) {
  index.forget();
  while (index.forgotten() > 0) {
    if (const std::optional<Slot> slot = index.next_forgotten()) index.erase(*slot);
  }
}

class ChunkIndexTest : public testing::Test {
 protected:
  ChunkIndex index_{make_eviction_policy("lru"), 4};
  RowId next_row_ = 100;

  Slot fill(std::string_view name) {
    return index_.insert(key_of(name), 0, next_row_++, {}, ChunkState::kFilling);
  }
  Slot store(std::string_view name) {
    const Slot slot = fill(name);
    index_.make_resident(slot, ChunkOrigin::kStore);
    return slot;
  }
  // Stores a chunk and records an access by this request.
  Slot store_for(std::uint32_t request, std::string_view name) {
    const Slot slot = store(name);
    index_.access(slot, request, 0);
    return slot;
  }
  ChunkEntry* find(std::string_view name) { return index_.find(key_of(name)); }
};

TEST_F(ChunkIndexTest, an_unknown_chunk_is_absent) { EXPECT_EQ(find("a"), nullptr); }

TEST_F(ChunkIndexTest, an_inserted_chunk_is_found_with_row_and_one_pin) {
  const Slot slot = fill("a");
  ChunkEntry* entry = find("a");
  ASSERT_NE(entry, nullptr);
  EXPECT_EQ(entry->row, 100u);
  EXPECT_EQ(entry->pins, 1u);
  EXPECT_EQ(entry->state, ChunkState::kFilling);
  EXPECT_EQ(index_.slot_of(entry), slot);
  EXPECT_EQ(index_.pinned(), 1u);
}

TEST_F(ChunkIndexTest, the_same_hash_in_another_group_is_another_chunk) {
  fill("a");
  EXPECT_EQ(index_.find(key_of("a", 1)), nullptr);
}

TEST_F(ChunkIndexTest, only_a_resident_chunk_can_be_the_victim) {
  const Slot slot = fill("a");
  EXPECT_EQ(index_.victim(), std::nullopt);
  index_.make_resident(slot, ChunkOrigin::kStore);
  EXPECT_EQ(index_.victim(), slot);
  EXPECT_EQ(index_.pinned(), 0u);
}

TEST_F(ChunkIndexTest, chunks_of_the_asking_request_are_spared_and_keep_their_order) {
  const Slot own = store_for(7, "own");
  store_for(7, "later");
  const Slot other = store_for(8, "other");
  EXPECT_EQ(index_.victim(7), other);
  EXPECT_EQ(index_.victim(), own);
  EXPECT_EQ(index_.victim(8), own);
  index_.erase(other);
  EXPECT_EQ(index_.victim(7), std::nullopt);
  EXPECT_EQ(index_.victim(), own);
}

TEST_F(ChunkIndexTest, a_chunk_used_by_another_request_is_no_longer_spared) {
  store_for(7, "own");
  const Slot shared = store_for(7, "shared"), other = store_for(8, "other");
  EXPECT_EQ(index_.victim(7), other);
  index_.access(other, 7, 0);
  EXPECT_EQ(index_.victim(7), std::nullopt);
  index_.access(shared, 8, 0);
  EXPECT_EQ(index_.victim(7), shared);
}

TEST_F(ChunkIndexTest, a_pinned_spared_chunk_is_not_the_victim) {
  const Slot own = store_for(7, "own"), other = store_for(8, "other");
  EXPECT_EQ(index_.victim(7), other);
  index_.pin(own);
  EXPECT_EQ(index_.victim(), other);
  index_.unpin(own);
  EXPECT_EQ(index_.victim(), own);
}

TEST_F(ChunkIndexTest, pin_and_unpin_keep_the_order_of_a_spared_chunk) {
  const Slot own = store_for(7, "own"), other = store_for(8, "other");
  EXPECT_EQ(index_.victim(7), other);
  index_.pin(own);
  index_.unpin(own);
  EXPECT_EQ(index_.victim(8), own);
}

TEST_F(ChunkIndexTest, a_chunk_in_a_reused_slot_is_not_spared) {
  const Slot own = store_for(7, "own"), other = store_for(8, "other");
  EXPECT_EQ(index_.victim(7), other);
  index_.erase(own);
  EXPECT_EQ(store("next"), own);
  index_.erase(other);
  EXPECT_EQ(index_.victim(7), own);
  index_.access(own, 7, 0);
  forget_and_erase(index_);
  EXPECT_EQ(index_.victim(7), std::nullopt);
  store("after");
  EXPECT_TRUE(index_.victim(8).has_value());
}

TEST_F(ChunkIndexTest, forgotten_chunks_are_absent_until_they_are_erased) {
  const Slot idle = store_for(7, "idle"), pinned = store("pinned"), filling = fill("filling");
  index_.pin(pinned);
  index_.forget();
  EXPECT_EQ(index_.size() + index_.resident() + index_.pinned(), 0u);
  EXPECT_EQ(index_.forgotten(), 3u);
  for (const char* name : {"idle", "pinned", "filling"}) {
    EXPECT_EQ(find(name), nullptr);
    EXPECT_TRUE(index_.find_forgotten(key_of(name)));
  }
  index_.for_each([](Slot, ChunkEntry&) { ADD_FAILURE() << "a forgotten chunk was visited"; });
  EXPECT_EQ(index_.victim(7), idle) << "its holder needs it no more";
  EXPECT_TRUE(index_.next_victims(4).empty());
  for (const Slot slot : {idle, pinned, filling}) {
    EXPECT_TRUE(index_.is_forgotten(slot));
    index_.erase(slot);
  }
  EXPECT_EQ(index_.forgotten(), 0u);
  EXPECT_EQ(index_.victim(), std::nullopt);
}

TEST_F(ChunkIndexTest, a_chunk_stored_after_forgetting_is_not_forgotten) {
  const Slot old = store("old"), spared = store_for(7, "spared");
  EXPECT_EQ(index_.victim(7), old);
  index_.forget();
  const Slot next = store("next");
  EXPECT_EQ(index_.size(), 1u);
  EXPECT_FALSE(index_.find_forgotten(key_of("next")));
  for (int checks = 0; checks < 8; ++checks) {
    if (const std::optional<Slot> slot = index_.next_forgotten()) index_.erase(*slot);
    if (index_.forgotten() == 0) break;
  }
  EXPECT_EQ(find("next"), &index_.at(next));
  EXPECT_FALSE(index_.is_forgotten(spared));
  EXPECT_EQ(index_.victim(7), next);
}

TEST_F(ChunkIndexTest, chunks_are_forgotten_once_however_often_the_index_forgets) {
  for (unsigned i = 0; i < ChunkIndex::kMostEpochs; ++i) {
    EXPECT_TRUE(index_.may_forget());
    store(fmt::format("{}", i));
    index_.forget();
    if (index_.may_forget()) index_.forget();  // there is nothing more to forget
  }
  EXPECT_FALSE(index_.may_forget());
  EXPECT_EQ(index_.forgotten(), std::size_t{ChunkIndex::kMostEpochs});
  EXPECT_EQ(find("0"), nullptr);
  while (index_.forgotten() > 0) {
    if (const std::optional<Slot> slot = index_.next_forgotten()) index_.erase(*slot);
  }
  EXPECT_TRUE(index_.may_forget());
}

TEST_F(ChunkIndexTest, a_chunk_keeps_the_highest_priority_of_its_requests) {
  const Slot slot = store("a");
  index_.access(slot, 7, 1);
  index_.access(slot, 8, -1);
  EXPECT_EQ(index_.entry_info(index_.at(slot)).priority, 1);
  EXPECT_EQ(index_.entry_info(index_.at(slot)).request, 8u);
}

TEST_F(ChunkIndexTest, pins_of_waiting_requests_outlive_the_fetch) {
  const Slot slot = index_.insert(key_of("a"), 0, 1, {}, ChunkState::kFetching);
  index_.pin(slot);
  index_.make_resident(slot, ChunkOrigin::kTier);
  EXPECT_EQ(index_.victim(), std::nullopt);
  index_.unpin(slot);
  EXPECT_EQ(index_.victim(), slot);
}

TEST_F(ChunkIndexTest, a_chunk_is_pinned_until_its_last_unpin) {
  const Slot slot = store("a");
  index_.pin(slot);
  index_.pin(slot);
  index_.unpin(slot);
  EXPECT_EQ(index_.victim(), std::nullopt);
  index_.unpin(slot);
  EXPECT_EQ(index_.victim(), slot);
}

TEST_F(ChunkIndexTest, an_erased_chunk_is_absent_and_its_slot_reused) {
  const Slot slot = store("a");
  index_.erase(slot);
  EXPECT_EQ(find("a"), nullptr);
  EXPECT_EQ(index_.size(), 0u);
  EXPECT_EQ(fill("b"), slot);
}

TEST_F(ChunkIndexTest, slots_are_reused_in_the_order_they_were_freed) {
  const Slot a = store("a");
  const Slot b = store("b");
  const Slot c = store("c");
  for (const Slot slot : {b, c, a}) index_.erase(slot);
  EXPECT_EQ(fill("x"), b);
  EXPECT_EQ(fill("y"), c);
  EXPECT_EQ(fill("z"), a);
}

TEST_F(ChunkIndexTest, an_accessed_chunk_is_not_the_next_victim) {
  const Slot a = store("a");
  const Slot b = store("b");
  index_.access(a, 1, 0);
  EXPECT_EQ(index_.victim(), b);
}

// Compares victim() with a list that is searched from its cold end.
class SparingModel {
 public:
  // asks: the one request that asks for room; 0: the requests take turns.
  explicit SparingModel(const std::string& policy, std::uint32_t asks = 0)
      : index_(make_eviction_policy(policy), kChunks), takes_turns_(asks == 0), asks_(asks) {}

  // Makes one random call on both.
  void step() {
    const auto chosen = chunks_.empty() ? chunks_.end() : std::next(chunks_.begin(), pick(chunks_.size()));
    const std::uint32_t request = 1 + pick(3);
    const auto action = pick(16);
    if (chunks_.size() < kChunks && (chunks_.empty() || action < 3)) {
      insert(request, chosen);
    } else if (action < 6) {
      access(*chosen, request);
      chunks_.splice(chunks_.end(), chunks_, chosen);
    } else if (action == 6) {
      index_.pin(chosen->slot);
      ++chosen->pins;
    } else if (action < 9 && chosen->pins > 0) {
      index_.unpin(chosen->slot);
      --chosen->pins;
    } else if (action == 9 && chosen->pins == 0) {
      index_.erase(chosen->slot);
      if (chosen->spared) spare_nothing();
      chunks_.erase(chosen);
    } else if (action == 10 && pick(200) == 0) {
      forget_and_erase(index_);
      chunks_.clear();
    }
    if (takes_turns_ && pick(8) == 0) asks_ = pick(4);  // 0: no request
  }
  std::optional<Slot> victim() { return index_.victim(asks_); }
  std::optional<Slot> expected() {
    for (Chunk& chunk : chunks_) {
      if (chunk.pins > 0 || chunk.spared) continue;
      if (asks_ == 0 || chunk.holder != asks_) return chunk.slot;
      spare(chunk);
    }
    return std::nullopt;
  }
  // True if a chunk exists that no rule protects.
  bool must_have_victim() const {
    return std::any_of(chunks_.begin(), chunks_.end(),
                       [&](const Chunk& chunk) { return !is_protected(chunk); });
  }
  bool may_go(Slot slot) const {
    const auto chunk = std::find_if(chunks_.begin(), chunks_.end(), [&](auto& c) { return c.slot == slot; });
    return chunk != chunks_.end() && chunk->pins == 0 && (asks_ == 0 || chunk->holder != asks_);
  }

 private:
  static constexpr std::size_t kChunks = 24;
  struct Chunk {
    Slot slot;
    ChunkId id, parent;
    std::uint32_t holder, pins;
    bool spared;
  };
  std::uint32_t pick(std::size_t below) { return static_cast<std::uint32_t>(random_() % below); }
  void insert(std::uint32_t request, std::list<Chunk>::iterator before) {
    const ChunkId parent = before == chunks_.end() ? 0 : before->id;
    const ChunkKey key = key_of(fmt::format("{}", ++last_));
    const Slot slot =
        index_.insert(key, 0, last_, {.parent = parent, .request = request}, ChunkState::kFilling);
    index_.make_resident(slot, ChunkOrigin::kStore);
    chunks_.push_back({slot, chunk_id(key), parent, request, 0, false});
  }
  void access(Chunk& chunk, std::uint32_t request) {
    index_.access(chunk.slot, request, 0);
    chunk.holder = request;
    if (chunk.spared && request != asks_) spare_nothing();
  }
  void spare_nothing() {
    for (Chunk& chunk : chunks_) chunk.spared = false;
  }
  void spare(Chunk& chunk) {
    if (chunk.spared) return;
    chunk.spared = true;
    for (Chunk& before : chunks_) {
      if (before.id == chunk.parent) spare(before);
    }
  }
  bool is_protected(const Chunk& chunk) const {
    if (chunk.pins > 0 || chunk.spared || chunk.holder == asks_) return true;
    return std::any_of(chunks_.begin(), chunks_.end(), [&](const Chunk& behind) {
      return behind.parent == chunk.id && is_protected(behind);
    });
  }

  ChunkIndex index_;
  std::list<Chunk> chunks_;  // the next victim first
  const bool takes_turns_;
  std::uint32_t asks_;
  RowId last_ = 0;
  std::mt19937 random_{5};
};

TEST(SparingTest, the_lru_victim_is_the_oldest_chunk_that_is_not_spared) {
  SparingModel model("lru", 1);
  for (int i = 0; i < testing::rounds(200000); ++i) {
    model.step();
    ASSERT_EQ(model.victim(), model.expected()) << "call " << i;
  }
}

// Memory is full of two long prompts; their requests take turns asking for room.
double most_steps_by_turns(const std::string& policy, std::uint32_t chunks) {
  ChunkIndex index(make_eviction_policy(policy), chunks);
  std::vector<ChunkId> last(2, 0);
  RowId row = 0;
  const auto store = [&](std::uint32_t request) {
    const ChunkKey key = key_of(fmt::format("{}", row));
    const Slot slot =
        index.insert(key, 0, row++, {.parent = last[request - 1], .request = request}, ChunkState::kFilling);
    index.make_resident(slot, ChunkOrigin::kStore);
    last[request - 1] = chunk_id(key);
  };
  for (std::uint32_t request : {1u, 2u}) {
    for (std::uint32_t i = 0; i < chunks / 2; ++i) store(request);
  }
  const std::uint64_t steps = testing::steps_of([&] {
    for (std::uint32_t i = 0; i < chunks / 2; ++i) {
      const std::uint32_t request = 1 + i % 2;
      index.erase(index.victim(request).value());
      store(request);
    }
  });
  return static_cast<double>(steps) / (chunks / 2);
}

class SparingByPolicyTest : public testing::TestWithParam<std::string> {};

TEST_P(SparingByPolicyTest, victims_are_unprotected_and_found_whenever_one_exists) {
  SparingModel model(GetParam());
  for (int i = 0; i < testing::rounds(100000); ++i) {
    model.step();
    const auto victim = model.victim();
    ASSERT_TRUE(victim || !model.must_have_victim()) << "call " << i;
    ASSERT_TRUE(!victim || model.may_go(*victim)) << "call " << i;
  }
}

TEST_P(SparingByPolicyTest, victims_of_alternating_requests_cost_the_same_with_more_chunks) {
  const double few = most_steps_by_turns(GetParam(), 400), many = most_steps_by_turns(GetParam(), 4000);
  EXPECT_LE(many, 2 * few + 4) << "a call took " << few << " steps, and with ten times as many chunks "
                               << many;
}

// A prompt of request 7 after a head that request 8 used last. Tests policies with and without
// knowledge of prefixes.
class SharedHeadTest : public SparingByPolicyTest {
 protected:
  Slot store(std::string_view name, std::string_view parent, std::uint32_t request) {
    const ChunkId before = parent.empty() ? 0 : chunk_id(key_of(parent));
    const Slot slot =
        index_.insert(key_of(name), 0, row_++, {.parent = before, .request = request}, ChunkState::kFilling);
    index_.make_resident(slot, ChunkOrigin::kStore);
    return slot;
  }
  ChunkIndex index_{make_eviction_policy(GetParam()), 8};
  RowId row_ = 0;
};

TEST_P(SharedHeadTest, the_head_of_the_own_prompt_is_spared_after_other_uses) {
  const Slot root = store("root", "", 7), head = store("head", "root", 7);
  store("own", "head", 7);
  for (const Slot slot : {head, root}) index_.access(slot, 8, 0);
  EXPECT_EQ(index_.victim(7), std::nullopt) << "the end of the prompt is useless without its head";
  const Slot other = store("other", "head", 8);
  EXPECT_EQ(index_.victim(7), other);
  EXPECT_TRUE(index_.victim(9).has_value());
}

TEST_P(SharedHeadTest, a_head_is_spared_no_longer_once_the_own_chunks_are_gone) {
  const Slot head = store("head", "", 7), own = store("own", "head", 7);
  index_.access(head, 8, 0);
  ASSERT_EQ(index_.victim(7), std::nullopt);
  ASSERT_EQ(index_.victim(8), own);
  index_.erase(own);
  EXPECT_EQ(index_.victim(7), head);
}

TEST_P(SharedHeadTest, a_head_that_is_pinned_during_a_look_ahead_is_spared_after_it) {
  const Slot head = store("head", "", 7);
  store("own", "head", 7);
  index_.access(head, 8, 0);
  EXPECT_EQ(index_.victim(7), std::nullopt);
  index_.pin(head);
  EXPECT_EQ(index_.next_victims(8).size(), 1u);
  index_.unpin(head);
  EXPECT_EQ(index_.victim(7), std::nullopt);
}

TEST_P(SharedHeadTest, a_filling_head_of_the_own_prompt_is_spared_once_resident) {
  const Slot head = index_.insert(key_of("head"), 0, row_++, {.request = 8}, ChunkState::kFilling);
  store("own", "head", 7);
  EXPECT_EQ(index_.victim(7), std::nullopt);
  index_.make_resident(head, ChunkOrigin::kStore);
  EXPECT_EQ(index_.victim(7), std::nullopt);
  EXPECT_TRUE(index_.victim(8).has_value());
}

// Prompts of requests with priorities, and eight more recent chunks of other requests.
class PrefixPriorityTest : public SharedHeadTest {
 protected:
  Slot store(std::string_view name, std::string_view parent, std::int8_t priority) {
    const ChunkId before = parent.empty() ? 0 : chunk_id(key_of(parent));
    const Slot slot =
        index_.insert(key_of(name), 0, row_++, {.parent = before, .request = 7, .priority = priority},
                      ChunkState::kFilling);
    index_.make_resident(slot, ChunkOrigin::kStore);
    return slot;
  }
  void store_others() {
    for (int i = 0; i < 8; ++i) SharedHeadTest::store(fmt::format("other{}", i), "", 8);
  }
  // Evicts half as many chunks as there are others, and returns how many of `names` remain.
  std::size_t left_of(const std::vector<std::string>& names) {
    for (int i = 0; i < 4; ++i) index_.erase(index_.victim().value());
    return static_cast<std::size_t>(std::count_if(
        names.begin(), names.end(), [&](auto& name) { return index_.find(key_of(name)) != nullptr; }));
  }
};

TEST_P(PrefixPriorityTest, chunks_before_a_high_priority_chunk_get_its_priority) {
  store("root", "", -1);
  store("head", "root", 0);
  store("own", "head", 1);
  EXPECT_EQ(index_.find(key_of("root"))->priority, 1);
  store_others();
  EXPECT_EQ(left_of({"root", "head", "own"}), 3u);
}

TEST_P(PrefixPriorityTest, a_high_priority_access_raises_the_chunks_before_it) {
  store("root", "", 0);
  const Slot head = store("head", "root", 0);
  store_others();
  index_.pin(index_.slot_of(index_.find(key_of("root"))));
  index_.access(head, 9, 1);
  index_.unpin(index_.slot_of(index_.find(key_of("root"))));
  EXPECT_EQ(left_of({"root", "head"}), 2u);
}

TEST_P(PrefixPriorityTest, a_parent_stored_again_is_raised_by_its_used_child) {
  const Slot root = store("root", "", 1);
  const Slot head = store("head", "root", 1);
  index_.erase(root);
  store("root", "", 0);
  index_.access(head, 9, 0);
  store_others();
  EXPECT_EQ(left_of({"root", "head"}), 2u);
}

TEST_P(PrefixPriorityTest, chunks_after_a_high_priority_chunk_are_not_raised) {
  store("root", "", 1);
  store("own", "root", 0);
  EXPECT_EQ(index_.find(key_of("own"))->priority, 0);
}

INSTANTIATE_TEST_SUITE_P(ChunkIndex, PrefixPriorityTest, testing::ValuesIn(eviction_policy_names()),
                         [](const auto& info) { return info.param; });
INSTANTIATE_TEST_SUITE_P(ChunkIndex, SharedHeadTest, testing::ValuesIn(eviction_policy_names()),
                         [](const auto& info) { return info.param; });
INSTANTIATE_TEST_SUITE_P(ChunkIndex, SparingByPolicyTest, testing::ValuesIn(eviction_policy_names()),
                         [](const auto& info) { return info.param; });

// Prompts with shared heads, stored and hit in the same way as in the cache.
class NextVictimsTest : public testing::TestWithParam<std::string> {
 protected:
  static constexpr std::size_t kChunks = 60;
  void serve(std::uint32_t request, const std::vector<std::string>& prompt) {
    std::vector<Slot> stored;
    for (std::size_t i = 0; i < prompt.size(); ++i) {
      const ChunkKey key = key_of(prompt[i]);
      if (const ChunkEntry* known = index_.find(key)) {
        index_.access(index_.slot_of(known), request, 0);
        continue;
      }
      const ChunkId parent = i == 0 ? 0 : chunk_id(key_of(prompt[i - 1]));
      const EntryInfo entry_info{
          .parent = parent, .depth = static_cast<std::uint32_t>(i), .request = request};
      stored.push_back(index_.insert(key, 0, row_++, entry_info, ChunkState::kFilling));
    }
    for (std::size_t i = stored.size(); i-- > 0;) index_.make_resident(stored[i], ChunkOrigin::kStore);
  }
  void serve_at_random() {
    std::vector<std::string> prompt;
    std::string name = "p";
    for (auto length = 1 + random_() % 7; length > 0; --length) {  // an id has up to eight letters
      name += static_cast<char>('a' + random_() % 2);
      prompt.push_back(name);
    }
    serve(++last_request_, prompt);
    while (index_.size() > kChunks) index_.erase(index_.victim().value());
  }
  std::vector<Slot> drain(std::size_t most) {
    std::vector<Slot> order;
    for (; order.size() < most; index_.erase(order.back())) {
      const auto victim = index_.victim();
      if (!victim) break;
      order.push_back(*victim);
      if (GetParam() == "prefix") expect_ends_first({*victim});
    }
    return order;
  }

  void expect_ends_first(const std::vector<Slot>& order) {
    std::set<ChunkId> gone;
    for (const Slot slot : order) {
      const ChunkId id = chunk_id(index_.at(slot).key);
      index_.for_each([&](Slot, ChunkEntry& entry) {
        EXPECT_TRUE(entry.parent != id || gone.contains(chunk_id(entry.key))) << entry.key.bytes();
      });
      gone.insert(id);
    }
  }

  ChunkIndex index_{make_eviction_policy(GetParam()), kChunks};
  RowId row_ = 0;
  std::uint32_t last_request_ = 0;
  std::mt19937 random_{3};
};

TEST_P(NextVictimsTest, next_victims_lists_a_whole_prompt_before_the_next) {
  serve(1, {"a1", "a2", "a3"});
  serve(2, {"b1", "b2", "b3"});
  const std::vector<Slot> next = index_.next_victims(4);
  std::vector<ChunkKey> keys;
  for (const Slot slot : next) keys.push_back(index_.at(slot).key);
  EXPECT_EQ(keys, (std::vector<ChunkKey>{key_of("a3"), key_of("a2"), key_of("a1"), key_of("b3")}));
  EXPECT_EQ(drain(4), next);
}

TEST_P(NextVictimsTest, spared_chunks_are_among_them_in_their_order_and_stay_spared) {
  serve(1, {"a1", "a2", "a3"});
  const std::vector<Slot> before = index_.next_victims(2);
  EXPECT_EQ(index_.victim(1), std::nullopt);
  EXPECT_EQ(index_.next_victims(2), before);
  EXPECT_EQ(index_.next_victims(9).size(), 3u);
  EXPECT_EQ(testing::steps_of([&] { EXPECT_EQ(index_.victim(1), std::nullopt); }), 0u) << "they were spared";
  EXPECT_TRUE(index_.victim(2).has_value());
}

// A request that stores a long prompt looks ahead in each step.
TEST_P(NextVictimsTest, a_look_ahead_costs_the_same_with_ten_times_as_many_spared_chunks) {
  const auto steps_with = [](std::uint32_t chunks) {
    ChunkIndex index(make_eviction_policy(GetParam()), chunks);
    ChunkId last = 0;
    for (RowId row = 0; row < chunks; ++row) {
      const ChunkKey key = key_of(fmt::format("{}", row));
      index.make_resident(index.insert(key, 0, row, {.parent = last, .request = 1}, ChunkState::kFilling),
                          ChunkOrigin::kStore);
      last = chunk_id(key);
    }
    EXPECT_EQ(index.victim(1), std::nullopt);
    return testing::steps_of([&] {
      for (int step = 0; step < 10; ++step) {
        EXPECT_EQ(index.next_victims(16).size(), 16u);
        EXPECT_EQ(index.victim(1), std::nullopt);
      }
    });
  };
  const std::uint64_t few = steps_with(200), many = steps_with(2000);
  EXPECT_GT(few, 0u);
  EXPECT_EQ(few, many);
}

TEST_P(NextVictimsTest, spared_chunks_that_are_pinned_are_not_among_them_and_stay_spared) {
  std::vector<std::string> prompt;
  for (int i = 0; i < 40; ++i) prompt.push_back(fmt::format("a{}", i));
  serve(1, prompt);
  EXPECT_EQ(index_.victim(1), std::nullopt);
  const std::vector<Slot> first = index_.next_victims(20);
  for (const Slot slot : first) index_.pin(slot);
  const std::vector<Slot> second = index_.next_victims(20);
  EXPECT_EQ(second.size(), 20u);
  for (const Slot slot : second) EXPECT_EQ(index_.at(slot).pins, 0u);
  for (const Slot slot : first) index_.unpin(slot);
  EXPECT_EQ(testing::steps_of([&] { EXPECT_EQ(index_.victim(1), std::nullopt); }), 0u) << "they were spared";
  EXPECT_EQ(index_.next_victims(99).size(), 40u);
}

// Only lru must evict exactly these: with other policies a look may change the state of an entry,
// like victim().
TEST_P(NextVictimsTest, next_victims_match_lru_evictions_and_the_prefix_order) {
  for (int i = 0; i < testing::rounds(2000); ++i) {
    serve_at_random();
    const std::size_t most = random_() % 20;
    const std::vector<Slot> next = index_.next_victims(most);
    ASSERT_EQ(std::set<Slot>(next.begin(), next.end()).size(), std::min(most, index_.size()))
        << "round " << i;
    if (GetParam() == "prefix") expect_ends_first(next);
    const std::vector<Slot> gone = drain(most);
    if (GetParam() == "lru") {
      ASSERT_EQ(gone, next) << "round " << i;
    }
    ASSERT_EQ(gone.size(), next.size()) << "round " << i;
  }
}

TEST_P(NextVictimsTest, next_victims_include_spared_but_not_pinned_chunks) {
  serve(1, {"a1", "a2", "a3"});
  serve(2, {"b1"});
  index_.pin(index_.slot_of(index_.find(key_of("a3"))));
  EXPECT_TRUE(index_.victim(1).has_value());
  EXPECT_EQ(index_.next_victims(9).size(), 3u);
}

INSTANTIATE_TEST_SUITE_P(ChunkIndex, NextVictimsTest, testing::ValuesIn(eviction_policy_names()),
                         [](const auto& info) { return info.param; });

TEST_F(ChunkIndexTest, agrees_with_a_map_under_random_inserts_and_erases) {
  // Uses keys with few distinct hash prefixes, so that probe runs are long and wrap around.
  std::mt19937 random(11);
  std::map<std::string, RowId> model;
  for (int i = 0; i < 200000; ++i) {
    const std::string name = fmt::format("{}", random() % 700);
    const ChunkEntry* entry = find(name);
    const auto known = model.find(name);
    ASSERT_EQ(entry != nullptr, known != model.end()) << name << " at call " << i;
    if (entry == nullptr) {
      model[name] = next_row_;
      index_.make_resident(fill(name), ChunkOrigin::kStore);
    } else {
      ASSERT_EQ(entry->row, known->second);
      if (random() % 2 == 0) {
        index_.erase(index_.slot_of(entry));
        model.erase(known);
      }
    }
    ASSERT_EQ(index_.size(), model.size());
  }
  std::size_t seen = 0;
  index_.for_each([&](Slot slot, ChunkEntry& entry) {
    ++seen;
    EXPECT_EQ(index_.find(entry.key), &entry);
    EXPECT_EQ(index_.slot_of(&entry), slot);
  });
  EXPECT_EQ(seen, model.size());
}

class ChunkIndexMemoryTest : public testing::TestWithParam<std::string> {};

TEST_P(ChunkIndexMemoryTest, a_chunk_that_finds_no_memory_is_not_added) {
  ChunkIndex index(make_eviction_policy(GetParam()), 4);
  const auto name_of = [](RowId row) { return key_of(fmt::format("{}", row)); };
  unsigned failures = 0;
  for (RowId row = 0; row < 200; ++row) {
    const auto expect_others = [&] {
      ASSERT_EQ(index.size(), row);
      for (RowId other = 0; other < row; ++other) ASSERT_EQ(index.find(name_of(other))->row, other);
    };
    Slot slot = 0;
    const EntryInfo info{.parent = row % 10 == 0 ? 0 : chunk_id(name_of(row - 1)), .request = row / 10 + 1};
    failures += testing::fail_each_allocation(
        [&] { slot = index.insert(name_of(row), 0, row, info, ChunkState::kFilling); }, expect_others);
    failures += testing::fail_each_allocation([&] { index.make_resident(slot, ChunkOrigin::kStore); },
                                              [&] {
                                                EXPECT_EQ(index.at(slot).state, ChunkState::kFilling);
                                                EXPECT_EQ(index.resident(), row);
                                              });
  }
  EXPECT_GT(failures, 10u);
  for (RowId row = 0; row < 200; ++row) index.erase(index.victim().value());
  EXPECT_EQ(index.size(), 0u);
}

TEST_P(ChunkIndexMemoryTest, a_priority_that_finds_no_memory_changes_no_chunk) {
  constexpr RowId kPrompt = 150;  // longer than the first part of a policy's tables
  ChunkIndex index(make_eviction_policy(GetParam()), kPrompt + 2);
  const auto name_of = [](RowId row) { return key_of(fmt::format("{}", row)); };
  const auto info_of = [&](RowId row, std::int8_t priority) {
    const ChunkId parent = row == 0 ? 0 : chunk_id(name_of(row - 1));
    return EntryInfo{.parent = parent, .request = 1, .priority = priority};
  };
  std::vector<Slot> slots;
  for (RowId row = 0; row < kPrompt; ++row)
    slots.push_back(index.insert(name_of(row), 0, row, info_of(row, -1), ChunkState::kFilling));
  for (RowId row = kPrompt; row-- > 0;) index.make_resident(slots[row], ChunkOrigin::kStore);
  const auto expect_all = [&](std::int8_t priority) {
    ASSERT_EQ(index.size(), kPrompt);
    for (RowId row = 0; row < kPrompt; ++row) ASSERT_EQ(index.find(name_of(row))->priority, priority);
  };
  const ChunkKey next = name_of(kPrompt);
  Slot slot = 0;
  EXPECT_GT(testing::fail_each_allocation(
                [&] { slot = index.insert(next, 0, kPrompt, info_of(kPrompt, 0), ChunkState::kFilling); },
                [&] {
                  expect_all(-1);
                  EXPECT_EQ(index.find(next), nullptr);
                }),
            2u);
  index.erase(slot);
  expect_all(0);
  EXPECT_GT(testing::fail_each_allocation([&] { index.access(slots.back(), 2, 1); },
                                          [&] {
                                            expect_all(0);
                                            EXPECT_EQ(index.at(slots.back()).holder, 1u);
                                          }),
            1u);
  expect_all(1);
  for (RowId row = 0; row < kPrompt; ++row) index.erase(index.victim().value());
  EXPECT_EQ(index.size(), 0u);
}

TEST_P(ChunkIndexMemoryTest, a_retention_that_finds_no_memory_changes_nothing) {
  ChunkIndex index(make_eviction_policy(GetParam()), 4);
  const Slot slot = index.insert(key_of("a"), 0, 0, {.request = 1}, ChunkState::kFilling);
  index.make_resident(slot, ChunkOrigin::kStore);
  EXPECT_GT(testing::fail_each_allocation([&] { index.retain(slot); },
                                          [&] {
                                            EXPECT_EQ(index.at(slot).priority, 0);
                                            EXPECT_FALSE(index.at(slot).retained);
                                          }),
            0u);
  EXPECT_GT(index.at(slot).priority, 0);
  EXPECT_TRUE(index.at(slot).retained);
}

TEST_P(ChunkIndexMemoryTest, the_end_of_a_retention_that_finds_no_memory_changes_nothing) {
  ChunkIndex index(make_eviction_policy(GetParam()), 4);
  const Slot slot = index.insert(key_of("a"), 0, 0, {.request = 1}, ChunkState::kFilling);
  index.make_resident(slot, ChunkOrigin::kStore);
  index.retain(slot);
  const auto retained = index.at(slot).priority;
  const unsigned failures = testing::fail_each_allocation([&] { index.end_retention(slot, -1); },
                                                          [&] {
                                                            EXPECT_EQ(index.at(slot).priority, retained);
                                                            EXPECT_TRUE(index.at(slot).retained);
                                                            EXPECT_EQ(index.victim(), slot);
                                                          });
  EXPECT_EQ(failures > 0, GetParam() == "prefix") << "lru allocates nothing for a known slot";
  EXPECT_EQ(index.at(slot).priority, 0);
  EXPECT_FALSE(index.at(slot).retained);
  EXPECT_EQ(index.victim(), slot);
  index.pin(slot);
  EXPECT_FALSE(index.victim());
  index.unpin(slot);
  index.erase(slot);
}

// A chunk that is marked as spared must be pinned in the policy: else a pin of it protects nothing.
TEST_P(ChunkIndexMemoryTest, a_victim_that_finds_no_memory_marks_no_chunk) {
  constexpr RowId kChunks = 1000;  // more than one allocation of the list of spared chunks holds
  ChunkIndex index(make_eviction_policy(GetParam()), kChunks);
  std::vector<Slot> slots;
  for (RowId row = 0; row < kChunks; ++row) {
    slots.push_back(
        index.insert(key_of(fmt::format("{}", row)), 0, row, {.request = 1}, ChunkState::kFilling));
    index.make_resident(slots.back(), ChunkOrigin::kStore);
  }
  EXPECT_GT(testing::fail_each_allocation([&] { EXPECT_FALSE(index.victim(1)); },
                                          [&] {
                                            for (const Slot slot : slots) index.pin(slot);
                                            EXPECT_FALSE(index.victim(2));
                                            for (const Slot slot : slots) index.unpin(slot);
                                          }),
            0u);
  EXPECT_TRUE(index.victim(2));
}

INSTANTIATE_TEST_SUITE_P(ChunkIndex, ChunkIndexMemoryTest, testing::ValuesIn(eviction_policy_names()),
                         [](const auto& info) { return info.param; });

// The tables are 1.1 GiB: touching them takes longer than all the rest of the start.
TEST(ChunkIndexGrowthTest, a_large_index_touches_no_table_before_its_first_chunk) {
  if (testing::kSanitized) GTEST_SKIP() << "memory is not measured under a sanitizer";
  const auto resident_pages = [] {  // faults are no measure: one may map a huge page
    std::ifstream statm("/proc/self/statm");
    long size = 0, resident = 0;
    EXPECT_TRUE(statm >> size >> resident);
    return resident;
  };
  const long before = resident_pages();
  const ChunkIndex index(make_eviction_policy("lru"), 40'000'000);
  EXPECT_LT(resident_pages() - before, 256);
}

TEST(ChunkIndexGrowthTest, inserts_up_to_the_capacity_move_no_cells) {
  const auto capacity = static_cast<std::uint32_t>(testing::rounds(1'500'000));
  ChunkIndex index(make_eviction_policy("lru"), capacity);
  std::uint64_t most = 0;
  for (std::uint32_t i = 0; i < capacity; ++i) {
    char bytes[36] = {};
    const std::uint64_t mixed = (i + 1) * 0x9E3779B97F4A7C15ull;
    std::memcpy(bytes, &mixed, sizeof(mixed));
    const ChunkKey key = ChunkKey::unchecked(bytes, sizeof(bytes));
    most =
        std::max(most, testing::steps_of([&] {
                   index.make_resident(index.insert(key, 0, i, {.id = chunk_id(key)}, ChunkState::kFilling),
                                       ChunkOrigin::kStore);
                 }));
  }
  EXPECT_EQ(most, 0u);
}

}  // namespace
}  // namespace kv_offload
