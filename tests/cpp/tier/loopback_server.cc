// SPDX-License-Identifier: Apache-2.0
#include "tier/loopback_server.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace kv_offload::testing {

int unix_socket(const std::string& path, bool listen_there) {
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, path.c_str(), sizeof address.sun_path - 1);
  const auto* where = reinterpret_cast<const sockaddr*>(&address);
  const bool ok = listen_there ? bind(fd, where, sizeof address) == 0 && listen(fd, 64) == 0
                               : connect(fd, where, sizeof address) == 0;
  if (ok) return fd;
  close(fd);
  return -1;
}

int loopback_listener(std::uint16_t* port) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int on = 1;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(*port);
  socklen_t length = sizeof address;
  auto* where = reinterpret_cast<sockaddr*>(&address);
  EXPECT_TRUE(bind(fd, where, length) == 0 && listen(fd, 64) == 0) << std::strerror(errno);
  getsockname(fd, where, &length);
  *port = ntohs(address.sin_port);
  return fd;
}

bool send_all(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t sent = send(fd, text.data(), text.size(), MSG_NOSIGNAL);
    if (sent <= 0) return false;
    text.remove_prefix(static_cast<std::size_t>(sent));
  }
  return true;
}

bool receive(int fd, std::string* buffer) {
  char bytes[65536];
  const ssize_t got = recv(fd, bytes, sizeof bytes, 0);
  if (got <= 0) return false;
  buffer->append(bytes, static_cast<std::size_t>(got));
  return true;
}

bool holds_soon(const std::function<bool()>& condition) {
  const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(120);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > give_up) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  return true;
}

bool send_answer(int client, std::string_view answer, const Fate& fate) {
  std::string text(answer);
  if (fate.flipped >= 0 && !text.empty()) {
    const std::size_t at = text.size() * static_cast<std::size_t>(fate.flipped) / 1000;
    text[at] = static_cast<char>(text[at] ^ (1 << (at % 7)));
  }
  const std::size_t cut = fate.permille > 0 ? text.size() * fate.permille / 1000 : fate.cut;
  if (fate.unanswered) return false;
  if ((fate.cut > 0 || fate.permille > 0) && cut < text.size()) {
    send_all(client, std::string_view(text).substr(0, cut));
    return false;
  }
  if (!fate.slow && !fate.endless) return send_all(client, text);
  const std::size_t sent = text.size() - (fate.endless && !text.empty() ? 1 : 0);
  for (std::size_t i = 0; i < sent; ++i) {
    if (!send_all(client, std::string_view(text).substr(i, 1))) return false;
    poll(nullptr, 0, 1);
  }
  if (!fate.endless) return true;
  std::string nothing;
  while (receive(client, &nothing)) {  // until the peer closes
  }
  return false;
}

// ---- connections

Acceptor::Acceptor(int listener, Serve serve) : listener_(listener), serve_(std::move(serve)) {
  accepting_ = std::thread([this] { accept_all(); });
}

void Acceptor::accept_all() {
  for (std::uint64_t number = 0;; ++number) {
    const int client = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
    if (client < 0) return;
    join_ended();
    const std::lock_guard lock(mutex_);
    if (stopping_) {
      close(client);
      return;
    }
    running_.emplace(number, std::thread([this, number, client] { serve_one(number, client); }));
  }
}

void Acceptor::serve_one(std::uint64_t number, int client) {
  {
    const Held held(*this, client);
    serve_(*this, client);
  }
  const std::lock_guard lock(mutex_);
  const auto self = running_.find(number);
  if (stopping_ || self == running_.end()) return;  // stop() joins it
  ended_.push_back(std::move(self->second));
  running_.erase(self);
}

void Acceptor::join_ended() {
  std::vector<std::thread> ended;
  {
    const std::lock_guard lock(mutex_);
    ended.swap(ended_);
  }
  for (std::thread& thread : ended) thread.join();
}

void Acceptor::stop() {
  if (!accepting_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    for (const int fd : open_) shutdown(fd, SHUT_RDWR);
  }
  shutdown(listener_, SHUT_RDWR);
  accepting_.join();
  for (auto& [number, thread] : running_) thread.join();
  join_ended();
  close(listener_);
}

int Acceptor::connections() const {
  const std::lock_guard lock(mutex_);
  return static_cast<int>(running_.size());
}

Acceptor::Held::Held(Acceptor& acceptor, int fd) : acceptor_(acceptor), fd_(fd) {
  const std::lock_guard lock(acceptor_.mutex_);
  acceptor_.open_.insert(fd);
  if (acceptor_.stopping_) shutdown(fd, SHUT_RDWR);
}

Acceptor::Held::~Held() {
  const std::lock_guard lock(acceptor_.mutex_);
  acceptor_.open_.erase(fd_);
  close(fd_);
}

}  // namespace kv_offload::testing
