// Which way bytes travel between device memory and pinned host memory, chosen
// per job from a table of measured rates. Pure; calibration takes its timings
// from a function, so that tests give it any machine.
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
  kStaged,  // the kernel between cache pages and a small device buffer, then one DMA per run of a row
};
inline constexpr std::size_t kCopyPaths = 3;
std::string_view to_string(CopyPath path);

// Rates of every path by segment size.
struct CopyTable {
  static constexpr std::array<std::uint64_t, 7> kSegmentBytes = {4 << 10,   16 << 10, 32 << 10, 64 << 10,
                                                                 256 << 10, 1 << 20,  4 << 20};
  using Rates = std::array<double, kSegmentBytes.size()>;  // bytes per second; 0: the path is not there

  std::array<std::array<Rates, kCopyPaths>, 2> rates{};  // [direction][path]
  std::array<double, kCopyPaths> launch_seconds{};       // before the first byte moves
  bool measured = false;
  std::string not_measured{};  // why not, where it was tried

  // Linear in the segment size between the columns, flat beyond them.
  double rate(CopyDirection direction, CopyPath path, std::uint64_t segment_bytes) const;
  // One line: from which segment size on which path is taken, by stores that nobody
  // waits for, by those that somebody does, and by loads.
  std::string describe() const;
};

// For a PCIe 5 link, from published measurements: DMA at the link's speed for
// long segments and far below it for pages of a few KiB, where kernels hold on.
CopyTable default_copy_table();
// The same with one path only, which is therefore always taken: for comparing paths.
CopyTable single_path_table(CopyPath path);

enum class CopyHaste : std::uint8_t {
  kSoon,    // somebody waits for it
  kBeside,  // nobody does: the model should notice as little of it as can be
};

// kSoon: the path with the least estimated time; a path that takes SMs from the
// model must be faster than DMA by kKernelMustWinBy. kBeside: DMA, unless it takes
// kBesideMayTake times as long.
//
// Measured on an H100 (benchmarks/results/copy_gpu-*.json, "decode"; 16 KiB pages,
// a model whose kernels fill every SM): stores by the kernel run at 39 GB/s and make
// each step 67% longer, those by DMA run at 16 GB/s and make it 2% longer. Of the
// model's time a gigabyte takes 10 ms the one way and 1 ms the other.
inline constexpr double kKernelMustWinBy = 1.15;
inline constexpr double kBesideMayTake = 8;
CopyPath choose_path(const CopyTable& table, CopyDirection direction, std::uint64_t bytes,
                     std::uint64_t segments, CopyHaste haste = CopyHaste::kSoon);

// Fills a table by measuring each direction, path and segment size.
// `measure(direction, path, segment_bytes, total_bytes)` returns seconds for
// total_bytes, or <= 0 when the path is not there. Stops early once `spent()`
// says `budget_seconds` are over; what was not reached keeps the default's rate,
// scaled by what the path's other columns showed, or by what DMA did.
struct CalibrationProbe {
  std::function<double(CopyDirection, CopyPath, std::uint64_t segment_bytes, std::uint64_t total_bytes)>
      measure;
  std::function<double()> spent;  // seconds since calibration began
  double budget_seconds = 1.0;
};
CopyTable calibrate(const CalibrationProbe& probe);

}  // namespace kv_offload
