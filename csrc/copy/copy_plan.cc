// SPDX-License-Identifier: Apache-2.0
#include "copy/copy_plan.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "base/refused_chunks.h"

namespace kv_offload {
namespace {

// One row's part of a group: blocks [first_id, + num_blocks) of the job's block ids go to block `first_slot`
// of the row.
struct ChunkPart {
  std::uint64_t area_offset;  // of the row
  std::uint64_t first_id;     // index into block_ids
  std::uint32_t group;
  std::uint32_t first_slot;
  std::uint32_t num_blocks;
};

bool mul_overflows(std::uint64_t a, std::uint64_t b, std::uint64_t* product) {
  return __builtin_mul_overflow(a, b, product);
}

void check_page(std::size_t group, const CacheTensor& tensor, const GroupRef& ref) {
  if (ref.page_bytes == 0 || ref.page_bytes > tensor.block_stride) {
    throw_invalid("group {}: a page of {} bytes does not fit the block stride of {} bytes of tensor {}",
                  group, ref.page_bytes, tensor.block_stride, ref.tensor);
  }
}

template <typename Counts>
std::uint64_t sum(const Counts& counts) {
  return std::accumulate(counts.begin(), counts.end(), std::uint64_t{0});
}

void check_shape(const CacheLayout& layout, const CopyJob& job) {
  const std::size_t groups = layout.groups.size();
  if (job.group_sizes.size() != groups || job.block_indices.size() != groups ||
      job.group_rows.size() != groups) {
    throw_invalid("job {}: {} group sizes, {} block indices, {} row counts for {} groups", job.id,
                  job.group_sizes.size(), job.block_indices.size(), job.group_rows.size(), groups);
  }
  if (sum(job.group_sizes) != job.block_ids.size()) {
    throw_invalid("job {}: group sizes add up to {} but there are {} block ids", job.id, sum(job.group_sizes),
                  job.block_ids.size());
  }
  if (sum(job.group_rows) != job.rows.size()) {
    throw_invalid("job {}: row counts add up to {} but there are {} rows", job.id, sum(job.group_rows),
                  job.rows.size());
  }
}

void check_ids(const CacheLayout& layout, const CopyJob& job, std::size_t group,
               std::span<const std::int64_t> ids) {
  std::uint64_t limit = std::numeric_limits<std::int64_t>::max();
  for (const GroupRef& ref : layout.groups[group]) {
    limit = std::min(limit, layout.tensors[ref.tensor].num_blocks);
  }
  for (const std::int64_t id : ids) {
    if (id < 0 || static_cast<std::uint64_t>(id) >= limit) {
      throw_invalid("job {}: block id {} of group {} is outside 0..{}", job.id, id, group, limit - 1);
    }
  }
}

// Adds the parts of a store. vLLM lists the blocks of all chunks one after the other and omits blocks that it
// has dropped, without saying which. It does report the logical index of the first block that it lists. So
// the positions are known only if no block after that one is missing. The first chunk may lack its head,
// which a tail row does not store. Returns the refused chunks.
std::uint64_t split_store(const CacheLayout& layout, const CopyJob& job, std::uint32_t group,
                          std::uint64_t first_id, std::span<const RowId> rows,
                          std::vector<ChunkPart>* parts) {
  const std::uint64_t per_chunk = layout.blocks_per_chunk;
  const std::uint64_t blocks = job.group_sizes[group];
  if (blocks == 0 && rows.empty()) return 0;
  const std::uint64_t missing = job.block_indices[group] % per_chunk;
  if (blocks == 0 || blocks + missing != rows.size() * per_chunk) return refused_group(group);
  if (layout.groups[group].empty()) return 0;  // its layers are on other pipeline ranks, which decide

  const std::uint32_t kept = layout.kept_blocks(group);
  std::uint64_t refused = 0;
  std::uint64_t end = first_id;  // index after the last block of the row's chunk
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const std::uint64_t present = per_chunk - (i == 0 ? missing : 0);
    end += present;
    if (present < kept) {
      refused = refused_first(group);
      continue;
    }
    parts->push_back({std::uint64_t{rows[i]} * kPageBytes, end - kept, group, 0, kept});
  }
  return refused;
}

// Adds the parts of a load, which may start inside its first chunk and end inside its last. False if the
// blocks do not match the rows or ask for blocks that rows do not store.
bool split_load(const CacheLayout& layout, const CopyJob& job, std::uint32_t group, std::uint64_t first_id,
                std::span<const RowId> rows, std::vector<ChunkPart>* parts) {
  const std::uint64_t per_chunk = layout.blocks_per_chunk;
  const std::uint64_t blocks = job.group_sizes[group];
  const std::uint64_t skipped = blocks == 0 ? 0 : job.block_indices[group] % per_chunk;
  if ((blocks + skipped + per_chunk - 1) / per_chunk != rows.size()) return false;

  const std::uint64_t head = per_chunk - layout.kept_blocks(group);
  std::uint64_t left = blocks;
  std::uint64_t slot = skipped;
  for (const RowId row : rows) {
    if (slot < head) return false;
    const std::uint64_t count = std::min(left, per_chunk - slot);
    parts->push_back({std::uint64_t{row} * kPageBytes, first_id, group,
                      static_cast<std::uint32_t>(slot - head), static_cast<std::uint32_t>(count)});
    first_id += count;
    left -= count;
    slot = 0;
  }
  return true;
}

// Same for a state group: one block, the last of its chunk, fills a row. A store has no other blocks. A load
// may ask for more blocks of a chunk; these were never stored, and nothing reads them.
bool split_into_states(const CacheLayout& layout, const CopyJob& job, std::uint32_t group,
                       std::uint64_t first_id, std::span<const RowId> rows, std::vector<ChunkPart>* parts) {
  const std::uint64_t per_chunk = layout.blocks_per_chunk;
  const std::uint64_t blocks = job.group_sizes[group];
  if (blocks == 0 || rows.empty()) return blocks == rows.size();
  const std::uint64_t first = job.block_indices[group];
  const bool store = job.direction == CopyDirection::kStore;
  const std::uint64_t to_last =
      per_chunk - 1 - first % per_chunk;  // from the first block to the last block of its chunk
  const std::uint64_t step = store ? 1 : per_chunk;
  if (store && to_last != 0) return false;
  if (blocks != to_last + 1 + (rows.size() - 1) * step) return false;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    parts->push_back({std::uint64_t{rows[i]} * kPageBytes, first_id + to_last + i * step, group, 0, 1});
  }
  return true;
}

[[noreturn]] void refuse_load(const CacheLayout& layout, const CopyJob& job, std::uint32_t group) {
  throw_invalid(
      "job {}: {} blocks of group {} from logical block {} do not fit {} rows, which hold the last {} of {} "
      "blocks of a chunk",
      job.id, job.group_sizes[group], group, job.block_indices[group], job.group_rows[group],
      layout.kept_blocks(group), layout.blocks_per_chunk);
}

void append(CopyPlan* plan, const CopySegment& segment) {
  if (!plan->segments.empty()) {
    CopySegment& last = plan->segments.back();
    if (last.cache + last.bytes == segment.cache && last.area_offset + last.bytes == segment.area_offset) {
      last.bytes += segment.bytes;
      return;
    }
  }
  plan->segments.push_back(segment);
}

void emit(const CacheLayout& layout, const CopyJob& job, const ChunkPart& part, CopyPlan* plan) {
  const auto& refs = layout.groups[part.group];
  const std::uint64_t shards = layout.shards_per_area;
  const std::uint64_t block_bytes = layout.block_bytes(part.group);
  for (std::uint64_t shard = 0; shard < shards; ++shard) {
    std::uint64_t offset =
        part.area_offset + shard * layout.shard_stride(part.group) + part.first_slot * (block_bytes / shards);
    for (std::uint32_t i = 0; i < part.num_blocks; ++i) {
      const auto id = static_cast<std::uint64_t>(job.block_ids[part.first_id + i]);
      for (const GroupRef& ref : refs) {
        const CacheTensor& tensor = layout.tensors[ref.tensor];
        const std::uint64_t bytes = ref.page_bytes / shards;
        append(plan, {tensor.base + id * tensor.block_stride + shard * bytes, offset, bytes});
        offset += bytes;
      }
    }
  }
  plan->bytes += part.num_blocks * block_bytes;
}

void emit_by_pages(const CacheLayout& layout, const CopyJob& job, const ChunkPart& part, CopyPlan* plan) {
  const std::uint64_t shards = layout.shards_per_area;
  const std::uint64_t stride = layout.shard_stride(part.group);
  const std::uint64_t block_bytes = layout.block_bytes(part.group);
  std::uint64_t offset = part.area_offset + part.first_slot * (block_bytes / shards);
  for (std::uint32_t i = 0; i < part.num_blocks; ++i) {
    const auto id = static_cast<std::uint64_t>(job.block_ids[part.first_id + i]);
    for (const GroupRef& ref : layout.groups[part.group]) {
      const CacheTensor& tensor = layout.tensors[ref.tensor];
      const std::uint64_t bytes = ref.page_bytes / shards;
      for (std::uint64_t shard = 0; shard < shards; ++shard) {
        append(plan,
               {tensor.base + id * tensor.block_stride + shard * bytes, offset + shard * stride, bytes});
      }
      offset += bytes;
    }
  }
  plan->bytes += part.num_blocks * block_bytes;
}

// Rows may be in any order. Sorting chunks instead of segments keeps a plan of many small pages cheap.
void sort_by_row(const CacheLayout& layout, std::uint64_t area_bytes, const CopyJob& job,
                 std::vector<ChunkPart>* parts) {
  const auto by_offset = [](const ChunkPart& a, const ChunkPart& b) { return a.area_offset < b.area_offset; };
  if (!std::is_sorted(parts->begin(), parts->end(), by_offset)) {
    std::sort(parts->begin(), parts->end(), by_offset);
  }
  std::uint64_t end = 0;
  for (const ChunkPart& part : *parts) {
    const std::uint64_t bytes = layout.row_bytes(part.group);
    if (part.area_offset > area_bytes || bytes > area_bytes - part.area_offset) {
      throw_invalid("job {}: row {} of group {} ({} bytes) ends outside the area of {} bytes", job.id,
                    part.area_offset / kPageBytes, part.group, bytes, area_bytes);
    }
    if (part.area_offset < end) {
      throw_invalid("job {}: row {} of group {} overlaps another row of the job", job.id,
                    part.area_offset / kPageBytes, part.group);
    }
    end = part.area_offset + bytes;
  }
}

}  // namespace

std::uint64_t CacheLayout::block_bytes(std::uint32_t group) const {
  std::uint64_t bytes = 0;
  for (const GroupRef& ref : groups[group]) bytes += ref.page_bytes;
  return bytes;
}

std::uint64_t CacheLayout::shard_bytes(std::uint32_t group) const {
  return kept_blocks(group) * block_bytes(group) / shards_per_area;
}

void CacheLayout::validate() const {
  if (blocks_per_chunk == 0) throw_invalid("blocks_per_chunk is 0; it must be at least 1");
  if (shards_per_area == 0) throw_invalid("shards_per_area is 0; it must be at least 1");
  if (!holds_states.empty() && holds_states.size() != groups.size()) {
    throw_invalid("holds_states has {} entries for {} groups", holds_states.size(), groups.size());
  }
  if (groups.empty() || groups.size() > kMostGroups) {
    throw_invalid("{} groups; 1 to {} are possible", groups.size(), kMostGroups);
  }
  if (!tail_blocks.empty() && tail_blocks.size() != groups.size()) {
    throw_invalid("tail_blocks has {} entries for {} groups", tail_blocks.size(), groups.size());
  }
  // A state group stores one block per row, so it cannot store a tail.
  for (std::size_t g = 0; g < tail_blocks.size(); ++g) {
    if (tail_blocks[g] > blocks_per_chunk ||
        (tail_blocks[g] != 0 && is_state_group(static_cast<std::uint32_t>(g)))) {
      throw_invalid("group {}: rows cannot hold the last {} of {} blocks of a chunk", g, tail_blocks[g],
                    blocks_per_chunk);
    }
  }
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const CacheTensor& tensor = tensors[i];
    std::uint64_t bytes = 0;
    // Catch a missing tensor and an address range that overflows.
    if (tensor.base == nullptr || tensor.num_blocks == 0 ||
        mul_overflows(tensor.num_blocks, tensor.block_stride, &bytes)) {
      throw_invalid("tensor {}: base {}, {} blocks, stride {} do not describe a cache", i,
                    static_cast<const void*>(tensor.base), tensor.num_blocks, tensor.block_stride);
    }
  }
  for (std::size_t g = 0; g < groups.size(); ++g) {
    for (const GroupRef& ref : groups[g]) {
      if (ref.tensor >= tensors.size()) {
        throw_invalid("group {}: tensor {} of {} does not exist", g, ref.tensor, tensors.size());
      }
      check_page(g, tensors[ref.tensor], ref);
      // The canonical layout splits every page into equal shards.
      if (ref.page_bytes % shards_per_area != 0) {
        throw_invalid("group {}: a page of {} bytes cannot be split into {} equal shards", g, ref.page_bytes,
                      shards_per_area);
      }
    }
  }
}

CopyPlan make_copy_plan(const CacheLayout& layout, std::uint64_t area_bytes, const CopyJob& job,
                        CopyOrder order) {
  check_shape(layout, job);
  CopyPlan plan;
  std::vector<ChunkPart> parts;
  parts.reserve(job.rows.size());
  std::uint64_t first_id = 0;
  std::uint64_t first_row = 0;
  std::uint64_t most_segments = 0;
  for (std::uint32_t group = 0; group < layout.groups.size(); ++group) {
    const auto ids = std::span(job.block_ids).subspan(first_id, job.group_sizes[group]);
    const auto rows = std::span(job.rows).subspan(first_row, job.group_rows[group]);
    check_ids(layout, job, group, ids);
    const bool store = job.direction == CopyDirection::kStore;
    // A store refuses incomplete chunks; a load that does not fit is a caller error.
    if (store && !layout.is_state_group(group)) {
      plan.failed_groups |= split_store(layout, job, group, first_id, rows, &parts);
    } else {
      const auto split = layout.is_state_group(group) ? split_into_states : split_load;
      const bool fits = split(layout, job, group, first_id, rows, &parts);
      if (!fits && !store) refuse_load(layout, job, group);
      if (!fits) plan.failed_groups |= refused_group(group);
    }
    most_segments += ids.size() * layout.groups[group].size() * layout.shards_per_area;
    first_id += ids.size();
    first_row += rows.size();
  }
  sort_by_row(layout, area_bytes, job, &parts);
  plan.segments.reserve(most_segments);
  // Both orders are equal with one shard.
  const bool by_pages = order == CopyOrder::kPages && layout.shards_per_area > 1;
  for (const ChunkPart& part : parts) (by_pages ? emit_by_pages : emit)(layout, job, part, &plan);
  return plan;
}

}  // namespace kv_offload
