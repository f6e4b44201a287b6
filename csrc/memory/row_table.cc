// SPDX-License-Identifier: Apache-2.0
#include "memory/row_table.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <new>
#include <string>
#include <utility>

#include "base/status.h"
#include "base/xxh3.h"

namespace kv_offload {
namespace {

constexpr std::uint64_t kTableMagic = 0x6B765F726F777331;  // "kv_rows1": includes the version

std::size_t capacity_of(std::uint64_t area_bytes, std::uint64_t row_bytes) {
  return static_cast<std::size_t>(area_bytes / row_bytes);
}

}  // namespace

struct RowTable::Header {
  std::uint64_t magic;
  XXH128_hash_t identity;
  std::uint64_t last_use;
};

struct RowTable::Entry {
  std::uint64_t use;  // ascending; 0: empty
  std::uint64_t parent;
  ChunkKey key;
  std::uint32_t depth;
  RowId row;
  std::int8_t priority;
  std::uint8_t group;
  std::array<std::uint8_t, 2> unused;
  std::uint32_t tenant_tag;
  std::uint64_t check;  // of all fields except `use`, which changes

  std::uint64_t sum() const { return XXH3_64bits(&parent, kSummed); }
  static constexpr std::size_t kSummed = 8 + sizeof(ChunkKey) + 16;
};

std::uint64_t RowTable::bytes(std::uint64_t area_bytes, std::uint64_t row_bytes) {
  static_assert(sizeof(Header) <= kPageBytes && sizeof(Entry) == 88);
  static_assert(offsetof(Entry, parent) + Entry::kSummed == offsetof(Entry, check));
  return kPageBytes + round_up(capacity_of(area_bytes, row_bytes) * sizeof(Entry), kPageBytes);
}

RowTable::RowTable(std::span<std::byte> memory, std::uint64_t area_bytes, std::uint64_t row_bytes,
                   std::string_view identity)
    : memory_(memory.data()),
      capacity_(capacity_of(area_bytes, row_bytes)),
      row_pages_(static_cast<std::uint32_t>(row_bytes / kPageBytes)) {
  if (memory.size() != bytes(area_bytes, row_bytes)) {
    throw_invalid("{} bytes were given for the row table; it needs {}", memory.size(),
                  bytes(area_bytes, row_bytes));
  }
  const std::string all = fmt::format("{} {} {}", area_bytes, row_bytes, identity);
  const XXH128_hash_t digest = XXH3_128bits(all.data(), all.size());
  auto* header = std::launder(reinterpret_cast<Header*>(memory_));
  if (header->magic == kTableMagic && XXH128_isEqual(header->identity, digest)) return;
  clear();
  for (Entry& entry : entries())
    std::atomic_ref<std::uint64_t>(entry.use).store(0, std::memory_order_relaxed);
  std::atomic_signal_fence(std::memory_order_seq_cst);
  *header = {kTableMagic, digest, 0};
}

RowTable::Entry& RowTable::entry_of(RowId row) const { return entries()[row / row_pages_]; }

std::span<RowTable::Entry> RowTable::entries() const {
  return {std::launder(reinterpret_cast<Entry*>(memory_ + kPageBytes)), capacity_};
}

std::vector<RowTable::Row> RowTable::rows() {
  std::vector<std::pair<std::uint64_t, Row>> found;
  for (std::size_t i = 0; i < capacity_; ++i) {
    Entry& entry = entries()[i];
    if (entry.use == 0) continue;
    if (entry.check != entry.sum() || entry.row / row_pages_ != i || !ChunkKey::fits(entry.key.size())) {
      entry.use = 0;
      continue;
    }
    found.push_back(
        {entry.use,
         {entry.row, entry.key, entry.parent, entry.depth, entry.priority, entry.group, entry.tenant_tag}});
  }
  std::sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<Row> rows;
  rows.reserve(found.size());
  for (auto& [use, row] : found) rows.push_back(std::move(row));
  return rows;
}

void RowTable::put(const Row& row) {
  erase(row.row);
  Entry& entry = entry_of(row.row);
  entry.parent = row.parent;
  entry.key = row.key;
  entry.depth = row.depth;
  entry.row = row.row;
  entry.priority = row.priority;
  entry.group = row.group;
  entry.unused = {};
  entry.tenant_tag = row.tenant_tag;
  entry.check = entry.sum();
  mark_used(entry);
}

void RowTable::use(RowId row) {
  Entry& entry = entry_of(row);
  if (entry.use != 0) mark_used(entry);
}

void RowTable::mark_used(Entry& entry) {
  auto* header = std::launder(reinterpret_cast<Header*>(memory_));
  std::atomic_ref<std::uint64_t>(entry.use).store(++header->last_use, std::memory_order_release);
}

void RowTable::erase(RowId row) {
  // This store must precede any write to the row. The stores of a killed process arrive in program order, so
  // only the compiler has to keep the order.
  std::atomic_ref<std::uint64_t>(entry_of(row).use).store(0, std::memory_order_relaxed);
  std::atomic_signal_fence(std::memory_order_seq_cst);
}

// The entries stay: without the header's magic, the next table clears them.
void RowTable::clear() {
  auto* header = std::launder(reinterpret_cast<Header*>(memory_));
  std::atomic_ref<std::uint64_t>(header->magic).store(0, std::memory_order_relaxed);
  std::atomic_signal_fence(std::memory_order_seq_cst);
}

}  // namespace kv_offload
