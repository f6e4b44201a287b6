// SPDX-License-Identifier: Apache-2.0
// TCP sockets with numeric addresses. All of them are non-blocking and closed on exec.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace kv_offload {

// A file descriptor that is closed with its owner.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() { reset(); }
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    if (this != &other) {
      reset();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  void reset();
  int get() const { return fd_; }
  bool is_open() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

// Listens on a free port of an IPv4 or IPv6 address of this machine. Throws ResourceError.
Descriptor listen_on(const std::string& address, std::uint16_t* port);
// Returns no descriptor if no connection waits, or if it *failed.
Descriptor accept_on(const Descriptor& listener, bool* failed);
// Starts to connect; the socket becomes writable when that has ended. *error: errno, or 0.
Descriptor start_connect(const std::string& address, std::uint16_t port, int* error);
// The error with which a connection attempt ended; 0: connected.
int connect_error(const Descriptor& socket);

// Appends the bytes that have arrived, at most `most`. False: the connection has ended; *error is errno, or 0
// if the peer closed it.
bool receive(const Descriptor& socket, std::size_t most, std::vector<std::uint8_t>* to, int* error);
// Sends what the socket takes now and removes it from the front of *from. False: the connection has ended.
bool send_some(const Descriptor& socket, std::vector<std::uint8_t>* from);

// Wakes a thread that polls the descriptor. Only the first signal() after clear() makes a system call: the
// scheduler's thread signals once for each of many hosts.
class WakeUp {
 public:
  WakeUp();  // throws ResourceError
  void signal() const;
  // Call it before the work: what a thread did before signal() is visible after clear(), or wakes the next
  // poll.
  void clear() const;
  int get() const { return event_.get(); }

 private:
  Descriptor event_;
  mutable std::atomic<bool> is_signalled_{false};  // the descriptor is readable, or clear() is running
};

}  // namespace kv_offload
