// SPDX-License-Identifier: Apache-2.0
#include "bindings/bindings.h"
#include "bindings/tier_spec.h"
#include "bindings/whole_record.h"
#include "tier/record_importer.h"
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

// None: the record is missing, or has no valid header.
std::optional<std::string> tenant_of(RemoteRecords& self, const RemoteRecord& record) {
  RecordHeader header;
  const Status status = self.read_header(record, &header);
  if (status.kind() == StatusKind::kNotFound || status.kind() == StatusKind::kCorrupt) return std::nullopt;
  raise_unless_ok(status);
  return header.tenant;
}

// None: the record is missing, or has no valid header.
std::optional<StatedLoss> loss_of(RemoteRecords& self, const RemoteRecord& record) {
  RecordHeader header;
  const Status status = self.read_header(record, &header);
  if (status.kind() == StatusKind::kNotFound || status.kind() == StatusKind::kCorrupt) return std::nullopt;
  raise_unless_ok(status);
  return stated_loss(header);
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

std::string read_startup_epoch(RemoteRecords& self, const std::string& namespace_id) {
  std::string name;
  raise_unless_ok(self.read_startup_epoch(namespace_id, &name));
  return name;
}

std::unique_ptr<RecordImporter> open_importer(const TierSpec& spec) {
  return std::make_unique<RecordImporter>(spec.open_for_import());
}

py::tuple import_record(RecordImporter& self, const WholeRecord& record, double used) {
  bool written = false;
  Status status;
  {
    const py::gil_scoped_release release;
    status = self.write(record, static_cast<std::int64_t>(used * 1e9), &written);
  }
  return py::make_tuple(to_string(status.kind()), status.message(), written);
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
      .def("tenant", &tenant_of, py::arg("record"), Released())
      .def("loss", &loss_of, py::arg("record"), Released())
      .def("verify", &verify_record, py::arg("record"), py::arg("repair"))
      .def(
          "use_keys",
          [](RemoteRecords& self, const std::vector<std::string>& paths) { self.use_keys(keys_from(paths)); },
          py::arg("encryption_key_files"), Released())
      .def(
          "read",
          [](RemoteRecords& self, const RemoteRecord& record, std::shared_ptr<WholeRecord> into) {
            return read_whole(std::move(into), [&](WholeRecord* copy) { return self.read(record, copy); });
          },
          py::arg("record"), py::arg("into") = py::none())
      .def("startup_epoch", &read_startup_epoch, py::arg("namespace_id"), Released())
      .def("use_record_sizes", &RemoteRecords::use_record_sizes)
      .def("remove", &remove_records, py::arg("records"))
      .def_property_readonly("takes_threads", &RemoteRecords::takes_threads)
      .def_property_readonly("keeps_versions", &RemoteRecords::keeps_versions);

  py::class_<WholeRecord, std::shared_ptr<WholeRecord>>(module, "WholeRecord")
      .def_property_readonly("size", [](const WholeRecord& self) { return self.bytes().size(); })
      .def_property_readonly("key", [](const WholeRecord& self) { return self.header().key.hex(); })
      .def_property_readonly(
          "created",
          [](const WholeRecord& self) { return static_cast<double>(self.header().created_unix_nanos) / 1e9; })
      // The id of the key; empty if the record is not encrypted.
      .def_property_readonly("encryption_key_id", [](const WholeRecord& self) {
        return self.header().cipher == Cipher::kNone ? std::string()
                                                     : hex_of(self.header().cipher_fields.key_id);
      });
  py::class_<RecordImporter>(module, "RecordImporter")
      .def(py::init(&open_importer), py::arg("spec"), Released())
      .def_property_readonly("epoch", &RecordImporter::epoch)
      .def("write", &import_record, py::arg("record"), py::arg("used"))
      .def("close", &RecordImporter::close, Released());
}

}  // namespace kv_offload::bindings
