// A real cluster for the tests: three masters and a replica of the last, processes on loopback ports.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>

#include "storage/redis/server.h"
#include "storage/redis/slots.h"

namespace kv_offload::testing {

class RedisClusterServers {
 public:
  static constexpr std::size_t kMasters = 3, kReplica = 3, kNodes = 4;
  // What master i has: from kFirst[i] to kFirst[i + 1].
  static constexpr std::array<std::uint32_t, kMasters + 1> kFirst{0, 5461, 10923, redis::kSlots};

  RedisClusterServers();  // ready: all agree, and the replica has what its master has

  bool is_ready() const { return ready_; }

  redis::Server address(std::size_t node) const;  // over TCP
  RedisProcess& node(std::size_t number) { return *nodes_[number]; }
  // Whoever of the nodes has this key, among those that are masters; kNodes: none.
  std::size_t holder_of(const std::string& key) const;
  // A slot on its way, so that its keys are asked for at both; and the end of the way.
  void begin_move(std::uint16_t slot, std::size_t from, std::size_t to) const;
  void end_move(std::uint16_t slot, std::size_t from, std::size_t to) const;
  void kill(std::size_t node);
  void promote_replica() const;  // and the others know it

 private:
  bool agrees(std::size_t node) const;

  std::array<std::uint16_t, kNodes> ports_{};
  std::array<std::string, kNodes> ids_;
  std::array<std::unique_ptr<RedisProcess>, kNodes> nodes_;
  std::array<bool, kNodes> alive_{};
  bool ready_ = false;
};

}  // namespace kv_offload::testing
