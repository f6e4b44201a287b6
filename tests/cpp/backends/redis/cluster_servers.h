// SPDX-License-Identifier: Apache-2.0
// A real cluster for the tests: three masters and a replica of the last one, as processes on loopback ports.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>

#include "backends/redis/server.h"
#include "backends/redis/slots.h"

namespace kv_offload::testing {

class RedisClusterServers {
 public:
  static constexpr std::size_t kMasters = 3, kReplica = 3, kNodes = 4;
  // Master i owns the slots from kFirst[i] to kFirst[i + 1].
  static constexpr std::array<std::uint32_t, kMasters + 1> kFirst{0, 5461, 10923, redis::kSlots};

  RedisClusterServers();  // ready: all nodes agree, and the replica is in sync with its master

  bool is_ready() const { return ready_; }

  redis::Server address(std::size_t node) const;  // over TCP
  RedisProcess& node(std::size_t number) { return *nodes_[number]; }
  // Returns the master that stores this key; kNodes: none.
  std::size_t holder_of(const std::string& key) const;
  // Starts to move a slot, so that its keys are looked up at both nodes; end_move() completes it.
  void begin_move(std::uint16_t slot, std::size_t from, std::size_t to) const;
  void end_move(std::uint16_t slot, std::size_t from, std::size_t to) const;
  void kill(std::size_t node);
  void promote_replica() const;  // returns when the other nodes know it

 private:
  bool agrees(std::size_t node) const;

  std::array<std::uint16_t, kNodes> ports_{};
  std::array<std::string, kNodes> ids_;
  std::array<std::unique_ptr<RedisProcess>, kNodes> nodes_;
  std::array<bool, kNodes> alive_{};
  bool ready_ = false;
};

}  // namespace kv_offload::testing
