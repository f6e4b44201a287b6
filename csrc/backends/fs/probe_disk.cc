// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>

#include <chrono>
#include <cstring>
#include <filesystem>
#include <optional>
#include <random>
#include <thread>

#include "backends/fs/layout.h"
#include "backends/fs/reclaim.h"
#include "backends/fs/root.h"
#include "backends/fs/space_ledger.h"
#include "backends/fs/tier.h"
#include "base/aligned_buffer.h"

namespace kv_offload {
namespace {

constexpr std::size_t kInFlight = 8;
constexpr std::chrono::seconds kCountWait{60};  // for the count of a root

using Rows = std::vector<AlignedBuffer>;

// Runs `count` ops of this kind from number `next` on, kInFlight at a time. Returns the first failure.
Status run(Tier& tier, OpKind kind, std::uint64_t next, std::uint64_t count, const Rows& rows) {
  const std::uint64_t first = next, end = next + count;
  std::uint64_t ended = 0;
  Status status;
  std::vector<std::size_t> free_rows;
  for (std::size_t i = 0; i < rows.size(); ++i) free_rows.push_back(i);
  std::vector<std::size_t> row_of(count);
  std::vector<Completion> completions;
  std::vector<TierRemoval> removals;
  while (ended < next - first || (status && next < end)) {
    std::vector<TierOp> ops;
    for (; status && next < end && !free_rows.empty(); ++next) {
      row_of[next - first] = free_rows.back();
      free_rows.pop_back();
      const AlignedBuffer& row = rows[row_of[next - first]];
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
      if (status && !completion.status) status = completion.status;
      free_rows.push_back(row_of[completion.id - first]);
      ++ended;
    }
    if (completions.empty()) std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  return status;
}

// Returns bytes per second; 0 if the records do not fit within the bound.
double speed_of(Tier& tier, OpKind kind, std::uint64_t count, const Rows& rows) {
  const auto started = std::chrono::steady_clock::now();
  const Status status = run(tier, kind, 0, count, rows);
  if (status.kind() == StatusKind::kNoSpace && status.error_number() == 0) return 0;
  if (!status) throw_resource("the disk probe failed: {}", status.to_string());
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - started;
  return static_cast<double>(count * rows.front().size()) / seconds.count();
}

void check_sizes(std::uint64_t total_bytes, std::uint64_t record_bytes) {
  if (record_bytes == 0 || record_bytes % kPageBytes != 0 || total_bytes < record_bytes) {
    throw_invalid(
        "invalid disk probe of {} bytes in records of {} bytes: a record is one or more whole 4 KiB pages",
        total_bytes, record_bytes);
  }
}

std::optional<DiskProbe> probe(const FsTierOptions& options, std::uint64_t total_bytes,
                               std::uint64_t record_bytes) {
  const std::uint64_t count = total_bytes / record_bytes;
  Rows rows;
  for (std::size_t i = 0; i < kInFlight; ++i) rows.emplace_back(record_bytes);
  const std::unique_ptr<Tier> tier = make_fs_tier(options);
  // A root that was not counted since the machine started accepts no record before its count ends.
  const auto give_up = std::chrono::steady_clock::now() + kCountWait;
  while (run(*tier, OpKind::kWrite, count, 1, rows).kind() == StatusKind::kUnavailable) {
    if (std::chrono::steady_clock::now() >= give_up) return std::nullopt;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  DiskProbe probe;
  probe.write_bytes_per_second = speed_of(*tier, OpKind::kWrite, count, rows);
  if (probe.write_bytes_per_second == 0) return std::nullopt;
  probe.read_bytes_per_second = speed_of(*tier, OpKind::kRead, count, rows);
  probe.o_direct = tier->stats().buffered_ops == 0;
  return probe;
}

Fd open_directory(const std::string& path) {
  int error = 0;
  Fd directory = open_fd(posix_file_ops(), AT_FDCWD, path, O_RDONLY | O_DIRECTORY, 0, &error);
  if (!directory) throw_resource("cannot open {}: {}", path, std::strerror(error));
  return directory;
}

std::uint64_t random_number() {
  std::random_device random;
  return std::uint64_t{random()} << 32 | random();
}

}  // namespace

DiskProbe probe_disk(const std::string& directory, std::uint64_t total_bytes, std::uint64_t record_bytes) {
  check_sizes(total_bytes, record_bytes);
  remove_old_probes(posix_file_ops(), open_directory(directory).get(), [](std::uint64_t) {});
  struct Removed {
    std::filesystem::path path;
    ~Removed() {
      std::error_code ignored;
      std::filesystem::remove_all(path, ignored);
    }
  };
  const Removed root{std::filesystem::path(directory) /
                     fmt::format("{}{:016x}", layout::kProbePrefix, random_number())};
  FsTierOptions options;
  options.root_dir = root.path.string();
  options.max_bytes = total_bytes * 2 + (std::uint64_t{64} << 20);
  const std::optional<DiskProbe> found = probe(options, total_bytes, record_bytes);
  if (!found) throw_resource("the disk probe failed: its records do not fit in {}", directory);
  return *found;
}

std::optional<DiskProbe> probe_root(const std::string& root_dir, std::uint64_t max_bytes,
                                    std::uint64_t total_bytes, std::uint64_t record_bytes) {
  check_sizes(total_bytes, record_bytes);
  struct Removed {
    const std::string& path;
    ~Removed() {
      try {
        const Fd root = open_directory(path);
        SpaceLedger space(posix_file_ops(), root.get(), path);  // as the tier left it
        remove_old_probes(posix_file_ops(), root.get(),
                          [&](std::uint64_t bytes) { space.remove(bytes, space.finished()); });
      } catch (...) {  // no memory: the next start removes them
      }
    }
  };
  const Removed records{root_dir};
  FsTierOptions options;
  options.root_dir = root_dir;
  options.max_bytes = max_bytes;
  options.namespace_id = layout::probe_namespace(random_number());
  options.may_evict = false;
  return probe(options, total_bytes, record_bytes);
}

struct ReservedSpace::Impl {
  Impl(const std::string& path, std::uint64_t max_bytes)
      : root(open_directory(path)),
        space(posix_file_ops(), root.get(), path, max_bytes, random_number(), 0) {}
  ~Impl() {
    reservation.reset();
    space.close();
  }
  Fd root;
  SpaceLedger space;
  std::optional<Reservation> reservation;
};

ReservedSpace::ReservedSpace(const std::string& root_dir, std::uint64_t max_bytes, std::uint64_t bytes)
    : impl_(std::make_unique<Impl>(root_dir, max_bytes)) {
  std::uint64_t missing = 0;
  const Status status = impl_->reservation.emplace(impl_->space).grow_to(bytes, &missing);
  if (!status) throw_resource("no space for a measurement: {}", status.to_string());
}

ReservedSpace::~ReservedSpace() = default;

}  // namespace kv_offload
