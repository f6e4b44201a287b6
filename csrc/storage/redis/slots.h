// What nodes of a cluster say of who keeps which keys: slots, the map of them, redirects. Nothing of it is
// believed to be well formed.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "storage/redis/connection.h"

namespace kv_offload::redis {

constexpr std::uint32_t kSlots = 16384;

// CRC16 of the key, or of its hash tag: what stands between its first '{' and the first '}' behind it, unless
// that is nothing.
std::uint16_t slot_of(std::string_view key);

// Where a node says that it, or another, is reached.
struct Endpoint {
  std::string host;  // a name or an address; empty: that of the node that says so
  std::uint16_t port = 0;
  std::string tls_name;  // of its certificate, where that is announced beside another host; else empty
};
// The server at the endpoint, spoken to as the one that named it.
Server server_at(const Endpoint& endpoint, const Server& said_by);

struct SlotRange {
  std::uint16_t first = 0, last = 0;
  Endpoint owner;
  std::vector<Endpoint> replicas;
};
// Of what CLUSTER SLOTS answers. nullopt: that is no map. A range whose owner is unknown is left out.
std::optional<std::vector<SlotRange>> slot_ranges(const Reply& reply);

struct Redirect {
  bool asking = false;   // ASK: for this command alone
  bool nowhere = false;  // "?": the node knows no address that it may tell
  std::uint16_t slot = 0;
  Endpoint to;
};
// Of an error reply "MOVED 3999 host:port" or "ASK ..."; nullopt: it is another error.
std::optional<Redirect> redirect_of(const Reply& reply);

}  // namespace kv_offload::redis
