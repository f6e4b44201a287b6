// SPDX-License-Identifier: Apache-2.0
// Scripted cluster nodes that redirect without end, send invalid slot maps, stay silent, or are not cluster
// nodes.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "backends/redis/medium.h"
#include "backends/redis/slots.h"
#include "backends/redis/store.h"

namespace kv_offload::redis {
namespace {

using namespace kv_offload::testing;
using Answers = RedisScript::Answers;

const std::string kNode = "$30\r\n# Cluster\r\ncluster_enabled:1\r\n\r\n";
const std::string kStart = "kv_offload:" + std::string(64, '0') + ":epoch";

std::string range(std::uint32_t first, std::uint32_t last, const std::string& port) {
  return "*3\r\n:" + std::to_string(first) + "\r\n:" + std::to_string(last) +
         "\r\n*3\r\n$9\r\n127.0.0.1\r\n:" + port + "\r\n$2\r\nid\r\n";
}
// A node that owns every slot.
Answers node(const Answers& others = {}) {
  Answers answers = others;
  answers.insert({{"INFO", kNode}, {"CLUSTER", "*1\r\n" + range(0, kSlots - 1, "@PORT@")}});
  return RedisScript::usual(answers);
}
RedisTierOptions options_of(const RedisScript& script, Nanos op_timeout = std::chrono::seconds(60)) {
  RedisTierOptions options;
  options.server = script.address();
  options.op_timeout = op_timeout;
  return options;
}
// The deadline of tests that wait for a deadline.
constexpr Nanos kShort{std::chrono::seconds(12)};

// Calls the store as a pool does.
struct Asker {
  explicit Asker(const RedisTierOptions& options) : store(options) { row.fill(1); }
  Status write(const ChunkKey& key) {
    std::uint64_t moved = 0;
    return store.write(op(OpKind::kWrite, key), store.epoch(), &moved);
  }
  Status read(const ChunkKey& key) {
    std::uint64_t moved = 0;
    return store.read(op(OpKind::kRead, key), store.epoch(), &moved);
  }
  Status locate(const std::vector<ChunkKey>& keys) {
    present.assign(keys.size(), false);
    return store.locate(keys, KeyOrder::kNone, store.epoch(), &present);
  }
  TierOp op(OpKind kind, const ChunkKey& key) const {
    TierOp op;
    op.kind = kind;
    op.key = key;
    op.shards = row.shards();
    return op;
  }
  std::uint16_t slot(const ChunkKey& key) const {
    return slot_of("kv_offload:" + std::string(64, '0') + ":0123456789abcdef0123456789abcdef:" + key.hex());
  }
  // Returns a key with a slot below `bound`, or with one at or above it.
  ChunkKey key_in(bool below, std::uint32_t bound = kSlots / 2) const {
    for (std::uint32_t number = 1;; ++number) {
      if ((slot(key_of(number)) < bound) == below) return key_of(number);
    }
  }
  RedisStore store;
  Row row{{8192}};
  std::vector<bool> present;
};

TEST(RedisClusterScriptTest, nodes_that_redirect_a_key_in_circles_are_abandoned_after_a_few_redirects) {
  RedisScript script(node(), RedisScript::On::kPort);
  Asker asker(options_of(script));
  ASSERT_NE(asker.store.epoch(), nullptr);
  const ChunkKey key = key_of(1);
  for (const std::string word : {"MOVED", "ASK"}) {
    const std::string circle = "-" + word + " " + std::to_string(asker.slot(key)) + " 127.0.0.1:@PORT@\r\n";
    script.answer("EXISTS", circle);
    script.answer("ASKING", "+OK\r\n");
    const std::size_t before = script.commands("EXISTS");
    const Status status = asker.write(key);
    EXPECT_EQ(status.kind(), StatusKind::kIo);
    EXPECT_NE(status.message().find("too many redirects"), std::string::npos) << status.to_string();
    EXPECT_EQ(script.commands("EXISTS") - before, 1u + Cluster::kMostRedirects) << word;
    EXPECT_EQ(asker.locate({key}).kind(), StatusKind::kIo);
    EXPECT_EQ(script.commands("EXISTS") - before, 2u + 2 * Cluster::kMostRedirects) << word;
  }
}

TEST(RedisClusterScriptTest, an_invalid_redirect_is_a_failure) {
  RedisScript script(node(), RedisScript::On::kPort);
  Asker asker(options_of(script));
  const std::string slot = std::to_string(asker.slot(key_of(1)));
  const std::string other = std::to_string(asker.slot(key_of(1)) ^ 1);
  for (const std::string& answer : {"MOVED " + other + " 127.0.0.1:@PORT@", "MOVED " + slot + " 127.0.0.1:0",
                                    "MOVED " + slot, std::string("MOVED"), "ASK " + slot + " a b:1"}) {
    script.answer("EXISTS", "-" + answer + "\r\n");
    const std::size_t before = script.commands("EXISTS");
    EXPECT_EQ(asker.write(key_of(1)).kind(), StatusKind::kIo) << answer;
    EXPECT_EQ(script.commands("EXISTS") - before, 1u) << answer;
  }
}

TEST(RedisClusterScriptTest, the_target_of_a_redirect_is_asked_first_from_then_on) {
  RedisScript to(RedisScript::usual({}), RedisScript::On::kPort);
  RedisScript from(node(), RedisScript::On::kPort);
  Asker asker(options_of(from));
  const ChunkKey key = key_of(1);
  from.answer("EXISTS", "-MOVED " + std::to_string(asker.slot(key)) +
                            " 127.0.0.1:" + std::to_string(to.address().port) + "\r\n");
  EXPECT_TRUE(asker.write(key));
  EXPECT_TRUE(asker.locate({key}));
  EXPECT_EQ(from.commands("EXISTS"), 1u);
  EXPECT_EQ(to.commands("SET"), 1u);
  EXPECT_EQ(to.commands("EXISTS"), 2u);
  // Upkeep reads the map again, which still names the old node.
  asker.store.maintain();
  EXPECT_TRUE(asker.locate({key}));
  EXPECT_EQ(from.commands("EXISTS"), 2u);
}

// ASK holds for one command only, and ASKING announces it to the other node. The map does not change.
TEST(RedisClusterScriptTest, a_node_that_imports_a_slot_is_asked_for_one_command_only) {
  RedisScript to(RedisScript::usual({{"ASKING", "+OK\r\n"}}), RedisScript::On::kPort);
  RedisScript from(node(), RedisScript::On::kPort);
  Asker asker(options_of(from));
  const ChunkKey key = key_of(1);
  const std::string ask =
      "-ASK " + std::to_string(asker.slot(key)) + " 127.0.0.1:" + std::to_string(to.address().port) + "\r\n";
  from.answer("EXISTS", ask);
  from.answer("SET", ask);
  EXPECT_TRUE(asker.write(key));
  EXPECT_EQ(to.commands("ASKING"), 2u) << "for both commands of a write";
  EXPECT_TRUE(asker.locate({key, key}));
  EXPECT_EQ(from.commands("EXISTS"), 3u);
  EXPECT_EQ(to.commands("ASKING"), 4u) << "before each";
  EXPECT_EQ(to.commands("EXISTS"), 3u);
}

TEST(RedisClusterScriptTest, an_invalid_map_leaves_the_tier_empty_until_there_is_a_valid_one) {
  const std::string deep = "*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n:1\r\n";
  for (const std::string& map :
       {std::string("*0\r\n"), std::string("+OK\r\n"), std::string("$-1\r\n"),
        "*2\r\n" + range(0, 9, "1") + range(9, 10, "1"), "*1\r\n" + range(0, 16384, "1"),
        "*1\r\n" + range(0, 16383, "0"), std::string("*1\r\n*1\r\n:0\r\n"), std::string("*100000000\r\n"),
        deep, std::string("-ERR unknown\r\n"), std::string()}) {
    RedisScript script(node({{"CLUSTER", map}}), RedisScript::On::kPort);
    Asker asker(options_of(script));
    EXPECT_EQ(asker.store.epoch(), nullptr) << map.substr(0, 40);
    asker.store.maintain();
    script.answer("CLUSTER", "*1\r\n" + range(0, kSlots - 1, "@PORT@"));
    ASSERT_TRUE(asker.store.begin_epoch()) << map.substr(0, 40);
    EXPECT_TRUE(asker.write(key_of(1)));
  }
}

// Returns a map with each slot in its own range, and this many nodes per range.
std::string long_map(std::uint16_t port, int nodes) {
  std::string map = "*16384\r\n", node;
  node = "*3\r\n$9\r\n127.0.0.1\r\n:" + std::to_string(port) + "\r\n$40\r\n" + std::string(40, 'i') + "\r\n";
  for (std::uint32_t slot = 0; slot < kSlots; ++slot) {
    map += "*" + std::to_string(2 + nodes) + "\r\n:" + std::to_string(slot) + "\r\n:" + std::to_string(slot) +
           "\r\n";
    for (int i = 0; i < nodes; ++i) map += node;
  }
  return map;
}

TEST(RedisClusterScriptTest, the_longest_possible_map_is_read_and_a_longer_one_is_rejected) {
  for (const int nodes : {3, 12}) {
    RedisScript script(node(), RedisScript::On::kPort);
    script.answer("CLUSTER", long_map(script.address().port, nodes));
    Asker asker(options_of(script));
    EXPECT_EQ(asker.store.epoch() != nullptr, nodes == 3);
    if (nodes == 3) {
      EXPECT_TRUE(asker.write(key_of(1)));
    }
  }
}

TEST(RedisClusterScriptTest, slots_without_a_node_are_misses_and_the_others_are_served) {
  RedisScript script(node({{"CLUSTER", "*1\r\n" + range(0, kSlots / 2 - 1, "@PORT@")}}),
                     RedisScript::On::kPort);
  if (slot_of(kStart) >= kSlots / 2)
    script.answer("CLUSTER", "*1\r\n" + range(kSlots / 2, kSlots - 1, "@PORT@"));
  const bool low = slot_of(kStart) < kSlots / 2;
  Asker asker(options_of(script));
  ASSERT_NE(asker.store.epoch(), nullptr);
  script.answer("EXISTS", ":1\r\n");
  const ChunkKey here = asker.key_in(low), unroutable = asker.key_in(!low);
  EXPECT_TRUE(asker.write(here));
  EXPECT_EQ(asker.write(unroutable).kind(), StatusKind::kUnavailable) << "nothing against the others";
  ASSERT_TRUE(asker.locate({unroutable, here}));
  EXPECT_EQ(asker.present, (std::vector<bool>{false, true}));
  EXPECT_EQ(asker.locate({unroutable}).kind(), StatusKind::kUnavailable);
}

// Two nodes: one answers, and the other accepts connections and stays silent.
struct HalfSilent {
  RedisScript silent{Answers{{"PING", "@SILENCE@"}}, RedisScript::On::kPort};
  RedisScript well{node(), RedisScript::On::kPort};
  const bool low = slot_of(kStart) < kSlots / 2;  // owns the epoch's key
  HalfSilent() {
    const std::string here = "@PORT@", there = std::to_string(silent.address().port);
    well.answer("CLUSTER", "*2\r\n" + range(0, kSlots / 2 - 1, low ? here : there) +
                               range(kSlots / 2, kSlots - 1, low ? there : here));
    well.answer("EXISTS", ":1\r\n");
  }
};

// A ping has a second at most, and a busy machine may take that long by itself.
template <typename Condition>
bool after_upkeep(Asker& asker, Condition condition) {
  for (int tries = 0; tries < 60; ++tries) {
    asker.store.maintain();
    if (condition()) return true;
  }
  return false;
}

TEST(RedisClusterScriptTest, a_silent_node_costs_its_keys_one_deadline_and_the_others_none) {
  HalfSilent nodes;
  Asker asker(options_of(nodes.well, kShort));
  ASSERT_NE(asker.store.epoch(), nullptr);
  const ChunkKey here = asker.key_in(nodes.low), there = asker.key_in(!nodes.low);
  // A lookup gets the answers of the working nodes, in any order of requests.
  ASSERT_TRUE(asker.locate({there, here, there}));
  EXPECT_EQ(asker.present, (std::vector<bool>{false, true, false}));
  const std::size_t connected = nodes.silent.commands("PING");
  EXPECT_GE(connected, 1u);
  // From then on the silent node is not asked, and that does not count against the others.
  for (int i = 0; i < 20; ++i) {
    const Status status = asker.read(there);
    EXPECT_EQ(status.kind(), StatusKind::kUnavailable) << status.to_string();
    EXPECT_NE(status.message().find(std::to_string(nodes.silent.address().port)), std::string::npos);
    EXPECT_EQ(asker.locate({there}).kind(), StatusKind::kUnavailable);
  }
  EXPECT_TRUE(asker.locate({here}));
  EXPECT_EQ(nodes.silent.commands("PING"), connected);
  nodes.silent.answer("PING", "");  // from here on it closes connections, so nothing waits for it
  // Writes have not failed yet. One fails, and then writes are not tried either.
  EXPECT_EQ(asker.write(there).kind(), StatusKind::kIo);
  EXPECT_EQ(asker.write(there).kind(), StatusKind::kUnavailable);
  // Upkeep detects that the node answers again.
  asker.store.maintain();
  EXPECT_EQ(asker.read(there).kind(), StatusKind::kUnavailable);
  for (const auto& [verb, bytes] : node()) nodes.silent.answer(verb, bytes);
  EXPECT_TRUE(holds_soon([&] {
    asker.store.maintain();
    return asker.write(there).is_ok();
  }));
}

// No op needs to succeed within these deadlines, so they may be short.
TEST(RedisClusterScriptTest, an_op_waits_for_a_silent_node_until_its_own_deadline) {
  HalfSilent nodes;
  const redis::Deadline start = std::chrono::steady_clock::now();
  redis::Cluster cluster({nodes.well.address()});
  bool refused = false;
  ASSERT_TRUE(cluster.learn(start + std::chrono::seconds(60), &refused));
  std::string there = "0";
  while ((slot_of(there) < kSlots / 2) == nodes.low) there += "0";
  const auto soon = [] { return std::chrono::steady_clock::now() + std::chrono::milliseconds(50); };
  Reply reply;
  const auto not_reached = [](redis::Connection&, Reply*) { return Status::ok(); };
  const auto write = [&] { return cluster.at(there, OpKind::kWrite, soon(), &reply, not_reached).kind(); };
  EXPECT_EQ(write(), StatusKind::kTimeout);
  EXPECT_EQ(write(), StatusKind::kUnavailable);
  std::vector<Reply> replies;
  std::vector<bool> answered;
  const auto ask = [&] { return cluster.at_each({&there, 1}, "EXISTS", soon(), &replies, &answered).kind(); };
  EXPECT_EQ(ask(), StatusKind::kTimeout);
  EXPECT_EQ(ask(), StatusKind::kUnavailable);
}

// Silent nodes take all the time of one upkeep; the next upkeep starts with another node.
TEST(RedisClusterScriptTest, upkeep_finds_a_recovered_node_after_one_that_stays_silent) {
  RedisScript one(node(), RedisScript::On::kPort), other(node(), RedisScript::On::kPort);
  const bool in_order = address_of(one.address()) < address_of(other.address());
  RedisScript &silent = in_order ? one : other, &back = in_order ? other : one;  // in the order of upkeep
  silent.answer("PING", "@SILENCE@");
  RedisScript well(node(), RedisScript::On::kPort);
  const std::uint32_t third = kSlots / 3, start = slot_of(kStart);
  const auto port = [](const RedisScript& script) { return std::to_string(script.address().port); };
  // The working node owns the epoch's key; the others follow in the slot order.
  std::string map = "*3\r\n";
  std::array<std::string, 3> ports;
  const std::size_t own = std::min<std::uint32_t>(start / third, 2);
  ports[own] = port(well);
  ports[(own + 1) % 3] = port(silent);
  ports[(own + 2) % 3] = port(back);
  for (std::uint32_t i = 0; i < 3; ++i)
    map += range(i * third, i == 2 ? kSlots - 1 : (i + 1) * third - 1, ports[i]);
  well.answer("CLUSTER", map);
  back.answer("CLUSTER", map);
  Asker asker(options_of(well, std::chrono::seconds(2)));
  // The start may have been too slow for its deadline.
  ASSERT_TRUE(holds_soon([&] { return asker.store.begin_epoch().is_ok(); }));
  const auto key_at = [&](std::size_t part) {
    for (std::uint32_t number = 1;; ++number) {
      if (std::min<std::size_t>(asker.slot(key_of(number)) / third, 2) == part) return key_of(number);
    }
  };
  const ChunkKey at_silent = key_at((own + 1) % 3), at_back = key_at((own + 2) % 3);
  back.answer("EXISTS", "-LOADING x\r\n");
  EXPECT_FALSE(asker.write(at_silent));
  EXPECT_FALSE(asker.write(at_back));
  EXPECT_EQ(asker.write(at_back).kind(), StatusKind::kUnavailable);
  back.answer("EXISTS", ":0\r\n");
  EXPECT_TRUE(holds_soon([&] {
    asker.store.maintain();
    return asker.write(at_back).is_ok();
  }));
  EXPECT_EQ(asker.write(at_silent).kind(), StatusKind::kUnavailable) << "still silent";
}

// While it cannot save, a server refuses writes and PING, and serves reads.
TEST(RedisClusterScriptTest, a_node_that_refuses_writes_still_serves_reads) {
  const std::string misconf = "-MISCONF x\r\n";
  HalfSilent nodes;
  for (const auto& [verb, bytes] : node()) nodes.silent.answer(verb, bytes);
  Asker asker(options_of(nodes.well));
  ASSERT_NE(asker.store.epoch(), nullptr);
  const ChunkKey there = asker.key_in(!nodes.low);
  nodes.silent.answer("SET", misconf);
  nodes.silent.answer("PING", misconf);
  EXPECT_EQ(asker.write(there).kind(), StatusKind::kIo);
  for (int i = 0; i < 3; ++i) asker.store.maintain();
  EXPECT_TRUE(asker.locate({there})) << "on an existing connection";
  EXPECT_EQ(asker.write(there).kind(), StatusKind::kUnavailable);
  // Upkeep detects that a node whose read failed serves reads again, also on a new connection.
  nodes.silent.answer("EXISTS", "-LOADING x\r\n");
  EXPECT_EQ(asker.locate({there}).kind(), StatusKind::kIo);
  nodes.silent.answer("EXISTS", "");
  EXPECT_EQ(asker.locate({there}).kind(), StatusKind::kUnavailable);
  EXPECT_TRUE(after_upkeep(asker, [&] { return asker.locate({there}).kind() == StatusKind::kIo; }))
      << "the connections were closed";
  nodes.silent.answer("EXISTS", ":0\r\n");
  EXPECT_TRUE(after_upkeep(asker, [&] { return asker.locate({there}).is_ok(); }));
  nodes.silent.answer("SET", "+OK\r\n");
  nodes.silent.answer("PING", "+PONG\r\n");
  EXPECT_TRUE(after_upkeep(asker, [&] { return asker.write(there).is_ok(); }));
}

// Redis 7 reports this for a node without a hostname where hostnames are preferred.
TEST(RedisClusterScriptTest, a_redirect_to_an_unknown_address_does_not_count_against_its_sender) {
  HalfSilent nodes;
  for (const auto& [verb, bytes] : node()) nodes.silent.answer(verb, bytes);
  Asker asker(options_of(nodes.well));
  ASSERT_NE(asker.store.epoch(), nullptr);
  const ChunkKey there = asker.key_in(!nodes.low);
  for (const std::string word : {"MOVED", "ASK"}) {
    nodes.silent.answer("EXISTS", "-" + word + " " + std::to_string(asker.slot(there)) + " ?:1\r\n");
    const std::size_t before = nodes.silent.commands("EXISTS");
    for (int i = 0; i < 2; ++i) {
      EXPECT_EQ(asker.write(there).kind(), StatusKind::kUnavailable) << word;
      EXPECT_EQ(asker.locate({there}).kind(), StatusKind::kUnavailable) << word;
    }
    EXPECT_EQ(nodes.silent.commands("EXISTS") - before, 4u) << "it is asked each time";
  }
  nodes.silent.answer("EXISTS", ":0\r\n");
  EXPECT_TRUE(asker.write(there));
}

// The importing node owns no slots yet.
TEST(RedisClusterScriptTest, an_importing_node_that_fails_once_is_soon_retried) {
  RedisScript to(RedisScript::usual({{"ASKING", "+OK\r\n"}, {"EXISTS", "-LOADING x\r\n"}}),
                 RedisScript::On::kPort);
  RedisScript from(node(), RedisScript::On::kPort);
  Asker asker(options_of(from));
  const ChunkKey key = key_of(1);
  const std::string ask =
      "-ASK " + std::to_string(asker.slot(key)) + " 127.0.0.1:" + std::to_string(to.address().port) + "\r\n";
  from.answer("EXISTS", ask);
  from.answer("SET", ask);
  EXPECT_EQ(asker.write(key).kind(), StatusKind::kIo);
  to.answer("EXISTS", ":0\r\n");
  EXPECT_EQ(asker.write(key).kind(), StatusKind::kUnavailable);
  asker.store.maintain();
  EXPECT_TRUE(asker.write(key));
}

// As when a host is lost: several connections are half open.
TEST(RedisClusterScriptTest, one_broken_connection_closes_all_idle_ones) {
  RedisScript script(node(), RedisScript::On::kPort);
  redis::Cluster cluster({script.address()});
  const Deadline until = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  bool refused = false;
  ASSERT_TRUE(cluster.learn(until, &refused));
  const NodePtr only = cluster.owners().front();
  std::array<std::unique_ptr<Connection>, 3> several;
  for (auto& one : several) ASSERT_TRUE(only->connections.take(until, &one, &refused));
  for (auto& one : several) only->connections.give_back(std::move(one));
  Reply reply;
  EXPECT_FALSE(cluster.at("x", OpKind::kRead, until, &reply, [&](Connection& connection, Reply* answer) {
    return connection.call({"STRLEN", "x"}, until, answer);  // ends the connection
  }));
  EXPECT_FALSE(only->connections.has_idle());
}

// Otherwise nothing would report that the device fails.
TEST(RedisClusterScriptTest, while_every_node_is_in_back_off_each_is_tried_and_fails) {
  RedisScript script(node(), RedisScript::On::kPort);
  Asker asker(options_of(script));
  ASSERT_NE(asker.store.epoch(), nullptr);
  script.answer("EXISTS", "-LOADING x\r\n");
  for (int i = 0; i < 10; ++i) {
    EXPECT_EQ(asker.write(key_of(1)).kind(), StatusKind::kIo);
    EXPECT_EQ(asker.locate({key_of(1)}).kind(), StatusKind::kIo);
  }
  script.answer("EXISTS", ":0\r\n");
  EXPECT_TRUE(asker.write(key_of(1)));
}

TEST(RedisClusterScriptTest, one_of_several_addresses_is_enough) {
  RedisScript script(node(), RedisScript::On::kPort);
  RedisTierOptions options = options_of(script);
  {
    const RedisScript gone({}, RedisScript::On::kPort);
    options.other_nodes.push_back(options.server);
    options.server = gone.address();
  }
  Asker asker(options);
  ASSERT_NE(asker.store.epoch(), nullptr);
  EXPECT_TRUE(asker.write(key_of(1)));
}

std::string refused(const RedisTierOptions& options) {
  try {
    const RedisStore store(options);
  } catch (const ResourceError& error) {
    return error.what();
  }
  return {};
}

TEST(RedisClusterScriptTest, several_addresses_of_a_server_that_is_not_a_cluster_are_refused) {
  const RedisScript script(RedisScript::usual({}), RedisScript::On::kPort);
  RedisTierOptions options = options_of(script);
  options.other_nodes.push_back(options.server);
  EXPECT_NE(refused(options).find("other_nodes"), std::string::npos) << refused(options);
}

TEST(RedisClusterScriptTest, missing_cluster_permissions_are_reported_at_the_start) {
  const RedisScript script(node({{"CLUSTER", "-NOPERM x\r\n"}}), RedisScript::On::kPort);
  EXPECT_NE(refused(options_of(script)).find("+cluster|slots"), std::string::npos);
  const RedisScript selecting(node({{"SELECT", "-ERR SELECT is not allowed in cluster mode\r\n"}}),
                              RedisScript::On::kPort);
  RedisTierOptions options = options_of(selecting);
  options.server.database = 3;
  EXPECT_NE(refused(options).find("only has database 0"), std::string::npos) << refused(options);
}

// A proxy that answers for a cluster and reports that it is none.
TEST(RedisClusterScriptTest, a_server_that_redirects_and_has_no_map_is_refused) {
  const std::string moved = "-MOVED " + std::to_string(slot_of(kStart)) + " 127.0.0.1:1\r\n";
  const RedisScript script(
      RedisScript::usual(
          {{"GET", moved}, {"CLUSTER", "-ERR This instance has cluster support disabled\r\n"}}),
      RedisScript::On::kPort);
  EXPECT_NE(refused(options_of(script)).find("not a cluster node"), std::string::npos)
      << refused(options_of(script));
}

TEST(RedisClusterScriptTest, several_nodes_without_a_reported_mode_are_asked_for_the_map) {
  RedisScript script(node({{"INFO", "-NOPERM x\r\n"}}), RedisScript::On::kPort);
  RedisTierOptions options = options_of(script);
  options.other_nodes.push_back(options.server);
  EXPECT_TRUE(Asker(options).write(key_of(1)));
  script.answer("CLUSTER", "-ERR This instance has cluster support disabled\r\n");
  EXPECT_NE(refused(options).find("other_nodes"), std::string::npos) << refused(options);
  script.answer("CLUSTER", "-NOPERM x\r\n");
  EXPECT_NE(refused(options).find("+cluster|slots"), std::string::npos) << refused(options);
}

TEST(RedisClusterScriptTest, a_sentinel_is_refused_at_the_start_and_an_empty_info_is_accepted) {
  const std::string info = "# Server\r\nredis_version:7.0.15\r\nredis_mode:sentinel\r\n";
  const std::string reply = "$" + std::to_string(info.size()) + "\r\n" + info + "\r\n";
  const RedisScript sentinel(RedisScript::usual({{"INFO", reply}}));
  EXPECT_NE(refused(options_of(sentinel)).find("Sentinel"), std::string::npos)
      << refused(options_of(sentinel));
  const RedisScript server(RedisScript::usual({}));  // its INFO is empty
  EXPECT_EQ(refused(options_of(server)), "");
}

// INFO needs a permission; a redirect reveals a cluster as well.
TEST(RedisClusterScriptTest, a_cluster_that_does_not_report_its_mode_is_detected_by_its_redirects) {
  RedisScript script(node({{"INFO", "-NOPERM x\r\n"}}), RedisScript::On::kPort);
  Asker alone(options_of(script));
  ASSERT_NE(alone.store.epoch(), nullptr);
  EXPECT_EQ(script.commands("CLUSTER"), 0u);
  const std::string slot = std::to_string(alone.slot(key_of(1)));
  script.answer("EXISTS", "-MOVED " + slot + " 127.0.0.1:@PORT@\r\n");
  const Status status = alone.write(key_of(1));
  EXPECT_EQ(status.kind(), StatusKind::kIo);
  EXPECT_NE(status.message().find("MOVED"), std::string::npos);
  script.answer("EXISTS", ":0\r\n");
  alone.store.maintain();
  EXPECT_GE(script.commands("CLUSTER"), 1u);
  EXPECT_TRUE(alone.write(key_of(1)));
}

// Failover behind one address: the replica took over, and new connections to the name reach it.
TEST(RedisClusterScriptTest, a_server_that_became_a_replica_is_reconnected) {
  RedisScript script(RedisScript::usual({}));
  Asker asker(options_of(script));
  EXPECT_TRUE(asker.write(key_of(1)));
  const std::size_t connected = script.commands("PING");
  EXPECT_TRUE(asker.write(key_of(1)));
  EXPECT_EQ(script.commands("PING"), connected) << "the connection is kept";
  script.answer("SET", "-READONLY You can't write against a read only replica.\r\n");
  const Status status = asker.write(key_of(1));
  EXPECT_NE(status.message().find("failover"), std::string::npos) << status.to_string();
  script.answer("SET", "+OK\r\n");
  EXPECT_TRUE(asker.write(key_of(1)));
  EXPECT_EQ(script.commands("PING"), connected + 1);
}

// The connection reaches a replica now, which refuses a transaction.
TEST(RedisClusterScriptTest, a_repeated_reset_that_a_replica_refuses_is_sent_over_a_new_connection) {
  RedisScript script(RedisScript::usual({{"WATCH", "+OK\r\n"}, {"MULTI", "+OK\r\n"}}));
  Asker asker(options_of(script));
  asker.store.forget(0);
  ASSERT_TRUE(asker.store.begin_epoch());
  script.answer("SET", "-READONLY x\r\n");
  script.answer("EXEC", "-EXECABORT x\r\n");
  const std::size_t connected = script.commands("PING");
  asker.store.maintain();
  EXPECT_EQ(script.commands("EXEC"), 1u);
  asker.store.maintain();
  EXPECT_EQ(script.commands("EXEC"), 2u);
  EXPECT_EQ(script.commands("PING"), connected + 1);
}

}  // namespace
}  // namespace kv_offload::redis
