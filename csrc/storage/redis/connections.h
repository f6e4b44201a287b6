// Idle connections to one server, at most one for each thread that ever needed one at once. Any thread.
#pragma once

#include <memory>
#include <vector>

#include "base/thread_annotations.h"
#include "storage/redis/connection.h"

namespace kv_offload::redis {

class Connections {
 public:
  explicit Connections(const Server& server) : Connections(server, make_tls_context(server)) {}
  // `tls`: what the nodes of a cluster share; null without TLS.
  Connections(const Server& server, std::shared_ptr<TlsContext> tls)
      : server_(server), tls_(std::move(tls)) {}

  // An idle one that is still good, or a new one.
  Status take(Deadline deadline, std::unique_ptr<Connection>* connection, bool* refused) EXCLUDES(mutex_);
  void give_back(std::unique_ptr<Connection> connection) EXCLUDES(mutex_);
  // Whoever is connected to next may be another: a name or a virtual address moves with a failover.
  void drop_idle() EXCLUDES(mutex_);
  bool has_idle() EXCLUDES(mutex_);
  void close() EXCLUDES(mutex_);  // those that are in use are closed when they come back

 private:
  const Server server_;
  const std::shared_ptr<TlsContext> tls_;
  Mutex mutex_;
  bool closed_ GUARDED_BY(mutex_) = false;
  std::vector<std::unique_ptr<Connection>> idle_ GUARDED_BY(mutex_);
};

}  // namespace kv_offload::redis
