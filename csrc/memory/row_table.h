// RowTable: what each row of a region holds, in shared memory behind the areas, so that
// the next engine can go on with the rows that this one leaves (HostRegion::keep).
//
//   header    4 KiB     magic, digest of what the rows depend on, the counter of uses
//   entries   88 bytes for each row of the smallest size: use (0: empty), key, parent,
//             depth, row, priority, group, and XXH3-64 of these but the use
//
// A kill may come between any two stores of this process. An entry is written before
// its use is, and the use is cleared before the row is given to anybody: so an entry that
// is there is of a row whose bytes are complete. What a dying process still wrote into
// other rows does not matter. Entries are not synchronised with the disk: they end with
// the machine, as the rows do.
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
    std::uint64_t parent = 0;  // see EntryInfo, as are the next two
    std::uint32_t depth = 0;
    std::int8_t priority = 0;
    std::uint8_t group = 0;  // position
  };

  // For areas of `area_bytes` whose smallest row has `row_bytes`.
  static std::uint64_t bytes(std::uint64_t area_bytes, std::uint64_t row_bytes);
  // `memory`: of bytes(), 4 KiB aligned, zeros or an earlier table; it outlives this.
  // `identity`: everything that the bytes of rows and their places depend on; a table of
  // another identity is emptied.
  RowTable(std::span<std::byte> memory, std::uint64_t area_bytes, std::uint64_t row_bytes,
           std::string_view identity);

  // What is there, the least recently used first. Entries that are damaged are removed.
  std::vector<Row> rows();
  // In the place of what is there of it, as used last of all. REQUIRES: the row's bytes are
  // complete and nobody writes to it.
  void put(const Row& row);
  // As used last of all. Nothing where it is not there.
  void use(RowId row);
  // Before the row is given to anybody. Not an error when it is not there.
  void erase(RowId row);
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
