// SPDX-License-Identifier: Apache-2.0
// CopyPlan: converts block ids and rows to merged byte segments. All functions here are pure.
//
// A job names, per group position, block ids (in request order), the logical index of the first block, and
// one row per chunk. A row stores this rank's bytes of a chunk block-major: block b of the chunk is at b *
// block_bytes(g) and contains the group's refs in order, page_bytes each. In a state group (a Mamba cache in
// vLLM's mode "align"), a block contains the state after its last token. vLLM keeps and offers only the last
// block of a chunk, so the row stores that block alone.
//
// If the window of a sliding-window group is shorter than a chunk, a row stores only the last tail_blocks
// blocks of the chunk. vLLM leaves the leading blocks of such a chunk out of a store whenever its own prefix
// cache had them. Each load ends where a chunk ends, so it reads the tail alone. A row has no place for the
// head: all writers of a key then write the same bytes, and a load that asks for the head is refused instead
// of reading bytes that were never stored.
//
// In the canonical layout every page consists of `shards_per_area` equal parts: the KV heads of this rank,
// one or several per part. The row stores part by part: part s of all blocks, block-major as above, starts at
// s * shard_stride(g). The concatenated rows of all ranks are then the same for every number of ranks.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"
#include "base/types.h"

namespace kv_offload {

struct CacheTensor {
  std::byte* base = nullptr;  // host or device address of block 0
  std::uint64_t num_blocks = 0;
  std::uint64_t block_stride = 0;  // bytes between blocks, >= every page in a block
};
struct GroupRef {
  std::uint32_t tensor = 0;
  std::uint64_t page_bytes = 0;  // unpadded bytes of one block in that tensor
};
struct CacheLayout {
  std::vector<CacheTensor> tensors;
  std::vector<std::vector<GroupRef>> groups;  // by position
  std::uint32_t blocks_per_chunk = 1;
  std::vector<bool> holds_states{};   // by position; empty = no state groups
  std::uint32_t shards_per_area = 1;  // > 1: canonical layout with this many shards per row
  // By position; 0 = a row stores all blocks of a chunk. Empty = all groups do.
  std::vector<std::uint32_t> tail_blocks{};

  bool is_state_group(std::uint32_t group) const { return !holds_states.empty() && holds_states[group]; }
  // Returns how many blocks of a chunk a row of this group stores: always the last ones.
  std::uint32_t kept_blocks(std::uint32_t group) const {
    if (is_state_group(group)) return 1;
    return tail_blocks.empty() || tail_blocks[group] == 0 ? blocks_per_chunk : tail_blocks[group];
  }
  std::uint64_t block_bytes(std::uint32_t group) const;  // sum of the refs' pages
  // Returns the unpadded bytes of a shard: its part of the blocks that a row stores.
  std::uint64_t shard_bytes(std::uint32_t group) const;
  // Returns the distance between the shards of a row, in bytes.
  std::uint64_t shard_stride(std::uint32_t group) const { return round_up(shard_bytes(group), kPageBytes); }
  std::uint64_t row_bytes(std::uint32_t group) const {  // up to the end of the last shard
    return (shards_per_area - 1) * shard_stride(group) + shard_bytes(group);
  }
  // Throws InvalidArgument with the cause (tensor index, page > stride, ...).
  void validate() const;
};

enum class CopyDirection : std::uint8_t { kStore /* cache -> row */, kLoad /* row -> cache */ };

struct CopyJob {
  std::uint64_t id = 0;  // vLLM's job id
  Ticket ticket = kNoTicket;
  CopyDirection direction = CopyDirection::kStore;
  bool expedited = false;
  // The stream that wrote or still reads the blocks (a CUstream as a number; 0 = the device's default
  // stream). Not needed for host memory copies.
  std::uintptr_t compute_stream = 0;
  std::vector<std::int64_t> block_ids{};       // concatenated by group
  std::vector<std::uint32_t> group_sizes{};    // blocks per group position
  std::vector<std::uint64_t> block_indices{};  // logical index of each group's first block
  std::vector<RowId> rows{};                   // concatenated by group
  std::vector<std::uint32_t> group_rows{};     // rows per group position
};

// One contiguous copy: cache byte address <-> offset in this rank's area.
struct CopySegment {
  std::byte* cache = nullptr;
  std::uint64_t area_offset = 0;
  std::uint64_t bytes = 0;
};

struct CopyPlan {
  std::vector<CopySegment> segments;  // in CopyOrder; runs adjacent on BOTH sides are merged
  std::uint64_t bytes = 0;
  // Chunks of a store whose blocks are incomplete, as bits (refused_group, refused_first). Nothing is copied
  // for them, and they must never become a hit.
  std::uint64_t failed_groups = 0;
};

// Both orders are equal without the canonical layout.
enum class CopyOrder : std::uint8_t {
  kArea,   // by area offset
  kPages,  // rows by area offset; in a row page by page, for long contiguous reads of the cache
};

// Throws InvalidArgument for jobs that vLLM never sends (block id out of range, row outside the area,
// contradictory sizes): a caller error.
CopyPlan make_copy_plan(const CacheLayout& layout, std::uint64_t area_bytes, const CopyJob& job,
                        CopyOrder order = CopyOrder::kArea);

}  // namespace kv_offload
