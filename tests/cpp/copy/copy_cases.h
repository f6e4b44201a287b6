// SPDX-License-Identifier: Apache-2.0
// Random copy jobs over random layouts, and the plain reference for every copier: one block, one
// page, one byte at a time.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <random>
#include <span>
#include <vector>

#include "copy/copy_plan.h"

namespace kv_offload::testing {

struct CopyCase {
  std::vector<std::vector<std::byte>> caches;  // memory of the tensors, with a margin
  std::vector<std::byte> area;
  CacheLayout layout;
  CopyJob job;

  // Fills all memory with fresh noise, so that a byte that was not copied is detected.
  void fill(std::mt19937_64& random) {
    for (auto& cache : caches) fill(random, cache);
    fill(random, area);
  }
  static void fill(std::mt19937_64& random, std::vector<std::byte>& bytes) {
    for (std::size_t at = 0; at < bytes.size(); at += sizeof(std::uint64_t)) {
      const std::uint64_t noise = random();
      std::memcpy(bytes.data() + at, &noise, std::min(sizeof(noise), bytes.size() - at));
    }
  }
};

enum class IdOrder { kSorted, kReversed, kShuffled };

inline std::vector<std::int64_t> draw_ids(std::mt19937_64& random, std::uint64_t num_blocks,
                                          std::uint64_t count, IdOrder order) {
  std::vector<std::int64_t> ids(num_blocks);
  std::iota(ids.begin(), ids.end(), 0);
  const std::uint64_t start = random() % (num_blocks - count + 1);
  if (order == IdOrder::kShuffled) {
    std::shuffle(ids.begin(), ids.end(), random);
  } else if (order == IdOrder::kReversed) {
    std::reverse(ids.begin(), ids.end());
  }
  return {ids.begin() + static_cast<std::ptrdiff_t>(start),
          ids.begin() + static_cast<std::ptrdiff_t>(start + count)};
}

struct CaseLimits {
  std::uint64_t max_blocks = 24;    // per group
  std::uint64_t max_page = 700;     // bytes
  std::uint64_t page_multiple = 1;  // 16 matches a real cache
  bool whole_chunks_only = false;
  std::uint64_t max_shards = 4;  // per area; more than one in about half of the cases
};

inline CopyCase draw_case(std::mt19937_64& random, CopyDirection direction, const CaseLimits& limits = {}) {
  const auto pick = [&](std::uint64_t low, std::uint64_t high) { return low + random() % (high - low + 1); };
  CopyCase drawn;
  CacheLayout& layout = drawn.layout;
  layout.blocks_per_chunk = std::uint32_t{1} << pick(0, 2);
  const std::uint64_t num_blocks = pick(limits.max_blocks, limits.max_blocks * 2);
  const std::uint64_t num_tensors = pick(1, 5);
  layout.shards_per_area = static_cast<std::uint32_t>(pick(0, 1) == 0 ? 1 : pick(1, limits.max_shards));
  const std::uint64_t multiple = limits.page_multiple * layout.shards_per_area;
  std::vector<std::uint64_t> page_limit;
  for (std::uint64_t t = 0; t < num_tensors; ++t) {
    const std::uint64_t page = pick(1, std::max<std::uint64_t>(limits.max_page / multiple, 1)) * multiple;
    const std::uint64_t stride = page + (pick(0, 1) != 0 ? pick(0, 64) * limits.page_multiple : 0);
    const std::uint64_t margin = pick(0, 16) * limits.page_multiple;
    auto& memory = drawn.caches.emplace_back(margin + num_blocks * stride);
    layout.tensors.push_back({memory.data() + margin, num_blocks, stride});
    page_limit.push_back(page);
  }
  // Groups alias the tensors, as in a hybrid model.
  const std::uint64_t num_groups = pick(1, 3);
  for (std::uint64_t g = 0; g < num_groups; ++g) {
    auto& refs = layout.groups.emplace_back();
    std::vector<std::uint32_t> tensors(num_tensors);
    std::iota(tensors.begin(), tensors.end(), 0u);
    std::shuffle(tensors.begin(), tensors.end(), random);
    tensors.resize(pick(1, num_tensors));
    for (const std::uint32_t tensor : tensors) {
      const std::uint64_t page =
          pick(0, 3) == 0 ? pick(1, page_limit[tensor] / multiple) * multiple : page_limit[tensor];
      refs.push_back({tensor, page});
    }
  }

  CopyJob& job = drawn.job;
  job.id = random();
  job.ticket = 1 + random() % 1000;
  job.direction = direction;
  const std::uint64_t per_chunk = layout.blocks_per_chunk;
  std::vector<std::uint64_t> rows_pages;
  // Loads of two groups must not write one block twice: ids are drawn from one pool.
  const auto order = static_cast<IdOrder>(pick(0, 2));
  const std::vector<std::int64_t> pool = draw_ids(random, num_blocks, num_blocks, order);
  std::uint64_t next_in_pool = 0;
  for (std::uint64_t g = 0; g < num_groups; ++g) {
    const std::uint64_t budget = std::min(limits.max_blocks, num_blocks) / num_groups;
    std::uint64_t blocks = pick(0, budget);
    std::uint64_t first = pick(0, 40);
    if (direction == CopyDirection::kStore || limits.whole_chunks_only) {
      blocks = blocks / per_chunk * per_chunk;
      first = first / per_chunk * per_chunk;
    }
    const std::uint64_t rows = blocks == 0 ? 0 : (first % per_chunk + blocks + per_chunk - 1) / per_chunk;
    for (std::uint64_t i = 0; i < blocks; ++i) job.block_ids.push_back(pool[next_in_pool++]);
    job.group_sizes.push_back(static_cast<std::uint32_t>(blocks));
    job.block_indices.push_back(first);
    job.group_rows.push_back(static_cast<std::uint32_t>(rows));
    const std::uint64_t row_pages =
        round_up(layout.row_bytes(static_cast<std::uint32_t>(g)), kPageBytes) / kPageBytes;
    rows_pages.insert(rows_pages.end(), rows, row_pages);
  }
  // Row places: adjacent, with gaps, in any order.
  std::vector<std::size_t> places(rows_pages.size());
  std::iota(places.begin(), places.end(), 0u);
  if (pick(0, 1) != 0) std::shuffle(places.begin(), places.end(), random);
  job.rows.resize(rows_pages.size());
  std::uint64_t at = pick(0, 2);
  for (const std::size_t place : places) {
    job.rows[place] = static_cast<RowId>(at);
    at += rows_pages[place] + (pick(0, 3) == 0 ? pick(0, 2) : 0);
  }
  drawn.area.resize((at + 1) * kPageBytes);
  drawn.fill(random);
  return drawn;
}

// Deliberately scalar and slow; shares no code with make_copy_plan. Calls `visit` with (cache byte,
// row byte) for every byte of the job.
template <typename Visit>
void for_each_byte(const CacheLayout& layout, std::span<std::byte> area, const CopyJob& job, Visit visit) {
  std::size_t id_at = 0;
  std::size_t row_at = 0;
  for (std::size_t g = 0; g < layout.groups.size(); ++g) {
    std::uint64_t block_bytes = 0;
    for (const GroupRef& ref : layout.groups[g]) block_bytes += ref.page_bytes;
    for (std::uint64_t i = 0; i < job.group_sizes[g]; ++i) {
      const std::uint64_t logical = job.block_indices[g] + i;
      const std::uint64_t chunk =
          logical / layout.blocks_per_chunk - job.block_indices[g] / layout.blocks_per_chunk;
      std::byte* const row = area.data() + std::uint64_t{job.rows[row_at + chunk]} * 4096;
      const std::uint64_t shards = layout.shards_per_area;
      const std::uint64_t shard_of_block = block_bytes / shards;
      const std::uint64_t shard_pages = (layout.blocks_per_chunk * shard_of_block + 4095) / 4096;
      std::uint64_t before = 0;  // bytes of a shard in the previous refs
      for (const GroupRef& ref : layout.groups[g]) {
        const CacheTensor& tensor = layout.tensors[ref.tensor];
        std::byte* page =
            tensor.base + static_cast<std::uint64_t>(job.block_ids[id_at + i]) * tensor.block_stride;
        const std::uint64_t part = ref.page_bytes / shards;
        for (std::uint64_t b = 0; b < ref.page_bytes; ++b) {
          visit(page + b, row + b / part * shard_pages * 4096 +
                              logical % layout.blocks_per_chunk * shard_of_block + before + b % part);
        }
        before += part;
      }
    }
    id_at += job.group_sizes[g];
    row_at += job.group_rows[g];
  }
}

// The expected memory after the job. Deep copies; `c` keeps its addresses.
struct Expected {
  std::vector<std::vector<std::byte>> caches;
  std::vector<std::byte> area;
  bool operator==(const Expected&) const = default;
};

inline Expected snapshot(const CopyCase& c) { return {c.caches, c.area}; }

// Runs the reference on the case's own memory, takes a snapshot, and restores the memory.
inline Expected expected_after(CopyCase& c) {
  const Expected before = snapshot(c);
  for_each_byte(c.layout, c.area, c.job, [&](std::byte* cache, std::byte* row) {
    if (c.job.direction == CopyDirection::kStore) {
      *row = *cache;
    } else {
      *cache = *row;
    }
  });
  Expected after = snapshot(c);
  for (std::size_t i = 0; i < c.caches.size(); ++i)
    std::copy(before.caches[i].begin(), before.caches[i].end(), c.caches[i].begin());
  std::copy(before.area.begin(), before.area.end(), c.area.begin());
  return after;
}

}  // namespace kv_offload::testing
