// SPDX-License-Identifier: Apache-2.0
#include "backends/redis/records.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <unordered_set>
#include <utility>

#include "tier/epoch_registry.h"

namespace kv_offload {
namespace redis {
namespace {

using Command = Connection::Command;
using Kind = Reply::Kind;

constexpr std::size_t kPieceBytes = std::size_t{1} << 20;
constexpr int kMaxReads = 3;  // attempts at a record that others keep writing
constexpr std::size_t kCursorDigits = 20;

Status is_restarted() {
  return Status::error(StatusKind::kIo,
                       "the server was restarted or replaced during the listing: run it again");
}
Status missing_record() { return Status::error(StatusKind::kNotFound, "it no longer exists"); }

bool is_word(const Reply& reply, std::string_view word) {
  return reply.kind == Kind::kError &&
         (reply.text == word || (reply.text.starts_with(word) && reply.text[word.size()] == ' '));
}

bool is_unknown(const Reply& reply) {
  return reply.kind == Kind::kError &&
         (reply.text.starts_with("ERR unknown") || reply.text.starts_with("ERR Unknown"));
}

Status has_moved() {
  return Status::error(StatusKind::kIo,
                       "the server redirected the key, as a cluster node does while its slots move: run it "
                       "again when they have moved (redis-cli --cluster check)");
}

// Returns "run_id:..." from an INFO reply; empty: the server does not report one.
std::string run_id_of(const Reply& info) {
  const std::size_t at = info.kind == Kind::kError ? info.text.npos : info.text.find("run_id:");
  return at == info.text.npos ? "" : info.text.substr(at, info.text.find_first_of("\r\n", at) - at);
}

std::string lower_of(std::string_view text) {
  std::string lower(text);
  std::transform(lower.begin(), lower.end(), lower.begin(), [](unsigned char c) { return std::tolower(c); });
  return lower;
}

// The status of a refused command, with the missing permission by name. REQUIRES: the command was sent by
// itself, so that the error belongs to it.
Status refusal_of(const Command& command, const Reply& reply, std::string_view prefix) {
  const bool twofold = command[0] == "MEMORY" || command[0] == "OBJECT";
  const std::string name = twofold ? fmt::format("{}|{}", command[0], command[1]) : std::string(command[0]);
  const bool exec_refused =
      name == "EXEC" && is_word(reply, "EXECABORT") && reply.text.find(" NOPERM ") != reply.text.npos;
  // The ACL lacks this command or these keys.
  if (is_word(reply, "NOPERM") || exec_refused) {
    return Status::error(
        StatusKind::kIo,
        fmt::format("the user may not use {} here: allow +{} and the keys ~{}:* (ACL SETUSER)", name,
                    lower_of(name), prefix));
  }
  // A failover has demoted the primary, or this address leads to a replica.
  if (is_word(reply, "READONLY")) {
    return Status::error(StatusKind::kIo,
                         "the server is a read-only replica and cannot remove records: give the address of "
                         "its primary; in a cluster, run it again");
  }
  if (is_word(reply, "MOVED") || is_word(reply, "ASK") || is_word(reply, "TRYAGAIN")) return has_moved();
  return refusal(reply.text);
}

// Returns a MATCH pattern that matches exactly this text.
std::string exact_pattern(std::string_view text) {
  std::string pattern;
  for (const char c : text) {
    if (std::string_view("*?[]\\^-").find(c) != std::string_view::npos) pattern.push_back('\\');
    pattern.push_back(c);
  }
  return pattern;
}

std::int64_t unix_now() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

// Checks bytes as soon as they arrive, while they are in the CPU cache.
class CheckedBytes final : public ReadProgressSink {
 public:
  explicit CheckedBytes(RecordCheck* check) : check_(check) {}
  void filled(std::span<std::byte> part, std::uint64_t, std::uint64_t) noexcept override {
    check_->add(part);
  }

 private:
  RecordCheck* const check_;
};

class RedisRecords final : public RemoteRecords {
 public:
  RedisRecords(const RedisRecordsOptions& options, bool accepts_node)
      : options_(options),
        prefix_(options.key_prefix + ":"),
        tls_(make_tls_context(options.server)),
        accepts_node_(accepts_node) {}
  // Throws ResourceError. False: the server is a cluster node, and accepts_node_ is false.
  bool open() {
    const Status status = connect();
    if (is_node_ && !accepts_node_) return false;
    if (!status) throw_resource("{}: {}", address_of(options_.server), status.message());
    return true;
  }

  void use_record_sizes() override { memory_usage_ = false; }
  Status list(const std::string& namespace_id, std::string from, bool sizes, RemotePage* page) override;
  Status written(const RemoteRecord& record, std::int64_t* unix_nanos) override;
  Status read_header(const RemoteRecord& record, RecordHeader* header) override;
  Status verify(const RemoteRecord& record, bool repair, bool* removed) override {
    return verify_into(record, repair, removed, nullptr);
  }
  Status read(const RemoteRecord& record, WholeRecord* copy) override {
    bool removed = false;
    return verify_into(record, false, &removed, copy);
  }
  Status read_startup_epoch(const std::string& namespace_id, std::string* name) override;
  Status remove(std::span<const RemoteRecord> records, RemoteRemoved* removed) override;

 private:
  Deadline deadline() const { return std::chrono::steady_clock::now() + options_.deadline; }
  Status connect();
  Status ask(std::span<const Command> commands, std::vector<Reply>* replies);
  Status scan(const std::string& match, const std::string& cursor, Reply* reply);
  Status measure(std::vector<RemoteRecord>* records);
  Command size_of(const RemoteRecord& record) const {
    return memory_usage_ ? Command{"MEMORY", "USAGE", record.name} : Command{"STRLEN", record.name};
  }
  Status verify_into(const RemoteRecord& record, bool repair, bool* removed, WholeRecord* copy);
  Status read_and_check(const RemoteRecord& record, WholeRecord* copy);
  Status read_payload(const RemoteRecord& record, std::uint64_t length, RecordCheck* check);
  struct Settled {
    bool unchanged = false;
    bool outcome_unknown = false;  // the removal was sent, but no reply arrived
  };
  Status settle(const RemoteRecord& record, bool repair, Settled* settled);

  const RedisRecordsOptions options_;
  const std::string prefix_;
  const std::shared_ptr<TlsContext> tls_;
  const bool accepts_node_;
  bool is_node_ = false;  // according to the last INFO reply
  std::unique_ptr<Connection> connection_;
  std::uint64_t connections_ = 0;
  // The server process that connection_ is connected to, and the one that issued the last cursor, which is
  // valid only there. If a process does not report a run id, the connection's number stands for it.
  std::string process_, cursor_process_;
  bool has_run_id_ = false;
  bool no_touch_ = false;
  bool memory_usage_ = true;  // until the server refuses MEMORY USAGE, or use_record_sizes()
};

Status RedisRecords::connect() {
  if (connection_ && connection_->usable() && !connection_->stale()) return Status::ok();
  bool refused = false;
  const Deadline until = deadline();
  if (Status status = Connection::open(options_.server, tls_, until, &connection_, &refused); !status)
    return status;
  // CLIENT may be refused or unknown: then reads count as uses. INFO may be unknown: then the server is not a
  // cluster node.
  const std::array greet{Command{"CLIENT", "NO-TOUCH", "ON"}, Command{"INFO", "cluster"},
                         Command{"INFO", "server"}};
  std::vector<Reply> replies;
  if (Status status = connection_->call_all(greet, until, &replies); !status) return status;
  if (is_word(replies[1], "NOPERM")) {
    connection_.reset();
    return refusal_of(greet[1], replies[1], options_.key_prefix);
  }
  process_ = run_id_of(replies[2]);
  has_run_id_ = !process_.empty();
  ++connections_;
  if (!has_run_id_) process_ = fmt::format("connection {}", connections_);
  no_touch_ = replies[0].kind == Kind::kStatus && replies[0].text == "OK";
  is_node_ =
      replies[1].kind != Kind::kError && replies[1].text.find("cluster_enabled:1") != std::string::npos;
  if (!is_node_ || accepts_node_) return Status::ok();
  connection_.reset();
  return has_moved();
}

Status RedisRecords::ask(std::span<const Command> commands, std::vector<Reply>* replies) {
  if (Status status = connect(); !status) return status;
  return connection_->call_all(commands, deadline(), replies);
}

// ---- lists

// A page of long names may exceed the reply limit: try again with fewer keys.
Status RedisRecords::scan(const std::string& match, const std::string& cursor, Reply* reply) {
  unsigned keys = options_.page;
  for (;;) {
    const std::string count = std::to_string(keys);
    const Command command{"SCAN", cursor, "MATCH", match, "COUNT", count};
    if (Status status = connect(); !status) return status;
    if (cursor != "0" && !cursor_process_.empty() && process_ != cursor_process_) return is_restarted();
    std::vector<Reply> replies;
    const Status status = connection_->call_all({&command, 1}, deadline(), &replies);
    if (status) {
      cursor_process_ = process_;
      *reply = std::move(replies.front());
      if (reply->kind == Kind::kError) return refusal_of(command, *reply, options_.key_prefix);
      return Status::ok();
    }
    if (status.error_number() != EMSGSIZE) return status;
    if (keys == 1) {
      return Status::error(StatusKind::kIo,
                           "a key under the prefix has a name far longer than a record's, so the other keys "
                           "cannot be listed: remove that key");
    }
    keys = std::max(1u, keys / 16);
    if (!has_run_id_) cursor_process_.clear();  // we reconnected, so the number changed on the same server
  }
}

Status RedisRecords::list(const std::string& namespace_id, std::string from, bool sizes, RemotePage* page) {
  *page = {};
  const std::string cursor = from.empty() ? "0" : from;
  const std::string below = namespace_id.empty() ? prefix_ : prefix_ + namespace_id + ":";
  Reply found;
  if (Status status = scan(exact_pattern(below) + "*", cursor, &found); !status) return status;
  // Reject malformed replies: the server is not trusted.
  if (found.kind != Kind::kArray || found.elements.size() != 2 || found.elements[0].kind != Kind::kString ||
      found.elements[1].kind != Kind::kArray)
    return unexpected_reply();
  const std::string& next = found.elements[0].text;
  if (next.empty() || next.size() > kCursorDigits || next.find_first_not_of("0123456789") != next.npos)
    return unexpected_reply();
  // A cursor that repeats would make the caller list forever.
  if (next == cursor && next != "0") {
    return Status::error(StatusKind::kIo, "the server repeats the same page of the list");
  }
  if (next != "0") page->next = next;
  std::unordered_set<std::string> seen;
  for (Reply& name : found.elements[1].elements) {
    if (name.kind != Kind::kString || !name.text.starts_with(below)) return unexpected_reply();
    // SCAN may return a key twice.
    if (!seen.insert(name.text).second) continue;
    RemoteRecord record;
    record.name = std::move(name.text);
    parse_remote_name(std::string_view(record.name).substr(prefix_.size()), ':', &record);
    page->records.push_back(std::move(record));
  }
  return sizes ? measure(&page->records) : Status::ok();
}

// Leaves out records that vanished meanwhile.
Status RedisRecords::measure(std::vector<RemoteRecord>* records) {
  std::vector<Command> commands;
  for (const RemoteRecord& record : *records) {
    commands.push_back(size_of(record));
    commands.push_back({"OBJECT", "IDLETIME", record.name});
  }
  if (commands.empty()) return Status::ok();
  std::vector<Reply> replies;
  if (Status status = ask(commands, &replies); !status) return status;
  // Without MEMORY USAGE, fall back to STRLEN.
  if (memory_usage_ && (is_word(replies[0], "NOPERM") || is_unknown(replies[0]))) {
    memory_usage_ = false;
    return measure(records);
  }
  const std::int64_t now = unix_now();
  std::size_t kept = 0;
  for (std::size_t i = 0; i < records->size(); ++i) {
    const Reply &size = replies[2 * i], &idle = replies[2 * i + 1];
    if (size.kind == Kind::kNil || idle.kind == Kind::kNil) continue;
    // A value of another type has no known length. With an LFU policy there is no idle time; that is not an
    // error.
    if (size.kind == Kind::kError && !is_word(size, "WRONGTYPE"))
      return refusal_of(commands[2 * i], size, options_.key_prefix);
    RemoteRecord record = std::move((*records)[i]);
    if (size.kind == Kind::kInteger && size.integer > 0)
      record.bytes = static_cast<std::uint64_t>(size.integer);
    if (idle.kind == Kind::kInteger && idle.integer >= 0 && idle.integer < now / 1'000'000'000)
      record.used_unix_nanos = now - idle.integer * 1'000'000'000;
    (*records)[kept++] = std::move(record);
  }
  records->resize(kept);
  return Status::ok();
}

Status RedisRecords::written(const RemoteRecord& record, std::int64_t* unix_nanos) {
  *unix_nanos = 0;
  if (Status status = connect(); !status) return status;
  if (!no_touch_) return Status::ok();
  RecordHeader header;
  const Status status = read_header(record, &header);
  if (status) *unix_nanos = static_cast<std::int64_t>(header.created_unix_nanos);
  const bool no_record = status.kind() == StatusKind::kCorrupt || status.kind() == StatusKind::kNotFound;
  return no_record ? Status::ok() : status;
}

Status RedisRecords::read_header(const RemoteRecord& record, RecordHeader* header) {
  if (Status status = connect(); !status) return status;
  const std::string end = std::to_string(kRecordHeaderBytes - 1);
  const Command command{"GETRANGE", record.name, "0", end};
  std::vector<Reply> replies;
  if (Status status = ask({&command, 1}, &replies); !status) return status;
  if (is_word(replies[0], "WRONGTYPE")) return Status::error(StatusKind::kCorrupt, "the key is not a string");
  if (replies[0].kind == Kind::kError) return refusal_of(command, replies[0], options_.key_prefix);
  if (replies[0].text.empty()) return Status::error(StatusKind::kNotFound, "it no longer exists");
  return decode_header(std::as_bytes(std::span(replies[0].text)), header);
}

// ---- verification

// Reads and checks the record. It stays watched until settle() or the next look().
Status RedisRecords::read_and_check(const RemoteRecord& record, WholeRecord* copy) {
  const std::string end = std::to_string(kRecordHeaderBytes - 1);
  const std::array commands{Command{"UNWATCH"}, Command{"WATCH", record.name}, Command{"EXISTS", record.name},
                            Command{"STRLEN", record.name}, Command{"GETRANGE", record.name, "0", end}};
  std::vector<Reply> replies;
  if (Status status = ask(commands, &replies); !status) return status;
  // A failed command is reported with the permission it needs.
  for (std::size_t i = 0; i < commands.size(); ++i) {
    if (replies[i].kind != Kind::kError) continue;
    return is_word(replies[i], "WRONGTYPE") ? refusal(replies[i].text)
                                            : refusal_of(commands[i], replies[i], options_.key_prefix);
  }
  // The remaining checks go from cheap to expensive: replies, existence, header, payload.
  const Reply &there = replies[2], &length = replies[3], &header = replies[4];
  if (there.kind != Kind::kInteger || length.kind != Kind::kInteger || length.integer < 0 ||
      header.kind != Kind::kString)
    return unexpected_reply();
  if (there.integer == 0) return missing_record();
  RecordCheck check(keys(), copy);
  check.add(std::as_bytes(std::span(header.text)));
  const auto bytes = static_cast<std::uint64_t>(length.integer);
  if (header.text.size() != std::min<std::uint64_t>(bytes, kRecordHeaderBytes))
    return Status::error(StatusKind::kCorrupt, "its length changed while it was read");
  if (Status status = check.check_header(record, bytes); !status) return status;
  if (Status status = read_payload(record, bytes, &check); !status) return status;
  return check.finish(record);
}

Status RedisRecords::read_payload(const RemoteRecord& record, std::uint64_t length, RecordCheck* check) {
  while (check->total() < length) {
    std::span<std::byte> piece;
    if (Status status = check->room(kPieceBytes, &piece); !status) return status;
    const std::uint64_t from = check->total();
    piece = piece.first(std::min<std::uint64_t>(piece.size(), length - from));
    const std::string first = std::to_string(from), last = std::to_string(from + piece.size() - 1);
    const Command command{"GETRANGE", record.name, first, last};
    Reply reply;
    std::uint64_t value_bytes = 0;
    CheckedBytes arrived(check);
    if (Status status =
            connection_->get(command, {&piece, 1}, piece.size(), deadline(), &reply, &value_bytes, &arrived);
        !status)
      return status;
    if (reply.kind == Kind::kError) return refusal_of(command, reply, options_.key_prefix);
    if (reply.kind != Kind::kString) {
      return Status::error(StatusKind::kCorrupt, "it became shorter while it was read");
    }
  }
  return Status::ok();
}

// Checks that the record is unchanged since look(); with `repair` removes it then. Sends nothing after a
// refused MULTI: outside a transaction the command would run whatever another process wrote meanwhile.
Status RedisRecords::settle(const RemoteRecord& record, bool repair, Settled* settled) {
  *settled = {};
  if (!connection_->usable()) return Status::ok();
  const Command begin{"MULTI"};
  Reply begun;
  if (Status status = connection_->call(begin, deadline(), &begun); !status) return status;
  if (begun.kind == Kind::kError) return refusal_of(begin, begun, options_.key_prefix);
  if (begun.kind != Kind::kStatus || begun.text != "OK") return unexpected_reply();
  const std::array commands{Command{repair ? "DEL" : "EXISTS", record.name}, Command{"EXEC"}};
  std::vector<Reply> replies;
  settled->outcome_unknown = repair;
  if (Status status = connection_->call_all(commands, deadline(), &replies); !status) return status;
  const Reply& done = replies[1];
  if (done.kind == Kind::kError) {
    settled->outcome_unknown = false;
    // The transaction may still be open if EXEC was refused.
    if (Status status = connection_->call({"DISCARD"}, deadline(), &begun); !status) return status;
    const std::size_t refused = replies[0].kind == Kind::kError ? 0 : 1;
    return refusal_of(commands[refused], replies[refused], options_.key_prefix);
  }
  settled->outcome_unknown = repair && done.kind != Kind::kNil;
  if (done.kind == Kind::kNil) return Status::ok();  // another process wrote it
  if (done.kind != Kind::kArray || done.elements.size() != 1) return unexpected_reply();
  const Reply& removed = done.elements[0];
  settled->outcome_unknown = false;
  if (removed.kind == Kind::kError) return refusal_of(commands[0], removed, options_.key_prefix);
  settled->unchanged = removed.kind == Kind::kInteger && removed.integer == 1;
  return Status::ok();
}

Status RedisRecords::verify_into(const RemoteRecord& record, bool repair, bool* removed, WholeRecord* copy) {
  *removed = false;
  for (int reads = 0; reads < kMaxReads; ++reads) {
    Status status = read_and_check(record, copy);
    if (status.kind() != StatusKind::kCorrupt) return status;
    Settled settled;
    if (Status failed = settle(record, repair, &settled); !failed) {
      const char* const then = settled.outcome_unknown ? "it may have been removed" : "it was not removed";
      return Status::error(failed.kind(),
                           fmt::format("{}; {}: {}", status.message(), then, failed.message()));
    }
    *removed = settled.unchanged && repair;
    if (settled.unchanged) return status;
  }
  return Status::error(StatusKind::kIo, "other processes keep writing it while it is read");
}

Status RedisRecords::read_startup_epoch(const std::string& namespace_id, std::string* name) {
  name->clear();
  const std::string key = prefix_ + namespace_id + ":epoch";
  const Command command{"GET", key};
  std::vector<Reply> replies;
  if (Status status = ask({&command, 1}, &replies); !status) return status;
  const Reply& stored = replies[0];
  if (is_word(stored, "WRONGTYPE") || stored.kind == Kind::kNil) return Status::ok();
  if (stored.kind == Kind::kError) return refusal_of(command, stored, options_.key_prefix);
  if (stored.kind != Kind::kString) return unexpected_reply();
  if (EpochRegistry::is_name(stored.text)) *name = stored.text;
  return Status::ok();
}

// ---- removal

Status RedisRecords::remove(std::span<const RemoteRecord> records, RemoteRemoved* removed) {
  for (std::size_t from = 0; from < records.size();) {
    const auto some = records.subspan(from, std::min<std::size_t>(records.size() - from, options_.page));
    std::vector<Command> commands;
    for (const RemoteRecord& record : some) commands.push_back({"DEL", record.name});
    std::vector<Reply> replies;
    if (Status status = ask(commands, &replies); !status) return status;
    Status refused;  // the first refusal; the commands after it were still executed
    for (std::size_t i = 0; i < some.size(); ++i) {
      if (replies[i].kind != Kind::kInteger && refused) {
        refused = replies[i].kind == Kind::kError ? refusal_of(commands[i], replies[i], options_.key_prefix)
                                                  : unexpected_reply();
      }
      if (replies[i].kind != Kind::kInteger || replies[i].integer != 1) continue;
      ++removed->records;
      removed->bytes += some[i].bytes;
    }
    if (!refused) return refused;
    from += some.size();
  }
  return Status::ok();
}

}  // namespace

std::unique_ptr<RemoteRecords> open_records_of_server(const RedisRecordsOptions& options, bool* is_node) {
  auto records = std::make_unique<RedisRecords>(options, is_node == nullptr);
  if (records->open()) return records;
  *is_node = true;
  return nullptr;
}

}  // namespace redis

std::unique_ptr<RemoteRecords> open_redis_records(const RedisRecordsOptions& options) {
  bool is_node = false;
  auto records = redis::open_records_of_server(options, &is_node);
  return is_node ? redis::open_records_of_cluster(options) : std::move(records);
}

}  // namespace kv_offload
