// Resolver: looks up the addresses of a host, with a deadline.
//
// getaddrinfo() knows no deadline: where the name server does not answer it blocks for half a minute and
// more, and with it whichever thread calls it. So a thread of its own looks a name up, and callers wait for
// the answer until their deadline. Callers that ask for the same name wait for one thread; at most
// kMostLookups run at once, so that a name server that is silent costs a bounded number of threads. A numeric
// address needs neither a thread nor a wait.
//
// The threads are detached: nobody can end a getaddrinfo(). They share what they touch.
//
// Threads: any.
#pragma once

#include <sys/socket.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "storage/redis/connection.h"

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
  // 0, or an error of getaddrinfo(). May block for any time. Does not throw.
  using Lookup =
      std::function<int(const std::string& host, std::uint16_t port, std::vector<SocketAddress>* addresses)>;

  // getaddrinfo(). Tests give another.
  Resolver();
  explicit Resolver(Lookup lookup);

  // At least one address when ok. kTimeout: the deadline passed.
  Status resolve(const std::string& host, std::uint16_t port, Deadline deadline,
                 std::vector<SocketAddress>* addresses);

 private:
  struct State;
  const std::shared_ptr<State> state_;
};

}  // namespace kv_offload::redis
