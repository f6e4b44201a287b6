// SPDX-License-Identifier: Apache-2.0
#include "copy/copy_path.h"

#include <algorithm>

namespace kv_offload {
namespace {

constexpr std::array<CopyPath, kCopyPaths> kAllPaths = {CopyPath::kDma, CopyPath::kKernel, CopyPath::kStaged};
constexpr std::array<CopyDirection, 2> kDirections = {CopyDirection::kStore, CopyDirection::kLoad};
constexpr std::size_t kColumns = CopyTable::kSegmentBytes.size();

// The order in which sizes are measured. It starts where the decision usually changes, to make good use of a
// short budget.
constexpr std::array<std::size_t, kColumns> kMeasureOrder = {1, 3, 5, 2, 4, 0, 6};
constexpr std::uint64_t kProbeBytes = 16 << 20;
constexpr int kRepeats = 2;

std::size_t index(CopyDirection direction) { return static_cast<std::size_t>(direction); }
std::size_t index(CopyPath path) { return static_cast<std::size_t>(path); }

double seconds(const CopyTable& table, CopyDirection direction, CopyPath path, std::uint64_t bytes,
               std::uint64_t segments) {
  const double rate = table.rate(direction, path, bytes / std::max<std::uint64_t>(segments, 1));
  if (rate <= 0) return -1;
  return table.launch_seconds[index(path)] + static_cast<double>(bytes) / rate;
}

using Seen = std::array<bool, kColumns>;

// Average ratio of the measured rates to the default rates.
struct Scale {
  double sum = 0;
  int count = 0;
  void add(const CopyTable::Rates& rates, const CopyTable::Rates& defaults, const Seen& seen) {
    for (std::size_t i = 0; i < kColumns; ++i) {
      if (!seen[i]) continue;
      sum += rates[i] / defaults[i];
      ++count;
    }
  }
  double or_else(double other) const { return count == 0 ? other : sum / count; }
};

}  // namespace

std::string_view to_string(CopyPath path) {
  switch (path) {
    case CopyPath::kDma:
      return "dma";
    case CopyPath::kKernel:
      return "kernel";
    case CopyPath::kStaged:
      return "staged";
  }
  return "?";
}

double CopyTable::rate(CopyDirection direction, CopyPath path, std::uint64_t segment_bytes) const {
  const Rates& row = rates[index(direction)][index(path)];
  if (segment_bytes <= kSegmentBytes.front()) return row.front();
  for (std::size_t i = 1; i < kColumns; ++i) {
    if (segment_bytes > kSegmentBytes[i]) continue;
    const double part = static_cast<double>(segment_bytes - kSegmentBytes[i - 1]) /
                        static_cast<double>(kSegmentBytes[i] - kSegmentBytes[i - 1]);
    return row[i - 1] + part * (row[i] - row[i - 1]);
  }
  return row.back();
}

std::string CopyTable::describe() const {
  std::string text = measured ? "measured" : "built-in";
  if (!not_measured.empty()) text += fmt::format(" (not measured: {})", not_measured);
  constexpr std::uint64_t kJob = 64 << 20;  // the job size of this line: large enough to hide the launch time
  struct Kind {
    const char* name;
    CopyDirection direction;
    CopyUrgency urgency;
  };
  constexpr Kind kKinds[] = {{"store", CopyDirection::kStore, CopyUrgency::kBackground},
                             {"urgent store", CopyDirection::kStore, CopyUrgency::kUrgent},
                             {"load", CopyDirection::kLoad, CopyUrgency::kUrgent}};
  for (const auto& [name, direction, urgency] : kKinds) {
    text += fmt::format("; {}", name);
    std::string_view last;
    for (const std::uint64_t bytes : kSegmentBytes) {
      const CopyPath path = choose_path(*this, direction, kJob, kJob / bytes, urgency);
      if (to_string(path) == last) continue;
      last = to_string(path);
      text +=
          fmt::format(" {} from {} KiB ({:.1f} GB/s)", last, bytes >> 10, rate(direction, path, bytes) / 1e9);
    }
  }
  return text;
}

CopyTable default_copy_table() {
  CopyTable table;
  const auto gigabytes = [](std::array<double, kColumns> rates) {
    for (double& rate : rates) rate *= 1e9;
    return rates;
  };
  for (auto& paths : table.rates) {
    paths[index(CopyPath::kDma)] = gigabytes({1.5, 5.0, 20.0, 36.0, 50.0, 53.0, 54.0});
    paths[index(CopyPath::kKernel)] = gigabytes({34.0, 40.0, 42.0, 44.0, 45.0, 45.0, 45.0});
    paths[index(CopyPath::kStaged)] = gigabytes({30.0, 38.0, 40.0, 42.0, 42.0, 42.0, 42.0});
  }
  table.launch_seconds = {8e-6, 12e-6, 25e-6};
  return table;
}

CopyTable single_path_table(CopyPath path) {
  CopyTable table = default_copy_table();
  for (auto& paths : table.rates) {
    for (std::size_t p = 0; p < kCopyPaths; ++p) {
      if (p != static_cast<std::size_t>(path)) paths[p].fill(0);
    }
  }
  return table;
}

CopyPath choose_path(const CopyTable& table, CopyDirection direction, std::uint64_t bytes,
                     std::uint64_t segments, CopyUrgency urgency) {
  const double dma = seconds(table, direction, CopyPath::kDma, bytes, segments);
  CopyPath best = CopyPath::kDma;
  double least =
      dma < 0 ? 1e30 : dma / (urgency == CopyUrgency::kUrgent ? kMinKernelSpeedup : kMaxBackgroundSlowdown);
  for (const CopyPath path : {CopyPath::kKernel, CopyPath::kStaged}) {
    const double time = seconds(table, direction, path, bytes, segments);
    if (time < 0 || time >= least) continue;
    best = path;
    least = time;
  }
  return best;
}

CopyTable calibrate(const CalibrationProbe& probe) {
  const CopyTable defaults = default_copy_table();
  CopyTable table = defaults;
  std::array<std::array<Seen, kCopyPaths>, 2> seen{};
  for (const std::size_t column : kMeasureOrder) {
    for (const CopyPath path : kAllPaths) {
      for (const CopyDirection direction : kDirections) {
        if (probe.spent() >= probe.budget_seconds) break;
        double best = 0;
        for (int i = 0; i < kRepeats; ++i) {
          const double time = probe.measure(direction, path, CopyTable::kSegmentBytes[column], kProbeBytes);
          if (time > 0) best = std::max(best, static_cast<double>(kProbeBytes) / time);
        }
        table.rates[index(direction)][index(path)][column] = best;
        seen[index(direction)][index(path)][column] = true;
        table.measured = true;
      }
    }
  }
  // Columns that the budget did not reach get the default's shape, scaled to the measurements of that path.
  // Paths that it did not reach get the scale of DMA: on a link half as fast they are no faster.
  Scale of_dma;
  for (std::size_t d = 0; d < kDirections.size(); ++d) {
    of_dma.add(table.rates[d][index(CopyPath::kDma)], defaults.rates[d][index(CopyPath::kDma)],
               seen[d][index(CopyPath::kDma)]);
  }
  for (std::size_t d = 0; d < kDirections.size(); ++d) {
    for (std::size_t p = 0; p < kCopyPaths; ++p) {
      Scale own;
      own.add(table.rates[d][p], defaults.rates[d][p], seen[d][p]);
      const double scale = own.or_else(of_dma.or_else(1));
      for (std::size_t i = 0; i < kColumns; ++i) {
        if (!seen[d][p][i]) table.rates[d][p][i] = defaults.rates[d][p][i] * scale;
      }
    }
  }
  return table;
}

}  // namespace kv_offload
