#include <fcntl.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <functional>
#include <system_error>
#include <thread>

#include "storage/fs/layout.h"
#include "storage/fs/store.h"

namespace kv_offload {
namespace {
constexpr std::size_t kScanThreads = 4;
constexpr std::size_t kInsertsPerLock = 1024;  // the scheduler thread waits for no more

// Runs `body` on up to `wanted` threads at once, this one among them.
void by_threads(std::size_t wanted, const std::function<void()>& body) {
  wanted = std::min<std::size_t>({wanted, kScanThreads, std::thread::hardware_concurrency()});
  std::vector<std::thread> threads;
  try {
    for (std::size_t i = 1; i < wanted; ++i) threads.emplace_back(body);
  } catch (const std::system_error&) {  // no thread to be had: alone, then
  }
  body();
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

Status FsStore::locate(std::span<const ChunkKey> keys, const EpochPtr& epoch, std::vector<bool>* present) {
  for (const ChunkKey& key : keys) {
    if (Status status = list_leaf(layout::leaf_of(key)); !status) return status;
  }
  const Nanos now = clock_.now();
  const MutexLock lock(mutex_);
  if (epoch != generation_) return was_reset();
  for (std::size_t i = 0; i < keys.size(); ++i) (*present)[i] = catalogue_.offers(keys[i], now);
  return Status::ok();
}

Status FsStore::list_leaf(std::uint32_t leaf) {
  const std::shared_ptr<Generation> own = generation();
  LeafFound found;
  Status status;
  if (own) status = scan_leaf(ops_, own->directory.get(), leaf, {.names_only = true}, &found);
  adopt_names(own, found.records, false);
  const MutexLock lock(mutex_);
  leaf_states_[leaf] = LeafState::kKnown;  // also after a failure: a miss, not a loop
  return status;
}

void FsStore::start() {
  if (open_.fresh) return;
  SpaceFigures figures;
  (void)open_.space->look(clock_.now(), &figures);
  {
    const MutexLock lock(mutex_);
    sharers_ = figures.sharers;
  }
  std::uint64_t ignored = 0;
  // Alone, nobody waits for it: what the dead left is found and swept.
  if (figures.alone || figures.state == SpaceState::kUncounted) {
    count_root(figures);
  } else if (scan_own(nullptr, &ignored)) {
    known_.store(Known::kOrder);
  }
  const std::shared_ptr<Generation> own = generation();
  if (own && !stop_.load()) reclaim_unused_generations(*own);
}

// One scan's shared work: leaves are taken in turn by a few threads.
struct FsStore::Scan {
  std::shared_ptr<Generation> own;
  std::vector<std::uint32_t> leaves;
  LeafOptions options;
  std::atomic<std::size_t> next{0};
  std::atomic<bool> outdated{false};  // reset meanwhile
  bool first = false;                 // the catalogue is not complete yet
  Mutex mutex;
  std::uint64_t counted GUARDED_BY(mutex) = 0;
  std::vector<FoundRecord> records GUARDED_BY(mutex);
};

bool FsStore::scan_own(const CountFor* count, std::uint64_t* counted) {
  Scan scan;
  scan.own = generation();
  if (!scan.own) return true;
  const int directory = scan.own->directory.get();
  if (!list_leaves(ops_, directory, &scan.leaves, counted)) return true;
  FileInfo info;
  if (ops_.fstat(directory, &info) == 0) *counted += info.disk_bytes;
  scan.options = {.count = count};
  scan.first = known_.load() != Known::kOrder;
  if (scan.first) {  // who asks has to know soon what is there; how old it is can wait
    by_threads(scan.leaves.size() / 16, [&] { name_leaves(scan); });
    scan.next.store(0);
    const MutexLock lock(mutex_);
    if (!stop_.load() && scan.own == generation_) known_.store(Known::kNames);
  }
  by_threads(scan.leaves.size() / 16, [&] { scan_leaves(scan); });
  if (stop_.load()) return false;
  std::vector<FoundRecord> records;
  {
    const MutexLock lock(scan.mutex);
    *counted += scan.counted;
    records.swap(scan.records);
  }
  if (scan.outdated.load()) return true;
  if (!scan.first) drop_vanished(scan, &records);
  adopt(scan, std::move(records));
  return true;
}

// What is not known now though it was found was evicted meanwhile, or is another's.
void FsStore::drop_vanished(const Scan& scan, std::vector<FoundRecord>* records) {
  std::vector<FoundRecord> unknown;
  for (std::size_t next = 0; next < records->size();) {
    const MutexLock lock(mutex_);
    const std::size_t end = std::min(next + kInsertsPerLock, records->size());
    for (; next < end; ++next) {
      if (!catalogue_.holds((*records)[next].key)) unknown.push_back((*records)[next]);
    }
  }
  FileInfo info;
  std::erase_if(unknown, [&](const FoundRecord& record) {
    return ops_.stat(scan.own->directory.get(), layout::record_path(record.key, record.file_bytes), &info) !=
           0;
  });
  *records = std::move(unknown);
}

void FsStore::name_leaves(Scan& scan) {
  for (std::size_t at; (at = scan.next.fetch_add(1)) < scan.leaves.size();) {
    if (stop_.load()) return;
    (void)list_leaf(scan.leaves[at]);
  }
}

void FsStore::scan_leaves(Scan& scan) {
  std::uint64_t counted = 0;
  std::vector<FoundRecord> records;
  for (std::size_t at; (at = scan.next.fetch_add(1)) < scan.leaves.size();) {
    if (stop_.load() || scan.outdated.load()) break;
    const std::uint32_t leaf = scan.leaves[at];
    LeafFound found;
    // An unreadable directory hides its records; the rest is served.
    (void)scan_leaf(ops_, scan.own->directory.get(), leaf, scan.options, &found);
    counted += found.other_bytes + found.directory_bytes;
    for (const FoundRecord& record : found.records) counted += record.disk_bytes;
    records.insert(records.end(), found.records.begin(), found.records.end());
    const MutexLock lock(mutex_);
    if (scan.own != generation_) {
      scan.outdated.store(true);
      break;
    }
    leaf_bytes_[leaf] = static_cast<std::uint32_t>(found.directory_bytes);
  }
  const MutexLock lock(scan.mutex);
  scan.counted += counted;
  scan.records.insert(scan.records.end(), records.begin(), records.end());
}

void FsStore::adopt(const Scan& scan, std::vector<FoundRecord> records) {
  std::vector<std::pair<std::int64_t, std::uint32_t>> order(records.size());
  for (std::uint32_t i = 0; i < records.size(); ++i) order[i] = {records[i].mtime_nanos, i};
  std::sort(order.begin(), order.end());
  std::vector<ChunkKey> used;  // since the start: more recent than all that was there before
  std::size_t next = 0;
  while (next < order.size() && !stop_.load()) {
    const MutexLock lock(mutex_);
    if (scan.own != generation_) return;
    if (next == 0) catalogue_.reserve(records.size());
    const std::size_t end = std::min(next + kInsertsPerLock, order.size());
    for (; next < end; ++next) {
      const FoundRecord& record = records[order[next].second];
      if (!catalogue_.insert_in_order({record.key, record.file_bytes}) && scan.first)
        used.push_back(record.key);
    }
  }
  const MutexLock lock(mutex_);
  for (const ChunkKey& key : used) catalogue_.touch(key, clock_.now());
}

// Names without times. in_order: they are more recent than what is known; else the scan tells.
void FsStore::adopt_names(const std::shared_ptr<Generation>& generation,
                          const std::vector<FoundRecord>& records, bool in_order) {
  std::size_t next = 0;
  while (next < records.size() && !stop_.load()) {
    const MutexLock lock(mutex_);
    if (generation != generation_) return;
    const std::size_t end = std::min(next + kInsertsPerLock, records.size());
    for (; next < end; ++next) {
      const FsCatalogue::Record record{records[next].key, records[next].file_bytes};
      if (in_order) {
        catalogue_.insert(record, {});
      } else {
        catalogue_.insert_unordered(record);
      }
    }
  }
}

void FsStore::maintain() {
  if (stop_.load()) return write_back_touches();
  keep_generation();
  look_at_space();
  bool write_back = false;
  {
    const MutexLock lock(mutex_);
    const Nanos now = clock_.now();
    write_back = now - last_write_back_ >= FsCatalogue::kTouchEvery;
    if (write_back) last_write_back_ = now;
  }
  if (write_back) write_back_touches();
}

// A process that shares the namespace may have been reset, which says nothing of our weights: we keep the
// generation that we have until we are reset ourselves, for what is in a newer one is of other weights than
// ours, and what we would write there of other weights than theirs.
void FsStore::keep_generation() {
  std::vector<std::uint64_t> numbers;
  std::shared_ptr<Generation> own = generation();
  if (!own || !list_generations(ops_, open_.namespace_directory.get(), &numbers)) return;
  if (!std::binary_search(numbers.begin(), numbers.end(), own->number)) {
    drop_generation();  // it was removed, by hand or by a host that does not see our lock
    if (!begin_epoch()) return;
    own = generation();
    numbers.clear();
    if (!own || !list_generations(ops_, open_.namespace_directory.get(), &numbers)) return;
  }
  // Who was reset itself shares nothing with others either, but needs nobody to tell it.
  apart_.store(!was_reset_.load() && !numbers.empty() && numbers.back() > own->number);
  if (numbers.size() > 1) reclaim_unused_generations(*own);
}

Status FsStore::begin_epoch() {
  const std::string path = open_.path + "/" + open_.namespace_name;
  const MutexLock making(generation_mutex_);
  int rc = -EBUSY;
  for (int attempt = 0; attempt < 100; ++attempt) {
    std::vector<std::uint64_t> numbers;
    if (Status status = list_generations(ops_, open_.namespace_directory.get(), &numbers); !status)
      return status;
    std::uint64_t number = 0;
    {
      const MutexLock lock(mutex_);
      if (generation_) return Status::ok();
      number = std::max(least_generation_, numbers.empty() ? 1 : numbers.back() + 1);
    }
    std::shared_ptr<Generation> made;
    const bool by_reset = was_reset_.load();
    rc = open_generation(ops_, open_.namespace_directory.get(), path, number,
                         by_reset ? Generate::kByReset : Generate::kAtStart, &made);
    if (rc == -EEXIST || rc == -ENOENT) continue;  // another process resets too
    if (rc < 0) break;
    FileInfo info;
    if (ops_.fstat(made->directory.get(), &info) == 0) {
      open_.space->add(info.disk_bytes);
    }
    if (set_generation(std::move(made), by_reset)) return Status::ok();
    rc = -EBUSY;
  }
  return Status::error(rc == -ENOSPC || rc == -EDQUOT ? StatusKind::kNoSpace : StatusKind::kIo,
                       Status::from_errno(-rc, "make the next generation").message(), -rc, path);
}

void FsStore::write_back_touches() {
  std::vector<FsCatalogue::Record> records;
  std::shared_ptr<Generation> own;
  {
    const MutexLock lock(mutex_);
    own = generation_;
    records = catalogue_.take_touched();
  }
  if (!own) return;
  // One nanosecond apart, so that their order survives too.
  std::int64_t nanos =
      std::chrono::duration_cast<Nanos>(std::chrono::system_clock::now().time_since_epoch()).count() -
      static_cast<std::int64_t>(records.size());
  for (const FsCatalogue::Record& record : records) {
    // Best effort: a lost touch costs a place in the order, nothing else.
    (void)ops_.set_mtime(own->directory.get(), layout::record_path(record.key, record.file_bytes), nanos++);
  }
}

}  // namespace kv_offload
