// SPDX-License-Identifier: Apache-2.0
// LedgerPage: the content of ROOT/ledger, and the rules for changing it. One page of 4 KiB, read and written
// under its lock (see space_ledger.h). No I/O here.
//
// Every byte below the root is in `used` or under the reservation of a slot. Bytes that may or may not be
// counted twice are counted. `doubt` is the most that this can amount to; a count of the root makes it zero.
//
// A process below its share requests space from the others in its own slot (`wanted`). A process above its
// share claims a part of that, evicts records, and turns their bytes into `credit` of the requester, which no
// other process can reserve.
//
// Any number of processes may count at once, each for itself: bytes that a count may have missed are recorded
// in the slot of the counting process. The numbers may have any value, because the file is not trusted: no
// sum wraps.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

namespace kv_offload {

// One process that has the root open.
struct LedgerSlot {
  std::uint64_t writer;    // random; 0: the slot is free
  std::uint64_t host;      // a hash of its boot id
  std::uint32_t pid;       // for people
  std::uint32_t evicting;  // its writes and claims that are evicting
  std::uint64_t sharer;    // identifies the namespace and epoch that it has open (space_ledger.h, sharer())
  std::uint64_t version;   // of the page at its last change
  std::uint64_t reserved;  // bytes that may appear on its behalf
  std::uint64_t counting;  // number of its running count, or 0
  std::uint64_t added;     // bytes that appeared since the count began
  std::uint64_t doubt;     // how much of these changes the count may have wrong
  std::uint64_t held;      // bytes of the records of its sharer
  std::uint64_t wanted;    // bytes that it asks the other sharers to evict
  std::uint64_t credit;    // bytes evicted for it, reserved for its next writes
};

// Bytes that one process evicts for another.
struct LedgerRequest {
  std::uint64_t requester = 0;  // the writer of its slot
  std::uint64_t bytes = 0;
};

struct LedgerPage {
  static constexpr std::size_t kSlots = 41;
  static constexpr std::size_t kBytes = 4096;

  char magic[8];
  std::uint64_t trusted;  // 0: not counted yet; nothing is granted
  std::uint64_t total;    // used plus reserved, for readers of the file
  std::uint64_t used;
  std::uint64_t doubt;
  std::uint64_t writes;    // records written here so far; only grows
  std::uint64_t finished;  // counts that ended so far
  std::uint64_t host;      // of the process that counted last
  LedgerSlot slots[kSlots];
  std::uint64_t removals;  // counted files removed here so far; only grows
  std::uint64_t unused[10];
  std::uint64_t checksum;

  bool valid() const;
  void set_checksum();  // sets total, magic and checksum
  static LedgerPage fresh();
  // True if this or an earlier version wrote the page: the directory is a root of this format.
  static bool is_of_this_format(const void* bytes, std::size_t size);

  std::uint64_t reserved() const;             // reserved by writes, plus credit
  std::uint64_t sharers() const;              // number of sharers
  LedgerSlot* find(std::uint64_t writer);     // null: not found
  LedgerSlot* claim(const LedgerSlot& slot);  // null: all slots are in use

  // Bytes became permanent that were reserved or not requested. twice: a count that ended meanwhile may
  // include them already.
  void appeared(std::uint64_t bytes, bool twice);
  // Bytes were removed. uncertain: a count that ended meanwhile may have missed them already; then they stay
  // in `used`, and this returns false.
  bool subtract_used(std::uint64_t bytes, bool uncertain);
  // Frees the slot of a dead process: its reserved bytes may be on disk. For a process of another boot than
  // `folder`, more may be on disk than its slot shows, because a power failure may have lost the page that
  // showed it.
  void fold(LedgerSlot& slot, std::uint64_t folder);
  // Takes on a part of another sharer's request: the bytes that `own` holds above its share of max_bytes.
  // While no sharer is above its share, half of the bytes that it holds more than the requester, if these are
  // clearly more. Empty if there is no matching request.
  std::optional<LedgerRequest> claim(const LedgerSlot& own, std::uint64_t max_bytes);
  // Bytes of a removed file become credit of the process that asked for them, or free space if that process
  // has ended.
  void grant(std::uint64_t requester, std::uint64_t bytes, bool uncertain);
  void begin_count(LedgerSlot& slot, std::uint64_t number);
  void finish_count(LedgerSlot& slot, std::uint64_t counted);
};
static_assert(sizeof(LedgerPage) == LedgerPage::kBytes);
static_assert(offsetof(LedgerPage, checksum) == LedgerPage::kBytes - sizeof(std::uint64_t));

}  // namespace kv_offload
