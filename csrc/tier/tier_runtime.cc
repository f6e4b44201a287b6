// SPDX-License-Identifier: Apache-2.0
#include "tier/tier_runtime.h"

#include <cerrno>

#include "record/record.h"

namespace kv_offload {
namespace {

Status reset_error() {
  return Status::error(StatusKind::kCancelled, "the tier was reset after the op was submitted");
}

void learn(PresenceCache& presence, const OpInFlight& in_flight, const Status& status) {
  const ChunkKey& key = in_flight.op.key;
  const PresenceCache::EpochNumber epoch_number = in_flight.submitted.epoch_number;
  if (in_flight.op.kind == OpKind::kRemove) {
    if (status) presence.removed(key, TierRemoval::Reason::kEvicted, epoch_number);
    if (status.kind() == StatusKind::kNotFound)
      presence.removed(key, TierRemoval::Reason::kVanished, epoch_number);
    return;
  }
  if (in_flight.op.kind == OpKind::kWrite) {
    if (status) presence.written(key, epoch_number);
    return;
  }
  if (status) presence.was_read(key, epoch_number);
  if (status.kind() == StatusKind::kCorrupt)
    presence.removed(key, TierRemoval::Reason::kCorrupt, epoch_number);
  if (status.kind() == StatusKind::kNotFound)
    presence.removed(key, TierRemoval::Reason::kVanished, epoch_number);
}

}  // namespace

OpInFlight::OpInFlight(std::shared_ptr<TierRuntime> shared, TierOp tier_op, Submitted in)
    : op(std::move(tier_op)),
      submitted(std::move(in)),
      shared_(std::move(shared)),
      waiting_bytes_(op.kind == OpKind::kRead ? padded_payload_bytes(op.shards) : 0) {
  shared_->read_bytes_waiting.fetch_add(waiting_bytes_);
}

OpInFlight::~OpInFlight() {
  stop_waiting();
  if (pass_) shared_->breaker(lane()).withdraw(*pass_);
}

bool OpInFlight::admit(Nanos now) {
  pass_ = shared_->breaker(lane()).admit(now);
  return pass_.has_value();
}

// Runs in the epoch that the op was submitted in, or not at all.
Status OpInFlight::run() {
  RecordStore& store = *shared_->store;
  const RecordStore::EpochPtr& epoch = submitted.epoch;
  const bool is_read = op.kind == OpKind::kRead;
  const bool is_write = op.kind == OpKind::kWrite;
  if (!epoch && is_write) return Status::error(StatusKind::kUnavailable, "a reset is in progress");
  if (epoch != store.epoch()) return reset_error();
  if (!epoch) return Status::error(StatusKind::kNotFound, "no record of this key");
  if (is_write && shared_->presence_cache && shared_->presence_cache->contains(op.key) == Presence::kPresent)
    return Status::ok();
  Status status = catch_exceptions([&] {
    Status done = is_read    ? store.read(op, epoch, &moved)
                  : is_write ? store.write(op, epoch, &moved)
                             : store.remove(op.key, epoch);
    if (shared_->presence_cache) learn(*shared_->presence_cache, *this, done);
    return done;
  });
  // The result may belong to an epoch that has ended.
  return epoch == store.epoch() ? status : reset_error();
}

void OpInFlight::end(const Status& status, double seconds, double queued_seconds, const Clock& clock) {
  stop_waiting();
  report_to_breaker(status, clock);
  const std::uint64_t bytes = status ? moved : 0;
  ended_.front() = {op.id, op.kind, op.key, copy_of(status), bytes, seconds, queued_seconds};
  shared_->complete(std::move(ended_));
}

void OpInFlight::report_to_breaker(const Status& status, const Clock& clock) {
  const auto pass = std::exchange(pass_, std::nullopt);
  if (!pass) return;
  CircuitBreaker& breaker = shared_->breaker(lane());
  if (device_failed(status)) {
    breaker.failed(*pass, clock.now());
  } else if (device_answered(status, moved)) {
    shared_->answered(lane(), *pass);
  } else {
    breaker.withdraw(*pass);
  }
}

Status run_locate(TierRuntime& shared, std::span<const ChunkKey> keys, KeyOrder order,
                  const Submitted& submitted) {
  if (!submitted.epoch || submitted.epoch != shared.store->epoch()) return reset_error();
  std::vector<bool> present(keys.size()), failed(keys.size());
  Status status = shared.store->locate_in_parts(keys, order, submitted.epoch, &present, &failed);
  if (!status || !shared.presence_cache) return status;
  for (std::size_t i = 0; i < present.size(); ++i) {
    if (failed[i]) {
      shared.presence_cache->cancel_lookup(keys.subspan(i, 1), submitted.epoch_number);
    } else {
      shared.presence_cache->answered(keys[i], present[i], submitted.epoch_number);
    }
  }
  shared.presence_cache->skipped(keys.subspan(present.size()), submitted.epoch_number);
  return status;
}

Status breaker_open_error() {
  return Status::error(StatusKind::kUnavailable,
                       "the tier is out of service for now: its device is stuck or keeps failing");
}

bool device_failed(const Status& status) {
  return (status.kind() == StatusKind::kIo && status.error_number() != ENOENT) ||
         (status.kind() == StatusKind::kTimeout && status.error_number() != EBUSY) ||
         (status.kind() == StatusKind::kNoSpace && status.error_number() != 0);
}

bool device_answered(const Status& status, std::uint64_t moved) {
  return moved > 0 || status.kind() == StatusKind::kCorrupt;
}

}  // namespace kv_offload
