// SPDX-License-Identifier: Apache-2.0
#include "hosts/remote_tier.h"

#include <algorithm>
#include <exception>
#include <map>
#include <utility>

#include "base/make_room.h"
#include "hosts/op_table.h"
#include "policy/fair_turns.h"
#include "tier/presence.h"

namespace kv_offload {
namespace {

class RemoteTier final : public Tier {
 public:
  RemoteTier(std::shared_ptr<TierChannel> channel, std::uint8_t index, RemoteTierOptions options)
      : channel_(std::move(channel)),
        index_(index),
        options_(std::move(options)),
        presence_(clock_, options_.absent_for, options_.most_keys) {}
  ~RemoteTier() override { close(); }

  std::string_view name() const override { return options_.name; }
  void submit(std::vector<TierOp> ops) override;
  bool cancel(OpId id) override;
  void poll(std::vector<Completion>* completions, std::vector<TierRemoval>* removals) override;
  Presence contains(const ChunkKey& key) const override;
  void forget_miss(const ChunkKey& key) override { presence_.forget_miss(key); }
  void prefetch_presence(std::vector<ChunkKey> keys, const LookupOptions& options) override;
  void touch(const ChunkKey& key) override;
  void used(const TierUses& uses) override;
  Status reset(std::uint64_t startup_id) override;
  void begin_reset(std::uint64_t startup_id) override { order_reset(startup_id, false); }
  void refresh_epoch() override { order_reset(0, true); }
  TierStats stats() const override;
  TierAvailability availability() const override {
    return {host_.readable && is_usable(), host_.writable && is_usable(), host_.is_shared};
  }
  void close() override;
  double estimate_read_seconds(std::uint64_t bytes) const override;

 private:
  struct InFlight {
    OpKind kind = OpKind::kRead;
    ChunkKey key;
    Nanos submitted{0};
    PresenceCache::EpochNumber epoch = 0;
    bool is_sent = false;
  };
  using Waiting = std::map<std::uint64_t, HostOp>;  // see FairTurns; the number increases

  bool is_usable() const { return connection_ != 0 && !needs_reset_ && !closed_; }
  // The status of an op that cannot be sent. Short, like those for end_waiting(): a copy needs no memory, so
  // that either all ops end or none.
  Status refusal() const;
  template <typename Frame>
  static TierChannel::Frame framed(FrameType type, const Frame& frame) {
    return {type, encode(frame)};
  }
  void take_events();
  void take(Nanos at, TierChannel::Lost&);
  void take(Nanos at, TierChannel::Ready& ready);
  void take(Nanos at, TierResults& frame);
  void take(Nanos at, TierAnswers& frame);
  void take(Nanos at, TierRemovals& frame);
  void take(Nanos at, TierResetDone& frame);
  void take(Nanos at, TierState& frame);
  static HostOp order_of(const TierOp& op, Nanos now);
  double cost_of(const HostOp& op) const;  // see FairTurns
  void send_waiting();
  void end_waiting(const Status& status);
  // REQUIRES: the op is in ops_.
  void end(OpId id, Status status, std::uint64_t bytes = 0, double seconds = 0, double queued = 0);
  void order_reset(std::uint64_t startup_id, bool refreshes);
  void send_reset();
  void cancel_all();
  void send_touches();

  // First what a step needs if nothing has happened, see TierChannel::has_events_.
  const std::shared_ptr<TierChannel> channel_;
  TierChannel::ConnectionNumber connection_ = 0;  // 0: orders would not reach the host
  const std::uint8_t index_;
  bool is_idle_ = false;      // poll() would do nothing if there are no events
  bool needs_reset_ = false;  // the host has not confirmed the last reset
  bool closed_ = false;
  TierAvailability host_;  // as in its last state
  std::vector<TierUse> touched_;
  const RemoteTierOptions options_;
  const SteadyClock clock_;
  PresenceCache presence_;
  std::uint64_t epoch_ = 0;       // number of resets
  std::uint64_t startup_id_ = 0;  // of the last one
  bool refreshes_ = false;        // the last one is a refresh_epoch()
  Nanos reset_sent_{0};
  Status reset_status_;
  OpTable<InFlight> ops_;
  std::uint32_t reads_ = 0;      // of ops_
  std::size_t sent_writes_ = 0;  // of ops_
  Waiting waiting_;              // writes that were not sent; those not in ops_ were cancelled
  FairTurns turns_;              // of them
  std::uint64_t last_waiting_ = 0;
  std::vector<TierChannel::Event> events_;  // those before next_event_ have been processed
  std::size_t next_event_ = 0;
  std::vector<Completion> completions_;  // not polled yet
  std::vector<TierRemoval> removals_;
  std::vector<TierRemoval> forgotten_;  // scratch of poll()
  TierState state_;
};

// ---- orders

HostOp RemoteTier::order_of(const TierOp& op, Nanos now) {
  HostOp order;
  order.id = op.id;
  order.kind = op.kind;
  order.key = op.key;
  order.row = op.kind == OpKind::kRemove ? 0 : op.row;
  order.group = op.group;
  if (op.deadline != Nanos(0))
    order.nanos_left = static_cast<std::uint64_t>(std::max<Nanos::rep>((op.deadline - now).count(), 1));
  order.entry_info = op.entry_info;
  order.weight = op.weight;
  order.may_decline = op.may_decline;
  order.tenant = op.tenant;
  return order;
}

Status RemoteTier::refusal() const {
  if (closed_) return Status::error(StatusKind::kUnavailable, "it is closed");
  if (connection_ != 0 && needs_reset_) return Status::error(StatusKind::kUnavailable, "it is not reset");
  return host_lost_error();
}

void RemoteTier::submit(std::vector<TierOp> ops) {
  take_events();
  const Nanos now = clock_.now();
  make_room(completions_, ops_.size() + ops.size());  // end() allocates nothing
  TierOps to_send{index_, {}};
  to_send.ops.reserve(ops.size());
  Waiting waiting;
  std::size_t writes = sent_writes_;
  std::size_t added = 0;
  const PresenceCache::EpochNumber epoch = presence_.epoch_number();
  const bool usable = is_usable();
  bool is_sent = false;
  try {
    for (const TierOp& op : ops) {
      const bool waits = usable && op.kind == OpKind::kWrite && writes >= options_.most_writes;
      writes += op.kind == OpKind::kWrite && !waits;
      HostOp order = order_of(op, now);
      if (waits) {
        waiting.emplace(FairTurns::key_of(op.entry_info.tenant, ++last_waiting_), std::move(order));
      } else {
        to_send.ops.push_back(std::move(order));
      }
      ops_.add(op.id) = {op.kind, op.key, now, epoch, !waits};
      reads_ += op.kind == OpKind::kRead;
      ++added;
    }
    is_sent = usable && (to_send.ops.empty() || channel_->send_ops(connection_, std::move(to_send)));
  } catch (...) {
    for (std::size_t i = 0; i < added; ++i) {
      reads_ -= ops[i].kind == OpKind::kRead;
      ops_.erase(ops[i].id);
    }
    throw;
  }
  waiting_.merge(waiting);
  sent_writes_ = writes;
  if (is_sent) return;
  for (const TierOp& op : ops) {
    if (ops_.find(op.id)->is_sent) end(op.id, refusal());
  }
}

double RemoteTier::cost_of(const HostOp& op) const {
  const std::uint64_t bytes = op.group < options_.group_bytes.size() ? options_.group_bytes[op.group] : 0;
  return static_cast<double>(std::max<std::uint64_t>(bytes, 1)) / op.weight;
}

// Sends writes that waited, as many as may be sent. If memory runs out, throws, and they still wait.
void RemoteTier::send_waiting() {
  std::erase_if(waiting_,
                [this](const auto& at) { return ops_.find(at.second.id) == nullptr; });  // cancelled
  if (waiting_.empty() || !is_usable() || sent_writes_ >= options_.most_writes) return;
  const std::size_t count = std::min(waiting_.size(), options_.most_writes - sent_writes_);
  std::vector<Waiting::node_type> chosen;
  TierOps to_send{index_, {}};
  bool is_sent = false;
  try {
    chosen.reserve(count);
    to_send.ops.reserve(count);
    while (chosen.size() < count) {
      const auto next = turns_.next(waiting_);
      turns_.charge(FairTurns::tenant_of(next->first), cost_of(next->second));
      chosen.push_back(waiting_.extract(next));
      to_send.ops.push_back(chosen.back().mapped());
    }
    is_sent = channel_->send_ops(connection_, std::move(to_send));
  } catch (...) {
    for (auto& node : chosen) waiting_.insert(std::move(node));
    throw;
  }
  if (!is_sent) {  // the connection is lost
    for (auto& node : chosen) waiting_.insert(std::move(node));
    return;
  }
  for (const auto& node : chosen) ops_.find(node.mapped().id)->is_sent = true;
  sent_writes_ += count;
}

void RemoteTier::end_waiting(const Status& status) {
  for (const auto& [number, op] : std::exchange(waiting_, {})) {
    if (ops_.find(op.id) != nullptr) end(op.id, status);
  }
}

bool RemoteTier::cancel(OpId id) {
  const InFlight* op = ops_.find(id);
  if (op == nullptr) return false;
  if (!op->is_sent) {
    end(id, Status::error(StatusKind::kCancelled, "it had not started"));
    return true;
  }
  if (op->kind == OpKind::kWrite || connection_ == 0) return false;
  std::vector<TierChannel::Frame> frames;
  frames.push_back(framed(FrameType::kCancel, TierCancel{index_, {id}}));
  (void)channel_->send(connection_, std::move(frames));
  return false;  // it completes kCancelled if it had not started
}

void RemoteTier::prefetch_presence(std::vector<ChunkKey> keys, const LookupOptions& options) {
  if (keys.empty() || !is_usable() || !host_.readable) return;
  const PresenceCache::EpochNumber epoch = presence_.epoch_number();
  std::vector<ChunkKey> started;
  started.reserve(keys.size());
  presence_.begin_lookup(keys, epoch, &started);
  if (started.empty()) return;
  try {
    std::vector<TierChannel::Frame> frames;
    for (std::size_t at = 0; at < started.size(); at += kMostKeys) {
      const auto begin = started.begin() + static_cast<std::ptrdiff_t>(at);
      const auto count = static_cast<std::ptrdiff_t>(std::min(kMostKeys, started.size() - at));
      frames.push_back(
          framed(FrameType::kLookup, TierLookup{index_, options, epoch_, {begin, begin + count}}));
    }
    if (channel_->send(connection_, std::move(frames))) return;
  } catch (...) {
    presence_.cancel_lookup(started, epoch);
    throw;
  }
  presence_.cancel_lookup(started, epoch);
}

void RemoteTier::touch(const ChunkKey& key) {
  if (touched_.size() == kMostUses) send_touches();
  is_idle_ = false;
  touched_.push_back({key, {}});
}

// Only the order of eviction depends on touches and uses.
void RemoteTier::send_touches() {
  if (is_usable()) {
    std::vector<TierChannel::Frame> frames;
    frames.emplace_back(FrameType::kUses, encode_uses(index_, true, touched_));
    (void)channel_->send(connection_, std::move(frames), true);
  }
  touched_.clear();
}

void RemoteTier::used(const TierUses& uses) {
  if (is_usable()) channel_->send_uses(connection_, index_, uses);
}

// ---- events

void RemoteTier::poll(std::vector<Completion>* completions, std::vector<TierRemoval>* removals) {
  if (is_idle_ && !channel_->has_events(index_)) return;
  if (!touched_.empty()) send_touches();
  take_events();
  make_room(*completions, completions_.size());  // passing them on must not throw
  if (needs_reset_ && connection_ != 0 && !closed_ && clock_.now() - reset_sent_ >= options_.reset_timeout) {
    send_reset();
  }
  presence_.take_removals(&forgotten_);
  // The others are in removals_: the host reports them, also for keys that presence_ does not know.
  for (const TierRemoval& removal : forgotten_) {
    if (removal.reason == TierRemoval::Reason::kReset) removals_.push_back(removal);
  }
  forgotten_.clear();
  removals->insert(removals->end(), removals_.begin(), removals_.end());
  removals_.clear();
  std::move(completions_.begin(), completions_.end(), std::back_inserter(*completions));
  completions_.clear();
  is_idle_ = waiting_.empty() && !needs_reset_ && presence_.has_reported_all();
}

// Throws if memory runs out. The next call processes the same event again, without a second effect.
void RemoteTier::take_events() {
  is_idle_ = false;
  const auto take_all = [this] {
    for (; next_event_ < events_.size(); ++next_event_) {
      TierChannel::Event& event = events_[next_event_];
      std::visit([&](auto& what) { take(event.at, what); }, event.what);
    }
  };
  take_all();
  events_ = channel_->take_events(index_);
  next_event_ = 0;
  take_all();
  events_ = {};
  if (!waiting_.empty()) send_waiting();
}

void RemoteTier::take(Nanos, TierChannel::Lost&) {
  connection_ = 0;
  end_waiting(host_lost_error());
  // The host may remove records meanwhile. Lookups that have no answer are forgotten too.
  presence_.reset();
}

void RemoteTier::take(Nanos, TierChannel::Ready& ready) {
  connection_ = ready.connection;
  // Their results are not known.
  for (const OpId id : ops_.ids()) end(id, host_lost_error());
  if (needs_reset_) send_reset();
}

void RemoteTier::take(Nanos at, TierResults& frame) {
  for (const HostResult& result : frame.results) {
    const InFlight* op = ops_.find(result.id);
    if (op == nullptr || !op->is_sent) continue;
    const Status status = result.kind == StatusKind::kOk
                              ? Status::ok()
                              : Status::error(result.kind, "on another host", result.error_number);
    // Includes the time on the network: that is what a request waits for.
    const double queued = std::max(to_seconds(at - op->submitted) - result.seconds, result.queued_seconds);
    end(result.id, status, result.bytes, result.seconds, queued);
  }
}

void RemoteTier::end(OpId id, Status status, std::uint64_t bytes, double seconds, double queued) {
  is_idle_ = false;
  const InFlight op = *ops_.find(id);
  // First, because this may throw: then the op has not ended, and its event is processed again.
  if (status) {
    if (op.kind == OpKind::kRemove) {
      presence_.removed(op.key, TierRemoval::Reason::kEvicted, op.epoch);
    } else {
      presence_.written(op.key, op.epoch);
    }
  } else if (op.kind == OpKind::kRemove && status.kind() == StatusKind::kNotFound) {
    presence_.removed(op.key, TierRemoval::Reason::kVanished, op.epoch);
  } else if (op.kind == OpKind::kRead && status.kind() == StatusKind::kCorrupt) {
    presence_.removed(op.key, TierRemoval::Reason::kCorrupt, op.epoch);
  } else if (op.kind == OpKind::kRead && status.kind() == StatusKind::kNotFound) {
    presence_.removed(op.key, TierRemoval::Reason::kVanished, op.epoch);
  }
  ops_.erase(id);
  reads_ -= op.kind == OpKind::kRead;
  sent_writes_ -= op.kind == OpKind::kWrite && op.is_sent;
  completions_.push_back({id, op.kind, op.key, std::move(status), bytes, seconds, queued});
}

void RemoteTier::take(Nanos, TierAnswers& frame) {
  if (frame.epoch != epoch_) return;
  const PresenceCache::EpochNumber epoch = presence_.epoch_number();
  for (const TierAnswers::Answer& answer : frame.answers) {
    if (answer.found == TierAnswers::Found::kUnknown) {
      presence_.cancel_lookup(std::span(&answer.key, 1), epoch);
      continue;
    }
    if (answer.found == TierAnswers::Found::kSkipped) {
      presence_.skipped(std::span(&answer.key, 1), epoch);
      continue;
    }
    const bool was_asked = presence_.contains(answer.key) == Presence::kLookupPending;
    const bool is_present = answer.found == TierAnswers::Found::kPresent;
    presence_.answered(answer.key, is_present, epoch);
    // The parts of this chunk on other hosts are useless.
    if (was_asked && !is_present) removals_.push_back({answer.key, TierRemoval::Reason::kVanished});
  }
}

void RemoteTier::take(Nanos, TierRemovals& frame) {
  if (frame.epoch != epoch_) return;
  for (const TierRemoval& removal : frame.removals) {
    presence_.removed(removal.key, removal.reason, presence_.epoch_number());
    removals_.push_back(removal);
  }
}

void RemoteTier::take(Nanos, TierResetDone& frame) {
  if (frame.epoch != epoch_) return;
  needs_reset_ = false;
  reset_status_ = frame.kind == StatusKind::kOk
                      ? Status::ok()
                      : Status::error(frame.kind, "a host could not reset its tier yet; it tries again");
  // The last state is from before the reset; the next one follows.
  state_.stats.epoch_id = 0;
  if (!reset_status_) host_.readable = host_.writable = false;
}

void RemoteTier::take(Nanos, TierState& frame) {
  state_ = std::move(frame);
  state_.stats.tenant_bytes.resize(std::min(state_.stats.tenant_bytes.size(), options_.tenants));
  host_ = {state_.stats.readable, state_.stats.writable, state_.stats.is_shared};
}

// ---- the rest

Presence RemoteTier::contains(const ChunkKey& key) const {
  if (closed_ || needs_reset_) return Presence::kAbsent;
  if (connection_ == 0) return Presence::kLookupFailed;
  const Presence presence = presence_.contains(key);
  if (presence == Presence::kPresent || presence == Presence::kAbsent) return presence;
  return host_.readable ? presence : Presence::kLookupFailed;
}

void RemoteTier::send_reset() {
  reset_sent_ = clock_.now();
  std::vector<TierChannel::Frame> frames;
  frames.push_back(framed(FrameType::kReset, TierReset{index_, epoch_, startup_id_, refreshes_}));
  (void)channel_->send(connection_, std::move(frames));
}

void RemoteTier::order_reset(std::uint64_t startup_id, bool refreshes) {
  take_events();
  end_waiting(Status::error(StatusKind::kCancelled, "it was reset"));
  presence_.reset();
  ++epoch_;
  startup_id_ = startup_id;
  refreshes_ = refreshes;
  needs_reset_ = true;
  if (!closed_ && connection_ != 0) send_reset();
}

Status RemoteTier::reset(std::uint64_t startup_id) {
  begin_reset(startup_id);
  if (closed_) return Status::error(StatusKind::kUnavailable, "the tier is closed");
  const Nanos end = clock_.now() + options_.reset_timeout;
  while (needs_reset_) {
    if (connection_ == 0) {
      return Status::error(StatusKind::kUnavailable,
                           "a host is lost: its tier is reset before it is used again");
    }
    const Nanos left = end - clock_.now();
    if (left <= Nanos(0)) return Status::error(StatusKind::kTimeout, "a host did not confirm the reset");
    channel_->wait(index_, left);
    take_events();
  }
  return reset_status_;
}

TierStats RemoteTier::stats() const {
  TierStats stats = state_.stats;
  stats.readable = availability().readable;
  stats.writable = availability().writable;
  if (needs_reset_) stats.epoch_id = 0;  // a state from before the reset
  stats.queued_reads = reads_;           // the host's own figures are older
  stats.queued_writes = static_cast<std::uint32_t>(ops_.size()) - reads_;
  return stats;
}

void RemoteTier::close() {
  if (std::exchange(closed_, true)) return;
  // Steps that fail because memory runs out are left out. Ops may then stay in flight, as after a host that
  // did not end them in time: see Tier::close.
  const auto try_to = [](const auto& step) {
    try {
      step();
    } catch (const std::exception&) {
    }
  };
  try_to([this] { end_waiting(Status::error(StatusKind::kCancelled, "it is closed")); });
  try_to([this] { cancel_all(); });
  try_to([this] {
    const Nanos end = clock_.now() + options_.close_wait;
    while (!ops_.empty() && connection_ != 0 && clock_.now() < end) {
      channel_->wait(index_, end - clock_.now());
      take_events();
    }
  });
}

void RemoteTier::cancel_all() {
  if (connection_ == 0) return;
  TierCancel cancel{index_, {}};
  std::vector<TierChannel::Frame> frames;
  ops_.for_each([&](OpId id, const InFlight&) {
    cancel.ids.push_back(id);
    if (cancel.ids.size() < kMostKeys) return;
    frames.push_back(framed(FrameType::kCancel, cancel));
    cancel.ids.clear();
  });
  if (!cancel.ids.empty()) frames.push_back(framed(FrameType::kCancel, cancel));
  (void)channel_->send(connection_, std::move(frames));
}

double RemoteTier::estimate_read_seconds(std::uint64_t bytes) const {
  if (state_.read_bytes_per_second <= 0) return 0;
  return state_.queue_seconds + static_cast<double>(bytes) / state_.read_bytes_per_second;
}

}  // namespace

std::unique_ptr<Tier> make_remote_tier(std::shared_ptr<TierChannel> channel, std::uint8_t index,
                                       RemoteTierOptions options) {
  return std::make_unique<RemoteTier>(std::move(channel), index, std::move(options));
}

}  // namespace kv_offload
