// SPDX-License-Identifier: Apache-2.0
#include "backends/fs/scanner.h"

#include <algorithm>
#include <cerrno>
#include <exception>
#include <functional>
#include <system_error>
#include <thread>

#include "backends/fs/layout.h"
#include "backends/fs/record_file.h"
#include "base/thread_annotations.h"

namespace kv_offload {
namespace {

constexpr std::size_t kScanThreads = 4;

// Runs `body` on up to `wanted` threads at once, including this one. Rethrows the first exception.
void by_threads(std::size_t wanted, const std::function<void()>& body) {
  wanted = std::min<std::size_t>({wanted, kScanThreads, std::thread::hardware_concurrency()});
  std::atomic<bool> threw{false};
  std::exception_ptr first;
  const auto contained = [&] {
    try {
      body();
    } catch (...) {
      if (!threw.exchange(true)) first = std::current_exception();
    }
  };
  std::vector<std::thread> threads;
  threads.reserve(kScanThreads);
  try {
    for (std::size_t i = 1; i < wanted; ++i) threads.emplace_back(contained);
  } catch (const std::system_error&) {  // cannot start more threads: continue with those that run
  }
  contained();
  for (std::thread& thread : threads) thread.join();
  if (first) std::rethrow_exception(first);
}

// True if the errno means that no record of ours is there, or that it may not be seen. It does not indicate a
// device failure.
bool is_no_record(int error) {
  return error == ENOENT || error == ESTALE || error == ENOTDIR || error == EACCES || error == ELOOP;
}

}  // namespace

void read_tenants(FileOps& ops, const FsEpoch& epoch, const RecordIndex& index,
                  std::span<FoundRecord> records, const std::atomic<bool>& stop) {
  for (FoundRecord& record : records) {
    if (stop.load()) return;
    RecordHeader header;
    FileInfo info;
    const std::string path = layout::record_path(record.key, record.file_bytes);
    if (!read_header(ops, epoch.directory.get(), path, &header, &info) || header.key != record.key) continue;
    record.size = info.size;
    record.disk_bytes = info.disk_bytes;
    if (!header.tenant.empty()) record.tenant = index.tenant_of(header.tenant);
  }
}

std::uint64_t forget_missing(FileOps& ops, const std::shared_ptr<FsEpoch>& epoch, RecordIndex& index,
                             std::vector<std::size_t> found, const std::vector<bool>& leaves,
                             std::vector<std::uint32_t>* uncertain, const std::atomic<bool>& stop) {
  std::sort(found.begin(), found.end());
  std::uint64_t forgotten = 0;
  FileInfo info;
  std::vector<FsCatalog::Record> known;
  known.reserve(RecordIndex::kRecordsPerLock);
  for (Slot next = 0; !stop.load() && index.known_from(epoch, &next, &known); known.clear()) {
    for (const FsCatalog::Record& record : known) {
      const std::uint32_t leaf = layout::leaf_of(record.key);
      if (!leaves[leaf] || std::binary_search(found.begin(), found.end(), ChunkKey::Hash{}(record.key))) {
        continue;
      }
      const std::string path = layout::record_path(record.key, record.file_bytes);
      const int rc = ops.stat(epoch->directory.get(), path, &info);
      if (rc < 0 && rc != -ENOENT && uncertain != nullptr) uncertain->push_back(leaf);
      if (rc != -ENOENT || !index.forget(record.key, epoch)) continue;
      ++forgotten;
      // It may have been written between the two calls. It stays reported (RecordIndex::take_removals).
      if (ops.stat(epoch->directory.get(), path, &info) != 0 || !info.is_regular()) continue;
      const FoundRecord again{record.key, record.file_bytes, info.disk_bytes, 0, info.size};
      index.adopt_names(epoch, {&again, 1}, true, stop);
    }
  }
  return forgotten;
}

Status Scanner::list(const std::shared_ptr<FsEpoch>& epoch, std::uint32_t leaf) {
  LeafFound found;
  Status status = scan_leaf(ops_, epoch->directory.get(), leaf, {.names_only = true}, &found);
  if (!status && !is_no_record(status.error_number())) return status;
  records_.adopt_names(epoch, found.records, false, stop_);
  records_.mark_listed(epoch, leaf);
  return Status::ok();
}

Status Scanner::find(const std::shared_ptr<FsEpoch>& epoch, std::span<const ChunkKey> keys, KeyOrder order,
                     std::size_t* looked_at) {
  const std::vector<std::uint64_t> file_bytes = records_.file_bytes_of(keys);
  std::vector<FoundRecord> found;
  Status first_failure;
  *looked_at = 0;
  for (std::size_t i = 0; i < keys.size() && !stop_.load(); ++i) {
    Status status;
    *looked_at = i + 1;
    if (file_bytes[i] == 0) {  // the name is unknown: list the directory
      status = list(epoch, layout::leaf_of(keys[i]));
      if (status) continue;
    } else {
      FileInfo info;
      const std::string path = layout::record_path(keys[i], file_bytes[i]);
      const int rc = stat_refreshed(ops_, epoch->directory.get(), layout::leaf_path(layout::leaf_of(keys[i])),
                                    path, &info);
      if (rc == 0 && info.is_regular()) {
        found.push_back({keys[i], file_bytes[i], info.disk_bytes, 0, info.size});
        continue;
      }
      if (rc < 0) status = Status::from_errno(-rc, "look for a record", epoch->path);
    }
    // A directory that timed out would time out for the other keys too.
    const bool ends = order == KeyOrder::kPrefix || status.kind() == StatusKind::kTimeout;
    if (!status && !is_no_record(status.error_number()) && first_failure) first_failure = std::move(status);
    if (ends) break;
  }
  if (records_.has_tenants()) read_tenants(ops_, *epoch, records_, found, stop_);
  records_.adopt_names(epoch, found, true, stop_);
  return first_failure;
}

// Shared state of one scan: a few threads take the leaves in turn.
struct Scanner::Scan {
  std::shared_ptr<FsEpoch> own;
  std::vector<std::uint32_t> leaves;
  LeafOptions options;
  std::atomic<std::size_t> next{0};
  std::atomic<bool> outdated{false};  // a reset happened meanwhile
  Mutex mutex;
  std::uint64_t counted GUARDED_BY(mutex) = 0;
  std::uint64_t settled_blocks GUARDED_BY(mutex) = 0, settled_sizes GUARDED_BY(mutex) = 0;
  std::uint64_t named GUARDED_BY(mutex) = 0, charged GUARDED_BY(mutex) = 0;  // sums over the records
  std::vector<FoundRecord> records GUARDED_BY(mutex);
};

bool Scanner::scan(const std::shared_ptr<FsEpoch>& epoch, const CountFor* count, std::uint64_t* counted,
                   Unseen* unseen, std::uint64_t* dropped) {
  Scan scan;
  scan.own = epoch;
  const int directory = epoch->directory.get();
  if (const Status listed = list_leaves(ops_, directory, &scan.leaves, counted); !listed) {
    unseen->add(listed.error_number());
    return true;
  }
  FileInfo info;
  if (ops_.fstat(directory, &info) == 0) *counted += info.disk_bytes;
  scan.options = {.count = count, .unseen = unseen};
  const bool first = records_.extent() != RecordIndex::Extent::kOrder;
  if (first) {  // lookups need to know soon which records exist; their order can wait
    by_threads(scan.leaves.size() / 16, [&] { list_leaves_of(scan); });
    scan.next.store(0);
    if (!stop_.load() && !unseen->any()) records_.raise_extent(epoch, RecordIndex::Extent::kNames);
  }
  by_threads(scan.leaves.size() / 16, [&] { scan_leaves_of(scan); });
  if (stop_.load()) return false;
  std::vector<FoundRecord> records;
  {
    const MutexLock lock(scan.mutex);
    *counted += scan.counted;
    records.swap(scan.records);
    root_.charges->learn(scan.settled_blocks, scan.settled_sizes);
    root_.charges->learn_stored(scan.named, scan.charged);
  }
  if (scan.outdated.load()) return true;
  if (dropped != nullptr) *dropped += drop_missing(scan, records);
  if (!first) records = unknown_records(scan, records);
  if (records_.has_tenants()) {
    read_tenants_of(scan, records);
    if (stop_.load()) return false;
  }
  std::vector<RecordIndex::LastUse> order(records.size());
  for (std::uint32_t i = 0; i < records.size(); ++i) order[i] = {records[i].mtime_nanos, i};
  std::sort(order.begin(), order.end());
  records_.adopt_in_order(epoch, records, order, first, stop_);
  records_.raise_extent(epoch, RecordIndex::Extent::kOrder);
  return true;
}

// All directories count as listed: a record in an unreadable one has a file, or its state is unknown.
std::uint64_t Scanner::drop_missing(const Scan& scan, const std::vector<FoundRecord>& found) {
  std::vector<std::size_t> hashes;
  hashes.reserve(found.size());
  for (const FoundRecord& record : found) hashes.push_back(ChunkKey::Hash{}(record.key));
  return forget_missing(ops_, scan.own, records_, std::move(hashes), std::vector<bool>(layout::kLeaves, true),
                        nullptr, stop_);
}

// Returns the found records that are unknown. They were evicted meanwhile, or another process wrote them;
// only those still on disk are kept.
std::vector<FoundRecord> Scanner::unknown_records(const Scan& scan, const std::vector<FoundRecord>& records) {
  std::vector<FoundRecord> unknown = records_.unknown_of(records);
  FileInfo info;
  std::erase_if(unknown, [&](const FoundRecord& record) {
    return ops_.stat(scan.own->directory.get(), layout::record_path(record.key, record.file_bytes), &info) !=
           0;
  });
  return unknown;
}

void Scanner::read_tenants_of(Scan& scan, std::vector<FoundRecord>& records) {
  constexpr std::size_t kPart = 256;  // records that a thread takes at once
  std::atomic<std::size_t> next{0};
  by_threads(records.size() / kPart, [&] {
    for (std::size_t at; (at = next.fetch_add(kPart)) < records.size();) {
      if (stop_.load() || scan.own != records_.epoch()) return;
      const std::size_t count = std::min(kPart, records.size() - at);
      read_tenants(ops_, *scan.own, records_, std::span(records).subspan(at, count), stop_);
    }
  });
}

void Scanner::list_leaves_of(Scan& scan) {
  for (std::size_t at; (at = scan.next.fetch_add(1)) < scan.leaves.size();) {
    if (stop_.load()) return;
    if (const Status status = list(scan.own, scan.leaves[at]); !status)
      scan.options.unseen->add(status.error_number());
  }
}

void Scanner::scan_leaves_of(Scan& scan) {
  std::uint64_t counted = 0, settled_blocks = 0, settled_sizes = 0, named = 0, charged = 0;
  std::vector<FoundRecord> records;
  for (std::size_t at; (at = scan.next.fetch_add(1)) < scan.leaves.size();) {
    if (stop_.load() || scan.outdated.load()) break;
    const std::uint32_t leaf = scan.leaves[at];
    LeafFound found;
    // An unreadable directory hides its records; the rest is served.
    (void)scan_leaf(ops_, scan.own->directory.get(), leaf, scan.options, &found);
    counted += found.other_bytes + found.directory_bytes;
    for (const FoundRecord& record : found.records) {
      named += record.file_bytes;
      charged += root_.charges->of(record.disk_bytes, record.size);
      const std::uint64_t whole = charged_bytes(0, record.size);
      if (record.disk_bytes < whole) continue;
      settled_blocks += record.disk_bytes;
      settled_sizes += whole;
    }
    records.insert(records.end(), found.records.begin(), found.records.end());
    (void)scan.own->leaves.update_size(leaf, found.directory_bytes);
    if (scan.own != records_.epoch()) scan.outdated.store(true);
  }
  const MutexLock lock(scan.mutex);
  scan.counted += counted + charged;
  scan.named += named;
  scan.charged += charged;
  scan.settled_blocks += settled_blocks;
  scan.settled_sizes += settled_sizes;
  scan.records.insert(scan.records.end(), records.begin(), records.end());
}

}  // namespace kv_offload
