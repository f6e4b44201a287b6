// SPDX-License-Identifier: Apache-2.0
// TLS for connections, based on OpenSSL. Certificates and names are always verified.
#pragma once

#include <memory>
#include <string>

#include "backends/redis/connection.h"

struct ssl_st;
struct ssl_ctx_st;

namespace kv_offload::redis {

class TlsContext {
 public:
  explicit TlsContext(const Server& server);  // throws ResourceError
  ~TlsContext();
  TlsContext(const TlsContext&) = delete;
  TlsContext& operator=(const TlsContext&) = delete;

  // Creates a session on a connected, non-blocking socket; sends nothing yet. `name`: the host name or
  // address that the certificate must carry. The caller must free the session with tls_end().
  Status make_session(int fd, const std::string& name, ssl_st** session) const;

 private:
  [[maybe_unused]] ssl_ctx_st* context_ = nullptr;
};

// The result of one step. `moved`: bytes moved. `wait_events`: the event (POLLIN, POLLOUT) to wait for before
// a retry with the same bytes. `broken`: the connection is lost.
struct TlsStep {
  std::size_t moved = 0;
  short wait_events = 0;
  bool broken = false;
};
TlsStep tls_handshake(ssl_st* session);
TlsStep tls_read(ssl_st* session, void* to, std::size_t bytes);
TlsStep tls_write(ssl_st* session, const void* from, std::size_t bytes);
// Returns why a handshake failed. *refused: the certificate is not trusted or carries another name.
Status tls_verdict(ssl_st* session, bool* refused);
// True if decrypted bytes are pending, which poll() on the socket does not show.
bool tls_has_more(ssl_st* session);
void tls_end(ssl_st* session);  // frees it; sends nothing

}  // namespace kv_offload::redis
