// SPDX-License-Identifier: Apache-2.0
// RecordOp: the record that an operation reads or writes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/types.h"

namespace kv_offload {

enum class OpKind : std::uint8_t {
  kRead,
  kWrite,
  kRemove,  // removes the record, if there is one; has no shards. Only for stores with RecordStore::remove
};

struct RecordOp {
  ChunkKey key;
  std::uint32_t group = 0;  // position of the cache group, stored in the record and checked
  // The chunk's shards: one or more per area with bytes, page-aligned. The record's payload is their
  // concatenation, each padded to 4 KiB. The bytes from the end of a shard to the next 4 KiB boundary are
  // part of the row: a write zeroes them, a read fills them. Read: the shards are filled and verified before
  // the op completes ok; they hold garbage on failure. An op that is stuck in the kernel does NOT complete
  // until the kernel releases the memory, regardless of its deadline. It never completes if the tier was
  // closed meanwhile. The op owns the row until it completes.
  std::vector<Shard> shards;
  // Write only: the single shard is a whole record (header page and padded stored bytes, whole_record.h) of
  // this key, and is stored unchanged. The caller has verified it.
  bool is_whole_record = false;
  // Write only: the name of the tenant that is charged, which is stored in the record; empty: none. A whole
  // record keeps the name that it has.
  std::string tenant{};
  // Write only: the number of the key that encrypts the record, in a tier with encryption keys.
  std::size_t encryption_key = 0;
};

}  // namespace kv_offload
