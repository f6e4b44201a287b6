// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <exception>

#include "bindings/bindings.h"
#include "memory/host_region.h"
#include "memory/neighbour_region.h"

namespace kv_offload::bindings {
namespace {

RegionOptions region_options(std::string engine_id, std::uint64_t bytes, std::uint32_t num_areas,
                             std::uint32_t num_workers, std::string shm_directory, bool huge_pages,
                             std::string keep_for, std::string share_for, std::uint32_t first_rank,
                             std::uint32_t local_ranks) {
  RegionOptions options;
  options.engine_id = std::move(engine_id);
  options.bytes = bytes;
  options.num_areas = num_areas;
  options.num_workers = num_workers;
  options.shm_directory = std::move(shm_directory);
  options.huge_pages = huge_pages;
  options.keep_for = std::move(keep_for);
  options.share_for = std::move(share_for);
  options.first_rank = first_rank;
  options.local_ranks = local_ranks;
  return options;
}

std::shared_ptr<HostRegion> attach_scheduler(std::string engine_id, std::uint64_t bytes,
                                             std::uint32_t num_areas, std::uint32_t num_workers,
                                             std::string shm_directory, bool huge_pages, std::string keep_for,
                                             std::string share_for) {
  const py::gil_scoped_release release;
  return HostRegion::attach_scheduler(region_options(std::move(engine_id), bytes, num_areas, num_workers,
                                                     std::move(shm_directory), huge_pages,
                                                     std::move(keep_for), std::move(share_for), 0, 0));
}

std::shared_ptr<HostRegion> attach_worker(std::string engine_id, std::uint64_t bytes, std::uint32_t num_areas,
                                          std::uint32_t num_workers, std::uint32_t rank,
                                          std::vector<std::uint64_t> shard_bytes, std::string fingerprint,
                                          std::string shm_directory, bool huge_pages, std::string keep_for,
                                          std::string share_for, std::uint32_t first_rank,
                                          std::uint32_t local_ranks) {
  const py::gil_scoped_release release;
  return HostRegion::attach_worker(
      region_options(std::move(engine_id), bytes, num_areas, num_workers, std::move(shm_directory),
                     huge_pages, std::move(keep_for), std::move(share_for), first_rank, local_ranks),
      rank, RankGeometry{std::move(shard_bytes), std::move(fingerprint)});
}

// Waits in slices, so that Ctrl-C ends the wait.
void wait_for_ranks(const HostRegion& region, double timeout_seconds) {
  constexpr Nanos kSlice = std::chrono::milliseconds(200);
  Nanos left = to_nanos(timeout_seconds, "timeout_seconds");
  while (true) {
    const Nanos slice = std::min(left, kSlice);
    Status status;
    {
      const py::gil_scoped_release release;
      status = region.wait_for_ranks(slice);
    }
    left -= slice;
    if (status.is_ok()) return;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    if (status.kind() != StatusKind::kTimeout) raise_unless_ok(status);
    if (left <= Nanos(0)) throw_resource("{} (waited {:.1f} s)", status.message(), timeout_seconds);
  }
}

py::array_t<std::uint8_t> area(const std::shared_ptr<HostRegion>& region, std::uint32_t index) {
  const auto bytes = region->area(index);
  return py::array_t<std::uint8_t>(static_cast<py::ssize_t>(bytes.size()),
                                   reinterpret_cast<std::uint8_t*>(bytes.data()), py::cast(region));
}

void prefault(HostRegion& region, std::uint32_t index, unsigned threads, const py::object& progress) {
  ProgressCall call(progress);
  Status status;
  {
    const py::gil_scoped_release release;
    status = region.prefault(index, threads, call.function());
  }
  call.raise_again();
  raise_unless_ok(status);
}

std::optional<std::uint64_t> result(const HostRegion& region, Ticket ticket) {
  std::uint64_t failed_groups = 0;
  if (region.result(ticket, &failed_groups) == TicketResult::kPending) return std::nullopt;
  return failed_groups;
}

}  // namespace

void bind_region(py::module_& module) {
  py::class_<HostRegion, std::shared_ptr<HostRegion>>(module, "HostRegion")
      .def_static("attach_scheduler", &attach_scheduler, py::arg("engine_id"), py::arg("bytes"),
                  py::arg("num_areas"), py::arg("num_workers"), py::arg("shm_directory") = "/dev/shm",
                  py::arg("huge_pages") = true, py::arg("keep_for") = "", py::arg("share_for") = "")
      .def_static("attach_worker", &attach_worker, py::arg("engine_id"), py::arg("bytes"),
                  py::arg("num_areas"), py::arg("num_workers"), py::arg("rank"), py::arg("shard_bytes"),
                  py::arg("fingerprint"), py::arg("shm_directory") = "/dev/shm", py::arg("huge_pages") = true,
                  py::arg("keep_for") = "", py::arg("share_for") = "", py::arg("first_rank") = 0,
                  py::arg("local_ranks") = 0)
      .def("wait_for_ranks", &wait_for_ranks, py::arg("timeout_seconds"))
      .def(
          "geometry",
          [](const HostRegion& self, std::uint32_t rank) {
            RankGeometry geometry = self.geometry(rank);
            return py::make_tuple(std::move(geometry.shard_bytes), std::move(geometry.fingerprint));
          },
          py::arg("rank"))
      .def_property_readonly("num_areas", &HostRegion::num_areas)
      .def_property_readonly("ranks_per_area", &HostRegion::ranks_per_area)
      .def_property_readonly("area_bytes", &HostRegion::area_bytes)
      .def("set_endpoint", &HostRegion::set_endpoint, py::arg("rank"), py::arg("endpoint"))
      .def_property_readonly("local_ranks", &HostRegion::local_ranks)
      .def_property_readonly("cut_off", &HostRegion::is_cut_off)
      .def_property_readonly("shared_number", &shared_number)
      .def_property_readonly("swept", &HostRegion::swept)
      .def("area", &area, py::arg("index"))
      .def("prefault", &prefault, py::arg("index"), py::arg("threads"), py::arg("progress") = py::none())
      .def(
          "prefer_node",
          [](HostRegion& self, std::uint32_t index, int node) {
            const Status status = self.prefer_node(index, node);
            return status.is_ok() ? std::string() : status.to_string();
          },
          py::arg("index"), py::arg("node"))
      .def_property_readonly("fetching", &HostRegion::is_fetching)
      .def("report", &HostRegion::report, py::arg("rank"), py::arg("ticket"), py::arg("failed_groups"))
      .def("result", &result, py::arg("ticket"));

  module.def("sweep_leftovers", &sweep_leftovers, py::arg("shm_directory") = "/dev/shm",
             py::call_guard<py::gil_scoped_release>());
  module.def(
      "memory_headroom",
      [](const std::string& shm_directory) {
        MemoryHeadroom headroom = memory_headroom(shm_directory);
        return py::make_tuple(headroom.bytes, std::move(headroom.limited_by));
      },
      py::arg("shm_directory") = "/dev/shm");
  module.def(
      "region_files",
      [](const std::string& shm_directory) {
        py::list found;
        for (RegionFile& region : region_files(shm_directory)) {
          found.append(py::make_tuple(std::move(region.name), region.bytes, region.is_held));
        }
        return found;
      },
      py::arg("shm_directory") = "/dev/shm");
}

}  // namespace kv_offload::bindings
