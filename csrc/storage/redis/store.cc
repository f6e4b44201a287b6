#include "storage/redis/store.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <utility>

#include "storage/record_pieces.h"

namespace kv_offload {
namespace redis {
namespace {

constexpr unsigned kMemoryEvery = 10;  // calls of maintain()

// "used_memory:123\r\n" of what INFO answers; 0 when it is not there.
std::uint64_t figure_of(std::string_view info, std::string_view name) {
  const std::string start = fmt::format("\n{}:", name);
  const std::size_t at = info.find(start);
  std::uint64_t value = 0;
  if (at != info.npos) {
    std::from_chars(info.data() + at + start.size(), info.data() + info.size(), value);
  }
  return value;
}

// A server that answers something else is not to be believed, whatever it did.
Status unexpected() { return Status::error(StatusKind::kIo, "the server's answer fits no such command"); }
Status absent() { return Status::error(StatusKind::kNotFound, "no record of this key"); }

}  // namespace

// ---- connections

Status Connections::take(Deadline deadline, std::unique_ptr<Connection>* connection, bool* refused) {
  for (;;) {
    std::unique_ptr<Connection> idle;
    {
      const MutexLock lock(mutex_);
      if (!idle_.empty()) {
        idle = std::move(idle_.back());
        idle_.pop_back();
      }
    }
    if (!idle) return Connection::open(server_, tls_, deadline, connection, refused);
    if (idle->stale()) continue;
    *connection = std::move(idle);
    return Status::ok();
  }
}

void Connections::give_back(std::unique_ptr<Connection> connection) {
  if (!connection || !connection->usable()) return;
  const MutexLock lock(mutex_);
  if (!closed_) idle_.push_back(std::move(connection));
}

void Connections::close() {
  std::vector<std::unique_ptr<Connection>> idle;
  const MutexLock lock(mutex_);
  closed_ = true;
  idle.swap(idle_);
}

class RedisStore::Borrowed {
 public:
  explicit Borrowed(Connections& connections) : connections_(connections) {}
  ~Borrowed() { connections_.give_back(std::move(connection_)); }
  Borrowed(const Borrowed&) = delete;
  Borrowed& operator=(const Borrowed&) = delete;
  Status take(Deadline deadline) {
    bool refused = false;
    return take(deadline, &refused);
  }
  Status take(Deadline deadline, bool* refused) { return connections_.take(deadline, &connection_, refused); }
  Connection& operator*() const { return *connection_; }
  Connection* operator->() const { return connection_.get(); }

 private:
  Connections& connections_;
  std::unique_ptr<Connection> connection_;
};

RedisStore::RedisStore(const RedisTierOptions& options)
    : options_(options),
      prefix_(fmt::format("{}:{}:", options.key_prefix, hex_of(options.namespace_id))),
      start_key_(prefix_ + "epoch"),
      connections_(options.server) {
  std::string found;
  bool refused = false;
  const Status status = ask_for_start(&found, &refused);
  if (refused) throw_resource("redis tier at {}: {}", address_of(options.server), status.message());
  epochs_.start_with(found);
}

std::string RedisStore::key_of(const ChunkKey& key, const EpochPtr& epoch) const {
  return fmt::format("{}{}:{}", prefix_, NamedEpochs::name_of(epoch), key.hex());
}

// ---- records

Status RedisStore::write(const TierOp& op, const EpochPtr& epoch, std::uint64_t* moved) {
  const Deadline until = deadline();
  const std::string key = key_of(op.key, epoch);
  const std::string ttl = std::to_string(options_.ttl_seconds);
  const bool expires = options_.ttl_seconds > 0;
  Borrowed connection(connections_);
  if (Status status = connection.take(until); !status) return status;
  // Another may have written it: asking costs less than its bytes. One that expires lives on.
  Reply reply;
  const Connection::Words ask =
      expires ? Connection::Words{"EXPIRE", key, ttl} : Connection::Words{"EXISTS", key};
  if (Status status = connection->call(ask, until, &reply); !status) return status;
  if (reply.kind == Reply::Kind::kError) return refusal(reply.text);
  if (reply.kind != Reply::Kind::kInteger) return unexpected();
  if (reply.integer == 1) return Status::ok();

  const RecordPieces record(op, options_.namespace_id);
  record.seal();
  const Connection::Words options = expires ? Connection::Words{"EX", ttl} : Connection::Words{};
  if (Status status = connection->set(key, record.all<const std::byte>(), options, until, &reply); !status)
    return status;
  if (reply.kind == Reply::Kind::kError) return refusal(reply.text);
  if (reply.kind != Reply::Kind::kStatus || reply.text != "OK") return unexpected();
  *moved = record.payload_bytes();
  return Status::ok();
}

Status RedisStore::read(const TierOp& op, const EpochPtr& epoch, std::uint64_t* moved) {
  const Deadline until = deadline();
  const std::string key = key_of(op.key, epoch);
  const RecordPieces record(op, options_.namespace_id);
  const std::uint64_t right_length = record.bytes();
  Reply reply;
  std::uint64_t length = 0;
  {
    Borrowed connection(connections_);
    if (Status status = connection.take(until); !status) return status;
    if (Status status = connection->get(key, record.all<std::byte>(), until, &reply, &length); !status)
      return status;
  }
  Status status;
  switch (reply.kind) {
    case Reply::Kind::kNil:
      return absent();
    case Reply::Kind::kError:
      status = refusal(reply.text);
      break;
    case Reply::Kind::kArray:
      status = Status::error(StatusKind::kCorrupt,
                             fmt::format("{} bytes long, expected {}", length, right_length));
      break;
    default:
      status = record.verify();
      if (status) *moved = record.payload_bytes();
  }
  if (status.kind() == StatusKind::kCorrupt && !options_.read_only) {
    remove_wrong(key, right_length, until,
                 reply.kind == Reply::Kind::kString ? record.header_page() : std::span<std::byte>());
  }
  return status;
}

// What was found wrong is removed only if it is still there: one of a right length and another header has
// taken its place. WATCH makes sure of the time in between.
void RedisStore::remove_wrong(const std::string& key, std::uint64_t right_length, Deadline until,
                              std::span<const std::byte> header_page) {
  Borrowed connection(connections_);
  if (!connection.take(until)) return;
  const std::string end = std::to_string(kRecordHeaderBytes - 1);
  const std::array look{Connection::Words{"WATCH", key}, Connection::Words{"STRLEN", key},
                        Connection::Words{"GETRANGE", key, "0", end}};
  std::vector<Reply> seen;
  if (!connection->call_all(look, until, &seen)) return;
  const Reply &length = seen[1], &header = seen[2];
  const bool other_type = length.kind == Reply::Kind::kError && length.text.starts_with("WRONGTYPE");
  const bool other_length =
      length.kind == Reply::Kind::kInteger && length.integer != static_cast<long long>(right_length);
  const bool same_header = !header_page.empty() && header.kind == Reply::Kind::kString &&
                           header.text.size() == header_page.size() &&
                           std::memcmp(header.text.data(), header_page.data(), header_page.size()) == 0;
  const bool watched = seen[0].kind != Reply::Kind::kError;
  std::vector<Reply> done;
  if (watched && (other_type || other_length || same_header)) {
    const std::array remove{Connection::Words{"MULTI"}, Connection::Words{"DEL", key},
                            Connection::Words{"EXEC"}};
    (void)connection->call_all(remove, until, &done);
  } else {
    (void)connection->call_all(std::array{Connection::Words{"UNWATCH"}}, until, &done);
  }
}

Status RedisStore::locate(std::span<const ChunkKey> keys, KeyOrder, const EpochPtr& epoch,
                          std::vector<bool>* present) {
  const Deadline until = deadline();
  std::vector<std::string> names;
  names.reserve(keys.size());
  for (const ChunkKey& key : keys) names.push_back(key_of(key, epoch));
  std::vector<Connection::Words> commands;
  commands.reserve(names.size());
  for (const std::string& name : names) commands.push_back({"EXISTS", name});
  Borrowed connection(connections_);
  if (Status status = connection.take(until); !status) return status;
  std::vector<Reply> replies;
  if (Status status = connection->call_all(commands, until, &replies); !status) return status;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (replies[i].kind == Reply::Kind::kError) return refusal(replies[i].text);
    if (replies[i].kind != Reply::Kind::kInteger) return unexpected();
    (*present)[i] = replies[i].integer == 1;
  }
  return Status::ok();
}

// ---- epochs

Status RedisStore::put_start(Connection& connection, const std::string& name, bool if_none, bool* done) {
  Connection::Words command{"SET", start_key_, name};
  if (if_none) command.emplace_back("NX");
  Reply reply;
  if (Status status = connection.call(command, deadline(), &reply); !status) return status;
  if (reply.kind == Reply::Kind::kError) return refusal(reply.text);
  *done = reply.kind == Reply::Kind::kStatus;
  return Status::ok();
}

Status RedisStore::ask_for_start(std::string* found, bool* refused) {
  const std::string known = epochs_.of_those_who_start();
  const Deadline until = deadline();
  Borrowed connection(connections_);
  if (Status status = connection.take(until, refused); !status) return status;
  // Twice: another may be faster in putting one there, or the server drops it just now.
  for (int tries = 0; tries < 2; ++tries) {
    const std::array ask{Connection::Words{"GET", start_key_}, Connection::Words{"INFO", "cluster"}};
    std::vector<Reply> replies;
    if (Status status = connection->call_all(ask, until, &replies); !status) return status;
    const Reply& start = replies[0];
    if (replies[1].text.find("cluster_enabled:1") != std::string::npos) {
      *refused = true;
      return refusal("MOVED");
    }
    const bool other_type = start.text.starts_with("WRONGTYPE");
    if (start.kind == Reply::Kind::kError && !other_type) {
      *refused = is_setting(start.text);
      return refusal(start.text);
    }
    if (!other_type && start.kind != Reply::Kind::kString && start.kind != Reply::Kind::kNil)
      return unexpected();
    found->clear();
    if (start.kind == Reply::Kind::kString && NamedEpochs::is_name(start.text)) *found = start.text;
    if (!found->empty() || options_.read_only) return Status::ok();
    // What lies there and is no name is in nobody's use.
    const bool if_none = start.kind == Reply::Kind::kNil;
    const std::string name = known.empty() ? NamedEpochs::new_name() : known;
    bool done = false;
    if (Status status = put_start(*connection, name, if_none, &done); !status) return status;
    if (done) *found = name;
    if (done) return Status::ok();
  }
  return Status::error(StatusKind::kIo, "the server keeps no epoch");
}

void RedisStore::maintain() {
  if (stopped_) return;  // nothing here would be lost
  const std::string known = epochs_.of_those_who_start();
  std::string found;
  bool refused = false;
  if (!ask_for_start(&found, &refused)) return;
  if (maintained_++ % kMemoryEvery == 0) look_at_memory();
  epochs_.note_kept(known, found, options_.read_only);
}

void RedisStore::look_at_memory() {
  Borrowed connection(connections_);
  Reply reply;
  if (!connection.take(deadline()) || !connection->call({"INFO", "memory"}, deadline(), &reply)) return;
  const MutexLock lock(mutex_);
  used_bytes_ = figure_of(reply.text, "used_memory");
  max_bytes_ = figure_of(reply.text, "maxmemory");
}

Status RedisStore::begin_epoch() {
  const auto ask = [&](std::string* kept) {
    bool refused = false;
    return ask_for_start(kept, &refused);
  };
  const auto put = [&](const std::string& name) {
    Borrowed connection(connections_);
    if (Status status = connection.take(deadline()); !status) return status;
    bool done = false;
    if (Status status = put_start(*connection, name, false, &done); !status) return status;
    return done ? Status::ok() : Status::error(StatusKind::kIo, "the server took no new epoch");
  };
  return epochs_.begin(ask, put);
}

void RedisStore::figures(TierStats* stats) const {
  stats->apart = epochs_.apart();
  const MutexLock lock(mutex_);
  stats->bytes = used_bytes_;
  stats->capacity_bytes = max_bytes_;
  stats->names_complete = stats->scan_complete = true;
}

}  // namespace redis

std::unique_ptr<Tier> make_redis_tier(const RedisTierOptions& options) {
  return make_pooled_tier(std::make_unique<redis::RedisStore>(options), options);
}

}  // namespace kv_offload
