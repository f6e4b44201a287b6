// SPDX-License-Identifier: Apache-2.0
// Parses what cluster nodes report about key placement: slots, the slot map, redirects. The parsers trust no
// input to be well formed.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "backends/redis/connection.h"

namespace kv_offload::redis {

constexpr std::uint32_t kSlots = 16384;

// CRC16 of the key, or of its hash tag: the text between the first '{' and the first '}' after it, if it is
// not empty.
std::uint16_t slot_of(std::string_view key);

// The address of a node, as reported by that node or another one.
struct Endpoint {
  std::string host;  // a name or an address; empty: the host of the reporting node
  std::uint16_t port = 0;
  // The certificate's name, where the node announces it in addition to another host; else empty.
  std::string tls_name;
};
// Returns the server at the endpoint, with the connection settings of the server that reported it.
Server server_at(const Endpoint& endpoint, const Server& reporter);

struct SlotRange {
  std::uint16_t first = 0, last = 0;
  Endpoint owner;
  std::vector<Endpoint> replicas;
};
// Parses a CLUSTER SLOTS reply. nullopt: malformed. Ranges with an unknown owner are omitted.
std::optional<std::vector<SlotRange>> slot_ranges(const Reply& reply);

struct Redirect {
  bool asking = false;          // ASK: applies to this command only
  bool has_no_address = false;  // "?": the node knows no address to redirect to
  std::uint16_t slot = 0;
  Endpoint to;
};
// Parses an error reply "MOVED 3999 host:port" or "ASK ..."; nullopt: another error.
std::optional<Redirect> redirect_of(const Reply& reply);

}  // namespace kv_offload::redis
