// What the binding files share: conversions between Python objects and the
// words of base/types.h, and the registration function of each file.
//
// No logic lives here. A call releases the GIL only if it can block (storage, a
// copy, another process): taking it back can cost a whole switch interval, so
// the scheduler's short calls keep it.
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
void bind_tier(py::module_& module);
void bind_fs(py::module_& module);
void bind_redis(py::module_& module);
void bind_s3(py::module_& module);
void bind_mooncake(py::module_& module);
void bind_records(py::module_& module);
void bind_cache(py::module_& module);
void bind_worker(py::module_& module);
void bind_replay(py::module_& module);

// TypeError unless bytes; InvalidArgument when the length is out of range.
ChunkKey to_key(py::handle bytes);
// Any iterable of bytes.
std::vector<ChunkKey> to_keys(py::handle iterable);
py::bytes to_bytes(const ChunkKey& key);
py::list to_bytes_list(std::span<const ChunkKey> keys);
py::tuple to_tuple(std::span<const std::uint32_t> values);

// InvalidArgument when negative or not a number; `what` is the setting's name.
Nanos to_nanos(double seconds, std::string_view what);

// ResourceError carrying the status, unless ok.
void raise_unless_ok(const Status& status);

// A Python callable told (done, total) from C++, by a thread that does not hold
// the GIL. What it raises is kept, and raised again by the thread that called.
class ProgressCall {
 public:
  // `callable` outlives this; None: nobody is told.
  explicit ProgressCall(const py::object& callable) : callable_(callable) {}
  // Empty for None.
  std::function<void(std::uint64_t, std::uint64_t)> function();
  void raise_again() {
    if (raised_) std::rethrow_exception(raised_);
  }

 private:
  const py::object& callable_;
  std::exception_ptr raised_;
};

// The value of `text` among `known`; InvalidArgument naming the known ones.
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
