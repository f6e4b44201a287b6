// SPDX-License-Identifier: Apache-2.0
// A pool of idle connections to one server. It grows to the largest number of connections in use at once.
// Thread-safe.
#pragma once

#include <memory>
#include <vector>

#include "backends/redis/connection.h"
#include "base/thread_annotations.h"

namespace kv_offload::redis {

class Connections {
 public:
  explicit Connections(const Server& server) : Connections(server, make_tls_context(server)) {}
  // `tls` is shared by all nodes of a cluster; null without TLS.
  Connections(const Server& server, std::shared_ptr<TlsContext> tls)
      : server_(server), tls_(std::move(tls)) {}

  // Returns an idle connection that still works, or opens a new one.
  Status take(Deadline deadline, std::unique_ptr<Connection>* connection, bool* refused) EXCLUDES(mutex_);
  void give_back(std::unique_ptr<Connection> connection) EXCLUDES(mutex_);
  // Closes all idle connections. The next connection may reach another server: a failover moves a name or a
  // virtual address.
  void drop_idle() EXCLUDES(mutex_);
  bool has_idle() EXCLUDES(mutex_);
  void close() EXCLUDES(mutex_);  // connections in use are closed when they are given back

 private:
  const Server server_;
  const std::shared_ptr<TlsContext> tls_;
  Mutex mutex_;
  bool closed_ GUARDED_BY(mutex_) = false;
  std::vector<std::unique_ptr<Connection>> idle_ GUARDED_BY(mutex_);
};

}  // namespace kv_offload::redis
