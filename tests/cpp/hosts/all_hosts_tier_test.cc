// SPDX-License-Identifier: Apache-2.0
// The composition of one tier out of parts. The parts are played: the test ends their ops.
#include "hosts/all_hosts_tier.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <functional>
#include <map>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "out_of_memory.h"
#include "tier/loopback_server.h"
#include "tier/tier_driver.h"

namespace kv_offload {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::key_of;
using ::testing::Ne;

class PlayedTier final : public Tier {
 public:
  std::string_view name() const override { return "played"; }
  void submit(std::vector<TierOp> given) override {
    if (throws) throw std::bad_alloc();
    for (TierOp& op : given) ops.push_back(std::move(op));
  }
  bool cancel(OpId) override {
    ++cancelled;
    return can_cancel;
  }
  void poll(std::vector<Completion>* completions, std::vector<TierRemoval>* removals) override {
    completions->insert(completions->end(), ended.begin(), ended.end());
    removals->insert(removals->end(), removed.begin(), removed.end());
    ended.clear();
    removed.clear();
  }
  Presence contains(const ChunkKey& key) const override {
    const auto found = presence.find(key);
    return found == presence.end() ? Presence::kAbsent : found->second;
  }
  void prefetch_presence(std::vector<ChunkKey> keys, const LookupOptions& options) override {
    asked_for.push_back(options);
    asked.insert(asked.end(), keys.begin(), keys.end());
  }
  void touch(const ChunkKey&) override {}
  Status reset(std::uint64_t startup_id) override {
    startup_ids.push_back(startup_id);
    if (on_reset) on_reset();
    return reset_status;
  }
  bool can_reset() const override { return may_reset; }
  void refresh_epoch() override {
    ++refreshed;
    figures.epoch_id = 0;
  }
  void begin_reset(std::uint64_t startup_id) override {
    if (on_begin_reset) on_begin_reset();
    begun_ids.push_back(startup_id);
  }
  TierStats stats() const override { return figures; }
  void close() override {
    if (on_close) on_close();
  }
  double estimate_read_seconds(std::uint64_t bytes) const override {
    return static_cast<double>(bytes) * seconds_per_byte;
  }

  // Ends the oldest op.
  void end(StatusKind kind = StatusKind::kOk, double seconds = 1) {
    ASSERT_FALSE(ops.empty());
    const TierOp op = ops.front();
    ops.erase(ops.begin());
    const Status status =
        kind == StatusKind::kOk ? Status::ok() : Status::error(kind, "a message that is long");
    if (status && op.kind == OpKind::kWrite) presence[op.key] = Presence::kPresent;
    if (status && op.kind == OpKind::kRemove) remove(op.key, TierRemoval::Reason::kEvicted);
    ended.push_back({op.id, op.kind, op.key, status, status ? std::uint64_t{100} : 0, seconds, 0});
  }
  void remove(const ChunkKey& key, TierRemoval::Reason reason) {
    presence.erase(key);
    removed.push_back({key, reason});
  }

  std::vector<TierOp> ops;
  std::vector<Completion> ended;
  std::vector<TierRemoval> removed;
  std::map<ChunkKey, Presence> presence;
  std::vector<ChunkKey> asked;
  std::vector<LookupOptions> asked_for;
  std::vector<std::uint64_t> startup_ids;  // of the resets
  std::vector<std::uint64_t> begun_ids;    // of those that do not wait
  TierStats figures;
  Status reset_status;
  double seconds_per_byte = 0;
  bool can_cancel = true, throws = false;
  bool may_reset = true;
  int cancelled = 0;  // calls of cancel()
  int refreshed = 0;  // calls of refresh_epoch()
  std::function<void()> on_close, on_reset, on_begin_reset;
};

class AllHostsTierTest : public ::testing::Test {
 protected:
  AllHostsTierTest() { open(false); }
  void open(bool awaits_epoch) {
    std::vector<PartOfTier> parts;
    for (PlayedTier*& part : part_) {
      auto made = std::make_unique<PlayedTier>();
      part = made.get();
      parts.push_back({std::move(made), 0.5});
    }
    AllHostsOptions options;
    options.missing_for = std::chrono::minutes(1);
    options.clock = &clock_;
    if (awaits_epoch) options.epoch_ids = {0, 0};
    options.warn = [](const std::string&) {};
    tier_ = make_all_hosts_tier(std::move(parts), options);
  }
  static void set_in_service(PlayedTier& part, bool is_in_service) {
    part.figures.readable = part.figures.writable = is_in_service;
  }
  // Polls, and returns the number of reported removals.
  std::size_t poll_removals() {
    (void)poll();
    return removals_.size();
  }
  void submit(OpKind kind, OpId id = 1) {
    TierOp op;
    op.id = id;
    op.kind = kind;
    op.key = key_;
    tier_->submit({op});
  }
  std::vector<Completion> poll() {
    std::vector<Completion> completions;
    removals_.clear();
    tier_->poll(&completions, &removals_);
    return completions;
  }
  void store_all() {
    for (PlayedTier* part : part_) part->presence[key_] = Presence::kPresent;
  }
  // True if the part is to be removed, and nothing else is queued.
  static bool is_being_removed(const PlayedTier& part) {
    return part.ops.size() == 1 && part.ops[0].kind == OpKind::kRemove;
  }

  const ChunkKey key_ = key_of(1);
  OpId op_ = 0;
  FakeClock clock_;
  PlayedTier* part_[2];
  std::unique_ptr<Tier> tier_;
  std::vector<TierRemoval> removals_;
};

TEST_F(AllHostsTierTest, resets_and_closes_wait_for_all_hosts_at_once) {
  // Each call waits until the call of the other host has begun.
  std::atomic<int> begun{0};
  const auto wait_for_both = [&begun] {
    const int both = begun++ / 2 * 2 + 2;
    EXPECT_TRUE(testing::holds_soon([&] { return begun >= both; })) << "one after the other";
  };
  for (PlayedTier* part : part_) part->on_reset = part->on_close = wait_for_both;
  part_[1]->reset_status = Status::error(StatusKind::kTimeout, "a host did not confirm the reset");
  EXPECT_EQ(tier_->reset().kind(), StatusKind::kTimeout);
  tier_->close();
  EXPECT_EQ(begun, 4);
}

TEST_F(AllHostsTierTest, an_exception_in_one_reset_reaches_the_caller_after_all_hosts_were_reset) {
  bool own_was_asked = false;
  part_[0]->on_reset = [&] { own_was_asked = true; };
  part_[1]->on_reset = [] { throw std::bad_alloc(); };
  EXPECT_THROW((void)tier_->reset(), std::bad_alloc);
  EXPECT_TRUE(own_was_asked);
}

TEST_F(AllHostsTierTest, each_host_has_its_own_figures) {
  part_[1]->figures.bytes = 70;
  part_[1]->seconds_per_byte = 0.5;
  set_in_service(*part_[1], false);
  submit(OpKind::kRead);
  part_[0]->end(StatusKind::kOk, 1);
  part_[1]->end(StatusKind::kOk, 2);
  (void)poll();
  submit(OpKind::kRead);
  part_[0]->end(StatusKind::kOk, 2);
  part_[1]->end(StatusKind::kIo, 3);
  (void)poll();
  submit(OpKind::kWrite);
  part_[1]->end(StatusKind::kNoSpace);
  part_[0]->end();
  (void)poll();
  const std::vector<TierPart> parts = tier_->parts();
  ASSERT_EQ(parts.size(), 2u);
  EXPECT_EQ(parts[1].stats.bytes, 70u);
  EXPECT_TRUE(parts[0].stats.readable);
  EXPECT_FALSE(parts[1].stats.readable);
  EXPECT_EQ(parts[0].read_bytes_per_second, 0);
  EXPECT_EQ(parts[1].read_bytes_per_second, 2);
  EXPECT_EQ(parts[0].slowest_reads, 0u);
  EXPECT_EQ(parts[1].slowest_reads, 1u) << "a read that failed counts";
  const auto count = [](const auto& counts, StatusKind kind) {
    return counts[static_cast<std::size_t>(kind)];
  };
  EXPECT_EQ(count(parts[0].reads, StatusKind::kOk), 2u);
  EXPECT_EQ(count(parts[0].reads, StatusKind::kIo), 0u);
  EXPECT_EQ(count(parts[1].reads, StatusKind::kIo), 1u);
  EXPECT_EQ(count(parts[1].writes, StatusKind::kNoSpace), 1u);
  EXPECT_EQ(count(parts[0].writes, StatusKind::kOk), 1u);
}

TEST_F(AllHostsTierTest, removals_that_a_host_fails_are_counted_for_the_host) {
  const auto remove_part_of_host_1 = [&] {
    store_all();
    part_[0]->remove(key_, TierRemoval::Reason::kEvicted);
    poll();
  };
  const auto removals = [&](std::size_t host, StatusKind kind) {
    return tier_->parts()[host].removals[static_cast<std::size_t>(kind)];
  };
  for (const StatusKind kind : {StatusKind::kOk, StatusKind::kIo, StatusKind::kTimeout}) {
    remove_part_of_host_1();
    ASSERT_TRUE(is_being_removed(*part_[1]));
    part_[1]->end(kind);
    EXPECT_THAT(poll(), IsEmpty());
    EXPECT_EQ(removals(1, kind), 1u);
    EXPECT_EQ(removals(0, kind), 0u);
  }
  for (const bool is_read_only : {true, false}) {
    remove_part_of_host_1();
    const TierOp op = part_[1]->ops.at(0);
    part_[1]->ops.clear();
    const Status declined = Status::error(StatusKind::kDeclined, "no", is_read_only ? EROFS : 0);
    part_[1]->ended.push_back({op.id, op.kind, op.key, declined, 0, 0, 0});
    poll();
    EXPECT_EQ(removals(1, StatusKind::kDeclined), is_read_only ? 0u : 1u);
  }
  part_[1]->throws = true;
  remove_part_of_host_1();
  EXPECT_EQ(removals(1, StatusKind::kIo), 2u) << "memory ran out";
  EXPECT_EQ(removals(0, StatusKind::kIo), 0u);
}

// While a node of a Redis cluster is down, chunks with a part there are written again, which fails.
TEST_F(AllHostsTierTest, a_failed_write_removes_no_part_that_was_there_before) {
  for (const bool is_there : {true, false}) {
    part_[0]->presence[key_] = Presence::kPresent;
    part_[1]->presence[key_] = Presence::kLookupFailed;
    submit(OpKind::kWrite);
    part_[0]->end();
    if (is_there) part_[0]->ended.back().bytes = 0;
    part_[1]->end(StatusKind::kUnavailable);
    EXPECT_EQ(poll().size(), 1u);
    EXPECT_EQ(is_being_removed(*part_[0]), !is_there);
  }
}

// The other engine may make the chunk whole. If it does not, lookups find that the part is missing.
TEST_F(AllHostsTierTest, a_failed_write_removes_no_part_of_a_chunk_that_another_engine_is_writing) {
  for (const bool is_writing : {true, false}) {
    part_[0]->presence[key_] = Presence::kPresent;
    part_[1]->presence[key_] = Presence::kUnknown;
    submit(OpKind::kWrite);
    part_[0]->end();
    const TierOp op = part_[1]->ops.at(0);
    part_[1]->ops.clear();
    const Status failed = Status::error(StatusKind::kUnavailable, "no", is_writing ? EBUSY : 0);
    part_[1]->ended.push_back({op.id, op.kind, op.key, failed, 0, 0, 0});
    EXPECT_EQ(poll().size(), 1u);
    EXPECT_EQ(is_being_removed(*part_[0]), !is_writing);
    EXPECT_EQ(is_being_removed(*part_[1]), !is_writing);
  }
}

TEST_F(AllHostsTierTest, an_evicted_part_of_a_chunk_that_another_engine_is_writing_makes_the_others_useless) {
  part_[0]->presence[key_] = part_[1]->presence[key_] = Presence::kPresent;
  submit(OpKind::kWrite);
  part_[0]->end();
  const TierOp op = part_[1]->ops.at(0);
  part_[1]->ops.clear();
  part_[1]->remove(key_, TierRemoval::Reason::kEvicted);
  const Status failed = Status::error(StatusKind::kUnavailable, "no", EBUSY);
  part_[1]->ended.push_back({op.id, op.kind, op.key, failed, 0, 0, 0});
  EXPECT_EQ(poll().size(), 1u);
  EXPECT_TRUE(is_being_removed(*part_[0]));
}

TEST_F(AllHostsTierTest, a_part_is_removed_once_although_its_chunk_is_useless_for_two_reasons) {
  for (const bool fails : {true, false}) {
    store_all();
    submit(OpKind::kRead);
    part_[0]->end();
    part_[1]->end(StatusKind::kCorrupt);
    part_[1]->remove(key_, TierRemoval::Reason::kCorrupt);
    EXPECT_EQ(poll().size(), 1u);
    ASSERT_TRUE(is_being_removed(*part_[0]));
    part_[0]->end(fails ? StatusKind::kIo : StatusKind::kOk);
    poll();
    EXPECT_EQ(tier_->parts()[0].removals[static_cast<std::size_t>(StatusKind::kIo)], 1u);
  }
}

TEST_F(AllHostsTierTest, an_op_ends_once_with_the_bytes_of_all_and_the_time_of_the_slowest_part) {
  submit(OpKind::kWrite, 5);
  part_[0]->end(StatusKind::kOk, 3);
  EXPECT_THAT(poll(), IsEmpty());
  EXPECT_EQ(tier_->contains(key_), Presence::kAbsent);
  part_[1]->end(StatusKind::kOk, 2);
  const auto ended = poll();
  ASSERT_EQ(ended.size(), 1u);
  EXPECT_EQ(ended[0].id, 5u);
  EXPECT_TRUE(ended[0].status.is_ok());
  EXPECT_EQ(ended[0].bytes, 200u);
  EXPECT_EQ(ended[0].seconds, 3);
  EXPECT_EQ(tier_->contains(key_), Presence::kPresent);
}

TEST_F(AllHostsTierTest, the_status_is_that_of_the_part_that_failed_most) {
  using enum StatusKind;
  const StatusKind order[] = {kOk,       kCancelled, kExpired, kDeclined, kUnavailable,
                              kNotFound, kTimeout,   kIo,      kCorrupt};
  for (std::size_t worse = 1; worse < std::size(order); ++worse) {
    for (std::size_t better = 0; better < worse; ++better) {
      for (const bool swapped : {false, true}) {
        submit(OpKind::kRead);
        part_[swapped]->end(order[worse]);
        part_[!swapped]->end(order[better]);
        const auto ended = poll();
        ASSERT_EQ(ended.size(), 1u);
        EXPECT_EQ(ended[0].status.kind(), order[worse]);
        EXPECT_EQ(ended[0].bytes, 0u);
      }
    }
  }
}

TEST_F(AllHostsTierTest, parts_of_a_chunk_that_was_not_written_everywhere_are_removed) {
  for (const StatusKind kind : {StatusKind::kNoSpace, StatusKind::kDeclined, StatusKind::kCancelled}) {
    submit(OpKind::kWrite);
    part_[0]->end();
    part_[1]->end(kind);
    EXPECT_EQ(poll().at(0).status.kind(), kind);
    EXPECT_TRUE(is_being_removed(*part_[0]));
    EXPECT_THAT(part_[1]->ops, IsEmpty());
    part_[0]->end();
    EXPECT_THAT(poll(), IsEmpty());
    EXPECT_THAT(removals_, IsEmpty()) << "the chunk was never here";
  }
}

TEST_F(AllHostsTierTest, a_write_that_was_cancelled_everywhere_removes_nothing) {
  part_[0]->presence[key_] = Presence::kPresent;
  submit(OpKind::kWrite);
  part_[0]->end(StatusKind::kCancelled);
  part_[1]->end(StatusKind::kCancelled);
  EXPECT_EQ(poll().size(), 1u);
  EXPECT_THAT(part_[0]->ops, IsEmpty());
}

TEST_F(AllHostsTierTest, a_read_removes_parts_only_if_another_one_is_damaged_or_missing) {
  using enum StatusKind;
  for (const StatusKind kind : {kIo, kTimeout, kExpired, kUnavailable, kCorrupt, kNotFound}) {
    store_all();
    submit(OpKind::kRead);
    if (kind == kCorrupt || kind == kNotFound) part_[1]->presence.erase(key_);
    part_[0]->end();
    part_[1]->end(kind);
    EXPECT_EQ(poll().size(), 1u);
    EXPECT_EQ(is_being_removed(*part_[0]), kind == kCorrupt || kind == kNotFound) << to_string(kind);
    if (!part_[0]->ops.empty()) part_[0]->end();
    poll();
  }
}

TEST_F(AllHostsTierTest, an_evicted_part_is_one_removal_and_releases_the_others) {
  store_all();
  part_[1]->remove(key_, TierRemoval::Reason::kEvicted);
  poll();
  ASSERT_EQ(removals_.size(), 1u);
  EXPECT_TRUE(is_being_removed(*part_[0]));
  EXPECT_EQ(tier_->contains(key_), Presence::kAbsent);
  part_[0]->end();
  poll();
  EXPECT_THAT(removals_, IsEmpty());
  EXPECT_THAT(part_[1]->ops, IsEmpty());
  EXPECT_EQ(tier_->contains(key_), Presence::kAbsent);
}

TEST_F(AllHostsTierTest, a_chunk_that_all_hosts_evict_is_reported_once) {
  using enum TierRemoval::Reason;
  store_all();
  for (PlayedTier* part : part_) part->remove(key_, kEvicted);
  EXPECT_EQ(poll_removals(), 1u) << "both have reported it";
  store_all();
  part_[1]->remove(key_, kEvicted);
  part_[0]->presence.erase(key_);  // it reports the removal later
  EXPECT_EQ(poll_removals(), 1u);
  store_all();
  part_[0]->remove(key_, kEvicted);
  part_[1]->presence.erase(key_);
  EXPECT_EQ(poll_removals(), 1u);
  for (const PlayedTier* part : part_) EXPECT_THAT(part->ops, IsEmpty());
}

TEST_F(AllHostsTierTest, a_reset_is_one_removal_of_each_key) {
  store_all();
  EXPECT_TRUE(tier_->reset().is_ok());
  part_[1]->remove(key_, TierRemoval::Reason::kReset);
  part_[0]->presence.erase(key_);  // a tier reports the keys of a reset over many polls
  const std::size_t first = poll_removals();
  part_[1]->presence[key_] = Presence::kUnknown;
  part_[0]->remove(key_, TierRemoval::Reason::kReset);
  EXPECT_EQ(first + poll_removals(), 1u);
  EXPECT_THAT(part_[1]->ops, IsEmpty()) << "it may hold a part that was written since";
  // The same chunk again, and both tiers report it in one poll.
  for (PlayedTier* part : part_) part->remove(key_, TierRemoval::Reason::kReset);
  EXPECT_EQ(poll_removals(), 1u);
}

TEST_F(AllHostsTierTest, a_lost_connection_removes_the_chunks_but_not_the_parts_of_this_host) {
  store_all();
  part_[1]->remove(key_, TierRemoval::Reason::kReset);
  EXPECT_EQ(poll_removals(), 1u);
  EXPECT_THAT(part_[0]->ops, IsEmpty());
}

TEST_F(AllHostsTierTest, records_that_this_host_loses_release_the_others) {
  using enum TierRemoval::Reason;
  for (const auto reason : {kVanished, kReset}) {  // kReset: its directory was removed
    store_all();
    part_[0]->remove(key_, reason);
    EXPECT_EQ(poll_removals(), 1u);
    ASSERT_TRUE(is_being_removed(*part_[1]));
    part_[1]->end();
    EXPECT_EQ(poll_removals(), 0u);
  }
}

TEST_F(AllHostsTierTest, a_lookup_that_finds_no_part_is_not_a_removal) {
  for (const Presence own : {Presence::kAbsent, Presence::kUnknown}) {
    part_[0]->presence[key_] = own;
    part_[1]->remove(key_, TierRemoval::Reason::kVanished);
    EXPECT_EQ(poll_removals(), 0u);
    EXPECT_THAT(part_[0]->ops, IsEmpty());
  }
}

TEST_F(AllHostsTierTest, a_part_that_is_evicted_while_others_are_written_fails_the_write) {
  submit(OpKind::kWrite);
  part_[0]->end();
  poll();
  part_[0]->remove(key_, TierRemoval::Reason::kEvicted);
  EXPECT_EQ(poll_removals(), 1u) << "it may be the part of an earlier chunk";
  part_[1]->end();
  EXPECT_EQ(poll().at(0).status.kind(), StatusKind::kNotFound);
  EXPECT_TRUE(is_being_removed(*part_[1]));
}

TEST_F(AllHostsTierTest, an_answer_from_before_a_write_does_not_fail_it) {
  submit(OpKind::kWrite);
  part_[0]->end();
  part_[1]->removed.push_back({key_, TierRemoval::Reason::kVanished});
  part_[1]->end();
  EXPECT_TRUE(poll().at(0).status.is_ok());
  EXPECT_EQ(tier_->contains(key_), Presence::kPresent);
}

TEST_F(AllHostsTierTest, a_part_that_is_unknown_is_removed_if_another_one_was_evicted) {
  part_[1]->presence[key_] = Presence::kUnknown;
  part_[0]->remove(key_, TierRemoval::Reason::kEvicted);
  poll();
  EXPECT_TRUE(is_being_removed(*part_[1]));
}

TEST_F(AllHostsTierTest, a_part_that_is_found_missing_releases_the_others_only_after_some_time) {
  part_[0]->presence[key_] = Presence::kPresent;
  const auto find_missing = [&] {
    part_[1]->remove(key_, TierRemoval::Reason::kVanished);
    poll();
    return removals_.size();
  };
  EXPECT_EQ(find_missing(), 1u);
  clock_.advance(std::chrono::seconds(59));
  EXPECT_EQ(find_missing(), 0u) << "the same removal again";
  EXPECT_THAT(part_[0]->ops, IsEmpty()) << "another engine may be writing the part";
  clock_.advance(std::chrono::seconds(1));
  find_missing();
  EXPECT_TRUE(is_being_removed(*part_[0]));
}

TEST_F(AllHostsTierTest, a_part_that_was_missing_for_a_moment_releases_nothing) {
  part_[0]->presence[key_] = Presence::kPresent;
  part_[1]->remove(key_, TierRemoval::Reason::kVanished);
  poll();
  submit(OpKind::kWrite);
  part_[0]->end();
  part_[1]->end();
  EXPECT_TRUE(poll().at(0).status.is_ok());
  clock_.advance(std::chrono::minutes(2));
  part_[1]->remove(key_, TierRemoval::Reason::kVanished);
  poll();
  EXPECT_THAT(part_[0]->ops, IsEmpty());
}

TEST_F(AllHostsTierTest, a_chunk_is_written_only_when_no_part_of_it_is_being_removed) {
  const auto remove_one = [&] {
    store_all();
    part_[1]->remove(key_, TierRemoval::Reason::kEvicted);
    poll();
    ASSERT_TRUE(is_being_removed(*part_[0]));
  };
  remove_one();
  submit(OpKind::kWrite, 9);
  EXPECT_THAT(poll(), IsEmpty());
  EXPECT_TRUE(is_being_removed(*part_[0]));
  EXPECT_THAT(part_[1]->ops, IsEmpty());
  EXPECT_EQ(tier_->stats().queued_writes, 1u);
  part_[0]->end();
  EXPECT_THAT(poll(), IsEmpty());
  part_[0]->end();
  part_[1]->end();
  EXPECT_TRUE(poll().at(0).status.is_ok());
  EXPECT_EQ(tier_->contains(key_), Presence::kPresent);
  // Until then it can be cancelled, and a reset ends it.
  for (const bool by_reset : {false, true}) {
    remove_one();
    submit(OpKind::kWrite, 10);
    if (by_reset) {
      EXPECT_TRUE(tier_->reset().is_ok());
    } else {
      EXPECT_TRUE(tier_->cancel(10));
    }
    EXPECT_EQ(poll().at(0).status.kind(), StatusKind::kCancelled);
    part_[0]->end();
    EXPECT_THAT(poll(), IsEmpty());
    EXPECT_THAT(part_[0]->ops, IsEmpty());
    EXPECT_THAT(part_[1]->ops, IsEmpty());
  }
}

TEST_F(AllHostsTierTest, a_part_that_is_evicted_during_a_write_after_a_reset_fails_the_write) {
  submit(OpKind::kWrite, 1);
  EXPECT_TRUE(tier_->reset().is_ok());
  submit(OpKind::kWrite, 2);
  for (PlayedTier* part : part_) part->end(StatusKind::kCancelled);
  EXPECT_EQ(poll().at(0).id, 1u);
  part_[0]->end();
  poll();
  part_[0]->remove(key_, TierRemoval::Reason::kEvicted);
  poll();
  part_[1]->end();
  EXPECT_EQ(poll().at(0).status.kind(), StatusKind::kNotFound);
  EXPECT_TRUE(is_being_removed(*part_[1]));
}

TEST_F(AllHostsTierTest, an_op_from_before_a_reset_removes_no_part_of_a_later_write) {
  for (const bool later_has_ended : {false, true}) {
    part_[0]->presence.clear();
    part_[1]->presence.clear();
    submit(OpKind::kWrite, 1);
    part_[0]->end();
    part_[0]->presence.clear();
    EXPECT_TRUE(tier_->reset().is_ok());
    submit(OpKind::kWrite, 2);
    part_[0]->end();
    if (later_has_ended) {
      std::swap(part_[1]->ops[0], part_[1]->ops[1]);
      part_[1]->end();
      EXPECT_TRUE(poll().at(0).status.is_ok());
    }
    part_[1]->end(StatusKind::kCancelled);
    EXPECT_EQ(poll().at(0).id, 1u);
    EXPECT_THAT(part_[0]->ops, IsEmpty());
    if (!later_has_ended) {
      part_[1]->end();
      EXPECT_TRUE(poll().at(0).status.is_ok());
    }
    EXPECT_EQ(tier_->contains(key_), Presence::kPresent);
  }
}

TEST_F(AllHostsTierTest, a_reset_forgets_since_when_a_part_is_missing) {
  for (const bool is_reset : {false, true}) {
    store_all();
    part_[1]->remove(key_, TierRemoval::Reason::kVanished);
    EXPECT_EQ(poll_removals(), 1u);
    if (is_reset) {
      EXPECT_TRUE(tier_->reset().is_ok());
    }
    clock_.advance(std::chrono::minutes(1));
    part_[1]->remove(key_, TierRemoval::Reason::kVanished);
    poll();
    EXPECT_EQ(is_being_removed(*part_[0]), !is_reset);
    if (!is_reset) part_[0]->end();
    poll();
  }
}

TEST_F(AllHostsTierTest, a_part_on_a_host_that_is_lost_is_removed_when_the_host_returns) {
  part_[0]->presence[key_] = Presence::kPresent;
  set_in_service(*part_[1], false);  // its records are not known
  part_[0]->remove(key_, TierRemoval::Reason::kCorrupt);
  poll();
  EXPECT_THAT(part_[1]->ops, IsEmpty());
  set_in_service(*part_[1], true);
  part_[1]->presence[key_] = Presence::kUnknown;
  EXPECT_EQ(poll_removals(), 0u);
  ASSERT_TRUE(is_being_removed(*part_[1]));
  part_[1]->end();
  poll();
  EXPECT_THAT(part_[1]->ops, IsEmpty());
}

TEST_F(AllHostsTierTest, a_removal_that_a_host_refuses_is_repeated_when_it_is_in_service) {
  store_all();
  part_[0]->remove(key_, TierRemoval::Reason::kEvicted);
  poll();
  ASSERT_TRUE(is_being_removed(*part_[1]));
  part_[1]->figures.writable = false;
  part_[1]->end(StatusKind::kUnavailable);
  poll();
  poll();
  EXPECT_THAT(part_[1]->ops, IsEmpty());
  part_[1]->figures.writable = true;
  poll();
  ASSERT_TRUE(is_being_removed(*part_[1]));
  part_[1]->end(StatusKind::kNotFound);
  poll();
  EXPECT_THAT(part_[1]->ops, IsEmpty());
}

// A node of a Redis cluster that is down refuses ops although the tier is in service.
TEST_F(AllHostsTierTest, a_refused_removal_is_repeated_once_a_second_and_holds_no_write) {
  store_all();
  part_[0]->remove(key_, TierRemoval::Reason::kEvicted);
  poll();
  for (int times = 0; times < 3; ++times) {
    ASSERT_TRUE(is_being_removed(*part_[1]));
    part_[1]->end(StatusKind::kUnavailable);
    poll();
    if (times == 0) continue;  // the first one is repeated at once
    clock_.advance(std::chrono::milliseconds(999));
    poll();
    EXPECT_THAT(part_[1]->ops, IsEmpty());
    clock_.advance(std::chrono::milliseconds(1));
    poll();
  }
  ASSERT_TRUE(is_being_removed(*part_[1]));
  submit(OpKind::kWrite);
  EXPECT_THAT(part_[0]->ops, IsEmpty());
  part_[1]->end(StatusKind::kUnavailable);
  clock_.advance(std::chrono::seconds(1));
  poll();
  ASSERT_EQ(part_[0]->ops.size(), 1u);
  EXPECT_EQ(part_[0]->ops[0].kind, OpKind::kWrite);
}

TEST_F(AllHostsTierTest, a_postponed_removal_is_dropped_if_the_chunk_is_written_again_or_reset) {
  enum class Then { kWhole, kWriting, kReset };
  for (const Then then : {Then::kWhole, Then::kWriting, Then::kReset}) {
    clock_.advance(std::chrono::seconds(1));
    part_[0]->presence[key_] = Presence::kPresent;
    part_[1]->presence.clear();
    set_in_service(*part_[1], false);
    part_[0]->remove(key_, TierRemoval::Reason::kEvicted);
    poll();
    if (then == Then::kWhole) store_all();
    if (then == Then::kWriting) submit(OpKind::kWrite);
    if (then == Then::kReset) {
      EXPECT_TRUE(tier_->reset().is_ok());
    }
    set_in_service(*part_[1], true);
    poll();
    EXPECT_EQ(part_[1]->ops.size(), then == Then::kWriting ? 1u : 0u);
    if (then != Then::kWriting) continue;
    for (PlayedTier* part : part_) part->end();
    EXPECT_TRUE(poll().at(0).status.is_ok());
    EXPECT_THAT(part_[1]->ops, IsEmpty());
  }
}

TEST_F(AllHostsTierTest, the_number_of_postponed_removals_is_bounded) {
  set_in_service(*part_[1], false);
  for (std::uint32_t number = 0; number < 10000; ++number)
    part_[0]->remove(key_of(number), TierRemoval::Reason::kEvicted);
  EXPECT_EQ(poll_removals(), 10000u);
  set_in_service(*part_[1], true);
  poll();
  EXPECT_EQ(part_[1]->ops.size(), 4096u);
}

TEST_F(AllHostsTierTest, a_failed_write_removes_parts_that_a_lost_host_may_have_stored) {
  submit(OpKind::kWrite);
  part_[0]->end();
  part_[1]->presence[key_] = Presence::kUnknown;
  part_[1]->end(StatusKind::kUnavailable);
  EXPECT_EQ(poll().at(0).status.kind(), StatusKind::kUnavailable);
  for (const PlayedTier* part : part_) EXPECT_TRUE(is_being_removed(*part));
}

TEST_F(AllHostsTierTest, closing_cancels_ops_of_this_host_before_it_waits_for_others) {
  submit(OpKind::kWrite);
  int cancelled_before = 0;
  part_[1]->on_close = [&] { cancelled_before = part_[0]->cancelled; };
  tier_->close();
  EXPECT_EQ(cancelled_before, 1);
  for (PlayedTier* part : part_) {
    part->on_close = {};
    part->end(StatusKind::kCancelled);
  }
  EXPECT_EQ(poll().at(0).status.kind(), StatusKind::kCancelled);
}

TEST_F(AllHostsTierTest, memory_that_runs_out_fails_an_op_once_and_stops_no_later_one) {
  part_[0]->throws = true;
  EXPECT_THROW(submit(OpKind::kWrite, 1), std::bad_alloc);
  EXPECT_THAT(part_[1]->ops, IsEmpty());
  part_[0]->throws = false;
  part_[1]->throws = true;
  submit(OpKind::kWrite, 2);  // this host writes its part
  part_[0]->end();
  const auto ended = poll();
  ASSERT_EQ(ended.size(), 1u);
  EXPECT_EQ(ended[0].status.kind(), StatusKind::kIo);
  ASSERT_TRUE(is_being_removed(*part_[0]));
  part_[0]->end();
  poll();
  // A removal that cannot be submitted does not hold later writes.
  part_[0]->throws = true;
  part_[1]->throws = false;
  store_all();
  part_[1]->remove(key_, TierRemoval::Reason::kEvicted);
  poll();
  part_[0]->throws = false;
  submit(OpKind::kWrite, 3);
  part_[0]->end();
  part_[1]->end();
  EXPECT_TRUE(poll().at(0).status.is_ok());
}

TEST_F(AllHostsTierTest, memory_that_runs_out_loses_no_write_that_was_held) {
  store_all();
  part_[0]->remove(key_, TierRemoval::Reason::kEvicted);
  poll();
  submit(OpKind::kWrite);
  ASSERT_TRUE(is_being_removed(*part_[1]));
  part_[1]->end();
  std::vector<Completion> ended;
  EXPECT_GT(testing::fail_each_allocation([&] { tier_->poll(&ended, &removals_); }, [] {}), 0u);
  EXPECT_EQ(ended.size() + part_[0]->ops.size(), 1u);
}

// Its row is in use again after it has ended.
TEST_F(AllHostsTierTest, memory_that_runs_out_in_a_reset_ends_no_held_write_that_runs_later) {
  store_all();
  part_[0]->remove(key_, TierRemoval::Reason::kEvicted);
  poll();
  ASSERT_TRUE(is_being_removed(*part_[1]));
  submit(OpKind::kWrite, 1);
  submit(OpKind::kWrite, 2);
  std::vector<OpId> ended;
  const auto note = [&] {
    for (const Completion& one : poll()) ended.push_back(one.id);
  };
  EXPECT_GT(testing::fail_each_allocation([&] { tier_->begin_reset(7); }, note), 0u);
  note();
  EXPECT_THAT(ended, ElementsAre(1, 2));
  part_[1]->end();
  poll();
  EXPECT_THAT(part_[0]->ops, IsEmpty());
}

// Other hosts do not touch the memory of this host, whose thread may use it after close().
TEST_F(AllHostsTierTest, only_the_part_of_this_host_has_the_shards_and_owns_their_memory) {
  const auto memory = std::make_shared<std::byte>();
  TierOp op;
  op.id = 1;
  op.key = key_;
  op.shards.emplace_back(memory.get(), 1);
  op.memory = memory;
  tier_->submit({std::move(op)});
  ASSERT_EQ(part_[0]->ops.size(), 1u);
  EXPECT_EQ(part_[0]->ops[0].memory, memory);
  ASSERT_EQ(part_[0]->ops[0].shards.size(), 1u);
  EXPECT_EQ(part_[0]->ops[0].shards[0].data(), memory.get());
  ASSERT_EQ(part_[1]->ops.size(), 1u);
  EXPECT_EQ(part_[1]->ops[0].id, 1u);
  EXPECT_EQ(part_[1]->ops[0].memory, nullptr);
  EXPECT_THAT(part_[1]->ops[0].shards, IsEmpty());
}

TEST_F(AllHostsTierTest, a_key_is_as_known_as_its_least_known_part) {
  using enum Presence;
  for (const Presence one :
       {kPresent, kUnknown, kLookupPending, kStaleMiss, kSkipped, kLookupFailed, kAbsent}) {
    part_[0]->presence[key_] = kPresent;
    part_[1]->presence[key_] = one;
    EXPECT_EQ(tier_->contains(key_), one);
    std::swap(part_[0]->presence, part_[1]->presence);
    EXPECT_EQ(tier_->contains(key_), one);
  }
  part_[0]->presence[key_] = kLookupPending;
  part_[1]->presence[key_] = kUnknown;
  EXPECT_EQ(tier_->contains(key_), kUnknown) << "the caller would only wait";
  for (const Presence other : {kUnknown, kStaleMiss, kSkipped, kLookupPending}) {
    part_[0]->presence[key_] = kSkipped;
    part_[1]->presence[key_] = other;
    EXPECT_EQ(tier_->contains(key_), other == kLookupPending ? kSkipped : other);
    std::swap(part_[0]->presence, part_[1]->presence);
    EXPECT_EQ(tier_->contains(key_), other == kLookupPending ? kSkipped : other);
  }
  for (const Presence one : {kUnknown, kLookupPending, kStaleMiss, kSkipped, kAbsent}) {
    part_[0]->presence[key_] = one;
    part_[1]->presence[key_] = kLookupFailed;
    const Presence all = one == kAbsent ? kAbsent : kLookupFailed;
    EXPECT_EQ(tier_->contains(key_), all) << "there is nothing to wait for";
    std::swap(part_[0]->presence, part_[1]->presence);
    EXPECT_EQ(tier_->contains(key_), all);
  }
}

TEST_F(AllHostsTierTest, a_part_whose_lookup_failed_is_removed_like_an_unknown_one) {
  for (const bool is_lost : {false, true}) {
    part_[1]->presence[key_] = Presence::kLookupFailed;
    set_in_service(*part_[1], !is_lost);
    part_[0]->remove(key_, TierRemoval::Reason::kEvicted);
    poll();
    EXPECT_EQ(is_being_removed(*part_[1]), !is_lost) << "a lost host is not asked";
    set_in_service(*part_[1], true);
    poll();
    ASSERT_TRUE(is_being_removed(*part_[1]));
    part_[1]->end();
    poll();
  }
}

TEST_F(AllHostsTierTest, a_part_that_was_skipped_may_be_left_of_a_failed_write) {
  part_[1]->presence[key_] = Presence::kSkipped;
  submit(OpKind::kWrite);
  part_[0]->end();
  part_[1]->end(StatusKind::kIo);
  poll();
  EXPECT_TRUE(is_being_removed(*part_[0]));
  EXPECT_TRUE(is_being_removed(*part_[1]));
}

TEST_F(AllHostsTierTest, an_op_counts_for_its_host_although_memory_ran_out) {
  constexpr auto kOk = static_cast<std::size_t>(StatusKind::kOk);
  bool threw = true;
  for (unsigned allocation = 0; threw; ++allocation) {
    ASSERT_LT(allocation, 100u);
    open(false);
    submit(OpKind::kWrite);
    part_[1]->end();
    threw = false;
    {
      const testing::FailingAllocation next(allocation);
      try {
        std::vector<Completion> completions;
        tier_->poll(&completions, &removals_);
      } catch (const std::bad_alloc&) {
        threw = true;
      }
    }
    poll();
    const std::vector<TierPart> parts = tier_->parts();
    EXPECT_EQ(parts[0].writes[kOk], 0u) << "allocation " << allocation;
    EXPECT_EQ(parts[1].writes[kOk], 1u) << "allocation " << allocation;
    part_[0]->end();
    EXPECT_EQ(poll().size(), 1u);
  }
}

TEST_F(AllHostsTierTest, a_part_that_cannot_be_looked_up_is_removed_after_a_failed_write_when_it_can) {
  submit(OpKind::kWrite);
  part_[0]->end();
  part_[1]->end(StatusKind::kIo);
  part_[1]->presence[key_] = Presence::kLookupFailed;
  set_in_service(*part_[1], false);
  EXPECT_EQ(poll().size(), 1u);
  EXPECT_TRUE(is_being_removed(*part_[0]));
  EXPECT_THAT(part_[1]->ops, IsEmpty());
  set_in_service(*part_[1], true);
  poll();
  EXPECT_TRUE(is_being_removed(*part_[1]));
}

TEST_F(AllHostsTierTest, without_a_common_epoch_nothing_is_looked_up_or_read) {
  open(true);
  store_all();
  EXPECT_EQ(tier_->contains(key_), Presence::kLookupFailed);
  tier_->prefetch_presence({key_}, KeyOrder::kNone);
  EXPECT_THAT(part_[0]->asked, IsEmpty());
  EXPECT_THAT(part_[1]->asked, IsEmpty());
  submit(OpKind::kRead);
  EXPECT_THAT(part_[0]->ops, IsEmpty());
  EXPECT_EQ(poll().at(0).status.kind(), StatusKind::kUnavailable);
  for (PlayedTier* part : part_) part->figures.epoch_id = 7;
  poll();
  EXPECT_EQ(tier_->contains(key_), Presence::kPresent);
  tier_->prefetch_presence({key_}, KeyOrder::kNone);
  EXPECT_EQ(part_[0]->asked.size(), 1u);
}

TEST_F(AllHostsTierTest, a_reset_has_one_id_for_all_hosts_and_the_next_one_another) {
  for (int reset = 0; reset < 2; ++reset) EXPECT_TRUE(tier_->reset().is_ok());
  const std::vector<std::uint64_t>& ids = part_[0]->startup_ids;
  EXPECT_EQ(part_[1]->startup_ids, ids);
  ASSERT_EQ(ids.size(), 2u);
  EXPECT_NE(ids[0], 0u);
  EXPECT_NE(ids[1], 0u);
  EXPECT_NE(ids[0], ids[1]);
}

// ---- epochs of three hosts

class ThreeHosts : public ::testing::Test {
 protected:
  void open(std::vector<std::uint64_t> epoch_ids, bool may_write = true) {
    std::vector<PartOfTier> parts;
    for (std::uint32_t host = 0; host < 3; ++host) {
      auto made = std::make_unique<PlayedTier>();
      part_[host] = made.get();
      part_[host]->figures.epoch_id = epoch_ids.at(host);
      part_[host]->may_reset = may_write;
      parts.push_back({std::move(made), 1.0 / 3, 2 * host});
    }
    AllHostsOptions options;
    options.epoch_ids = std::move(epoch_ids);
    options.warn = [this](const std::string& event) { events_.push_back(event); };
    tier_ = make_all_hosts_tier(std::move(parts), options);
  }
  void poll() {
    std::vector<Completion> completions;
    std::vector<TierRemoval> removals;
    tier_->poll(&completions, &removals);
  }
  // "101": the epochs of the first and third host differ from another one.
  std::string differing() const {
    std::string found;
    for (const TierPart& part : tier_->parts()) found += part.epoch_differs ? '1' : '0';
    return found;
  }
  bool is_usable() const { return tier_->stats().readable && tier_->stats().writable; }

  PlayedTier* part_[3] = {};
  std::vector<std::string> events_;
  std::unique_ptr<Tier> tier_;
};

TEST_F(ThreeHosts, different_epochs_are_reported_at_once_although_a_store_does_not_respond) {
  for (const std::size_t silent : {0, 1, 2}) {
    events_.clear();
    std::vector<std::uint64_t> ids{7, 8, 9};
    ids[silent] = 0;
    open(ids);
    std::vector<std::string> hosts;
    for (const std::size_t host : {0, 1, 2})
      if (host != silent) hosts.push_back(fmt::format("{} (rank {})", host, 2 * host));
    EXPECT_THAT(events_, ElementsAre(HasSubstr(fmt::format(
                             "the stores of hosts {} respond, but have different", fmt::join(hosts, ", ")))));
    EXPECT_EQ(differing(), silent == 0 ? "011" : silent == 1 ? "101" : "110");
    for (const TierPart& part : tier_->parts()) EXPECT_FALSE(part.stats.readable || part.stats.writable);
    part_[silent]->figures.writable = false;
    part_[silent]->figures.epoch_id = 7;
    poll();
    EXPECT_EQ(events_.size(), 1u) << "it is known already";
    EXPECT_EQ(differing(), "111");
    EXPECT_FALSE(is_usable());
    EXPECT_TRUE(tier_->reset().is_ok());
    part_[silent]->figures.writable = true;
    EXPECT_EQ(differing(), "000");
    EXPECT_TRUE(is_usable());
    poll();
    EXPECT_THAT(events_,
                ElementsAre(HasSubstr("stays out of service"), HasSubstr("in service after a reset")));
  }
}

TEST_F(ThreeHosts, different_epochs_are_replaced_once_when_all_stores_take_writes) {
  open({7, 8, 0});
  poll();
  for (PlayedTier* part : part_) EXPECT_THAT(part->begun_ids, IsEmpty()) << "a store does not respond";
  part_[2]->figures.epoch_id = 7;
  part_[2]->figures.writable = false;
  poll();
  for (PlayedTier* part : part_) EXPECT_THAT(part->begun_ids, IsEmpty()) << "a store takes no writes";
  EXPECT_FALSE(is_usable());
  part_[2]->figures.writable = true;
  poll();
  poll();
  const std::vector<std::uint64_t> ids = part_[0]->begun_ids;
  EXPECT_THAT(ids, ElementsAre(AllOf(Ne(0u), Ne(7u), Ne(8u))));
  for (PlayedTier* part : part_) {
    EXPECT_EQ(part->begun_ids, ids) << "engines that start later need one epoch";
    EXPECT_THAT(part->startup_ids, IsEmpty()) << "it may not wait";
  }
  EXPECT_EQ(differing(), "000");
  EXPECT_TRUE(is_usable());
  EXPECT_THAT(events_, ElementsAre(HasSubstr("stays out of service"), HasSubstr("replace their different"),
                                   HasSubstr("in service after a reset")));
}

TEST_F(ThreeHosts, different_epochs_stay_out_of_service_until_all_hosts_began_the_next_one) {
  open({7, 8, 9});
  part_[2]->on_begin_reset = [] { throw std::bad_alloc(); };
  EXPECT_THROW(poll(), std::bad_alloc);
  EXPECT_FALSE(is_usable());
  part_[2]->on_begin_reset = nullptr;
  poll();
  EXPECT_EQ(part_[2]->begun_ids.size(), 1u);
  EXPECT_THAT(part_[0]->begun_ids, ElementsAre(Ne(part_[2]->begun_ids[0]), part_[2]->begun_ids[0]));
  EXPECT_TRUE(is_usable());
}

TEST_F(ThreeHosts, an_epoch_that_differs_is_reported_when_its_store_responds) {
  open({7, 0, 0});
  EXPECT_THAT(events_, IsEmpty());
  poll();
  EXPECT_THAT(events_, IsEmpty()) << "a store that does not respond has no other epoch";
  EXPECT_EQ(differing(), "000");
  part_[2]->figures.epoch_id = 9;
  poll();
  EXPECT_THAT(events_, ElementsAre(HasSubstr("the stores of hosts 0 (rank 0), 2 (rank 4) respond")));
  EXPECT_EQ(differing(), "101");
}

TEST_F(ThreeHosts, a_tier_is_used_when_all_stores_have_the_same_epoch) {
  open({7, 0, 0});
  part_[1]->figures.epoch_id = 7;
  poll();
  EXPECT_THAT(events_, IsEmpty());
  EXPECT_FALSE(is_usable());
  part_[2]->figures.epoch_id = 7;
  poll();
  EXPECT_THAT(events_, ElementsAre(HasSubstr("is in service: all hosts have the same epoch")));
  EXPECT_TRUE(is_usable());
}

// Another engine replaces them, in one store after the other.
TEST_F(ThreeHosts, hosts_that_may_not_write_read_different_epochs_again_until_they_are_equal) {
  const auto refreshed = [&](int times) {
    return std::all_of(std::begin(part_), std::end(part_),
                       [times](const PlayedTier* part) { return part->refreshed == times; });
  };
  open({7, 8, 0}, false);
  EXPECT_THAT(events_, ElementsAre(HasSubstr("write_policy is read_only")));
  EXPECT_TRUE(refreshed(1));
  EXPECT_EQ(differing(), "110");
  part_[0]->figures.epoch_id = 9;
  poll();
  part_[2]->figures.epoch_id = 9;
  poll();
  EXPECT_TRUE(refreshed(1)) << "a host has not read its epoch yet";
  EXPECT_FALSE(is_usable());
  EXPECT_EQ(differing(), "111");
  part_[1]->figures.epoch_id = 8;
  poll();
  EXPECT_TRUE(refreshed(2));
  EXPECT_EQ(differing(), "111");
  EXPECT_EQ(events_.size(), 1u) << "it is known already";
  for (PlayedTier* part : part_) {
    EXPECT_FALSE(is_usable());
    part->figures.epoch_id = 9;
    poll();
  }
  EXPECT_TRUE(is_usable());
  EXPECT_EQ(differing(), "000");
  EXPECT_TRUE(refreshed(2)) << "the epoch is in use";
  EXPECT_THAT(events_, ElementsAre(HasSubstr("stays out of service"), HasSubstr("is in service")));
  for (const PlayedTier* part : part_) EXPECT_THAT(part->begun_ids, IsEmpty());
}

TEST_F(AllHostsTierTest, ops_without_a_common_epoch_end_only_if_their_submission_did_not_throw) {
  open(true);
  std::vector<TierOp> ops(3);
  for (TierOp& op : ops) op.id = ++op_;
  bool threw = true;
  for (int allocation = 0; threw; ++allocation) {
    ASSERT_LT(allocation, 100);
    std::vector<TierOp> copy = ops;
    threw = false;
    {
      const testing::FailingAllocation next(allocation);
      try {
        tier_->submit(std::move(copy));
      } catch (const std::bad_alloc&) {
        threw = true;
      }
    }
    EXPECT_EQ(poll().size(), threw ? 0u : ops.size()) << "allocation " << allocation;
  }
}

TEST_F(AllHostsTierTest, only_keys_that_this_host_may_have_are_looked_up_on_others) {
  part_[0]->presence[key_of(2)] = Presence::kUnknown;
  part_[0]->presence[key_of(3)] = Presence::kLookupFailed;
  const LookupOptions options{KeyOrder::kNone, 2, 0.25};
  tier_->prefetch_presence({key_of(1), key_of(2), key_of(3)}, options);
  EXPECT_EQ(part_[0]->asked.size(), 3u);
  EXPECT_EQ(part_[1]->asked, (std::vector<ChunkKey>{key_of(2)}));
  for (const PlayedTier* part : part_) EXPECT_THAT(part->asked_for, ElementsAre(options));
}

TEST_F(AllHostsTierTest, an_op_counts_as_cancelled_only_if_all_parts_are) {
  for (const OpKind kind : {OpKind::kRead, OpKind::kWrite}) {
    submit(kind);
    for (PlayedTier* part : part_) part->can_cancel = true;
    EXPECT_TRUE(tier_->cancel(1));
    part_[1]->can_cancel = false;
    part_[0]->cancelled = 0;
    EXPECT_FALSE(tier_->cancel(1));
    EXPECT_EQ(part_[0]->cancelled, kind == OpKind::kRead ? 1 : 0) << "a write that another host may do";
    for (PlayedTier* part : part_) part->end();
    EXPECT_EQ(poll().size(), 1u);
  }
}

TEST_F(AllHostsTierTest, the_tier_is_as_good_as_its_worst_part) {
  for (PlayedTier* part : part_) {
    part->figures.bytes = 10;
    part->figures.capacity_bytes = 100;
    part->figures.chunks = 7;
    part->figures.scan_complete = true;
  }
  part_[1]->figures.chunks = 5;
  part_[1]->figures.writable = false;
  part_[1]->figures.scan_complete = false;
  const TierStats stats = tier_->stats();
  EXPECT_EQ(stats.bytes, 20u);
  EXPECT_EQ(stats.capacity_bytes, 200u);
  EXPECT_EQ(stats.chunks, 5u);
  EXPECT_TRUE(stats.readable);
  EXPECT_FALSE(stats.writable);
  EXPECT_FALSE(stats.scan_complete);
  part_[0]->seconds_per_byte = 1;
  part_[1]->seconds_per_byte = 3;
  EXPECT_EQ(tier_->estimate_read_seconds(10), 15) << "half of the bytes on the slower host";
  part_[1]->reset_status = Status::error(StatusKind::kTimeout, "");
  EXPECT_EQ(tier_->reset().kind(), StatusKind::kTimeout);
}

}  // namespace
}  // namespace kv_offload
