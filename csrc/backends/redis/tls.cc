// SPDX-License-Identifier: Apache-2.0
#include "backends/redis/tls.h"

#include <arpa/inet.h>
#include <poll.h>

#ifdef KV_OFFLOAD_TLS
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>
#endif

namespace kv_offload::redis {

#ifdef KV_OFFLOAD_TLS

bool has_tls() { return true; }

TlsContext::TlsContext(const Server& server) {
  context_ = SSL_CTX_new(TLS_client_method());
  if (context_ == nullptr) throw_resource("OpenSSL cannot create a TLS context");
  SSL_CTX_set_min_proto_version(context_, TLS1_2_VERSION);
  SSL_CTX_set_verify(context_, SSL_VERIFY_PEER, nullptr);
  const int trusted = server.ca_file.empty()
                          ? SSL_CTX_set_default_verify_paths(context_)
                          : SSL_CTX_load_verify_locations(context_, server.ca_file.c_str(), nullptr);
  if (trusted == 1) return;
  SSL_CTX_free(context_);
  throw_resource("ca_file {}: cannot read a certificate from it", server.ca_file);
}
TlsContext::~TlsContext() { SSL_CTX_free(context_); }

Status TlsContext::make_session(int fd, const std::string& name, ssl_st** session) const {
  SSL* ssl = SSL_new(context_);
  if (ssl == nullptr) return Status::error(StatusKind::kIo, "OpenSSL cannot create a TLS session");
  *session = ssl;
  in6_addr address;
  const bool is_address =
      inet_pton(AF_INET, name.c_str(), &address) == 1 || inet_pton(AF_INET6, name.c_str(), &address) == 1;
  const int named = is_address ? X509_VERIFY_PARAM_set1_ip_asc(SSL_get0_param(ssl), name.c_str())
                               : SSL_set1_host(ssl, name.c_str());
  if (named != 1 || (!is_address && SSL_set_tlsext_host_name(ssl, name.c_str()) != 1) ||
      SSL_set_fd(ssl, fd) != 1) {
    return Status::error(StatusKind::kIo, "OpenSSL rejects the server's name");
  }
  SSL_set_mode(ssl, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
  SSL_set_connect_state(ssl);
  return Status::ok();
}

namespace {

TlsStep step_of(SSL* session, int result, std::size_t moved) {
  if (result == 1) return {moved, 0, false};
  switch (SSL_get_error(session, result)) {
    case SSL_ERROR_WANT_READ:
      return {0, POLLIN, false};
    case SSL_ERROR_WANT_WRITE:
      return {0, POLLOUT, false};
    default:
      return {0, 0, true};
  }
}

}  // namespace

TlsStep tls_handshake(ssl_st* session) {
  ERR_clear_error();
  return step_of(session, SSL_do_handshake(session), 0);
}
TlsStep tls_read(ssl_st* session, void* to, std::size_t bytes) {
  ERR_clear_error();
  std::size_t moved = 0;
  const int result = SSL_read_ex(session, to, bytes, &moved);
  return step_of(session, result, moved);
}
TlsStep tls_write(ssl_st* session, const void* from, std::size_t bytes) {
  ERR_clear_error();
  std::size_t moved = 0;
  const int result = SSL_write_ex(session, from, bytes, &moved);
  return step_of(session, result, moved);
}

Status tls_verdict(ssl_st* session, bool* refused) {
  const long verdict = SSL_get_verify_result(session);
  if (verdict == X509_V_OK) {
    const char* reason = ERR_reason_error_string(ERR_peek_last_error());
    return Status::error(StatusKind::kIo,
                         fmt::format("TLS: {}", reason != nullptr ? reason : "the connection was lost"));
  }
  *refused = true;
  return Status::error(StatusKind::kIo, fmt::format("the server's certificate is not trusted: {}",
                                                    X509_verify_cert_error_string(verdict)));
}
bool tls_has_more(ssl_st* session) { return SSL_has_pending(session) == 1; }
void tls_end(ssl_st* session) { SSL_free(session); }

#else

bool has_tls() { return false; }
TlsContext::TlsContext(const Server&) {
  throw_resource(
      "rediss:// needs TLS, and this build has none: build it with OpenSSL's headers "
      "installed (libssl-dev), or connect with redis://");
}
TlsContext::~TlsContext() = default;
Status TlsContext::make_session(int, const std::string&, ssl_st**) const {
  return Status::error(StatusKind::kIo, "no TLS in this build");
}
TlsStep tls_handshake(ssl_st*) { return {0, 0, true}; }
TlsStep tls_read(ssl_st*, void*, std::size_t) { return {0, 0, true}; }
TlsStep tls_write(ssl_st*, const void*, std::size_t) { return {0, 0, true}; }
Status tls_verdict(ssl_st*, bool*) { return Status::error(StatusKind::kIo, "no TLS in this build"); }
bool tls_has_more(ssl_st*) { return false; }
void tls_end(ssl_st*) {}

#endif

std::shared_ptr<TlsContext> make_tls_context(const Server& server) {
  return server.tls ? std::make_shared<TlsContext>(server) : nullptr;
}

}  // namespace kv_offload::redis
