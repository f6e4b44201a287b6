// SPDX-License-Identifier: Apache-2.0
// The lookup function that vLLM calls once per key of every waiting request. It is a builtin that bypasses
// pybind11, so that a key costs one hash probe.
#pragma once

#include <memory>

#include "bindings/bound_cache.h"

namespace kv_offload::bindings {

// Returns a builtin lookup(key: bytes, context) that returns one of the four `results` (miss, hit, pending,
// retry).
//
// `handle_of(context)` returns the request's handle; it is called when the context object differs from the
// last one. Then `span_of(context, key)`, unless None, is called if the cache does not know the span yet. It
// returns None or, in tokens, (end of the first requested chunk, end of the last chunk). `part_of(context,
// key)`, unless None, is called for every key. It returns the tokens of a partial chunk, 0 for a whole one.
//
// The function keeps the cache alive. Throws TypeError unless there are four `results`.
py::object make_lookup(std::shared_ptr<BoundCache> cache, const py::tuple& results, py::object handle_of,
                       py::object span_of, py::object part_of);

// Makes all lookup functions of this cache drop their stored context: from now on its handle may belong to
// another request.
void forget_context(BoundCache& cache);

}  // namespace kv_offload::bindings
