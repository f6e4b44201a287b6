#include <algorithm>
#include <charconv>

#include "bindings/bindings.h"
#include "bindings/bound_cache.h"

namespace kv_offload::bindings {
namespace {

TierSlotOptions slot_of(std::string_view write_policy) {
  constexpr std::string_view kReuse = "reuse:";
  if (write_policy.starts_with(kReuse)) {
    const std::string_view digits = write_policy.substr(kReuse.size());
    std::uint32_t threshold = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), threshold);
    if (error == std::errc() && end == digits.data() + digits.size() && threshold > 0) {
      return {WritePolicy::kReuse, threshold};
    }
    throw_invalid("write_policy={:?}: write reuse:N with N from 1 on", write_policy);
  }
  return {one_of<WritePolicy>("write_policy", write_policy,
                              {{"through", WritePolicy::kThrough},
                               {"on_evict", WritePolicy::kOnEvict},
                               {"reuse:N", WritePolicy::kReuse}})};
}

NamespaceId namespace_id_of(std::string_view bytes) {
  NamespaceId id{};
  if (bytes.size() != id.size()) {
    throw_invalid("namespace_id has {} bytes: give {}", bytes.size(), id.size());
  }
  std::copy(bytes.begin(), bytes.end(), id.begin());
  return id;
}

FsTierSpec fs_tier_spec(std::string root_dir, std::uint64_t max_bytes, const py::bytes& namespace_id,
                        std::string namespace_json, std::string name, const std::string& fsync,
                        const std::string& o_direct, unsigned n_read_threads, unsigned n_write_threads,
                        double op_deadline_seconds, std::string eviction_policy,
                        const std::string& write_policy) {
  FsTierSpec spec;
  spec.slot = slot_of(write_policy);
  FsTierOptions& options = spec.options;
  options.name = std::move(name);
  options.root_dir = std::move(root_dir);
  options.max_bytes = max_bytes;
  options.namespace_id = namespace_id_of(namespace_id);
  options.namespace_json = std::move(namespace_json);
  options.fsync = one_of<FsyncMode>(
      "fsync", fsync, {{"none", FsyncMode::kNone}, {"data", FsyncMode::kData}, {"full", FsyncMode::kFull}});
  options.o_direct =
      one_of<DirectMode>("o_direct", o_direct,
                         {{"auto", DirectMode::kAuto}, {"on", DirectMode::kOn}, {"off", DirectMode::kOff}});
  options.n_read_threads = n_read_threads;
  options.n_write_threads = n_write_threads;
  options.op_deadline = to_nanos(op_deadline_seconds, "op_deadline_seconds");
  options.eviction_policy = std::move(eviction_policy);
  return spec;
}

}  // namespace

void bind_fs(py::module_& module) {
  py::class_<FsTierSpec>(module, "FsTier")
      .def(py::init(&fs_tier_spec), py::kw_only(), py::arg("root_dir"), py::arg("max_bytes"),
           py::arg("namespace_id"), py::arg("namespace_json"), py::arg("name") = "fs",
           py::arg("fsync") = "none", py::arg("o_direct") = "auto", py::arg("n_read_threads") = 4,
           py::arg("n_write_threads") = 2, py::arg("op_deadline_seconds") = 10.0,
           py::arg("eviction_policy") = "lru", py::arg("write_policy") = "through")
      .def("__repr__", [](const FsTierSpec& self) {
        return fmt::format("<FsTier {:?} at {:?}>", self.options.name, self.options.root_dir);
      });
}

}  // namespace kv_offload::bindings
