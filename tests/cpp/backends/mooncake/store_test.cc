// SPDX-License-Identifier: Apache-2.0
// Properties of the mooncake tier alone: the process next to the engine, its end, and a store that loses its
// content.
#include "backends/mooncake/store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <utility>

#include "backends/mooncake/errors.h"
#include "backends/mooncake/medium.h"
#include "tier/encoded_medium.h"

namespace kv_offload {
namespace {

using namespace testing;
using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;
using Verb = FakeMooncake::Verb;

class MooncakeTier : public ::testing::Test {
 protected:
  ThreadPoolTierOptions options(Nanos op_timeout = seconds(60)) {
    ThreadPoolTierOptions options;
    options.name = "mooncake";
    options.clock = &clock_;
    options.op_timeout = op_timeout;
    return options;
  }
  std::unique_ptr<Tier> open() { return medium_.open(options()); }
  std::unique_ptr<Tier> open_read_only() {
    MooncakeTierOptions chosen = medium_.options(options());
    chosen.read_only = true;
    return make_mooncake_tier(chosen);
  }
  std::string name_of(std::uint32_t number) { return medium_.name_of(key_of(number)); }
  // Upkeep is due once per second of the tier's clock.
  bool soon(TierDriver& user, const std::function<bool()>& condition) {
    return user.until([&] {
      clock_.advance(seconds(1));
      user.poll();
      return condition();
    });
  }
  // Waits until a tier that was switched off is due for a probe.
  bool works_again(TierDriver& user, std::uint32_t number) {
    return soon(user, [&] {
      clock_.advance(seconds(61));
      return user.write(number).is_ok() && user.read(number).is_ok();
    });
  }

  FakeClock clock_;
  MooncakeMedium medium_;
  FakeMooncake& store_ = medium_.store;
};

TEST_F(MooncakeTier, a_record_is_one_object_whose_name_identifies_its_owner) {
  TierDriver user(open());
  ASSERT_TRUE(user.write(1, {5000, 300}));
  const std::string name = name_of(1);
  EXPECT_THAT(name, ::testing::StartsWith("kv_offload:" + std::string(64, '1') + ":"));
  EXPECT_THAT(name, ::testing::EndsWith(":" + key_of(1).hex()));
  EXPECT_EQ(store_.value(name).size(), kRecordHeaderBytes + 8192 + 4096);
}

TEST_F(MooncakeTier, the_names_of_all_keys_of_one_lookup_fit) {
  const std::size_t longest = 64 + 1 + 64 + 1 + 32 + 1 + 2 * ChunkKey::kMaxBytes + 1;
  EXPECT_LE(512 * longest, mooncake::kNamesBytes);
  TierDriver user(open());
  std::vector<ChunkKey> keys;
  for (std::uint32_t i = 0; i < 700; ++i) keys.push_back(key_of(i));
  ASSERT_TRUE(user.write(699));
  TierDriver other(open());
  other.tier().prefetch_presence(keys, KeyOrder::kNone);
  EXPECT_TRUE(other.until([&] {
    other.poll();
    return other.tier().contains(keys[0]) == Presence::kAbsent &&
           other.tier().contains(keys[699]) == Presence::kPresent;
  }));
}

TEST_F(MooncakeTier, records_of_any_size_share_the_memory_of_a_channel) {
  ThreadPoolTierOptions chosen = options();
  chosen.n_read_threads = chosen.n_write_threads = 1;
  TierDriver user(medium_.open(chosen));
  for (const std::uint64_t bytes : {std::uint64_t{100}, std::uint64_t{3} << 20, std::uint64_t{8192}}) {
    const auto number = static_cast<std::uint32_t>(bytes);
    ASSERT_TRUE(user.write(number, {bytes}));
    EXPECT_TRUE(user.read(number, {bytes}));
  }
  EXPECT_LE(store_.channels(), 4) << "one per thread that asked at the same time";
}

TEST_F(MooncakeTier, an_engine_reads_the_records_of_another_engine) {
  TierDriver prefill(open()), decode(open());
  ASSERT_TRUE(prefill.write(7, {8192, 300}));
  EXPECT_TRUE(decode.has(7));
  EXPECT_TRUE(decode.read(7, {8192, 300}));
}

// A correct size permits a session (kv_offload/tiers/mooncake/records.py). After an encoded record, the size
// is unknown.
TEST_F(MooncakeTier, the_process_receives_the_expected_size_of_a_record) {
  constexpr std::uint64_t kBytes = 16384, kRaw = kRecordHeaderBytes + kBytes;
  ThreadPoolTierOptions encoding = options();
  encoding.form.compression = always_encoded();
  TierDriver raw(open()), encoded(medium_.open(encoding));
  ASSERT_TRUE(raw.write(1, {kBytes}));
  ASSERT_TRUE(raw.write(2, {kBytes}));
  ASSERT_TRUE(encoded.write(3, {kBytes}));
  ASSERT_LT(store_.value(name_of(3)).size(), kRaw);
  const auto expected = [&](std::uint32_t number) {
    EXPECT_TRUE(encoded.read(number, {kBytes})) << number;
    return store_.expected(name_of(number));
  };
  EXPECT_EQ(expected(1), kRaw) << "also where records may be encoded";
  EXPECT_EQ(expected(3), kRaw) << "the size of the last record";
  EXPECT_EQ(expected(1), 0u);
  EXPECT_EQ(expected(2), kRaw);
}

// ---- a store that loses its content

TEST_F(MooncakeTier, all_records_are_misses_after_a_master_restart) {
  TierDriver user(open());
  ASSERT_TRUE(user.write(1));
  const std::string epoch = store_.value(medium_.epoch_name());
  store_.kill();
  EXPECT_EQ(user.read(1).kind(), StatusKind::kIo);
  store_.start();
  EXPECT_EQ(user.read(1).kind(), StatusKind::kNotFound);
  EXPECT_EQ(user.removed(TierRemoval::Reason::kVanished), 1u);
  EXPECT_TRUE(soon(user, [&] { return store_.value(medium_.epoch_name()) == epoch; }))
      << "an engine that uses the epoch writes it back";
  ASSERT_TRUE(works_again(user, 2));
  TierDriver later(open());
  EXPECT_TRUE(later.read(2));
}

TEST_F(MooncakeTier, an_invalid_epoch_value_is_replaced) {
  { TierDriver(open()).poll(); }
  const std::string at = medium_.epoch_name();
  for (const std::string& strange : {std::string("short"), std::string(5 << 20, 'x')}) {
    store_.set_value(at, strange);
    TierDriver user(open());
    EXPECT_TRUE(user.write(1)) << strange.size();
    EXPECT_EQ(store_.value(at).size(), EpochRegistry::kNameDigits);
  }
}

// The invalid object may be replaced by a reset at the same time. An epoch in use must not replace that of
// the reset.
TEST_F(MooncakeTier, an_invalid_epoch_value_is_not_replaced_by_an_epoch_in_use) {
  TierDriver user(open());
  const std::string at = medium_.epoch_name(), used = store_.value(at);
  store_.set_value(at, "short");
  EXPECT_TRUE(soon(user, [&] { return store_.value(at) != "short"; }));
  EXPECT_TRUE(EpochRegistry::is_name(store_.value(at)));
  EXPECT_NE(store_.value(at), used);
  EXPECT_TRUE(soon(user, [&] { return user.tier().stats().diverged; }));
}

TEST_F(MooncakeTier, an_ended_epoch_that_another_server_restored_is_replaced_again) {
  TierDriver user(open());
  const std::string at = medium_.epoch_name(), old = store_.value(at);
  ASSERT_TRUE(user.tier().reset());
  const std::string next = store_.value(at);
  ASSERT_NE(next, old);
  store_.set_value(at, old);
  EXPECT_TRUE(soon(user, [&] { return store_.value(at) != old; }));
  EXPECT_TRUE(EpochRegistry::is_name(store_.value(at)));
  EXPECT_NE(store_.value(at), next) << "another reset may have ended it meanwhile";
}

// Engines that started before the reset may use it, and may put it back if the store loses that of the reset.
TEST_F(MooncakeTier, an_epoch_that_upkeep_wrote_before_a_reset_has_ended) {
  TierDriver user(open());
  const std::string at = medium_.epoch_name(), old = store_.value(at);
  const std::size_t seen = store_.faults.seen(Verb::kEpoch);
  ASSERT_TRUE(user.tier().reset());
  ASSERT_TRUE(user.until([&] { return store_.faults.seen(Verb::kEpoch) >= seen + 2; })) << "its upkeep";
  store_.set_value(at, old);
  clock_.advance(seconds(1));  // once: the next upkeep would find what this one has written
  ASSERT_TRUE(user.until([&] {
    user.poll();
    return store_.value(at) != old;
  }));
  const std::string written = store_.value(at);
  ASSERT_TRUE(user.tier().reset());
  store_.set_value(at, written);
  EXPECT_TRUE(soon(user, [&] { return store_.value(at) != written; }));
}

TEST_F(MooncakeTier, a_reset_while_upkeep_waits_for_the_old_epoch_keeps_its_own) {
  TierDriver user(open());
  const std::string at = medium_.epoch_name(), old = store_.value(at);
  store_.hold_answer(at);
  ASSERT_TRUE(soon(user, [&] { return store_.is_answer_held(); }));
  ASSERT_TRUE(user.tier().reset());
  const std::string next = store_.value(at);
  ASSERT_NE(next, old);
  const std::size_t seen = store_.faults.seen(Verb::kEpoch);
  store_.release_answer();
  EXPECT_TRUE(soon(user, [&] { return store_.faults.seen(Verb::kEpoch) >= seen + 2; })) << "upkeep goes on";
  EXPECT_EQ(store_.value(at), next);
}

// Otherwise an engine that starts later would find the records from before the reset.
TEST_F(MooncakeTier, a_reset_whose_epoch_was_not_stored_fails_and_is_repeated) {
  TierDriver user(open());
  ASSERT_TRUE(user.write(1));
  store_.refuse_replacements(true);
  EXPECT_FALSE(user.tier().reset().is_ok());
  EXPECT_FALSE(user.tier().stats().writable);
  store_.refuse_replacements(false);
  EXPECT_TRUE(soon(user, [&] { return user.tier().stats().writable; }));
  EXPECT_FALSE(TierDriver(open()).has(1));
}

TEST_F(MooncakeTier, a_read_only_tier_writes_and_removes_nothing) {
  TierDriver reader(open_read_only());
  EXPECT_TRUE(store_.names().empty());
  TierDriver writer(open());
  ASSERT_TRUE(writer.write(1));
  ASSERT_TRUE(soon(reader, [&] { return reader.has(1); }));
  medium_.damage(key_of(1));
  EXPECT_EQ(reader.read(1).kind(), StatusKind::kCorrupt);
  EXPECT_NE(store_.value(name_of(1)), "");
}

// ---- invalid records

TEST_F(MooncakeTier, a_record_of_a_wrong_length_or_with_wrong_bytes_is_removed) {
  TierDriver user(open());
  for (const std::size_t bytes :
       {std::size_t{0}, std::size_t{100}, std::size_t{4096}, std::size_t{9 << 20}}) {
    ASSERT_TRUE(user.write(1));
    const std::string name = name_of(1);
    std::string value = store_.value(name);
    value.resize(bytes, 'x');
    store_.set_value(name, value);
    EXPECT_EQ(user.read(1).kind(), StatusKind::kCorrupt) << bytes;
    EXPECT_EQ(store_.value(name), "") << bytes;
  }
  ASSERT_TRUE(user.write(1));
  medium_.damage(key_of(1));
  const std::string name = name_of(1);
  EXPECT_EQ(user.read(1).kind(), StatusKind::kCorrupt);
  EXPECT_EQ(store_.value(name), "");
}

TEST_F(MooncakeTier, a_good_record_that_replaced_a_damaged_one_stays) {
  TierDriver user(open());
  ASSERT_TRUE(user.write(1));
  const std::string name = name_of(1), good = store_.value(name);
  std::string wrong = good;
  wrong.at(130) ^= 1;  // another time, and so another header checksum
  store_.set_value(name, wrong);
  store_.replace_once_read(name, good);
  EXPECT_EQ(user.read(1).kind(), StatusKind::kCorrupt);
  EXPECT_TRUE(user.read(1));
}

TEST_F(MooncakeTier, a_damaged_record_that_cannot_be_removed_is_overwritten) {
  TierDriver user(open());
  ASSERT_TRUE(user.write(1));
  const std::string name = name_of(1);
  medium_.damage(key_of(1));
  store_.faults.fail(Verb::kRemove, true);
  EXPECT_EQ(user.read(1).kind(), StatusKind::kCorrupt);
  EXPECT_NE(store_.value(name), "");
  store_.faults.fail(Verb::kRemove, false);
  EXPECT_TRUE(user.write(1));
  EXPECT_TRUE(user.read(1));
}

TEST_F(MooncakeTier, a_record_written_by_another_is_not_sent_again) {
  TierDriver user(open()), other(open());
  ASSERT_TRUE(user.write(1));
  const std::size_t sent = store_.faults.seen(Verb::kWrite);
  EXPECT_TRUE(other.write(1));
  EXPECT_EQ(store_.faults.seen(Verb::kWrite), sent);
}

// Without the check, only the master would answer, and nothing would be written.
TEST_F(MooncakeTier, a_write_after_a_failure_checks_for_an_existing_record) {
  TierDriver user(open()), other(open());
  ASSERT_TRUE(user.write(1000));
  for (std::uint32_t i = 0; i < ExistenceCheckPolicy::kMissesToSkip; ++i)
    ASSERT_TRUE(other.write(i));  // no longer checks first
  store_.faults.fail(Verb::kWrite, true);
  EXPECT_FALSE(other.write(2000));
  store_.faults.fail(Verb::kWrite, false);
  const std::size_t sent = store_.faults.seen(Verb::kWrite);
  const Completion written = other.finish(other.start(OpKind::kWrite, 1000, {8192}));
  EXPECT_TRUE(written.status);
  EXPECT_EQ(written.bytes, 0u);
  EXPECT_EQ(store_.faults.seen(Verb::kWrite), sent);
}

TEST_F(MooncakeTier, an_existing_record_counts_no_bytes_if_the_write_did_not_check) {
  TierDriver user(open()), other(open());
  ASSERT_TRUE(user.write(1000));
  ASSERT_TRUE(user.write(1001));
  for (std::uint32_t i = 0; i < ExistenceCheckPolicy::kMissesToSkip; ++i)
    ASSERT_TRUE(other.write(i));  // no longer checks first
  const std::size_t sent = store_.faults.seen(Verb::kWrite);
  const Completion written = other.finish(other.start(OpKind::kWrite, 1000, {8192}));
  EXPECT_TRUE(written.status);
  EXPECT_EQ(written.bytes, 0u);
  EXPECT_EQ(store_.faults.seen(Verb::kWrite), sent + 1) << "it did not check";
  EXPECT_TRUE(other.write(1001));
  EXPECT_EQ(store_.faults.seen(Verb::kWrite), sent + 1) << "a found record makes the next writes check";
}

TEST_F(MooncakeTier, a_single_writer_seldom_checks_for_existing_records) {
  TierDriver user(open());
  const auto questions = [&](std::uint32_t first, std::uint32_t writes) {
    const std::size_t before = store_.faults.seen(Verb::kLocate);
    for (std::uint32_t i = 0; i < writes; ++i) EXPECT_TRUE(user.write(first + i));
    return store_.faults.seen(Verb::kLocate) - before;
  };
  EXPECT_EQ(questions(0, ExistenceCheckPolicy::kMissesToSkip), ExistenceCheckPolicy::kMissesToSkip);
  EXPECT_EQ(questions(1000, 2 * ExistenceCheckPolicy::kCheckInterval), 2u);
}

TEST_F(MooncakeTier, a_write_to_a_record_that_another_writer_left_incomplete_is_no_success) {
  TierDriver user(open());
  ASSERT_TRUE(user.write(1));
  std::string name = name_of(1);
  name.replace(name.size() - key_of(1).hex().size(), name.npos, key_of(2).hex());
  store_.begin_and_leave(name);
  const Status status = user.write(2);
  EXPECT_EQ(status.kind(), StatusKind::kUnavailable) << status.to_string();
  EXPECT_EQ(user.read(2).kind(), StatusKind::kNotFound);
  EXPECT_TRUE(user.tier().stats().writable) << "the store answers";
}

TEST_F(MooncakeTier, a_full_store_refuses_writes_and_does_not_count_as_broken) {
  TierDriver user(open());
  store_.set_full(true);
  for (std::uint32_t i = 0; i < 20; ++i) EXPECT_EQ(user.write(i).kind(), StatusKind::kNoSpace);
  EXPECT_TRUE(user.tier().stats().writable);
  store_.set_full(false);
  EXPECT_TRUE(user.write(1));
}

// ---- the process

TEST_F(MooncakeTier, opening_fails_without_the_requirements_of_the_process) {
  store_.refuse_starts("refused Mooncake's Python package cannot be loaded");
  try {
    open();
    FAIL() << "it opened";
  } catch (const ResourceError& error) {
    EXPECT_THAT(error.what(), HasSubstr("mooncake tier at master:1: Mooncake's Python package"));
  }
}

TEST_F(MooncakeTier, a_master_that_is_down_at_the_start_is_waited_for) {
  store_.kill();
  TierDriver user(open());
  EXPECT_FALSE(user.tier().stats().writable);
  EXPECT_FALSE(user.write(1));
  store_.start();
  EXPECT_TRUE(works_again(user, 1));
}

TEST_F(MooncakeTier, memory_that_runs_out_during_a_start_is_a_failed_start) {
  MooncakeTierOptions chosen = medium_.options(options());
  chosen.client.launch = [launch = chosen.client.launch, first = std::make_shared<bool>(true)](
                             mooncake::Descriptor theirs, std::unique_ptr<mooncake::Process>* begun) {
    if (std::exchange(*first, false)) throw std::bad_alloc();
    return launch(std::move(theirs), begun);
  };
  TierDriver user(make_mooncake_tier(chosen));
  EXPECT_TRUE(works_again(user, 1));
}

TEST_F(MooncakeTier, a_killed_process_ends_its_ops_and_is_started_again) {
  TierDriver user(open());
  ASSERT_TRUE(user.write(1));
  store_.faults.block(Verb::kRead);
  const OpId in_flight = user.start(OpKind::kRead, 1, {8192});
  store_.faults.wait_for_blocked(1);
  store_.kill_clients();
  const Status status = user.finish(in_flight).status;
  EXPECT_EQ(status.kind(), StatusKind::kIo) << status.to_string();
  store_.faults.release();
  EXPECT_TRUE(works_again(user, 2));
  EXPECT_TRUE(user.read(1)) << "the store kept it";
  EXPECT_GE(store_.starts(), 2);
}

TEST_F(MooncakeTier, channels_of_an_ended_process_are_not_used_with_the_next_one) {
  mooncake::Client client(medium_.options().client);
  const auto until = std::chrono::steady_clock::now() + seconds(60);
  bool refused = false;
  ASSERT_TRUE(client.wait_for_start(until, &refused));
  std::unique_ptr<mooncake::Channel> early, late;
  ASSERT_TRUE(client.take(100, &early));
  ASSERT_TRUE(client.take(100, &late));
  client.give_back(std::move(early));
  store_.kill_clients();
  ASSERT_TRUE(holds_soon([&] { return client.starts() == 2; }));
  client.give_back(std::move(late));
  std::unique_ptr<mooncake::Channel> next;
  ASSERT_TRUE(client.take(100, &next));
  EXPECT_EQ(next->client(), 2u);
  const std::string name = "a";
  mooncake::Answer answer;
  EXPECT_TRUE(next->call(mooncake::Verb::kExist, {&name, 1}, 0, until, &answer));
}

TEST_F(MooncakeTier, a_hanging_call_ends_at_its_deadline_together_with_its_process) {
  TierDriver user(medium_.open(options(seconds(1))));
  ASSERT_TRUE(user.write(1));
  store_.stand_still(true);
  const Status status = user.read(1);
  EXPECT_EQ(status.kind(), StatusKind::kTimeout) << status.to_string();
  store_.stand_still(false);
  EXPECT_TRUE(works_again(user, 2));
  EXPECT_GE(store_.starts(), 2) << "the hung process is not used again";
}

TEST_F(MooncakeTier, late_writes_of_a_hung_process_reach_no_row) {
  TierDriver user(medium_.open(options(milliseconds(150))));
  ASSERT_TRUE(user.write(1));
  store_.faults.block(Verb::kRead);
  auto row = std::make_shared<Row>(ShardSizes{8192});
  row->fill(77);
  std::vector<TierOp> ops(1);
  ops[0].id = 1000;
  ops[0].key = key_of(1);
  ops[0].shards = row->shards();
  user.tier().submit(std::move(ops));
  EXPECT_EQ(user.finish(1000).status.kind(), StatusKind::kTimeout);
  store_.faults.release();  // it answers now, into its own memory
  EXPECT_TRUE(works_again(user, 2));
  EXPECT_TRUE(row->holds(77));
}

TEST_F(MooncakeTier, close_does_not_wait_for_a_process_that_does_not_start) {
  store_.hang_starts(true);
  MooncakeTierOptions chosen = medium_.options();
  chosen.client.start_deadline = std::chrono::hours(1);
  mooncake::Client client(chosen.client);
  std::unique_ptr<mooncake::Channel> channel;
  EXPECT_FALSE(client.take(100, &channel));
  client.close();  // the runner ends a waiting process
  store_.hang_starts(false);
}

TEST_F(MooncakeTier, a_refusal_that_takes_longer_than_an_op_is_reported) {
  store_.hang_starts(true);
  store_.refuse_starts("refused Mooncake's Python package cannot be loaded");
  std::thread late([&] {
    EXPECT_TRUE(holds_soon([&] { return store_.starts() == 1; }));
    store_.hang_starts(false);
  });
  EXPECT_THROW((void)medium_.open(options(Nanos{1})), ResourceError);
  late.join();
}

TEST_F(MooncakeTier, a_hanging_call_ends_soon_after_a_stop) {
  mooncake::Client client(medium_.options().client);
  const auto never = std::chrono::steady_clock::now() + std::chrono::hours(10);
  bool refused = false;
  ASSERT_TRUE(client.wait_for_start(never, &refused));
  std::unique_ptr<mooncake::Channel> channel;
  ASSERT_TRUE(client.take(100, &channel));
  store_.stand_still(true);
  client.stop();
  const std::string name = "a";
  mooncake::Answer answer;
  const Status status =
      client.call(*channel, mooncake::Verb::kExist, {&name, 1}, 0, never, seconds(1), &answer);
  EXPECT_EQ(status.kind(), StatusKind::kIo) << status.to_string();
  EXPECT_FALSE(client.take(100, &channel));
  store_.stand_still(false);
  client.close();
  EXPECT_EQ(store_.starts(), 1) << "no unused process is started";
}

TEST_F(MooncakeTier, a_call_with_a_short_deadline_does_not_end_the_process) {
  mooncake::Client client(medium_.options().client);
  const auto in = [](Nanos time) { return std::chrono::steady_clock::now() + time; };
  const std::string name = "a";
  mooncake::Answer answer;
  std::unique_ptr<mooncake::Channel> left, asked;
  const auto ask = [&](const mooncake::Channel& channel, Nanos time, Nanos whole) {
    return client.call(channel, mooncake::Verb::kExist, {&name, 1}, 0, in(time), whole, &answer);
  };
  bool refused = false;
  ASSERT_TRUE(client.wait_for_start(in(seconds(60)), &refused));
  ASSERT_TRUE(client.take(100, &left));
  ASSERT_TRUE(client.take(100, &asked));
  store_.stand_still(true);
  EXPECT_EQ(ask(*left, milliseconds(1), std::chrono::hours(1)).kind(), StatusKind::kTimeout);
  store_.stand_still(false);
  EXPECT_TRUE(ask(*asked, seconds(60), seconds(60))) << "a concurrent call succeeds";
  EXPECT_EQ(client.starts(), 1u);
  store_.stand_still(true);
  EXPECT_EQ(ask(*asked, milliseconds(200), Nanos{0}).kind(), StatusKind::kTimeout);
  EXPECT_TRUE(holds_soon([&] { return client.starts() == 2; }));
  store_.stand_still(false);
}

TEST_F(MooncakeTier, close_ends_a_hanging_call) {
  TierDriver user(medium_.open(options(std::chrono::hours(10))));
  ASSERT_TRUE(user.write(1));
  store_.stand_still(true);
  const OpId hangs = user.start(OpKind::kRead, 1, {8192});
  user.tier().close();
  EXPECT_FALSE(user.finish(hangs).status);
  store_.stand_still(false);
}

TEST(MooncakeErrors, mooncake_errors_map_to_status_kinds_and_messages) {
  using mooncake::refusal;
  EXPECT_EQ(refusal(-704, "").kind(), StatusKind::kNotFound);
  EXPECT_EQ(refusal(-703, "").kind(), StatusKind::kNotFound);
  EXPECT_EQ(refusal(-200, "").kind(), StatusKind::kNoSpace);
  EXPECT_EQ(refusal(-200, "").error_number(), 0) << "otherwise a full store would count as a broken one";
  EXPECT_EQ(refusal(-800, "").kind(), StatusKind::kIo);
  EXPECT_THAT(refusal(-900, "").message(), HasSubstr("master does not answer (code -900)"));
  EXPECT_THAT(refusal(-5, "").message(), HasSubstr("code -5"));
  EXPECT_EQ(refusal(-1, "RuntimeError: no").message(), "RuntimeError: no");
}

}  // namespace
}  // namespace kv_offload
