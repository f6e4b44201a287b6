// SpacePage: what lies in ROOT/ledger, and the rules for changing it. One page of
// 4 KiB, read and written under its lock (see space.h). No I/O here.
//
// Everything below the root is in `used` or under the reservation of a slot. A
// change that may be counted either way is counted as too much, and the most that
// this can be is kept in `doubt`, which a count of the root makes zero.
//
// A process below its share asks the others for space in its own slot (`wanted`). A process with more than
// its share claims a part of that, evicts records, and turns their bytes into `credit` of the asker, which
// no other process can reserve.
//
// Any number of processes may count at once, each for itself: what a count may have
// missed is noted in the slot of who counts. The numbers may be anything (a file is
// not to be believed): no sum wraps.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

namespace kv_offload {

// One process that has the root open.
struct SpaceSlot {
  std::uint64_t writer;    // random; 0: the slot is free
  std::uint64_t host;      // a hash of its boot
  std::uint32_t pid;       // for people
  std::uint32_t evicting;  // writes of it that remove files to make space
  std::uint64_t sharer;    // what it has open (space.h, sharer())
  std::uint64_t version;   // of the page, as it wrote it last
  std::uint64_t reserved;  // bytes that may appear on its behalf
  std::uint64_t counting;  // the number of its count that runs, or 0
  std::uint64_t added;     // since it began: what appeared
  std::uint64_t doubt;     // and how much of all this the count may have wrong
  std::uint64_t held;      // bytes of the records that its sharer has
  std::uint64_t wanted;    // bytes that it asks the other sharers to evict
  std::uint64_t credit;    // bytes that they evicted for it, reserved for its next writes
};

// Bytes that one process evicts for another.
struct SpaceRequest {
  std::uint64_t asker = 0;  // writer of its slot
  std::uint64_t bytes = 0;
};

struct SpacePage {
  static constexpr std::size_t kSlots = 41;
  static constexpr std::size_t kBytes = 4096;

  char magic[8];
  std::uint64_t trusted;  // 0: not counted yet; nothing is granted
  std::uint64_t total;    // used and reserved, for readers of the file
  std::uint64_t used;
  std::uint64_t doubt;
  std::uint64_t writes;    // records made here so far; only grows
  std::uint64_t finished;  // counts that ended so far
  std::uint64_t host;      // of who counted last
  SpaceSlot slots[kSlots];
  std::uint64_t unused[11];
  std::uint64_t checksum;

  bool valid() const;
  void seal();  // total, magic and checksum
  static SpacePage fresh();
  // As it was left by this or an earlier version: the directory is a root of this format.
  static bool is_of_this_format(const void* bytes, std::size_t size);

  std::uint64_t reserved() const;           // by writes, and credit
  std::uint64_t sharers() const;            // processes that share records count once
  SpaceSlot* find(std::uint64_t writer);    // null: not there
  SpaceSlot* claim(const SpaceSlot& slot);  // null: all are taken

  // Bytes are there for good that were reserved or not asked for. twice: a count that
  // ended meanwhile may have them.
  void appeared(std::uint64_t bytes, bool twice);
  // Bytes are gone. False, and they stay in `used`: a count that ended meanwhile may have missed them
  // already.
  bool went(std::uint64_t bytes, bool unsure);
  // Its process is dead: what it had reserved may be there. Of one of another boot than the folder's, more
  // may be there than its slot tells: the page that told it may be lost with the power.
  void fold(SpaceSlot& slot, std::uint64_t folder);
  // Takes off a request of another sharer what `own` has above its share of max_bytes; while no sharer is
  // above its share, half of what it has more than the asker (if that is clearly more). Nothing when there is
  // no such request.
  std::optional<SpaceRequest> claim(const SpaceSlot& own, std::uint64_t max_bytes);
  // Bytes of a removed file become credit of the process that asked for them; free space when it has ended.
  void grant(std::uint64_t asker, std::uint64_t bytes, bool unsure);
  void begin_count(SpaceSlot& slot, std::uint64_t number);
  void finish_count(SpaceSlot& slot, std::uint64_t counted);
};
static_assert(sizeof(SpacePage) == SpacePage::kBytes);
static_assert(offsetof(SpacePage, checksum) == SpacePage::kBytes - sizeof(std::uint64_t));

}  // namespace kv_offload
