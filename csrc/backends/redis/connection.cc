// SPDX-License-Identifier: Apache-2.0
#include "backends/redis/connection.h"

#include <valkey/valkey.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <new>
#include <optional>
#include <utility>

#include "backends/redis/socket.h"

namespace kv_offload::redis {
namespace {

using Bytes = std::span<std::byte>;
using ConstBytes = std::span<const std::byte>;

// The limit for all replies of one call, so that a server cannot make us buffer arbitrary amounts. INFO has
// by far the longest reply. Record bytes do not count.
constexpr std::size_t kMostReplyBytes = 256 << 10;
constexpr long long kMostElements = 16384;  // a page of names, or a map of slots
// Enough for a map in which each slot is a separate range with a master and two replicas.
constexpr std::size_t kMostMapBytes = 8 << 20;
// Limit of what one receive_pushed() reads, beyond one long message.
constexpr std::size_t kMostPushedBytes = 1 << 20;

Status malformed_reply() { return Status::error(StatusKind::kIo, "malformed reply"); }

// False: a type that none of our commands returns.
bool to_reply(const valkeyReply& from, Reply* reply) {
  const std::string_view text =
      from.str == nullptr ? std::string_view() : std::string_view(from.str, from.len);
  switch (from.type) {
    case VALKEY_REPLY_NIL:
      *reply = {};
      return true;
    case VALKEY_REPLY_STATUS:
      *reply = {Reply::Kind::kStatus, 0, std::string(text)};
      return true;
    case VALKEY_REPLY_STRING:
      *reply = {Reply::Kind::kString, 0, std::string(text)};
      return true;
    case VALKEY_REPLY_INTEGER:
      *reply = {Reply::Kind::kInteger, from.integer, {}};
      return true;
    case VALKEY_REPLY_ERROR:
      *reply = {Reply::Kind::kError, 0, std::string(text)};
      return true;
    case VALKEY_REPLY_ARRAY:
      *reply = {Reply::Kind::kArray, static_cast<long long>(from.elements), {}};
      reply->elements.resize(from.elements);
      for (std::size_t i = 0; i < from.elements; ++i) {
        if (!to_reply(*from.element[i], &reply->elements[i])) return false;
      }
      return true;
    default:
      return false;
  }
}

void append_head(std::string* to, char kind, std::size_t number) {
  to->push_back(kind);
  *to += std::to_string(number);
  *to += "\r\n";
}
void append_word(std::string* to, std::string_view word) {
  append_head(to, '$', word.size());
  *to += word;
  *to += "\r\n";
}
void append_command(std::string* to, const Connection::Command& words) {
  append_head(to, '*', words.size());
  for (const std::string_view word : words) append_word(to, word);
}

template <typename Span>
std::vector<iovec> vectors_of(std::span<const Span> pieces) {
  std::vector<iovec> vectors;
  vectors.reserve(pieces.size());
  for (const Span& piece : pieces) {
    if (!piece.empty()) vectors.push_back({const_cast<std::byte*>(piece.data()), piece.size()});
  }
  return vectors;
}
// Returns what is left to move.
std::span<iovec> without(std::span<iovec> vectors, std::size_t moved) {
  while (!vectors.empty() && moved >= vectors.front().iov_len) {
    moved -= vectors.front().iov_len;
    vectors = vectors.subspan(1);
  }
  if (moved > 0) {
    vectors.front().iov_base = static_cast<char*>(vectors.front().iov_base) + moved;
    vectors.front().iov_len -= moved;
  }
  return vectors;
}
// Returns the next part to move, small enough to be processed while it is in the CPU cache.
std::vector<iovec> next_step(std::span<const iovec> vectors) {
  std::vector<iovec> step;
  std::size_t room = RecordForm::kStepBytes;
  for (const iovec& vector : vectors) {
    if (room == 0) break;
    step.push_back({vector.iov_base, std::min(vector.iov_len, room)});
    room -= step.back().iov_len;
  }
  return step;
}

// Passes the received bytes of the pieces from `begin` up to `end` to the observer.
void report_progress(ReadProgressSink* observer, std::span<const std::span<std::byte>> pieces,
                     std::uint64_t begin, std::uint64_t end, std::uint64_t announced) {
  if (observer == nullptr) return;
  std::uint64_t at = 0;
  for (const std::span<std::byte>& piece : pieces) {
    const std::uint64_t first = std::max(begin, at), last = std::min<std::uint64_t>(end, at + piece.size());
    if (first < last) observer->filled(piece.subspan(first - at, last - first), first, announced);
    at += piece.size();
  }
}

}  // namespace

// The library only parses replies. We do the I/O ourselves: the library's own I/O would copy each value twice
// and has no deadline for a whole reply.
struct Connection::Stream {
  explicit Stream(std::unique_ptr<Socket> connected) : socket(std::move(connected)) {
    if (reader == nullptr) throw std::bad_alloc();
    reader->maxelements = kMostElements;
  }
  ~Stream() { valkeyReaderFree(reader); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  const std::unique_ptr<Socket> socket;
  valkeyReader* const reader = valkeyReaderCreate();
};

std::string address_of(const Server& server) {
  if (server.host.empty()) return fmt::format("unix://{} db {}", server.unix_socket, server.database);
  const bool v6 = server.host.find(':') != std::string::npos;
  return fmt::format("{}://{}{}{}:{}/{}", server.tls ? "rediss" : "redis", v6 ? "[" : "", server.host,
                     v6 ? "]" : "", server.port, server.database);
}

Connection::Connection(std::unique_ptr<Stream> stream)
    : stream_(std::move(stream)), most_reply_bytes_(kMostReplyBytes) {}
Connection::~Connection() = default;

Status Connection::open(const Server& server, const std::shared_ptr<TlsContext>& tls, Deadline deadline,
                        std::unique_ptr<Connection>* connection, bool* refused) {
  *refused = false;
  std::unique_ptr<Socket> socket;
  if (Status status = Socket::open(server, tls.get(), deadline, &socket, refused); !status) return status;
  auto stream = std::make_unique<Stream>(std::move(socket));
  std::unique_ptr<Connection> opened(new Connection(std::move(stream)));
  if (Status status = opened->log_in(server, deadline, refused); !status) return status;
  *connection = std::move(opened);
  return Status::ok();
}

// Never quotes a reply to AUTH: it may contain the credentials.
Status Connection::log_in(const Server& server, Deadline deadline, bool* refused) {
  std::vector<Command> commands;
  const std::string database = std::to_string(server.database);
  if (!server.password.empty()) {
    commands.push_back(server.user.empty() ? Command{"AUTH", server.password}
                                           : Command{"AUTH", server.user, server.password});
  }
  if (server.database != 0) commands.push_back({"SELECT", database});
  commands.push_back({"PING"});
  std::vector<Reply> replies;
  if (Status status = call_all(commands, deadline, &replies); !status) return status;
  for (std::size_t i = 0; i < commands.size(); ++i) {
    // PING may fail while reads still work (MISCONF).
    if (replies[i].kind != Reply::Kind::kError) continue;
    const std::string_view verb = commands[i][0];
    if (verb == "PING" && refuses_only_writes(replies[i].text)) continue;
    // Errors unrelated to the login, such as too many clients, can hit whichever command is first.
    if (is_transient(replies[i].text)) return refusal(replies[i].text);
    *refused = verb != "PING" || is_configuration_error(replies[i].text);
    // The remaining errors name the setting to change.
    if (verb == "AUTH")
      return Status::error(StatusKind::kIo, "the server refuses the user name or the password");
    if (verb == "SELECT" && replies[i].text.find("cluster mode") != std::string::npos) {
      return Status::error(
          StatusKind::kIo,
          fmt::format("the server is a cluster node, which only has database 0: remove database {} from url",
                      database));
    }
    if (verb == "SELECT" && replies[i].text.starts_with("ERR unknown command")) {
      return Status::error(StatusKind::kIo,
                           "the server does not support databases: it is a Sentinel or not a Redis server");
    }
    if (verb == "SELECT" && !is_configuration_error(replies[i].text)) {
      return Status::error(StatusKind::kIo, fmt::format("the server has no database {}", database));
    }
    return refusal(replies[i].text);
  }
  return Status::ok();
}

// Marks the connection as not usable until the call succeeds. If the call ends early (also by an exception),
// no later call can take leftover bytes for its own reply.
Status Connection::begin_call() {
  fed_ = 0;
  if (std::exchange(usable_, false)) return Status::ok();
  return Status::error(StatusKind::kIo, "the connection was lost by an earlier failure");
}
// Extra bytes belong to another command's reply, and then the reply before them may, too.
Status Connection::end_call() {
  const valkeyReader* reader = stream_->reader;
  if (reader->pos != reader->len) return malformed_reply();
  usable_ = true;
  return Status::ok();
}

Status Connection::send(std::span<const ConstBytes> pieces, Deadline deadline) {
  std::vector<iovec> vectors = vectors_of(pieces);
  for (std::span<iovec> rest = vectors; !rest.empty();) {
    std::size_t moved = 0;
    if (Status status = stream_->socket->write_some(rest, deadline, &moved); !status) return status;
    rest = without(rest, moved);
  }
  return Status::ok();
}

Status Connection::next_reply(Deadline deadline, Reply* reply) {
  valkeyReader* reader = stream_->reader;
  std::array<char, 4096> buffer;
  for (;;) {
    void* found = nullptr;
    if (valkeyReaderGetReply(reader, &found) != VALKEY_OK) return malformed_reply();
    const std::unique_ptr<void, void (*)(void*)> freed(found, &freeReplyObject);
    if (found != nullptr) {
      return to_reply(*static_cast<valkeyReply*>(found), reply) ? Status::ok() : malformed_reply();
    }
    if (fed_ > most_reply_bytes_) return Status::error(StatusKind::kIo, "the reply is too long", EMSGSIZE);
    iovec vector{buffer.data(), buffer.size()};
    std::size_t moved = 0;
    if (Status status = stream_->socket->read_some({&vector, 1}, deadline, &moved); !status) return status;
    if (moved > 0 && valkeyReaderFeed(reader, buffer.data(), moved) != VALKEY_OK) return malformed_reply();
    fed_ += moved;
  }
}

Status Connection::call(const Command& command, Deadline deadline, Reply* reply) {
  std::vector<Reply> replies;
  if (Status status = call_all({&command, 1}, deadline, &replies); !status) return status;
  *reply = std::move(replies.front());
  return Status::ok();
}

Status Connection::call_all(std::span<const Command> commands, Deadline deadline,
                            std::vector<Reply>* replies) {
  if (Status status = send_all(commands, deadline); !status) return status;
  return receive_all(commands.size(), deadline, replies);
}

Status Connection::send_all(std::span<const Command> commands, Deadline deadline) {
  if (Status status = begin_call(); !status) return status;
  std::string text;
  for (const Command& command : commands) append_command(&text, command);
  const ConstBytes bytes = std::as_bytes(std::span(text));
  return send({&bytes, 1}, deadline);
}

Status Connection::receive_all(std::size_t count, Deadline deadline, std::vector<Reply>* replies) {
  replies->resize(count);
  for (Reply& reply : *replies) {
    if (Status status = next_reply(deadline, &reply); !status) return status;
  }
  return end_call();
}

Status Connection::receive_pushed(Deadline deadline, std::vector<Reply>* messages) {
  if (Status status = begin_call(); !status) return status;
  // The rest is read in the next call. A message that is not complete stays in the reader; its length is
  // limited across calls.
  while (fed_ < kMostPushedBytes && stream_->socket->stale()) {
    if (unread_ > kMostMapBytes) return Status::error(StatusKind::kIo, "the message is too long", EMSGSIZE);
    std::array<char, 4096> buffer;
    iovec vector{buffer.data(), buffer.size()};
    std::size_t moved = 0;
    if (Status status = stream_->socket->read_some({&vector, 1}, deadline, &moved); !status) return status;
    if (moved > 0 && valkeyReaderFeed(stream_->reader, buffer.data(), moved) != VALKEY_OK)
      return malformed_reply();
    unread_ += moved;
    fed_ += moved;
    for (;;) {
      void* found = nullptr;
      if (valkeyReaderGetReply(stream_->reader, &found) != VALKEY_OK) return malformed_reply();
      if (found == nullptr) break;
      const std::unique_ptr<void, void (*)(void*)> freed(found, &freeReplyObject);
      if (!to_reply(*static_cast<valkeyReply*>(found), &messages->emplace_back())) return malformed_reply();
      unread_ = 0;
    }
  }
  usable_ = true;
  return Status::ok();
}

Status Connection::send_pushed(const Command& command, Deadline deadline) {
  if (Status status = begin_call(); !status) return status;
  std::string text;
  append_command(&text, command);
  const ConstBytes bytes = std::as_bytes(std::span(text));
  if (Status status = send({&bytes, 1}, deadline); !status) return status;
  usable_ = true;
  return Status::ok();
}

Status Connection::call_for_map(const Command& command, Deadline deadline, Reply* reply) {
  most_reply_bytes_ = kMostMapBytes;
  Status status = call(command, deadline, reply);
  most_reply_bytes_ = kMostReplyBytes;
  return status;
}

Status Connection::set(std::string_view key, std::span<const ConstBytes> pieces, const Command& options,
                       Deadline deadline, Reply* reply) {
  if (Status status = begin_call(); !status) return status;
  std::size_t length = 0;
  for (const ConstBytes& piece : pieces) length += piece.size();
  std::string head, tail = "\r\n";
  append_head(&head, '*', 3 + options.size());
  append_word(&head, "SET");
  append_word(&head, key);
  append_head(&head, '$', length);
  for (const std::string_view word : options) append_word(&tail, word);
  std::vector<ConstBytes> all;
  all.push_back(std::as_bytes(std::span(head)));
  all.insert(all.end(), pieces.begin(), pieces.end());
  all.push_back(std::as_bytes(std::span(tail)));
  if (Status status = send(all, deadline); !status) return status;
  if (Status status = next_reply(deadline, reply); !status) return status;
  return end_call();
}

// The first bytes of a reply: the line with the value's length, and the part of the value that arrived with
// it.
struct Connection::ValueStart {
  std::array<char, 64> bytes;  // longer than any such line
  std::size_t have = 0;        // bytes in use
  // length including the line end; 0: the reply was an error, which was read completely
  std::size_t line = 0;

  // Returns nullopt if the line holds no length; -1 if there is no value.
  std::optional<long long> announced() const {
    long long length = 0;
    const char* end = bytes.data() + line - 2;
    const auto [stop, error] = std::from_chars(bytes.data() + 1, end, length);
    if (error != std::errc() || stop != end || length < -1) return std::nullopt;
    return length;
  }
  std::span<const char> early() const { return {bytes.data() + line, have - line}; }
};

Status Connection::read_value_start(Deadline deadline, ValueStart* start, Reply* reply) {
  while (start->line == 0) {
    iovec vector{start->bytes.data() + start->have, start->bytes.size() - start->have};
    std::size_t moved = 0;
    if (Status status = stream_->socket->read_some({&vector, 1}, deadline, &moved); !status) return status;
    start->have += moved;
    const std::string_view seen(start->bytes.data(), start->have);
    // Values bypass libvalkey's reader, which would copy them. It parses all other replies.
    if (start->have > 0 && seen[0] != '$') {
      if (valkeyReaderFeed(stream_->reader, seen.data(), seen.size()) != VALKEY_OK) return malformed_reply();
      if (Status status = next_reply(deadline, reply); !status) return status;
      return reply->kind == Reply::Kind::kError ? end_call() : malformed_reply();
    }
    const std::size_t end = seen.find("\r\n");
    if (end != seen.npos) start->line = end + 2;
    if (start->line == 0 && start->have == start->bytes.size()) return malformed_reply();
  }
  return Status::ok();
}

// early: the bytes of the value, and of the line end after it, that were read together with its length.
Status Connection::read_value(std::span<const Bytes> pieces, std::span<const char> early,
                              std::uint64_t length, Deadline deadline, ReadProgressSink* observer) {
  std::array<std::byte, 2> tail;
  std::vector<Bytes> value;
  std::size_t open = length;
  for (const Bytes& piece : pieces) {
    value.push_back(piece.first(std::min(piece.size(), open)));
    open -= value.back().size();
  }
  std::vector<Bytes> all = value;
  all.emplace_back(tail);
  const char* from = early.data();
  std::size_t left = early.size();
  for (Bytes& piece : all) {
    const std::size_t part = std::min(left, piece.size());
    std::memcpy(piece.data(), from, part);
    piece = piece.subspan(part);
    from += part;
    left -= part;
  }
  report_progress(observer, value, 0, early.size(), length);
  std::vector<iovec> vectors = vectors_of(std::span<const Bytes>(all));
  std::uint64_t received = early.size();
  for (std::span<iovec> rest = vectors; !rest.empty();) {
    std::size_t moved = 0;
    std::vector<iovec> step = next_step(rest);
    if (Status status = stream_->socket->read_some(step, deadline, &moved); !status) return status;
    report_progress(observer, value, received, received + moved, length);
    received += moved;
    rest = without(rest, moved);
  }
  return tail == std::array{std::byte{'\r'}, std::byte{'\n'}} ? Status::ok() : malformed_reply();
}

Status Connection::get(const Command& command, std::span<const Bytes> pieces, std::uint64_t least,
                       Deadline deadline, Reply* reply, std::uint64_t* length, ReadProgressSink* observer) {
  if (Status status = begin_call(); !status) return status;
  std::string text;
  append_command(&text, command);
  const ConstBytes bytes = std::as_bytes(std::span(text));
  if (Status status = send({&bytes, 1}, deadline); !status) return status;
  ValueStart start;
  if (Status status = read_value_start(deadline, &start, reply); !status || start.line == 0) return status;
  const std::optional<long long> announced = start.announced();
  if (!announced) return malformed_reply();
  const std::span<const char> early = start.early();
  if (*announced == -1) {
    *reply = {};
    return early.empty() ? end_call() : malformed_reply();
  }
  *length = static_cast<std::uint64_t>(*announced);
  std::size_t most = 0;
  for (const Bytes& piece : pieces) most += piece.size();
  // The caller decides what a value of another length means. It may be very long, so it is not read. The call
  // stays unfinished, which makes the connection unusable.
  const bool fits = *length <= most && *length >= least;
  if (!fits || early.size() > *length + 2) {
    *reply = {Reply::Kind::kWrongLength, 0, {}};
    return fits ? malformed_reply() : Status::ok();
  }
  if (Status status = read_value(pieces, early, *length, deadline, observer); !status) return status;
  *reply = {Reply::Kind::kString, 0, {}};
  return end_call();
}

bool Connection::stale() const { return stream_->socket->stale(); }
int Connection::descriptor() const { return stream_->socket->descriptor(); }

}  // namespace kv_offload::redis
