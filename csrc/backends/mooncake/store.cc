// SPDX-License-Identifier: Apache-2.0
#include "backends/mooncake/store.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "backends/mooncake/errors.h"
#include "record/record_form.h"
#include "record/streaming_record_reader.h"
#include "tier/encrypted_key_tier.h"

namespace kv_offload {
namespace mooncake {
namespace {

constexpr std::size_t kMaxDamagedKeys = 4096;

// Writes the record to one contiguous buffer. In-place shards are checksummed while they are copied.
Status pack(OutgoingRecord& record, const TierOp& op, std::span<std::byte> object) {
  std::span<std::byte> to = object;
  const auto copy = [&to](const std::byte* from, std::size_t bytes) {
    std::memcpy(to.data(), from, bytes);
    to = to.subspan(bytes);
  };
  if (!record.in_place()) {
    if (Status status = record.finish(); !status) return status;
    for (const std::span<const std::byte> piece : record.pieces()) copy(piece.data(), piece.size());
    return Status::ok();
  }
  to = to.subspan(kRecordHeaderBytes);
  PayloadChecksum checksum;
  for (const Shard& shard : op.shards) {
    std::span<const std::byte> left(shard.data(), round_up(shard.size(), kPageBytes));
    while (!left.empty()) {
      const auto part = left.first(std::min(left.size(), RecordForm::kStepBytes));
      checksum.add(part);
      copy(part.data(), part.size());
      left = left.subspan(part.size());
    }
  }
  RecordHeader header = record.header();
  header.checksum = checksum.value();
  encode_header(header, object.first(kRecordHeaderBytes));
  return Status::ok();
}

// Copies the object into the host memory rows step by step and verifies it there. Later changes by the
// process to its memory have no effect.
Status unpack(IncomingRecord& record, std::span<const std::byte> object, std::uint64_t length) {
  if (Status status = record.check_length(length); !status) return status;
  StreamingRecordReader opened(record);
  std::span<const std::byte> left = object.first(length);
  for (std::span<std::byte> piece : record.pieces()) {
    while (!piece.empty() && !left.empty()) {
      const std::size_t part = std::min({piece.size(), left.size(), RecordForm::kStepBytes});
      std::memcpy(piece.data(), left.data(), part);
      opened.filled(piece.first(part), length - left.size(), length);
      piece = piece.subspan(part);
      left = left.subspan(part);
    }
  }
  return opened.finish(length);
}

// True if Mooncake may still use the channel's memory after this code.
bool may_use_memory_later(std::int64_t code) {
  return code < 0 && code != kNoObject && code != kNotComplete && code != kNoSpaceLeft &&
         code != kBadLength && code != kHolderGone;
}

// For a write, these codes are not a miss: another writer began this record and has failed or is still
// writing. EBUSY: see hosts/all_hosts_tier.h.
Status refusal_of_write(const Answer& answer) {
  if (answer.result == kNotComplete || answer.result == kNoObject) {
    return Status::error(StatusKind::kUnavailable, "another process has not finished writing this record",
                         EBUSY);
  }
  return refusal(answer.result, answer.text);
}

}  // namespace

MooncakeStore::MooncakeStore(const MooncakeTierOptions& options)
    : options_(options),
      prefix_(fmt::format("{}:{}:", options.key_prefix, hex_of(options.namespace_id))),
      startup_epoch_key_(prefix_ + "epoch"),
      client_(options.client),
      form_(options.form) {
  bool refused = false;
  std::string found;
  // Waits until the start ends, which start_deadline limits: a later refusal could not be reported.
  Status status = client_.wait_for_start(Deadline::max(), &refused);
  // A stored epoch is never replaced at a start, so a store that fails now may respond later
  // (open_tiers.h).
  const Status usable = EpochRegistry::startup_problem(options.epoch, Status::ok(), options.read_only);
  if (refused || !usable) {
    throw_resource("mooncake tier at {}: {}", options.place, refused ? status.message() : usable.message());
  }
  if (status) status = fetch_startup_epoch(EpochRegistry::name_if_none(options.epoch), &found);
  epochs_.start_with(status ? found : "", {}, status);
}

std::string MooncakeStore::epoch_problem() const {
  const std::string problem = epochs_.start_problem();
  return problem.empty() ? problem : fmt::format("{}: {}", options_.place, problem);
}

std::string MooncakeStore::key_of(const ChunkKey& key, const EpochPtr& epoch) const {
  return fmt::format("{}{}:{}", prefix_, EpochRegistry::name_of(epoch), key.hex());
}

Status MooncakeStore::call(ChannelPtr* channel, Verb verb, std::span<const std::string> names,
                           std::uint64_t object_bytes, Deadline until, Answer* answer) {
  Status status = client_.call(**channel, verb, names, object_bytes, until, options_.op_timeout, answer);
  if (!status || may_use_memory_later(answer->result)) channel->reset();
  return status;
}

// ---- records

Status MooncakeStore::check_exists(const std::string& key, Deadline until, bool* exists) {
  ChannelPtr channel;
  if (Status status = client_.take(1, &channel); !status) return status;
  Answer answer;
  const Status status = call(&channel, Verb::kExist, {&key, 1}, 0, until, &answer);
  if (status && answer.result >= 0) *exists = channel->object()[0] == std::byte{1};
  if (channel) client_.give_back(std::move(channel));
  return status && answer.result < 0 ? refusal_of_write(answer) : status;
}

Status MooncakeStore::write(const TierOp& op, const EpochPtr& epoch, std::uint64_t* moved) {
  const std::string key = key_of(op.key, epoch);
  const Deadline check_deadline = deadline();
  const bool replace = take_damaged_key(key);
  if (!replace && existence_check_.should_check()) {
    bool exists = false;
    if (Status status = check_exists(key, check_deadline, &exists); !status) return status;
    existence_check_.record_result(exists);
    if (exists) return Status::ok();
  }

  const auto left = check_deadline - std::chrono::steady_clock::now();
  OutgoingRecord record(form_, options_.namespace_id, op);
  if (Status status = record.encode(); !status) return status;
  ChannelPtr channel;
  if (Status status = client_.take(record.bytes(), &channel); !status) return status;
  if (Status status = pack(record, op, channel->object()); !status) {
    client_.give_back(std::move(channel));
    return status;
  }
  // The time spent on encoding does not count against Mooncake.
  const Deadline until = std::chrono::steady_clock::now() + left;
  Answer answer;
  const Status status =
      call(&channel, replace ? Verb::kSet : Verb::kPut, {&key, 1}, record.bytes(), until, &answer);
  if (channel) client_.give_back(std::move(channel));
  if (!status || answer.result < 0) {
    // A plain put of an existing object sends nothing and returns the result of a real write. Therefore the
    // next writes check first, which shows whether writing works again.
    existence_check_.restart();
    return status ? refusal_of_write(answer) : status;
  }
  // 0: the object existed, and nothing was sent. A put without a session cannot detect that.
  if (answer.result == 0) {
    existence_check_.record_result(true);
    return Status::ok();
  }
  *moved = record.written();
  return Status::ok();
}

Status MooncakeStore::read(const TierOp& op, const EpochPtr& epoch, std::uint64_t* moved) {
  const Deadline until = deadline();
  IncomingRecord record(form_, options_.namespace_id, op);
  ChannelPtr channel;
  if (Status status = client_.take(record.max_bytes(), &channel); !status) return status;
  const std::string key = key_of(op.key, epoch);
  // The length of an encoded record is unknown.
  const std::uint64_t group = std::uint64_t{1} << op.group % 64;
  const std::uint64_t expected = (encoded_ & group) == 0 ? record.max_bytes() : 0;
  Answer answer;
  Status status = call(&channel, Verb::kGet, {&key, 1}, expected, until, &answer);
  if (status && answer.result < 0) status = refusal(answer.result, answer.text);
  if (!status) {
    if (channel) client_.give_back(std::move(channel));
    return status;
  }
  const auto length = static_cast<std::uint64_t>(answer.result);
  if (length < record.max_bytes()) {
    encoded_ |= group;
  } else {
    encoded_ &= ~group;
  }
  status = unpack(record, channel->object(), length);
  if (status) *moved = record.payload_bytes();
  // Damaged, or written in another version of the format.
  const bool wrong = status.kind() == StatusKind::kCorrupt || status.kind() == StatusKind::kNotFound;
  if (wrong && !options_.read_only) {
    const bool possible = static_cast<bool>(record.check_length(length));
    const bool removed = remove_damaged(
        key, record, until, possible ? record.header_page() : std::span<std::byte>(), std::move(channel));
    const MutexLock lock(mutex_);
    if (!removed && damaged_keys_.size() < kMaxDamagedKeys) damaged_keys_.insert(key);
  } else {
    client_.give_back(std::move(channel));
  }
  return status;
}

// Removes the bad object only if it is still there. An object of a valid length with another header has
// replaced it. An object written between the two calls is lost; that is a miss. If little time is left,
// nothing is removed and the next write replaces the object.
bool MooncakeStore::remove_damaged(const std::string& key, const IncomingRecord& record, Deadline until,
                                   std::span<const std::byte> header_page, ChannelPtr channel) {
  Answer answer;
  if (Client::is_short(until, options_.op_timeout)) {
    client_.give_back(std::move(channel));
    return false;
  }
  // Either of these proves that the object is still bad: an impossible length, the same header.
  if (!call(&channel, Verb::kGet, {&key, 1}, 0, until, &answer) || !channel) return false;
  const bool exists = answer.result >= 0;
  const bool other_length = exists && !record.check_length(static_cast<std::uint64_t>(answer.result));
  const bool same_header = exists && !header_page.empty() &&
                           std::memcmp(channel->object().data(), header_page.data(), header_page.size()) == 0;
  bool removed = exists || answer.result == kNoObject;
  if (other_length || same_header) {
    removed = call(&channel, Verb::kRemove, {&key, 1}, 0, until, &answer) &&
              (answer.result >= 0 || answer.result == kNoObject);
  }
  if (channel) client_.give_back(std::move(channel));
  return removed;
}

Status MooncakeStore::remove(const ChunkKey& key, const EpochPtr& epoch) {
  if (options_.read_only) return Status::error(StatusKind::kDeclined, "write_policy is read_only", EROFS);
  const std::string name = key_of(key, epoch);
  const Deadline until = deadline();
  ChannelPtr channel;
  if (Status status = client_.take(1, &channel); !status) return status;
  Answer answer;
  const Status status = call(&channel, Verb::kRemove, {&name, 1}, 0, until, &answer);
  if (channel) client_.give_back(std::move(channel));
  if (!status || answer.result >= 0) return status;
  // The object stays until it is evicted: another engine is writing it, or its master adds a copy on a file
  // system (--root_fs_dir) and removes no such object.
  if (answer.result == kNotComplete)
    return Status::error(StatusKind::kDeclined, "Mooncake removes only objects that are completely written");
  return refusal(answer.result, answer.text);
}

// True once for each read that left a damaged object behind.
bool MooncakeStore::take_damaged_key(const std::string& key) {
  const MutexLock lock(mutex_);
  return damaged_keys_.erase(key) > 0;
}

Status MooncakeStore::locate(std::span<const ChunkKey> keys, KeyOrder, const EpochPtr& epoch,
                             std::vector<bool>* present) {
  const Deadline until = deadline();
  std::vector<std::string> names;
  names.reserve(keys.size());
  for (const ChunkKey& key : keys) names.push_back(key_of(key, epoch));
  ChannelPtr channel;
  if (Status status = client_.take(keys.size(), &channel); !status) return status;
  Answer answer;
  Status status = call(&channel, Verb::kExist, names, 0, until, &answer);
  if (status && answer.result < 0) status = refusal(answer.result, answer.text);
  if (status) {
    for (std::size_t i = 0; i < keys.size(); ++i) (*present)[i] = channel->object()[i] == std::byte{1};
  }
  if (channel) client_.give_back(std::move(channel));
  return status;
}

// ---- epochs

Status MooncakeStore::read_startup_epoch(Deadline until, std::string* found, bool* invalid) {
  found->clear();
  *invalid = false;
  ChannelPtr channel;
  if (Status status = client_.take(EpochRegistry::kNameDigits, &channel); !status) return status;
  Answer answer;
  if (Status status = call(&channel, Verb::kGet, {&startup_epoch_key_, 1}, 0, until, &answer); !status)
    return status;
  Status status;
  if (answer.result < 0 && answer.result != kNoObject) {
    status = refusal(answer.result, answer.text);
    // Another process is writing it right now.
    if (status.kind() == StatusKind::kNotFound) status = Status::error(StatusKind::kIo, status.message());
  } else if (answer.result >= 0) {
    const auto bytes = channel->object().first(EpochRegistry::kNameDigits);
    const std::string text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    const bool name = answer.result == static_cast<std::int64_t>(EpochRegistry::kNameDigits) &&
                      EpochRegistry::is_name(text);
    if (name) *found = text;
    *invalid = !name;
  }
  if (channel) client_.give_back(std::move(channel));
  return status;
}

Status MooncakeStore::write_startup_epoch(Verb verb, const std::string& name, Deadline until) {
  ChannelPtr channel;
  if (Status status = client_.take(name.size(), &channel); !status) return status;
  std::memcpy(channel->object().data(), name.data(), name.size());
  Answer answer;
  if (Status status = call(&channel, verb, {&startup_epoch_key_, 1}, name.size(), until, &answer); !status) {
    return status;
  }
  if (channel) client_.give_back(std::move(channel));
  // A put may leave the object to a faster writer. A set must replace the value.
  const bool is_left = verb == Verb::kPut && answer.result == kNotComplete;
  if (answer.result >= 0 || is_left) return Status::ok();
  const Status status = refusal(answer.result, answer.text);
  return status.kind() == StatusKind::kNotFound ? Status::error(StatusKind::kIo, status.message()) : status;
}

Status MooncakeStore::fetch_startup_epoch(const std::string& name, std::string* found) {
  const Deadline until = deadline();
  // Reads again after writing, because another process may have been faster.
  for (int tries = 0; tries < 3; ++tries) {
    bool invalid = false;
    if (Status status = read_startup_epoch(until, found, &invalid); !status) return status;
    if (!found->empty() || options_.read_only) return Status::ok();
    if (epochs_.has_ended(name))
      return Status::error(StatusKind::kUnavailable, "the tier was reset meanwhile");
    // No process uses an object that is not an epoch name. A reset may replace it at the same time, so only
    // an unused name may replace it here.
    const Status status = invalid ? write_startup_epoch(Verb::kSet, epochs_.unused_name(), until)
                                  : write_startup_epoch(Verb::kPut, name, until);
    if (!status) return status;
  }
  return Status::error(StatusKind::kIo, "the store does not keep the epoch");
}

Status MooncakeStore::refetch_startup_epoch(std::string* known, std::string* found) {
  const std::string name = epochs_.name_if_missing(options_.epoch, known);
  return fetch_startup_epoch(name, found);
}

void MooncakeStore::maintain() {
  if (stopped_) return;  // there is nothing to flush
  std::string known, found;
  if (!refetch_startup_epoch(&known, &found)) return;
  if (!epochs_.has_ended(found)) return epochs_.update_startup_epoch(known, found, options_.read_only);
  // Another process restored an epoch that our reset had ended. A later reset may replace it at the same
  // time, so only an unused name may replace it here: `known` may have records from before that reset.
  // If `known` has ended, we were reset meanwhile, and begin_epoch() replaces the epoch.
  if (known.empty() || epochs_.has_ended(known)) return;
  (void)write_startup_epoch(Verb::kSet, epochs_.unused_name(), deadline());
}

Status MooncakeStore::begin_epoch() {
  const auto ask = [&](std::string* kept) {
    std::string known;
    return refetch_startup_epoch(&known, kept);
  };
  const auto put = [&](const std::string& name) { return write_startup_epoch(Verb::kSet, name, deadline()); };
  return epochs_.begin(ask, put);
}

void MooncakeStore::figures(TierStats* stats) const {
  stats->diverged = epochs_.diverged();
  if (const EpochPtr epoch = epochs_.current())
    stats->epoch_id = EpochRegistry::id_of(EpochRegistry::name_of(epoch));
  stats->names_complete = stats->scan_complete = true;
}

}  // namespace mooncake

std::unique_ptr<Tier> make_mooncake_tier(const MooncakeTierOptions& options) {
  check_options(options);  // before a process is started
  return with_encrypted_keys(
      make_thread_pool_tier(std::make_unique<mooncake::MooncakeStore>(options), options), options.form.keys,
      options.namespace_id);
}

}  // namespace kv_offload
