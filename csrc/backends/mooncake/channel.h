// SPDX-License-Identifier: Apache-2.0
// Channel: a connection to the Mooncake client process (client.h), for one thread at a time. It consists of a
// socket for requests and replies, and a shared memory area for names and one record.
//
// The process touches only this memory and never a host memory row: callers copy data in and out. A call that
// times out may therefore be abandoned. Later writes by the process are harmless, because the channel is
// discarded with the memory.
//
// Socket protocol, one message each: a Question, and as reply an Answer followed by a text. The text is empty
// or describes the error. kv_offload/tiers/mooncake/client.py implements the other side.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace kv_offload::mooncake {

using Deadline = std::chrono::steady_clock::time_point;

enum class Verb : std::uint32_t {
  kPut = 1,     // write the given bytes, unless the object exists
  kSet = 2,     // write the given bytes, replacing an existing object
  kGet = 3,     // returns the object's bytes, which are in object() if they fit
  kExist = 4,   // one byte of object() per name: 1 present, 0 missing
  kRemove = 5,  // also removes an object that is being read
};

struct CallHeader {
  std::uint32_t verb = 0;
  std::uint32_t names = 0;         // at the start of the memory, each followed by '\n'
  std::uint64_t names_bytes = 0;   // of all names together
  std::uint64_t object_bytes = 0;  // put, set: bytes to write; get: expected bytes, 0: unknown
};
static_assert(sizeof(CallHeader) == 24);

// A negative result is a Mooncake error code.
struct Answer {
  std::int64_t result = 0;
  std::string text;
};

// At the start of the memory; the object follows.
inline constexpr std::size_t kNamesBytes = std::size_t{256} << 10;
inline constexpr std::size_t kMostText = 1024;

// Owns a file descriptor and closes it.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept;
  Descriptor& operator=(Descriptor&& other) noexcept;
  ~Descriptor() { reset(); }
  int get() const { return fd_; }
  void reset();

 private:
  int fd_ = -1;
};

// Creates a connected pair of message sockets. kIo: the system has no resources left.
Status make_pair(Descriptor* local_end, Descriptor* peer_end);
// Sends one message and optionally duplicates descriptors into the peer. kIo: the peer has ended.
Status send_message(int socket, std::span<const std::byte> message, std::span<const int> descriptors = {});
// kTimeout, kIo. *got: bytes received. A message longer than the buffer is truncated.
Status receive_message(int socket, std::span<std::byte> buffer, Deadline until, std::size_t* got);

// Returns the peer's text for users: bytes that are not valid UTF-8 become '?'.
std::string text_of(std::span<const std::byte> message);

class Channel {
 public:
  // Creates a channel with memory for an object of `object_bytes`. `peer_end` and `memory` must be sent to
  // the process.
  static Status make(std::size_t object_bytes, std::uint64_t client, std::unique_ptr<Channel>* made,
                     Descriptor* peer_end, Descriptor* memory);
  ~Channel();
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  // The number of the process at the other end (Client::starts()).
  std::uint64_t client() const { return client_; }
  std::span<std::byte> object() const { return memory_.subspan(kNamesBytes); }

  // kTimeout: no reply arrived. kIo: the process ended or sent a malformed reply. Discard the channel then.
  // REQUIRES: at least one name; all names fit into kNamesBytes; object_bytes <= object().size().
  Status call(Verb verb, std::span<const std::string> names, std::uint64_t object_bytes, Deadline until,
              Answer* answer) const;

 private:
  Channel(Descriptor socket, std::span<std::byte> memory, std::uint64_t client)
      : socket_(std::move(socket)), memory_(memory), client_(client) {}

  const Descriptor socket_;
  const std::span<std::byte> memory_;
  const std::uint64_t client_;
};

}  // namespace kv_offload::mooncake
