// SPDX-License-Identifier: Apache-2.0
// SharedRows: the rows of a region that other engines of the host may read, in shared memory after the areas.
// The owner publishes which key each row holds. A reader finds a key, pins its row and reads the bytes where
// they are.
//
//   header    4 KiB                                 magic, identity, row size, opening
//   pins      8 bytes per row of the smallest size  written by readers too: see SharedRow
//   buckets   8 bytes each, a power of two          first entry of a chain, plus one; filter of its keys
//   links     16 bytes per row of the smallest size next entry plus one, and what only the owner reads
//   entries   64 bytes per row of the smallest size version, row, depth, group, key
//
// A change of a chain touches three rows and an entry is a cache line, so the links are apart from the
// entries.
//
// The filter answers most lookups of absent keys with one read. It has up to three bits for each key of the
// chain (a Bloom filter); the bits of withdrawn keys stay until the chain is empty. SharedRowsFilter reads
// nothing else.
//
// Readers map everything but the pins read-only. The owner is the only writer of a table, so it needs no
// lock. A reader that follows a chain during a change may miss an entry; it never accepts a wrong one,
// because it compares the version before and after it reads an entry and again after it has pinned the row. A
// killed owner leaves a valid table: a published entry always describes complete bytes.
//
// The next owner of a region may take the table over while readers of the earlier owner still have it mapped.
// Each opening of the table has another number, and a view pins rows only under the number that it was made
// for. So nobody finds a row of the next owner, whose identity may differ, in a view of the earlier one. Pins
// that hold stay valid: the next owner withdraws all rows before it looks at the pins, like any owner. They
// are at the same place only if the rows have the same size: see has_other_layout().
//
// Everything that a reader reads may be damaged or hostile: numbers are checked before they are used, and
// chains are bounded.
//
// Threads: one per object. Processes: one owner, up to kMostReaders readers.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "base/types.h"
#include "memory/row_divisor.h"
#include "memory/shared_row.h"

namespace kv_offload {

// Where the parts of a table are. Both sides compute it from the sizes of their own region.
struct SharedRowsLayout {
  std::uint64_t area_bytes = 0;
  std::uint64_t row_bytes = 0;  // of the smallest row, padded to 4 KiB
  std::uint32_t capacity = 0;   // entries
  std::uint32_t buckets = 0;
  std::uint64_t buckets_offset = 0, links_offset = 0, entries_offset = 0;  // the pins begin after the header
  std::uint64_t bytes = 0;
  std::uint64_t row_sizes = 0;  // identifies the sizes of all rows by group, if the owner may have successors

  static SharedRowsLayout of(std::uint64_t area_bytes, std::uint64_t row_bytes);
};

class SharedRows {
 public:
  // `memory`: layout.bytes bytes of zeros or an earlier table, 4 KiB aligned; must outlive this object.
  // `identity`: everything that the rows' bytes and places depend on. The table is empty and open. Pins of
  // readers of an earlier table stay if it had the same layout. REQUIRES: no process has or takes a
  // reader number meanwhile, unless has_other_layout() is false. Throws ResourceError if the rows are larger
  // than kMostRowPages.
  SharedRows(std::span<std::byte> memory, const SharedRowsLayout& layout, std::string_view identity);
  static constexpr std::uint64_t kMostRowPages = 1u << 24;  // 64 GiB
  // Identifies the format of a table. Change it with each change of the format.
  static constexpr std::uint64_t kFormat = 0x6B765F7368617235;  // "kv_shar5": the last character counts
  // True if the memory is a table of another format, whose pins are at other places, or in which a row of a
  // group has another size.
  static bool has_other_layout(std::span<const std::byte> memory, const SharedRowsLayout& layout);

  // `group`: position. REQUIRES: the row is not published; its bytes are complete, and no thread writes to it
  // until withdraw() has returned true or is_pinned() false.
  void publish(RowId row, const ChunkKey& key, std::uint32_t depth, std::uint8_t group);
  // Call before a row is reused, published or not. False: a reader still reads it.
  bool withdraw(RowId row);
  // Loads what publish() of this row and key writes into the CPU's cache.
  void prefetch(RowId row, const ChunkKey& key) const;
  bool is_pinned(RowId row) const;
  // Calls visit(row, group) for each pinned row, as it was published last, by this owner or an earlier one.
  // Of a row that was never published, or that another process of this user has damaged, the numbers may be
  // any.
  void for_each_pinned(const std::function<void(RowId, std::uint32_t)>& visit) const;
  // True if no reader reads the row or has used it since the last take_use(). One load, for the common case.
  bool is_idle(RowId row) const { return pins_[index_of(row)].load(std::memory_order_relaxed) == 0; }
  // True if a reader has used the row since the last call.
  bool take_use(RowId row);
  // Withdraws all rows, in O(1), for good. Pins stay. A row still needs withdraw() before it is
  // reused.
  void close();
  std::uint32_t capacity() const { return layout_.capacity; }
  // A random number that the table has had since it was made. A table that replaces one of another layout has
  // another number. So a note about the rows that is kept with this number is void after rows of other sizes
  // were written.
  std::uint64_t id() const;
  // Returns bits of the readers that pin any of the rows with the indices [first, first + count). REQUIRES,
  // like clear_pins(): inside the capacity.
  std::uint64_t readers(std::uint32_t first, std::uint32_t count) const;
  // Clears the pins of a reader on these rows. REQUIRES: it is dead, and no process takes its number
  // meanwhile.
  void clear_pins(unsigned reader, std::uint32_t first, std::uint32_t count);

 private:
  friend class SharedRowsView;
  struct Header;
  struct Link;
  struct Entry;
  using Word = std::atomic<std::uint64_t>;
  SharedRow<Word> at(std::uint32_t index) const;
  std::uint32_t index_of(RowId row) const { return divide_(row); }
  Word& bucket_of(std::uint64_t hash) const { return buckets_[hash & (layout_.buckets - 1)]; }
  // Returns 0 if this is no link of this table: another process of this user may have damaged it.
  std::uint32_t checked(std::uint32_t link) const;
  // Returns the filter of a chain; nothing if the chain does not end.
  std::optional<std::uint64_t> filter_of(std::uint32_t link) const;
  void unlink(std::uint32_t index);
  // Loads what withdraw() writes into the CPU's cache.
  void prefetch_withdrawal(std::uint32_t index) const;

  SharedRowsLayout layout_;
  std::uint32_t row_pages_;
  RowDivisor divide_;  // by row_pages_
  std::byte* memory_;
  Word* pins_;
  Word* buckets_;
  Link* links_;
  Entry* entries_;
  std::uint64_t last_version_ = 0;
  std::uint32_t last_withdrawn_ = 0;  // index
};

// The filters of a table, as a reader sees them. The bits of a published key are always set. Those of a few
// absent keys are set too, so only find() confirms a key.
class SharedRowsFilter {
 public:
  // `buckets`: `count` of them, a power of two. They must stay mapped while this object is used.
  SharedRowsFilter(const std::atomic<std::uint64_t>* buckets, std::uint32_t count)
      : buckets_(buckets), mask_(count - 1) {}

  // Where the bits of a key are: the same in all tables of one layout.
  struct Place {
    std::uint64_t bucket;
    std::uint64_t bits;
  };
  Place place_of(std::uint64_t hash) const { return {hash & mask_, bits_of(hash)}; }
  // False: no row with a key of this hash is published.
  bool may_have(std::uint64_t hash) const { return may_have(place_of(hash)); }
  bool may_have(const Place& place) const {
    const std::uint64_t found = buckets_[place.bucket].load(std::memory_order_relaxed);
    return (found & place.bits) == place.bits;
  }
  void prefetch(const Place& place) const { __builtin_prefetch(&buckets_[place.bucket]); }
  // Returns the bits of a key in its bucket: three, two or one of 32. The low bits of the hash choose the
  // bucket.
  static std::uint64_t bits_of(std::uint64_t hash) {
    const auto bit = [&](unsigned shift) { return std::uint64_t{1} << (hash >> shift & 31); };
    return (bit(59) | bit(54) | bit(49)) << kShift;
  }
  static constexpr unsigned kShift = 32;  // the low half of a bucket is the first link of its chain

 private:
  const std::atomic<std::uint64_t>* buckets_;
  std::uint64_t mask_;
};

// A reader's side of another engine's table.
class SharedRowsView {
 public:
  // `table`: the whole table, may be mapped read-only. `pins`: the same bytes from kPageBytes on, writable.
  // Throws ResourceError with the reason if this is no table of this layout and identity. Both outlive this.
  SharedRowsView(std::span<const std::byte> table, std::span<std::byte> pins, const SharedRowsLayout& layout,
                 std::string_view identity);

  struct Found {
    RowId row = kNoRow;
    std::uint32_t depth = 0;
    std::uint8_t group = 0;  // as published; the caller checks it
    std::uint64_t version = 0;
  };
  SharedRowsFilter filter() const;
  // Returns the published row of a key. The row may be withdrawn at any time until pin() has returned true.
  std::optional<Found> find(const ChunkKey& key) const;
  // True if the row still holds the key. It then stays unchanged until unpin().
  bool pin(unsigned reader, const Found& found);
  void unpin(unsigned reader, RowId row);  // also reports the use to the owner's eviction
  void mark_used(RowId row);               // reports it without a pin
  // False: the owner has closed the table, or another owner has taken it over.
  bool is_open() const;
  // Clears what an earlier, dead reader of this number left. REQUIRES: the number belongs to this process.
  void clear_pins(unsigned reader);

 private:
  using Word = SharedRows::Word;
  Word& pins_of(std::uint32_t index) const;
  const Word& bucket_of(std::uint64_t hash) const;
  const SharedRows::Entry& entry(std::uint32_t index) const;
  std::uint32_t next_of(std::uint32_t link) const;

  SharedRowsLayout layout_;
  std::uint32_t row_pages_;
  const std::byte* table_;
  std::byte* pins_;
  std::uint64_t opening_;
};

}  // namespace kv_offload
