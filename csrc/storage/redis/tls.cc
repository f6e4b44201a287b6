#include "storage/redis/tls.h"

#include <arpa/inet.h>
#include <pthread.h>
#include <signal.h>
#include <valkey/valkey.h>

#include <cerrno>
#include <ctime>

#ifdef KV_OFFLOAD_TLS
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>
#include <valkey/tls.h>
#endif

namespace kv_offload::redis {

NoSigpipe::NoSigpipe() {
  sigset_t pending, pipe, before;
  sigpending(&pending);
  was_pending_ = sigismember(&pending, SIGPIPE) == 1;
  sigemptyset(&pipe);
  sigaddset(&pipe, SIGPIPE);
  pthread_sigmask(SIG_BLOCK, &pipe, &before);
  was_blocked_ = sigismember(&before, SIGPIPE) == 1;
}

NoSigpipe::~NoSigpipe() {
  sigset_t pipe;
  sigemptyset(&pipe);
  sigaddset(&pipe, SIGPIPE);
  const timespec now{};
  while (!was_pending_ && sigtimedwait(&pipe, nullptr, &now) > 0) {
  }
  if (!was_blocked_) pthread_sigmask(SIG_UNBLOCK, &pipe, nullptr);
}

#ifdef KV_OFFLOAD_TLS

bool has_tls() { return true; }

TlsContext::TlsContext(const Server& server) : host_(server.host) {
  context_ = SSL_CTX_new(TLS_client_method());
  if (context_ == nullptr) throw_resource("OpenSSL gives no context for TLS");
  SSL_CTX_set_min_proto_version(context_, TLS1_2_VERSION);
  SSL_CTX_set_verify(context_, SSL_VERIFY_PEER, nullptr);
  const int trusted = server.ca_file.empty()
                          ? SSL_CTX_set_default_verify_paths(context_)
                          : SSL_CTX_load_verify_locations(context_, server.ca_file.c_str(), nullptr);
  if (trusted == 1) return;
  SSL_CTX_free(context_);
  throw_resource("ca_file {}: no certificate can be read from it", server.ca_file);
}
TlsContext::~TlsContext() { SSL_CTX_free(context_); }

Status TlsContext::begin(valkeyContext* context, ssl_st** session, bool* refused) const {
  SSL* ssl = SSL_new(context_);
  if (ssl == nullptr) return Status::error(StatusKind::kIo, "OpenSSL gives no session for TLS");
  in6_addr address;
  const bool is_address =
      inet_pton(AF_INET, host_.c_str(), &address) == 1 || inet_pton(AF_INET6, host_.c_str(), &address) == 1;
  const int named = is_address ? X509_VERIFY_PARAM_set1_ip_asc(SSL_get0_param(ssl), host_.c_str())
                               : SSL_set1_host(ssl, host_.c_str());
  if (named != 1 || (!is_address && SSL_set_tlsext_host_name(ssl, host_.c_str()) != 1)) {
    SSL_free(ssl);
    return Status::error(StatusKind::kIo, "OpenSSL does not take the server's name");
  }
  const NoSigpipe no_signal;
  if (valkeyInitiateTLS(context, ssl) == VALKEY_OK) {
    *session = ssl;
    return Status::ok();
  }
  const long verdict = SSL_get_verify_result(ssl);
  SSL_free(ssl);
  if (verdict == X509_V_OK) return Status::error(StatusKind::kIo, fmt::format("TLS: {}", context->errstr));
  *refused = true;
  return Status::error(StatusKind::kIo, fmt::format("the server's certificate is not trusted: {}",
                                                    X509_verify_cert_error_string(verdict)));
}

long tls_read(ssl_st* session, void* to, std::size_t bytes) {
  ERR_clear_error();
  std::size_t moved = 0;
  if (SSL_read_ex(session, to, bytes, &moved) == 1) return static_cast<long>(moved);
  return errno == EINTR && SSL_get_error(session, 0) == SSL_ERROR_SYSCALL ? 0 : -1;
}
long tls_write(ssl_st* session, const void* from, std::size_t bytes) {
  ERR_clear_error();
  std::size_t moved = 0;
  if (SSL_write_ex(session, from, bytes, &moved) == 1) return static_cast<long>(moved);
  return errno == EINTR && SSL_get_error(session, 0) == SSL_ERROR_SYSCALL ? 0 : -1;
}
bool tls_has_more(ssl_st* session) { return SSL_pending(session) > 0; }

#else

bool has_tls() { return false; }
TlsContext::TlsContext(const Server& server) : host_(server.host) {
  throw_resource(
      "rediss:// needs TLS, and this build has none: build it where OpenSSL's headers are "
      "(libssl-dev), or connect by redis://");
}
TlsContext::~TlsContext() = default;
Status TlsContext::begin(valkeyContext*, ssl_st**, bool*) const {
  return Status::error(StatusKind::kIo, "no TLS in this build");
}
long tls_read(ssl_st*, void*, std::size_t) { return -1; }
long tls_write(ssl_st*, const void*, std::size_t) { return -1; }
bool tls_has_more(ssl_st*) { return false; }

#endif

std::shared_ptr<TlsContext> make_tls_context(const Server& server) {
  return server.tls ? std::make_shared<TlsContext>(server) : nullptr;
}

}  // namespace kv_offload::redis
