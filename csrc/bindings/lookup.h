// The lookup function that vLLM calls once per key of every waiting request: a
// builtin without pybind11 on its path, so that a key costs a hash probe.
#pragma once

#include <memory>

#include "bindings/bound_cache.h"

namespace kv_offload::bindings {

// A builtin lookup(key: bytes, context) returning one of the four `results`
// (miss, hit, pending, retry). `handle_of(context)` is asked for the request's
// handle when another context object comes than last time; then `span_of(context,
// key)`, unless None, for (end of the first chunk asked for, end of the last chunk)
// in tokens, or None, unless the cache knows them. `part_of(context, key)`, unless
// None, is asked for every key: tokens of the part of a chunk that it is of, 0 of a whole one. The function
// keeps the cache alive. TypeError unless `results` are four.
py::object make_lookup(std::shared_ptr<BoundCache> cache, const py::tuple& results, py::object handle_of,
                       py::object span_of, py::object part_of);

// All lookup functions of this cache drop the context that they remember: its
// handle may be given to another request from now on.
void forget_context(BoundCache& cache);

}  // namespace kv_offload::bindings
