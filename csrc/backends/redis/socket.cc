// SPDX-License-Identifier: Apache-2.0
#include "backends/redis/socket.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <vector>

#include "backends/redis/resolver.h"
#include "backends/redis/tls.h"
#include "base/no_sigpipe.h"

namespace kv_offload::redis {
namespace {

using std::chrono::milliseconds;

milliseconds until(Deadline deadline) {
  const auto left = std::chrono::ceil<milliseconds>(deadline - std::chrono::steady_clock::now());
  return std::max(left, milliseconds(0));
}

// Checked before each step: a server that always has a byte ready would never let a wait time out.
bool passed(Deadline deadline) { return until(deadline).count() == 0; }

Status too_late() { return Status::error(StatusKind::kTimeout, "the server did not answer in time"); }
Status lost(int error) {
  return Status::error(
      StatusKind::kIo,
      fmt::format("the connection was lost: {}", error == 0 ? "closed" : std::strerror(error)), error);
}
Status no_connection(std::string_view why) {
  return Status::error(StatusKind::kIo, fmt::format("cannot connect: {}", why));
}

Status wait_for(int fd, short events, Deadline deadline) {
  pollfd watched{fd, events, 0};
  for (;;) {
    const milliseconds left = until(deadline);
    const int ready = poll(&watched, 1, static_cast<int>(std::min<long>(left.count(), 1'000'000)));
    if (ready > 0) return Status::ok();
    if (ready < 0 && errno != EINTR) return lost(errno);
    if (ready == 0 && passed(deadline)) return too_late();
  }
}

// Detects a connection that a firewall dropped while it is idle, before an operation uses it.
void keep_alive(int fd) {
  const int on = 1, idle = 60, between = 15, tries = 4;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &between, sizeof between);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &tries, sizeof tries);
}

Status connect_to(int fd, const sockaddr* address, socklen_t length, Deadline deadline) {
  if (connect(fd, address, length) == 0) return Status::ok();
  if (errno != EINPROGRESS) return no_connection(std::strerror(errno));
  if (Status status = wait_for(fd, POLLOUT, deadline); !status) return status;
  int error = 0;
  socklen_t size = sizeof error;
  if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size) != 0) error = errno;
  return error == 0 ? Status::ok() : no_connection(std::strerror(error));
}

// Close-on-exec: child processes of the engine must not inherit the socket.
Status connect_new(int family, const sockaddr* address, socklen_t length, Deadline deadline, int* made) {
  const int fd = socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return no_connection(std::strerror(errno));
  if (Status status = connect_to(fd, address, length, deadline); !status) {
    close(fd);
    return status;
  }
  if (family != AF_UNIX) keep_alive(fd);
  *made = fd;
  return Status::ok();
}

Status connect_unix(const std::string& path, Deadline deadline, int* made) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof address.sun_path) return no_connection("the path of the socket is too long");
  std::memcpy(address.sun_path, path.data(), path.size());
  return connect_new(AF_UNIX, reinterpret_cast<const sockaddr*>(&address), sizeof address, deadline, made);
}

// Never destroyed: a detached thread may use it while the process exits.
Resolver& resolver() {
  static Resolver* const one = new Resolver;
  return *one;
}

Status connect_tcp(const Server& server, Deadline deadline, int* made) {
  std::vector<SocketAddress> addresses;
  Status status = resolver().resolve(server.host, server.port, deadline, &addresses);
  if (!status) return status;
  auto left = static_cast<long>(addresses.size());
  for (const SocketAddress& one : addresses) {
    const Deadline now = std::chrono::steady_clock::now();
    const Deadline share = left > 1 ? now + (deadline - now) / left : deadline;
    status = connect_new(one.family(), one.get(), one.length, share, made);
    if (status) return status;
    --left;
  }
  return status;
}

}  // namespace

Status Socket::open(const Server& server, const TlsContext* tls, Deadline deadline,
                    std::unique_ptr<Socket>* opened, bool* refused) {
  int fd = -1;
  Status status = server.host.empty() ? connect_unix(server.unix_socket, deadline, &fd)
                                      : connect_tcp(server, deadline, &fd);
  if (!status) return status;
  std::unique_ptr<Socket> made(new Socket(fd));
  const std::string& name = server.tls_name.empty() ? server.host : server.tls_name;
  if (tls != nullptr) status = made->begin_tls(*tls, name, deadline, refused);
  if (status) *opened = std::move(made);
  return status;
}

Socket::~Socket() {
  if (session_ != nullptr) tls_end(session_);
  close(fd_);
}

Status Socket::begin_tls(const TlsContext& tls, const std::string& name, Deadline deadline, bool* refused) {
  const NoSigpipe no_signal;
  if (Status status = tls.make_session(fd_, name, &session_); !status) return status;
  for (;;) {
    const TlsStep step = tls_handshake(session_);
    if (step.broken) return tls_verdict(session_, refused);
    if (step.wait_events == 0) return Status::ok();
    if (Status status = wait_for(fd_, step.wait_events, deadline); !status) return status;
  }
}

Status Socket::read_some(std::span<iovec> vectors, Deadline deadline, std::size_t* moved) {
  *moved = 0;
  if (passed(deadline)) return too_late();
  if (session_ != nullptr) {
    const NoSigpipe no_signal;  // TLS may have to send a response
    const TlsStep step = tls_read(session_, vectors.front().iov_base, vectors.front().iov_len);
    *moved = step.moved;
    if (step.broken) return lost(0);
    return step.wait_events == 0 ? Status::ok() : wait_for(fd_, step.wait_events, deadline);
  }
  if (Status status = wait_for(fd_, POLLIN, deadline); !status) return status;
  msghdr message{};
  message.msg_iov = vectors.data();
  message.msg_iovlen = vectors.size();
  const ssize_t got = recvmsg(fd_, &message, MSG_DONTWAIT);
  if (got == 0) return lost(0);
  if (got < 0) return errno == EAGAIN || errno == EINTR ? Status::ok() : lost(errno);
  *moved = static_cast<std::size_t>(got);
  return Status::ok();
}

Status Socket::write_some(std::span<iovec> vectors, Deadline deadline, std::size_t* moved) {
  *moved = 0;
  if (passed(deadline)) return too_late();
  if (session_ != nullptr) {
    const NoSigpipe no_signal;
    const TlsStep step = tls_write(session_, vectors.front().iov_base, vectors.front().iov_len);
    *moved = step.moved;
    if (step.broken) return lost(0);
    return step.wait_events == 0 ? Status::ok() : wait_for(fd_, step.wait_events, deadline);
  }
  if (Status status = wait_for(fd_, POLLOUT, deadline); !status) return status;
  msghdr message{};
  message.msg_iov = vectors.data();
  message.msg_iovlen = vectors.size();
  const ssize_t put = sendmsg(fd_, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
  if (put < 0) return errno == EAGAIN || errno == EINTR ? Status::ok() : lost(errno);
  *moved = static_cast<std::size_t>(put);
  return Status::ok();
}

bool Socket::stale() const {
  if (session_ != nullptr && tls_has_more(session_)) return true;
  pollfd watched{fd_, POLLIN | POLLRDHUP, 0};
  return poll(&watched, 1, 0) != 0;
}

}  // namespace kv_offload::redis
