// SPDX-License-Identifier: Apache-2.0
// How close do copies come to the speed of the link, for every cache layout of vLLM?
// One JSON object per line. The link is measured in the same run, and so is each
// path alone ("dma" at runs of 1: a descriptor per page, like vLLM's own copies).
// "ours" and each path are polled until they end, as in a serving engine; for
// "waited" the engine blocks until then.
//
//   copy_gpu [--quick] [QUESTION ...]
//   questions: decode one_way layer_major both_ways submit        default: all
//
// With the fake CUDA runtime (tests/cpp/fake_cuda) the benchmark can be tested without
// a GPU; its figures are then meaningless.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "bench.h"
#include "platform.h"

namespace kv_offload::bench {
namespace {

const char* word(CopyDirection direction) { return direction == CopyDirection::kStore ? "store" : "load"; }
constexpr CopyDirection kBoth[] = {CopyDirection::kStore, CopyDirection::kLoad};

double best(std::vector<double> seconds) { return *std::min_element(seconds.begin(), seconds.end()); }

// A cache of `layers` tensors in one piece of memory.
CacheLayout layout_of(std::byte* cache, std::uint64_t page, std::uint64_t layers, std::uint64_t blocks) {
  CacheLayout layout;
  auto& refs = layout.groups.emplace_back();
  for (std::uint32_t i = 0; i < layers; ++i) {
    layout.tensors.push_back({cache + i * page * blocks, blocks, page});
    refs.push_back({i, page});
  }
  return layout;
}

struct Shape {
  std::uint64_t page, layers, blocks;
  std::uint64_t run;  // adjacent block ids; 0: all in order
};

CopyJob job_of(const Shape& shape, CopyDirection direction, std::uint64_t first_row) {
  std::vector<std::int64_t> ids(shape.blocks);
  std::iota(ids.begin(), ids.end(), 0);
  if (shape.run != 0) {
    std::vector<std::int64_t> runs(shape.blocks / shape.run);
    std::iota(runs.begin(), runs.end(), 0);
    std::mt19937_64 random(1);
    std::shuffle(runs.begin(), runs.end(), random);
    for (std::size_t i = 0; i < runs.size() * shape.run; ++i) {
      ids[i] = runs[i / shape.run] * static_cast<std::int64_t>(shape.run) +
               static_cast<std::int64_t>(i % shape.run);
    }
  }
  CopyJob job;
  job.direction = direction;
  job.block_ids = std::move(ids);
  const std::uint64_t row_pages = round_up(shape.page * shape.layers, kPageBytes) / kPageBytes;
  for (std::uint64_t i = 0; i < shape.blocks; ++i)
    job.rows.push_back(static_cast<RowId>(first_row + i * row_pages));
  job.group_sizes = {static_cast<std::uint32_t>(shape.blocks)};
  job.group_rows = job.group_sizes;
  job.block_indices = {0};
  return job;
}

class Bench {
 public:
  Bench(Platform* platform, bool quick) : platform_(*platform), rounds_(quick ? 1 : 5), quick_(quick) {}

  void one_way() {
    std::vector<std::uint64_t> sizes = {4 << 10, 16 << 10, 64 << 10, 256 << 10,
                                        1 << 20, 2 << 20,  4 << 20,  16 << 20};
    for (const std::uint64_t page : sizes) {
      for (const std::uint64_t run : {std::uint64_t{0}, std::uint64_t{1}}) {
        const Shape shape{page, 1, std::min<std::uint64_t>(1000, room() / page), run};
        if (shape.blocks == 0) continue;
        for (const CopyDirection direction : kBoth) report("one_way", shape, direction);
      }
    }
  }

  void layer_major() {
    for (const std::uint64_t page : {4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10}) {
      for (const std::uint64_t run : {1, 4, 16}) {
        const std::uint64_t blocks =
            std::min<std::uint64_t>(quick_ ? 16 : 512, room() / (32 * page)) / 16 * 16;
        if (blocks == 0) continue;
        const Shape shape{page, 32, blocks, run};
        for (const CopyDirection direction : kBoth) report("layer_major", shape, direction);
      }
    }
  }

  void both_ways() {
    constexpr std::uint64_t kPage = 2 << 20;
    const std::uint64_t blocks = room() / kPage;
    for (const std::uint64_t tenth : {1, 3, 5, 7, 9}) {
      const std::uint64_t stores = std::max<std::uint64_t>(1, blocks * tenth / 10);
      const std::uint64_t loads = std::max<std::uint64_t>(1, blocks - stores);
      std::vector<double> link;
      std::vector<double> ours;
      std::vector<double> waited;
      const CacheLayout layout = layout_of(platform_.cache().data(), kPage, 1, blocks);
      const auto copier = platform_.copier(layout, std::nullopt, platform_.limits());
      for (int i = 0; i <= rounds_; ++i) {
        link.push_back(platform_.link_both(stores * kPage, loads * kPage));
        CopyJob store = job_of({kPage, 1, stores, 1}, CopyDirection::kStore, 0);
        CopyJob load = job_of({kPage, 1, loads, 1}, CopyDirection::kLoad, stores * kPage / kPageBytes);
        for (std::int64_t& id : load.block_ids) id += static_cast<std::int64_t>(stores);
        ours.push_back(run(*copier, {store, load}));
        waited.push_back(run(*copier, {store, load}, Until::kWaited));
      }
      const double bytes = static_cast<double>((stores + loads) * kPage);
      fmt::print(
          "{{\"question\": \"both_ways\", \"stores\": {}, \"loads\": {}, \"ours\": {:.0f}, \"waited\": "
          "{:.0f}, \"link\": {:.0f}, \"ratio\": {:.3f}}}\n",
          stores, loads, bytes / best(ours), bytes / best(waited), bytes / best(link),
          best(link) / best(ours));
      std::fflush(stdout);
    }
  }

  // The cost of concurrent copies for a model that decodes, by the copies in flight.
  // The copier is busy through the whole loop. Steps with and without copies
  // alternate.
  void decode() {
    struct Setting {
      const char* name;
      std::uint64_t bytes;
      std::uint32_t segments, in_flight;
    };
    const Setting settings[] = {{"1 MiB, 2 in flight", 1 << 20, 512, 2},
                                {"2 MiB, 2 in flight", 2 << 20, 512, 2},
                                {"2 MiB, 4 in flight", 2 << 20, 512, 4},
                                {"4 MiB, 2 in flight", 4 << 20, 512, 2},
                                {"8 MiB of 4096 descriptors, 4 in flight", 8 << 20, 4096, 4},
                                {"whole jobs, as vLLM issues them", 1ull << 40, 1u << 30, 1}};
    // Jobs of 64 MiB: the bytes of a job count when it has ended.
    const Shape shape{16 << 10, 32, std::min<std::uint64_t>(128, room() / (32 * (16 << 10)) / 16 * 16), 1};
    const CacheLayout layout = layout_of(platform_.cache().data(), shape.page, shape.layers, shape.blocks);
    const std::uint64_t bytes = shape.page * shape.layers * shape.blocks;
    for (const CopyDirection direction : kBoth) {
      decode_beside(*platform_.copier(layout, std::nullopt, platform_.limits()), job_of(shape, direction, 0),
                    jobs_that_outlast_a_step(direction, bytes), "ours", "as it serves");
    }
    for (const CopyPath path : {CopyPath::kDma, CopyPath::kKernel, CopyPath::kStaged}) {
      for (const CopyDirection direction : kBoth) {
        const std::size_t jobs = jobs_that_outlast_a_step(direction, bytes);
        for (const Setting& setting : settings) {
          if (path == CopyPath::kStaged && setting.bytes > (8 << 20)) continue;
          DeviceLimits limits = platform_.limits();
          limits.dma_bytes = limits.kernel_bytes = setting.bytes;
          limits.sub_job_segments = setting.segments;
          limits.in_flight = setting.in_flight;
          if (path == CopyPath::kStaged) limits.staged_bytes = setting.bytes + setting.segments * 32;
          decode_beside(*platform_.copier(layout, path, limits), job_of(shape, direction, 0), jobs,
                        to_string(path), setting.name);
        }
      }
    }
  }

  void submit_cost() {
    for (const std::uint64_t segments : {1, 10, 100, 1000, 10000, 50000}) {
      const std::uint64_t page = 4096;
      if (segments * page * 2 > room()) continue;
      CacheLayout layout = layout_of(platform_.cache().data(), page, 1, segments);
      layout.tensors[0].block_stride = 2 * page;  // nothing merges
      const auto copier = platform_.copier(layout, std::nullopt, platform_.limits());
      std::vector<double> seconds;
      for (int i = 0; i <= rounds_; ++i) {
        CopyJob job = job_of({page, 1, segments, 0}, CopyDirection::kStore, 0);
        const double begun = now();
        submit(*copier, std::move(job));
        seconds.push_back(now() - begun);
        finish(*copier);
      }
      fmt::print("{{\"question\": \"submit\", \"segments\": {}, \"seconds\": {:.9f}}}\n", segments,
                 best(seconds));
      std::fflush(stdout);
    }
  }

 private:
  static constexpr int kTurns = 10;

  // They are submitted between two steps, and at least one must run during each step.
  std::size_t jobs_that_outlast_a_step(CopyDirection direction, std::uint64_t bytes) {
    if (quick_) return 2;
    (void)platform_.step();
    const double step = platform_.step().whole;
    const double at_the_links_rate = platform_.link(direction, bytes);
    return 2 + static_cast<std::size_t>(std::min(1.5 * step / at_the_links_rate, 30.0));
  }

  void decode_beside(DeviceCopier& copier, const CopyJob& job, std::size_t jobs, std::string_view path,
                     const char* setting) {
    const int steps = quick_ ? 2 : 20;
    std::vector<Step> alone;
    std::vector<Step> beside;
    std::uint64_t bytes = 0;
    double busy = 0;
    for (int turn = 0; turn < (quick_ ? 1 : kTurns); ++turn) {
      for (int i = 0; i < steps; ++i) alone.push_back(platform_.step());
      const double begun = now();
      while (under_way_.size() < jobs) submit(copier, job);
      for (int i = 0; i < steps; ++i) {
        beside.push_back(platform_.step());
        bytes += collect(copier);
        while (under_way_.size() < jobs) submit(copier, job);
      }
      busy += now() - begun;
      finish(copier);
    }
    const auto of = [](std::vector<Step> values, double Step::*what, double part) {
      std::sort(values.begin(), values.end(),
                [&](const Step& a, const Step& b) { return a.*what < b.*what; });
      return values[static_cast<std::size_t>(part * static_cast<double>(values.size() - 1))].*what;
    };
    fmt::print(
        "{{\"question\": \"decode\", \"path\": \"{}\", \"direction\": \"{}\", \"setting\": \"{}\", "
        "\"step_alone\": {:.6f}, \"step_beside\": {:.6f}, \"slowed\": {:.4f}, \"copies_alone\": {:.7f}, "
        "\"copies_beside\": {:.7f}, \"copies_beside_p99\": {:.7f}, \"rate\": {:.0f}}}\n",
        path, word(job.direction), setting, of(alone, &Step::whole, 0.5), of(beside, &Step::whole, 0.5),
        of(beside, &Step::whole, 0.5) / of(alone, &Step::whole, 0.5) - 1, of(alone, &Step::copies, 0.5),
        of(beside, &Step::copies, 0.5), of(beside, &Step::copies, 0.99), static_cast<double>(bytes) / busy);
    std::fflush(stdout);
  }

  std::uint64_t room() const { return platform_.cache().size() / 4 * 3; }

  void submit(DeviceCopier& copier, CopyJob job) {
    job.id = ++last_id_;
    job.compute_stream = platform_.compute_stream();
    under_way_.push_back(job.id);
    copier.submit(std::move(job));
  }
  // The bytes of the jobs that have ended.
  std::uint64_t collect(DeviceCopier& copier) {
    std::uint64_t bytes = 0;
    for (const CopyResult& result : copier.poll()) {
      if (!result.status.is_ok()) throw std::runtime_error(result.status.to_string());
      std::erase(under_way_, result.job_id);
      bytes += result.bytes;
    }
    return bytes;
  }
  // kPolled: like a serving engine, which polls for results. kWaited: like an engine whose
  // forward pass waits for the copies; the copier then uses all its slots with the highest
  // priority, and its thread spins.
  enum class Until { kPolled, kWaited };
  void finish(DeviceCopier& copier, Until until = Until::kPolled) {
    if (until == Until::kWaited) copier.wait(under_way_);
    while (true) {
      (void)collect(copier);
      if (under_way_.empty()) return;
      std::this_thread::yield();
    }
  }
  double run(DeviceCopier& copier, const std::vector<CopyJob>& jobs, Until until = Until::kPolled) {
    const double begun = now();
    for (const CopyJob& job : jobs) submit(copier, job);
    finish(copier, until);
    return now() - begun;
  }

  // The copier's own choice, each path alone, and the link, in each round.
  void report(const char* question, const Shape& shape, CopyDirection direction) {
    const std::uint64_t bytes = shape.page * shape.layers * shape.blocks;
    const CacheLayout layout = layout_of(platform_.cache().data(), shape.page, shape.layers, shape.blocks);
    const CopyJob job = job_of(shape, direction, 0);
    const std::vector<std::optional<CopyPath>> ways = {std::nullopt, CopyPath::kDma, CopyPath::kKernel,
                                                       CopyPath::kStaged};
    std::vector<std::unique_ptr<DeviceCopier>> copiers;
    for (const auto& way : ways) copiers.push_back(platform_.copier(layout, way, platform_.limits()));
    std::vector<std::vector<double>> seconds(ways.size());
    std::vector<double> link;
    std::vector<double> waited;
    for (int i = 0; i <= rounds_; ++i) {
      link.push_back(platform_.link(direction, bytes));
      for (std::size_t turn = 0; turn < ways.size(); ++turn) {
        const std::size_t w = (turn + static_cast<std::size_t>(i)) % ways.size();
        seconds[w].push_back(run(*copiers[w], {job}));
      }
      waited.push_back(run(*copiers[0], {job}, Until::kWaited));
    }
    const double total = static_cast<double>(bytes);
    fmt::print(
        "{{\"question\": \"{}\", \"direction\": \"{}\", \"page_bytes\": {}, \"layers\": {}, \"blocks\": {}, "
        "\"run\": {}, \"link\": {:.0f}, \"ours\": {:.0f}, \"waited\": {:.0f}, \"dma\": {:.0f}, \"kernel\": "
        "{:.0f}, \"staged\": {:.0f}, \"ratio\": {:.3f}}}\n",
        question, word(direction), shape.page, shape.layers, shape.blocks, shape.run, total / best(link),
        total / best(seconds[0]), total / best(waited), total / best(seconds[1]), total / best(seconds[2]),
        total / best(seconds[3]), best(link) / best(seconds[0]));
    std::fflush(stdout);
  }

  Platform& platform_;
  const int rounds_;
  const bool quick_;
  std::uint64_t last_id_ = 0;
  std::vector<std::uint64_t> under_way_;
};

int run_questions(bool quick, const std::set<std::string>& questions) {
  const auto platform = make_gpu(quick ? 16 << 20 : kCacheBytes);
  if (platform == nullptr) {
    fmt::print(stderr, "no CUDA device on this machine\n");
    return 2;
  }
  fmt::print("{{\"device\": \"{}\", \"table\": \"{}\"}}\n", platform->name(), platform->table());
  std::fflush(stdout);
  Bench bench(platform.get(), quick);
  const auto wanted = [&](const char* question) { return questions.empty() || questions.contains(question); };
  if (wanted("decode")) bench.decode();  // first, because it is most likely to miss a target
  if (wanted("one_way")) bench.one_way();
  if (wanted("layer_major")) bench.layer_major();
  if (wanted("both_ways")) bench.both_ways();
  if (wanted("submit")) bench.submit_cost();
  return 0;
}

}  // namespace
}  // namespace kv_offload::bench

int main(int argc, char** argv) {
  bool quick = false;
  std::set<std::string> questions;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "--quick") {
      quick = true;
    } else {
      questions.insert(word);
    }
  }
  return kv_offload::bench::run_questions(quick, questions);
}
