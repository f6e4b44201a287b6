// SPDX-License-Identifier: Apache-2.0
// Selects how bytes travel between device memory and pinned host memory, per job, from a table of measured
// rates. Pure: calibration gets its timings from a function, so tests can simulate any machine.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "copy/copy_plan.h"

namespace kv_offload {

enum class CopyPath : std::uint8_t {
  kDma,     // batched DMA, one descriptor per segment
  kKernel,  // a pack/unpack kernel between cache pages and pinned host memory
  kStaged,  // the kernel between cache pages and a small device buffer, then one DMA per contiguous run
};
inline constexpr std::size_t kCopyPaths = 3;
std::string_view to_string(CopyPath path);

// Transfer rate of every path by segment size.
struct CopyTable {
  static constexpr std::array<std::uint64_t, 7> kSegmentBytes = {4 << 10,   16 << 10, 32 << 10, 64 << 10,
                                                                 256 << 10, 1 << 20,  4 << 20};
  using Rates = std::array<double, kSegmentBytes.size()>;  // bytes per second; 0 = path not available

  std::array<std::array<Rates, kCopyPaths>, 2> rates{};  // [direction][path]
  std::array<double, kCopyPaths> launch_seconds{};       // seconds before the first byte moves
  bool measured = false;
  std::string not_measured{};  // reason, if measuring was tried

  // Interpolates linearly between the columns; constant beyond them.
  double rate(CopyDirection direction, CopyPath path, std::uint64_t segment_bytes) const;
  // Returns one line: the path used from each segment size on, for background stores, for stores that a
  // caller waits for, and for loads.
  std::string describe() const;
};

// Rates for a PCIe 5 link, from published measurements. DMA reaches the link's speed for long segments and is
// far slower for pages of a few KiB, where kernels keep their speed.
CopyTable default_copy_table();
// Same, with one path only, which is therefore always chosen. For comparing paths.
CopyTable single_path_table(CopyPath path);

enum class CopyUrgency : std::uint8_t {
  kUrgent,      // a caller waits for the copy
  kBackground,  // disturbs the model as little as possible
};

// kUrgent: chooses the path with the least estimated time; a path that takes SMs from the model must be
// kMinKernelSpeedup times as fast as DMA. kBackground: chooses DMA, unless it takes kMaxBackgroundSlowdown
// times as long.
//
// Measured on an H100 (benchmarks/results/copy_gpu-*.json, "decode"; 16 KiB pages, a model whose kernels fill
// every SM): kernel stores run at 39 GB/s and make each step 67% longer; DMA stores run at 16 GB/s and make
// it 2% longer. Per gigabyte, the kernel costs 10 ms of model time and DMA 1 ms.
inline constexpr double kMinKernelSpeedup = 1.15;
inline constexpr double kMaxBackgroundSlowdown = 8;
CopyPath choose_path(const CopyTable& table, CopyDirection direction, std::uint64_t bytes,
                     std::uint64_t segments, CopyUrgency urgency = CopyUrgency::kUrgent);

// Fills a table by measuring each direction, path and segment size. `measure(direction, path, segment_bytes,
// total_bytes)` returns the seconds for total_bytes, or <= 0 if the path is not available. Stops early when
// `spent()` reaches `budget_seconds`. Entries that were not measured keep the default's rate, scaled by the
// path's other columns, or by DMA if the path has none.
struct CalibrationProbe {
  std::function<double(CopyDirection, CopyPath, std::uint64_t segment_bytes, std::uint64_t total_bytes)>
      measure;
  std::function<double()> spent;  // seconds since calibration began
  double budget_seconds = 1.0;
};
CopyTable calibrate(const CalibrationProbe& probe);

}  // namespace kv_offload
