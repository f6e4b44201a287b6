// SPDX-License-Identifier: Apache-2.0
#include "backends/redis/store.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <optional>
#include <utility>

#include "record/streaming_record_reader.h"
#include "tier/encrypted_key_tier.h"

namespace kv_offload {
namespace redis {
namespace {

constexpr unsigned kMemoryInterval = 10;  // calls of maintain()
constexpr std::size_t kMaxDamagedKeys = 4096;

// Parses "used_memory:123\r\n" from an INFO reply; 0 if missing.
std::uint64_t figure_of(std::string_view info, std::string_view name) {
  const std::string start = fmt::format("\n{}:", name);
  const std::size_t at = info.find(start);
  std::uint64_t value = 0;
  if (at != info.npos) {
    std::from_chars(info.data() + at + start.size(), info.data() + info.size(), value);
  }
  return value;
}

// Returns the memory that a value takes at most: allocators round its size up to the next of four steps
// between two powers of two.
std::uint64_t memory_of(std::uint64_t bytes) {
  constexpr std::uint64_t kOverhead = std::uint64_t{64} << 10;  // of the key and of the connection
  return bytes + bytes / 4 + kOverhead;
}

// Adds to a sum while it lives.
class Share {
 public:
  Share(std::atomic<std::uint64_t>& sum, std::uint64_t bytes) : sum_(sum), bytes_(bytes) { sum_ += bytes_; }
  ~Share() { sum_ -= bytes_; }
  Share(const Share&) = delete;
  Share& operator=(const Share&) = delete;

 private:
  std::atomic<std::uint64_t>& sum_;
  const std::uint64_t bytes_;
};

Status absent() { return Status::error(StatusKind::kNotFound, "no record of this key"); }

// Runs the command in its own transaction on a connection that watches a key. The command is sent only after
// MULTI succeeded: after a refused MULTI the server would run it at once, even if the key has changed.
// *reply: the first error caused by server state rather than by permissions, so that a demoted primary is
// detected. *ended: true if the command was executed, or if the key has changed.
Status in_transaction(Connection& connection, const Connection::Command& command, Deadline until,
                      Reply* reply, bool* ended) {
  std::vector<Reply> done(1);
  if (Status status = connection.call({"MULTI"}, until, &done[0]); !status) return status;
  const bool begun = done[0].kind == Reply::Kind::kStatus && done[0].text == "OK";
  std::vector<Connection::Command> rest{{"UNWATCH"}};
  if (begun) rest = {command, {"EXEC"}};
  std::vector<Reply> replies;
  if (Status status = connection.call_all(rest, until, &replies); !status) return status;
  done.insert(done.end(), replies.begin(), replies.end());
  const auto refused = std::find_if(done.begin(), done.end(),
                                    [](const Reply& one) { return one.kind == Reply::Kind::kError; });
  if (refused != done.end() && !is_configuration_error(refused->text)) *reply = *refused;
  // EXEC returns an array with the command's reply, or nil if the watched key has changed.
  const Reply& result = done.back();
  const bool is_executed = result.kind == Reply::Kind::kArray && result.elements.size() == 1 &&
                           result.elements[0].kind != Reply::Kind::kError;
  *ended = begun && (is_executed || result.kind == Reply::Kind::kNil);
  return Status::ok();
}

std::vector<Server> seeds_of(const RedisTierOptions& options) {
  std::vector<Server> seeds{options.server};
  seeds.insert(seeds.end(), options.other_nodes.begin(), options.other_nodes.end());
  return seeds;
}

}  // namespace

RedisStore::RedisStore(const RedisTierOptions& options)
    : options_(options),
      prefix_(fmt::format("{}:{}:", options.key_prefix, hex_of(options.namespace_id))),
      startup_epoch_key_(prefix_ + "epoch"),
      cluster_(seeds_of(options)),
      removal_watch_(cluster_, prefix_, options.op_timeout),
      form_(options.form) {
  std::string found;
  bool refused = false;
  Status status = fetch_startup_epoch(EpochRegistry::name_if_none(options.epoch), &found, &refused);
  const std::string name = EpochRegistry::replacement_of(found, options.epoch);
  std::string before;
  if (status && !name.empty() && !options.read_only) {
    before = found;
    status = replace_startup_epoch(before, name);
    // Another engine may have been faster.
    if (status) status = fetch_startup_epoch(EpochRegistry::new_name(), &found, &refused);
    if (status && found == before) {
      status = Status::error(StatusKind::kDeclined,
                             "the server did not replace the epoch: its user needs the commands WATCH, "
                             "MULTI, EXEC and SET");
    }
  }
  const Status usable = EpochRegistry::startup_problem(options.epoch, status, options.read_only);
  if (refused || !usable) {
    throw_resource("redis tier at {}: {}", address_of(options.server),
                   refused ? status.message() : usable.message());
  }
  epochs_.start_with(found, before, status);
}

std::string RedisStore::epoch_problem() const {
  const std::string problem = epochs_.start_problem();
  return problem.empty() ? problem : fmt::format("{}: {}", address_of(options_.server), problem);
}

std::string RedisStore::key_of(const ChunkKey& key, const EpochPtr& epoch) const {
  return records_prefix(epoch) + key.hex();
}

std::string RedisStore::records_prefix(const EpochPtr& epoch) const {
  return fmt::format("{}{}:", prefix_, EpochRegistry::name_of(epoch));
}

// In a cluster, half of the op deadline: a silent node then fails its own ops before the tier treats the
// whole device as stuck.
Deadline RedisStore::deadline() const {
  return std::chrono::steady_clock::now() +
         (cluster_.is_cluster() ? options_.op_timeout / 2 : options_.op_timeout);
}

Status RedisStore::call(OpKind kind, const Connection::Command& words, Deadline until, Reply* reply) {
  return cluster_.at(words[1], kind, until, reply, [&](Connection& connection, Reply* answer) {
    return connection.call(words, until, answer);
  });
}

// ---- records

Status RedisStore::write(const TierOp& op, const EpochPtr& epoch, std::uint64_t* moved) {
  const Deadline until = deadline();
  const std::string key = key_of(op.key, epoch);
  const std::string ttl = std::to_string(options_.ttl_seconds);
  const bool expires = options_.ttl_seconds > 0;
  Reply reply;
  // A copy has listed the records that exist.
  if (!take_damaged_key(key) && !op.is_whole_record && existence_check_.should_check()) {
    // EXPIRE also renews the TTL of a record that exists.
    const Connection::Command ask =
        expires ? Connection::Command{"EXPIRE", key, ttl} : Connection::Command{"EXISTS", key};
    if (Status status = call(OpKind::kWrite, ask, until, &reply); !status) return status;
    if (reply.kind == Reply::Kind::kError) return refusal(reply.text);
    if (reply.kind != Reply::Kind::kInteger) return unexpected_reply();
    existence_check_.record_result(reply.integer == 1);
    if (reply.integer == 1) return Status::ok();
  }

  OutgoingRecord record(form_, options_.namespace_id, op);
  if (Status status = record.encode(); !status) return status;
  if (Status status = record.finish(); !status) return status;
  const Connection::Command options = expires ? Connection::Command{"EX", ttl} : Connection::Command{};
  const Share share(writing_, options_.may_evict ? 0 : memory_of(record.bytes()));
  Status room;
  const auto set = [&](Connection& connection, Reply* answer) {
    if (!options_.may_evict) room = check_room(connection, record.bytes(), until);
    if (!room) {  // no failure of the node
      *answer = {};
      return Status::ok();
    }
    return connection.set(key, record.pieces(), options, until, answer);
  };
  if (Status status = cluster_.at(key, OpKind::kWrite, until, &reply, set); !status) return status;
  if (!room) return room;
  if (reply.kind == Reply::Kind::kError) return refusal(reply.text);
  if (reply.kind != Reply::Kind::kStatus || reply.text != "OK") return unexpected_reply();
  *moved = record.written();
  return Status::ok();
}

Status RedisStore::check_room(Connection& connection, std::uint64_t bytes, Deadline until) {
  // INFO uses up an earlier ASKING, so another one is sent. An unnecessary ASKING has no effect.
  std::vector<Connection::Command> commands{{"INFO", "memory"}};
  if (cluster_.is_cluster()) commands.push_back({"ASKING"});
  std::vector<Reply> replies;
  if (Status status = connection.call_all(commands, until, &replies); !status) return status;
  const Reply& reply = replies.front();
  if (reply.kind == Reply::Kind::kError) return refusal(reply.text);
  const std::uint64_t used = figure_of(reply.text, "used_memory"), most = figure_of(reply.text, "maxmemory");
  if (most == 0 || used + writing_.load() <= most) return Status::ok();
  return Status::error(
      StatusKind::kNoSpace,
      fmt::format("{} of maxmemory {} in use: the server would evict other values for a record "
                  "of {}",
                  format_bytes(used), format_bytes(most), format_bytes(bytes)));
}

Status RedisStore::read(const TierOp& op, const EpochPtr& epoch, std::uint64_t* moved) {
  const Deadline until = deadline();
  const std::string key = key_of(op.key, epoch);
  // Created again for each node that is asked.
  std::optional<IncomingRecord> record;
  std::optional<StreamingRecordReader> opened;
  Reply reply;
  std::uint64_t length = 0;
  const auto work = [&](Connection& connection, Reply* answer) {
    opened.reset();
    opened.emplace(record.emplace(form_, options_.namespace_id, op));
    return connection.get(key, record->pieces(), kRecordHeaderBytes, until, answer, &length, &*opened);
  };
  Status status = cluster_.at(key, OpKind::kRead, until, &reply, work);
  if (!status) return status;
  switch (reply.kind) {
    case Reply::Kind::kNil:
      return absent();
    case Reply::Kind::kError:
      status = refusal(reply.text);
      break;
    case Reply::Kind::kWrongLength:
      status = Status::error(StatusKind::kCorrupt, fmt::format("{} bytes long, expected {} to {}", length,
                                                               kRecordHeaderBytes, record->max_bytes()));
      break;
    default:
      status = record->check_length(length);
      if (status) status = opened->finish(length);
      if (status) *moved = record->payload_bytes();
  }
  // Damaged, or written in another version of the format.
  const bool wrong = status.kind() == StatusKind::kCorrupt || status.kind() == StatusKind::kNotFound;
  if (wrong && !options_.read_only) {
    const bool removed =
        remove_damaged(key, *record, until,
                       reply.kind == Reply::Kind::kString ? record->header_page() : std::span<std::byte>());
    const MutexLock lock(mutex_);
    if (!removed && damaged_keys_.size() < kMaxDamagedKeys) damaged_keys_.insert(key);
  }
  return status;
}

// True once after a read found a bad value and could not remove it.
bool RedisStore::take_damaged_key(const std::string& key) {
  const MutexLock lock(mutex_);
  return damaged_keys_.erase(key) > 0;
}

// Removes the bad value only if it is still there. A value of a valid length with another header has replaced
// it. WATCH covers the time between the check and DEL. While its slot is being moved, the node answers only
// the first command; then nothing is removed.
bool RedisStore::remove_damaged(const std::string& key, const IncomingRecord& record, Deadline until,
                                std::span<const std::byte> header_page) {
  const std::string end = std::to_string(kRecordHeaderBytes - 1);
  bool ended = false;
  const auto work = [&](Connection& connection, Reply* reply) {
    ended = false;
    const std::array watch_and_read{Connection::Command{"WATCH", key}, Connection::Command{"STRLEN", key},
                                    Connection::Command{"GETRANGE", key, "0", end}};
    std::vector<Reply> seen, done;
    if (Status status = connection.call_all(watch_and_read, until, &seen); !status) return status;
    *reply = seen[0];
    const Reply &length = seen[1], &header = seen[2];
    // Each of these proves that the value is still bad: a wrong type, an impossible length, the same header.
    const bool other_type = length.kind == Reply::Kind::kError && length.text.starts_with("WRONGTYPE");
    const bool other_length = length.kind == Reply::Kind::kInteger &&
                              !record.check_length(static_cast<std::uint64_t>(length.integer));
    const bool same_header = !header_page.empty() && header.kind == Reply::Kind::kString &&
                             header.text.size() == header_page.size() &&
                             std::memcmp(header.text.data(), header_page.data(), header_page.size()) == 0;
    const bool watched = seen[0].kind != Reply::Kind::kError;
    if (watched && (other_type || other_length || same_header)) {
      return in_transaction(connection, {"DEL", key}, until, reply, &ended);
    }
    ended = length.kind == Reply::Kind::kInteger && header.kind == Reply::Kind::kString;
    return connection.call_all(std::array{Connection::Command{"UNWATCH"}}, until, &done);
  };
  Reply reply;
  return cluster_.at(key, OpKind::kWrite, until, &reply, work).is_ok() && ended;
}

Status RedisStore::remove(const ChunkKey& key, const EpochPtr& epoch) {
  if (options_.read_only) return Status::error(StatusKind::kDeclined, "write_policy is read_only", EROFS);
  const Deadline until = deadline();
  const std::string name = key_of(key, epoch);
  Status denied;
  const auto work = [&](Connection& connection, Reply* answer) {
    if (Status status = connection.call({"DEL", name}, until, answer); !status) return status;
    // No failure of the node: its other commands may be permitted. The record stays until it is evicted.
    if (answer->kind == Reply::Kind::kError && answer->text.starts_with("NOPERM ")) {
      denied = Status::error(StatusKind::kDeclined, refusal(answer->text).message());
      *answer = {};
    }
    return Status::ok();
  };
  Reply reply;
  if (Status status = cluster_.at(name, OpKind::kWrite, until, &reply, work); !status) return status;
  if (!denied) return denied;
  if (reply.kind == Reply::Kind::kError) return refusal(reply.text);
  if (reply.kind != Reply::Kind::kInteger) return unexpected_reply();
  return reply.integer == 1 ? Status::ok() : absent();
}

Status RedisStore::locate_in_parts(std::span<const ChunkKey> keys, KeyOrder, const EpochPtr& epoch,
                                   std::vector<bool>* present, std::vector<bool>* failed) {
  std::vector<std::string> names;
  names.reserve(keys.size());
  for (const ChunkKey& key : keys) names.push_back(key_of(key, epoch));
  std::vector<Reply> replies;
  std::vector<bool> answered;
  if (Status status = cluster_.at_each(names, "EXISTS", deadline(), &replies, &answered); !status)
    return status;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    (*present)[i] = false;
    (*failed)[i] = !answered[i];
    if (!answered[i]) continue;
    if (replies[i].kind == Reply::Kind::kError) return refusal(replies[i].text);
    if (replies[i].kind != Reply::Kind::kInteger) return unexpected_reply();
    (*present)[i] = replies[i].integer == 1;
  }
  return Status::ok();
}

// ---- epochs

Status RedisStore::write_startup_epoch(const std::string& name, bool if_none, bool* done, bool* refused) {
  Connection::Command command{"SET", startup_epoch_key_, name};
  if (if_none) command.emplace_back("NX");
  Reply reply;
  const Status status = call(OpKind::kWrite, command, deadline(), &reply);
  *refused = reply.kind == Reply::Kind::kError && is_configuration_error(reply.text);
  if (!status) return status;
  if (reply.kind == Reply::Kind::kError) return refusal(reply.text);
  *done = reply.kind == Reply::Kind::kStatus;
  return Status::ok();
}

// A standalone server may have become a cluster node. INFO reports it, or a redirect of the key.
Status RedisStore::read_startup_epoch(Deadline until, Reply* start, bool* refused) {
  const auto ask = [&](Connection& connection, Reply* answer) {
    const std::array words{Connection::Command{"GET", startup_epoch_key_},
                           Connection::Command{"INFO", "cluster"}};
    std::vector<Reply> replies;
    if (Status status = connection.call_all(words, until, &replies); !status) return status;
    *answer = replies[0];
    if (replies[1].text.find("cluster_enabled:1") != std::string::npos) cluster_.report_cluster_node();
    return Status::ok();
  };
  Status learned, outcome;
  for (int tries = 0; tries < 2; ++tries) {
    if (!cluster_.is_known() || cluster_.may_be_cluster()) learned = cluster_.learn(until, refused);
    if (!cluster_.is_known()) return learned;
    outcome = cluster_.at(startup_epoch_key_, OpKind::kRead, until, start, ask);
    if (!cluster_.may_be_cluster()) break;
  }
  if (!outcome && !learned) return learned;  // it redirects us, but does not report its nodes
  *refused = !outcome && start->kind == Reply::Kind::kError && is_configuration_error(start->text);
  return outcome;
}

Status RedisStore::fetch_startup_epoch(const std::string& if_none, std::string* found, bool* refused) {
  // Two attempts: another process may publish first, or the server may drop the key right now.
  for (int tries = 0; tries < 2; ++tries) {
    Reply start;
    if (Status status = read_startup_epoch(deadline(), &start, refused); !status) return status;
    const bool other_type = start.text.starts_with("WRONGTYPE");
    if (start.kind == Reply::Kind::kError && !other_type) return refusal(start.text);
    if (!other_type && start.kind != Reply::Kind::kString && start.kind != Reply::Kind::kNil)
      return unexpected_reply();
    found->clear();
    if (start.kind == Reply::Kind::kString && EpochRegistry::is_name(start.text)) *found = start.text;
    if (!found->empty() || options_.read_only) return Status::ok();
    if (epochs_.has_ended(if_none))
      return Status::error(StatusKind::kUnavailable, "the tier was reset meanwhile");
    if (start.kind != Reply::Kind::kNil) {
      // No process uses a value that is not an epoch name, so it may be replaced. A name that a reset
      // has just written must stay.
      if (Status status = replace_startup_epoch(start.text, if_none); !status) return status;
      continue;
    }
    bool done = false;
    if (Status status = write_startup_epoch(if_none, true, &done, refused); !status) return status;
    if (done) *found = if_none;
    if (done) return Status::ok();
  }
  return Status::error(StatusKind::kIo, "the server does not keep the epoch");
}

Status RedisStore::refetch_startup_epoch(std::string* known, std::string* found) {
  bool refused = false;
  const std::string name = epochs_.name_if_missing(options_.epoch, known);
  return fetch_startup_epoch(name, found, &refused);
}

// Replaces the epoch that our reset ended, and no other: a later reset may have published another one.
void RedisStore::replace_ended_epoch(const std::string& ended, const std::string& name) {
  if (name.empty() || epochs_.has_ended(name)) return;
  (void)replace_startup_epoch(ended, name);  // maintain() tries again in a second
}

Status RedisStore::replace_startup_epoch(const std::string& stored, const std::string& name) {
  const Deadline until = deadline();
  const auto work = [&](Connection& connection, Reply* reply) {
    const std::array watch_and_read{Connection::Command{"WATCH", startup_epoch_key_},
                                    Connection::Command{"GET", startup_epoch_key_}};
    std::vector<Reply> seen, done;
    if (Status status = connection.call_all(watch_and_read, until, &seen); !status) return status;
    *reply = seen[0];
    const bool there = seen[0].kind != Reply::Kind::kError && seen[1].text == stored;
    bool ended = false;
    if (there) return in_transaction(connection, {"SET", startup_epoch_key_, name}, until, reply, &ended);
    return connection.call_all(std::array{Connection::Command{"UNWATCH"}}, until, &done);
  };
  Reply reply;
  if (Status status = cluster_.at(startup_epoch_key_, OpKind::kWrite, until, &reply, work); !status)
    return status;
  return reply.kind == Reply::Kind::kError ? refusal(reply.text) : Status::ok();
}

void RedisStore::maintain() {
  if (stopped_) return;  // there is nothing to flush
  cluster_.maintain(deadline(), stopped_);
  std::string known, found;
  const bool fetched = refetch_startup_epoch(&known, &found).is_ok();
  // Covers the nodes that respond, even while the owner of the epoch key does not.
  if ((fetched || cluster_.is_cluster()) && maintained_++ % kMemoryInterval == 0) update_memory_figures();
  if (!fetched) return;
  if (epochs_.has_ended(found)) return replace_ended_epoch(found, known);
  epochs_.update_startup_epoch(known, found, options_.read_only);
}

void RedisStore::watch(PresenceCache* known) {
  if (stopped_) return;
  // Read first: after a reset in between, this is the number of the ended epoch, and nothing is reported.
  const PresenceCache::EpochNumber number = known->epoch_number();
  if (const EpochPtr epoch = epochs_.current())
    removal_watch_.run(*known, number, records_prefix(epoch), deadline(), stopped_);
}

// Nodes that do not respond report nothing. The sum of the others is the memory that can be used now.
void RedisStore::update_memory_figures() {
  const Deadline until = deadline();
  std::uint64_t used = 0, bound = 0;
  bool all_bounded = true, any = false;
  const std::vector<NodePtr> nodes = cluster_.owners();
  for (std::size_t i = 0; i < nodes.size() && !stopped_; ++i) {
    if (nodes[i]->is_out_of_service(OpKind::kRead)) continue;
    const Deadline share = share_of(until, nodes.size() - i);
    std::unique_ptr<Connection> connection;
    Reply reply;
    bool refused = false;
    if (!nodes[i]->connections.take(share, &connection, &refused)) continue;
    if (!connection->call({"INFO", "memory"}, share, &reply)) continue;
    nodes[i]->connections.give_back(std::move(connection));
    const std::uint64_t at_most = figure_of(reply.text, "maxmemory");
    used += figure_of(reply.text, "used_memory");
    bound += at_most;
    all_bounded &= at_most > 0;
    any = true;
  }
  if (!any) return;
  const MutexLock lock(mutex_);
  used_bytes_ = used;
  max_bytes_ = all_bounded ? bound : 0;
}

Status RedisStore::begin_epoch() {
  const auto ask = [&](std::string* kept) {
    std::string known;
    return refetch_startup_epoch(&known, kept);
  };
  const auto put = [&](const std::string& name) {
    bool done = false, refused = false;
    if (Status status = write_startup_epoch(name, false, &done, &refused); !status) return status;
    return done ? Status::ok() : Status::error(StatusKind::kIo, "the server did not store the new epoch");
  };
  return epochs_.begin(ask, put);
}

void RedisStore::figures(TierStats* stats) const {
  stats->diverged = epochs_.diverged();
  stats->removals_problem = removal_watch_.problem();
  if (const EpochPtr epoch = epochs_.current())
    stats->epoch_id = EpochRegistry::id_of(EpochRegistry::name_of(epoch));
  const MutexLock lock(mutex_);
  stats->bytes = used_bytes_;
  stats->capacity_bytes = max_bytes_;
  stats->names_complete = stats->scan_complete = true;
}

}  // namespace redis

std::unique_ptr<Tier> make_redis_tier(const RedisTierOptions& options) {
  return with_encrypted_keys(make_thread_pool_tier(std::make_unique<redis::RedisStore>(options), options),
                             options.form.keys, options.namespace_id);
}

}  // namespace kv_offload
