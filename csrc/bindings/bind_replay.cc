// SPDX-License-Identifier: Apache-2.0
#include "bindings/bindings.h"
#include "bindings/tier_spec.h"
#include "replay/trace_replay.h"

namespace kv_offload::bindings {
namespace {

using Ends = py::array_t<std::uint32_t, py::array::c_style>;
using Blocks = py::array_t<std::uint64_t, py::array::c_style>;

Trace make_trace(const Ends& ends, const Blocks& blocks) {
  return {{ends.data(), ends.data() + ends.size()}, {blocks.data(), blocks.data() + blocks.size()}};
}

py::dict replay_trace(const Trace& trace, std::size_t host_chunks, std::size_t tier_chunks,
                      const std::string& eviction_policy, const std::string& tier_eviction_policy,
                      const std::string& write_policy, std::size_t kill_after, std::size_t recent_requests,
                      bool keep_host_memory) {
  using namespace py::literals;
  const ReplayOptions options{
      host_chunks, tier_chunks,     eviction_policy, tier_eviction_policy, write_policy_of(write_policy),
      kill_after,  recent_requests, keep_host_memory};
  ReplayResult result;
  {
    const py::gil_scoped_release release;
    result = replay(trace, options);
  }
  return py::dict("requests"_a = result.requests, "blocks"_a = result.blocks,
                  "host_hits"_a = result.host_hits, "tier_hits"_a = result.tier_hits,
                  "stored"_a = result.stored, "declined"_a = result.declined, "evicted"_a = result.evicted,
                  "written"_a = result.written, "tier_evicted"_a = result.tier_evicted,
                  "tier_declined"_a = result.tier_declined, "killed_with"_a = result.killed_with,
                  "recent_blocks"_a = result.recent_blocks, "recent_hits"_a = result.recent_hits,
                  "blocks_after"_a = result.blocks_after, "hits_after"_a = result.hits_after);
}

}  // namespace

void bind_replay(py::module_& module) {
  py::class_<Trace>(module, "Trace")
      .def(py::init(&make_trace), py::arg("ends"), py::arg("blocks"))
      .def("__len__", &Trace::size)
      .def("replay", &replay_trace, py::kw_only(), py::arg("host_chunks"), py::arg("tier_chunks") = 0,
           py::arg("eviction_policy") = "lru", py::arg("tier_eviction_policy") = "lru",
           py::arg("write_policy") = "write_through", py::arg("kill_after") = 0,
           py::arg("recent_requests") = 50, py::arg("keep_host_memory") = false)
      .def("optimal_hits", &optimal_hits, py::arg("capacity"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace kv_offload::bindings
