// SPDX-License-Identifier: Apache-2.0
// A connection to a Redis or Valkey server: sends commands and reads replies, each within a deadline.
// libvalkey parses the replies. Record bytes move directly between the socket and the host memory rows,
// without an extra copy.
//
// One thread at a time. After a call that is not ok, the stream position is unknown: `usable()` is false,
// every further call fails at once, and the caller must discard the connection. An error reply is a valid
// answer and leaves the connection usable.
#pragma once

#include <chrono>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "backends/redis/reply.h"
#include "base/status.h"
#include "record/streaming_record_reader.h"

namespace kv_offload::redis {

struct Server {
  std::string host;  // a name or an address; empty: use unix_socket
  std::uint16_t port = 6379;
  std::string unix_socket;
  unsigned database = 0;
  bool tls = false;
  std::string ca_file;  // CA certificates to trust; empty: the system's
  std::string user;     // empty: the server's default user
  std::string password;
  std::string tls_name;  // the name that the certificate must carry; empty: host
};
// Returns an address such as "rediss://host:6379/0", without user and password.
std::string address_of(const Server& server);
// True if this build has TLS (OpenSSL was found at build time).
bool has_tls();

// The real time by which a call must end, with success or failure. Calls wait for sockets, so this is not
// engine time.
using Deadline = std::chrono::steady_clock::time_point;

// The trusted certificates and TLS settings, shared by all connections to a server.
class TlsContext;
// Returns null without TLS. Throws ResourceError: this build has no TLS, or ca_file cannot be read.
std::shared_ptr<TlsContext> make_tls_context(const Server& server);

class Connection {
 public:
  // Connects, verifies the server (TLS: its certificate and name), logs in and selects the database.
  // *refused: the server rejected the login or the database, or its certificate is not trusted. Waiting does
  // not help then.
  static Status open(const Server& server, const std::shared_ptr<TlsContext>& tls, Deadline deadline,
                     std::unique_ptr<Connection>* connection, bool* refused);
  ~Connection();
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  using Command = std::vector<std::string_view>;
  Status call(const Command& command, Deadline deadline, Reply* reply);
  // Sends all commands at once. When ok, there are as many replies as commands.
  Status call_all(std::span<const Command> commands, Deadline deadline, std::vector<Reply>* replies);
  // The two halves of call_all(), so that several servers can work at the same time.
  Status send_all(std::span<const Command> commands, Deadline deadline);
  Status receive_all(std::size_t count, Deadline deadline, std::vector<Reply>* replies);
  // Like call(), for the slot map of a cluster, which may be much longer than all other replies.
  Status call_for_map(const Command& command, Deadline deadline, Reply* reply);
  // SET of a value in pieces. The pieces must stay valid until the call returns. `options` follow the value.
  Status set(std::string_view key, std::span<const std::span<const std::byte>> pieces, const Command& options,
             Deadline deadline, Reply* reply);
  // GET into the pieces, which are filled from the front. The value must have at least `least` bytes and fit
  // into the pieces; then *reply is kString without text. A value of another length is not read: *reply is
  // kWrongLength, *length is its length, and the connection is no longer usable. `observer` is called with
  // the bytes as they arrive.
  Status get(std::string_view key, std::span<const std::span<std::byte>> pieces, std::uint64_t least,
             Deadline deadline, Reply* reply, std::uint64_t* length, ReadProgressSink* observer = nullptr) {
    return get(Command{"GET", key}, pieces, least, deadline, reply, length, observer);
  }
  // The same for another command whose reply is a value, such as GETRANGE.
  Status get(const Command& command, std::span<const std::span<std::byte>> pieces, std::uint64_t least,
             Deadline deadline, Reply* reply, std::uint64_t* length, ReadProgressSink* observer = nullptr);

  // For a subscriber: appends the complete messages that have arrived, without waiting for others. The
  // deadline is that of one message that has begun to arrive.
  Status receive_pushed(Deadline deadline, std::vector<Reply>* messages);
  // Sends a command whose reply arrives as a message.
  Status send_pushed(const Command& command, Deadline deadline);

  bool usable() const { return usable_; }
  // True if the server closed this idle connection or sent unexpected bytes.
  bool stale() const;
  int descriptor() const;  // the socket's descriptor; close-on-exec

 private:
  struct Stream;  // the socket and the libvalkey reply reader
  explicit Connection(std::unique_ptr<Stream> stream);

  Status log_in(const Server& server, Deadline deadline, bool* refused);
  Status send(std::span<const std::span<const std::byte>> pieces, Deadline deadline);
  Status next_reply(Deadline deadline, Reply* reply);
  struct ValueStart;
  Status read_value_start(Deadline deadline, ValueStart* start, Reply* reply);
  Status read_value(std::span<const std::span<std::byte>> pieces, std::span<const char> early,
                    std::uint64_t length, Deadline deadline, ReadProgressSink* observer);
  Status begin_call();
  Status end_call();

  const std::unique_ptr<Stream> stream_;
  bool usable_ = true;
  std::size_t fed_ = 0;     // reply bytes read in this call
  std::size_t unread_ = 0;  // bytes read since the last complete message, see receive_pushed()
  std::size_t most_reply_bytes_;
};

}  // namespace kv_offload::redis
