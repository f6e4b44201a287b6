// SPDX-License-Identifier: Apache-2.0
#include <chrono>
#include <filesystem>
#include <fstream>
#include <thread>

#include "backends/fs/root.h"
#include "backends/fs/tier.h"
#include "base/aligned_buffer.h"

namespace kv_offload {
namespace {

constexpr std::size_t kInFlight = 8;

// Runs `count` ops of this kind, kInFlight at a time. Returns the seconds that they took.
double run(Tier& tier, OpKind kind, std::uint64_t count, const std::vector<AlignedBuffer>& rows) {
  const auto started = std::chrono::steady_clock::now();
  std::uint64_t next = 0, ended = 0;
  std::vector<std::size_t> free_rows;
  for (std::size_t i = 0; i < rows.size(); ++i) free_rows.push_back(i);
  std::vector<std::size_t> row_of(count);
  std::vector<Completion> completions;
  std::vector<TierRemoval> removals;
  while (ended < count) {
    std::vector<TierOp> ops;
    for (; next < count && !free_rows.empty(); ++next) {
      row_of[next] = free_rows.back();
      free_rows.pop_back();
      const AlignedBuffer& row = rows[row_of[next]];
      TierOp op;
      op.id = next;
      op.kind = kind;
      // Keys spread over the leaf directories like real digests.
      const std::uint64_t bits[4] = {(next + 1) * 0x9E3779B97F4A7C15ull, next, 0, 0};
      op.key = ChunkKey::unchecked(reinterpret_cast<const char*>(bits), sizeof(bits));
      op.shards.push_back(row.span());
      ops.push_back(std::move(op));
    }
    if (!ops.empty()) tier.submit(std::move(ops));
    completions.clear();
    tier.poll(&completions, &removals);
    for (const Completion& completion : completions) {
      if (!completion.status) throw_resource("the disk probe failed: {}", completion.status.to_string());
      free_rows.push_back(row_of[completion.id]);
      ++ended;
    }
    if (completions.empty()) std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
}

}  // namespace

DiskProbe probe_disk(const std::string& directory, std::uint64_t total_bytes, std::uint64_t record_bytes) {
  if (record_bytes == 0 || record_bytes % kPageBytes != 0 || total_bytes < record_bytes) {
    throw_invalid(
        "invalid disk probe of {} bytes in records of {} bytes: a record is one or more whole 4 KiB pages",
        total_bytes, record_bytes);
  }
  struct Removed {
    std::filesystem::path path;
    ~Removed() {
      std::error_code ignored;
      std::filesystem::remove_all(path, ignored);
    }
  };
  const Removed root{
      std::filesystem::path(directory) /
      fmt::format(".kv_offload_probe_{}", std::chrono::steady_clock::now().time_since_epoch().count())};
  FsTierOptions options;
  options.root_dir = root.path.string();
  options.max_bytes = total_bytes * 2 + (std::uint64_t{64} << 20);
  const std::uint64_t count = total_bytes / record_bytes;
  std::vector<AlignedBuffer> rows;
  for (std::size_t i = 0; i < kInFlight; ++i) rows.emplace_back(record_bytes);
  const std::unique_ptr<Tier> tier = make_fs_tier(options);
  DiskProbe probe;
  const auto bytes = static_cast<double>(count * record_bytes);
  probe.write_bytes_per_second = bytes / run(*tier, OpKind::kWrite, count, rows);
  probe.read_bytes_per_second = bytes / run(*tier, OpKind::kRead, count, rows);
  probe.o_direct = tier->stats().buffered_ops == 0;
  return probe;
}

}  // namespace kv_offload
