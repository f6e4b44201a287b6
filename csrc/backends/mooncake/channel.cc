// SPDX-License-Identifier: Apache-2.0
#include "backends/mooncake/channel.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/types.h"

namespace kv_offload::mooncake {
namespace {

constexpr std::size_t kMostDescriptors = 2;

Status ended() { return Status::error(StatusKind::kIo, "the Mooncake client process ended"); }

// Rounds up, so that waiting for a deadline never spins.
int milliseconds_until(Deadline until) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - std::chrono::steady_clock::now());
  return static_cast<int>(std::clamp<std::int64_t>(left.count(), 0, 1 << 30));
}

// Returns the length of the UTF-8 character at the start of the text; 0: invalid.
std::size_t bytes_of_character(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned first = byte(0);
  if (first < 0x80) return 1;
  const std::size_t bytes = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : 2;
  if (first < 0xC2 || first > 0xF4 || bytes > text.size()) return 0;
  for (std::size_t i = 1; i < bytes; ++i) {
    if ((byte(i) & 0xC0) != 0x80) return 0;
  }
  // Overlong, a surrogate, or above U+10FFFF.
  const unsigned second = byte(1);
  const bool none = (first == 0xE0 && second < 0xA0) || (first == 0xED && second > 0x9F) ||
                    (first == 0xF0 && second < 0x90) || (first == 0xF4 && second > 0x8F);
  return none ? 0 : bytes;
}

}  // namespace

std::string text_of(std::span<const std::byte> message) {
  std::string_view left(reinterpret_cast<const char*>(message.data()), message.size());
  std::string text;
  while (!left.empty()) {
    const std::size_t bytes = bytes_of_character(left);
    text += bytes > 0 ? left.substr(0, bytes) : "?";
    left.remove_prefix(std::max<std::size_t>(bytes, 1));
  }
  return text;
}

Descriptor::Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}

Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
  if (this != &other) {
    reset();
    fd_ = std::exchange(other.fd_, -1);
  }
  return *this;
}

void Descriptor::reset() {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

Status make_pair(Descriptor* local_end, Descriptor* peer_end) {
  std::array<int, 2> ends{};
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends.data()) != 0) {
    return Status::from_errno(errno, "socketpair");
  }
  *local_end = Descriptor(ends[0]);
  *peer_end = Descriptor(ends[1]);
  return Status::ok();
}

Status send_message(int socket, std::span<const std::byte> message, std::span<const int> descriptors) {
  iovec piece{const_cast<std::byte*>(message.data()), message.size()};
  msghdr header{};
  header.msg_iov = &piece;
  header.msg_iovlen = 1;
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kMostDescriptors * sizeof(int))> control{};
  if (!descriptors.empty()) {
    header.msg_control = control.data();
    header.msg_controllen = CMSG_SPACE(descriptors.size_bytes());
    cmsghdr* const rights = CMSG_FIRSTHDR(&header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(descriptors.size_bytes());
    std::memcpy(CMSG_DATA(rights), descriptors.data(), descriptors.size_bytes());
  }
  // Never waits: a process that reads no messages is stuck.
  while (::sendmsg(socket, &header, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) {
    if (errno == EINTR) continue;
    if (errno == EAGAIN) {
      return Status::error(StatusKind::kIo, "the Mooncake client process is stuck");
    }
    return errno == EPIPE || errno == ECONNRESET ? ended() : Status::from_errno(errno, "sendmsg");
  }
  return Status::ok();
}

Status receive_message(int socket, std::span<std::byte> buffer, Deadline until, std::size_t* got) {
  while (true) {
    pollfd wait{socket, POLLIN, 0};
    const int ready = ::poll(&wait, 1, milliseconds_until(until));
    if (ready < 0 && errno != EINTR) return Status::from_errno(errno, "poll");
    if (ready == 0) return Status::error(StatusKind::kTimeout, "Mooncake did not answer in time");
    // EINTR: wait again for the time left.
    if (ready < 0) continue;
    const ssize_t bytes = ::recv(socket, buffer.data(), buffer.size(), MSG_DONTWAIT);
    if (bytes > 0) {
      *got = static_cast<std::size_t>(bytes);
      return Status::ok();
    }
    // Both mean that the peer has ended.
    if (bytes == 0 || errno == ECONNRESET) return ended();
    if (errno != EINTR && errno != EAGAIN) return Status::from_errno(errno, "recv");
  }
}

Status Channel::make(std::size_t object_bytes, std::uint64_t client, std::unique_ptr<Channel>* made,
                     Descriptor* peer_end, Descriptor* memory) {
  const std::size_t bytes = kNamesBytes + round_up(object_bytes, kPageBytes);
  *memory = Descriptor(::memfd_create("kv_offload mooncake", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (memory->get() < 0) return Status::from_errno(errno, "memfd_create");
  // Sealed: the process cannot shrink the memory under us.
  if (::ftruncate(memory->get(), static_cast<off_t>(bytes)) != 0 ||
      ::fcntl(memory->get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return Status::from_errno(errno, "ftruncate");
  }
  Descriptor local_end;
  if (Status status = make_pair(&local_end, peer_end); !status) return status;
  void* const at = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory->get(), 0);
  if (at == MAP_FAILED) return Status::from_errno(errno, "mmap");
  made->reset(new Channel(std::move(local_end), {static_cast<std::byte*>(at), bytes}, client));
  return Status::ok();
}

Channel::~Channel() { ::munmap(memory_.data(), memory_.size()); }

Status Channel::call(Verb verb, std::span<const std::string> names, std::uint64_t object_bytes,
                     Deadline until, Answer* answer) const {
  CallHeader call_header{static_cast<std::uint32_t>(verb), static_cast<std::uint32_t>(names.size()), 0,
                         object_bytes};
  for (const std::string& name : names) {
    std::memcpy(memory_.data() + call_header.names_bytes, name.data(), name.size());
    call_header.names_bytes += name.size();
    memory_[call_header.names_bytes++] = std::byte{'\n'};
  }
  if (Status status = send_message(socket_.get(), std::as_bytes(std::span(&call_header, 1))); !status) {
    return status;
  }
  std::array<std::byte, sizeof(answer->result) + kMostText> buffer{};
  std::size_t got = 0;
  if (Status status = receive_message(socket_.get(), buffer, until, &got); !status) return status;
  if (got < sizeof(answer->result)) {
    return Status::error(StatusKind::kIo, "the Mooncake client process sent an unexpected response");
  }
  std::memcpy(&answer->result, buffer.data(), sizeof(answer->result));
  answer->text = text_of(std::span(buffer).first(got).subspan(sizeof(answer->result)));
  return Status::ok();
}

}  // namespace kv_offload::mooncake
