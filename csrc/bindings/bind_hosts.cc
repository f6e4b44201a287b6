// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <optional>
#include <tuple>

#include "bindings/bindings.h"
#include "bindings/tier_spec.h"
#include "hosts/frame.h"
#include "hosts/host_agent.h"
#include "hosts/host_links.h"

namespace kv_offload::bindings {
namespace {

std::unique_ptr<HostAgent> make_agent(std::shared_ptr<HostRegion> region, std::string address,
                                      std::string version, double silence_seconds) {
  HostAgent::Options options;
  options.silence = to_nanos(silence_seconds, "silence_seconds");
  options.address = std::move(address);
  options.version = std::move(version);
  const py::gil_scoped_release release;
  return std::make_unique<HostAgent>(std::move(region), std::move(options));
}

std::unique_ptr<HostLinks> make_links(std::shared_ptr<HostRegion> region,
                                      const std::vector<std::pair<std::uint32_t, std::uint32_t>>& hosts,
                                      std::string version, double silence_seconds) {
  HostLinks::Options options;
  options.version = std::move(version);
  options.silence = to_nanos(silence_seconds, "silence_seconds");
  std::vector<RemoteHost> remote;
  for (const auto& [first_rank, ranks] : hosts) remote.push_back({first_rank, ranks});
  options.on_wait = [] {  // so that Ctrl-C ends a wait
    const py::gil_scoped_acquire acquired;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  };
  const py::gil_scoped_release release;
  return std::make_unique<HostLinks>(std::move(region), std::move(remote), std::move(options));
}

// Waits in slices, so that Ctrl-C ends the wait.
void wait_until_connected(const HostLinks& links, double timeout_seconds) {
  constexpr Nanos kSlice = std::chrono::milliseconds(200);
  Nanos left = to_nanos(timeout_seconds, "timeout_seconds");
  while (true) {
    const Nanos slice = std::min(left, kSlice);
    Status status;
    {
      const py::gil_scoped_release release;
      status = links.wait_until_connected(slice);
    }
    left -= slice;
    if (status.is_ok()) return;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    if (status.kind() != StatusKind::kTimeout) throw_resource("{}", status.message());
    if (left <= Nanos(0)) throw_resource("{} (waited {:.1f} s)", status.message(), timeout_seconds);
  }
}

std::tuple<std::string, std::vector<std::string>, std::vector<std::string>> keep_memory(
    HostLinks& links, double timeout_seconds) {
  const py::gil_scoped_release release;
  KeptMemory memory = links.keep_memory(to_nanos(timeout_seconds, "timeout_seconds"));
  return {std::move(memory.identity), std::move(memory.missing), std::move(memory.ending)};
}

using EpochArgument = std::tuple<std::uint64_t, bool, std::uint64_t>;  // EpochChoice
using OpenRequest = std::tuple<std::uint32_t, std::vector<EpochArgument>, std::string>;

// Waits without the GIL.
std::optional<OpenRequest> wait_for_tiers(HostAgent& agent, double timeout_seconds) {
  std::optional<OpenTiers> request;
  {
    const py::gil_scoped_release release;
    request = agent.tiers().wait_for_request(to_nanos(timeout_seconds, "timeout_seconds"));
  }
  if (!request) return std::nullopt;
  std::vector<EpochArgument> epochs;
  for (const EpochChoice& choice : request->epochs)
    epochs.emplace_back(choice.id, choice.is_new, choice.replaces);
  return OpenRequest(request->round, std::move(epochs), request->text);
}

void open_tiers(HostAgent& agent, std::uint32_t round, const std::vector<EpochArgument>& epochs,
                const std::vector<std::shared_ptr<TierSpec>>& tiers,
                const std::vector<std::pair<std::string, double>>& tenants) {
  if (epochs.size() != tiers.size()) {
    throw_invalid(
        "this host has {} tiers and the scheduler {}: start vLLM with the same settings on all hosts",
        tiers.size(), epochs.size());
  }
  std::vector<EpochChoice> choices;
  for (const auto& [id, is_new, replaces] : epochs) choices.push_back({id, is_new, replaces});
  const py::gil_scoped_release release;
  for (const auto& tier : tiers) {
    if (!tier) throw_invalid("tiers contains None; give a TierSpec for each");
    tier->tenants.clear();
    for (const auto& [name, share] : tenants) tier->tenants.push_back({name, share});
  }
  agent.tiers().close_tiers();
  agent.tiers().open(round, open_all(tiers, choices), tenants.size());
}

}  // namespace

void bind_hosts(py::module_& module) {
  module.def("hosts_problem", &hosts_problem);
  using NoGil = py::call_guard<py::gil_scoped_release>;
  py::class_<HostAgent>(module, "HostAgent")
      .def(py::init(&make_agent), py::arg("region").none(false), py::kw_only(), py::arg("address"),
           py::arg("version"), py::arg("silence_seconds") = to_seconds(HostAgent::Options{}.silence))
      .def_property_readonly("endpoint", &HostAgent::endpoint)
      .def_property_readonly("is_closed", [](HostAgent& agent) { return agent.tiers().is_closed(); })
      .def("wait_for_tiers", &wait_for_tiers, py::arg("timeout_seconds"))
      .def("open_tiers", &open_tiers, py::arg("round"), py::arg("epochs"), py::arg("tiers"), py::kw_only(),
           py::arg("tenants") = std::vector<std::pair<std::string, double>>{})
      .def(
          "refuse_tiers",
          [](HostAgent& agent, std::uint32_t round, const std::string& problem) {
            agent.tiers().refuse(round, problem);
          },
          py::arg("round"), py::arg("problem"), NoGil())
      .def("close", &HostAgent::close, NoGil());
  py::class_<HostLinks>(module, "HostLinks")
      .def(py::init(&make_links), py::arg("region").none(false), py::arg("hosts"), py::kw_only(),
           py::arg("version"), py::arg("silence_seconds") = to_seconds(HostLinks::Options{}.silence))
      .def("wait_until_connected", &wait_until_connected, py::arg("timeout_seconds"))
      .def("keep_memory", &keep_memory, py::arg("timeout_seconds"))
      .def_property_readonly("num_hosts", &HostLinks::num_hosts)
      .def_property_readonly("lost_hosts", &HostLinks::lost_hosts)
      .def("take_events", &HostLinks::take_events)
      .def("close", &HostLinks::close, NoGil());
}

}  // namespace kv_offload::bindings
