#include "storage/redis/connection.h"

#include <poll.h>
#include <sys/socket.h>
#include <valkey/valkey.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <optional>

#include "storage/redis/tls.h"

namespace kv_offload::redis {
namespace {

using std::chrono::milliseconds;
using Bytes = std::span<std::byte>;
using ConstBytes = std::span<const std::byte>;

milliseconds until(Deadline deadline) {
  const auto left = std::chrono::ceil<milliseconds>(deadline - std::chrono::steady_clock::now());
  return std::max(left, milliseconds(0));
}
timeval to_timeval(milliseconds time) {
  const auto bounded = std::max<long>(static_cast<long>(time.count()), 1);
  return {bounded / 1000, bounded % 1000 * 1000};
}

Status too_late() { return Status::error(StatusKind::kTimeout, "the server did not answer in time"); }
Status lost(int error) {
  return Status::error(
      StatusKind::kIo,
      fmt::format("the connection was lost: {}", error == 0 ? "closed" : std::strerror(error)), error);
}
Status nonsense() { return Status::error(StatusKind::kIo, "what the server sent is no reply"); }

Reply to_reply(const valkeyReply& from) {
  Reply reply;
  const std::string_view text =
      from.str == nullptr ? std::string_view() : std::string_view(from.str, from.len);
  switch (from.type) {
    case VALKEY_REPLY_STATUS:
      return {Reply::Kind::kStatus, 0, std::string(text)};
    case VALKEY_REPLY_STRING:
    case VALKEY_REPLY_VERB:
      return {Reply::Kind::kString, 0, std::string(text)};
    case VALKEY_REPLY_INTEGER:
      return {Reply::Kind::kInteger, from.integer, {}};
    case VALKEY_REPLY_ERROR:
      return {Reply::Kind::kError, 0, std::string(text)};
    case VALKEY_REPLY_ARRAY:
      return {Reply::Kind::kArray, static_cast<long long>(from.elements), {}};
    default:
      return reply;
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
void append_command(std::string* to, const Connection::Words& words) {
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
// Leaves what is still to be moved.
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

}  // namespace

// The library's connection; reading and writing is done here, because the library's own would copy each value
// twice and know no time for the whole of it.
struct Connection::Stream {
  valkeyContext* context = nullptr;
  ssl_st* session = nullptr;  // the context's

  explicit Stream(valkeyContext* connected) : context(connected) {}
  ~Stream() { valkeyFree(context); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  Status wait_for(short events, Deadline deadline) const {
    if (session != nullptr && events == POLLIN && tls_has_more(session)) return Status::ok();
    pollfd watched{context->fd, events, 0};
    for (;;) {
      const milliseconds left = until(deadline);
      const int ready = poll(&watched, 1, static_cast<int>(std::min<long>(left.count(), 1'000'000)));
      if (ready > 0) return Status::ok();
      if (ready < 0 && errno != EINTR) return lost(errno);
      if (ready == 0 && until(deadline).count() == 0) return too_late();
    }
  }
  // Some of what the vectors ask for; 0 only when it is to be tried again.
  Status read_some(std::span<iovec> vectors, Deadline deadline, std::size_t* moved) const {
    *moved = 0;
    if (Status status = wait_for(POLLIN, deadline); !status) return status;
    if (session != nullptr) {
      const long got = tls_read(session, vectors.front().iov_base, vectors.front().iov_len);
      if (got < 0) return until(deadline).count() == 0 ? too_late() : lost(0);
      *moved = static_cast<std::size_t>(got);
      return Status::ok();
    }
    msghdr message{};
    message.msg_iov = vectors.data();
    message.msg_iovlen = vectors.size();
    const ssize_t got = recvmsg(context->fd, &message, MSG_DONTWAIT);
    if (got == 0) return lost(0);
    if (got < 0) return errno == EAGAIN || errno == EINTR ? Status::ok() : lost(errno);
    *moved = static_cast<std::size_t>(got);
    return Status::ok();
  }
  Status write_some(std::span<iovec> vectors, Deadline deadline, std::size_t* moved) const {
    *moved = 0;
    if (Status status = wait_for(POLLOUT, deadline); !status) return status;
    if (session != nullptr) {
      const long put = tls_write(session, vectors.front().iov_base, vectors.front().iov_len);
      if (put < 0) return until(deadline).count() == 0 ? too_late() : lost(0);
      *moved = static_cast<std::size_t>(put);
      return Status::ok();
    }
    msghdr message{};
    message.msg_iov = vectors.data();
    message.msg_iovlen = vectors.size();
    const ssize_t put = sendmsg(context->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (put < 0) return errno == EAGAIN || errno == EINTR ? Status::ok() : lost(errno);
    *moved = static_cast<std::size_t>(put);
    return Status::ok();
  }
};

std::string address_of(const Server& server) {
  if (server.host.empty()) return fmt::format("unix://{} db {}", server.unix_socket, server.database);
  const bool v6 = server.host.find(':') != std::string::npos;
  return fmt::format("{}://{}{}{}:{}/{}", server.tls ? "rediss" : "redis", v6 ? "[" : "", server.host,
                     v6 ? "]" : "", server.port, server.database);
}

Connection::Connection(std::unique_ptr<Stream> stream) : stream_(std::move(stream)) {}
Connection::~Connection() = default;

Status Connection::open(const Server& server, const std::shared_ptr<TlsContext>& tls, Deadline deadline,
                        std::unique_ptr<Connection>* connection, bool* refused) {
  *refused = false;
  const timeval time = to_timeval(until(deadline));
  valkeyOptions options{};
  options.connect_timeout = &time;
  options.command_timeout = &time;  // within TLS, where a wait cannot be told its end
  if (server.host.empty()) {
    VALKEY_OPTIONS_SET_UNIX(&options, server.unix_socket.c_str());
  } else {
    VALKEY_OPTIONS_SET_TCP(&options, server.host.c_str(), server.port);
  }
  auto stream = std::make_unique<Stream>(valkeyConnectWithOptions(&options));
  if (stream->context == nullptr) return Status::error(StatusKind::kIo, "no memory for a connection");
  if (stream->context->err != 0) {
    return Status::error(until(deadline).count() == 0 ? StatusKind::kTimeout : StatusKind::kIo,
                         fmt::format("it cannot be connected to: {}", stream->context->errstr));
  }
  if (server.tls) {
    if (Status status = tls->begin(stream->context, &stream->session, refused); !status) return status;
  }
  std::unique_ptr<Connection> opened(new Connection(std::move(stream)));
  if (Status status = opened->log_in(server, deadline, refused); !status) return status;
  *connection = std::move(opened);
  return Status::ok();
}

// A reply to AUTH is never quoted: it may repeat what was sent.
Status Connection::log_in(const Server& server, Deadline deadline, bool* refused) {
  std::vector<Words> commands;
  const std::string database = std::to_string(server.database);
  if (!server.password.empty()) {
    commands.push_back(server.user.empty() ? Words{"AUTH", server.password}
                                           : Words{"AUTH", server.user, server.password});
  }
  if (server.database != 0) commands.push_back({"SELECT", database});
  commands.push_back({"PING"});
  std::vector<Reply> replies;
  if (Status status = call_all(commands, deadline, &replies); !status) return status;
  for (std::size_t i = 0; i < commands.size(); ++i) {
    if (replies[i].kind != Reply::Kind::kError) continue;
    const std::string_view verb = commands[i][0];
    *refused = verb != "PING" || is_setting(replies[i].text);
    if (verb == "AUTH")
      return Status::error(StatusKind::kIo, "the server refuses the user name or the password");
    if (verb == "SELECT" && !is_setting(replies[i].text)) {
      return Status::error(StatusKind::kIo, fmt::format("the server has no database {}", database));
    }
    return refusal(replies[i].text);
  }
  return Status::ok();
}

Status Connection::broken(Status status) {
  usable_ = false;
  return status;
}

Status Connection::send(std::span<const ConstBytes> pieces, Deadline deadline) {
  std::optional<NoSigpipe> no_signal;
  if (stream_->session != nullptr) no_signal.emplace();
  std::vector<iovec> vectors = vectors_of(pieces);
  for (std::span<iovec> rest = vectors; !rest.empty();) {
    std::size_t moved = 0;
    if (Status status = stream_->write_some(rest, deadline, &moved); !status)
      return broken(std::move(status));
    rest = without(rest, moved);
  }
  return Status::ok();
}

Status Connection::receive(std::span<const Bytes> pieces, Deadline deadline) {
  std::vector<iovec> vectors = vectors_of(pieces);
  for (std::span<iovec> rest = vectors; !rest.empty();) {
    std::size_t moved = 0;
    if (Status status = stream_->read_some(rest, deadline, &moved); !status) return broken(std::move(status));
    rest = without(rest, moved);
  }
  return Status::ok();
}

Status Connection::next_reply(Deadline deadline, Reply* reply) {
  valkeyReader* reader = stream_->context->reader;
  std::array<char, 4096> buffer;
  for (;;) {
    void* found = nullptr;
    if (valkeyReaderGetReply(reader, &found) != VALKEY_OK) return broken(nonsense());
    if (found != nullptr) {
      *reply = to_reply(*static_cast<valkeyReply*>(found));
      freeReplyObject(found);
      return Status::ok();
    }
    iovec vector{buffer.data(), buffer.size()};
    std::size_t moved = 0;
    if (Status status = stream_->read_some({&vector, 1}, deadline, &moved); !status) {
      return broken(std::move(status));
    }
    if (moved > 0 && valkeyReaderFeed(reader, buffer.data(), moved) != VALKEY_OK) return broken(nonsense());
  }
}

Status Connection::call(const Words& command, Deadline deadline, Reply* reply) {
  std::vector<Reply> replies;
  if (Status status = call_all({&command, 1}, deadline, &replies); !status) return status;
  *reply = std::move(replies.front());
  return Status::ok();
}

Status Connection::call_all(std::span<const Words> commands, Deadline deadline, std::vector<Reply>* replies) {
  std::string text;
  for (const Words& command : commands) append_command(&text, command);
  const ConstBytes bytes = std::as_bytes(std::span(text));
  if (Status status = send({&bytes, 1}, deadline); !status) return status;
  replies->resize(commands.size());
  for (Reply& reply : *replies) {
    if (Status status = next_reply(deadline, &reply); !status) return status;
  }
  return Status::ok();
}

Status Connection::set(std::string_view key, std::span<const ConstBytes> pieces, const Words& options,
                       Deadline deadline, Reply* reply) {
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
  return next_reply(deadline, reply);
}

Status Connection::get(std::string_view key, std::span<const Bytes> pieces, Deadline deadline, Reply* reply,
                       std::uint64_t* length) {
  std::string text;
  append_command(&text, {"GET", key});
  const ConstBytes bytes = std::as_bytes(std::span(text));
  if (Status status = send({&bytes, 1}, deadline); !status) return status;
  // The line before the value, and what came with it.
  std::array<char, 64> start;
  std::size_t have = 0;
  std::string_view line;
  while (line.empty()) {
    iovec vector{start.data() + have, start.size() - have};
    std::size_t moved = 0;
    if (Status status = stream_->read_some({&vector, 1}, deadline, &moved); !status) {
      return broken(std::move(status));
    }
    have += moved;
    const std::string_view seen(start.data(), have);
    if (have > 0 && seen[0] != '$') {  // an error, which the library's reader takes
      if (valkeyReaderFeed(stream_->context->reader, start.data(), have) != VALKEY_OK)
        return broken(nonsense());
      if (Status status = next_reply(deadline, reply); !status) return status;
      return reply->kind == Reply::Kind::kError ? Status::ok() : broken(nonsense());
    }
    const std::size_t end = seen.find("\r\n");
    if (end != seen.npos) line = seen.substr(0, end + 2);
    if (line.empty() && have == start.size()) return broken(nonsense());
  }
  long long announced = 0;
  const char* digits_end = line.data() + line.size() - 2;
  const auto [stop, error] = std::from_chars(line.data() + 1, digits_end, announced);
  if (error != std::errc() || stop != digits_end || announced < -1) return broken(nonsense());
  const std::size_t early = have - line.size();
  if (announced == -1) {
    *reply = {};
    return early == 0 ? Status::ok() : broken(nonsense());
  }
  *length = static_cast<std::uint64_t>(announced);
  std::size_t expected = 0;
  for (const Bytes& piece : pieces) expected += piece.size();
  if (*length != expected || early > expected + 2) {
    usable_ = false;
    *reply = {Reply::Kind::kArray, 0, {}};
    return *length == expected ? nonsense() : Status::ok();
  }
  std::array<std::byte, 2> tail;
  std::vector<Bytes> all(pieces.begin(), pieces.end());
  all.emplace_back(tail);
  const char* from = start.data() + line.size();
  std::size_t left = early;
  for (Bytes& piece : all) {
    const std::size_t part = std::min(left, piece.size());
    std::memcpy(piece.data(), from, part);
    piece = piece.subspan(part);
    from += part;
    left -= part;
  }
  if (Status status = receive(all, deadline); !status) return status;
  if (tail != std::array{std::byte{'\r'}, std::byte{'\n'}}) return broken(nonsense());
  *reply = {Reply::Kind::kString, 0, {}};
  return Status::ok();
}

bool Connection::stale() const {
  if (stream_->session != nullptr && tls_has_more(stream_->session)) return true;
  pollfd watched{stream_->context->fd, POLLIN | POLLRDHUP, 0};
  return poll(&watched, 1, 0) != 0;
}

}  // namespace kv_offload::redis
