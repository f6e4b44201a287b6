// Construction, requests, events, figures.
#include "cache/tiered_cache.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "cache/cache_impl.h"

namespace kv_offload {
namespace {

static_assert(RequestReport::kPlaces == CostModel::kMaxTiers + 1);

}  // namespace

std::string_view to_string(MissReason reason) {
  switch (reason) {
    case MissReason::kNotStored:
      return "not_stored";
    case MissReason::kEvicted:
      return "evicted";
    case MissReason::kRecomputeCheaper:
      return "recompute_cheaper";
    case MissReason::kDeadline:
      return "deadline";
    case MissReason::kCorrupt:
      return "corrupt";
    case MissReason::kIoError:
      return "io_error";
    case MissReason::kPressure:
      return "pressure";
    case MissReason::kDisabled:
      return "disabled";
  }
  return "unknown";
}

TieredCache::Impl::Impl(CacheOptions cache_options, const std::shared_ptr<HostRegion>& host_region,
                        std::vector<std::unique_ptr<Tier>> cache_tiers, Metrics& cache_metrics,
                        const Clock& cache_clock)
    : options(std::move(cache_options)),
      region(host_region),
      metrics(cache_metrics),
      clock(cache_clock),
      groups(options, region->num_areas()),
      tickets(*region),
      events(options.keep_events),
      chunks(groups, *region, tickets, events, options.eviction_policy),
      memory(4 * chunks.capacity()),
      costs(cache_tiers.size()),
      ops({groups, chunks, memory, costs, events, metrics, clock}, region, std::move(cache_tiers),
          [this](RequestHandle waiter, const TierOps::ReadEnd& end) { read_ended(waiter, end); }),
      write_back(groups, chunks, memory, ops, metrics, options.tiers),
      row_supply(groups, chunks, memory, ops, write_back, metrics),
      load_jobs({groups, chunks, write_back, tickets, costs, metrics, clock}, options) {
  sights.assign(groups.size(), {});
  idle_since = clock.now();
}

RequestState& TieredCache::Impl::require_live(RequestHandle request) {
  if (request >= requests.size() || !requests[request].live) {
    throw_invalid("request handle {} is not live; {} requests are", request,
                  requests.size() - free_requests.size());
  }
  return requests[request];
}

TieredCache::TieredCache(CacheOptions options, const std::shared_ptr<HostRegion>& region,
                         std::vector<std::unique_ptr<Tier>> tiers, Metrics& metrics, const Clock& clock)
    : impl_(std::make_unique<Impl>(std::move(options), region, std::move(tiers), metrics, clock)) {}

TieredCache::~TieredCache() { close(); }

RequestHandle TieredCache::begin_request(std::string_view, const RequestOptions& options) {
  Impl& impl = *impl_;
  if (impl.free_requests.empty()) {
    impl.free_requests.push_back(static_cast<RequestHandle>(impl.requests.size()));
    impl.requests.emplace_back();
  }
  if (impl.free_requests.size() == impl.requests.size()) {
    impl.costs.prefill.note_idle(impl.idle_since, impl.clock.now());
  }
  const RequestHandle handle = impl.free_requests.back();
  impl.free_requests.pop_back();
  if (++impl.last_number == 0) ++impl.last_number;
  impl.requests[handle].begin(impl.last_number, options,
                              options.load_policy.value_or(impl.options.load_policy), impl.groups.size());
  return handle;
}

void TieredCache::end_request(RequestHandle handle) {
  Impl& impl = *impl_;
  RequestState& request = impl.require_live(handle);
  impl.settle(request);
  impl.stop_waiting(handle, request);
  request.live = false;
  impl.free_requests.push_back(handle);
  if (impl.free_requests.size() == impl.requests.size()) impl.idle_since = impl.clock.now();
}

bool TieredCache::knows_span(RequestHandle request) const { return impl_->requests[request].knows_span; }

void TieredCache::set_span(RequestHandle handle, std::uint32_t first_end, std::uint32_t last_end) {
  RequestState& request = impl_->require_live(handle);
  request.knows_span = true;
  request.first_end = first_end;
  request.last_end = last_end;
  impl_->longest_prompt = std::max<std::uint64_t>(impl_->longest_prompt, last_end);
}

RequestReport TieredCache::report(RequestHandle request) const {
  if (request >= impl_->requests.size()) throw_invalid("request handle {} never was one", request);
  return impl_->requests[request].report;
}

std::vector<TieredCache::Sights> TieredCache::sights() const { return impl_->sights; }

LookupResult TieredCache::lookup(RequestHandle request, const ChunkKey& key) {
  return impl_->closed ? LookupResult::kMiss : impl_->lookup(request, key);
}

int TieredCache::load_source(const ChunkKey& key) const {
  const ChunkEntry* entry = impl_->chunks.find(key);
  if (entry == nullptr || entry->origin != ChunkOrigin::kTier) return -1;
  return entry->tier;
}

RowTransfer TieredCache::prepare_load(RequestHandle handle, std::span<const ChunkKey> keys) {
  Impl& impl = *impl_;
  RequestState& request = impl.require_live(handle);
  if (impl.closed) throw_invalid("prepare_load was called after close()");
  LoadJobs::Begun load;
  load.transfer.group_rows.assign(impl.groups.size(), 0);
  if (keys.empty()) return load.transfer;
  load = impl.load_jobs.begin(keys, impl.load_of(request));
  impl.admit_load(handle, request, keys, load);
  return std::move(load.transfer);
}

void TieredCache::complete_load(std::span<const ChunkKey> keys) {
  if (!impl_->closed) impl_->load_jobs.complete(keys);
}

std::vector<CacheEvent> TieredCache::take_events() { return impl_->events.take(); }

TieredCache::Stats TieredCache::stats() const {
  const Impl& impl = *impl_;
  Stats stats{};
  stats.resident_chunks = impl.chunks.resident();
  stats.resident_bytes = impl.chunks.resident_bytes();
  stats.capacity_bytes = impl.region->area_bytes() * impl.region->num_areas();
  stats.pinned_chunks = impl.chunks.pinned();
  stats.quarantined_rows = impl.chunks.quarantined_rows();
  stats.waiting_requests = impl.waiting.size();
  stats.requests = impl.requests.size() - impl.free_requests.size();
  stats.longest_prompt = impl.longest_prompt;
  return stats;
}

void TieredCache::publish_gauges() {
  Impl& impl = *impl_;
  if (impl.closed) return;
  const Stats own = stats();
  impl.metrics.set("kv_offload_tier_bytes", {"cpu"}, static_cast<double>(own.resident_bytes));
  impl.metrics.set("kv_offload_tier_capacity_bytes", {"cpu"}, static_cast<double>(own.capacity_bytes));
  impl.metrics.set("kv_offload_tier_chunks", {"cpu"}, static_cast<double>(own.resident_chunks));
  impl.publish_speeds();
  impl.ops.publish();
}

const std::vector<std::unique_ptr<Tier>>& TieredCache::tiers() const { return impl_->ops.tiers(); }

}  // namespace kv_offload
