// SPDX-License-Identifier: Apache-2.0
#include "backends/mooncake/probe.h"
#include "backends/mooncake/tier.h"
#include "bindings/bindings.h"
#include "bindings/tier_spec.h"

namespace kv_offload::bindings {
namespace {

using namespace py::literals;

struct MooncakeTierSpec final : TierSpec {
  MooncakeTierOptions options;
  std::unique_ptr<Tier> open() const override {
    MooncakeTierOptions chosen = options;
    chosen.form = form();
    chosen.read_only = slot.write_policy == WritePolicy::kReadOnly;
    chosen.epoch = epoch;
    return make_mooncake_tier(chosen);
  }
};

mooncake::ClientOptions client_of(std::vector<std::string> command, std::string setup) {
  if (command.empty()) throw_invalid("command is empty; give the Mooncake client program");
  mooncake::ClientOptions client;
  client.launch = mooncake::launch_of(std::move(command));
  client.setup = std::move(setup);
  return client;
}

std::shared_ptr<MooncakeTierSpec> mooncake_tier_spec(std::vector<std::string> command, std::string setup,
                                                     const py::bytes& namespace_id, std::string name,
                                                     std::string place, std::string key_prefix,
                                                     unsigned n_read_threads, unsigned n_write_threads,
                                                     double op_timeout_seconds) {
  auto spec = std::make_shared<MooncakeTierSpec>();
  MooncakeTierOptions& options = spec->options;
  options.client = client_of(std::move(command), std::move(setup));
  options.namespace_id = namespace_id_of(namespace_id);
  options.name = std::move(name);
  options.place = std::move(place);
  options.key_prefix = std::move(key_prefix);
  options.n_read_threads = n_read_threads;
  options.n_write_threads = n_write_threads;
  options.op_timeout = to_nanos(op_timeout_seconds, "op_timeout_seconds");
  return spec;
}

py::dict probe_store(std::vector<std::string> command, std::string setup, const std::string& place,
                     const std::string& key_prefix, std::uint64_t record_bytes, unsigned records,
                     double deadline_seconds) {
  mooncake::Probe found;
  const mooncake::ClientOptions client = client_of(std::move(command), std::move(setup));
  {
    const py::gil_scoped_release release;
    found = mooncake::probe(client, place, key_prefix, record_bytes, records,
                            to_nanos(deadline_seconds, "deadline_seconds"));
  }
  return py::dict(
      "version"_a = found.version, "start_seconds"_a = found.start_seconds,
      "answer_seconds"_a = found.answer_seconds, "write_bytes_per_second"_a = found.write_bytes_per_second,
      "read_bytes_per_second"_a = found.read_bytes_per_second, "write_refused"_a = found.write_refused);
}

}  // namespace

void bind_mooncake(py::module_& module) {
  py::class_<MooncakeTierSpec, TierSpec, std::shared_ptr<MooncakeTierSpec>>(module, "MooncakeTier")
      .def(py::init(&mooncake_tier_spec), py::kw_only(), py::arg("command"), py::arg("setup"),
           py::arg("namespace_id"), py::arg("name") = "mooncake", py::arg("place") = "",
           py::arg("key_prefix") = "kv_offload", py::arg("n_read_threads") = 4,
           py::arg("n_write_threads") = 2, py::arg("op_timeout_seconds") = 10.0)
      .def("__repr__", [](const MooncakeTierSpec& self) {
        return fmt::format("<MooncakeTier {:?} at {}>", self.options.name, self.options.place);
      });
  module.def("probe_mooncake", &probe_store, py::arg("command"), py::arg("setup"), py::arg("place"),
             py::arg("key_prefix"), py::arg("record_bytes"), py::arg("records"), py::arg("deadline_seconds"));
}

}  // namespace kv_offload::bindings
