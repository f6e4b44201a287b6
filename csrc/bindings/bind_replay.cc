// SPDX-License-Identifier: Apache-2.0
#include "bindings/bindings.h"
#include "bindings/tier_spec.h"
#include "replay/agent_sessions.h"
#include "replay/trace_replay.h"

namespace kv_offload::bindings {
namespace {

template <typename T>
using Array = py::array_t<T, py::array::c_style>;

template <typename T>
std::vector<T> vector_of(const Array<T>& array) {
  return {array.data(), array.data() + array.size()};
}

template <typename T>
Array<T> array_of(const std::vector<T>& values) {
  return Array<T>(static_cast<py::ssize_t>(values.size()), values.data());
}

Trace make_trace(const Array<std::uint32_t>& ends, const Array<std::uint64_t>& blocks) {
  return {vector_of(ends), vector_of(blocks)};
}

py::dict replay_trace(const Trace& trace, std::size_t host_chunks, std::size_t tier_chunks,
                      const std::string& eviction_policy, const std::string& tier_eviction_policy,
                      const std::string& write_policy, std::size_t kill_after, std::size_t recent_requests,
                      bool keep_host_memory, const std::optional<Array<double>>& hints, bool late_hints,
                      bool prefetch, double tier_chunks_per_second) {
  const ReplayOptions options{host_chunks,
                              tier_chunks,
                              eviction_policy,
                              tier_eviction_policy,
                              write_policy_of(write_policy),
                              kill_after,
                              recent_requests,
                              keep_host_memory,
                              hints ? vector_of(*hints) : std::vector<double>{},
                              late_hints,
                              prefetch,
                              tier_chunks_per_second,
                              make_eviction_policy};
  using namespace py::literals;
  ReplayResult result;
  {
    const py::gil_scoped_release release;
    result = replay(trace, options);
  }
  return py::dict(
      "requests"_a = result.requests, "blocks"_a = result.blocks, "host_hits"_a = result.host_hits,
      "tier_hits"_a = result.tier_hits, "stored"_a = result.stored, "declined"_a = result.declined,
      "evicted"_a = result.evicted, "written"_a = result.written, "tier_evicted"_a = result.tier_evicted,
      "tier_declined"_a = result.tier_declined, "prefetched"_a = result.prefetched,
      "prefetched_used"_a = result.prefetched_used, "killed_with"_a = result.killed_with,
      "recent_blocks"_a = result.recent_blocks, "recent_hits"_a = result.recent_hits,
      "blocks_after"_a = result.blocks_after, "hits_after"_a = result.hits_after,
      "host_hits_of"_a = array_of(result.host_hits_of), "tier_hits_of"_a = array_of(result.tier_hits_of));
}

py::dict merge(const Array<std::uint32_t>& session_ends, const Array<std::uint32_t>& streams,
               const Array<double>& durations, const Array<double>& pauses,
               const Array<std::uint32_t>& common, const Array<std::uint64_t>& new_ends,
               const Array<std::uint64_t>& new_blocks, const Array<std::uint32_t>& order, std::size_t active,
               double max_pause, std::size_t chunk_blocks) {
  const AgentSessions sessions{vector_of(session_ends), vector_of(streams), vector_of(durations),
                               vector_of(pauses),       vector_of(common),  vector_of(new_ends),
                               vector_of(new_blocks)};
  const MergeOptions options{vector_of(order), active, max_pause, chunk_blocks};
  MergedSessions merged;
  {
    const py::gil_scoped_release release;
    merged = merge_sessions(sessions, options);
  }
  using namespace py::literals;
  std::vector<double> ends, returns_at;
  for (const RequestTimes& times : merged.trace.times) {
    ends.push_back(times.ends);
    returns_at.push_back(times.returns_at);
  }
  return py::dict("requests"_a = array_of(merged.requests), "ends"_a = array_of(ends),
                  "returns_at"_a = array_of(returns_at), "needed_chunks"_a = merged.needed_chunks,
                  "different_chunks"_a = merged.different_chunks,
                  "trace"_a = py::cast(std::move(merged.trace)));
}

}  // namespace

void bind_replay(py::module_& module) {
  py::class_<Trace>(module, "Trace")
      .def(py::init(&make_trace), py::arg("ends"), py::arg("blocks"))
      .def("__len__", &Trace::size)
      .def_property_readonly("blocks", [](const Trace& trace) { return trace.blocks.size(); })
      .def("replay", &replay_trace, py::kw_only(), py::arg("host_chunks"), py::arg("tier_chunks") = 0,
           py::arg("eviction_policy") = "lru", py::arg("tier_eviction_policy") = "lru",
           py::arg("write_policy") = "write_through", py::arg("kill_after") = 0,
           py::arg("recent_requests") = 50, py::arg("keep_host_memory") = false,
           py::arg("hints") = py::none(), py::arg("late_hints") = false, py::arg("prefetch") = true,
           py::arg("tier_chunks_per_second") = 0.0)
      .def("optimal_hits", &optimal_hits, py::arg("capacity"), py::call_guard<py::gil_scoped_release>());
  module.def("merge_sessions", &merge, py::kw_only(), py::arg("session_ends"), py::arg("streams"),
             py::arg("durations"), py::arg("pauses"), py::arg("common"), py::arg("new_ends"),
             py::arg("new_blocks"), py::arg("order"), py::arg("active"), py::arg("max_pause"),
             py::arg("chunk_blocks"));
}

}  // namespace kv_offload::bindings
