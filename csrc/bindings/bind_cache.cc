// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <charconv>
#include <cstring>
#include <type_traits>

#include "bindings/bindings.h"
#include "bindings/bound_cache.h"
#include "bindings/lookup.h"
#include "bindings/tier_spec.h"
#include "hosts/open_tiers.h"

namespace kv_offload::bindings {
namespace {

using Cache = std::shared_ptr<BoundCache>;

LoadPolicy load_policy_of(std::string_view text) {
  return one_of<LoadPolicy>(
      "load_policy", text,
      {{"auto", LoadPolicy::kAuto}, {"always", LoadPolicy::kAlways}, {"never", LoadPolicy::kNever}});
}

std::vector<GroupGeometry> groups_of(const std::vector<std::uint32_t>& group_ids,
                                     const std::vector<std::uint32_t>& tokens_per_chunk,
                                     const std::vector<std::vector<std::uint64_t>>& shard_bytes,
                                     std::uint32_t shards_per_area, const HostRegion& region) {
  if (shards_per_area == 0) throw_invalid("shards_per_area is 0; it must be at least 1");
  if (tokens_per_chunk.size() != group_ids.size() || shard_bytes.size() != group_ids.size()) {
    throw_invalid("{} group_ids, {} tokens_per_chunk, {} shard_bytes: give one of each per group",
                  group_ids.size(), tokens_per_chunk.size(), shard_bytes.size());
  }
  std::vector<GroupGeometry> groups(group_ids.size());
  for (std::size_t g = 0; g < groups.size(); ++g) {
    if (shard_bytes[g].size() != region.num_areas()) {
      throw_invalid("shard_bytes of group position {} has {} entries: the region has {} areas", g,
                    shard_bytes[g].size(), region.num_areas());
    }
    groups[g].group_id = group_ids[g];
    groups[g].tokens_per_chunk = tokens_per_chunk[g];
    groups[g].shards_per_area = shards_per_area;
    std::copy(shard_bytes[g].begin(), shard_bytes[g].end(), groups[g].shard_bytes.begin());
  }
  return groups;
}

Cache make_cache(std::shared_ptr<HostRegion> region, std::shared_ptr<Metrics> metrics,
                 const std::vector<std::uint32_t>& group_ids,
                 const std::vector<std::uint32_t>& tokens_per_chunk,
                 const std::vector<std::vector<std::uint64_t>>& shard_bytes, std::vector<bool> full_attention,
                 const std::vector<std::shared_ptr<TierSpec>>& tiers, std::string eviction_policy,
                 const std::string& load_policy, double lookup_timeout_seconds, bool keep_events,
                 std::uint32_t cache_blocks, std::uint32_t blocks_per_chunk, std::uint32_t shards_per_area,
                 std::string keep_identity, std::size_t max_sessions, std::uint64_t max_pinned_bytes,
                 const std::vector<std::pair<std::string, double>>& tenants, std::string share_identity,
                 double neighbour_interval_seconds, HostLinks* hosts, const std::string& hosts_text,
                 double hosts_timeout_seconds) {
  CacheOptions options;
  for (const auto& [name, share] : tenants) options.tenants.push_back({name, share});
  options.max_sessions = max_sessions;
  options.max_pinned_bytes = max_pinned_bytes;
  options.keep_identity = std::move(keep_identity);
  options.share_identity = std::move(share_identity);
  options.neighbour_interval = to_nanos(neighbour_interval_seconds, "neighbour_interval_seconds");
  options.groups = groups_of(group_ids, tokens_per_chunk, shard_bytes, shards_per_area, *region);
  options.full_attention = std::move(full_attention);
  options.eviction_policy = std::move(eviction_policy);
  options.load_policy = load_policy_of(load_policy);
  options.lookup_timeout = to_nanos(lookup_timeout_seconds, "lookup_timeout_seconds");
  options.keep_events = keep_events;
  options.cache_blocks = cache_blocks;
  options.blocks_per_chunk = blocks_per_chunk;
  auto bound = std::make_shared<BoundCache>();
  bound->region = std::move(region);
  bound->metrics = std::move(metrics);

  const py::gil_scoped_release release;
  for (const std::shared_ptr<TierSpec>& tier : tiers) {
    if (!tier) throw_invalid("tiers contains None; give a TierSpec for each");
    options.tiers.push_back(tier->slot);
    tier->tenants = options.tenants;
  }
  OpenOptions over_hosts;
  over_hosts.timeout = to_nanos(hosts_timeout_seconds, "hosts_timeout_seconds");
  over_hosts.remote.tenants = options.tenants.size();
  Tiers opened;
  if (hosts == nullptr || tiers.empty()) {
    opened = open_all(tiers, {});
  } else {
    opened = open_on_all_hosts(
        *hosts, *bound->region, tiers.size(),
        [&](const std::vector<EpochChoice>& epochs) { return open_all(tiers, epochs); }, hosts_text,
        over_hosts);
  }
  bound->cache =
      std::make_unique<TieredCache>(options, bound->region, std::move(opened), *bound->metrics, bound->clock);
  return bound;
}

RequestHandle begin_request(const Cache& self, const std::string& request_id, bool load_from_cpu,
                            std::uint8_t load_tiers, bool skip_store,
                            const std::optional<std::string>& load_policy, std::int32_t priority,
                            double remote_wait_seconds, std::uint32_t family, std::uint64_t client,
                            double returns_in, TenantId tenant) {
  RequestOptions options;
  options.load_from_cpu = load_from_cpu;
  options.load_tiers = load_tiers;
  options.skip_store = skip_store;
  if (load_policy) options.load_policy = load_policy_of(*load_policy);
  options.priority = priority;
  options.remote_wait = to_nanos(remote_wait_seconds, "remote_wait_seconds");
  options.family = family;
  options.client = client;
  options.returns_in = returns_in;
  options.tenant = tenant;
  const RequestHandle handle = self->cache->begin_request(request_id, options);
  self->handles = std::max(self->handles, std::uint64_t{handle} + 1);
  return handle;
}

// A session's 16 bytes; empty: none.
SessionId to_session(const std::string& bytes) {
  SessionId id;
  if (bytes.empty()) return id;
  if (bytes.size() != sizeof(id)) throw_invalid("a session has 16 bytes, not {}", bytes.size());
  std::memcpy(&id.high, bytes.data(), sizeof(id.high));
  std::memcpy(&id.low, bytes.data() + sizeof(id.high), sizeof(id.low));
  return id;
}

// The fields of Hint.
using HintTuple = std::tuple<std::string, py::bytes, py::bytes, double, std::uint64_t>;

std::vector<Hint> to_hints(const std::vector<HintTuple>& tuples) {
  std::vector<Hint> hints;
  for (const auto& [type, target, trunk, seconds, bytes] : tuples) {
    Hint& hint = hints.emplace_back();
    hint.type = one_of<HintType>("a hint's type", type,
                                 {{"resume", HintType::kResume},
                                  {"prefetch", HintType::kPrefetch},
                                  {"release", HintType::kRelease},
                                  {"supersede", HintType::kSupersede},
                                  {"retain", HintType::kRetain},
                                  {"pin", HintType::kPin}});
    hint.target = to_session(target);
    hint.trunk = to_session(trunk);
    hint.seconds = seconds;
    hint.bytes = bytes;
  }
  return hints;
}

std::vector<std::string> to_texts(const std::vector<HintOutcome>& outcomes) {
  std::vector<std::string> texts;
  for (const HintOutcome outcome : outcomes) texts.emplace_back(to_string(outcome));
  return texts;
}

std::vector<std::string> apply_hints(const Cache& self, const std::vector<HintTuple>& hints) {
  return to_texts(self->cache->apply_hints(to_hints(hints)));
}

std::vector<std::string> end_turn(const Cache& self, std::uint64_t request, const py::bytes& session,
                                  std::uint64_t client, const std::vector<HintTuple>& hints) {
  const Turn turn{to_session(session), client};
  return to_texts(self->cache->end_turn(self->check_handle(request), turn, to_hints(hints)));
}

py::array_t<std::uint32_t> to_array(const std::vector<RowId>& rows) {
  return py::array_t<std::uint32_t>(static_cast<py::ssize_t>(rows.size()), rows.data());
}

py::tuple prepare_load(const Cache& self, RequestHandle request, const py::object& keys) {
  const RowTransfer transfer = self->cache->prepare_load(request, to_keys(keys));
  return py::make_tuple(transfer.ticket, to_array(transfer.rows), to_tuple(transfer.group_rows));
}

py::tuple prepare_store(const Cache& self, RequestHandle request, const py::sequence& keys,
                        const std::optional<std::vector<std::uint32_t>>& depths) {
  const std::vector<ChunkKey> offered = to_keys(keys);
  if (depths && depths->size() != offered.size()) {
    throw_invalid("{} depths for {} keys: give one per key, or none", depths->size(), offered.size());
  }
  const StoreGrant grant = self->cache->prepare_store(
      request, offered, depths ? std::span<const std::uint32_t>(*depths) : std::span<const std::uint32_t>());
  py::list accepted(grant.accepted.size());
  for (std::size_t i = 0; i < grant.accepted.size(); ++i) accepted[i] = keys[grant.accepted[i]];
  return py::make_tuple(std::move(accepted), grant.transfer.ticket, to_array(grant.transfer.rows),
                        to_tuple(grant.transfer.group_rows), to_bytes_list(grant.evicted));
}

py::list absent(const Cache& self, const py::object& keys) {
  py::list found;
  for (const py::handle key : keys) {
    if (!self->cache->is_in_memory(to_key(key))) found.append(key);
  }
  return found;
}

py::list take_events(const Cache& self) {
  py::list events;
  for (const CacheEvent& event : self->cache->take_events()) {
    events.append(py::make_tuple(to_bytes_list(event.keys), event.storage, event.removed, event.owner));
  }
  return events;
}

py::dict stats(const Cache& self) {
  using namespace py::literals;
  const TieredCache::Stats stats = self->cache->stats();
  return py::dict("resident_chunks"_a = stats.resident_chunks, "resident_bytes"_a = stats.resident_bytes,
                  "capacity_bytes"_a = stats.capacity_bytes, "pinned_chunks"_a = stats.pinned_chunks,
                  "quarantined_rows"_a = stats.quarantined_rows,
                  "waiting_requests"_a = stats.waiting_requests, "requests"_a = stats.requests,
                  "longest_prompt"_a = stats.longest_prompt, "taken_over_chunks"_a = stats.taken_over_chunks,
                  "sessions"_a = stats.sessions, "hint_pinned_bytes"_a = stats.hint_pinned_bytes,
                  "is_kept"_a = stats.is_kept, "neighbours"_a = stats.neighbours,
                  "borrowed_chunks"_a = stats.borrowed_chunks, "lent_chunks"_a = stats.lent_chunks);
}

// The scheduler's thread packs a report, and another thread unpacks it: making a Python object of a C++ class
// takes a microsecond, and bytes a fraction of it.
static_assert(std::is_trivially_copyable_v<RequestReport>);

RequestReport unpack_report(const py::bytes& packed) {
  const std::string_view bytes = packed;
  RequestReport report;
  if (bytes.size() != sizeof report) throw_invalid("{} bytes are no packed report", bytes.size());
  std::memcpy(&report, bytes.data(), sizeof report);
  return report;
}

template <auto Member>
std::int64_t nanoseconds(const RequestReport& report) {
  return (report.*Member).count();
}

py::tuple hit_tokens(const RequestReport& report) { return py::tuple(py::cast(report.hit_tokens)); }

py::dict miss_tokens(const RequestReport& report) {
  py::dict misses;
  for (std::size_t i = 0; i < RequestReport::kReasons; ++i) {
    const std::string reason(to_string(static_cast<MissReason>(i)));
    if (report.miss_tokens[i] > 0) misses[py::str(reason)] = report.miss_tokens[i];
  }
  return misses;
}

py::list reads(const RequestReport& report) {
  py::list found;
  for (std::size_t tier = 0; tier < report.reads.size(); ++tier) {
    const RequestReport::Reads& of_tier = report.reads[tier];
    if (of_tier.arrived + of_tier.failed == 0) continue;
    const std::string_view failure = of_tier.failed > 0 ? to_string(of_tier.failure) : "";
    found.append(py::make_tuple(tier, of_tier.arrived, of_tier.failed, failure, of_tier.bytes,
                                of_tier.begin.count(), of_tier.end.count()));
  }
  return found;
}

py::list loads(const RequestReport& report) {
  py::list found;
  for (std::size_t i = 0; i < std::min<std::size_t>(report.load_count, RequestReport::kLoads); ++i)
    found.append(py::make_tuple(report.loads[i].begin.count(), report.loads[i].end.count()));
  return found;
}

// Omits tiers without hits and reasons without misses.
py::dict report(const Cache& self, std::uint64_t request) {
  using namespace py::literals;
  const RequestReport& report = self->cache->report(self->check_handle(request));
  const auto& tiers = self->cache->tiers();
  py::dict hits;
  for (std::size_t i = 0; i <= tiers.size(); ++i) {
    if (report.hit_tokens[i] > 0)
      hits[py::str(i == 0 ? std::string("cpu") : std::string(tiers[i - 1]->name()))] = report.hit_tokens[i];
  }
  for (std::size_t number = 0; number < report.neighbour_tokens.size(); ++number) {
    const std::uint64_t tokens = report.neighbour_tokens[number];
    if (tokens > 0) hits[py::str(fmt::format("{} {}", kNeighbourPlace, number))] = tokens;
  }
  return py::dict("hit_tokens"_a = hits, "miss_tokens"_a = miss_tokens(report), "choice"_a = report.choice,
                  "load_seconds"_a = report.load_seconds, "compute_seconds"_a = report.compute_seconds,
                  "waited_seconds"_a = report.waited_seconds);
}

py::dict tier_stats(const Cache& self, std::size_t tier) {
  using namespace py::literals;
  const auto& tiers = self->cache->tiers();
  if (tier >= tiers.size()) throw_invalid("no tier {}: the cache has {}", tier, tiers.size());
  const TierStats stats = tiers[tier]->stats();
  return py::dict(
      "name"_a = tiers[tier]->name(), "bytes"_a = stats.bytes, "capacity_bytes"_a = stats.capacity_bytes,
      "chunks"_a = stats.chunks, "evicted_bytes"_a = stats.evicted_bytes, "direct_ops"_a = stats.direct_ops,
      "buffered_ops"_a = stats.buffered_ops, "queued_reads"_a = stats.queued_reads,
      "queued_writes"_a = stats.queued_writes, "oldest_read_seconds"_a = stats.oldest_read_seconds,
      "oldest_write_seconds"_a = stats.oldest_write_seconds, "scan_complete"_a = stats.scan_complete,
      "readable"_a = stats.readable, "writable"_a = stats.writable, "diverged"_a = stats.diverged,
      "removals_problem"_a = stats.removals_problem, "rebuilds"_a = stats.rebuilds,
      "lost_bytes"_a = stats.lost_bytes, "breaker_trips"_a = stats.breaker_trips, "encodes"_a = stats.encodes,
      "codec_reason"_a = tiers[tier]->codec_reason());
}

// Binds a method that does storage I/O or waits for it, without the GIL.
template <auto Method>
void released(const Cache& self) {
  const py::gil_scoped_release release;
  (self->cache.get()->*Method)();
}

}  // namespace

void bind_cache(py::module_& module) {
  py::class_<RequestReport>(module, "RequestReport")
      .def(py::init(&unpack_report), py::arg("packed"))
      .def_property_readonly("hit_tokens", &hit_tokens)
      .def_property_readonly("miss_tokens", &miss_tokens)
      .def_readonly("choice", &RequestReport::choice)
      .def_readonly("load_seconds", &RequestReport::load_seconds)
      .def_readonly("compute_seconds", &RequestReport::compute_seconds)
      .def_readonly("waited_seconds", &RequestReport::waited_seconds)
      .def_property_readonly("begun", &nanoseconds<&RequestReport::begun>)
      .def_property_readonly("ended", &nanoseconds<&RequestReport::ended>)
      .def_property_readonly("first_lookup", &nanoseconds<&RequestReport::first_lookup>)
      .def_property_readonly("last_lookup", &nanoseconds<&RequestReport::last_lookup>)
      .def_property_readonly("decided", &nanoseconds<&RequestReport::decided>)
      .def_property_readonly("reads", &reads)
      .def_readonly("unfinished_reads", &RequestReport::unfinished_reads)
      .def_property_readonly("loads", &loads);
  py::class_<BoundCache, Cache>(module, "TieredCache")
      .def(py::init(&make_cache), py::arg("region").none(false), py::arg("metrics").none(false),
           py::kw_only(), py::arg("group_ids"), py::arg("tokens_per_chunk"), py::arg("shard_bytes"),
           py::arg("full_attention") = std::vector<bool>{}, py::arg("tiers") = py::tuple(),
           py::arg("eviction_policy") = "lru", py::arg("load_policy") = "auto",
           py::arg("lookup_timeout_seconds") = 5.0, py::arg("keep_events") = false,
           py::arg("cache_blocks") = 0, py::arg("blocks_per_chunk") = 1, py::arg("shards_per_area") = 1,
           py::arg("keep_identity") = "", py::arg("max_sessions") = 4096, py::arg("max_pinned_bytes") = 0,
           py::arg("tenants") = std::vector<std::pair<std::string, double>>{}, py::arg("share_identity") = "",
           py::arg("neighbour_interval_seconds") = 1.0, py::arg("hosts") = py::none(),
           py::arg("hosts_text") = "", py::arg("hosts_timeout_seconds") = 120.0)
      .def("begin_request", &begin_request, py::arg("request_id"), py::kw_only(),
           py::arg("load_from_cpu") = true, py::arg("load_tiers") = RequestOptions::kAllTiers,
           py::arg("skip_store") = false, py::arg("load_policy") = py::none(), py::arg("priority") = 0,
           py::arg("remote_wait_seconds") = 0.0, py::arg("family") = 0, py::arg("client") = 0,
           py::arg("returns_in") = 0.0, py::arg("tenant") = 0)
      .def("apply_hints", &apply_hints, py::arg("hints"))
      .def("end_turn", &end_turn, py::arg("request"), py::arg("session"), py::arg("client"), py::arg("hints"))
      .def(
          "end_request",
          [](const Cache& self, RequestHandle request) {
            forget_context(*self);
            self->cache->end_request(request);
          },
          py::arg("request"))
      .def(
          "end_traced_request",
          [](const Cache& self, RequestHandle request) {
            forget_context(*self);
            self->cache->end_request(request);
            const RequestReport& report = self->cache->report(request);
            return py::bytes(reinterpret_cast<const char*>(&report), sizeof report);
          },
          py::arg("request"))
      .def(
          "admit", [](const Cache& self, RequestHandle request) { self->cache->admit(request); },
          py::arg("request"))
      .def(
          "preempt",
          [](const Cache& self, RequestHandle request) {
            forget_context(*self);  // the request has another span when it is looked up again
            self->cache->preempt(request);
          },
          py::arg("request"))
      .def("make_lookup", &make_lookup, py::arg("results"), py::arg("handle_of"),
           py::arg("span_of") = py::none(), py::arg("part_of") = py::none())
      .def("report", &report, py::arg("request"))
      .def("tenant_stats",
           [](const Cache& self) {
             std::vector<std::tuple<std::string, std::uint64_t, std::uint64_t>> tenants;
             for (const TenantStats& of : self->cache->tenant_stats())
               tenants.emplace_back(of.name, of.bytes, of.share_bytes);
             return tenants;
           })
      .def("lookup_counts",
           [](const Cache& self) {
             std::vector<std::pair<std::uint64_t, std::uint64_t>> groups;
             for (const auto& [found, missed] : self->cache->lookup_counts())
               groups.emplace_back(found, missed);
             return groups;
           })
      .def("forget_context", [](const Cache& self) { forget_context(*self); })
      .def(
          "lookup",
          [](const Cache& self, std::uint64_t request, const py::object& key) {
            return static_cast<int>(self->cache->lookup(self->check_handle(request), to_key(key)));
          },
          py::arg("request"), py::arg("key"))
      .def(
          "load_source",
          [](const Cache& self, const py::object& key) { return self->cache->load_source(to_key(key)); },
          py::arg("key"))
      .def("prepare_load", &prepare_load, py::arg("request"), py::arg("keys"))
      .def(
          "complete_load",
          [](const Cache& self, const py::object& keys, std::int64_t request) {
            const auto handle =
                request < 0 ? std::nullopt : std::optional(static_cast<RequestHandle>(request));
            self->cache->complete_load(to_keys(keys), handle);
          },
          py::arg("keys"), py::arg("request") = -1)
      .def("prepare_store", &prepare_store, py::arg("request"), py::arg("keys"),
           py::arg("depths") = py::none())
      .def(
          "complete_store",
          [](const Cache& self, const py::object& keys, bool success) {
            self->cache->complete_store(to_keys(keys), success);
          },
          py::arg("keys"), py::arg("success") = true)
      .def("end_step", [](const Cache& self) { self->cache->end_step(); })
      .def("has_pending_work", [](const Cache& self) { return self->cache->has_pending_work(); })
      .def("has_removals", [](const Cache& self) { return self->cache->has_removals(); })
      .def("reset", &released<&TieredCache::reset>)
      .def("abandon_jobs", [](const Cache& self) { self->cache->abandon_jobs(); })
      .def("absent", &absent, py::arg("keys"))
      .def("take_neighbour_problems",
           [](const Cache& self) { return self->cache->take_neighbour_problems(); })
      .def("take_events", &take_events)
      .def("publish_gauges", [](const Cache& self) { self->cache->publish_gauges(); })
      .def("stats", &stats)
      .def("tier_stats", &tier_stats, py::arg("tier"))
      .def("close", &released<&TieredCache::close>);
}

}  // namespace kv_offload::bindings
