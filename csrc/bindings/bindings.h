// SPDX-License-Identifier: Apache-2.0
// Shared by all binding files: conversions between Python objects and the types of base/types.h, and the
// registration function of each file.
//
// The bindings contain no logic. A call releases the GIL only if it can block (storage, a copy, another
// process). Reacquiring the GIL can take a whole switch interval, so the scheduler's short calls keep it.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <exception>
#include <functional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "base/types.h"

namespace kv_offload::bindings {

namespace py = pybind11;

void bind_base(py::module_& module);
void bind_metrics(py::module_& module);
void bind_region(py::module_& module);
void bind_hosts(py::module_& module);
void bind_tier(py::module_& module);
void bind_records(py::module_& module);
void bind_fs(py::module_& module);
void bind_redis(py::module_& module);
void bind_s3(py::module_& module);
void bind_mooncake(py::module_& module);
void bind_cache(py::module_& module);
void bind_worker(py::module_& module);
void bind_replay(py::module_& module);

// Throws TypeError unless it is a bytes object, InvalidArgument when the length is out of range.
ChunkKey to_key(py::handle bytes);
// Converts any iterable of bytes.
std::vector<ChunkKey> to_keys(py::handle iterable);
py::bytes to_bytes(const ChunkKey& key);
py::list to_bytes_list(std::span<const ChunkKey> keys);
py::tuple to_tuple(std::span<const std::uint32_t> values);

// Throws InvalidArgument for a negative value or NaN, and above 1e9 s. `what` is the setting's name.
Nanos to_nanos(double seconds, std::string_view what);

// Throws ResourceError with the status text, unless ok.
void raise_unless_ok(const Status& status);

// A Python callable that C++ calls with (done, total), on a thread that does not hold the GIL. The first
// exception that it raises is kept; raise_again() raises it on the calling thread.
class ProgressCall {
 public:
  // `callable` must outlive this object; None: no calls.
  explicit ProgressCall(const py::object& callable) : callable_(callable) {}
  // Returns an empty function for None.
  std::function<void(std::uint64_t, std::uint64_t)> function();
  void raise_again() {
    if (raised_) std::rethrow_exception(raised_);
  }

 private:
  const py::object& callable_;
  std::exception_ptr raised_;
};

// Returns the value that `known` has for `text`. Throws InvalidArgument that lists the known names.
template <typename Value>
Value one_of(std::string_view what, std::string_view text,
             std::initializer_list<std::pair<std::string_view, Value>> known) {
  std::string names;
  for (const auto& [name, value] : known) {
    if (text == name) return value;
    names += names.empty() ? "" : ", ";
    names += name;
  }
  throw_invalid("{}={:?} is not known: use one of {}", what, text, names);
}

}  // namespace kv_offload::bindings
