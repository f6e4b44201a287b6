// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>

#include <algorithm>
#include <cerrno>

#include "backends/fs/file_ops.h"
#include "backends/fs/record_file.h"
#include "backends/fs/root.h"
#include "backends/fs/store.h"
#include "backends/fs/tier.h"
#include "backends/fs/verify.h"
#include "bindings/bindings.h"
#include "bindings/tier_spec.h"
#include "bindings/whole_record.h"

namespace kv_offload::bindings {

namespace {

using namespace py::literals;

struct FsTierSpec final : TierSpec {
  FsTierOptions options;
  std::unique_ptr<Tier> open() const override {
    FsTierOptions chosen = options;
    chosen.form = form();
    chosen.memory_outlives = memory_outlives;
    chosen.watch_removals = watch_removals;
    chosen.may_trim = slot.write_policy != WritePolicy::kReadOnly;
    chosen.tenants = tenants;
    chosen.epoch = epoch;
    return make_fs_tier(chosen);
  }
  std::unique_ptr<RecordStore> open_for_import() const override {
    FsTierOptions chosen = options;
    chosen.may_evict = false;
    return std::make_unique<FsStore>(chosen, posix_file_ops(), clock_of(chosen));
  }
};

std::shared_ptr<FsTierSpec> fs_tier_spec(std::string root_dir, std::uint64_t max_bytes,
                                         const py::bytes& namespace_id, std::string namespace_json,
                                         std::string name, const std::string& fsync,
                                         const std::string& o_direct, unsigned n_read_threads,
                                         unsigned n_write_threads, double op_timeout_seconds,
                                         std::string eviction_policy, const std::string& write_policy) {
  auto spec = std::make_shared<FsTierSpec>();
  spec->slot = write_policy_of(write_policy);
  FsTierOptions& options = spec->options;
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
  options.op_timeout = to_nanos(op_timeout_seconds, "op_timeout_seconds");
  options.eviction_policy = std::move(eviction_policy);
  return spec;
}

double to_unix_seconds(std::int64_t nanos) { return static_cast<double>(nanos) / 1e9; }

// Escapes bytes that are not UTF-8, because text on the disk may be damaged.
py::str text_of(const std::string& bytes) {
  PyObject* const text =
      PyUnicode_DecodeUTF8(bytes.data(), static_cast<Py_ssize_t>(bytes.size()), "backslashreplace");
  if (text == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::str>(text);
}

py::dict stat(FsRoot& root) {
  RootInfo info;
  {
    const py::gil_scoped_release release;
    info = root.stat();
  }
  py::list namespaces;
  for (const NamespaceInfo& space : info.namespaces) {
    namespaces.append(py::dict("id"_a = space.id, "json"_a = text_of(space.json), "epoch"_a = space.epoch,
                               "bytes"_a = space.bytes, "records"_a = space.records,
                               "oldest"_a = to_unix_seconds(space.oldest_unix_nanos),
                               "newest"_a = to_unix_seconds(space.newest_unix_nanos), "open"_a = space.open));
  }
  py::list unreadable;
  for (const UnreadableDirectory& directory : info.unreadable)
    unreadable.append(py::dict("path"_a = text_of(directory.path), "message"_a = directory.message));
  return py::dict("bytes"_a = info.bytes, "records"_a = info.records, "temporaries"_a = info.temporaries,
                  "namespaces"_a = std::move(namespaces), "unreadable"_a = std::move(unreadable));
}

py::dict next_record(FsRoot::Cursor& cursor) {
  std::optional<RecordInfo> record;
  {
    const py::gil_scoped_release release;
    record = cursor.next();
  }
  if (!record) throw py::stop_iteration();
  return py::dict("namespace"_a = record->namespace_id, "epoch"_a = record->epoch, "key"_a = record->key,
                  "bytes"_a = record->bytes, "mtime"_a = to_unix_seconds(record->mtime_unix_nanos),
                  "path"_a = record->path);
}

// An exception from `progress` ends the work.
py::list verify(FsRoot& root, bool repair, const py::object& progress,
                const std::vector<std::string>& encryption_key_files) {
  const auto report = [&progress](std::uint64_t done, std::uint64_t total) {
    const py::gil_scoped_acquire acquire;
    if (!progress.is_none()) progress(done, total);
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  };
  std::vector<DamagedRecord> damaged;
  {
    const py::gil_scoped_release release;
    damaged = root.verify(repair, report, keys_from(encryption_key_files));
  }
  py::list list;
  for (const DamagedRecord& record : damaged) {
    list.append(py::dict("path"_a = text_of(record.path), "kind"_a = to_string(record.kind),
                         "message"_a = record.message, "removed"_a = record.removed));
  }
  return list;
}

// An exception from `progress` ends the work. Records removed by then are already subtracted from the
// accounting.
py::dict evict(FsRoot& root, std::uint64_t target_bytes, double dead_before, bool dry_run,
               const py::object& progress) {
  const auto report = [&progress](std::uint64_t freed) {
    const py::gil_scoped_acquire acquire;
    if (!progress.is_none()) progress(freed);
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  };
  EvictReport found;
  {
    const py::gil_scoped_release release;
    found = root.evict({target_bytes, static_cast<std::int64_t>(dead_before * 1e9), dry_run}, report);
  }
  return py::dict("bytes_before"_a = found.bytes_before, "bytes_freed"_a = found.bytes_freed,
                  "dead_bytes"_a = found.dead_bytes, "records"_a = found.records,
                  "dead_namespaces"_a = found.dead_namespaces);
}

py::object measured(const std::function<std::optional<DiskProbe>()>& probe) {
  std::optional<DiskProbe> figures;
  {
    const py::gil_scoped_release release;
    figures = probe();
  }
  if (!figures) return py::none();
  return py::dict("o_direct"_a = figures->o_direct,
                  "write_bytes_per_second"_a = figures->write_bytes_per_second,
                  "read_bytes_per_second"_a = figures->read_bytes_per_second);
}

}  // namespace

void bind_fs(py::module_& module) {
  py::class_<FsTierSpec, TierSpec, std::shared_ptr<FsTierSpec>>(module, "FsTier")
      .def(py::init(&fs_tier_spec), py::kw_only(), py::arg("root_dir"), py::arg("max_bytes"),
           py::arg("namespace_id"), py::arg("namespace_json"), py::arg("name") = "fs",
           py::arg("fsync") = "none", py::arg("o_direct") = "auto", py::arg("n_read_threads") = 4,
           py::arg("n_write_threads") = 2, py::arg("op_timeout_seconds") = 10.0,
           py::arg("eviction_policy") = "lru", py::arg("write_policy") = "write_through")
      .def("__repr__", [](const FsTierSpec& self) {
        return fmt::format("<FsTier {:?} at {:?}>", self.options.name, self.options.root_dir);
      });

  py::class_<FsRoot::Cursor>(module, "_RecordCursor")
      .def("__iter__", [](const py::object& self) { return self; })
      .def("__next__", &next_record);

  using Released = py::call_guard<py::gil_scoped_release>;
  py::class_<FsRoot>(module, "FsRoot")
      .def(py::init<std::string>(), py::arg("root_dir"), Released())
      .def("stat", &stat)
      .def("is_open", &FsRoot::is_open, Released())
      .def("records", &FsRoot::records, py::arg("namespace") = py::none(), py::arg("all_epochs") = false,
           py::arg("strict") = false, Released())
      .def("verify", &verify, py::arg("repair") = false, py::arg("progress") = py::none(),
           py::arg("encryption_key_files") = std::vector<std::string>())
      .def("evict", &evict, py::kw_only(), py::arg("target_bytes"), py::arg("dead_before") = 0.0,
           py::arg("dry_run") = false, py::arg("progress") = py::none())
      .def("purge", &FsRoot::purge, py::arg("namespace") = py::none(), Released())
      .def("startup_epoch", &FsRoot::startup_epoch, py::arg("namespace"), Released())
      .def("remove", &FsRoot::remove, py::arg("paths"), Released());

  module.def(
      "read_record_file",
      [](const std::string& path, const std::string& namespace_id,
         const std::vector<std::string>& encryption_key_files, std::shared_ptr<WholeRecord> into) {
        return read_whole(std::move(into), [&](WholeRecord* record) {
          const auto keys = keys_from(encryption_key_files);
          return read_record_file(path, namespace_id, keys.get(), record);
        });
      },
      py::arg("path"), py::arg("namespace"), py::arg("encryption_key_files") = std::vector<std::string>(),
      py::arg("into") = py::none());
  module.def(
      "record_created", [](const std::string& path) { return to_unix_seconds(record_created(path)); },
      py::arg("path"), Released());
  // None: the record is missing, or has no valid header.
  module.def(
      "record_tenant",
      [](const std::string& path) -> std::optional<std::string> {
        RecordHeader header;
        const Status status = read_header(posix_file_ops(), AT_FDCWD, path, &header);
        const bool missing = status.kind() == StatusKind::kNotFound || status.error_number() == ESTALE;
        if (missing || status.kind() == StatusKind::kCorrupt) return std::nullopt;
        raise_unless_ok(status);
        return header.tenant;
      },
      py::arg("path"), Released());
  // None: the record is missing, or not readable.
  module.def(
      "record_loss",
      [](const std::string& path) {
        RecordHeader header;
        return read_header(posix_file_ops(), AT_FDCWD, path, &header) ? std::optional(stated_loss(header))
                                                                      : std::nullopt;
      },
      py::arg("path"), Released());
  module.def("directory_usage", &directory_usage, py::arg("path"), Released());
  module.def(
      "probe_disk",
      [](const std::string& directory, std::uint64_t total_bytes, std::uint64_t record_bytes) {
        return measured([&] { return probe_disk(directory, total_bytes, record_bytes); });
      },
      py::arg("directory"), py::arg("total_bytes"), py::arg("record_bytes"));
  module.def(
      "probe_root",
      [](const std::string& root_dir, std::uint64_t max_bytes, std::uint64_t total_bytes,
         std::uint64_t record_bytes) {
        return measured([&] { return probe_root(root_dir, max_bytes, total_bytes, record_bytes); });
      },
      py::arg("root_dir"), py::arg("max_bytes"), py::arg("total_bytes"), py::arg("record_bytes"));

  py::class_<ReservedSpace, std::unique_ptr<ReservedSpace>>(module, "ReservedSpace")
      .def(py::init<std::string, std::uint64_t, std::uint64_t>(), py::arg("root_dir"), py::arg("max_bytes"),
           py::arg("bytes"), Released());
}

}  // namespace kv_offload::bindings
