// SPDX-License-Identifier: Apache-2.0
// Stores that are overloaded, fail, hang or refuse, and the reaction of the s3 tier.
#include "backends/s3/store.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "backends/s3/tier_fixture.h"

namespace kv_offload {
namespace {

using namespace testing;
using Verb = S3Server::Verb;

using std::chrono::milliseconds;
using std::chrono::seconds;

// kShort: an op_timeout that a test waits for. kOfTier: one that also bounds ops that must succeed.
constexpr Nanos kShort{milliseconds(200)}, kOfTier{seconds(2)};

// ---- overload, failures, hangs

TEST_F(S3TierTest, requests_to_an_overloaded_store_are_repeated_with_growing_pauses) {
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
  EXPECT_TRUE(read(store, 1)) << "regardless of the length of its answer";
  server_.answer(Verb::kRead, error_of("503 Slow Down", "SlowDown"), kAlways);
  EXPECT_EQ(read(store, 1).kind(), StatusKind::kIo);
  EXPECT_EQ(server_.faults.seen(Verb::kRead), 4u + 5u) << "and no more";
}

TEST_F(S3TierTest, retry_after_is_respected_up_to_the_deadline) {
  s3::S3Store store(options());
  server_.answer(Verb::kWrite, error_of("503 Slow Down", "SlowDown", "Retry-After: 3\r\n"), 1);
  EXPECT_TRUE(write(store, 1));
  ASSERT_EQ(pauses_.size(), 1u);
  EXPECT_EQ(pauses_[0], seconds(3));
  server_.answer(Verb::kWrite, error_of("503 Slow Down", "SlowDown", "Retry-After: 600\r\n"), 1);
  EXPECT_EQ(write(store, 2).kind(), StatusKind::kIo);
  EXPECT_EQ(pauses_.size(), 1u);
}

TEST_F(S3TierTest, a_store_that_does_not_answer_costs_one_deadline) {
  S3TierOptions chosen = options();
  chosen.op_timeout = kShort;
  s3::S3Store patient(options()), store(chosen);  // this one may be too late for its epoch already
  Row row({8192});
  row.fill(1);
  std::uint64_t moved = 0;
  server_.faults.block(Verb::kLocate);
  const Status status = store.write(op_of(OpKind::kWrite, 1, row), patient.epoch(), &moved);
  EXPECT_EQ(status.kind(), StatusKind::kTimeout) << status.to_string();
  server_.faults.release();
  EXPECT_TRUE(write(patient, 1));
}

TEST_F(S3TierTest, an_answer_that_arrives_byte_by_byte_ends_with_the_deadline) {
  S3TierOptions chosen = options();
  chosen.op_timeout = kShort;
  s3::S3Store patient(options()), store(chosen);
  ASSERT_TRUE(write(patient, 1));
  Row row({8192});
  std::uint64_t moved = 0;
  server_.faults.trickle(Verb::kRead, true);  // 12 s in total
  const Status status = store.read(op_of(OpKind::kRead, 1, row), patient.epoch(), &moved);
  EXPECT_EQ(status.kind(), StatusKind::kTimeout) << status.to_string();
  EXPECT_EQ(moved, 0u);
  server_.faults.trickle(Verb::kRead, false);
  EXPECT_TRUE(read(patient, 1)) << "the record is intact";
}

TEST_F(S3TierTest, a_store_that_was_killed_and_returns_empty_is_used_again) {
  TierDriver user(open());
  ASSERT_TRUE(user.write(1));
  server_.kill();
  EXPECT_EQ(user.read(1).kind(), StatusKind::kIo);
  EXPECT_EQ(user.write(2).kind(), StatusKind::kIo);
  server_.start();
  EXPECT_EQ(user.read(1).kind(), StatusKind::kNotFound);
  EXPECT_EQ(user.removed(TierRemoval::Reason::kVanished), 1u);
  ASSERT_TRUE(user.write(1));
  EXPECT_TRUE(user.read(1));
}

TEST_F(S3TierTest, a_stopped_store_costs_each_op_in_flight_a_deadline_and_later_ops_none) {
  { ASSERT_TRUE(TierDriver(open()).write(1)); }
  S3TierOptions chosen = options();
  chosen.op_timeout = kOfTier;
  chosen.n_read_threads = 12;  // all reads wait at the same time
  TierDriver user(make_s3_tier(chosen));
  const auto later = [&](const std::function<bool()>& condition) {
    return user.until([&] {
      clock_.advance(seconds(120));
      user.poll();
      return condition();
    });
  };
  ASSERT_TRUE(later([&] { return user.tier().stats().writable && user.read(1).is_ok(); }));
  medium_.stand_still();
  std::vector<OpId> reads;
  for (unsigned i = 0; i < 12; ++i) reads.push_back(user.start(OpKind::kRead, 1, {8192}));
  for (const OpId id : reads) EXPECT_FALSE(user.finish(id).status);
  EXPECT_FALSE(user.tier().stats().readable);
  EXPECT_EQ(user.read(1).kind(), StatusKind::kUnavailable) << "at once";
  medium_.go_on();
  EXPECT_TRUE(later([&] { return user.read(1).is_ok(); }));
}

TEST_F(S3TierTest, an_idle_connection_that_the_store_closed_is_opened_again) {
  s3::S3Store store(options());
  server_.answer_after(Verb::kWrite, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", 1);  // and closes
  ASSERT_TRUE(write(store, 1));
  EXPECT_TRUE(read(store, 1));
  EXPECT_TRUE(write(store, 2));
}

TEST_F(S3TierTest, a_tier_that_starts_before_its_store_works_as_soon_as_the_store_answers) {
  server_.faults.fail(Verb::kEpoch, true);
  TierDriver user(open());
  EXPECT_FALSE(user.tier().stats().writable);
  server_.faults.fail(Verb::kEpoch, false);
  EXPECT_TRUE(user.until([&] {
    clock_.advance(seconds(1));
    user.poll();
    return user.tier().stats().writable;
  }));
  EXPECT_TRUE(user.write(1));
}

// ---- refusals

TEST_F(S3TierTest, permanent_refusals_fail_the_open_with_a_specific_message) {
  const std::pair<std::string, std::string> cases[] = {
      {error_of("403 Forbidden", "AccessDenied"), "s3:ListBucket"},
      {error_of("403 Forbidden", "InvalidAccessKeyId"), "does not know the access key"},
      {error_of("403 Forbidden", "ExpiredToken"), "have expired"},
      {error_of("403 Forbidden", "RequestTimeTooSkewed"), "clock"},
      {error_of("404 Not Found", "NoSuchBucket"), "the bucket does not exist"},
      {error_of("301 Moved", "PermanentRedirect", "x-amz-bucket-region: eu-west-9\r\n"),
       "in region eu-west-9"},
      {error_of("405 No", "MethodNotAllowed"), "MethodNotAllowed"},
      {error_of("400 Bad Request", "InvalidRequest"), "InvalidRequest"},
      {error_of("307 Moved", "TemporaryRedirect", "Location: http://127.0.0.1:1/\r\n"),
       "at another endpoint"}};
  for (const auto& [text, sentence] : cases) {
    server_.answer(Verb::kEpoch, text, 1);
    const std::string said = refused(options());
    EXPECT_NE(said.find(sentence), said.npos) << said;
    EXPECT_NE(said.find("s3://bucket at http://127.0.0.1"), said.npos) << said;
    EXPECT_EQ(said.find(S3Server::kSecret), said.npos) << said;
  }
  server_.answer(Verb::kEpoch, error_of("503 Slow Down", "SlowDown"), kAlways);
  EXPECT_NO_THROW((void)open()) << "it may be temporary";
  for (const auto& [status, code] :
       {std::pair("403 Forbidden", "QuotaExceeded"), std::pair("400 Bad Request", "RequestTimeout"),
        std::pair("400 Bad Request", "Throttling")}) {
    server_.answer(Verb::kEpoch, error_of(status, code), 1);
    EXPECT_NO_THROW((void)open()) << code;
  }
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

// An answer to HEAD has no body, and therefore no error code.
TEST_F(S3TierTest, a_refusal_without_a_code_names_possible_causes) {
  s3::S3Store store(options());
  for (const auto& [status, sentence] : {std::pair("403 Forbidden", "the keys are wrong or have expired"),
                                         std::pair("400 Bad Request", "credentials may have expired")}) {
    server_.answer(Verb::kLocate, fmt::format("HTTP/1.1 {}\r\nContent-Length: 0\r\n\r\n", status), 1);
    const std::string said(write(store, 1).message());
    EXPECT_NE(said.find(sentence), said.npos) << said;
  }
}

TEST_F(S3TierTest, a_missing_bucket_is_not_a_miss_and_a_full_one_is_not_a_device_failure) {
  s3::S3Store store(options());
  server_.answer(Verb::kRead, error_of("404 Not Found", "NoSuchBucket"), 1);
  EXPECT_EQ(read(store, 1).kind(), StatusKind::kIo);
  EXPECT_EQ(read(store, 1).kind(), StatusKind::kNotFound);
  server_.answer(Verb::kWrite, error_of("507 Full", "XMinioStorageFull"), 1);
  EXPECT_EQ(write(store, 1).kind(), StatusKind::kNoSpace);
}

}  // namespace
}  // namespace kv_offload
