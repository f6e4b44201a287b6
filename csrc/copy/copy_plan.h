// CopyPlan: from block ids and rows to merged byte segments.
//
// A job names, per group position: block ids (in request order), the logical
// index of the first block, and one row per chunk. A row holds a chunk's bytes
// of this rank block-major: block b of the chunk at b * block_bytes(g), inside
// it the group's refs in order, page_bytes each. Of a group of states (a Mamba
// cache in vLLM's mode "align") a block holds what its last token left, and vLLM
// keeps and offers only a chunk's last block: its row holds that block alone.
//
// A row of a sliding-window group whose window is shorter than a chunk holds the last
// tail_blocks blocks of the chunk and nothing else. vLLM leaves the leading blocks of
// such a chunk out of a store whenever its own prefix cache held them, and each load
// ends where a chunk ends, so it reads the tail alone. The head has no place in a row:
// all writers of a key write the same bytes, and a load that asks for the head is
// refused instead of reading bytes that were never stored.
//
// In the canonical layout every page is `shards_per_area` equal parts, the KV heads
// that this rank has or several of them together, and the row holds part by part:
// part s of all blocks, block-major as above, from s * shard_stride(g) on. Then the
// rows of all ranks, one after the other, are the same for every number of ranks.
// Everything here is pure.
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
  std::uint64_t block_stride = 0;  // bytes from block to block, >= every page in it
};
struct GroupRef {
  std::uint32_t tensor = 0;
  std::uint64_t page_bytes = 0;  // unpadded bytes of one block in that tensor
};
struct CacheLayout {
  std::vector<CacheTensor> tensors;
  std::vector<std::vector<GroupRef>> groups;  // by position
  std::uint32_t blocks_per_chunk = 1;
  std::vector<bool> holds_states{};   // by position; empty: no group does
  std::uint32_t shards_per_area = 1;  // > 1: the canonical layout with so many in a row
  // By position; 0: a row holds all blocks of a chunk. Empty: that is so in all groups.
  std::vector<std::uint32_t> tail_blocks{};

  bool is_states(std::uint32_t group) const { return !holds_states.empty() && holds_states[group]; }
  // Blocks of a chunk that a row of this group holds: always the chunk's last ones.
  std::uint32_t kept_blocks(std::uint32_t group) const {
    if (is_states(group)) return 1;
    return tail_blocks.empty() || tail_blocks[group] == 0 ? blocks_per_chunk : tail_blocks[group];
  }
  std::uint64_t block_bytes(std::uint32_t group) const;  // sum of the refs' pages
  // Unpadded bytes of a shard: its part of the blocks that a row holds.
  std::uint64_t shard_bytes(std::uint32_t group) const;
  // From one shard of a row to the next.
  std::uint64_t shard_stride(std::uint32_t group) const { return round_up(shard_bytes(group), kPageBytes); }
  std::uint64_t row_bytes(std::uint32_t group) const {  // to the end of the last shard
    return (shards_per_area - 1) * shard_stride(group) + shard_bytes(group);
  }
  // Throws InvalidArgument naming what is wrong (tensor index, page > stride, ...).
  void validate() const;
};

enum class CopyDirection : std::uint8_t { kStore /* cache -> row */, kLoad /* row -> cache */ };

struct CopyJob {
  std::uint64_t id = 0;  // vLLM's job id
  Ticket ticket = kNoTicket;
  CopyDirection direction = CopyDirection::kStore;
  bool expedited = false;
  // The stream that wrote or still reads the blocks (a CUstream as a number; 0 =
  // the device's default stream). Copies in host memory do not need it.
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
  std::vector<CopySegment> segments;  // in CopyOrder; runs adjacent on BOTH sides merged
  std::uint64_t bytes = 0;
  // Chunks of a store whose blocks are not all there, as bits (refused_group,
  // refused_first): nothing is copied for them and they must never become a hit.
  std::uint64_t failed_groups = 0;
};

// The same without the canonical layout.
enum class CopyOrder : std::uint8_t {
  kArea,   // by area offset
  kPages,  // rows by area offset, in a row page after page of the cache: whoever reads those reads long runs
};

// Throws InvalidArgument on what vLLM can never send (block id out of range,
// row outside the area, sizes that contradict each other): caller's mistake.
CopyPlan make_copy_plan(const CacheLayout& layout, std::uint64_t area_bytes, const CopyJob& job,
                        CopyOrder order = CopyOrder::kArea);

}  // namespace kv_offload
