// SPDX-License-Identifier: Apache-2.0
// Does the host copier move bytes as fast as memcpy can with the same threads?
// The baseline is plain memcpy of the same segments, divided evenly between as many
// threads, in each round of the same run. For the canonical layout, whose segments are
// the KV heads of a page, the baseline is the same copier on the same pages in the
// plain layout. One JSON object per line.
//
//   copy_host [THREADS] [MEBIBYTES] [ROUNDS]        default: 2 512 7
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/aligned_buffer.h"
#include "bench.h"
#include "copy/block_copier.h"

namespace kv_offload {
namespace {

using bench::now;

struct Case {
  std::string name;
  std::uint64_t page_bytes;
  std::uint64_t layers;  // tensors; a block is a page of each
  bool shuffled;
  std::uint32_t shards = 1;  // of a row; more than one: the canonical layout
};

class Bench {
 public:
  Bench(const Case& wanted, std::uint64_t total, unsigned threads) : threads_(threads) {
    const std::uint64_t block_bytes = wanted.page_bytes * wanted.layers;
    const std::uint64_t blocks = total / block_bytes;
    layout_.shards_per_area = wanted.shards;
    for (std::uint64_t i = 0; i < wanted.layers; ++i) {
      caches_.emplace_back(blocks * wanted.page_bytes);
      layout_.tensors.push_back({caches_.back().data(), blocks, wanted.page_bytes});
    }
    auto& refs = layout_.groups.emplace_back();
    for (std::uint32_t i = 0; i < wanted.layers; ++i) refs.push_back({i, wanted.page_bytes});
    const std::uint64_t row_bytes = round_up(layout_.row_bytes(0), kPageBytes);
    area_ = AlignedBuffer(blocks * row_bytes);
    job_.block_ids.resize(blocks);
    std::iota(job_.block_ids.begin(), job_.block_ids.end(), 0);
    std::mt19937_64 random(1);
    if (wanted.shuffled) std::shuffle(job_.block_ids.begin(), job_.block_ids.end(), random);
    for (std::uint64_t i = 0; i < blocks; ++i) {
      job_.rows.push_back(static_cast<RowId>(i * row_bytes / kPageBytes));
    }
    job_.group_sizes = {static_cast<std::uint32_t>(blocks)};
    job_.group_rows = job_.group_sizes;
    job_.block_indices = {0};
    bytes_ = blocks * block_bytes;
  }

  void run(const Case& wanted, CopyDirection direction, int rounds) {
    job_.direction = direction;
    const CopyPlan plan = make_copy_plan(layout_, area_.size(), job_);
    const auto copier = make_copier(layout_);
    CacheLayout plain_layout = layout_;
    plain_layout.shards_per_area = 1;
    const auto plain_copier = make_copier(plain_layout);
    std::vector<double> ours;
    std::vector<double> plain;
    std::vector<double> planning;
    // The fastest round: slower ones depend on other programs.
    double cpu = std::numeric_limits<double>::infinity();
    double plain_cpu = cpu;
    for (int round = 0; round <= rounds; ++round) {  // the first one warms up
      const double copier_seconds = run_copier(*copier, &cpu);
      const double plain_seconds =
          wanted.shards == 1 ? run_plain(plan) : run_copier(*plain_copier, &plain_cpu);
      if (round == 0) continue;
      ours.push_back(copier_seconds);
      plain.push_back(plain_seconds);
      const double begun = now();
      (void)make_copy_plan(layout_, area_.size(), job_);
      planning.push_back(now() - begun);
    }
    const double rate = static_cast<double>(bytes_) / bench::median(ours);
    const double baseline = static_cast<double>(bytes_) / bench::median(plain);
    fmt::print(
        "{{\"case\": \"{}\", \"direction\": \"{}\", \"page_bytes\": {}, \"segments\": {}, \"threads\": {}, "
        "\"bytes\": {}, \"ours\": {:.0f}, \"{}\": {:.0f}, \"ratio\": {:.3f}, \"cpu_ratio\": {:.3f}, "
        "\"plan_seconds\": {:.6f}}}\n",
        wanted.name, direction == CopyDirection::kStore ? "store" : "load", wanted.page_bytes,
        plan.segments.size(), threads_, bytes_, rate, wanted.shards == 1 ? "memcpy" : "plain_layout",
        baseline, rate / baseline, wanted.shards == 1 ? 0 : plain_cpu / cpu, bench::median(planning));
    std::fflush(stdout);
  }

 private:
  std::unique_ptr<BlockCopier> make_copier(const CacheLayout& layout) {
    CopierOptions options;
    options.layout = layout;
    options.area = area_.span();
    // wait() copies in the calling thread, too.
    options.threads = std::max(1u, threads_ - 1);
    return make_host_copier(options);
  }
  double run_copier(BlockCopier& copier, double* cpu_seconds = nullptr) {
    CopyJob job = job_;
    job.id = ++last_id_;
    const double begun = now();
    const std::clock_t cpu = std::clock();
    copier.submit(std::move(job));
    copier.wait(std::vector<std::uint64_t>{last_id_});
    const double seconds = now() - begun;
    if (cpu_seconds != nullptr)
      *cpu_seconds = std::min(*cpu_seconds, static_cast<double>(std::clock() - cpu) / CLOCKS_PER_SEC);
    (void)copier.poll();
    return seconds;
  }

  double run_plain(const CopyPlan& plan) {
    const bool store = job_.direction == CopyDirection::kStore;
    const auto work = [&](std::uint64_t begin, std::uint64_t end) {  // bytes of the plan
      std::uint64_t at = 0;
      for (const CopySegment& segment : plan.segments) {
        const std::uint64_t first = std::max(at, begin);
        const std::uint64_t last = std::min(at + segment.bytes, end);
        if (first < last) {
          std::byte* cache = segment.cache + (first - at);
          std::byte* row = area_.data() + segment.area_offset + (first - at);
          std::memcpy(store ? row : cache, store ? cache : row, last - first);
        }
        at += segment.bytes;
      }
    };
    const double begun = now();
    std::vector<std::thread> threads;
    for (unsigned t = 0; t < threads_; ++t) {
      threads.emplace_back(work, plan.bytes * t / threads_, plan.bytes * (t + 1) / threads_);
    }
    for (std::thread& thread : threads) thread.join();
    return now() - begun;
  }

  const unsigned threads_;
  std::vector<AlignedBuffer> caches_;
  CacheLayout layout_;
  AlignedBuffer area_;
  CopyJob job_;
  std::uint64_t bytes_ = 0;
  std::uint64_t last_id_ = 0;
};

}  // namespace
}  // namespace kv_offload

int main(int argc, char** argv) {
  using kv_offload::Case;
  const unsigned threads = argc > 1 ? static_cast<unsigned>(std::atoi(argv[1])) : 2;
  const std::uint64_t total = (argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 512) << 20;
  const int rounds = argc > 3 ? std::atoi(argv[3]) : 7;
  const std::vector<Case> cases = {
      {"2 MiB runs, blocks shuffled", 2 << 20, 1, true},
      {"64 KiB pages of 32 layers, blocks shuffled", 64 << 10, 32, true},
      {"16 KiB pages of 32 layers, blocks shuffled", 16 << 10, 32, true},
      {"16 KiB pages of 32 layers, blocks in order", 16 << 10, 32, false},
      {"4 KiB pages of 32 layers, blocks shuffled", 4 << 10, 32, true},
      // 16 tokens, K and V, bf16: a head of dimension 128 is 8 KiB, of 64 it is 4 KiB; of 64 in fp8, 2 KiB.
      {"canonical: 32 layers, 32 heads of 8 KiB", 256 << 10, 32, true, 32},
      {"canonical: 32 layers, 8 heads of 8 KiB", 64 << 10, 32, true, 8},
      {"canonical: 32 layers, 2 heads of 8 KiB", 16 << 10, 32, true, 2},
      {"canonical: 32 layers, 8 heads of 4 KiB", 32 << 10, 32, true, 8},
      {"canonical: 32 layers, 8 heads of 2 KiB", 16 << 10, 32, true, 8},
      {"canonical: 32 layers, 8 heads of 64 KiB", 512 << 10, 32, true, 8},  // blocks of 128 tokens
  };
  for (const Case& wanted : cases) {
    kv_offload::Bench bench(wanted, total, threads);
    for (const auto direction : {kv_offload::CopyDirection::kStore, kv_offload::CopyDirection::kLoad}) {
      bench.run(wanted, direction, rounds);
    }
  }
}
