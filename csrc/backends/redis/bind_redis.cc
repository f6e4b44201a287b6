// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "backends/redis/probe.h"
#include "backends/redis/records.h"
#include "backends/redis/store.h"
#include "backends/redis/tier.h"
#include "bindings/bindings.h"
#include "bindings/tier_spec.h"

namespace kv_offload::bindings {
namespace {

using namespace py::literals;

struct RedisTierSpec final : TierSpec {
  RedisTierOptions options;
  std::unique_ptr<Tier> open() const override {
    RedisTierOptions chosen = options;
    chosen.form = form();
    chosen.read_only = slot.write_policy == WritePolicy::kReadOnly;
    chosen.watch_removals = watch_removals;
    chosen.epoch = epoch;
    return make_redis_tier(chosen);
  }
  std::unique_ptr<RecordStore> open_for_import() const override {
    RedisTierOptions chosen = options;
    chosen.may_evict = false;
    return std::make_unique<redis::RedisStore>(chosen);
  }
};

redis::Server server_of(std::string host, std::uint16_t port, std::string unix_socket, unsigned database,
                        bool tls, std::string ca_file, std::string user, std::string password) {
  if (host.empty() == unix_socket.empty()) throw_invalid("give either host or unix_socket");
  redis::Server server;
  server.host = std::move(host);
  server.port = port;
  server.unix_socket = std::move(unix_socket);
  server.database = database;
  server.tls = tls;
  server.ca_file = std::move(ca_file);
  server.user = std::move(user);
  server.password = std::move(password);
  return server;
}

std::shared_ptr<RedisTierSpec> redis_tier_spec(const redis::Server& server, const py::bytes& namespace_id,
                                               std::string name, std::string key_prefix,
                                               std::uint64_t ttl_seconds, unsigned n_read_threads,
                                               unsigned n_write_threads, double op_timeout_seconds,
                                               std::vector<redis::Server> other_nodes) {
  auto spec = std::make_shared<RedisTierSpec>();
  RedisTierOptions& options = spec->options;
  options.server = server;
  options.other_nodes = std::move(other_nodes);
  options.namespace_id = namespace_id_of(namespace_id);
  options.name = std::move(name);
  options.key_prefix = std::move(key_prefix);
  options.ttl_seconds = ttl_seconds;
  options.n_read_threads = n_read_threads;
  options.n_write_threads = n_write_threads;
  options.op_timeout = to_nanos(op_timeout_seconds, "op_timeout_seconds");
  return spec;
}

py::dict probe_server(const redis::Server& server, const std::string& key_prefix, std::uint64_t record_bytes,
                      unsigned records, double deadline_seconds,
                      const std::vector<redis::Server>& other_nodes) {
  std::vector<redis::Server> seeds{server};
  seeds.insert(seeds.end(), other_nodes.begin(), other_nodes.end());
  redis::Probe found;
  {
    const py::gil_scoped_release release;
    found = redis::probe(seeds, key_prefix, record_bytes, records,
                         to_nanos(deadline_seconds, "deadline_seconds"));
  }
  py::list nodes;
  for (const redis::NodeProbe& node : found.nodes) {
    nodes.append(py::dict("address"_a = node.address, "failure"_a = node.failure, "version"_a = node.version,
                          "role"_a = node.role, "eviction_policy"_a = node.eviction_policy,
                          "used_bytes"_a = node.used_bytes, "max_bytes"_a = node.max_bytes,
                          "free_bytes"_a = node.free_bytes()));
  }
  return py::dict(
      "ping_seconds"_a = found.ping_seconds, "write_bytes_per_second"_a = found.write_bytes_per_second,
      "read_bytes_per_second"_a = found.read_bytes_per_second, "write_refused"_a = found.write_refused,
      "records"_a = found.records, "bytes_per_record"_a = found.bytes_per_record, "cluster"_a = found.cluster,
      "nodes"_a = nodes);
}

std::unique_ptr<RemoteRecords> redis_records(const redis::Server& server, std::string key_prefix,
                                             double deadline_seconds, unsigned page) {
  RedisRecordsOptions options;
  options.server = server;
  options.key_prefix = std::move(key_prefix);
  options.deadline = to_nanos(deadline_seconds, "deadline_seconds");
  options.page = std::max(1u, page);
  const py::gil_scoped_release release;
  return open_redis_records(options);
}

}  // namespace

void bind_redis(py::module_& module) {
  // Neither repr shows the user or the password.
  py::class_<redis::Server>(module, "RedisServer")
      .def(py::init(&server_of), py::kw_only(), py::arg("host") = "", py::arg("port") = 6379,
           py::arg("unix_socket") = "", py::arg("database") = 0, py::arg("tls") = false,
           py::arg("ca_file") = "", py::arg("user") = "", py::arg("password") = "")
      .def("__repr__", [](const redis::Server& self) {
        return fmt::format("<RedisServer {}>", redis::address_of(self));
      });
  py::class_<RedisTierSpec, TierSpec, std::shared_ptr<RedisTierSpec>>(module, "RedisTier")
      .def(py::init(&redis_tier_spec), py::kw_only(), py::arg("server"), py::arg("namespace_id"),
           py::arg("name") = "redis", py::arg("key_prefix") = "kv_offload", py::arg("ttl_seconds") = 0,
           py::arg("n_read_threads") = 4, py::arg("n_write_threads") = 2,
           py::arg("op_timeout_seconds") = 10.0, py::arg("other_nodes") = std::vector<redis::Server>())
      .def("__repr__", [](const RedisTierSpec& self) {
        return fmt::format("<RedisTier {:?} at {}>", self.options.name,
                           redis::address_of(self.options.server));
      });
  module.def("probe_redis", &probe_server, py::arg("server"), py::arg("key_prefix"), py::arg("record_bytes"),
             py::arg("records"), py::arg("deadline_seconds"),
             py::arg("other_nodes") = std::vector<redis::Server>());
  module.def("redis_has_tls", &redis::has_tls);
  module.def("redis_records", &redis_records, py::arg("server"), py::kw_only(), py::arg("key_prefix"),
             py::arg("deadline_seconds"), py::arg("page") = 512);
}

}  // namespace kv_offload::bindings
