// SPDX-License-Identifier: Apache-2.0
#include "backends/redis/resolver.h"

#include <gtest/gtest.h>
#include <netdb.h>

#include <atomic>
#include <latch>

namespace kv_offload::redis {
namespace {

using std::chrono::milliseconds;

// Threads outlive the test that abandoned them, and so must the data that they use.
struct NameServer {
  std::latch answers{1};
  std::atomic<int> asked{0};
};

Resolver resolver_of(const std::shared_ptr<NameServer>& server) {
  return Resolver([server](const std::string&, std::uint16_t, std::vector<SocketAddress>* addresses) {
    ++server->asked;
    server->answers.wait();
    addresses->emplace_back();
    return 0;
  });
}

Deadline very_soon() { return std::chrono::steady_clock::now() + milliseconds(1); }
Deadline late() { return std::chrono::steady_clock::now() + std::chrono::minutes(2); }

TEST(Resolver, an_unanswered_lookup_ends_at_the_deadline_and_is_shared) {
  const auto server = std::make_shared<NameServer>();
  Resolver resolver = resolver_of(server);
  std::vector<SocketAddress> addresses;
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(resolver.resolve("cache.example", 6379, very_soon(), &addresses).kind(), StatusKind::kTimeout);
  }
  server->answers.count_down();
  EXPECT_TRUE(resolver.resolve("cache.example", 6379, late(), &addresses));
  EXPECT_EQ(addresses.size(), 1u);
  EXPECT_LE(server->asked, 2) << "concurrent callers share one lookup";
}

TEST(Resolver, a_silent_name_server_costs_a_bounded_number_of_threads) {
  const auto server = std::make_shared<NameServer>();
  Resolver resolver = resolver_of(server);
  std::vector<SocketAddress> addresses;
  for (std::size_t i = 0; i < Resolver::kMostLookups; ++i) {
    EXPECT_EQ(resolver.resolve(fmt::format("node-{}.example", i), 1, very_soon(), &addresses).kind(),
              StatusKind::kTimeout);
  }
  EXPECT_EQ(resolver.resolve("one-more.example", 1, late(), &addresses).kind(), StatusKind::kIo);
  server->answers.count_down();
}

TEST(Resolver, a_numeric_address_is_not_looked_up) {
  const auto server = std::make_shared<NameServer>();
  Resolver resolver = resolver_of(server);
  std::vector<SocketAddress> addresses;
  for (const char* host : {"127.0.0.1", "::1"}) {
    ASSERT_TRUE(resolver.resolve(host, 6379, very_soon(), &addresses));
    EXPECT_EQ(addresses.size(), 1u);
  }
  EXPECT_EQ(server->asked, 0);
}

}  // namespace
}  // namespace kv_offload::redis
