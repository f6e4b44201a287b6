// SPDX-License-Identifier: Apache-2.0
#include "backends/s3/store.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "record/streaming_record_reader.h"
#include "tier/encrypted_key_tier.h"

namespace kv_offload {
namespace s3 {
namespace {

constexpr std::size_t kMaxDamagedKeys = 4096;
constexpr unsigned kEpochCheckInterval = 30;  // calls of maintain(): each look is a request that costs money

bool is_done(const Answer& answer) { return answer.status == 200 || answer.status == 204; }
// Another process was faster, or is about to be.
bool is_refused_condition(const Answer& answer) { return answer.status == 412 || answer.status == 409; }

Status no_replacement() {
  return Status::error(
      StatusKind::kDeclined,
      "the hosts of this engine have different epochs, and the store does not support "
      "If-Match in PUT requests, so none can be replaced safely: give all hosts a new prefix");
}

}  // namespace

S3Store::S3Store(const S3TierOptions& options)
    : options_(options),
      prefix_(fmt::format("{}/{}/", options.prefix, hex_of(options.namespace_id))),
      startup_epoch_key_(prefix_ + "epoch"),
      client_(options.bucket, options.pause),
      form_(options.form) {
  std::string found;
  bool refused = false;
  Status status = fetch_startup_epoch(EpochRegistry::name_if_none(options.epoch), false, &found, &refused);
  const std::string name = EpochRegistry::replacement_of(found, options.epoch);
  std::string before;
  if (status && !name.empty() && !options.read_only) {
    before = found;
    status = replace_startup_epoch(found, name);
    // Another engine may have been faster.
    if (status) status = fetch_startup_epoch(EpochRegistry::new_name(), false, &found, &refused);
  }
  const Status usable = EpochRegistry::startup_problem(options.epoch, status, options.read_only);
  if (refused || !usable) {
    throw_resource("s3 tier {}: {}", address_of(options.bucket),
                   refused ? status.message() : usable.message());
  }
  epochs_.start_with(found, before, status);
}

std::string S3Store::epoch_problem() const {
  const std::string problem = epochs_.start_problem();
  return problem.empty() ? problem : fmt::format("{}: {}", address_of(options_.bucket), problem);
}

std::string S3Store::key_of(const ChunkKey& key, const EpochPtr& epoch) const {
  return fmt::format("{}{}/{}", prefix_, EpochRegistry::name_of(epoch), key.hex());
}

void S3Store::stop() {
  stopped_ = true;
  client_.stop();
}

// ---- records

Status S3Store::check_exists(const std::string& key, Deadline until, bool* exists) {
  Answer answer;
  const Request ask{.verb = Verb::kHead, .key = key};
  if (Status status = client_.call(ask, until, &answer); !status) return status;
  *exists = answer.status == 200;
  return *exists || answer.status == 404 ? Status::ok() : refusal(answer, options_.bucket);
}

// A record may exist even if a lookup missed it: the lookup is as old as the prompt took to compute, and for
// a prefix it does not check every key. If-None-Match is not used: concurrent writers of a key write the same
// bytes, and not every store supports it.
Status S3Store::write(const TierOp& op, const EpochPtr& epoch, std::uint64_t* moved) {
  const Deadline until = deadline();
  Request request{.verb = Verb::kPut, .key = key_of(op.key, epoch)};
  // A copy has listed the records that exist.
  if (!take_damaged_key(request.key) && !op.is_whole_record && existence_check_.should_check()) {
    bool exists = false;
    if (Status status = check_exists(request.key, until, &exists); !status) return status;
    existence_check_.record_result(exists);
    if (exists) return Status::ok();
  }

  OutgoingRecord record(form_, options_.namespace_id, op);
  if (Status status = record.encode(); !status) return status;
  if (Status status = record.finish(); !status) return status;
  request.from = record.pieces();
  Answer answer;
  if (Status status = client_.call(request, until, &answer); !status) return status;
  if (!is_done(answer)) {
    const Status status = refusal(answer, options_.bucket);
    // For a write, 404 is not a miss.
    return status.kind() == StatusKind::kNotFound
               ? Status::error(StatusKind::kIo, "the store answered a write with 404")
               : status;
  }
  *moved = record.written();
  return Status::ok();
}

Status S3Store::read(const TierOp& op, const EpochPtr& epoch, std::uint64_t* moved) {
  const Deadline until = deadline();
  IncomingRecord record(form_, options_.namespace_id, op);
  Request request{.verb = Verb::kGet, .key = key_of(op.key, epoch)};
  request.into = record.pieces();
  request.least_bytes = kRecordHeaderBytes;
  StreamingRecordReader opened(record);
  request.observer = &opened;
  Answer answer;
  if (Status status = client_.call(request, until, &answer); !status) return status;
  if (answer.status != 200) return refusal(answer, options_.bucket);
  Status status;
  if (answer.wrong_length) {
    status = Status::error(StatusKind::kCorrupt, fmt::format("{} bytes long, expected {} at most",
                                                             answer.length, record.max_bytes()));
  } else {
    status = record.check_length(answer.length);
    if (status) status = opened.finish(answer.length);
    if (status) *moved = record.payload_bytes();
  }
  // Damaged, or written in another version of the format.
  const bool wrong = status.kind() == StatusKind::kCorrupt || status.kind() == StatusKind::kNotFound;
  if (wrong && !options_.read_only) {
    const bool removed = remove_damaged(request.key, answer.etag, until);
    const MutexLock lock(mutex_);
    if (!removed && damaged_keys_.size() < kMaxDamagedKeys) damaged_keys_.insert(request.key);
  }
  return status;
}

Status S3Store::remove(const ChunkKey& key, const EpochPtr& epoch) {
  if (options_.read_only) return Status::error(StatusKind::kDeclined, "write_policy is read_only", EROFS);
  Answer answer;
  const Request request{.verb = Verb::kDelete, .key = key_of(key, epoch)};
  if (Status status = client_.call(request, deadline(), &answer); !status) return status;
  if (is_done(answer)) return Status::ok();  // most stores do not report whether there was an object
  const Status refused = refusal(answer, options_.bucket);
  if (refused.kind() == StatusKind::kNotFound || answer.status == 429 || answer.status >= 500) return refused;
  // No permission: the object stays until it expires. That stops no writes.
  return Status::error(StatusKind::kDeclined, refused.message());
}

// True once after a read found a damaged object and could not remove it.
bool S3Store::take_damaged_key(const std::string& key) {
  const MutexLock lock(mutex_);
  return damaged_keys_.erase(key) > 0;
}

// Removes the object only if it is still there. If the removal fails, the next write replaces it. A refused
// condition counts as a failure, because some stores refuse their own ETag. If the store does not support
// If-Match in DELETE, an object written between the two requests is lost, too; that is a miss.
bool S3Store::remove_damaged(const std::string& key, const std::string& etag, Deadline until) {
  Request request{.verb = Verb::kHead, .key = key};
  Answer answer;
  if (!client_.call(request, until, &answer)) return false;
  // Removed or replaced meanwhile.
  if (answer.status != 200 || answer.etag != etag) return answer.status == 200 || answer.status == 404;
  request.verb = Verb::kDelete;
  if (!etag.empty()) request.condition = "If-Match: " + etag;
  bool answered = static_cast<bool>(client_.call(request, until, &answer));
  // 501: the store does not support the condition.
  if (answered && answer.status == 501) {
    request.condition.clear();
    answered = static_cast<bool>(client_.call(request, until, &answer));
  }
  return answered && (is_done(answer) || answer.status == 404);
}

Status S3Store::locate(std::span<const ChunkKey> keys, KeyOrder order, const EpochPtr& epoch,
                       std::vector<bool>* present) {
  const Deadline until = deadline();
  present->assign(keys.size(), false);
  bool exists = false;
  if (order == KeyOrder::kNone) {
    for (std::size_t i = 0; i < keys.size(); ++i) {
      if (Status status = check_exists(key_of(keys[i], epoch), until, &exists); !status) return status;
      (*present)[i] = exists;
    }
    return Status::ok();
  }
  // The first `known` keys are present; the key at `missing` is not.
  std::size_t known = 0, missing = keys.size(), step = 1;
  while (known < missing) {
    // Doubles the step until a key is missing; then bisects.
    const std::size_t at =
        missing == keys.size() ? std::min(known + step, missing) - 1 : known + (missing - known) / 2;
    if (Status status = check_exists(key_of(keys[at], epoch), until, &exists); !status) return status;
    if (exists) {
      known = at + 1;
    } else {
      missing = at;
    }
    step *= 2;
  }
  present->assign(known, true);
  // The keys after the missing one were not asked for: they may be stored if another tier has that one.
  if (missing < keys.size()) present->push_back(false);
  return Status::ok();
}

// ---- epochs

Status S3Store::put(const std::string& key, std::string_view text, const std::string& condition,
                    Deadline until, Answer* answer) {
  Request request{.verb = Verb::kPut, .key = key, .condition = condition, .once = true};
  request.from.emplace_back(std::as_bytes(std::span(text)));
  return client_.call(request, until, answer);
}

Status S3Store::read_startup_epoch(Deadline until, std::string* found, std::string* etag, bool* refused) {
  std::string text(EpochRegistry::kNameDigits, '\0');
  Request request{.verb = Verb::kGet, .key = startup_epoch_key_};
  request.into.emplace_back(std::as_writable_bytes(std::span(text)));
  Answer answer;
  found->clear();
  const Status status = client_.call(request, until, &answer);
  *refused = is_configuration_error(answer);
  if (!status) return status;
  *etag = answer.etag;
  if (answer.status == 200) {
    if (!answer.wrong_length && EpochRegistry::is_name(text)) *found = text;
    if (found->empty() && etag->empty()) etag->assign(1, '*');  // g++ 12 at -O2 warns about "*"
    return Status::ok();
  }
  etag->clear();
  const Status refused_by = refusal(answer, options_.bucket);
  return refused_by.kind() == StatusKind::kNotFound ? Status::ok() : refused_by;
}

// True if the store respects If-None-Match. After the first request the object certainly exists, so the
// second one must be refused.
bool S3Store::supports_conditions(Deadline until) {
  Answer answer;
  for (int tries = 0; tries < 2; ++tries) {
    if (!put(options_.prefix + "/conditions", "", "If-None-Match: *", until, &answer)) return false;
    if (answer.status == 412) return true;
  }
  return false;
}

// Ok if the store respects If-Match in PUT: no object has this ETag.
Status S3Store::check_replacement(Deadline until) {
  Answer answer;
  const std::string condition = fmt::format("If-Match: \"{:032d}\"", 0);
  if (Status status = put(options_.prefix + "/conditions", "", condition, until, &answer); !status)
    return status;
  if (is_refused_condition(answer) || answer.status == 404) return Status::ok();
  return is_done(answer) || answer.status == 501 ? no_replacement() : refusal(answer, options_.bucket);
}

Status S3Store::replace_startup_epoch(const std::string& stored, const std::string& name) {
  const Deadline until = deadline();
  if (Status status = check_replacement(until); !status) return status;
  std::string found, etag;
  bool refused = false;
  if (Status status = read_startup_epoch(until, &found, &etag, &refused); !status) return status;
  if (found != stored) return Status::ok();
  if (etag.empty()) {  // an empty condition would not be sent
    return Status::error(StatusKind::kDeclined,
                         "the hosts of this engine have different epochs, and the store returns no ETag, so "
                         "none can be replaced safely: give all hosts a new prefix");
  }
  Answer answer;
  if (Status status = put(startup_epoch_key_, name, "If-Match: " + etag, until, &answer); !status)
    return status;
  if (is_done(answer) || is_refused_condition(answer) || answer.status == 404) return Status::ok();
  return refusal(answer, options_.bucket);
}

Status S3Store::fetch_startup_epoch(const std::string& name, bool is_known, std::string* found,
                                    bool* refused) {
  const Deadline until = deadline();
  for (int tries = 0; tries < 3; ++tries) {
    std::string etag;
    if (Status status = read_startup_epoch(until, found, &etag, refused); !status) return status;
    if (!found->empty() || options_.read_only) return Status::ok();
    // No process uses an object that is not an epoch name, so it may be replaced. An older name is restored
    // only if no object is there.
    if (is_known && (!etag.empty() || !supports_conditions(until))) return Status::ok();
    if (epochs_.has_ended(name))
      return Status::error(StatusKind::kUnavailable, "the tier was reset meanwhile");
    const std::string condition = etag.empty() ? "If-None-Match: *" : "If-Match: " + etag;
    Answer answer;
    if (Status status = put(startup_epoch_key_, name, condition, until, &answer); !status) return status;
    if (answer.status == 501 && !is_known) {
      if (Status status = put(startup_epoch_key_, name, {}, until, &answer); !status) return status;
    }
    if (is_done(answer) || is_refused_condition(answer)) continue;  // read the object that is there now
    *refused = is_configuration_error(answer);
    const Status status = refusal(answer, options_.bucket);
    return status.kind() == StatusKind::kNotFound
               ? Status::error(StatusKind::kIo, "the store answered a write with 404")
               : status;
  }
  return Status::error(StatusKind::kIo, "the store does not keep the epoch");
}

void S3Store::maintain() {
  if (stopped_) return;  // there is nothing to flush
  if (epochs_.current() != nullptr && maintained_++ % kEpochCheckInterval != 0) return;
  std::string known, found;
  const std::string name = epochs_.name_if_missing(options_.epoch, &known);
  bool refused = false;
  if (!fetch_startup_epoch(name, !known.empty(), &found, &refused)) return;
  if (epochs_.has_ended(found)) return replace_ended_epoch(found, known);
  epochs_.update_startup_epoch(known, found, options_.read_only);
}

void S3Store::replace_ended_epoch(const std::string& ended, const std::string& name) {
  if (name.empty() || epochs_.has_ended(name)) return;
  // maintain() tries again later.
  if (replace_startup_epoch(ended, name).kind() != StatusKind::kDeclined) return;
  // The store cannot replace it safely. A new name has no records, so it may even overwrite that of another
  // reset.
  Answer answer;
  (void)put(startup_epoch_key_, EpochRegistry::new_name(), {}, deadline(), &answer);
}

Status S3Store::begin_epoch() {
  const auto ask = [&](std::string* kept) {
    std::string known;
    const std::string name = epochs_.name_if_missing(options_.epoch, &known);
    bool refused = false;
    return fetch_startup_epoch(name, !known.empty(), kept, &refused);
  };
  const auto put_new = [&](const std::string& name) {
    Answer answer;
    if (Status status = put(startup_epoch_key_, name, {}, deadline(), &answer); !status) return status;
    if (is_done(answer)) return Status::ok();
    return Status::error(StatusKind::kIo, fmt::format("the store did not store the new epoch: {}",
                                                      refusal(answer, options_.bucket).message()));
  };
  return epochs_.begin(ask, put_new);
}

void S3Store::figures(TierStats* stats) const {
  stats->diverged = epochs_.diverged();
  if (const EpochPtr epoch = epochs_.current())
    stats->epoch_id = EpochRegistry::id_of(EpochRegistry::name_of(epoch));
  stats->names_complete = stats->scan_complete = true;
}

}  // namespace s3

std::unique_ptr<Tier> make_s3_tier(const S3TierOptions& options) {
  if (options.prefix.empty() || options.prefix.find("//") != std::string::npos ||
      options.prefix.find_first_not_of(
          "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_./") != std::string::npos) {
    throw_invalid("prefix is {:?}; possible: letters, digits, - _ . and single /", options.prefix);
  }
  return with_encrypted_keys(make_thread_pool_tier(std::make_unique<s3::S3Store>(options), options),
                             options.form.keys, options.namespace_id);
}

}  // namespace kv_offload
