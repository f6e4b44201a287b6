// SPDX-License-Identifier: Apache-2.0
#include "memory/row_allocator.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <optional>
#include <stdexcept>

#include "base/status.h"
#include "memory/bit_tree.h"
#include "memory/slab_layout.h"

namespace kv_offload {
namespace {

constexpr std::uint32_t kNoIndex = 0xFFFFFFFFu;
// Row places that one search for a slab checks, so that a large area takes no longer than a small one. The
// next search of equally full slabs continues after the last one checked.
constexpr std::uint32_t kPlacesPerSearch = 512;

// Invariant: row_class == kNoIndex <=> used == 0 <=> in its pool.
struct Slab {
  SlabExtent extent;
  std::uint32_t pool = 0;                              // holds the free slabs of its length
  std::uint32_t row_class = kNoIndex;                  // the class that owns it
  std::uint32_t used = 0;                              // rows in use
  std::uint32_t rows = 0;                              // rows of the class that fit
  std::uint32_t previous = kNoIndex, next = kNoIndex;  // in its ring, see RowClass::rings
  BitTree free_rows;
};

// Free slabs of one length.
struct Pool {
  std::uint32_t pages;
  std::uint32_t usable_pages;  // by the class that wastes the least
  BitTree slabs;
};

struct RowClass {
  std::uint32_t pages = 0;  // of a row
  BitTree open;             // our slabs with a free row
  std::uint32_t last_slab = kNoIndex;
  std::uint32_t next_row = 0;  // in last_slab, after the last allocated row
  std::uint64_t used = 0;
  // Only with several classes: slabs with n rows in use form a circular list. rings[n] is the next one of
  // them to check; kNoIndex if there is none. `counts`: the n with a ring.
  std::vector<std::uint32_t> rings;
  BitTree counts;
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
  std::vector<Slab> slabs;         // ascending by place
  std::vector<Pool> pools;         // ascending by length
  std::uint64_t usable_pages = 0;  // of all slabs: by their class, or by the best one
  std::size_t next_by_place = 0;   // the slab that reclaim_by_place() checks next

  Impl(std::uint64_t area, const std::vector<std::uint64_t>& row_bytes);
  void make_classes(const std::vector<std::uint32_t>& group_pages);
  void make_slabs(std::uint32_t area_pages, std::span<const RowSize> sizes);
  std::uint32_t find_open_slab(RowClass& row_class) const;
  std::uint32_t take_slab(std::uint32_t class_index);
  void give_slab(std::size_t index, std::uint32_t class_index);
  void return_slab(std::size_t index);
  void take_row(std::size_t index, std::size_t place);
  void set_used(std::size_t index, std::uint32_t used);
  void remove_from_ring(std::size_t index);
  void enter_ring(std::size_t index);
  Slab& slab_of(RowId row);
  // Returns the smallest number >= `least` of rows in use of any slab of another class; nullopt if there is
  // none.
  std::optional<std::size_t> next_count(std::uint32_t class_index, std::size_t least) const;
  // Returns the rows in use of a slab; empty if one of them is not movable, if there are none, or if the slab
  // is of no use to the class. Subtracts the places checked, and one for the slab, from *places.
  std::vector<RowId> reclaimable_rows(const Slab& slab, std::uint32_t class_index,
                                      const std::function<bool(RowId)>& movable, std::uint32_t* places) const;
  // The two parts of slab_to_reclaim().
  std::vector<RowId> reclaim_emptiest(std::uint32_t class_index, const std::function<bool(RowId)>& movable);
  std::vector<RowId> reclaim_by_place(std::uint32_t class_index, const std::function<bool(RowId)>& movable);
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
    std::uint32_t usable = 0;
    for (const RowClass& row_class : classes)
      usable = std::max(usable, pages / row_class.pages * row_class.pages);
    pools.push_back({pages, usable, BitTree(slabs.size(), false)});
  }
  for (std::size_t i = 0; i < slabs.size(); ++i) {
    slabs[i].pool = pool_of_pages[slabs[i].extent.pages];
    pools[slabs[i].pool].slabs.insert(i);
    usable_pages += pools[slabs[i].pool].usable_pages;
  }
  for (RowClass& row_class : classes) {
    row_class.open = BitTree(slabs.size(), false);
    if (classes.size() == 1) continue;
    const std::size_t most = pools.back().pages / row_class.pages;
    row_class.rings.assign(most + 1, kNoIndex);
    row_class.counts = BitTree(most + 1, false);
  }
}

// Returns the slab of the last row while it has a free row after that one; else the lowest open slab, so that
// the high ones become empty and return to the pool.
std::uint32_t RowAllocator::Impl::find_open_slab(RowClass& row_class) const {
  const std::uint32_t last = row_class.last_slab;
  if (last != kNoIndex && row_class.open.contains(last) &&
      slabs[last].free_rows.first(row_class.next_row) != BitTree::kNone) {
    return last;
  }
  const std::size_t lowest = row_class.open.first();
  return lowest == BitTree::kNone ? kNoIndex : static_cast<std::uint32_t>(lowest);
}

// Takes the smallest slab that fits, so that the larger ones remain for larger rows. Among those, the one
// after the last row's slab.
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

// REQUIRES: the slab is in its pool and holds at least one row of the class.
void RowAllocator::Impl::give_slab(std::size_t index, std::uint32_t class_index) {
  Slab& slab = slabs[index];
  // A slab returns with all rows free, so its set can be reused.
  const std::uint32_t rows = slab.extent.pages / classes[class_index].pages;
  if (slab.rows != rows) {
    slab.free_rows = BitTree(rows, true);  // first, because it may throw
    slab.rows = rows;
  }
  pools[slab.pool].slabs.erase(index);
  slab.row_class = class_index;
  classes[class_index].open.insert(index);
  usable_pages -= pools[slab.pool].usable_pages;
  usable_pages += std::uint64_t{rows} * classes[class_index].pages;
}

// REQUIRES: none of its rows is in use.
void RowAllocator::Impl::return_slab(std::size_t index) {
  Slab& slab = slabs[index];
  RowClass& row_class = classes[slab.row_class];
  row_class.open.erase(index);
  slab.row_class = kNoIndex;
  pools[slab.pool].slabs.insert(index);
  usable_pages -= std::uint64_t{slab.rows} * row_class.pages;
  usable_pages += pools[slab.pool].usable_pages;
}

void RowAllocator::Impl::take_row(std::size_t index, std::size_t place) {
  Slab& slab = slabs[index];
  RowClass& row_class = classes[slab.row_class];
  slab.free_rows.erase(place);
  set_used(index, slab.used + 1);
  ++row_class.used;
  if (slab.used == slab.rows) row_class.open.erase(index);
}

void RowAllocator::Impl::set_used(std::size_t index, std::uint32_t used) {
  const bool in_rings = classes.size() > 1;
  if (in_rings && slabs[index].used > 0) remove_from_ring(index);
  slabs[index].used = used;
  if (in_rings && used > 0) enter_ring(index);
}

void RowAllocator::Impl::remove_from_ring(std::size_t index) {
  Slab& slab = slabs[index];
  RowClass& row_class = classes[slab.row_class];
  std::uint32_t& first = row_class.rings[slab.used];
  if (slab.next == index) {
    first = kNoIndex;
    row_class.counts.erase(slab.used);
    return;
  }
  slabs[slab.previous].next = slab.next;
  slabs[slab.next].previous = slab.previous;
  if (first == index) first = slab.next;
}

// Adds the slab as the last one to be checked.
void RowAllocator::Impl::enter_ring(std::size_t index) {
  Slab& slab = slabs[index];
  RowClass& row_class = classes[slab.row_class];
  std::uint32_t& first = row_class.rings[slab.used];
  const auto own = static_cast<std::uint32_t>(index);
  if (first == kNoIndex) {
    row_class.counts.insert(slab.used);
    first = slab.previous = slab.next = own;
    return;
  }
  slab.next = first;
  slab.previous = slabs[first].previous;
  slabs[slab.previous].next = own;
  slabs[first].previous = own;
}

Slab& RowAllocator::Impl::slab_of(RowId row) {
  const auto after = std::upper_bound(slabs.begin(), slabs.end(), row,
                                      [](RowId page, const Slab& slab) { return page < slab.extent.start; });
  return *std::prev(after);  // the first slab starts at page 0
}

std::optional<std::size_t> RowAllocator::Impl::next_count(std::uint32_t class_index,
                                                          std::size_t least) const {
  std::size_t next = BitTree::kNone;
  for (std::uint32_t other = 0; other < classes.size(); ++other) {
    if (other != class_index) next = std::min(next, classes[other].counts.first(least));
  }
  return next == BitTree::kNone ? std::nullopt : std::optional(next);
}

std::vector<RowId> RowAllocator::Impl::reclaimable_rows(const Slab& slab, std::uint32_t class_index,
                                                        const std::function<bool(RowId)>& movable,
                                                        std::uint32_t* places) const {
  *places -= std::min(*places, 1u);
  if (slab.row_class == kNoIndex || slab.row_class == class_index ||
      slab.extent.pages < classes[class_index].pages)
    return {};
  std::vector<RowId> rows;
  for (std::uint32_t place = 0; place < slab.rows; ++place) {
    *places -= std::min(*places, 1u);
    if (slab.free_rows.contains(place)) continue;
    const RowId row = slab.extent.start + place * classes[slab.row_class].pages;
    if (!movable(row)) return {};
    rows.push_back(row);
  }
  return rows;
}

std::vector<RowId> RowAllocator::Impl::reclaim_emptiest(std::uint32_t class_index,
                                                        const std::function<bool(RowId)>& movable) {
  std::uint32_t places = kPlacesPerSearch;
  for (std::size_t least = 0;;) {
    const std::optional<std::size_t> count = next_count(class_index, least);
    if (!count) return {};
    least = *count + 1;
    for (std::uint32_t other = 0; other < classes.size(); ++other) {
      // A class of larger rows has no slab, and no ring, with this many rows.
      if (other == class_index || *count >= classes[other].rings.size() ||
          classes[other].rings[*count] == kNoIndex)
        continue;
      std::uint32_t& first = classes[other].rings[*count];
      const std::uint32_t begin = first;
      do {
        if (places == 0) return {};
        const Slab& slab = slabs[first];
        std::vector<RowId> rows = reclaimable_rows(slab, class_index, movable, &places);
        if (!rows.empty()) return rows;
        first = slab.next;
      } while (first != begin);
    }
  }
}

std::vector<RowId> RowAllocator::Impl::reclaim_by_place(std::uint32_t class_index,
                                                        const std::function<bool(RowId)>& movable) {
  std::uint32_t places = kPlacesPerSearch;
  for (std::size_t checked = 0; checked < slabs.size() && places > 0; ++checked) {
    const Slab& slab = slabs[next_by_place];
    next_by_place = (next_by_place + 1) % slabs.size();
    std::vector<RowId> rows = reclaimable_rows(slab, class_index, movable, &places);
    if (!rows.empty()) return rows;
  }
  return {};
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

bool RowAllocator::is_in_slab_of_other_class(std::uint32_t group, RowId row) const {
  const std::uint32_t owner = impl_->slab_of(row).row_class;
  return owner != kNoIndex && owner != impl_->class_of_group.at(group);
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
  impl_->set_used(index, slab.used - 1);
  --row_class.used;
  if (slab.used > 0) {
    row_class.open.insert(index);
  } else {
    impl_->return_slab(index);
  }
}

std::vector<RowId> RowAllocator::slab_to_reclaim(std::uint32_t group,
                                                 const std::function<bool(RowId)>& movable) {
  const std::uint32_t class_index = impl_->class_of_group.at(group);
  std::vector<RowId> rows = impl_->reclaim_emptiest(class_index, movable);
  return rows.empty() ? impl_->reclaim_by_place(class_index, movable) : rows;
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
  return impl_->area_bytes - impl_->usable_pages * kPageBytes;
}

}  // namespace kv_offload
