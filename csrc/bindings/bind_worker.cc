// SPDX-License-Identifier: Apache-2.0
#include "bindings/bindings.h"
#include "copy/block_copier.h"
#include "copy/measure_copy.h"
#include "worker/rank_worker.h"

namespace kv_offload::bindings {
namespace {

// A RankWorker together with the objects that must outlive it.
struct BoundWorker {
  py::object keep_alive;  // the cache tensors
  std::shared_ptr<HostRegion> region;
  std::shared_ptr<Metrics> metrics;
  std::unique_ptr<RankWorker> worker;

  ~BoundWorker() {  // waits for copies in flight
    const py::gil_scoped_release release;
    worker.reset();
  }
};

using Tensors = std::vector<std::tuple<std::uintptr_t, std::uint64_t, std::uint64_t>>;
using Groups = std::vector<std::vector<std::pair<std::uint32_t, std::uint64_t>>>;

CacheLayout layout_of(const Tensors& tensors, const Groups& groups, std::uint32_t blocks_per_chunk,
                      std::vector<bool> holds_states, std::uint32_t shards_per_area,
                      std::vector<std::uint32_t> tail_blocks) {
  CacheLayout layout;
  layout.shards_per_area = shards_per_area;
  layout.blocks_per_chunk = blocks_per_chunk;
  layout.holds_states = std::move(holds_states);
  layout.tail_blocks = std::move(tail_blocks);
  for (const auto& [address, num_blocks, block_stride] : tensors) {
    layout.tensors.push_back({reinterpret_cast<std::byte*>(address), num_blocks, block_stride});
  }
  for (const auto& refs : groups) {
    auto& group = layout.groups.emplace_back();
    for (const auto& [tensor, page_bytes] : refs) group.push_back({tensor, page_bytes});
  }
  return layout;
}

std::unique_ptr<BoundWorker> make_worker(std::shared_ptr<HostRegion> region, std::uint32_t rank,
                                         std::shared_ptr<Metrics> metrics, const std::string& copier,
                                         const Tensors& tensors, const Groups& groups,
                                         std::uint32_t blocks_per_chunk, std::uint32_t area, unsigned threads,
                                         int device, std::vector<bool> holds_states,
                                         std::uint32_t shards_per_area, unsigned kernel_blocks,
                                         std::vector<std::uint32_t> tail_blocks,
                                         const py::object& pin_progress, py::object keep_alive) {
  using MakeCopier = std::unique_ptr<BlockCopier> (*)(const CopierOptions&);
  const auto make_copier =
      one_of<MakeCopier>("copier", copier, {{"host", &make_host_copier}, {"cuda", &make_cuda_copier}});
  CopierOptions options;
  options.layout = layout_of(tensors, groups, blocks_per_chunk, std::move(holds_states), shards_per_area,
                             std::move(tail_blocks));
  options.area = region->area(area);
  if (region->neighbour_slots() > 0) options.window = region->window();
  options.threads = threads;
  options.device = device;
  options.kernel_blocks = kernel_blocks;
  ProgressCall progress(pin_progress);
  options.pin_progress = progress.function();
  auto bound = std::make_unique<BoundWorker>();
  bound->keep_alive = std::move(keep_alive);
  bound->region = std::move(region);
  bound->metrics = std::move(metrics);
  {
    const py::gil_scoped_release release;
    bound->worker = std::make_unique<RankWorker>(bound->region, rank, make_copier(options), *bound->metrics);
  }
  progress.raise_again();
  return bound;
}

template <typename From, typename To>
std::vector<To> elements(const py::array& array) {
  const auto view = py::array_t<From, py::array::c_style>::ensure(array);
  return {view.data(), view.data() + view.size()};
}

std::vector<std::int64_t> block_ids_of(const py::array& array) {
  if (py::isinstance<py::array_t<std::int32_t>>(array)) return elements<std::int32_t, std::int64_t>(array);
  if (py::isinstance<py::array_t<std::int64_t>>(array)) return elements<std::int64_t, std::int64_t>(array);
  throw py::type_error("block_ids must be an array of int32 or int64");
}

std::vector<RowId> rows_of(const py::array& array) {
  if (py::isinstance<py::array_t<RowId>>(array)) return elements<RowId, RowId>(array);
  throw py::type_error("rows must be an array of uint32");
}

void submit(BoundWorker& self, std::uint64_t job_id, Ticket ticket, bool store, const py::array& block_ids,
            std::vector<std::uint32_t> group_sizes, std::vector<std::uint64_t> block_indices,
            const py::array& rows, std::vector<std::uint32_t> group_rows, bool expedited,
            std::uintptr_t compute_stream) {
  CopyJob job;
  job.id = job_id;
  job.ticket = ticket;
  job.direction = store ? CopyDirection::kStore : CopyDirection::kLoad;
  job.expedited = expedited;
  job.compute_stream = compute_stream;
  job.block_ids = block_ids_of(block_ids);
  job.group_sizes = std::move(group_sizes);
  job.block_indices = std::move(block_indices);
  job.rows = rows_of(rows);
  job.group_rows = std::move(group_rows);
  self.worker->submit(std::move(job));
}

py::list poll(BoundWorker& self) {
  py::list finished;
  for (const CopyResult& result : self.worker->poll()) {
    finished.append(py::make_tuple(result.job_id, result.bytes, result.seconds));
  }
  return finished;
}

void wait(BoundWorker& self, const py::object& job_ids) {
  std::vector<std::uint64_t> ids;
  for (const py::handle id : job_ids) ids.push_back(id.cast<std::uint64_t>());
  const py::gil_scoped_release release;
  self.worker->wait(ids);
}

}  // namespace

void bind_worker(py::module_& module) {
  py::class_<BoundWorker>(module, "RankWorker")
      .def(py::init(&make_worker), py::arg("region").none(false), py::arg("rank"),
           py::arg("metrics").none(false), py::kw_only(), py::arg("copier"), py::arg("tensors"),
           py::arg("groups"), py::arg("blocks_per_chunk"), py::arg("area"), py::arg("threads") = 2,
           py::arg("device") = -1, py::arg("holds_states") = std::vector<bool>{},
           py::arg("shards_per_area") = 1, py::arg("kernel_blocks") = CopierOptions{}.kernel_blocks,
           py::arg("tail_blocks") = std::vector<std::uint32_t>{}, py::arg("pin_progress") = py::none(),
           py::arg("keep_alive") = py::none())
      .def("submit", &submit, py::arg("job_id"), py::arg("ticket"), py::arg("store"), py::arg("block_ids"),
           py::arg("group_sizes"), py::arg("block_indices"), py::arg("rows"), py::arg("group_rows"),
           py::arg("expedited") = false, py::arg("compute_stream") = 0)
      .def("poll", &poll)
      .def("wait", &wait, py::arg("job_ids"))
      .def("describe", [](const BoundWorker& self) { return self.worker->describe(); })
      .def(
          "close", [](BoundWorker& self) { self.worker->close(); }, py::call_guard<py::gil_scoped_release>());

  module.def("measure_copy", &measure_copy, py::arg("total_bytes"), py::arg("threads"),
             py::call_guard<py::gil_scoped_release>());
  module.def("describe_cuda_copier", &describe_cuda_copier, py::arg("device") = -1,
             py::call_guard<py::gil_scoped_release>());
  module.def("cuda_numa_node", &cuda_numa_node, py::arg("device"), py::call_guard<py::gil_scoped_release>());
  module.def("cuda_unavailable_reason", &cuda_unavailable_reason, py::call_guard<py::gil_scoped_release>());
}

}  // namespace kv_offload::bindings
