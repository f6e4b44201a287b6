// SPDX-License-Identifier: Apache-2.0
#include "backends/redis/cluster_servers.h"

#include <algorithm>

namespace kv_offload::testing {

// The timeout is long, so that nodes do not take each other for dead on a loaded machine. Nothing fails over
// unless a test causes it.
RedisClusterServers::RedisClusterServers() {
  std::array<std::uint16_t, kNodes> buses{};
  for (std::size_t i = 0; i < kNodes; ++i) {
    ports_[i] = unused_port();
    buses[i] = unused_port();
    nodes_[i] = std::make_unique<RedisProcess>(std::vector<std::string>{"--port",
                                                                        std::to_string(ports_[i]),
                                                                        "--bind",
                                                                        "127.0.0.1",
                                                                        "--cluster-enabled",
                                                                        "yes",
                                                                        "--cluster-port",
                                                                        std::to_string(buses[i]),
                                                                        "--cluster-node-timeout",
                                                                        "60000",
                                                                        "--cluster-require-full-coverage",
                                                                        "no",
                                                                        "--repl-diskless-sync-delay",
                                                                        "0",
                                                                        "--repl-ping-replica-period",
                                                                        "1",
                                                                        "--maxmemory",
                                                                        "64mb",
                                                                        "--maxmemory-policy",
                                                                        "allkeys-lru"});
    if (::testing::Test::HasFailure()) return;
    ids_[i] = nodes_[i]->call({"CLUSTER", "MYID"}).text;
    alive_[i] = true;
    nodes_[i]->call({"CLUSTER", "SET-CONFIG-EPOCH", std::to_string(i + 1)});
    if (i >= kMasters) continue;
    nodes_[i]->call(
        {"CLUSTER", "ADDSLOTSRANGE", std::to_string(kFirst[i]), std::to_string(kFirst[i + 1] - 1)});
  }
  for (std::size_t i = 0; i < kNodes; ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      nodes_[i]->call({"CLUSTER", "MEET", "127.0.0.1", std::to_string(ports_[j]), std::to_string(buses[j])});
    }
  }
  EXPECT_TRUE(holds_soon([&] {
    return nodes_[kReplica]->call({"CLUSTER", "REPLICATE", ids_[kMasters - 1]}).text == "OK";
  }));
  for (std::size_t i = 0; i < kNodes; ++i) {
    EXPECT_TRUE(holds_soon([&] { return agrees(i); })) << nodes_[i]->call({"CLUSTER", "NODES"}).text;
  }
  EXPECT_TRUE(holds_soon([&] {
    return nodes_[kReplica]->call({"INFO", "replication"}).text.find("master_link_status:up") !=
           std::string::npos;
  }));
  ready_ = !::testing::Test::HasFailure();
}

// True if the node knows a master for each slot, and the master of the replica.
bool RedisClusterServers::agrees(std::size_t node) const {
  const std::string info = nodes_[node]->call({"CLUSTER", "INFO"}).text;
  const std::string nodes = nodes_[node]->call({"CLUSTER", "NODES"}).text;
  return info.find("cluster_state:ok") != info.npos && info.find("cluster_slots_ok:16384") != info.npos &&
         nodes.find("slave " + ids_[kMasters - 1]) != nodes.npos;
}

redis::Server RedisClusterServers::address(std::size_t node) const {
  redis::Server server;
  server.host = "127.0.0.1";
  server.port = ports_[node];
  return server;
}

std::size_t RedisClusterServers::holder_of(const std::string& key) const {
  for (std::size_t i = 0; i < kNodes; ++i) {
    if (!alive_[i]) continue;
    const redis::Reply role = nodes_[i]->call({"ROLE"});
    if (role.elements.empty() || role.elements.front().text != "master") continue;
    const std::vector<std::string> keys = nodes_[i]->keys();
    if (std::find(keys.begin(), keys.end(), key) != keys.end()) return i;
  }
  return kNodes;
}

void RedisClusterServers::begin_move(std::uint16_t slot, std::size_t from, std::size_t to) const {
  const std::string number = std::to_string(slot);
  EXPECT_EQ(nodes_[to]->call({"CLUSTER", "SETSLOT", number, "IMPORTING", ids_[from]}).text, "OK");
  EXPECT_EQ(nodes_[from]->call({"CLUSTER", "SETSLOT", number, "MIGRATING", ids_[to]}).text, "OK");
}

void RedisClusterServers::end_move(std::uint16_t slot, std::size_t from, std::size_t to) const {
  const std::string number = std::to_string(slot);
  for (const std::size_t node : {to, from}) {
    EXPECT_EQ(nodes_[node]->call({"CLUSTER", "SETSLOT", number, "NODE", ids_[to]}).text, "OK");
  }
}

void RedisClusterServers::kill(std::size_t node) {
  nodes_[node]->kill();
  alive_[node] = false;
}

void RedisClusterServers::promote_replica() const {
  EXPECT_EQ(nodes_[kReplica]->call({"CLUSTER", "FAILOVER", "TAKEOVER"}).text, "OK");
  for (std::size_t i = 0; i < kNodes; ++i) {
    if (!alive_[i]) continue;
    EXPECT_TRUE(holds_soon([&] {
      const auto ranges = redis::slot_ranges(nodes_[i]->call({"CLUSTER", "SLOTS"}));
      return ranges && std::any_of(ranges->begin(), ranges->end(), [&](const redis::SlotRange& range) {
               return range.owner.port == ports_[kReplica] && range.last == redis::kSlots - 1;
             });
    }));
  }
}

}  // namespace kv_offload::testing
