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
constexpr std::size_t kMaxIndexHint = 1 << 20;  // entries reserved ahead

std::vector<std::uint64_t> row_bytes_of(const CacheOptions& options, const HostRegion& region) {
  if (options.groups.empty()) throw_invalid("no group of chunks was given; a cache needs at least one");
  if (options.groups.size() > 64) {
    throw_invalid("{} groups were given; at most 64 are possible", options.groups.size());
  }
  std::vector<std::uint64_t> bytes;
  for (const GroupGeometry& group : options.groups) {
    const auto begin = group.shard_bytes.begin();
    bytes.push_back(*std::max_element(begin, begin + region.num_areas()));
    if (bytes.back() == 0 || group.tokens_per_chunk == 0) {
      throw_invalid("group {} has chunks of {} bytes and {} tokens; both must be more than 0", group.group_id,
                    bytes.back(), group.tokens_per_chunk);
    }
  }
  return bytes;
}

std::size_t capacity_of(const RowAllocator& rows, std::size_t groups) {
  std::size_t capacity = 0;
  for (std::uint32_t g = 0; g < groups; ++g)
    capacity = std::max<std::size_t>(capacity, rows.capacity_rows(g));
  return capacity;
}

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
      tiers(std::move(cache_tiers)),
      rows(region.area_bytes(), row_bytes_of(options, region)),
      index(make_eviction_policy(options.eviction_policy, capacity_of(rows, options.groups.size())),
            std::min(capacity_of(rows, options.groups.size()), kMaxIndexHint)),
      memory(4 * capacity_of(rows, options.groups.size())),
      quarantine([this](RowId row) { free_row(row); }),
      costs(tiers.size()) {
  if (tiers.size() > kMaxTiers) {
    throw_invalid("{} tiers were given; at most {} are possible", tiers.size(), kMaxTiers);
  }
  if (!options.full_attention.empty() && options.full_attention.size() != options.groups.size()) {
    throw_invalid("full_attention has {} entries for {} groups; give one per group or none",
                  options.full_attention.size(), options.groups.size());
  }
  for (std::size_t g = 0; g < options.groups.size(); ++g) {
    const GroupGeometry& geometry = options.groups[g];
    Group group;
    group.id = geometry.group_id;
    group.tokens = geometry.tokens_per_chunk;
    group.full_attention = options.full_attention.empty() ? options.groups.size() == 1
                                                          : static_cast<bool>(options.full_attention[g]);
    for (std::uint32_t area = 0; area < region.num_areas(); ++area) {
      group.bytes += round_up(geometry.shard_bytes[area], kPageBytes);
    }
    group.geometry = geometry;
    bytes_per_token += static_cast<double>(group.bytes) / group.tokens;
    groups.push_back(group);
  }
  for (std::size_t t = 0; t < tiers.size(); ++t) {
    TierSlot slot;
    slot.tier = tiers[t].get();
    if (t < options.tiers.size()) slot.options = options.tiers[t];
    slot.name = std::string(tiers[t]->name());
    tier_slots.push_back(std::move(slot));
  }
  resident_by_group.assign(groups.size(), 0);
  sights.assign(groups.size(), {});
  idle_since = clock.now();
  row_unit = rows.row_bytes(0);
  for (std::uint32_t g = 1; g < groups.size(); ++g) {
    one_row_size &= rows.row_bytes(g) == rows.row_bytes(0);
    row_unit = std::min(row_unit, rows.row_bytes(g));
  }
  if (!one_row_size) owner_of_row.assign(region.area_bytes() / row_unit + 1, static_cast<Slot>(-1));
}

std::optional<std::uint32_t> TieredCache::Impl::position_of(const ChunkKey& key) const {
  const std::uint32_t id = key.group_id();
  for (std::uint32_t g = 0; g < groups.size(); ++g) {
    if (groups[g].id == id) return g;
  }
  return std::nullopt;
}

std::uint32_t TieredCache::Impl::require_position(const ChunkKey& key, std::uint32_t at_least) const {
  const auto group = position_of(key);
  if (!group) throw_invalid("chunk {} is of group {}, which was not configured", key.hex(), key.group_id());
  if (*group < at_least) {
    throw_invalid("chunk {} of group position {} came after one of position {}; order keys by group",
                  key.hex(), *group, at_least);
  }
  return *group;
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

void TieredCache::Impl::note_event(const ChunkKey& key, bool storage, bool removed, std::string_view owner) {
  if (!options.keep_events) return;
  if (events.empty() || events.back().storage != storage || events.back().removed != removed ||
      events.back().owner != owner) {
    events.push_back({{}, storage, removed, std::string(owner)});
  }
  events.back().keys.push_back(key);
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

std::vector<CacheEvent> TieredCache::take_events() { return std::exchange(impl_->events, {}); }

TieredCache::Stats TieredCache::stats() const {
  const Impl& impl = *impl_;
  Stats stats{};
  stats.resident_chunks = impl.index.resident();
  for (std::size_t g = 0; g < impl.groups.size(); ++g) {
    stats.resident_bytes += impl.resident_by_group[g] * impl.groups[g].bytes;
  }
  stats.capacity_bytes = impl.region.area_bytes() * impl.region.num_areas();
  stats.pinned_chunks = impl.index.pinned();
  stats.quarantined_rows = impl.quarantine.rows();
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
