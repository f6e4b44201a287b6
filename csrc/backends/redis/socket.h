// SPDX-License-Identifier: Apache-2.0
// A byte stream to a server, with or without TLS. No call waits past its deadline, even if the peer sends or
// receives slowly. After a call that is not ok, the stream position is unknown.
//
// One thread at a time.
#pragma once

#include <sys/uio.h>

#include <memory>
#include <span>

#include "backends/redis/connection.h"
#include "base/status.h"

struct ssl_st;

namespace kv_offload::redis {

class Socket {
 public:
  // Connects; with TLS it also verifies the server's certificate and name. If the name has several addresses,
  // they share the time that is left after the name lookup. *refused: the certificate is not trusted or
  // carries another name.
  static Status open(const Server& server, const TlsContext* tls, Deadline deadline,
                     std::unique_ptr<Socket>* opened, bool* refused);
  ~Socket();
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;

  // Moves at least one byte into or out of the vectors. *moved may be 0 when ok: try again.
  Status read_some(std::span<iovec> vectors, Deadline deadline, std::size_t* moved);
  Status write_some(std::span<iovec> vectors, Deadline deadline, std::size_t* moved);
  // True if the server closed this idle connection or sent unexpected bytes.
  bool stale() const;
  int descriptor() const { return fd_; }

 private:
  explicit Socket(int fd) : fd_(fd) {}
  Status begin_tls(const TlsContext& tls, const std::string& name, Deadline deadline, bool* refused);

  const int fd_;
  ssl_st* session_ = nullptr;  // null without TLS
};

}  // namespace kv_offload::redis
