// SPDX-License-Identifier: Apache-2.0
// The objects in a bucket, and the s3 tier's handling of them.
#include "backends/s3/store.h"

#include <gtest/gtest.h>

#include <string>
#include <thread>

#include "backends/s3/tier_fixture.h"
#include "tier/encrypted_medium.h"

namespace kv_offload {
namespace {

using namespace testing;
using Verb = S3Server::Verb;

// ---- objects

TEST_F(S3TierTest, a_record_is_stored_in_the_disk_format) {
  TierDriver user(open());
  ASSERT_TRUE(user.write(1, {5000, 0, 4096}));
  const std::string name = medium_.name_of(key_of(1));
  EXPECT_TRUE(name.starts_with("kv_offload/" + std::string(64, '1') + "/")) << name;
  const std::string value = server_.get(name);
  ASSERT_EQ(value.size(), kRecordHeaderBytes + 8192 + 4096);
  RecordHeader header;
  ASSERT_TRUE(decode_header(std::as_bytes(std::span(value)).first(kRecordHeaderBytes), &header));
  EXPECT_EQ(header.key, key_of(1));
  EXPECT_EQ(header.shard_bytes, (std::vector<std::uint64_t>{5000, 0, 4096}));
  EXPECT_EQ(value.find_first_not_of('\0', kRecordHeaderBytes + 5000), kRecordHeaderBytes + 8192);
  EXPECT_EQ(server_.wrong_signatures(), 0u);
  EXPECT_FALSE(server_.last(Verb::kWrite).headers.contains("expect")) << "it would wait for an answer";
}

TEST_F(S3TierTest, large_records_and_many_shards_are_read_back) {
  TierDriver user(open());
  for (const ShardSizes& sizes : {ShardSizes{8 << 20}, ShardSizes(kMaxShards, 40000)}) {
    const auto number = static_cast<std::uint32_t>(sizes.size());
    ASSERT_TRUE(user.write(number, sizes));
    EXPECT_TRUE(user.read(number, sizes));
  }
  EXPECT_EQ(server_.wrong_signatures(), 0u);
}

// Each value was never written under this key. None is read; each is removed.
TEST_F(S3TierTest, an_object_that_is_not_a_record_of_this_key_is_damage) {
  TierDriver user(open());
  ASSERT_TRUE(user.write(1) && user.write(2));
  const std::string name = medium_.name_of(key_of(1));
  const std::string whole = server_.get(name), foreign = server_.get(medium_.name_of(key_of(2)));
  std::string payload = whole, version = whole;
  payload[6000] ^= 1;
  version[8] ^= 1;
  for (const std::string& value : {payload, version, foreign, whole.substr(0, whole.size() - 1), whole + "x",
                                   whole.substr(0, 100), std::string(), std::string(100000, 'x')}) {
    server_.set(name, value);
    EXPECT_EQ(user.read(1).kind(), StatusKind::kCorrupt) << value.size();
    EXPECT_FALSE(server_.has(name)) << value.size();
  }
  EXPECT_TRUE(user.read(2));
  ASSERT_TRUE(user.write(1));
  EXPECT_TRUE(user.read(1));
}

TEST_F(S3TierTest, the_padding_of_a_shard_is_verified_too) {
  TierDriver user(open());
  ASSERT_TRUE(user.write(1, {5000}));
  const std::string name = medium_.name_of(key_of(1));
  std::string value = server_.get(name);
  value[kRecordHeaderBytes + 8000] = 'x';
  server_.set(name, value);
  EXPECT_EQ(user.read(1, {5000}).kind(), StatusKind::kCorrupt);
}

// Without an announced length, received bytes are counted and never written beyond the row.
TEST_F(S3TierTest, a_body_without_an_announced_length_is_counted) {
  s3::S3Store store(options());
  ASSERT_TRUE(write(store, 1));
  const std::string whole = server_.get(medium_.name_of(key_of(1)));
  for (const auto& [body, kind] : {std::pair(whole + "x", StatusKind::kCorrupt),
                                   std::pair(whole + std::string(1 << 20, 'x'), StatusKind::kCorrupt),
                                   std::pair(whole.substr(0, 5000), StatusKind::kIo)}) {  // or truncated
    server_.answer(Verb::kRead, "HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + body, 1);
    EXPECT_EQ(read(store, 1).kind(), kind) << body.size();
  }
  EXPECT_TRUE(read(store, 1)) << "its ETag differs";
}

TEST_F(S3TierTest, a_truncated_answer_is_a_store_failure_and_the_record_stays) {
  s3::S3Store store(options());
  ASSERT_TRUE(write(store, 1));
  for (const std::size_t after : {1, 12, 60, 110, 200, 4200, 12000}) {
    server_.faults.cut(Verb::kRead, after);
    EXPECT_EQ(read(store, 1).kind(), StatusKind::kIo) << after;
  }
  server_.faults.cut(Verb::kRead, 0);
  EXPECT_TRUE(read(store, 1));
}

TEST_F(S3TierTest, an_invalid_answer_is_a_failure) {
  s3::S3Store store(options());
  ASSERT_TRUE(write(store, 1));
  const std::string whole = server_.get(medium_.name_of(key_of(1)));
  for (const std::string& text :
       {std::string("nonsense\r\n\r\n"), "HTTP/1.1 206 Partial\r\nContent-Length: 12288\r\n\r\n" + whole,
        "HTTP/1.1 200 OK\r\n" + std::string(200000, 'h') + "\r\n\r\n", error_of("418 Teapot", "Odd"),
        "HTTP/1.1 403 No\r\nConnection: close\r\n\r\n" + std::string(1 << 20, '<')}) {
    server_.answer(Verb::kRead, text, 1);
    EXPECT_EQ(read(store, 1).kind(), StatusKind::kIo) << text.substr(0, 30);
  }
  EXPECT_TRUE(read(store, 1));
}

// Otherwise the request would be sent again, and an authentication tag would cover parts of two bodies while
// the row holds one of them.
TEST_F(S3TierTest, bytes_after_a_body_do_not_change_the_answer) {
  for (const bool encrypted : {false, true}) {
    S3TierOptions chosen = options();
    chosen.prefix = encrypted ? "encrypted" : "plain";
    if (encrypted) chosen.form.keys = keys_of({1});
    s3::S3Store store(chosen);
    Row row({12288}), into({12288});
    row.fill(1);
    std::uint64_t moved = 0;
    ASSERT_TRUE(store.write(op_of(OpKind::kWrite, 1, row), store.epoch(), &moved));
    std::string name;
    for (const std::string& one : server_.keys()) {
      if (one.starts_with(chosen.prefix)) name = one;
    }
    const std::string whole = server_.get(name);
    server_.answer(Verb::kRead,
                   "HTTP/1.1 200 OK\r\nContent-Length: 16384\r\nTransfer-Encoding: chunked\r\n\r\n2000\r\n" +
                       whole.substr(0, 8192) + "\r\n0\r\nHTTP/1.1 503 Busy: x\r\n\r\n",
                   1);
    server_.set(name, whole.substr(8192));
    EXPECT_EQ(store.read(op_of(OpKind::kRead, 1, into), store.epoch(), &moved).kind(), StatusKind::kCorrupt);
  }
}

TEST_F(S3TierTest, a_single_writer_seldom_checks_for_existing_records) {
  s3::S3Store store(options());
  const auto questions = [&](std::uint32_t first, std::uint32_t writes) {
    const std::size_t before = server_.faults.seen(Verb::kLocate);
    for (std::uint32_t i = 0; i < writes; ++i) EXPECT_TRUE(write(store, first + i));
    return server_.faults.seen(Verb::kLocate) - before;
  };
  EXPECT_EQ(questions(0, ExistenceCheckPolicy::kMissesToSkip), ExistenceCheckPolicy::kMissesToSkip);
  EXPECT_EQ(questions(1000, 2 * ExistenceCheckPolicy::kCheckInterval), 2u);
  for (std::uint32_t i = 0; i < ExistenceCheckPolicy::kMissesToSkip; ++i) EXPECT_TRUE(read(store, i));
  s3::S3Store other(options());
  for (std::uint32_t i = 0; i < ExistenceCheckPolicy::kCheckInterval; ++i)
    ASSERT_TRUE(write(other, 2000 + i));
  questions(2000, ExistenceCheckPolicy::kCheckInterval);  // one of them finds a record of the other
  EXPECT_EQ(questions(3000, ExistenceCheckPolicy::kMissesToSkip), ExistenceCheckPolicy::kMissesToSkip);
}

TEST_F(S3TierTest, a_record_that_replaced_a_damaged_one_stays) {
  s3::S3Store store(options());
  ASSERT_TRUE(write(store, 1));
  const std::string name = medium_.name_of(key_of(1)), whole = server_.get(name);
  medium_.damage(key_of(1));
  server_.faults.block(Verb::kLocate);  // the damaged record was read
  std::thread reader([&] { EXPECT_EQ(read(store, 1).kind(), StatusKind::kCorrupt); });
  server_.faults.wait_for_blocked(1);
  server_.set(name, whole);
  server_.faults.release();
  reader.join();
  EXPECT_EQ(server_.get(name), whole);
  medium_.damage(key_of(1));
  server_.faults.block(Verb::kRemove);  // and it was checked
  std::thread second([&] { EXPECT_EQ(read(store, 1).kind(), StatusKind::kCorrupt); });
  server_.faults.wait_for_blocked(1);
  server_.set(name, whole);
  server_.faults.release();
  second.join();
  EXPECT_EQ(server_.get(name), whole);
}

TEST_F(S3TierTest, a_damaged_object_that_cannot_be_removed_is_overwritten) {
  // The second store refuses its own ETag, as a store does if a proxy changes ETags.
  for (const std::string& refusal : {error_of("403 Forbidden", "AccessDenied"),
                                     error_of("412 Precondition Failed", "PreconditionFailed")}) {
    s3::S3Store store(options());
    ASSERT_TRUE(write(store, 1));
    medium_.damage(key_of(1));
    server_.answer(Verb::kRemove, refusal, kAlways);
    EXPECT_EQ(read(store, 1).kind(), StatusKind::kCorrupt);
    ASSERT_TRUE(write(store, 1));
    EXPECT_TRUE(read(store, 1)) << refusal;
    const std::size_t before = server_.faults.seen(Verb::kWrite);
    ASSERT_TRUE(write(store, 1));
    EXPECT_EQ(server_.faults.seen(Verb::kWrite), before) << "only once";
  }
}

TEST_F(S3TierTest, a_read_only_tier_changes_nothing) {
  { ASSERT_TRUE(TierDriver(open()).write(1)); }
  S3TierOptions chosen = options();
  chosen.read_only = true;
  TierDriver user(make_s3_tier(chosen));
  EXPECT_TRUE(user.read(1));
  medium_.damage(key_of(1));
  EXPECT_EQ(user.read(1).kind(), StatusKind::kCorrupt);
  EXPECT_EQ(server_.keys().size(), 1u);
  EXPECT_FALSE(user.tier().reset());
  EXPECT_TRUE(TierDriver(open()).has(1)) << "others were not reset";
}

TEST_F(S3TierTest, a_record_written_by_another_is_not_sent_again) {
  s3::S3Store first(options()), second(options());
  ASSERT_TRUE(write(first, 1));
  ASSERT_TRUE(write(second, 1));
  EXPECT_EQ(server_.faults.seen(Verb::kWrite), 1u);
}

TEST_F(S3TierTest, a_record_that_another_wrote_after_a_missed_lookup_is_not_sent) {
  TierDriver user(open()), other(open());
  EXPECT_FALSE(user.has(1));
  clock_.advance(std::chrono::minutes(1));  // while the prompt was computed
  ASSERT_TRUE(other.write(1));
  ASSERT_TRUE(user.write(1));
  EXPECT_EQ(server_.faults.seen(Verb::kWrite), 1u);
  EXPECT_TRUE(user.read(1));
}

TEST_F(S3TierTest, the_keys_of_a_prompt_are_found_with_few_requests) {
  s3::S3Store store(options());
  std::vector<ChunkKey> keys;
  for (std::uint32_t i = 0; i < 100; ++i) keys.push_back(key_of(i));
  for (const std::uint32_t known : {0u, 1u, 2u, 3u, 37u, 99u, 100u}) {
    for (std::uint32_t i = 0; i < known; ++i) ASSERT_TRUE(write(store, i));
    const std::size_t before = server_.faults.seen(Verb::kLocate);
    const std::vector<bool> present = located(store, keys);
    EXPECT_LE(server_.faults.seen(Verb::kLocate) - before, 14u);
    for (std::uint32_t i = 0; i < keys.size(); ++i) EXPECT_EQ(present[i], i < known) << i << " of " << known;
  }
}

// Another tier may have the missing chunk.
TEST_F(S3TierTest, a_chunk_after_the_first_missing_one_of_a_prompt_is_not_reported_absent) {
  s3::S3Store store(options());
  std::vector<ChunkKey> keys;
  for (std::uint32_t i = 0; i < 8; ++i) keys.push_back(key_of(i));
  for (const std::uint32_t number : {0u, 1u, 3u, 7u}) ASSERT_TRUE(write(store, number));
  std::vector<bool> present(keys.size());
  ASSERT_TRUE(store.locate(keys, KeyOrder::kPrefix, store.epoch(), &present));
  EXPECT_EQ(present, (std::vector<bool>{true, true, false}));
  const auto tier = make_s3_tier(options());
  const auto look_up = [&](const std::vector<ChunkKey>& wanted) {
    tier->prefetch_presence(wanted, KeyOrder::kPrefix);
    EXPECT_TRUE(holds_soon([&] {
      return std::none_of(wanted.begin(), wanted.end(), [&](const ChunkKey& key) {
        const Presence of = tier->contains(key);
        return of == Presence::kUnknown || of == Presence::kLookupPending;
      });
    }));
  };
  look_up(keys);
  EXPECT_EQ(tier->contains(keys[1]), Presence::kPresent);
  EXPECT_EQ(tier->contains(keys[2]), Presence::kAbsent);
  for (const std::uint32_t number : {3u, 4u, 7u}) EXPECT_EQ(tier->contains(keys[number]), Presence::kSkipped);
  tier->forget_miss(keys[3]);
  tier->forget_miss(keys[4]);
  look_up({keys[3], keys[4]});
  EXPECT_EQ(tier->contains(keys[3]), Presence::kPresent);
  EXPECT_EQ(tier->contains(keys[4]), Presence::kAbsent);
}

TEST_F(S3TierTest, keys_without_prefix_order_are_each_looked_up) {
  s3::S3Store store(options());
  for (const std::uint32_t number : {1u, 3u}) ASSERT_TRUE(write(store, number));
  const std::vector<ChunkKey> keys{key_of(4), key_of(3), key_of(2), key_of(1)};
  EXPECT_EQ(located(store, keys, KeyOrder::kNone), (std::vector<bool>{false, true, false, true}));
}

// For example the keys of a sliding window: each is a request, and takes its time.
TEST_F(S3TierTest, keys_without_prefix_order_are_looked_up_concurrently) {
  ThreadPoolTierOptions pooled;
  pooled.n_read_threads = 4;
  const auto tier = medium_.open(pooled);
  server_.faults.block(Verb::kLocate);
  tier->prefetch_presence({key_of(1), key_of(2), key_of(3), key_of(4)}, KeyOrder::kNone);
  server_.faults.wait_for_blocked(4);
  server_.faults.release();
}

// One record of a prefix expired (lifecycle rules know no prompts): whatever the lookup returns, the read
// gets a miss.
TEST_F(S3TierTest, a_hole_in_a_prefix_is_a_miss_when_it_is_read) {
  s3::S3Store store(options());
  std::vector<ChunkKey> keys;
  for (std::uint32_t i = 0; i < 8; ++i) {
    keys.push_back(key_of(i));
    ASSERT_TRUE(write(store, i));
  }
  ASSERT_TRUE(server_.remove(medium_.name_of(key_of(4))));
  EXPECT_TRUE(located(store, keys)[4]) << "not checked";
  EXPECT_EQ(read(store, 4).kind(), StatusKind::kNotFound);
  ASSERT_TRUE(write(store, 4));
  EXPECT_TRUE(read(store, 4));
}

// ---- epochs

TEST_F(S3TierTest, the_second_of_two_concurrent_starts_adopts_the_epoch_of_the_first) {
  for (const bool ignored : {false, true}) {
    S3Server server;
    server.ignore_conditions(ignored);
    S3TierOptions chosen = options();
    chosen.bucket = server.address();
    const std::string epoch = "kv_offload/" + std::string(64, '1') + "/epoch";
    // The answer to the first request predates the other server's write.
    server.answer(Verb::kEpoch, error_of("404 Not Found", "NoSuchKey"), 1);
    server.set(epoch, std::string(32, 'a'));
    s3::S3Store second(chosen);
    ASSERT_NE(second.epoch(), nullptr);
    ASSERT_TRUE(write(second, 1));
    const std::string kept = server.get(epoch);
    EXPECT_EQ(kept == std::string(32, 'a'), !ignored) << "a store without conditions keeps the last write";
    EXPECT_NE(server.keys().at(0).find("/" + kept + "/"), std::string::npos);
  }
}

TEST_F(S3TierTest, a_missing_epoch_is_written_back_only_where_conditions_are_supported) {
  const std::string epoch = "kv_offload/" + std::string(64, '1') + "/epoch";
  for (const bool ignored : {false, true}) {
    server_.remove(epoch);
    server_.remove("kv_offload/conditions");
    s3::S3Store store(options());
    const std::string name = server_.get(epoch);
    EXPECT_EQ(name.size(), 32u);
    server_.ignore_conditions(ignored);
    server_.remove(epoch);
    store.maintain();
    EXPECT_EQ(server_.get(epoch), ignored ? "" : name);
  }
}

// A reset while upkeep is about to write the old epoch back: the new epoch stays.
TEST_F(S3TierTest, an_epoch_from_before_a_reset_never_replaces_the_new_one) {
  const std::string epoch = "kv_offload/" + std::string(64, '1') + "/epoch";
  s3::S3Store store(options()), reset(options());
  server_.remove(epoch);
  server_.faults.block(Verb::kOther);  // it has seen that the epoch is missing
  std::thread upkeep([&] { store.maintain(); });
  server_.faults.wait_for_blocked(1);
  reset.forget(0);
  EXPECT_TRUE(reset.begin_epoch());
  const std::string after = server_.get(epoch);
  server_.faults.release();
  upkeep.join();
  EXPECT_EQ(server_.get(epoch), after);
  TierStats stats;
  store.figures(&stats);
  EXPECT_TRUE(stats.diverged);
}

// The reset comes while upkeep asks for the epoch, which is missing.
TEST_F(S3TierTest, an_epoch_that_a_reset_ended_is_never_written_back) {
  const std::string epoch = "kv_offload/" + std::string(64, '1') + "/epoch";
  s3::S3Store store(options());
  server_.remove(epoch);
  server_.faults.block(Verb::kEpoch);
  std::thread upkeep([&] { store.maintain(); });
  server_.faults.wait_for_blocked(1);
  store.forget(0);
  server_.faults.release();
  upkeep.join();
  EXPECT_EQ(server_.get(epoch), "");
  EXPECT_TRUE(store.begin_epoch());
}

// A store that supports no conditions gets a name for a missing epoch by an unconditional PUT.
TEST_F(S3TierTest, a_name_chosen_before_a_reset_is_not_written_after_it) {
  const std::string epoch = "kv_offload/" + std::string(64, '1') + "/epoch";
  server_.faults.fail(Verb::kEpoch, true);
  s3::S3Store store(options());  // it knows no epoch
  server_.faults.fail(Verb::kEpoch, false);
  server_.ignore_conditions(true);
  server_.faults.block(Verb::kEpoch);
  std::thread upkeep([&] { store.maintain(); });
  server_.faults.wait_for_blocked(1);
  store.forget(0);
  server_.faults.release();
  upkeep.join();
  EXPECT_EQ(server_.get(epoch), "");
}

// Another engine wrote its old epoch back after the bucket lost the new one.
TEST_F(S3TierTest, an_ended_epoch_that_returns_is_replaced_again) {
  constexpr int kChecks = 31;  // upkeep looks once in 30 calls
  const std::string epoch = "kv_offload/" + std::string(64, '1') + "/epoch";
  s3::S3Store store(options());
  const std::string before = server_.get(epoch);
  store.forget(0);
  ASSERT_TRUE(store.begin_epoch());
  const std::string after = server_.get(epoch);
  server_.set(epoch, before);
  for (int i = 0; i < kChecks; ++i) store.maintain();
  EXPECT_EQ(server_.get(epoch), after);
  // An epoch of another engine's reset stays.
  const std::string others(32, 'a');
  server_.set(epoch, others);
  for (int i = 0; i < kChecks; ++i) store.maintain();
  EXPECT_EQ(server_.get(epoch), others);
}

TEST_F(S3TierTest, an_ended_epoch_that_returns_is_replaced_by_a_new_one_where_conditions_are_ignored) {
  constexpr int kChecks = 31;  // upkeep looks once in 30 calls
  const std::string epoch = "kv_offload/" + std::string(64, '1') + "/epoch";
  server_.ignore_conditions(true);
  s3::S3Store store(options());
  const std::string before = server_.get(epoch);
  store.forget(0);
  ASSERT_TRUE(store.begin_epoch());
  server_.set(epoch, before);
  for (int i = 0; i < kChecks; ++i) store.maintain();
  const std::string after = server_.get(epoch);
  EXPECT_NE(after, before);
  EXPECT_TRUE(EpochRegistry::is_name(after));
  for (int i = 0; i < kChecks; ++i) store.maintain();
  EXPECT_EQ(server_.get(epoch), after);
}

// If it were sent twice, it could replace the epoch that another reset has written since.
TEST_F(S3TierTest, a_new_epoch_is_sent_once) {
  s3::S3Store store(options());
  store.forget(0);
  const std::size_t before = server_.faults.seen(Verb::kEpoch);
  server_.answer_after(Verb::kEpoch, error_of("500 Oops", "InternalError"), 1);
  EXPECT_FALSE(store.begin_epoch());
  EXPECT_EQ(server_.faults.seen(Verb::kEpoch), before + 1);
  EXPECT_EQ(store.epoch(), nullptr);
  EXPECT_TRUE(store.begin_epoch());
}

TEST_F(S3TierTest, an_invalid_epoch_value_is_replaced) {
  const std::string epoch = "kv_offload/" + std::string(64, '1') + "/epoch";
  for (const std::string& text :
       {std::string(), std::string(32, 'X'), std::string(33, 'a'), std::string("../..")}) {
    server_.set(epoch, text);
    TierDriver user(open());
    EXPECT_TRUE(user.write(1)) << text;
    EXPECT_EQ(server_.get(epoch).size(), 32u);
    EXPECT_EQ(server_.get(epoch).find_first_not_of("0123456789abcdef"), std::string::npos);
  }
}

TEST_F(S3TierTest, a_prefix_that_changes_when_it_is_signed_is_a_caller_error) {
  for (const char* prefix : {"", "a b", "a//b", "a%20", "\xC3\xA4"}) {
    S3TierOptions chosen = options();
    chosen.prefix = prefix;
    EXPECT_THROW((void)make_s3_tier(chosen), InvalidArgument) << prefix;
  }
}

}  // namespace
}  // namespace kv_offload
