// SPDX-License-Identifier: Apache-2.0
#include "policy/prefix.h"

#include <gtest/gtest.h>

#include <array>
#include <map>
#include <random>
#include <set>

#include "out_of_memory.h"

namespace kv_offload {
namespace {

// Serves prompts in the order of the cache: hits from the deepest chunk to the head, then stores of new
// chunks, the deepest first. Slots are chunk numbers.
class PrefixPolicyTest : public testing::Test {
 protected:
  PrefixPolicy policy_;
  std::map<Slot, Slot> parent_of_;  // of known slots; a slot without a parent maps to itself
  std::uint32_t request_ = 0;

  EntryInfo info(Slot slot, Slot parent) const {
    return {.id = id_of(slot), .parent = parent == slot ? 0 : id_of(parent), .request = request_};
  }
  static ChunkId id_of(Slot slot) { return (slot + 1) * 0xD6E8FEB86659FD93ull | 1; }
  // Returns how many of the prompt's chunks were hit.
  std::size_t serve(const std::vector<Slot>& prompt) {
    ++request_;
    std::size_t hits = 0;
    while (hits < prompt.size() && parent_of_.contains(prompt[hits])) ++hits;
    const auto parent = [&](std::size_t i) { return i == 0 ? prompt[i] : prompt[i - 1]; };
    for (std::size_t i = hits; i-- > 0;) policy_.access(prompt[i], info(prompt[i], parent(i)));
    for (std::size_t i = prompt.size(); i-- > hits;) {
      if (!parent_of_.emplace(prompt[i], parent(i)).second) continue;
      policy_.insert(prompt[i], info(prompt[i], parent(i)));
    }
    return hits;
  }
  Slot evict() {
    const Slot victim = policy_.victim().value();
    policy_.erase(victim);
    parent_of_.erase(victim);
    return victim;
  }
  // Entries that the policy would evict, one after the other. They all stay.
  std::size_t evictable() {
    std::vector<Slot> aside;
    for (auto victim = policy_.victim(); victim; victim = policy_.victim()) {
      policy_.set_aside(*victim);
      aside.push_back(*victim);
    }
    for (std::size_t i = aside.size(); i-- > 0;) policy_.put_back(aside[i]);
    return aside.size();
  }
  bool has_children(Slot slot) const {
    for (const auto& [child, parent] : parent_of_) {
      if (parent == slot && child != slot) return true;
    }
    return false;
  }
  static std::vector<Slot> prompt(Slot first, Slot count) {
    std::vector<Slot> slots;
    for (Slot i = 0; i < count; ++i) slots.push_back(first + i);
    return slots;
  }
};

// Requests use the chunks in a random order; each allocation fails once.
TEST_F(PrefixPolicyTest, a_use_that_finds_no_memory_loses_no_chunk) {
  constexpr Slot kPrompts = 300;
  for (Slot first = 0; first < 2 * kPrompts; first += 2) serve(prompt(first, 2));
  std::mt19937 random(5);
  unsigned failures = 0;
  for (int i = 0; i < 4000; ++i) {
    const auto slot = static_cast<Slot>(random() % (2 * kPrompts));
    ++request_;
    const EntryInfo use = info(slot, parent_of_.at(slot));
    const auto check = [&] { EXPECT_EQ(evictable(), std::size_t{2 * kPrompts}); };
    failures += testing::fail_each_allocation([&] { policy_.access(slot, use); }, check);
    failures += testing::fail_each_allocation([&] { policy_.refresh(slot, use); }, check);
  }
  EXPECT_GE(failures, 2u);
  std::set<Slot> evicted;
  while (policy_.victim()) evicted.insert(evict());
  EXPECT_EQ(evicted.size(), std::size_t{2 * kPrompts});
}

TEST_F(PrefixPolicyTest, an_entry_that_finds_no_memory_is_no_child) {
  for (const Slot first : {0, 10, 20}) serve(prompt(first, 2));
  ASSERT_EQ(policy_.victim(), 1u);
  ++request_;
  const EntryInfo child = info(2, 1);
  const auto check = [&] { EXPECT_EQ(policy_.victim(), 1u); };
  EXPECT_GT(testing::fail_each_allocation([&] { policy_.insert(2, child); }, check), 0u);
  EXPECT_NE(policy_.victim(), 1u) << "the control: it has a child";
  policy_.erase(2);
  EXPECT_EQ(policy_.victim(), 1u);
}

// The victims are hidden one after the other and put back, as ChunkIndex::next_victims() does.
TEST_F(PrefixPolicyTest, a_use_that_finds_no_memory_leaves_an_entry_that_lost_its_children_in_the_order) {
  serve(prompt(0, 2));
  serve({5});
  policy_.pin(1);
  {
    const testing::FailingAllocation failing(0);
    policy_.erase(1);
    ASSERT_TRUE(failing.came());
  }
  {
    const testing::FailingAllocation failing(0);
    policy_.refresh(0, info(0, 0));
    ASSERT_TRUE(failing.came());
  }
  EXPECT_EQ(evict(), 5u);
  EXPECT_EQ(evict(), 0u);
  EXPECT_EQ(policy_.victim(), std::nullopt);
}

TEST_F(PrefixPolicyTest, an_entry_that_is_set_aside_is_not_lost_if_memory_runs_out) {
  constexpr Slot kPrompts = 4, kLength = 3;
  for (Slot first = 0; first < kPrompts * kLength; first += kLength) serve(prompt(first, kLength));
  // Ends of prompts are pinned, so some victims have children.
  policy_.pin(2);
  policy_.pin(5);
  unsigned failures = 0;
  for (bool came = true; came; ++failures) {
    std::array<Slot, kPrompts * kLength> aside{};
    std::size_t count = 0;
    {
      const testing::FailingAllocation failing(failures);
      for (auto victim = policy_.victim(); victim; victim = policy_.victim()) {
        ASSERT_NO_THROW(policy_.set_aside(*victim));
        aside[count++] = *victim;
      }
      for (std::size_t i = count; i-- > 0;) ASSERT_NO_THROW(policy_.put_back(aside[i]));
      came = failing.came();
    }
    EXPECT_EQ(count, std::size_t{kPrompts * kLength - 2}) << failures;
    EXPECT_EQ(std::set<Slot>(aside.begin(), aside.begin() + count).size(), count) << failures;
  }
  EXPECT_GT(failures, 1u);
  policy_.unpin(2);
  policy_.unpin(5);
  std::set<Slot> evicted;
  while (policy_.victim()) evicted.insert(evict());
  EXPECT_EQ(evicted.size(), std::size_t{kPrompts * kLength});
}

TEST_F(PrefixPolicyTest, entries_set_aside_need_no_memory_without_pins) {
  for (Slot first = 0; first < 30; first += 3) serve(prompt(first, 3));
  std::array<Slot, 30> before{};
  std::array<Slot, 30> after{};
  const auto visit = [&](std::array<Slot, 30>& order) {
    for (Slot& slot : order) {
      slot = policy_.victim().value();
      policy_.set_aside(slot);
    }
    for (std::size_t i = order.size(); i-- > 0;) policy_.put_back(order[i]);
  };
  visit(before);
  const testing::FailingAllocation failing(0);
  visit(after);
  EXPECT_FALSE(failing.came());
  EXPECT_EQ(after, before);
}

TEST_F(PrefixPolicyTest, without_history_the_least_recent_prompt_is_evicted_from_its_end) {
  serve(prompt(0, 3));
  serve(prompt(10, 2));
  serve(prompt(0, 3));
  std::vector<Slot> order;
  while (!parent_of_.empty()) order.push_back(evict());
  EXPECT_EQ(order, (std::vector<Slot>{11, 10, 2, 1, 0}));
}

// Prompts of one chunk and of three chunks are in different classes. Without learned data all classes have
// the same worth.
TEST_F(PrefixPolicyTest, without_history_eviction_ignores_request_classes) {
  for (const Slot first : {0u, 10u, 20u, 30u}) serve(prompt(first, first % 20 == 0 ? 1 : 3));
  std::vector<Slot> order;
  while (!parent_of_.empty()) order.push_back(evict());
  EXPECT_EQ(order, (std::vector<Slot>{0, 12, 11, 10, 20, 32, 31, 30}));
}

// Like the records of a directory after a start: inserted in order of use without known parents. The
// beginning of a prompt is its oldest chunk.
TEST_F(PrefixPolicyTest, the_parent_of_a_chunk_is_learnt_from_an_access) {
  // By recency alone, the last of these orders would evict the beginning first.
  for (const std::vector<Slot>& uses : {std::vector<Slot>{2, 1, 0}, {0, 1, 2}}) {
    PrefixPolicy policy;
    for (const Slot slot : {0u, 1u, 2u, 10u, 11u}) policy.insert(slot, {.id = id_of(slot)});
    policy.pin(1);  // like a record that is being read
    for (const Slot slot : uses) {
      policy.access(slot, {.id = id_of(slot), .parent = slot == 0 ? 0 : id_of(slot - 1), .request = 1});
    }
    policy.unpin(1);
    std::vector<Slot> order;
    while (const auto victim = policy.victim()) {
      order.push_back(*victim);
      policy.erase(*victim);
    }
    EXPECT_EQ(order, (std::vector<Slot>{10, 11, 2, 1, 0}));
  }
}

TEST_F(PrefixPolicyTest, no_chunk_is_evicted_before_its_children) {
  std::mt19937 random(5);
  std::vector<std::vector<Slot>> prompts;
  Slot next = 0;
  for (int i = 0; i < 3000; ++i) {
    std::vector<Slot> chunks;
    if (!prompts.empty() && random() % 2 == 0) {
      chunks = prompts[random() % prompts.size()];
      chunks.resize(1 + random() % chunks.size());
    }
    for (auto fresh = 1 + random() % 5; fresh-- > 0;) chunks.push_back(next++);
    serve(chunks);
    prompts.push_back(chunks);
    while (parent_of_.size() > 100) {
      const Slot victim = policy_.victim().value();
      ASSERT_FALSE(has_children(victim)) << "request " << i;
      evict();
    }
  }
}

TEST_F(PrefixPolicyTest, a_shared_head_is_evicted_after_all_its_prompts) {
  for (Slot i = 0; i < 20; ++i) serve({0, 1, 10 + 2 * i, 11 + 2 * i});
  for (int i = 0; i < 40; ++i) EXPECT_GT(evict(), 1u);
  EXPECT_EQ(evict(), 1u);
  EXPECT_EQ(evict(), 0u);
}

TEST_F(PrefixPolicyTest, a_pinned_end_protects_the_chunks_before_it) {
  serve(prompt(0, 3));
  serve(prompt(10, 1));
  policy_.pin(2);
  EXPECT_EQ(policy_.victim(), 10u);
  evict();
  // No other chunk is left, so a chunk before the pinned end is the victim.
  EXPECT_TRUE(policy_.victim() == 0u || policy_.victim() == 1u);
  policy_.unpin(2);
  EXPECT_EQ(policy_.victim(), 2u);
}

// All ends are pinned, as if they were being read or written. The head of the most recent prompt is evicted
// last, even if the head was used first or its readers unpinned it first.
TEST_F(PrefixPolicyTest, with_pinned_ends_the_least_recent_prompt_is_evicted_from_its_end) {
  enum class Order { kDeepestFirst, kHeadFirst, kLetGoOfHeadFirst };
  for (const Order used : {Order::kDeepestFirst, Order::kHeadFirst, Order::kLetGoOfHeadFirst}) {
    serve(prompt(10, 4));
    serve(prompt(0, 4));
    serve(prompt(20, 4));
    for (const Slot end : {3u, 13u, 23u}) policy_.pin(end);
    ++request_;
    for (Slot i = 0; i < 3; ++i) {
      const Slot slot = used == Order::kHeadFirst ? i : 2 - i;
      policy_.access(slot, info(slot, slot == 0 ? slot : slot - 1));
    }
    if (used == Order::kLetGoOfHeadFirst) {
      for (Slot slot = 0; slot < 3; ++slot) policy_.pin(slot);
      for (Slot slot = 0; slot < 3; ++slot) policy_.unpin(slot);
    }
    std::vector<Slot> order;
    for (int i = 0; i < 9; ++i) order.push_back(evict());
    EXPECT_EQ(order, (std::vector<Slot>{12, 11, 10, 22, 21, 20, 2, 1, 0})) << static_cast<int>(used);
    for (const Slot end : {3u, 13u, 23u}) policy_.unpin(end);
    while (!parent_of_.empty()) evict();
  }
}

// One-off prompts of eight chunks compete with conversations that return only after an LRU of this size has
// evicted them.
TEST_F(PrefixPolicyTest, conversations_are_kept_and_one_off_prompts_are_not) {
  constexpr std::size_t kCapacity = 400;
  Slot next = 0;
  std::vector<std::vector<Slot>> talks(50);
  std::size_t hits = 0, possible = 0;
  for (int i = 0; i < 6000; ++i) {
    if (i % 2 == 0) {
      serve(prompt(next, 8));
      next += 8;
    } else {
      auto& talk = talks[static_cast<std::size_t>(i / 2) % talks.size()];
      if (talk.size() > 6) talk.clear();
      talk.push_back(next++);
      if (i > 3000) possible += talk.size() - 1;
      const std::size_t found = serve(talk);
      if (i > 3000) hits += found;
    }
    while (parent_of_.size() > kCapacity) evict();
  }
  // 50 one-off prompts (400 chunks) are stored between two turns: LRU would have no hits.
  EXPECT_GT(hits, possible * 9 / 10) << possible;
}

// Each turn of a chat stores its last block under a key that the next turn does not use, as with a half-full
// block.
TEST_F(PrefixPolicyTest, prompt_ends_that_are_never_reused_are_evicted_first) {
  constexpr std::size_t kCapacity = 1400;
  Slot next = 0;
  std::vector<std::vector<Slot>> talks(500);
  std::size_t hits = 0, possible = 0;
  for (std::size_t i = 0; i < 24000; ++i) {
    auto& talk = talks[i % talks.size()];
    if (talk.size() > i % 7) talk.clear();
    talk.push_back(next++);
    auto prompt = talk;
    prompt.push_back(next++);
    const std::size_t found = serve(prompt);
    hits += i < 12000 ? 0 : found;
    possible += i < 12000 ? 0 : talk.size() - 1;
    while (parent_of_.size() > kCapacity) evict();
  }
  // If ends were kept like other chunks, the hit rate would be 84%.
  EXPECT_GT(hits, possible * 95 / 100) << possible;
}

// A prompt is stored in parts: its request may still extend a chunk that was stored just now and has no
// child.
TEST_F(PrefixPolicyTest, a_chunk_counts_as_prompt_end_only_after_64_stores) {
  Slot next = 0;
  std::vector<std::vector<Slot>> talks(60);
  for (std::size_t i = 0; i < 6000; ++i) {  // ends are never reused, all other chunks are
    auto& talk = talks[i % talks.size()];
    if (talk.size() > 4) talk.clear();
    talk.push_back(next++);
    auto prompt = talk;
    prompt.push_back(next++);
    serve(prompt);
  }
  const auto forget = [&](Slot slot) {
    policy_.erase(slot);
    parent_of_.erase(slot);
  };
  while (!parent_of_.empty()) forget(parent_of_.begin()->first);
  // Two requests of one class: only the chunk `went_on` is known to have had a child.
  const Slot went_on = next++, behind = next++, fresh = next++;
  serve({went_on, behind});
  forget(behind);
  serve({fresh});
  const auto store_others = [&](int count) {
    while (count-- > 0) {
      const Slot other = next++;
      serve({other});
      policy_.pin(other);
    }
  };
  EXPECT_EQ(policy_.victim(), went_on) << "expected the least recent chunk";
  store_others(62);
  EXPECT_EQ(policy_.victim(), went_on) << "expected no change before 64 stores";
  store_others(2);
  EXPECT_EQ(policy_.victim(), fresh) << "expected the end of a prompt after 64 stores";
}

// Each request asks a unique question of eight chunks about a document of four chunks. All documents are read
// again. Both kinds of chunk are in the same request.
TEST_F(PrefixPolicyTest, reused_documents_are_kept_and_unique_questions_are_not) {
  constexpr std::size_t kCapacity = 300;
  Slot next = 200;
  std::mt19937 random(3);
  std::size_t hits = 0;
  for (int i = 0; i < 6000; ++i) {
    auto prompt = this->prompt(4 * static_cast<Slot>(random() % 50), 4);
    for (int chunk = 0; chunk < 8; ++chunk) prompt.push_back(next++);
    const std::size_t found = serve(prompt);
    hits += i < 3000 ? 0 : found;
    while (parent_of_.size() > kCapacity) evict();
  }
  // 600 chunks are stored between two reads of a document: LRU would hit 40% by chance.
  EXPECT_GT(hits, 4u * 3000 * 95 / 100);
}

// All prompts are reused in turn, and the cache holds three fifths of them. A tier has every other prompt; in
// the second pass it has the rest.
TEST_F(PrefixPolicyTest, chunks_recorded_on_a_tier_are_evicted_first) {
  constexpr Slot kPrompts = 1000;
  constexpr int kTurns = 40, kToLearn = 20;
  for (const Slot has : {1u, 0u}) {
    std::array<int, 2> hits{};
    for (int turn = 0; turn < kTurns; ++turn) {
      for (Slot slot = 0; slot < kPrompts; ++slot) {
        const std::size_t found = serve({slot});
        if (has == 0) policy_.pin(slot);  // set_recorded() while the slot is read or written
        policy_.set_recorded(slot, slot % 2 == has);
        if (has == 0) policy_.unpin(slot);
        if (turn >= kToLearn) hits[slot % 2 == has] += static_cast<int>(found);
        while (parent_of_.size() > 600) evict();
      }
    }
    constexpr int kPossible = (kTurns - kToLearn) * kPrompts / 2;
    EXPECT_GT(hits[0], kPossible * 9 / 10);
    EXPECT_LT(hits[1], kPossible * 4 / 10);
  }
}

TEST_F(PrefixPolicyTest, a_second_offer_by_the_same_request_is_no_reuse) {
  for (int i = 0; i < 500; ++i) {
    serve(prompt(static_cast<Slot>(100 * i), 4));
    for (Slot slot = 4; slot-- > 0;) {
      policy_.access(static_cast<Slot>(100 * i) + slot, {.id = id_of(100 * i + slot), .request = request_});
    }
    while (parent_of_.size() > 40) evict();
  }
  // If these accesses counted as reuse, the youngest chunk would have by far the highest worth. They do not,
  // so the order is LRU.
  const Slot victim = policy_.victim().value();
  EXPECT_EQ(victim / 100, 490u);
}

}  // namespace
}  // namespace kv_offload
