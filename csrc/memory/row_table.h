// SPDX-License-Identifier: Apache-2.0
// RowTable: what each row of a region holds, in shared memory after the areas, so that the next engine can
// reuse the rows that this one leaves (HostRegion::keep).
//
//   header    4 KiB     magic, digest of what the rows depend on, the use counter
//   entries   88 bytes for each row of the smallest size: use (0: empty), key, parent,
//             depth, row, priority, group, tenant, and XXH3-64 of all but the use
//
// A kill may happen between any two stores of this process. An entry is written before its use, and the use
// is cleared before the row is reused. So a valid entry always describes a row whose bytes are complete. What
// a dying process still wrote into other rows does not matter. Entries are not synced to disk: they are lost
// with the machine, like the rows.
//
// Threads: one (the scheduler's).
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "base/types.h"

namespace kv_offload {

class RowTable {
 public:
  struct Row {
    RowId row = kNoRow;
    ChunkKey key;
    std::uint64_t parent = 0;  // see EntryInfo, like the next two
    std::uint32_t depth = 0;
    std::int8_t priority = 0;
    std::uint8_t group = 0;        // position
    std::uint32_t tenant_tag = 0;  // of the tenant that is charged; 0: none
  };

  // Returns the table's size for areas of `area_bytes` whose smallest row has `row_bytes`.
  static std::uint64_t bytes(std::uint64_t area_bytes, std::uint64_t row_bytes);
  // `memory`: of bytes() bytes, 4 KiB aligned, zeros or an earlier table; must outlive this object.
  // `identity`: everything that the rows' bytes and places depend on. A table with another identity is
  // cleared.
  RowTable(std::span<std::byte> memory, std::uint64_t area_bytes, std::uint64_t row_bytes,
           std::string_view identity);

  // Returns the valid entries, least recently used first. Removes damaged entries.
  std::vector<Row> rows();
  // Replaces the row's entry and marks it most recently used. REQUIRES: the row's bytes are complete and no
  // thread writes to it.
  void put(const Row& row);
  // Marks the row most recently used. Ignores rows without an entry.
  void use(RowId row);
  // Call before the row is reused. A missing entry is not an error.
  void erase(RowId row);
  // Invalidates the table, in O(1). No other call may follow.
  void clear();

 private:
  struct Header;
  struct Entry;
  Entry& entry_of(RowId row) const;
  void mark_used(Entry& entry);
  std::span<Entry> entries() const;

  std::byte* memory_;
  std::size_t capacity_;
  std::uint32_t row_pages_;
};

}  // namespace kv_offload
