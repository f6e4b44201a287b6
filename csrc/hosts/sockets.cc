// SPDX-License-Identifier: Apache-2.0
#include "hosts/sockets.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/status.h"

namespace kv_offload {
namespace {

constexpr int kUnackedMillis = 15'000;  // after that the kernel ends a connection without acknowledgements

struct Address {
  sockaddr_storage storage{};
  socklen_t bytes = 0;
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
};

bool parse(const std::string& text, std::uint16_t port, Address* address) {
  sockaddr_in v4{};
  if (::inet_pton(AF_INET, text.c_str(), &v4.sin_addr) == 1) {
    v4.sin_family = AF_INET;
    v4.sin_port = htons(port);
    std::memcpy(&address->storage, &v4, sizeof v4);
    address->bytes = sizeof v4;
    return true;
  }
  sockaddr_in6 v6{};
  if (::inet_pton(AF_INET6, text.c_str(), &v6.sin6_addr) != 1) return false;
  v6.sin6_family = AF_INET6;
  v6.sin6_port = htons(port);
  std::memcpy(&address->storage, &v6, sizeof v6);
  address->bytes = sizeof v6;
  return true;
}

std::uint16_t port_of(int fd) {
  Address address;
  address.bytes = sizeof address.storage;
  if (::getsockname(fd, address.get(), &address.bytes) != 0) return 0;
  if (address.storage.ss_family == AF_INET6) {
    sockaddr_in6 v6;
    std::memcpy(&v6, &address.storage, sizeof v6);
    return ntohs(v6.sin6_port);
  }
  sockaddr_in v4;
  std::memcpy(&v4, &address.storage, sizeof v4);
  return ntohs(v4.sin_port);
}

void tune(int fd) {
  const int on = 1;
  (void)::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  (void)::setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &kUnackedMillis, sizeof kUnackedMillis);
}

bool is_transient(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

}  // namespace

void Descriptor::reset() {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

Descriptor listen_on(const std::string& address, std::uint16_t* port) {
  Address local;
  if (!parse(address, 0, &local))
    throw_resource("{:?} is not an IP address of this host: set VLLM_HOST_IP to one", address);
  Descriptor listener(::socket(local.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  constexpr int kBacklog = 16;
  if (!listener.is_open() || ::bind(listener.get(), local.get(), local.bytes) != 0 ||
      ::listen(listener.get(), kBacklog) != 0) {
    throw_resource(
        "cannot listen on {}: {}; set VLLM_HOST_IP to an address of this host that the other hosts reach",
        address, std::strerror(errno));
  }
  *port = port_of(listener.get());
  return listener;
}

Descriptor accept_on(const Descriptor& listener, bool* failed) {
  Descriptor accepted(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  *failed = !accepted.is_open() && !is_transient(errno);
  if (accepted.is_open()) tune(accepted.get());
  return accepted;
}

Descriptor start_connect(const std::string& address, std::uint16_t port, int* error) {
  *error = 0;
  Address remote;
  if (!parse(address, port, &remote)) {
    *error = EINVAL;
    return {};
  }
  Descriptor socket(::socket(remote.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket.is_open()) {
    *error = errno;
    return {};
  }
  tune(socket.get());
  if (::connect(socket.get(), remote.get(), remote.bytes) != 0 && errno != EINPROGRESS) {
    *error = errno;
    return {};
  }
  return socket;
}

int connect_error(const Descriptor& socket) {
  int error = 0;
  socklen_t bytes = sizeof error;
  return ::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &bytes) == 0 ? error : errno;
}

bool receive(const Descriptor& socket, std::size_t most, std::vector<std::uint8_t>* to, int* error) {
  *error = 0;
  const std::size_t before = to->size();
  to->resize(before + most);
  const ::ssize_t got = ::recv(socket.get(), to->data() + before, most, MSG_DONTWAIT);
  const int failed = errno;
  to->resize(before + static_cast<std::size_t>(std::max<::ssize_t>(got, 0)));
  if (got > 0 || most == 0) return true;
  if (got < 0 && is_transient(failed)) return true;
  *error = got < 0 ? failed : 0;
  return false;
}

bool send_some(const Descriptor& socket, std::vector<std::uint8_t>* from) {
  if (from->empty()) return true;
  const ::ssize_t put = ::send(socket.get(), from->data(), from->size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  if (put < 0) return is_transient(errno);
  from->erase(from->begin(), from->begin() + put);
  return true;
}

WakeUp::WakeUp() : event_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!event_.is_open()) throw_resource("cannot create an eventfd: {}", std::strerror(errno));
}

void WakeUp::signal() const {
  if (is_signalled_.exchange(true)) return;
  const std::uint64_t one = 1;
  (void)!::write(event_.get(), &one, sizeof one);
}

void WakeUp::clear() const {
  std::uint64_t count = 0;
  (void)!::read(event_.get(), &count, sizeof count);
  // After the read: a signal in between is either seen here, or makes the descriptor readable again.
  (void)is_signalled_.exchange(false);
}

}  // namespace kv_offload
