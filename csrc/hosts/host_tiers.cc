// SPDX-License-Identifier: Apache-2.0
#include "hosts/host_tiers.h"

#include <algorithm>
#include <atomic>
#include <deque>
#include <limits>
#include <map>
#include <thread>
#include <unordered_map>
#include <utility>
#include <variant>

#include "base/thread.h"
#include "base/thread_annotations.h"
#include "memory/row_shards.h"

namespace kv_offload {
namespace {

constexpr std::size_t kMostOrders = 4096;                    // frames that wait for the thread
constexpr std::size_t kMostInFlight = std::size_t{1} << 18;  // ops of all tiers
constexpr Nanos kBusyWait = std::chrono::milliseconds(1);    // between two polls while an op is in flight
constexpr Nanos kIdleWait = std::chrono::milliseconds(100);
constexpr unsigned kAskAgain = 100;  // turns of at most kBusyWait until unknown keys are looked up again
constexpr Nanos kStateInterval = std::chrono::milliseconds(100);
constexpr Nanos kStateRefresh = std::chrono::seconds(1);
constexpr std::uint64_t kSampleBytes = 1 << 20;  // for the speed in TierState

struct NewConnection {
  std::uint64_t number = 0;  // 0: the old one has ended
};
struct NewTiers {
  std::uint32_t round = 0;
  std::vector<std::unique_ptr<Tier>> tiers;
  std::size_t tenants = 0;
};
struct ClosedTiers {
  std::shared_ptr<std::atomic<bool>> done;
};
struct ReceivedOps {
  TierOps frame;
  Nanos at{0};
};
using Order = std::variant<NewConnection, NewTiers, ClosedTiers, ReceivedOps, TierCancel, TierLookup,
                           TierUsesFrame, TierReset>;

}  // namespace

struct HostTiers::Impl {
  Impl(std::shared_ptr<const HostRegion> host_region, std::function<void()> wake)
      : region(std::move(host_region)), on_frames(std::move(wake)) {}

  const std::shared_ptr<const HostRegion> region;
  const std::function<void()> on_frames;
  const SteadyClock clock;
  std::thread thread;

  mutable Mutex mutex;
  mutable CondVar changed;
  std::deque<Order> orders GUARDED_BY(mutex);
  std::vector<Frame> outgoing GUARDED_BY(mutex);
  std::deque<OpenTiers> requests GUARDED_BY(mutex);
  std::uint64_t connections GUARDED_BY(mutex) = 0;  // number of the last one
  bool connected GUARDED_BY(mutex) = false;
  bool failed GUARDED_BY(mutex) = false;
  bool stopping GUARDED_BY(mutex) = false;
  std::size_t num_tiers GUARDED_BY(mutex) = 0;
  std::size_t num_tenants GUARDED_BY(mutex) = 0;
  mutable std::vector<std::vector<std::uint64_t>> known_layout;  // set once, under the mutex
  std::atomic<std::size_t> in_flight{0};

  // ---- the thread's
  // The keys of one frame with KeyOrder::kPrefix. Those after a missing one are useless.
  struct Prefix {
    std::size_t missing = std::numeric_limits<std::size_t>::max();  // position of the first one found so far
  };
  struct Lookup {
    LookupOptions options;           // of the last frame with this key
    std::shared_ptr<Prefix> prefix;  // null: the keys have no order
    std::size_t position = 0;
    unsigned turns = 0;  // since the lookup was last passed to the tier
  };
  struct Slot {
    std::unique_ptr<Tier> tier;
    std::uint64_t epoch = 0;                       // the last TierReset::epoch
    std::optional<StatusKind> reset_kind;          // of that reset; none: it threw
    std::unordered_map<OpId, bool> ops;            // in flight; true: of an earlier connection
    std::unordered_map<ChunkKey, Lookup> lookups;  // not answered yet
    bool was_reset = false;                        // its removals by the scheduler's reset are still coming
    TierState sent;
    Nanos looked_at{0}, sent_at{0};
  };
  std::vector<Slot> slots;
  std::uint64_t connection = 0;  // 0: none
  bool ops_ended = false;        // kOpsEnded was sent on this connection
  bool has_abandoned = false;    // tiers were closed while ops ran: their threads may still touch rows
  std::vector<Frame> made;       // frames of this turn

  void run();
  void turn(std::deque<Order> taken);
  void execute(NewConnection& order);
  void execute(NewTiers& order);
  void execute(ClosedTiers& order);
  void execute(ReceivedOps& order);
  void execute(TierCancel& order);
  void execute(TierLookup& order);
  void execute(TierUsesFrame& order);
  void execute(TierReset& order);
  void close_slots();
  void poll(std::uint8_t tier);
  void answer(std::uint8_t tier);
  void report_state(std::uint8_t tier, bool force);
  bool has_stale_ops() const;
  Nanos wait_time() const;
  TierOp to_tier_op(const HostOp& op, Nanos at) const;
  using Layout = std::vector<std::vector<std::uint64_t>>;
  const Layout& layout() const;  // REQUIRES: all ranks of this host have published
  template <typename Frame>
  void make(FrameType type, const Frame& frame) {
    made.emplace_back(type, encode(frame));
  }
  bool push(Order order) {
    {
      const MutexLock lock(mutex);
      if (stopping) return true;
      orders.push_back(std::move(order));
    }
    changed.notify_all();
    return true;
  }
  bool fits(const TierOps& frame) const;
  std::size_t tenant_count() const {
    const MutexLock lock(mutex);
    return std::max<std::size_t>(num_tenants, 1);
  }
  void fail() {
    {
      const MutexLock lock(mutex);
      failed = true;
    }
    on_frames();
  }
  // False: `tier` is not one of ours.
  bool has_tier(std::uint8_t tier) const {
    const MutexLock lock(mutex);
    return tier < num_tiers;
  }
};

// By group position, then per area of the engine as in GroupGeometry; 0 for areas of other hosts.
const HostTiers::Impl::Layout& HostTiers::Impl::layout() const {
  const MutexLock lock(mutex);
  if (!known_layout.empty()) return known_layout;
  Layout made_layout;  // completed before anyone sees it
  for (std::uint32_t i = 0; i < region->local_areas(); ++i) {
    const std::uint32_t area = region->first_area() + i;
    const std::vector<std::uint64_t> shard_bytes =
        region->geometry(area * region->ranks_per_area()).shard_bytes;
    made_layout.resize(std::max(made_layout.size(), shard_bytes.size()),
                       std::vector<std::uint64_t>(region->num_areas()));
    for (std::size_t group = 0; group < shard_bytes.size(); ++group)
      made_layout[group][area] = shard_bytes[group];
  }
  known_layout = std::move(made_layout);
  return known_layout;
}

TierOp HostTiers::Impl::to_tier_op(const HostOp& op, Nanos at) const {
  TierOp made_op;
  made_op.id = op.id;
  made_op.kind = op.kind;
  made_op.key = op.key;
  made_op.group = op.group;
  made_op.row = op.row;
  made_op.entry_info = op.entry_info;
  made_op.weight = op.weight;
  made_op.may_decline = op.may_decline;
  made_op.tenant = op.tenant;
  if (op.kind != OpKind::kRemove) made_op.shards = shards_of_row(*region, op.row, layout()[op.group], 1);
  made_op.memory = region;
  if (op.nanos_left != 0) made_op.deadline = at + Nanos(op.nanos_left);
  return made_op;
}

// ---- the thread

void HostTiers::Impl::run() {
  begin_thread("kvo-host-tiers", CpuShare::kFull);
  bool goes_on = true;
  while (goes_on) {
    // An exception that leaves the thread would end the process. Lost results end with the connection: the
    // scheduler then learns that no op is running any more.
    try {
      std::deque<Order> taken;
      {
        const MutexLock lock(mutex);
        if (orders.empty() && !stopping) changed.wait_for(mutex, wait_time());
        goes_on = !stopping;
        taken.swap(orders);
      }
      if (goes_on) turn(std::move(taken));
    } catch (const std::exception&) {
      made.clear();
      fail();
    }
  }
  close_slots();
}

Nanos HostTiers::Impl::wait_time() const {
  const bool is_busy = std::any_of(slots.begin(), slots.end(), [](const Slot& slot) {
    return !slot.ops.empty() || !slot.lookups.empty();
  });
  return is_busy ? kBusyWait : kIdleWait;
}

bool HostTiers::Impl::has_stale_ops() const {
  return has_abandoned || std::any_of(slots.begin(), slots.end(), [](const Slot& slot) {
           return std::any_of(slot.ops.begin(), slot.ops.end(), [](const auto& op) { return op.second; });
         });
}

void HostTiers::Impl::turn(std::deque<Order> taken) {
  for (Order& order : taken) {
    try {
      std::visit([this](auto& one) { execute(one); }, order);
    } catch (const std::exception&) {  // the others are still executed
      fail();
    }
  }
  std::size_t running = 0;
  for (std::uint8_t tier = 0; tier < slots.size(); ++tier) {
    poll(tier);
    answer(tier);
    running += slots[tier].ops.size();
  }
  in_flight = running;
  if (connection != 0 && !ops_ended && !has_stale_ops()) {
    made.emplace_back(FrameType::kOpsEnded, Bytes());
    ops_ended = true;
    for (std::uint8_t tier = 0; tier < slots.size(); ++tier) report_state(tier, true);
  }
  if (ops_ended) {
    for (std::uint8_t tier = 0; tier < slots.size(); ++tier) report_state(tier, false);
  }
  if (made.empty() && taken.empty()) return;
  {
    const MutexLock lock(mutex);
    // Frames of an earlier connection must not reach the next one.
    if (connected && connection == connections)
      std::move(made.begin(), made.end(), std::back_inserter(outgoing));
  }
  made.clear();
  on_frames();
}

void HostTiers::Impl::execute(NewConnection& order) {
  connection = order.number;
  ops_ended = false;
  made.clear();  // of the connection before
  for (Slot& slot : slots) {
    slot.lookups.clear();
    for (auto& [id, is_stale] : slot.ops) {
      is_stale = true;
      (void)slot.tier->cancel(id);
    }
  }
}

void HostTiers::Impl::close_slots() {
  for (Slot& slot : slots) {
    slot.tier->close();
    std::vector<Completion> completions;
    std::vector<TierRemoval> removals;
    slot.tier->poll(&completions, &removals);
    for (const Completion& ended : completions) slot.ops.erase(ended.id);
    has_abandoned |= !slot.ops.empty();
  }
  slots.clear();
}

void HostTiers::Impl::execute(ClosedTiers& order) {
  close_slots();
  {
    const MutexLock lock(mutex);
    num_tiers = 0;
    *order.done = true;
  }
  changed.notify_all();
}

void HostTiers::Impl::execute(NewTiers& order) {
  close_slots();
  TiersOpened frame;
  frame.round = order.round;
  for (auto& tier : order.tiers) {
    frame.tiers.push_back(opened(*tier));
    slots.emplace_back().tier = std::move(tier);
  }
  {
    const MutexLock lock(mutex);
    num_tiers = slots.size();
    num_tenants = order.tenants;
  }
  make(FrameType::kTiersOpened, frame);
  for (std::uint8_t tier = 0; tier < slots.size(); ++tier) report_state(tier, true);
}

void HostTiers::Impl::execute(ReceivedOps& order) {
  if (order.frame.tier >= slots.size()) return;  // closed meanwhile
  Slot& slot = slots[order.frame.tier];
  std::vector<TierOp> ops;
  std::vector<OpId> ids;
  ops.reserve(order.frame.ops.size());
  ids.reserve(order.frame.ops.size());
  try {
    for (const HostOp& op : order.frame.ops) {
      TierOp made_op = to_tier_op(op, order.at);
      // An id in flight would hide the end of its op.
      if (!slot.ops.emplace(op.id, false).second) continue;
      ids.push_back(op.id);
      ops.push_back(std::move(made_op));
    }
    slot.tier->submit(std::move(ops));
  } catch (const std::exception&) {
    for (const OpId id : ids) slot.ops.erase(id);
    throw;
  }
}

void HostTiers::Impl::execute(TierCancel& order) {
  if (order.tier >= slots.size()) return;
  for (const OpId id : order.ids) (void)slots[order.tier].tier->cancel(id);
}

void HostTiers::Impl::execute(TierLookup& order) {
  if (order.tier >= slots.size() || order.epoch != slots[order.tier].epoch) return;
  Slot& slot = slots[order.tier];
  std::vector<ChunkKey> unknown;
  const auto prefix =
      order.options.order == KeyOrder::kPrefix ? std::make_shared<Prefix>() : std::shared_ptr<Prefix>();
  for (std::size_t i = 0; i < order.keys.size(); ++i) {
    const ChunkKey& key = order.keys[i];
    slot.lookups.insert_or_assign(key, Lookup{order.options, prefix, i});
    const Presence presence = slot.tier->contains(key);
    if (!must_ask(presence)) continue;
    if (presence != Presence::kUnknown) slot.tier->forget_miss(key);
    unknown.push_back(key);
  }
  slot.tier->prefetch_presence(std::move(unknown), order.options);
}

void HostTiers::Impl::execute(TierUsesFrame& order) {
  if (order.tier >= slots.size()) return;
  Tier& tier = *slots[order.tier].tier;
  if (!order.is_touch) return tier.used(std::make_shared<std::vector<TierUse>>(std::move(order.uses)));
  for (const TierUse& use : order.uses) tier.touch(use.key);
}

void HostTiers::Impl::execute(TierReset& order) {
  if (order.tier >= slots.size()) return;
  Slot& slot = slots[order.tier];
  const bool is_repeated = order.epoch == slot.epoch;
  if (!is_repeated) {
    slot.epoch = order.epoch;
    slot.lookups.clear();
    slot.reset_kind.reset();
  }
  // A repeated order is only confirmed again, since the scheduler has sent no op meanwhile. A second reset
  // must not use the same id (EpochRegistry).
  if (!slot.reset_kind && order.refreshes) {
    slot.tier->refresh_epoch();
    slot.reset_kind = StatusKind::kOk;
  } else if (!slot.reset_kind) {
    slot.reset_kind = slot.tier->reset(is_repeated ? 0 : order.startup_id).kind();
    slot.was_reset = true;
  }
  make(FrameType::kResetDone, TierResetDone{order.tier, order.epoch, *slot.reset_kind});
  report_state(order.tier, true);
}

void HostTiers::Impl::poll(std::uint8_t tier) {
  Slot& slot = slots[tier];
  std::vector<Completion> completions;
  std::vector<TierRemoval> removals;
  slot.tier->poll(&completions, &removals);
  // Without allocating: an id that stayed would delay kOpsEnded for ever.
  std::erase_if(completions, [&](const Completion& ended) {
    const auto found = slot.ops.find(ended.id);
    const bool is_awaited = found != slot.ops.end() && !found->second;
    if (found != slot.ops.end()) slot.ops.erase(found);
    return !is_awaited;
  });
  TierRemovals removed{tier, slot.epoch, {}};
  if (removals.empty()) slot.was_reset = false;
  for (TierRemoval removal : removals) {
    if (removal.reason == TierRemoval::Reason::kReset) {
      if (slot.was_reset) continue;                     // the scheduler knows
      removal.reason = TierRemoval::Reason::kVanished;  // somebody removed the epoch's directory
    }
    removed.removals.push_back(removal);
    if (removed.removals.size() < kMostKeys) continue;
    make(FrameType::kRemovals, removed);
    removed.removals.clear();
  }
  // Before the results: a record that was read as damaged is removed before its read ends.
  if (!removed.removals.empty()) make(FrameType::kRemovals, removed);
  TierResults results{tier, {}};
  for (const Completion& ended : completions) {
    results.results.push_back({ended.id, ended.status.kind(), ended.status.error_number(), ended.bytes,
                               std::max(ended.seconds, 0.0), std::max(ended.queued_seconds, 0.0)});
    if (results.results.size() < kMostResults) continue;
    make(FrameType::kResults, results);
    results.results.clear();
  }
  if (!results.results.empty()) make(FrameType::kResults, results);
}

void HostTiers::Impl::answer(std::uint8_t tier) {
  Slot& slot = slots[tier];
  if (slot.lookups.empty()) return;
  TierAnswers frame{tier, slot.epoch, {}};
  std::map<TenantId, std::pair<double, std::vector<ChunkKey>>> unknown;  // with the tenant's weight
  for (auto at = slot.lookups.begin(); at != slot.lookups.end();) {
    Presence presence = slot.tier->contains(at->first);
    if (Prefix* prefix = at->second.prefix.get()) {
      const std::size_t position = at->second.position;
      // The tier ends the lookup of a prompt at a missing key, and leaves the keys after it unknown.
      if (presence == Presence::kUnknown && position > prefix->missing) presence = Presence::kSkipped;
      if (presence != Presence::kPresent && presence != Presence::kUnknown &&
          presence != Presence::kLookupPending)
        prefix->missing = std::min(prefix->missing, position);
    }
    // Keys stay unknown until a thread of the tier begins their lookup. Until then, a lookup in each turn
    // would queue the same keys many times.
    Lookup& lookup = at->second;
    if (presence == Presence::kUnknown && ++lookup.turns == kAskAgain) {
      auto& [weight, keys] = unknown[lookup.options.tenant];
      weight = lookup.options.weight;
      keys.push_back(at->first);
      lookup.turns = 0;
    }
    if (presence == Presence::kUnknown || presence == Presence::kLookupPending) {
      ++at;
      continue;
    }
    const auto found = presence == Presence::kPresent        ? TierAnswers::Found::kPresent
                       : presence == Presence::kLookupFailed ? TierAnswers::Found::kUnknown
                       : presence == Presence::kSkipped      ? TierAnswers::Found::kSkipped
                                                             : TierAnswers::Found::kAbsent;
    frame.answers.push_back({at->first, found});
    at = slot.lookups.erase(at);
    if (frame.answers.size() < kMostKeys) continue;
    make(FrameType::kAnswers, frame);
    frame.answers.clear();
  }
  if (!frame.answers.empty()) make(FrameType::kAnswers, frame);
  for (auto& [tenant, of_tenant] : unknown) {
    auto& [weight, keys] = of_tenant;
    slot.tier->prefetch_presence(std::move(keys), {KeyOrder::kNone, tenant, weight});
  }
}

void HostTiers::Impl::report_state(std::uint8_t tier, bool force) {
  Slot& slot = slots[tier];
  const Nanos now = clock.now();
  if (!force && now - slot.looked_at < kStateInterval) return;
  slot.looked_at = now;
  TierState state;
  state.tier = tier;
  state.stats = slot.tier->stats();
  state.queue_seconds = slot.tier->estimate_read_seconds(0);
  const double sample = slot.tier->estimate_read_seconds(kSampleBytes) - state.queue_seconds;
  if (sample > 0) state.read_bytes_per_second = static_cast<double>(kSampleBytes) / sample;
  const bool has_changed =
      state.stats.readable != slot.sent.stats.readable || state.stats.writable != slot.sent.stats.writable;
  if (!force && !has_changed && now - slot.sent_at < kStateRefresh) return;
  slot.sent_at = now;
  make(FrameType::kState, state);
  slot.sent = std::move(state);
}

// ---- other threads

HostTiers::HostTiers(std::shared_ptr<const HostRegion> region, std::function<void()> on_frames)
    : impl_(std::make_unique<Impl>(std::move(region), std::move(on_frames))) {
  impl_->thread = std::thread([impl = impl_.get()] { impl->run(); });
}

HostTiers::~HostTiers() { close(); }

void HostTiers::begin_connection() {
  std::uint64_t number = 0;
  {
    const MutexLock lock(impl_->mutex);
    number = ++impl_->connections;
    impl_->connected = true;
    impl_->failed = false;
    impl_->outgoing.clear();
    impl_->requests.clear();
    // Orders of the connection before that have not started.
    std::erase_if(impl_->orders, [](const Order& order) {
      return !std::holds_alternative<NewTiers>(order) && !std::holds_alternative<ClosedTiers>(order);
    });
  }
  (void)impl_->push(NewConnection{number});
}

void HostTiers::end_connection() {
  {
    const MutexLock lock(impl_->mutex);
    impl_->connected = false;
    impl_->outgoing.clear();
  }
  try {
    (void)impl_->push(NewConnection{});
  } catch (const std::bad_alloc&) {  // the next connection makes up for it
  }
}

bool HostTiers::Impl::fits(const TierOps& frame) const {
  if (in_flight + frame.ops.size() > kMostInFlight) return false;
  const std::size_t tenants = tenant_count();
  const Layout& rows = layout();
  return std::all_of(frame.ops.begin(), frame.ops.end(), [&](const HostOp& op) {
    if (op.entry_info.tenant >= tenants) return false;
    return op.kind == OpKind::kRemove ||
           (op.group < rows.size() && fits_area(*region, op.row, rows[op.group]));
  });
}

bool HostTiers::take(FrameType type, ByteSpan body) {
  const auto pass_on = [this](auto frame) {
    return frame && impl_->has_tier(frame->tier) && impl_->push(std::move(*frame));
  };
  switch (type) {
    case FrameType::kOpenTiers: {
      auto request = decode_open_tiers(body);
      if (!request) return false;
      {
        const MutexLock lock(impl_->mutex);
        impl_->requests.clear();  // a later request replaces an earlier one
        impl_->requests.push_back(std::move(*request));
      }
      impl_->changed.notify_all();
      return true;
    }
    case FrameType::kOps: {
      auto frame = decode_ops(body);
      if (!frame || !impl_->has_tier(frame->tier) || !impl_->fits(*frame)) return false;
      return impl_->push(ReceivedOps{std::move(*frame), impl_->clock.now()});
    }
    case FrameType::kCancel:
      return pass_on(decode_cancel(body));
    case FrameType::kLookup: {
      auto frame = decode_lookup(body);
      if (frame && frame->options.tenant >= impl_->tenant_count()) return false;
      return pass_on(std::move(frame));
    }
    case FrameType::kUses: {
      auto frame = decode_uses(body);
      if (!frame || !impl_->has_tier(frame->tier)) return false;
      const std::size_t tenants = impl_->tenant_count();
      for (const TierUse& use : frame->uses) {
        if (use.entry_info.tenant >= tenants) return false;
      }
      return impl_->push(std::move(*frame));
    }
    case FrameType::kReset:
      return pass_on(decode_reset(body));
    default:
      return false;
  }
}

bool HostTiers::is_full() const {
  const MutexLock lock(impl_->mutex);
  return impl_->orders.size() >= kMostOrders;
}

bool HostTiers::has_failed() const {
  const MutexLock lock(impl_->mutex);
  return impl_->failed;
}

std::vector<HostTiers::Frame> HostTiers::frames() {
  const MutexLock lock(impl_->mutex);
  return std::exchange(impl_->outgoing, {});
}

std::optional<OpenTiers> HostTiers::wait_for_request(Nanos timeout) {
  const Nanos end = impl_->clock.now() + timeout;
  const MutexLock lock(impl_->mutex);
  while (impl_->requests.empty()) {
    const Nanos left = end - impl_->clock.now();
    if (impl_->stopping || left <= Nanos(0)) return std::nullopt;
    impl_->changed.wait_for(impl_->mutex, left);
  }
  OpenTiers request = std::move(impl_->requests.front());
  impl_->requests.pop_front();
  return request;
}

void HostTiers::open(std::uint32_t round, std::vector<std::unique_ptr<Tier>> tiers, std::size_t tenants) {
  (void)impl_->push(NewTiers{round, std::move(tiers), tenants});
}

void HostTiers::refuse(std::uint32_t round, const std::string& problem) {
  {
    const MutexLock lock(impl_->mutex);
    if (impl_->connected)
      impl_->outgoing.emplace_back(FrameType::kTiersOpened, encode(TiersOpened{round, problem, {}}));
  }
  impl_->on_frames();
}

void HostTiers::close_tiers() {
  const auto done = std::make_shared<std::atomic<bool>>(false);
  (void)impl_->push(ClosedTiers{done});
  const MutexLock lock(impl_->mutex);
  while (!*done && !impl_->stopping) impl_->changed.wait_for(impl_->mutex, kIdleWait);
}

bool HostTiers::is_closed() const {
  const MutexLock lock(impl_->mutex);
  return impl_->stopping;
}

void HostTiers::close() {
  {
    const MutexLock lock(impl_->mutex);
    impl_->stopping = true;
  }
  impl_->changed.notify_all();
  if (impl_->thread.joinable()) impl_->thread.join();
}

}  // namespace kv_offload
