// Construction, requests, events, figures.
#include "cache/tiered_cache.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "cache/cache_impl.h"

namespace kv_offload {
namespace {

constexpr std::size_t kMaxTiers = CostModel::kMaxTiers;  // bits of ChunkEntry::writes
static_assert(RequestReport::kPlaces == kMaxTiers + 1);

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
      region_memory(host_region),
      region(*host_region),
      metrics(cache_metrics),
      clock(cache_clock),
      groups(options, region.num_areas()),
      tiers(std::move(cache_tiers)),
      tickets(region),
      events(options.keep_events),
      chunks(groups, region, tickets, events, options.eviction_policy),
      memory(4 * chunks.capacity()),
      costs(tiers.size()) {
  if (tiers.size() > kMaxTiers) {
    throw_invalid("{} tiers were given; at most {} are possible", tiers.size(), kMaxTiers);
  }
  for (std::size_t t = 0; t < tiers.size(); ++t) {
    TierSlot slot;
    slot.tier = tiers[t].get();
    if (t < options.tiers.size()) slot.options = options.tiers[t];
    slot.name = std::string(tiers[t]->name());
    tier_slots.push_back(std::move(slot));
  }
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

void TieredCache::Impl::flush_tallies() {
  if (evicted_bytes == 0) return;
  metrics.add("kv_offload_evicted_bytes_total", {"cpu"}, static_cast<double>(evicted_bytes));
  evicted_bytes = 0;
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

std::vector<CacheEvent> TieredCache::take_events() { return impl_->events.take(); }

TieredCache::Stats TieredCache::stats() const {
  const Impl& impl = *impl_;
  Stats stats{};
  stats.resident_chunks = impl.chunks.resident();
  stats.resident_bytes = impl.chunks.resident_bytes();
  stats.capacity_bytes = impl.region.area_bytes() * impl.region.num_areas();
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
  const auto publish = [&](std::string_view name, std::uint64_t bytes, std::uint64_t capacity,
                           std::uint64_t chunks) {
    impl.metrics.set("kv_offload_tier_bytes", {name}, static_cast<double>(bytes));
    impl.metrics.set("kv_offload_tier_capacity_bytes", {name}, static_cast<double>(capacity));
    impl.metrics.set("kv_offload_tier_chunks", {name}, static_cast<double>(chunks));
  };
  impl.publish_speeds();
  publish("cpu", own.resident_bytes, own.capacity_bytes, own.resident_chunks);
  for (Impl::TierSlot& slot : impl.tier_slots) {
    const TierStats tier = slot.tier->stats();
    publish(slot.name, tier.bytes, tier.capacity_bytes, tier.chunks);
    const auto queue = [&](std::string_view op, std::uint32_t depth, double oldest) {
      impl.metrics.set("kv_offload_queue_depth", {slot.name, op}, depth);
      impl.metrics.set("kv_offload_oldest_op_seconds", {slot.name, op}, oldest);
    };
    queue("read", tier.queued_reads, tier.oldest_read_seconds);
    queue("write", tier.queued_writes, tier.oldest_write_seconds);
    const auto count = [&](std::string_view metric, Metrics::Labels labels, std::uint64_t now,
                           std::uint64_t before) {
      if (now > before) impl.metrics.add(metric, labels, static_cast<double>(now - before));
    };
    const TierStats& before = slot.published;
    count("kv_offload_evicted_bytes_total", {slot.name}, tier.evicted_bytes, before.evicted_bytes);
    count("kv_offload_io_ops_total", {slot.name, "direct"}, tier.direct_ops, before.direct_ops);
    count("kv_offload_io_ops_total", {slot.name, "buffered"}, tier.buffered_ops, before.buffered_ops);
    count("kv_offload_breaker_trips_total", {slot.name}, tier.breaker_trips, before.breaker_trips);
    count("kv_offload_failures_total", {slot.name, "read", "timeout"}, tier.read_timeouts,
          before.read_timeouts);
    count("kv_offload_failures_total", {slot.name, "write", "timeout"}, tier.write_timeouts,
          before.write_timeouts);
    slot.published = tier;
  }
}

const std::vector<std::unique_ptr<Tier>>& TieredCache::tiers() const { return impl_->tiers; }

}  // namespace kv_offload
