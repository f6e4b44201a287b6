// What can happen to an S3 store, and what the tier makes of it.
#include "storage/s3/store.h"

#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <thread>

#include "storage/s3/medium.h"
#include "with_threads.h"

namespace kv_offload {
namespace {

using namespace testing;
using std::chrono::milliseconds;
using std::chrono::seconds;
using Verb = S3Server::Verb;

constexpr Nanos kShort{milliseconds(200)};  // an op_deadline that a test waits for
constexpr int kAlways = 1 << 30;

std::string error_of(std::string_view status, std::string_view code, std::string_view more = "") {
  const std::string body =
      fmt::format("<Error><Code>{}</Code><Message>{}</Message></Error>", code, S3Server::kSecret);
  return fmt::format("HTTP/1.1 {}\r\nContent-Length: {}\r\nConnection: close\r\n{}\r\n{}", status,
                     body.size(), more, body);
}

class S3TierTest : public ::testing::Test {
 protected:
  std::unique_ptr<Tier> open() { return make_s3_tier(options()); }
  S3TierOptions options() {
    S3TierOptions chosen = medium_.options();
    chosen.name = "s3";
    chosen.clock = &clock_;
    chosen.pause = [this](Nanos time) {
      const std::lock_guard lock(mutex_);
      pauses_.push_back(time);
    };
    return chosen;
  }
  // As the ops of a pool see it, without threads.
  static TierOp op_of(OpKind kind, std::uint32_t number, const Row& row) {
    TierOp op;
    op.kind = kind;
    op.key = key_of(number);
    op.shards = row.shards();
    return op;
  }
  static Status write(s3::S3Store& store, std::uint32_t number) {
    Row row({8192});
    row.fill(number);
    std::uint64_t moved = 0;
    return store.write(op_of(OpKind::kWrite, number, row), store.epoch(), &moved);
  }
  static Status read(s3::S3Store& store, std::uint32_t number) {
    Row row({8192});
    std::uint64_t moved = 0;
    const Status status = store.read(op_of(OpKind::kRead, number, row), store.epoch(), &moved);
    EXPECT_TRUE(!status || row.holds(number));
    EXPECT_EQ(moved, status ? 8192u : 0u);
    return status;
  }
  static std::vector<bool> located(s3::S3Store& store, const std::vector<ChunkKey>& keys,
                                   KeyOrder order = KeyOrder::kPrefix) {
    std::vector<bool> present(keys.size());
    EXPECT_TRUE(store.locate(keys, order, store.epoch(), &present));
    return present;
  }
  std::string refused(const S3TierOptions& options) {
    try {
      (void)make_s3_tier(options);
    } catch (const ResourceError& error) {
      return error.what();
    }
    ADD_FAILURE() << "was let in";
    return {};
  }

  std::mutex mutex_;
  std::vector<Nanos> pauses_;
  FakeClock clock_;
  S3Medium medium_;
  S3Server& server_ = medium_.server;
};

// ---- objects

TEST_F(S3TierTest, a_record_lies_there_as_it_would_on_a_disk) {
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
}

TEST_F(S3TierTest, large_records_and_many_shards_come_back_whole) {
  TierDriver user(open());
  for (const ShardSizes& sizes : {ShardSizes{8 << 20}, ShardSizes(kMaxShards, 40000)}) {
    const auto number = static_cast<std::uint32_t>(sizes.size());
    ASSERT_TRUE(user.write(number, sizes));
    EXPECT_TRUE(user.read(number, sizes));
  }
  EXPECT_EQ(server_.wrong_signatures(), 0u);
}

// Each is a value that was never written under this key; none is read, each is removed.
TEST_F(S3TierTest, an_object_that_is_no_record_of_this_key_is_damage) {
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

TEST_F(S3TierTest, what_pads_a_shard_is_verified_too) {
  TierDriver user(open());
  ASSERT_TRUE(user.write(1, {5000}));
  const std::string name = medium_.name_of(key_of(1));
  std::string value = server_.get(name);
  value[kRecordHeaderBytes + 8000] = 'x';
  server_.set(name, value);
  EXPECT_EQ(user.read(1, {5000}).kind(), StatusKind::kCorrupt);
}

// No length is announced: what comes is counted, and never put behind the row.
TEST_F(S3TierTest, a_body_that_announces_no_length_is_counted) {
  s3::S3Store store(options());
  ASSERT_TRUE(write(store, 1));
  const std::string whole = server_.get(medium_.name_of(key_of(1)));
  for (const auto& [body, kind] : {std::pair(whole + "x", StatusKind::kCorrupt),
                                   std::pair(whole + std::string(1 << 20, 'x'), StatusKind::kCorrupt),
                                   std::pair(whole.substr(0, 5000), StatusKind::kIo)}) {  // or was it cut
    server_.answer(Verb::kRead, "HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + body, 1);
    EXPECT_EQ(read(store, 1).kind(), kind) << body.size();
  }
  EXPECT_TRUE(read(store, 1)) << "what lies there has no such ETag";
}

TEST_F(S3TierTest, an_answer_that_is_cut_is_a_failure_of_the_store_and_the_record_stays) {
  s3::S3Store store(options());
  ASSERT_TRUE(write(store, 1));
  for (const std::size_t after : {1, 12, 60, 110, 200, 4200, 12000}) {
    server_.cut(Verb::kRead, after);
    EXPECT_EQ(read(store, 1).kind(), StatusKind::kIo) << after;
  }
  server_.cut(Verb::kRead, 0);
  EXPECT_TRUE(read(store, 1));
}

TEST_F(S3TierTest, an_answer_without_sense_is_a_failure) {
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

TEST_F(S3TierTest, a_record_that_took_the_place_of_a_damaged_one_stays) {
  s3::S3Store store(options());
  ASSERT_TRUE(write(store, 1));
  const std::string name = medium_.name_of(key_of(1)), whole = server_.get(name);
  medium_.damage(key_of(1));
  server_.block(Verb::kLocate);  // the damaged one was read
  std::thread reader([&] { EXPECT_EQ(read(store, 1).kind(), StatusKind::kCorrupt); });
  server_.wait_for_blocked(1);
  server_.set(name, whole);
  server_.release();
  reader.join();
  EXPECT_EQ(server_.get(name), whole);
  medium_.damage(key_of(1));
  server_.block(Verb::kRemove);  // and it was looked at
  std::thread second([&] { EXPECT_EQ(read(store, 1).kind(), StatusKind::kCorrupt); });
  server_.wait_for_blocked(1);
  server_.set(name, whole);
  server_.release();
  second.join();
  EXPECT_EQ(server_.get(name), whole);
}

TEST_F(S3TierTest, a_damaged_object_that_may_not_be_removed_is_written_over) {
  s3::S3Store store(options());
  ASSERT_TRUE(write(store, 1));
  medium_.damage(key_of(1));
  server_.answer(Verb::kRemove, error_of("403 Forbidden", "AccessDenied"), kAlways);
  EXPECT_EQ(read(store, 1).kind(), StatusKind::kCorrupt);
  ASSERT_TRUE(write(store, 1));
  EXPECT_TRUE(read(store, 1));
  const std::size_t before = server_.requests(Verb::kWrite);
  ASSERT_TRUE(write(store, 1));
  EXPECT_EQ(server_.requests(Verb::kWrite), before) << "only once";
}

TEST_F(S3TierTest, a_tier_that_only_reads_changes_nothing_there) {
  { ASSERT_TRUE(TierDriver(open()).write(1)); }
  S3TierOptions chosen = options();
  chosen.read_only = true;
  TierDriver user(make_s3_tier(chosen));
  EXPECT_TRUE(user.read(1));
  medium_.damage(key_of(1));
  EXPECT_EQ(user.read(1).kind(), StatusKind::kCorrupt);
  EXPECT_EQ(server_.keys().size(), 1u);
  EXPECT_FALSE(user.tier().reset());
  EXPECT_TRUE(TierDriver(open()).has(1)) << "it reset nobody else";
}

TEST_F(S3TierTest, what_another_has_written_is_not_sent_again) {
  s3::S3Store first(options()), second(options());
  ASSERT_TRUE(write(first, 1));
  ASSERT_TRUE(write(second, 1));
  EXPECT_EQ(server_.requests(Verb::kWrite), 1u);
}

TEST_F(S3TierTest, the_keys_of_a_prompt_are_found_in_few_requests) {
  s3::S3Store store(options());
  std::vector<ChunkKey> keys;
  for (std::uint32_t i = 0; i < 100; ++i) keys.push_back(key_of(i));
  for (const std::uint32_t known : {0u, 1u, 2u, 3u, 37u, 99u, 100u}) {
    for (std::uint32_t i = 0; i < known; ++i) ASSERT_TRUE(write(store, i));
    const std::size_t before = server_.requests(Verb::kLocate);
    const std::vector<bool> present = located(store, keys);
    EXPECT_LE(server_.requests(Verb::kLocate) - before, 14u);
    for (std::uint32_t i = 0; i < keys.size(); ++i) EXPECT_EQ(present[i], i < known) << i << " of " << known;
  }
}

TEST_F(S3TierTest, keys_that_are_no_prefix_are_each_asked_for) {
  s3::S3Store store(options());
  for (const std::uint32_t number : {1u, 3u}) ASSERT_TRUE(write(store, number));
  const std::vector<ChunkKey> keys{key_of(4), key_of(3), key_of(2), key_of(1)};
  EXPECT_EQ(located(store, keys, KeyOrder::kNone), (std::vector<bool>{false, true, false, true}));
}

// Of a prefix in which one expired (a lifecycle rule knows no prompts): whichever is found, a read tells.
TEST_F(S3TierTest, a_hole_in_a_prefix_is_a_miss_when_it_is_read) {
  s3::S3Store store(options());
  std::vector<ChunkKey> keys;
  for (std::uint32_t i = 0; i < 8; ++i) {
    keys.push_back(key_of(i));
    ASSERT_TRUE(write(store, i));
  }
  ASSERT_TRUE(server_.remove(medium_.name_of(key_of(4))));
  EXPECT_TRUE(located(store, keys)[4]) << "not looked at";
  EXPECT_EQ(read(store, 4).kind(), StatusKind::kNotFound);
  ASSERT_TRUE(write(store, 4));
  EXPECT_TRUE(read(store, 4));
}

// ---- a store that is overloaded, fails, hangs

TEST_F(S3TierTest, a_store_that_is_overloaded_is_asked_again_with_pauses_that_grow) {
  s3::S3Store store(options());
  server_.answer(Verb::kWrite, error_of("503 Slow Down", "SlowDown"), 3);
  EXPECT_TRUE(write(store, 1));
  ASSERT_EQ(pauses_.size(), 3u);
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_GE(pauses_[i], milliseconds(25) * (1 << i));
    EXPECT_LE(pauses_[i], milliseconds(50) * (1 << i));
  }
  server_.answer(Verb::kRead, error_of("500 Oops", "InternalError"), 1);
  EXPECT_TRUE(read(store, 1));
  const std::string page(1 << 20, '<');
  server_.answer(Verb::kRead, "HTTP/1.1 503 Busy\r\nConnection: close\r\n\r\n" + page, 1);
  EXPECT_TRUE(read(store, 1)) << "however much it says";
  server_.answer(Verb::kRead, error_of("503 Slow Down", "SlowDown"), kAlways);
  EXPECT_EQ(read(store, 1).kind(), StatusKind::kIo);
  EXPECT_EQ(server_.requests(Verb::kRead), 4u + 5u) << "and no more";
}

TEST_F(S3TierTest, the_store_says_when_to_ask_again_and_a_deadline_goes_before_it) {
  s3::S3Store store(options());
  server_.answer(Verb::kWrite, error_of("503 Slow Down", "SlowDown", "Retry-After: 3\r\n"), 1);
  EXPECT_TRUE(write(store, 1));
  ASSERT_EQ(pauses_.size(), 1u);
  EXPECT_EQ(pauses_[0], seconds(3));
  server_.answer(Verb::kWrite, error_of("503 Slow Down", "SlowDown", "Retry-After: 60\r\n"), 1);
  EXPECT_EQ(write(store, 2).kind(), StatusKind::kIo);
  EXPECT_EQ(pauses_.size(), 1u);
}

TEST_F(S3TierTest, a_store_that_does_not_answer_costs_a_deadline) {
  S3TierOptions chosen = options();
  chosen.op_deadline = kShort;
  s3::S3Store store(chosen);
  ASSERT_NE(store.epoch(), nullptr);
  server_.block(Verb::kLocate);
  EXPECT_EQ(write(store, 1).kind(), StatusKind::kTimeout);
  server_.release();
  EXPECT_TRUE(write(store, 1));
}

TEST_F(S3TierTest, a_connection_that_the_store_closed_while_it_was_idle_is_made_anew) {
  s3::S3Store store(options());
  server_.answer_after(Verb::kWrite, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", 1);  // and closes
  ASSERT_TRUE(write(store, 1));
  EXPECT_TRUE(read(store, 1));
  EXPECT_TRUE(write(store, 2));
}

TEST_F(S3TierTest, one_that_starts_before_its_store_uses_it_as_soon_as_it_answers) {
  server_.fail(Verb::kEpoch, true);
  TierDriver user(open());
  EXPECT_FALSE(user.tier().stats().writable);
  server_.fail(Verb::kEpoch, false);
  EXPECT_TRUE(user.until([&] {
    clock_.advance(seconds(1));
    user.poll();
    return user.tier().stats().writable;
  }));
  EXPECT_TRUE(user.write(1));
}

// ---- what it refuses

TEST_F(S3TierTest, what_waiting_does_not_change_refuses_the_start_in_a_sentence_of_its_own) {
  const std::pair<std::string, std::string> cases[] = {
      {error_of("403 Forbidden", "AccessDenied"), "s3:ListBucket"},
      {error_of("403 Forbidden", "InvalidAccessKeyId"), "does not know the access key"},
      {error_of("403 Forbidden", "ExpiredToken"), "have expired"},
      {error_of("403 Forbidden", "RequestTimeTooSkewed"), "clock"},
      {error_of("404 Not Found", "NoSuchBucket"), "no such bucket"},
      {error_of("301 Moved", "PermanentRedirect", "x-amz-bucket-region: eu-west-9\r\n"),
       "in region eu-west-9"},
      {error_of("405 No", "MethodNotAllowed"), "MethodNotAllowed"},
      {error_of("400 Bad Request", "InvalidRequest"), "InvalidRequest"},
      {error_of("307 Moved", "TemporaryRedirect", "Location: http://127.0.0.1:1/\r\n"), "elsewhere"}};
  for (const auto& [text, sentence] : cases) {
    server_.answer(Verb::kEpoch, text, 1);
    const std::string said = refused(options());
    EXPECT_NE(said.find(sentence), said.npos) << said;
    EXPECT_NE(said.find("s3://bucket at http://127.0.0.1"), said.npos) << said;
    EXPECT_EQ(said.find(S3Server::kSecret), said.npos) << said;
  }
  server_.answer(Verb::kEpoch, error_of("503 Slow Down", "SlowDown"), kAlways);
  EXPECT_NO_THROW((void)open()) << "it may pass";
}

TEST_F(S3TierTest, a_wrong_secret_or_region_is_refused_and_a_session_token_is_signed) {
  S3TierOptions chosen = options();
  chosen.bucket.session_token = "token";
  EXPECT_TRUE(TierDriver(make_s3_tier(chosen)).write(1));
  EXPECT_EQ(server_.last(Verb::kWrite).headers["x-amz-security-token"], "token");
  EXPECT_EQ(server_.wrong_signatures(), 0u);
  chosen.bucket.secret_key = "wrong";
  EXPECT_NE(refused(chosen).find("the secret key or the region"), std::string::npos);
  chosen.bucket.secret_key = S3Server::kSecret;
  chosen.bucket.region = "us-east-1";
  EXPECT_NE(refused(chosen).find("the secret key or the region"), std::string::npos);
  EXPECT_EQ(server_.wrong_signatures(), 2u);
}

// An answer to HEAD has no body, and so no code.
TEST_F(S3TierTest, a_refusal_without_a_code_names_what_it_may_be) {
  s3::S3Store store(options());
  for (const auto& [status, sentence] : {std::pair("403 Forbidden", "the keys are wrong or have expired"),
                                         std::pair("400 Bad Request", "credentials may have expired")}) {
    server_.answer(Verb::kLocate, fmt::format("HTTP/1.1 {}\r\nContent-Length: 0\r\n\r\n", status), 1);
    const std::string said(write(store, 1).message());
    EXPECT_NE(said.find(sentence), said.npos) << said;
  }
}

TEST_F(S3TierTest, a_bucket_that_is_gone_is_no_miss_and_one_that_is_full_no_fault_of_the_device) {
  s3::S3Store store(options());
  server_.answer(Verb::kRead, error_of("404 Not Found", "NoSuchBucket"), 1);
  EXPECT_EQ(read(store, 1).kind(), StatusKind::kIo);
  EXPECT_EQ(read(store, 1).kind(), StatusKind::kNotFound);
  server_.answer(Verb::kWrite, error_of("507 Full", "XMinioStorageFull"), 1);
  EXPECT_EQ(write(store, 1).kind(), StatusKind::kNoSpace);
}

// ---- epochs

TEST_F(S3TierTest, of_two_that_start_at_once_the_second_takes_the_epoch_of_the_first) {
  for (const bool ignored : {false, true}) {
    S3Server server;
    server.ignore_conditions(ignored);
    S3TierOptions chosen = options();
    chosen.bucket = server.address();
    const std::string epoch = "kv_offload/" + std::string(64, '1') + "/epoch";
    // The answer to the question is of before the other one wrote.
    server.answer(Verb::kEpoch, error_of("404 Not Found", "NoSuchKey"), 1);
    server.set(epoch, std::string(32, 'a'));
    s3::S3Store second(chosen);
    ASSERT_NE(second.epoch(), nullptr);
    ASSERT_TRUE(write(second, 1));
    const std::string kept = server.get(epoch);
    EXPECT_EQ(kept == std::string(32, 'a'), !ignored) << "a store without conditions keeps the last one";
    EXPECT_NE(server.keys().at(0).find("/" + kept + "/"), std::string::npos);
  }
}

TEST_F(S3TierTest, an_epoch_that_is_gone_is_put_back_only_where_conditions_are_heeded) {
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

// A reset while upkeep is about to put the old epoch back: the new one stays.
TEST_F(S3TierTest, an_epoch_of_before_a_reset_never_takes_the_place_of_the_one_after_it) {
  const std::string epoch = "kv_offload/" + std::string(64, '1') + "/epoch";
  s3::S3Store store(options()), reset(options());
  server_.remove(epoch);
  server_.block(Verb::kOther);  // it has seen that there is none
  std::thread upkeep([&] { store.maintain(); });
  server_.wait_for_blocked(1);
  reset.forget();
  ASSERT_TRUE(reset.begin_epoch());
  const std::string after = server_.get(epoch);
  server_.release();
  upkeep.join();
  EXPECT_EQ(server_.get(epoch), after);
  TierStats stats;
  store.figures(&stats);
  EXPECT_TRUE(stats.apart);
}

// Asked a second time, it could take the place of what another reset has put there since.
TEST_F(S3TierTest, a_new_epoch_is_sent_once) {
  s3::S3Store store(options());
  store.forget();
  const std::size_t before = server_.requests(Verb::kEpoch);
  server_.answer_after(Verb::kEpoch, error_of("500 Oops", "InternalError"), 1);
  EXPECT_FALSE(store.begin_epoch());
  EXPECT_EQ(server_.requests(Verb::kEpoch), before + 1);
  EXPECT_EQ(store.epoch(), nullptr);
  EXPECT_TRUE(store.begin_epoch());
}

TEST_F(S3TierTest, what_lies_in_place_of_an_epoch_and_is_no_name_is_replaced) {
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

TEST_F(S3TierTest, a_prefix_that_would_not_be_signed_as_it_is_is_the_callers_mistake) {
  for (const char* prefix : {"", "a b", "a//b", "a%20", "\xC3\xA4"}) {
    S3TierOptions chosen = options();
    chosen.prefix = prefix;
    EXPECT_THROW((void)make_s3_tier(chosen), InvalidArgument) << prefix;
  }
}

}  // namespace
}  // namespace kv_offload
