#include "storage/pooled_ops.h"

#include <cerrno>

namespace kv_offload {
namespace {

Status of_before_a_reset() {
  return Status::error(StatusKind::kCancelled, "the tier was reset after the op was submitted");
}

void learn(PresenceCache& presence, const OpInFlight& in_flight, const Status& status) {
  const ChunkKey& key = in_flight.op.key;
  const PresenceCache::Era era = in_flight.submitted.era;
  if (status) return presence.written(key, era);
  if (in_flight.op.kind != OpKind::kRead) return;
  if (status.kind() == StatusKind::kCorrupt) presence.gone(key, TierRemoval::Reason::kCorrupt, era);
  if (status.kind() == StatusKind::kNotFound) presence.gone(key, TierRemoval::Reason::kVanished, era);
}

}  // namespace

Status run_op(PooledStore& shared, OpInFlight& in_flight) {
  RecordStore& store = *shared.store;
  const TierOp& op = in_flight.op;
  const RecordStore::EpochPtr& epoch = in_flight.submitted.epoch;
  const bool is_read = op.kind == OpKind::kRead;
  if (!epoch && !is_read) return Status::error(StatusKind::kUnavailable, "a reset is under way");
  if (epoch != store.epoch()) return of_before_a_reset();
  if (!epoch) return Status::error(StatusKind::kNotFound, "no record of this key");
  if (!is_read && shared.learnt && shared.learnt->contains(op.key) == Presence::kPresent) return Status::ok();
  Status status = contained([&] {
    Status done =
        is_read ? store.read(op, epoch, &in_flight.moved) : store.write(op, epoch, &in_flight.moved);
    if (shared.learnt) learn(*shared.learnt, in_flight, done);
    return done;
  });
  // It may be of a time that is over.
  return epoch == store.epoch() ? status : of_before_a_reset();
}

Status run_locate(PooledStore& shared, std::span<const ChunkKey> keys, KeyOrder order,
                  const Submitted& submitted) {
  if (!submitted.epoch || submitted.epoch != shared.store->epoch()) return of_before_a_reset();
  std::vector<bool> present(keys.size());
  Status status = shared.store->locate(keys, order, submitted.epoch, &present);
  for (std::size_t i = 0; status && shared.learnt && i < keys.size(); ++i)
    shared.learnt->answered(keys[i], present[i], submitted.era);
  return status;
}

Status off() {
  return Status::error(StatusKind::kUnavailable,
                       "the tier is off for now: its device is stuck or keeps failing");
}

bool device_failed(const Status& status) {
  return status.kind() == StatusKind::kIo ||
         (status.kind() == StatusKind::kTimeout && status.error_number() != EBUSY) ||
         (status.kind() == StatusKind::kNoSpace && status.error_number() != 0);
}

bool device_answered(const Status& status, std::uint64_t moved) {
  return moved > 0 || status.kind() == StatusKind::kCorrupt;
}

}  // namespace kv_offload
