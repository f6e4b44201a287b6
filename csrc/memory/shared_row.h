// SPDX-License-Identifier: Apache-2.0
// SharedRow: decides when the owner of a row may reuse it while other processes (readers) read it. Two words
// in shared memory: the row's version, which only the owner writes, and its pins, one bit per reader.
//
//   owner   withdraw: version = 0, THEN read the pins; the row may be reused once no pin is set
//   reader  pin:      set the own bit, THEN read the version; the pin holds if the version is the expected
//   one
//
// Each side writes before it reads the other's word, and all four accesses are sequentially consistent. So at
// least one side sees the other: a row is never both reused and pinned. (With weaker orders both could miss
// the other's store, which is still in a store buffer.) A version is used once, so a row that was reused
// meanwhile never passes for the expected one. No side ever waits for the other.
//
// An owner may die between any two accesses. The next one withdraws every row first, whatever its version is,
// so it is an owner like any other: it reuses a row only after it has read its pins.
//
// shared_row_model_test.cc checks all interleavings, with store buffers.
//
// Private to memory/ and its tests. Word: std::atomic<std::uint64_t>, or a test's stepping replacement.
#pragma once

#include <atomic>
#include <cstdint>

namespace kv_offload {

// Bit r of the pins: reader r holds the row. The last bit: a reader has used the row (see take_use).
inline constexpr unsigned kMostReaders = 63;
inline constexpr std::uint64_t kUsedByReader = std::uint64_t{1} << kMostReaders;
inline constexpr std::uint64_t kReaderBits = kUsedByReader - 1;
// Of the region's file: locked by the scheduler of the owner, see ByteLock. Readers lock those before it.
inline constexpr unsigned kOwnerByte = kMostReaders;

template <typename Word>
struct SharedRow {
  Word& version;  // 0: not published
  Word& pins;

  // ---- owner
  // REQUIRES: the row's bytes are complete, the row is withdrawn and not pinned; `next` was never used.
  void publish(std::uint64_t next) { version.store(next, std::memory_order_release); }
  // No reader gets the row any more. True if it may be reused now; otherwise as soon as is_pinned() is false.
  bool withdraw() {
    version.store(0, std::memory_order_seq_cst);
    return !is_pinned();
  }
  bool is_pinned() const { return (pins.load(std::memory_order_seq_cst) & kReaderBits) != 0; }
  // True if a reader has used the row since the last call.
  bool take_use() {
    if ((pins.load(std::memory_order_relaxed) & kUsedByReader) == 0) return false;
    pins.fetch_and(~kUsedByReader, std::memory_order_relaxed);
    return true;
  }

  // ---- reader
  // True if the row still has the version `expected`. Its bytes then stay unchanged until unpin(). REQUIRES:
  // this reader has not pinned the row.
  bool pin(unsigned reader, std::uint64_t expected) {
    pins.fetch_or(std::uint64_t{1} << reader, std::memory_order_seq_cst);
    if (version.load(std::memory_order_seq_cst) == expected) return true;
    unpin(reader);
    return false;
  }
  // REQUIRES: no process of this reader touches the row any more.
  void unpin(unsigned reader) { pins.fetch_and(~(std::uint64_t{1} << reader), std::memory_order_seq_cst); }
  void mark_used() { pins.fetch_or(kUsedByReader, std::memory_order_relaxed); }
};

}  // namespace kv_offload
