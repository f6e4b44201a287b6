// TLS of a connection, on OpenSSL: certificates and names are always verified.
#pragma once

#include <memory>

#include "storage/redis/connection.h"

struct valkeyContext;
struct ssl_st;
struct ssl_ctx_st;

namespace kv_offload::redis {

class TlsContext {
 public:
  explicit TlsContext(const Server& server);  // throws ResourceError
  ~TlsContext();
  TlsContext(const TlsContext&) = delete;
  TlsContext& operator=(const TlsContext&) = delete;

  // The handshake, on a connection of the library that is connected. *session is the library's from then on.
  // *refused: the certificate is not trusted or of another name.
  Status begin(valkeyContext* context, ssl_st** session, bool* refused) const;

 private:
  ssl_ctx_st* context_ = nullptr;
  const std::string host_;
};

// > 0 bytes moved; 0: try again; < 0: broken.
long tls_read(ssl_st* session, void* to, std::size_t bytes);
long tls_write(ssl_st* session, const void* from, std::size_t bytes);
bool tls_has_more(ssl_st* session);  // decrypted already, so that the socket does not tell

// While it lives, a connection that the other side has closed is an error and no signal to this thread.
class NoSigpipe {
 public:
  NoSigpipe();
  ~NoSigpipe();
  NoSigpipe(const NoSigpipe&) = delete;
  NoSigpipe& operator=(const NoSigpipe&) = delete;

 private:
  bool was_pending_ = false, was_blocked_ = false;
};

}  // namespace kv_offload::redis
