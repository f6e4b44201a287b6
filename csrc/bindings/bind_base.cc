// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include "bindings/bindings.h"
#include "policy/eviction_policy.h"

namespace kv_offload::bindings {

ChunkKey to_key(py::handle bytes) {
  char* data = nullptr;
  Py_ssize_t size = 0;
  if (PyBytes_AsStringAndSize(bytes.ptr(), &data, &size) != 0) throw py::error_already_set();
  return ChunkKey(std::string_view(data, static_cast<std::size_t>(size)));
}

std::vector<ChunkKey> to_keys(py::handle iterable) {
  const auto sequence =
      py::reinterpret_steal<py::object>(PySequence_Fast(iterable.ptr(), "keys must be an iterable of bytes"));
  if (!sequence) throw py::error_already_set();
  const auto size = static_cast<std::size_t>(PySequence_Fast_GET_SIZE(sequence.ptr()));
  PyObject** items = PySequence_Fast_ITEMS(sequence.ptr());
  std::vector<ChunkKey> keys;
  keys.reserve(size);
  for (std::size_t i = 0; i < size; ++i) keys.push_back(to_key(items[i]));
  return keys;
}

py::bytes to_bytes(const ChunkKey& key) { return {key.bytes().data(), key.size()}; }

py::list to_bytes_list(std::span<const ChunkKey> keys) {
  py::list list(keys.size());
  for (std::size_t i = 0; i < keys.size(); ++i) list[i] = to_bytes(keys[i]);
  return list;
}

py::tuple to_tuple(std::span<const std::uint32_t> values) {
  py::tuple tuple(values.size());
  for (std::size_t i = 0; i < values.size(); ++i) tuple[i] = py::int_(values[i]);
  return tuple;
}

Nanos to_nanos(double seconds, std::string_view what) {
  constexpr double kLongest = 1e9;  // about 30 years, far below the overflow of 64-bit nanoseconds
  if (!(seconds >= 0) || seconds > kLongest) {
    throw_invalid("{}={} must be between 0 and {:.0f} seconds", what, seconds, kLongest);
  }
  return Nanos(std::llround(seconds * 1e9));
}

std::function<void(std::uint64_t, std::uint64_t)> ProgressCall::function() {
  if (callable_.is_none()) return {};
  return [this](std::uint64_t done, std::uint64_t total) {
    const py::gil_scoped_acquire acquire;
    if (raised_) return;
    try {
      callable_(done, total);
    } catch (...) {
      raised_ = std::current_exception();
    }
  };
}

void raise_unless_ok(const Status& status) {
  if (!status.is_ok()) throw ResourceError(status.to_string());
}

void bind_base(py::module_& module) {
  py::register_exception<ResourceError>(module, "ResourceError", PyExc_RuntimeError);
  module.def("parse_byte_size", &parse_byte_size, py::arg("text"));
  module.def("format_bytes", &format_bytes, py::arg("count"));
  module.def("eviction_policy_names", &eviction_policy_names);
}

}  // namespace kv_offload::bindings
