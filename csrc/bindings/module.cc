// SPDX-License-Identifier: Apache-2.0
// The extension module kv_offload._core; kv_offload/_core.pyi declares its Python interface.
#include "bindings/bindings.h"

PYBIND11_MODULE(_core, module) {
  namespace bindings = kv_offload::bindings;
  module.doc() = "The C++ core of kv_offload.";
  module.attr("__version__") = KV_OFFLOAD_VERSION;
  bindings::bind_base(module);
  bindings::bind_metrics(module);
  bindings::bind_region(module);
  bindings::bind_hosts(module);
  bindings::bind_tier(module);  // before the derived classes
  bindings::bind_records(module);
  bindings::bind_fs(module);
  bindings::bind_redis(module);
  bindings::bind_s3(module);
  bindings::bind_mooncake(module);
  bindings::bind_cache(module);
  bindings::bind_worker(module);
  bindings::bind_replay(module);
}
