// SPDX-License-Identifier: Apache-2.0
#include "backends/redis/slots.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>

namespace kv_offload::redis {
namespace {

Reply number(long long value) { return {Reply::Kind::kInteger, value, {}}; }
Reply text(const std::string& value) { return {Reply::Kind::kString, 0, value}; }
Reply array(std::vector<Reply> elements) {
  Reply reply{Reply::Kind::kArray, static_cast<long long>(elements.size()), {}};
  reply.elements = std::move(elements);
  return reply;
}
Reply node(const std::string& host, long long port) { return array({text(host), number(port), text("id")}); }
Reply error(const std::string& value) { return {Reply::Kind::kError, 0, value}; }

// Values from the cluster specification, and from CLUSTER KEYSLOT of a server.
TEST(RedisSlotsTest, a_key_has_the_slot_that_the_server_assigns) {
  for (const auto& [key, slot] :
       {std::pair{"123456789", 0x31C3}, std::pair{"foo", 12182}, std::pair{"", 0},
        std::pair{"foo{}{bar}", 8363}, std::pair{"foo{{bar}}zap", 4015}, std::pair{"foo{bar}{zap}", 5061}}) {
    EXPECT_EQ(slot_of(key), slot) << key;
  }
  EXPECT_EQ(slot_of("{user1000}.following"), slot_of("user1000"));
  EXPECT_EQ(slot_of("a}{b}"), slot_of("b"));
  EXPECT_EQ(slot_of("a{b"), slot_of("a{b"));
  EXPECT_NE(slot_of("a{b"), slot_of("b"));
}

TEST(RedisSlotsTest, a_map_with_replicas_and_names_is_parsed) {
  Reply named = node("10.0.0.2", 7001);
  named.elements.push_back(array({text("hostname"), text("b.cache")}));
  Reply unnamed = node("?", 7002);
  unnamed.elements.push_back(array({text("ip"), text("10.0.0.3")}));
  Reply same = array({Reply{}, number(7003), text("id")});
  const auto ranges = slot_ranges(
      array({array({number(0), number(99), node("a.cache", 7000), named}),
             array({number(100), number(100), unnamed}), array({number(101), number(16383), same})}));
  ASSERT_TRUE(ranges);
  ASSERT_EQ(ranges->size(), 3u);
  EXPECT_EQ((*ranges)[0].last, 99);
  EXPECT_EQ((*ranges)[0].owner.host, "a.cache");
  ASSERT_EQ((*ranges)[0].replicas.size(), 1u);
  EXPECT_EQ((*ranges)[0].replicas[0].host, "10.0.0.2");
  EXPECT_EQ((*ranges)[0].replicas[0].tls_name, "b.cache");
  EXPECT_EQ((*ranges)[1].owner.host, "10.0.0.3");
  EXPECT_EQ((*ranges)[2].owner.host, "") << "the address of the asked node";
  EXPECT_EQ((*ranges)[2].owner.port, 7003);
}

TEST(RedisSlotsTest, an_invalid_map_is_refused) {
  const Reply good = node("a", 1);
  for (const Reply& reply :
       {Reply{}, text("map"), array({number(1)}), array({array({number(0), number(1)})}),
        array({array({number(-1), number(1), good})}), array({array({number(0), number(16384), good})}),
        array({array({number(2), number(1), good})}), array({array({text("0"), number(1), good})}),
        array({array({number(0), number(5), good}), array({number(5), number(6), good})})}) {
    EXPECT_FALSE(slot_ranges(reply));
  }
}

// An unreachable node has no slots; the ranges of the other nodes are valid.
TEST(RedisSlotsTest, an_invalid_owner_is_left_out) {
  for (const Reply& owner : {node("a b", 1), node("a\r\nAUTH x", 1), node(std::string(300, 'a'), 1),
                             node("a", 0), node("a", 70000), node("a", -1), node("?", 1), node("a/b", 1),
                             array({text("a")}), array({}), text("a")}) {
    const auto ranges = slot_ranges(
        array({array({number(0), number(0), owner}), array({number(1), number(1), node("b", 2)})}));
    ASSERT_TRUE(ranges);
    ASSERT_EQ(ranges->size(), 1u);
    EXPECT_EQ(ranges->front().owner.host, "b");
  }
}

TEST(RedisSlotsTest, redirects_are_distinguished_from_other_errors) {
  const auto moved = redirect_of(error("MOVED 3999 127.0.0.1:6381"));
  ASSERT_TRUE(moved);
  EXPECT_FALSE(moved->asking);
  EXPECT_EQ(moved->slot, 3999);
  EXPECT_EQ(moved->to.host, "127.0.0.1");
  EXPECT_EQ(moved->to.port, 6381);
  const auto ask = redirect_of(error("ASK 1 2001:db8::1:6381"));
  ASSERT_TRUE(ask && ask->asking);
  EXPECT_EQ(ask->to.host, "2001:db8::1");
  const auto same = redirect_of(error("MOVED 1 :6381"));
  ASSERT_TRUE(same);
  EXPECT_EQ(same->to.host, "");
  const auto unroutable = redirect_of(error("ASK 1 ?:6381"));
  ASSERT_TRUE(unroutable && unroutable->asking && unroutable->has_no_address);
  EXPECT_FALSE(same->has_no_address);
  for (const char* other :
       {"MOVED", "MOVED 1", "MOVED 16384 a:1", "MOVED x a:1", "MOVED 1 a", "MOVED 1 a:0", "MOVED 1 a:65536",
        "MOVED 1 a b:1", "MOVED 1 a\r:1", "MOVED -1 a:1", "ERR x", "ASKING 1 a:1"}) {
    EXPECT_FALSE(redirect_of(error(other))) << other;
  }
  EXPECT_FALSE(redirect_of(text("MOVED 3999 127.0.0.1:6381"))) << "a value";
}

TEST(RedisSlotsTest, an_endpoint_inherits_the_settings_of_the_node_that_named_it) {
  Server seed;
  seed.host = "a";
  seed.port = 1;
  seed.tls = true;
  seed.ca_file = "/ca";
  seed.user = "kv";
  seed.password = "x";
  seed.tls_name = "name.of.a";
  const Server other = server_at({"b", 2, ""}, seed);
  EXPECT_EQ(other.host, "b");
  EXPECT_EQ(other.port, 2);
  EXPECT_TRUE(other.tls && other.ca_file == "/ca" && other.user == "kv" && other.password == "x");
  EXPECT_EQ(other.tls_name, "");
  const Server beside = server_at({"", 3, ""}, seed);
  EXPECT_EQ(beside.host, "a");
  EXPECT_EQ(beside.port, 3);
  EXPECT_EQ(beside.tls_name, "name.of.a");
  Server local;
  local.unix_socket = "/run/s";
  EXPECT_EQ(server_at({"", 3, ""}, local).unix_socket, "/run/s");
  EXPECT_EQ(server_at({"b", 3, ""}, local).unix_socket, "");
}

}  // namespace
}  // namespace kv_offload::redis
