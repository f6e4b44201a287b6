// SPDX-License-Identifier: Apache-2.0
#include "memory/slab_layout.h"

#include <algorithm>

namespace kv_offload {
namespace {

// More slabs cost memory and longer searches, and break up runs of rows. With fewer slabs, sizes could not
// share the area finely enough. At this limit, slabs of a 32 GiB area have 2 MiB.
constexpr std::uint32_t kMostSlabs = 16384;
constexpr std::uint32_t kCandidatesPerSize = 4096;
// While the waste stays within this share of the area, longer slabs are preferred for the runs of rows in
// them. The limit is kRunRows rows, because emptying a slab for another size evicts all of them.
constexpr double kBearableWaste = 0.01;
constexpr std::uint32_t kRunRows = 16;

std::uint32_t divide_up(std::uint32_t value, std::uint32_t by) { return (value + by - 1) / by; }

std::uint32_t largest(std::span<const RowSize> sizes) {
  return std::max_element(sizes.begin(), sizes.end(),
                          [](const RowSize& a, const RowSize& b) { return a.pages < b.pages; })
      ->pages;
}

void append_equal(std::vector<SlabExtent>& slabs, std::uint32_t start, std::uint32_t end,
                  std::uint32_t slab_pages) {
  while (start < end) {
    const std::uint32_t pages = std::min(slab_pages, end - start);
    slabs.push_back({start, pages});
    start += pages;
  }
}

// Returns the pages that the worst size could not use, plus half a slab of each size.
double unused_pages(std::uint32_t area_pages, std::span<const RowSize> sizes, std::uint32_t slab_pages) {
  const std::uint32_t full = area_pages / slab_pages;
  const std::uint32_t tail = area_pages % slab_pages;
  std::uint32_t worst = 0;
  for (const RowSize& size : sizes) {
    worst = std::max(worst, full * (slab_pages % size.pages) + tail % size.pages);
  }
  return worst + 0.5 * static_cast<double>(sizes.size()) * slab_pages;
}

// Calls consider(slab_pages) for `least`, and for the multiples of every row size from `least` on.
template <typename Consider>
void for_each_candidate(std::uint32_t area_pages, std::span<const RowSize> sizes, std::uint32_t least,
                        Consider consider) {
  consider(least);
  for (const RowSize& size : sizes) {
    const std::uint32_t first = divide_up(least, size.pages);
    for (std::uint32_t rows = first; rows < first + kCandidatesPerSize; ++rows) {
      const std::uint64_t pages = std::uint64_t{rows} * size.pages;
      if (pages > area_pages) break;
      consider(static_cast<std::uint32_t>(pages));
    }
  }
}

std::uint32_t choose_slab_pages(std::uint32_t area_pages, std::span<const RowSize> sizes) {
  const std::uint32_t least = std::max(largest(sizes), divide_up(area_pages, kMostSlabs));
  double best_unused = area_pages;
  for_each_candidate(area_pages, sizes, least, [&](std::uint32_t pages) {
    best_unused = std::min(best_unused, unused_pages(area_pages, sizes, pages));
  });
  const double bearable = std::max(best_unused, kBearableWaste * area_pages);
  const std::uint64_t most = std::max<std::uint64_t>(least, std::uint64_t{kRunRows} * largest(sizes));
  std::uint32_t chosen = least;
  double chosen_unused = unused_pages(area_pages, sizes, least);
  for_each_candidate(area_pages, sizes, least, [&](std::uint32_t pages) {
    const double unused = unused_pages(area_pages, sizes, pages);
    const bool is_bearable = unused <= bearable && pages <= most;
    const bool better = chosen_unused <= bearable ? is_bearable && pages > chosen : unused < chosen_unused;
    if (!better) return;
    chosen = pages;
    chosen_unused = unused;
  });
  return chosen;
}

// True if the full slabs alone give every group a row.
bool holds_one_of_each(std::uint32_t area_pages, std::span<const RowSize> sizes, std::uint32_t slab_pages) {
  std::uint32_t needed = 0;
  for (const RowSize& size : sizes) needed += divide_up(size.groups, slab_pages / size.pages);
  return needed <= area_pages / slab_pages;
}

std::vector<SlabExtent> cut_small_area(std::uint32_t area_pages, std::span<const RowSize> sizes) {
  std::vector<SlabExtent> slabs;
  std::uint32_t start = 0;
  for (const RowSize& size : sizes) {
    for (std::uint32_t i = 0; i < size.groups; ++i) {
      slabs.push_back({start, size.pages});
      start += size.pages;
    }
  }
  append_equal(slabs, start, area_pages, largest(sizes));
  return slabs;
}

}  // namespace

std::vector<SlabExtent> cut_slabs(std::uint32_t area_pages, std::span<const RowSize> sizes) {
  if (sizes.size() == 1) return {{0, area_pages}};
  const std::uint32_t slab_pages = choose_slab_pages(area_pages, sizes);
  if (!holds_one_of_each(area_pages, sizes, slab_pages)) return cut_small_area(area_pages, sizes);
  std::vector<SlabExtent> slabs;
  append_equal(slabs, 0, area_pages, slab_pages);
  return slabs;
}

}  // namespace kv_offload
