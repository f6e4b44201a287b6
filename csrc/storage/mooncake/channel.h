// Channel: one conversation with the process that speaks to Mooncake (client.h), for one thread at a time: a
// socket for questions and answers, and memory that both have mapped, for names and a record.
//
// The process only ever touches this memory, never a row: whoever calls copies in and out. A call that does
// not end in time may therefore be left; what the process still does to the memory reaches nobody, as the
// channel is given up with it.
//
// On the socket, one message each: a Question, answered by an Answer and a text, which is empty or says what
// went wrong. kv_offload/mooncake_client.py is the other side.
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
  kPut = 1,     // unless it is there; the bytes given
  kSet = 2,     // in place of what is there
  kGet = 3,     // the object's bytes, which are in object() if they are no more than it holds
  kExist = 4,   // of each name, a byte of object(): 1 there, 0 not
  kRemove = 5,  // also one that is just being read
};

struct Question {
  std::uint32_t verb = 0;
  std::uint32_t names = 0;         // in the memory's first bytes, one after the other, each ended by '\n'
  std::uint64_t names_bytes = 0;   // all of them
  std::uint64_t object_bytes = 0;  // put, set: what is to be written; get: what is expected, 0: not known
};
static_assert(sizeof(Question) == 24);

// Below 0: one of Mooncake's error codes.
struct Answer {
  std::int64_t result = 0;
  std::string text;
};

inline constexpr std::size_t kNamesBytes = std::size_t{256} << 10;  // of the memory; the object lies behind
inline constexpr std::size_t kMostText = 1024;

// Closes what it has.
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

// Two ends of a socket that keeps messages apart. kIo: the system has none left.
Status make_pair(Descriptor* ours, Descriptor* theirs);
// A message; with the descriptors, which the other side has then, too. kIo: the other side is gone.
Status send_message(int socket, std::span<const std::byte> message, std::span<const int> descriptors = {});
// kTimeout, kIo. *got: of the message, which is cut to the buffer.
Status receive_message(int socket, std::span<std::byte> buffer, Deadline until, std::size_t* got);

// What the other side says, for a person: bytes that are no UTF-8 become '?'.
std::string text_of(std::span<const std::byte> said);

class Channel {
 public:
  // Its memory holds an object of so many bytes; `theirs` and the memory's descriptor are for the other side.
  static Status make(std::size_t object_bytes, std::uint64_t client, std::unique_ptr<Channel>* made,
                     Descriptor* theirs, Descriptor* memory);
  ~Channel();
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  std::uint64_t client() const {
    return client_;
  }  // which of the processes that there were is at the other end
  std::span<std::byte> object() const { return memory_.subspan(kNamesBytes); }

  // kTimeout: no answer came; kIo: the process ended, or answers what fits no question. The channel is of no
  // use then. REQUIRES: 1 or more names, which fit into kNamesBytes; object_bytes <= object().size().
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
