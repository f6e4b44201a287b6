// A stream of bytes to a server, with TLS or without. No call waits past its deadline, however slowly the
// other side sends or takes bytes; after one that is not ok the stream may be anywhere.
//
// One thread at a time.
#pragma once

#include <sys/uio.h>

#include <memory>
#include <span>

#include "base/status.h"
#include "storage/redis/connection.h"

struct ssl_st;

namespace kv_offload::redis {

class Socket {
 public:
  // Connects, and with TLS makes sure of the server's certificate and name. Of a name with several addresses
  // each has its share of the time that looking the name up has left.
  // *refused: the certificate is not trusted or of another name.
  static Status open(const Server& server, const TlsContext* tls, Deadline deadline,
                     std::unique_ptr<Socket>* opened, bool* refused);
  ~Socket();
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;

  // Some of what the vectors ask for, which is at least a byte; 0 only when it is to be tried again.
  Status read_some(std::span<iovec> vectors, Deadline deadline, std::size_t* moved);
  Status write_some(std::span<iovec> vectors, Deadline deadline, std::size_t* moved);
  // Idle until now: has the server closed it, or sent what nobody asked for.
  bool stale() const;
  int descriptor() const { return fd_; }

 private:
  explicit Socket(int fd) : fd_(fd) {}
  Status begin_tls(const TlsContext& tls, const std::string& name, Deadline deadline, bool* refused);

  const int fd_;
  ssl_st* session_ = nullptr;  // none: without TLS
};

}  // namespace kv_offload::redis
