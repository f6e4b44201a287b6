// A connection to a Redis or Valkey server: commands and their replies, each within a time. libvalkey
// parses replies; the bytes of records go from and into the rows themselves, without a copy of ours.
//
// One thread at a time. After a call that is not ok the stream may be anywhere: the connection is not
// `usable()` any more, each further call fails at once, and it is thrown away. An error reply is an answer
// and leaves it usable.
#pragma once

#include <chrono>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "storage/opened_as_it_comes.h"
#include "storage/redis/reply.h"

namespace kv_offload::redis {

struct Server {
  std::string host;  // a name or an address; empty: unix_socket
  std::uint16_t port = 6379;
  std::string unix_socket;
  unsigned database = 0;
  bool tls = false;
  std::string ca_file;  // who may have signed the server's certificate; empty: the system's
  std::string user;     // empty: the server's default user
  std::string password;
  std::string tls_name;  // that the certificate must carry; empty: host
};
// "rediss://host:6379/0"; neither user nor password.
std::string address_of(const Server& server);
// Was OpenSSL there when this was built.
bool has_tls();

// A moment of real time by which a call has ended, one way or the other: what it waits for is a socket.
using Deadline = std::chrono::steady_clock::time_point;

// What to trust, and what both sides of a TLS connection must know; shared by all connections to a server.
class TlsContext;
// Null without TLS. Throws ResourceError: no TLS in this build, or a ca_file that cannot be read.
std::shared_ptr<TlsContext> make_tls_context(const Server& server);

class Connection {
 public:
  // Connects, makes sure of the server (TLS: its certificate and name), logs in and selects the database.
  // Name look-up is the system's and has a time of its own. *refused: the server, or its certificate, said no
  // to how it is spoken to, which waiting does not change.
  static Status open(const Server& server, const std::shared_ptr<TlsContext>& tls, Deadline deadline,
                     std::unique_ptr<Connection>* connection, bool* refused);
  ~Connection();
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  using Words = std::vector<std::string_view>;
  Status call(const Words& command, Deadline deadline, Reply* reply);
  // In one go; as many replies as commands when ok.
  Status call_all(std::span<const Words> commands, Deadline deadline, std::vector<Reply>* replies);
  // The two halves of it, so that several servers work at the same time.
  Status send_all(std::span<const Words> commands, Deadline deadline);
  Status receive_all(std::size_t count, Deadline deadline, std::vector<Reply>* replies);
  // Of a map of the slots of a cluster, which may be much longer than all other replies.
  Status call_for_map(const Words& command, Deadline deadline, Reply* reply);
  // SET of a value in pieces, which live until it returns. `options` follow the value.
  Status set(std::string_view key, std::span<const std::span<const std::byte>> pieces, const Words& options,
             Deadline deadline, Reply* reply);
  // GET into the pieces, which are filled from the front. *reply is kString without text when the value has
  // at least `least` bytes and fits into the pieces. A value of another length is not read: the reply is
  // kWrongLength, *length is that length, and the connection is not usable any more. `observer` sees the
  // bytes as they arrive.
  Status get(std::string_view key, std::span<const std::span<std::byte>> pieces, std::uint64_t least,
             Deadline deadline, Reply* reply, std::uint64_t* length, FillObserver* observer = nullptr) {
    return get(Words{"GET", key}, pieces, least, deadline, reply, length, observer);
  }
  // The same of another command that is answered by a value, such as GETRANGE.
  Status get(const Words& command, std::span<const std::span<std::byte>> pieces, std::uint64_t least,
             Deadline deadline, Reply* reply, std::uint64_t* length, FillObserver* observer = nullptr);

  bool usable() const { return usable_; }
  // Idle until now: has the server closed it, or sent what nobody asked for.
  bool stale() const;
  int descriptor() const;  // the socket's, which no process that is started inherits

 private:
  struct Stream;  // the socket, and the library's reader of replies
  explicit Connection(std::unique_ptr<Stream> stream);

  Status log_in(const Server& server, Deadline deadline, bool* refused);
  Status send(std::span<const std::span<const std::byte>> pieces, Deadline deadline);
  Status next_reply(Deadline deadline, Reply* reply);
  Status begin_call();
  Status end_call();

  const std::unique_ptr<Stream> stream_;
  bool usable_ = true;
  std::size_t fed_ = 0;  // bytes of replies in this call
  std::size_t most_reply_bytes_;
};

}  // namespace kv_offload::redis
