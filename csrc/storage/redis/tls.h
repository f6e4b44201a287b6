// TLS of a connection, on OpenSSL: certificates and names are always verified.
#pragma once

#include <memory>
#include <string>

#include "storage/redis/connection.h"

struct ssl_st;
struct ssl_ctx_st;

namespace kv_offload::redis {

class TlsContext {
 public:
  explicit TlsContext(const Server& server);  // throws ResourceError
  ~TlsContext();
  TlsContext(const TlsContext&) = delete;
  TlsContext& operator=(const TlsContext&) = delete;

  // On a socket that is connected and does not block; nothing is sent yet. `name`: a name or an address, that
  // the certificate must carry. The caller ends it.
  Status make_session(int fd, const std::string& name, ssl_st** session) const;

 private:
  [[maybe_unused]] ssl_ctx_st* context_ = nullptr;
};

// What came of a step: bytes moved; or what the socket must be ready for (POLLIN, POLLOUT) before it is tried
// again, with the same bytes; or that the connection is lost.
struct TlsStep {
  std::size_t moved = 0;
  short wants = 0;
  bool broken = false;
};
TlsStep tls_handshake(ssl_st* session);
TlsStep tls_read(ssl_st* session, void* to, std::size_t bytes);
TlsStep tls_write(ssl_st* session, const void* from, std::size_t bytes);
// Why a handshake was lost. *refused: the certificate is not trusted or of another name.
Status tls_verdict(ssl_st* session, bool* refused);
bool tls_has_more(ssl_st* session);  // decrypted already, so that the socket does not tell
void tls_end(ssl_st* session);       // frees it; sends nothing

}  // namespace kv_offload::redis
