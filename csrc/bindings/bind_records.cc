// SPDX-License-Identifier: Apache-2.0
#include "bindings/bindings.h"
#include "bindings/tier_spec.h"
#include "tier/remote_records.h"

namespace kv_offload::bindings {
namespace {

double unix_seconds(std::int64_t nanos) { return static_cast<double>(nanos) / 1e9; }

py::tuple list_page(RemoteRecords& self, const std::string& namespace_id, const py::bytes& from, bool sizes) {
  RemotePage page;
  const std::string start = from;
  {
    const py::gil_scoped_release release;
    raise_unless_ok(self.list(namespace_id, start, sizes, &page));
  }
  return py::make_tuple(py::cast(std::move(page.records)), py::bytes(page.next));
}

double written_at(RemoteRecords& self, const RemoteRecord& record) {
  std::int64_t nanos = 0;
  raise_unless_ok(self.written(record, &nanos));
  return unix_seconds(nanos);
}

py::tuple verify_record(RemoteRecords& self, const RemoteRecord& record, bool repair) {
  bool removed = false;
  Status status;
  {
    const py::gil_scoped_release release;
    status = self.verify(record, repair, &removed);
  }
  return py::make_tuple(to_string(status.kind()), status.message(), removed);
}

// Returns the removed records and bytes, and the error that stopped the call: a failed call may have removed
// some records.
py::tuple remove_records(RemoteRecords& self, const std::vector<RemoteRecord>& records) {
  RemoteRemoved removed;
  Status status;
  {
    const py::gil_scoped_release release;
    status = self.remove(records, &removed);
  }
  return py::make_tuple(removed.records, removed.bytes, status ? std::string() : status.message());
}

}  // namespace

void bind_records(py::module_& module) {
  py::class_<RemoteRecord>(module, "RemoteRecord")
      .def_property_readonly("name", [](const RemoteRecord& self) { return py::bytes(self.name); })
      .def_readonly("namespace_id", &RemoteRecord::namespace_id)
      .def_readonly("epoch", &RemoteRecord::epoch)
      .def_readonly("key", &RemoteRecord::key)
      .def_readonly("size", &RemoteRecord::bytes)
      .def_property_readonly("used",
                             [](const RemoteRecord& self) { return unix_seconds(self.used_unix_nanos); })
      .def_property_readonly("written",
                             [](const RemoteRecord& self) { return unix_seconds(self.written_unix_nanos); });

  using Released = py::call_guard<py::gil_scoped_release>;
  py::class_<RemoteRecords>(module, "RemoteRecords")
      .def("page", &list_page, py::arg("namespace_id"), py::arg("start"), py::arg("sizes"))
      .def("written", &written_at, py::arg("record"), Released())
      .def("verify", &verify_record, py::arg("record"), py::arg("repair"))
      .def(
          "use_keys",
          [](RemoteRecords& self, const std::vector<std::string>& paths) { self.use_keys(keys_from(paths)); },
          py::arg("encryption_key_files"), Released())
      .def("remove", &remove_records, py::arg("records"))
      .def_property_readonly("takes_threads", &RemoteRecords::takes_threads)
      .def_property_readonly("keeps_versions", &RemoteRecords::keeps_versions);
}

}  // namespace kv_offload::bindings
