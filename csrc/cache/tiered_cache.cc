// SPDX-License-Identifier: Apache-2.0
// The parts of the cache, and which part handles each call.
#include "cache/tiered_cache.h"

#include <algorithm>
#include <new>
#include <utility>

#include "base/status.h"
#include "cache/cache_events.h"
#include "cache/chunk_groups.h"
#include "cache/cost_model.h"
#include "cache/device_loads.h"
#include "cache/host_chunks.h"
#include "cache/key_history.h"
#include "cache/planner.h"
#include "cache/prefetcher.h"
#include "cache/request_table.h"
#include "cache/row_provider.h"
#include "cache/sessions.h"
#include "cache/store_path.h"
#include "cache/tickets.h"
#include "cache/tier_io.h"
#include "cache/write_back.h"

namespace kv_offload {
namespace {

static_assert(RequestReport::kPlaces == CostModel::kMaxTiers + 2);
constexpr std::size_t kRememberedPerChunk = 4;  // remembered absent keys for each chunk that fits
constexpr std::uint64_t kPrefetchedShare = 4;   // of host memory, for prefetched chunks that are not used yet

}  // namespace

struct TieredCache::Impl {
  Impl(const CacheOptions& options, const std::shared_ptr<HostRegion>& host_region,
       std::vector<std::unique_ptr<Tier>> tiers, Metrics& cache_metrics, const Clock& cache_clock)
      : region(host_region),
        metrics(cache_metrics),
        clock(cache_clock),
        groups(options, region->num_areas()),
        tickets(*region),
        events(options.keep_events),
        chunks(groups, *region, tickets, events, options.eviction_policy, options.tenants),
        key_history(kRememberedPerChunk * chunks.capacity()),
        costs(tiers.size()),
        ops(
            {groups, chunks, key_history, costs, events, metrics, clock}, region, std::move(tiers),
            [this](TierIo::Waiter waiter, const TierIo::ReadEnd& end) { requests.read_ended(waiter, end); },
            [this](Slot slot, std::uint8_t tier) { write_back.on_fetched(slot, tier); }),
        write_back(groups, chunks, key_history, ops, metrics, options.tiers),
        row_provider(groups, chunks, key_history, ops, write_back, metrics),
        device_loads({groups, chunks, write_back, tickets, costs, metrics, clock}, options),
        requests({groups, chunks, key_history, tickets, costs, ops, device_loads, metrics, clock}, options),
        stores({groups, chunks, key_history, tickets, costs, row_provider, write_back, requests, metrics}),
        planner({groups, chunks, costs, ops, row_provider, requests, metrics}),
        prefetcher({groups, chunks, row_provider, ops, metrics},
                   region->area_bytes() * region->num_areas() / kPrefetchedShare),
        sessions({groups, chunks, clock, ops.size() > 0 ? &prefetcher : nullptr}, options,
                 std::min(options.max_pinned_bytes, region->area_bytes() * region->num_areas() / 2)) {
    chunks.set_now(to_seconds(clock.now()));
    if (!options.share_identity.empty()) chunks.lend_in(*region, options.share_identity);
    if (!options.keep_identity.empty()) is_kept = chunks.keep_in(*region, options.keep_identity);
    if (!options.share_identity.empty())
      chunks.share_in(*region, options.share_identity, options.neighbour_interval);
  }

  // Forgets everything in memory. Rows that a rank or a tier may still touch stay out of use until it is
  // done.
  void forget() {
    // First, because these two may run out of memory: then nothing is forgotten.
    chunks.prepare_forget();
    key_history.clear();
    ops.forget();
    device_loads.forget();
    prefetcher.forget();  // looks at its chunks a last time
    chunks.forget();
    requests.forget();
    sessions.forget();
    publish_fetching(false);
  }
  void publish_speeds();
  void publish_fetching(bool now);

  const std::shared_ptr<HostRegion> region;
  Metrics& metrics;
  const Clock& clock;
  const ChunkGroups groups;
  Tickets tickets;
  CacheEvents events;
  HostChunks chunks;
  KeyHistory key_history;
  CostModel costs;
  TierIo ops;
  WriteBack write_back;
  RowProvider row_provider;
  DeviceLoads device_loads;
  RequestTable requests;
  StorePath stores;
  Planner planner;
  Prefetcher prefetcher;
  Sessions sessions;
  bool is_kept = false;
  bool is_fetching = false;  // last value set in the region
  bool closed = false;
};

TieredCache::TieredCache(const CacheOptions& options, const std::shared_ptr<HostRegion>& region,
                         std::vector<std::unique_ptr<Tier>> tiers, Metrics& metrics, const Clock& clock)
    : impl_(std::make_unique<Impl>(options, region, std::move(tiers), metrics, clock)) {}

TieredCache::~TieredCache() { close(); }

// ---- requests

RequestHandle TieredCache::begin_request(std::string_view, const RequestOptions& options) {
  impl_->chunks.set_now(to_seconds(impl_->clock.now()));  // the engine may have been idle
  impl_->chunks.poll_neighbours(impl_->clock.now());
  impl_->prefetcher.make_way();
  const std::size_t tenants = impl_->chunks.tenants() == nullptr ? 1 : impl_->chunks.tenants()->size();
  if (options.tenant >= tenants) throw_invalid("no tenant {}: the cache has {}", options.tenant, tenants);
  RequestOptions valid = options;
  if (!impl_->sessions.is_trusted(options.client)) valid.returns_in = 0;
  return impl_->requests.begin(valid);
}

void TieredCache::admit(RequestHandle request) {
  (void)impl_->requests.require_live(request);
  impl_->requests.admit(request);
}

void TieredCache::preempt(RequestHandle request) {
  (void)impl_->requests.require_live(request);
  impl_->requests.preempt(request);
}

void TieredCache::end_request(RequestHandle request) {
  Impl& impl = *impl_;
  impl.requests.end(request);
  if (impl.requests.waiting().empty()) impl.publish_fetching(false);  // no further step may follow
  if (impl.requests.live() == 0) impl.chunks.return_borrowed(true);
  if (impl.closed || impl.requests.live() > 0 || impl.prefetcher.size() == 0) return;
  const Nanos now = impl.clock.now();
  impl.chunks.set_now(to_seconds(now));
  try {
    impl.ops.poll();  // writes that have ended pin no rows
    impl.prefetcher.run(now, true);
    impl.ops.end_step();  // the next step polls the reads
  } catch (const std::bad_alloc&) {
    // The request has ended. The next step continues.
  }
}

std::vector<HintOutcome> TieredCache::apply_hints(std::span<const Hint> hints) {
  return impl_->sessions.apply(hints);
}

std::vector<HintOutcome> TieredCache::end_turn(RequestHandle request, const Turn& turn,
                                               std::span<const Hint> hints) {
  return impl_->sessions.end_turn(turn, impl_->requests.require_live(request), hints);
}

bool TieredCache::has_span(RequestHandle request) const { return impl_->requests.at(request).has_span; }

void TieredCache::set_span(RequestHandle request, std::uint32_t first_end, std::uint32_t last_end) {
  impl_->requests.set_span(request, first_end, last_end);
}

const RequestReport& TieredCache::report(RequestHandle request) const {
  if (!impl_->requests.is_handle(request)) throw_invalid("invalid request handle {}", request);
  return impl_->requests.at(request).report;
}

// ---- vLLM's manager verbs

LookupResult TieredCache::lookup(RequestHandle request, const ChunkKey& key, std::uint32_t part_tokens) {
  return impl_->closed ? LookupResult::kMiss : impl_->requests.lookup(request, key, part_tokens);
}

int TieredCache::load_source(const ChunkKey& key) const {
  const ChunkEntry* entry = impl_->chunks.find(key);
  if (entry == nullptr || entry->origin != ChunkOrigin::kTier) return -1;
  return entry->tier;
}

bool TieredCache::is_in_memory(const ChunkKey& key) const {
  const ChunkEntry* found = impl_->chunks.find(key);
  return found != nullptr && found->origin != ChunkOrigin::kNeighbour;
}

RowTransfer TieredCache::prepare_load(RequestHandle request, std::span<const ChunkKey> keys) {
  Impl& impl = *impl_;
  impl.requests.require_live(request);
  if (impl.closed) throw_invalid("prepare_load was called after close()");
  DeviceLoads::Begun load;
  load.transfer.group_rows.assign(impl.groups.size(), 0);
  if (keys.empty()) return load.transfer;
  load = impl.device_loads.begin(keys, impl.requests.load_of(request));
  try {
    impl.requests.admit_load(request, keys, load);
  } catch (...) {
    impl.device_loads.withdraw(load.transfer.ticket);
    throw;
  }
  return std::move(load.transfer);
}

void TieredCache::complete_load(std::span<const ChunkKey> keys, std::optional<RequestHandle> request) {
  Impl& impl = *impl_;
  if (impl.closed) return;
  const std::uint32_t number =
      request && impl.requests.is_handle(*request) ? impl.requests.at(*request).number : 0;
  if (const auto ended = impl.device_loads.complete(keys, number)) impl.requests.end_load(*ended);
}

StoreGrant TieredCache::prepare_store(RequestHandle request, std::span<const ChunkKey> keys,
                                      std::span<const std::uint32_t> depths) {
  return impl_->stores.prepare(request, keys, depths);
}

void TieredCache::complete_store(std::span<const ChunkKey> keys, bool success) {
  if (!impl_->closed) impl_->stores.complete(keys, success);
}

void TieredCache::end_step() {
  Impl& impl = *impl_;
  if (impl.closed) return;
  impl.ops.poll();
  impl.device_loads.poll();
  impl.stores.poll();
  impl.chunks.poll();
  const Nanos now = impl.clock.now();
  impl.chunks.set_now(to_seconds(now));
  impl.chunks.poll_neighbours(now);
  impl.costs.prefill.end_step(now);
  impl.planner.plan_step(now);
  impl.prefetcher.run(now, false);     // after the plans of requests, which need rows first
  impl.chunks.return_borrowed(false);  // after the plans, which hold what they need
  impl.write_back.write_cold_end();
  impl.write_back.publish_uses();
  impl.row_provider.flush_metrics();
  impl.publish_fetching(impl.requests.has_pending_work());  // includes the lookups of this step
  impl.requests.end_step();
  impl.sessions.end_step();
  impl.ops.end_step();
}

bool TieredCache::has_pending_work() const {
  if (impl_->closed) return false;
  // An idle engine makes no steps, and the chunks would not reach the tiers, or the table of memory that
  // outlives the engine, before it ends.
  const bool outlives = impl_->ops.size() > 0 || impl_->is_kept;
  return impl_->requests.has_pending_work() || (outlives && impl_->stores.awaits_reports());
}

bool TieredCache::has_removals() const {
  const auto& tiers = impl_->ops.tiers();
  return std::any_of(tiers.begin(), tiers.end(), [](const auto& tier) { return tier->has_removals(); });
}

void TieredCache::Impl::publish_fetching(bool now) {
  if (now == is_fetching) return;  // avoid writes: the ranks read it all the time
  is_fetching = now;
  region->set_fetching(now);
}

void TieredCache::reset() {
  if (impl_->closed) return;
  impl_->forget();
  impl_->ops.reset();
  impl_->chunks.poll();
}

void TieredCache::abandon_jobs() {
  if (impl_->closed) return;
  impl_->device_loads.abandon();
  impl_->chunks.discard_stores();
}

std::vector<CacheEvent> TieredCache::take_events() { return impl_->events.take(); }

void TieredCache::close() {
  Impl& impl = *impl_;
  if (impl.closed) return;
  impl.ops.close();
  impl.chunks.stop_table_updates();
  impl.forget();
  impl.events.take();
  impl.stores.close();
  impl.closed = true;
}

// ---- statistics

TieredCache::Stats TieredCache::stats() const {
  const Impl& impl = *impl_;
  Stats stats{};
  stats.resident_chunks = impl.chunks.resident();
  stats.resident_bytes = impl.chunks.resident_bytes();
  stats.capacity_bytes = impl.region->area_bytes() * impl.region->num_areas();
  stats.pinned_chunks = impl.chunks.pinned();
  stats.quarantined_rows = impl.chunks.quarantined_rows();
  stats.waiting_requests = impl.requests.waiting().size();
  stats.requests = impl.requests.live();
  stats.longest_prompt = impl.requests.longest_prompt();
  stats.taken_over_chunks = impl.chunks.taken_over();
  stats.sessions = impl.sessions.size();
  stats.hint_pinned_bytes = impl.sessions.pinned_bytes();
  stats.is_kept = impl.is_kept;
  stats.neighbours = impl.chunks.neighbours();
  stats.borrowed_chunks = impl.chunks.borrowed();
  stats.lent_chunks = impl.chunks.lent();
  return stats;
}

std::vector<TenantStats> TieredCache::tenant_stats() const {
  const TenantShares* shares = impl_->chunks.tenants();
  std::vector<TenantStats> stats;
  for (std::size_t i = 0; shares != nullptr && i < shares->size(); ++i) {
    const auto tenant = static_cast<TenantId>(i);
    const std::uint64_t areas = impl_->region->num_areas();
    stats.push_back({shares->name(tenant), areas * shares->used(tenant), areas * shares->share(tenant)});
  }
  return stats;
}

std::vector<std::string> TieredCache::take_neighbour_problems() {
  return impl_->chunks.take_neighbour_problems();
}

std::vector<LookupCounts> TieredCache::lookup_counts() const { return impl_->requests.lookup_counts(); }

void TieredCache::publish_gauges() {
  Impl& impl = *impl_;
  if (impl.closed) return;
  const Stats own = stats();
  impl.metrics.set("kv_offload_tier_bytes", {"cpu"}, static_cast<double>(own.resident_bytes));
  impl.metrics.set("kv_offload_tier_capacity_bytes", {"cpu"}, static_cast<double>(own.capacity_bytes));
  impl.metrics.set("kv_offload_tier_chunks", {"cpu"}, static_cast<double>(own.resident_chunks));
  if (impl.chunks.is_shared()) {
    impl.metrics.set("kv_offload_neighbours", {}, static_cast<double>(own.neighbours));
    impl.metrics.set("kv_offload_borrowed_chunks", {}, static_cast<double>(own.borrowed_chunks));
    impl.metrics.set("kv_offload_lent_chunks", {}, static_cast<double>(own.lent_chunks));
  }
  impl.metrics.set("kv_offload_hint_pinned_bytes", {}, static_cast<double>(impl.sessions.pinned_bytes()));
  for (const TenantStats& of : tenant_stats()) {
    impl.metrics.set("kv_offload_tenant_bytes", {of.name}, static_cast<double>(of.bytes));
    impl.metrics.set("kv_offload_tenant_share_bytes", {of.name}, static_cast<double>(of.share_bytes));
  }
  impl.publish_speeds();
  impl.ops.publish();
}

void TieredCache::Impl::publish_speeds() {
  for (const auto& [label, tokens] : {std::pair{"1024", 1024.0}, {"8192", 8192.0}, {"65536", 65536.0}}) {
    const double speed = costs.prefill.tokens_per_second(tokens);
    if (speed > 0) metrics.set("kv_offload_prefill_tokens_per_second", {label}, speed);
  }
  for (std::size_t tier = 0; tier < ops.size(); ++tier) {
    const double speed = costs.read_bytes_per_second(tier);
    if (speed > 0) metrics.set("kv_offload_load_bytes_per_second", {ops.name(tier)}, speed);
  }
  if (const double speed = costs.copy().bytes_per_second(); speed > 0) {
    metrics.set("kv_offload_load_bytes_per_second", {"cpu"}, speed);
  }
}

const std::vector<std::unique_ptr<Tier>>& TieredCache::tiers() const { return impl_->ops.tiers(); }

}  // namespace kv_offload
