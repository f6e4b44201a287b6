// SPDX-License-Identifier: Apache-2.0
// A custom tier type, as a third party would add one: the store (memory_store.h) and its Python
// binding. It is an extension module next to kv_offload._core, for tests/python/test_tiers.py.
#include <chrono>
#include <map>
#include <mutex>

#include "bindings/bindings.h"
#include "bindings/tier_spec.h"
#include "tier/memory_store.h"
#include "tier/thread_pool_tier.h"

namespace kv_offload {
namespace {

namespace py = pybind11;
using testing::MemoryServer;

// Servers live as long as the process, so that one engine finds the records of a previous one.
std::shared_ptr<MemoryServer> server_of(const std::string& name) {
  static std::mutex mutex;
  static std::map<std::string, std::shared_ptr<MemoryServer>> servers;
  const std::lock_guard lock(mutex);
  auto& server = servers[name];
  if (!server) server = std::make_shared<MemoryServer>();
  return server;
}

struct ToyTierSpec final : bindings::TierSpec {
  std::shared_ptr<MemoryServer> server;
  NamespaceId namespace_id{};
  ThreadPoolTierOptions options;

  std::unique_ptr<Tier> open() const override {
    return make_thread_pool_tier(std::make_unique<testing::MemoryStore>(server, namespace_id), options);
  }
};

std::shared_ptr<ToyTierSpec> toy_tier(const std::string& server, const py::bytes& namespace_id,
                                      std::string name, unsigned n_read_threads, unsigned n_write_threads,
                                      unsigned op_timeout_ms) {
  auto spec = std::make_shared<ToyTierSpec>();
  spec->server = server_of(server);
  spec->namespace_id = bindings::namespace_id_of(namespace_id);
  spec->options.name = std::move(name);
  spec->options.n_read_threads = n_read_threads;
  spec->options.n_write_threads = n_write_threads;
  spec->options.op_timeout = std::chrono::milliseconds(op_timeout_ms);
  return spec;
}

}  // namespace
}  // namespace kv_offload

PYBIND11_MODULE(kv_offload_toy_tier, module) {
  namespace py = pybind11;
  using kv_offload::ToyTierSpec;
  kv_offload::bindings::require_core("kv_offload_toy_tier");  // defines the base class
  py::class_<ToyTierSpec, kv_offload::bindings::TierSpec, std::shared_ptr<ToyTierSpec>>(module, "ToyTier")
      .def(py::init(&kv_offload::toy_tier), py::kw_only(), py::arg("server"), py::arg("namespace_id"),
           py::arg("name"), py::arg("n_read_threads"), py::arg("n_write_threads"), py::arg("op_timeout_ms"));
  module.def(
      "records", [](const std::string& server) { return kv_offload::server_of(server)->size(); },
      py::arg("server"));
}
