#include "memory/row_allocator.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <stdexcept>

#include "base/status.h"
#include "memory/bit_tree.h"
#include "memory/slab_layout.h"

namespace kv_offload {
namespace {

constexpr std::uint32_t kNoIndex = 0xFFFFFFFFu;

// Invariant: row_class == kNoIndex <=> used == 0 <=> in its pool.
struct Slab {
  SlabExtent extent;
  std::uint32_t pool = 0;              // of the free slabs of its length
  std::uint32_t row_class = kNoIndex;  // who has it
  std::uint32_t used = 0;              // rows
  std::uint32_t rows = 0;              // that the class can have here
  BitTree free_rows;
};

// Free slabs of one length.
struct Pool {
  std::uint32_t pages;
  BitTree slabs;
};

struct RowClass {
  std::uint32_t pages = 0;  // of a row
  BitTree open;             // slabs of ours with a free row
  std::uint32_t last_slab = kNoIndex;
  std::uint32_t next_row = 0;  // in last_slab, after the last row handed out
  std::uint64_t used = 0;
};

std::vector<std::uint32_t> to_pages(const std::vector<std::uint64_t>& row_bytes) {
  if (row_bytes.empty()) throw_invalid("no row sizes were given; a region needs at least one KV cache group");
  std::vector<std::uint32_t> pages;
  for (const std::uint64_t bytes : row_bytes) {
    if (bytes == 0 || bytes / kPageBytes >= kNoRow) {
      throw_invalid("group {} has rows of {} bytes; 1 byte to {} are possible", pages.size(), bytes,
                    format_bytes(std::uint64_t{kNoRow} * kPageBytes));
    }
    pages.push_back(static_cast<std::uint32_t>(round_up(bytes, kPageBytes) / kPageBytes));
  }
  return pages;
}

}  // namespace

struct RowAllocator::Impl {
  std::uint64_t area_bytes;
  std::vector<std::uint32_t> class_of_group;
  std::vector<RowClass> classes;
  std::vector<Slab> slabs;  // ascending by place
  std::vector<Pool> pools;  // ascending by length

  Impl(std::uint64_t area, const std::vector<std::uint64_t>& row_bytes);
  void make_classes(const std::vector<std::uint32_t>& group_pages);
  void make_slabs(std::uint32_t area_pages, std::span<const RowSize> sizes);
  std::uint32_t find_open_slab(RowClass& row_class) const;
  std::uint32_t take_slab(std::uint32_t class_index);
  void give_slab(std::size_t index, std::uint32_t class_index);
  void take_row(std::size_t index, std::size_t place);
  Slab& slab_of(RowId row);
  std::vector<RowId> used_rows(const Slab& slab) const;
};

RowAllocator::Impl::Impl(std::uint64_t area, const std::vector<std::uint64_t>& row_bytes) : area_bytes(area) {
  const std::vector<std::uint32_t> group_pages = to_pages(row_bytes);
  const std::uint64_t needed = std::accumulate(group_pages.begin(), group_pages.end(), std::uint64_t{0});
  if (area_bytes / kPageBytes < needed) {
    throw_invalid(
        "an area of {} ({} bytes) was given, but one row of each of the {} KV cache groups takes {} ({} "
        "bytes); raise cpu_bytes_to_use or lower blocks_per_chunk",
        format_bytes(area_bytes), area_bytes, group_pages.size(), format_bytes(needed * kPageBytes),
        needed * kPageBytes);
  }
  if (area_bytes / kPageBytes >= kNoRow) {
    throw_invalid("an area of {} was given; less than {} per rank is possible: lower cpu_bytes_to_use",
                  format_bytes(area_bytes), format_bytes(std::uint64_t{kNoRow} * kPageBytes));
  }
  make_classes(group_pages);
  std::vector<RowSize> sizes;
  for (const RowClass& row_class : classes) sizes.push_back({row_class.pages, 0});
  for (const std::uint32_t index : class_of_group) ++sizes[index].groups;
  make_slabs(static_cast<std::uint32_t>(area_bytes / kPageBytes), sizes);
}

void RowAllocator::Impl::make_classes(const std::vector<std::uint32_t>& group_pages) {
  std::map<std::uint32_t, std::uint32_t> class_of_pages;
  for (const std::uint32_t pages : group_pages) {
    const auto [found, is_new] = class_of_pages.emplace(pages, static_cast<std::uint32_t>(classes.size()));
    if (is_new) classes.emplace_back().pages = pages;
    class_of_group.push_back(found->second);
  }
}

void RowAllocator::Impl::make_slabs(std::uint32_t area_pages, std::span<const RowSize> sizes) {
  std::map<std::uint32_t, std::uint32_t> pool_of_pages;
  for (const SlabExtent& extent : cut_slabs(area_pages, sizes)) {
    slabs.emplace_back().extent = extent;
    pool_of_pages[extent.pages] = 0;
  }
  for (auto& [pages, pool] : pool_of_pages) {
    pool = static_cast<std::uint32_t>(pools.size());
    pools.push_back({pages, BitTree(slabs.size(), false)});
  }
  for (std::size_t i = 0; i < slabs.size(); ++i) {
    slabs[i].pool = pool_of_pages[slabs[i].extent.pages];
    pools[slabs[i].pool].slabs.insert(i);
  }
  for (RowClass& row_class : classes) row_class.open = BitTree(slabs.size(), false);
}

// The slab of the last row while it has a row after that one; else the lowest,
// so that the high ones run empty and go back to the pool.
std::uint32_t RowAllocator::Impl::find_open_slab(RowClass& row_class) const {
  const std::uint32_t last = row_class.last_slab;
  if (last != kNoIndex && row_class.open.contains(last) &&
      slabs[last].free_rows.first(row_class.next_row) != BitTree::kNone) {
    return last;
  }
  const std::size_t lowest = row_class.open.first();
  return lowest == BitTree::kNone ? kNoIndex : static_cast<std::uint32_t>(lowest);
}

// The smallest that fits, so that larger rows keep the larger ones; of these the
// one after the last row's slab.
std::uint32_t RowAllocator::Impl::take_slab(std::uint32_t class_index) {
  RowClass& row_class = classes[class_index];
  for (Pool& pool : pools) {
    if (pool.pages < row_class.pages || pool.slabs.empty()) continue;
    const std::size_t after = row_class.last_slab == kNoIndex ? 0 : row_class.last_slab + std::size_t{1};
    const std::size_t index = after < slabs.size() && pool.slabs.contains(after) ? after : pool.slabs.first();
    give_slab(index, class_index);
    return static_cast<std::uint32_t>(index);
  }
  return kNoIndex;
}

// REQUIRES: it is in its pool, and as long as a row of the class.
void RowAllocator::Impl::give_slab(std::size_t index, std::uint32_t class_index) {
  Slab& slab = slabs[index];
  pools[slab.pool].slabs.erase(index);
  slab.row_class = class_index;
  // A slab comes back with all rows free: its set serves again.
  const std::uint32_t rows = slab.extent.pages / classes[class_index].pages;
  if (slab.rows != rows) {
    slab.rows = rows;
    slab.free_rows = BitTree(rows, true);
  }
  classes[class_index].open.insert(index);
}

void RowAllocator::Impl::take_row(std::size_t index, std::size_t place) {
  Slab& slab = slabs[index];
  RowClass& row_class = classes[slab.row_class];
  slab.free_rows.erase(place);
  ++slab.used;
  ++row_class.used;
  if (slab.used == slab.rows) row_class.open.erase(index);
}

Slab& RowAllocator::Impl::slab_of(RowId row) {
  const auto after = std::upper_bound(slabs.begin(), slabs.end(), row,
                                      [](RowId page, const Slab& slab) { return page < slab.extent.start; });
  return *std::prev(after);  // the first slab starts at page 0
}

std::vector<RowId> RowAllocator::Impl::used_rows(const Slab& slab) const {
  std::vector<RowId> rows;
  rows.reserve(slab.used);
  for (std::uint32_t i = 0; i < slab.rows; ++i) {
    if (!slab.free_rows.contains(i)) rows.push_back(slab.extent.start + i * classes[slab.row_class].pages);
  }
  return rows;
}

RowAllocator::RowAllocator(std::uint64_t area_bytes, std::vector<std::uint64_t> row_bytes)
    : impl_(std::make_unique<Impl>(area_bytes, row_bytes)) {}

RowAllocator::~RowAllocator() = default;

RowId RowAllocator::allocate(std::uint32_t group) {
  const std::uint32_t class_index = impl_->class_of_group.at(group);
  RowClass& row_class = impl_->classes[class_index];
  std::uint32_t index = impl_->find_open_slab(row_class);
  if (index == kNoIndex) index = impl_->take_slab(class_index);
  if (index == kNoIndex) return kNoRow;

  Slab& slab = impl_->slabs[index];
  std::size_t place = BitTree::kNone;
  if (index == row_class.last_slab) place = slab.free_rows.first(row_class.next_row);
  if (place == BitTree::kNone) place = slab.free_rows.first();
  impl_->take_row(index, place);
  row_class.last_slab = index;
  row_class.next_row = static_cast<std::uint32_t>(place) + 1;
  return slab.extent.start + static_cast<std::uint32_t>(place) * row_class.pages;
}

bool RowAllocator::claim(std::uint32_t group, RowId row) {
  const std::uint32_t class_index = impl_->class_of_group.at(group);
  const std::uint32_t pages = impl_->classes[class_index].pages;
  if (row >= impl_->area_bytes / kPageBytes) return false;
  Slab& slab = impl_->slab_of(row);
  const auto index = static_cast<std::size_t>(&slab - impl_->slabs.data());
  const std::uint32_t place = (row - slab.extent.start) / pages;
  if ((row - slab.extent.start) % pages != 0 || place >= slab.extent.pages / pages) return false;
  if (slab.row_class == kNoIndex) impl_->give_slab(index, class_index);
  if (slab.row_class != class_index || !slab.free_rows.contains(place)) return false;
  impl_->take_row(index, place);
  return true;
}

void RowAllocator::free(RowId row) {
  Slab& slab = impl_->slab_of(row);
  const std::uint32_t offset = row - slab.extent.start;
  if (slab.row_class == kNoIndex || offset % impl_->classes[slab.row_class].pages != 0 ||
      offset / impl_->classes[slab.row_class].pages >= slab.rows ||
      slab.free_rows.contains(offset / impl_->classes[slab.row_class].pages)) {
    throw std::logic_error(fmt::format("row {} was freed but is not in use", row));
  }
  RowClass& row_class = impl_->classes[slab.row_class];
  const auto index = static_cast<std::size_t>(&slab - impl_->slabs.data());
  slab.free_rows.insert(offset / row_class.pages);
  --slab.used;
  --row_class.used;
  if (slab.used > 0) {
    row_class.open.insert(index);
    return;
  }
  row_class.open.erase(index);
  slab.row_class = kNoIndex;
  impl_->pools[slab.pool].slabs.insert(index);
}

std::vector<RowId> RowAllocator::slab_to_reclaim(std::uint32_t group,
                                                 const std::function<bool(RowId)>& movable) const {
  const std::uint32_t class_index = impl_->class_of_group.at(group);
  std::vector<const Slab*> candidates;
  for (const Slab& slab : impl_->slabs) {
    if (slab.row_class == kNoIndex || slab.row_class == class_index) continue;
    if (slab.extent.pages >= impl_->classes[class_index].pages) candidates.push_back(&slab);
  }
  const auto dearer = [](const Slab* a, const Slab* b) { return a->used > b->used; };
  std::make_heap(candidates.begin(), candidates.end(), dearer);
  while (!candidates.empty()) {
    std::pop_heap(candidates.begin(), candidates.end(), dearer);
    std::vector<RowId> rows = impl_->used_rows(*candidates.back());
    if (std::all_of(rows.begin(), rows.end(), std::cref(movable))) return rows;
    candidates.pop_back();
  }
  return {};
}

std::uint64_t RowAllocator::row_bytes(std::uint32_t group) const {
  return impl_->classes[impl_->class_of_group.at(group)].pages * std::uint64_t{kPageBytes};
}

std::uint64_t RowAllocator::rows_in_use() const {
  std::uint64_t rows = 0;
  for (const RowClass& row_class : impl_->classes) rows += row_class.used;
  return rows;
}

std::uint64_t RowAllocator::bytes_in_use() const {
  std::uint64_t pages = 0;
  for (const RowClass& row_class : impl_->classes) pages += row_class.used * row_class.pages;
  return pages * kPageBytes;
}

std::uint64_t RowAllocator::capacity_rows(std::uint32_t group) const {
  const std::uint32_t pages = impl_->classes[impl_->class_of_group.at(group)].pages;
  std::uint64_t rows = 0;
  for (const Slab& slab : impl_->slabs) rows += slab.extent.pages / pages;
  return rows;
}

std::uint64_t RowAllocator::wasted_bytes() const {
  std::uint64_t usable = 0;
  for (const Slab& slab : impl_->slabs) {
    std::uint32_t most = 0;
    for (std::uint32_t i = 0; i < impl_->classes.size(); ++i) {
      if (slab.row_class != kNoIndex && slab.row_class != i) continue;
      const std::uint32_t pages = impl_->classes[i].pages;
      most = std::max(most, slab.extent.pages / pages * pages);
    }
    usable += most;
  }
  return impl_->area_bytes - usable * kPageBytes;
}

}  // namespace kv_offload
