// SPDX-License-Identifier: Apache-2.0
#include "backends/redis/connections.h"

#include <utility>

namespace kv_offload::redis {

Status Connections::take(Deadline deadline, std::unique_ptr<Connection>* connection, bool* refused) {
  for (;;) {
    std::unique_ptr<Connection> idle;
    {
      const MutexLock lock(mutex_);
      if (!idle_.empty()) {
        idle = std::move(idle_.back());
        idle_.pop_back();
      }
    }
    if (!idle) return Connection::open(server_, tls_, deadline, connection, refused);
    if (idle->stale()) continue;
    *connection = std::move(idle);
    return Status::ok();
  }
}

void Connections::give_back(std::unique_ptr<Connection> connection) {
  if (!connection || !connection->usable()) return;
  const MutexLock lock(mutex_);
  if (!closed_) idle_.push_back(std::move(connection));
}

void Connections::drop_idle() {
  std::vector<std::unique_ptr<Connection>> idle;
  const MutexLock lock(mutex_);
  idle.swap(idle_);
}

bool Connections::has_idle() {
  const MutexLock lock(mutex_);
  return !idle_.empty();
}

void Connections::close() {
  std::vector<std::unique_ptr<Connection>> idle;
  const MutexLock lock(mutex_);
  closed_ = true;
  idle.swap(idle_);
}

}  // namespace kv_offload::redis
