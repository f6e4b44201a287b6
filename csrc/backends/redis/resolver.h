// SPDX-License-Identifier: Apache-2.0
// Resolver: looks up the addresses of a host, with a deadline.
//
// getaddrinfo() has no deadline: with an unresponsive name server it blocks its thread for half a minute or
// more. Therefore a separate thread does each lookup, and callers wait for the result until their deadline.
// Callers that need the same name share one lookup thread. At most kMostLookups run at once, which bounds the
// threads that a silent name server can block. A numeric address needs neither a thread nor a wait.
//
// The threads are detached, because a getaddrinfo() call cannot be cancelled. They share ownership of the
// state that they touch.
//
// Thread-safe.
#pragma once

#include <sys/socket.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "backends/redis/connection.h"
#include "base/status.h"

namespace kv_offload::redis {

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t length = 0;

  int family() const { return storage.ss_family; }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
};

class Resolver {
 public:
  static constexpr std::size_t kMostLookups = 16;
  // Returns 0 or a getaddrinfo() error. May block for any time. Must not throw.
  using Lookup =
      std::function<int(const std::string& host, std::uint16_t port, std::vector<SocketAddress>* addresses)>;

  // Uses getaddrinfo(). Tests pass another lookup.
  Resolver();
  explicit Resolver(Lookup lookup);

  // When ok, there is at least one address. kTimeout: the deadline passed.
  Status resolve(const std::string& host, std::uint16_t port, Deadline deadline,
                 std::vector<SocketAddress>* addresses);

 private:
  struct State;
  const std::shared_ptr<State> state_;
};

}  // namespace kv_offload::redis
