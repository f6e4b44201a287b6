// SPDX-License-Identifier: Apache-2.0
// Credentials that are replaced while a client is in use, and signals.
#include "backends/s3/client.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <future>
#include <string>
#include <thread>

#include "backends/s3/probe.h"
#include "backends/s3/server.h"

namespace kv_offload::s3 {
namespace {

using testing::S3Server;
constexpr const char* kObject = "kv_offload/conditions";

class S3ClientTest : public ::testing::Test {
 protected:
  Bucket bucket() const {
    Bucket bucket = server_.address();
    bucket.newer_keys = std::make_shared<NewerKeys>();
    return bucket;
  }
  static long status_of(Client* client) {
    Answer answer;
    const Status status = client->call({.verb = Verb::kPut, .key = kObject},
                                       std::chrono::steady_clock::now() + std::chrono::seconds(240), &answer);
    EXPECT_TRUE(status) << status.message();
    return answer.status;
  }
  std::string token() const {
    const auto headers = server_.last(S3Server::Verb::kOther).headers;
    const auto found = headers.find("x-amz-security-token");
    return found == headers.end() ? "" : found->second;
  }

  S3Server server_;
};

std::string blocked_signals_of(pid_t thread) {
  std::ifstream status("/proc/self/task/" + std::to_string(thread) + "/status");
  std::string line;
  while (std::getline(status, line)) {
    if (line.starts_with("SigBlk:")) return line.substr(8);
  }
  return {};
}

// libcurl before 7.87 writes TLS with write(2). The server here has no TLS, so the test checks the signal
// mask.
TEST_F(S3ClientTest, a_store_that_closes_the_connection_sends_no_signal_to_the_caller) {
  using Verb = S3Server::Verb;
  server_.faults.block(Verb::kOther);
  Client client(bucket());
  std::promise<pid_t> thread;
  std::string after;
  std::thread asking([&] {
    thread.set_value(::gettid());
    EXPECT_EQ(status_of(&client), 200);
    after = blocked_signals_of(::gettid());
  });
  const pid_t asks = thread.get_future().get();
  server_.faults.wait_for_blocked(1);
  const std::string during = blocked_signals_of(asks);
  server_.faults.release();
  asking.join();
  constexpr std::uint64_t kPipe = std::uint64_t{1} << (SIGPIPE - 1);
  ASSERT_FALSE(during.empty() || after.empty());
  EXPECT_NE(std::stoull(during, nullptr, 16) & kPipe, 0u);
  EXPECT_EQ(std::stoull(after, nullptr, 16) & kPipe, 0u) << "the mask was restored";
}

TEST_F(S3ClientTest, the_next_request_is_signed_with_the_newest_keys) {
  Bucket first = bucket();
  first.secret_key = "of-yesterday";
  first.session_token = "old";
  Client client(first);
  EXPECT_EQ(status_of(&client), 403);
  EXPECT_EQ(token(), "old");
  first.newer_keys->set({first.access_key, S3Server::kSecret, "new"});
  EXPECT_EQ(status_of(&client), 200);
  EXPECT_EQ(token(), "new");
  first.newer_keys->set({first.access_key, S3Server::kSecret, ""});
  EXPECT_EQ(status_of(&client), 200) << "on the same connection";
  EXPECT_EQ(token(), "") << "no part of the replaced keys remains";
  first.newer_keys->set({first.access_key, "of-tomorrow", ""});
  EXPECT_EQ(status_of(&client), 403);
  EXPECT_EQ(server_.connections(), 1);
}

TEST_F(S3ClientTest, answers_about_the_bucket_are_bounded_text) {
  server_.set("?lifecycle=", "<LifecycleConfiguration/>");
  EXPECT_EQ(ask_bucket(bucket(), "lifecycle=", std::chrono::seconds(240)).text, "<LifecycleConfiguration/>");
  const Answer missing = ask_bucket(bucket(), "versioning=", std::chrono::seconds(240));
  EXPECT_EQ(missing.status, 404);
  EXPECT_EQ(missing.text, "");
  EXPECT_EQ(server_.wrong_signatures(), 0u);
  server_.set("?lifecycle=", std::string(65536, 'x'));
  EXPECT_EQ(ask_bucket(bucket(), "lifecycle=", std::chrono::seconds(240)).text.size(), 65536u);
  server_.set("?lifecycle=", std::string(65537, 'x'));
  EXPECT_THROW((void)ask_bucket(bucket(), "lifecycle=", std::chrono::seconds(240)), ResourceError);
}

TEST_F(S3ClientTest, keys_are_replaced_atomically_while_other_threads_sign) {
  const Bucket first = bucket();
  Client client(first);
  std::thread renews([&] {
    for (int i = 0; i < 100; ++i) {
      // Alternates two kinds: one without a token, and one that is longer than the replaced one.
      first.newer_keys->set({first.access_key, i % 2 == 0 ? S3Server::kSecret : std::string(1000, 'x'),
                             i % 2 == 0 ? "" : "token"});
    }
    first.newer_keys->set({first.access_key, S3Server::kSecret, "last"});
  });
  for (int i = 0; i < 50; ++i) {
    const long status = status_of(&client);
    EXPECT_EQ(status, token().empty() ? 200 : token() == "last" ? 200 : 403);
  }
  renews.join();
  EXPECT_EQ(status_of(&client), 200);
  EXPECT_EQ(token(), "last");
}

}  // namespace
}  // namespace kv_offload::s3
