// SPDX-License-Identifier: Apache-2.0
// A full directory of several owners: the cost of a write, and the remaining prompts of the other owners.
// Prints one JSON object per line. root_owners.py runs it several times, for two builds in turns.
//
//   root_owners dead DIRECTORY LEAVES FILES RECORD_BYTES WRITES BATCHES
//     Two full roots with FILES records in each of LEAVES leaf directories. In one they are our own, in the
//     other those of a namespace that no server has open. Writes go to both by turns, on this thread; a line
//     for each batch of WRITES and root. "unqueued" is wall time without the time in which the thread waited
//     for a core: what the write takes on a machine with an idle core.
//   root_owners models DIRECTORY SECONDS MAX_BYTES RECORD_BYTES PER_SECOND PROMPT
//     Two servers with different models on one root of MAX_BYTES. The first fills it, then both write prompts
//     of PROMPT chunks, PER_SECOND chunks a second. A third one is alone on a root of half the size, as the
//     baseline. A line for each sample and server: the records on disk, and how many of them can be loaded,
//     as no chunk before them is missing. The clock is simulated: a second passes after the writes of a
//     second.
//
// DIRECTORY is made and removed. The records of `dead` are not written, only allocated.
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_set>
#include <utility>
#include <vector>

#include "backends/fs/file_ops.h"
#include "backends/fs/layout.h"
#include "backends/fs/store.h"
#include "backends/fs/tier.h"
#include "base/aligned_buffer.h"
#include "bench.h"
#include "tier/io_pool.h"

namespace kv_offload::bench {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void give_up(const std::string& what) {
  fmt::print(stderr, "{}\n", what);
  std::exit(1);
}
void pause_for(double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }
void wait_until(const char* what, const std::function<bool()>& condition) {
  for (const double deadline = now() + 300; !condition(); pause_for(0.01)) {
    if (now() > deadline) give_up(fmt::format("{}: not within 300 s", what));
  }
}
double thread_seconds() {
  timespec time{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) / 1e9;
}
// The time that this thread has waited for a core so far. Opened once, because procfs is slow.
double queued_seconds() {
  static const int file = ::open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
  char text[128] = {};
  std::uint64_t ran = 0, waited = 0;
  if (::pread(file, text, sizeof(text) - 1, 0) <= 0 ||
      std::sscanf(text, "%" SCNu64 " %" SCNu64, &ran, &waited) != 2) {
    give_up("/proc/thread-self/schedstat cannot be read");
  }
  return static_cast<double>(waited) / 1e9;
}
std::uint64_t disk_bytes(const std::string& path) {
  struct ::stat info;
  return ::lstat(path.c_str(), &info) == 0 ? static_cast<std::uint64_t>(info.st_blocks) * 512 : 0;
}
// Calls visit(path) for each entry below a root. No process writes there meanwhile.
void walk(const std::string& root, const std::function<void(const fs::path&)>& visit) {
  std::error_code error;
  for (fs::recursive_directory_iterator it(root, error), end; !error && it != end; it.increment(error)) {
    visit(it->path());
  }
}
std::uint64_t du(const std::string& root) {
  std::uint64_t bytes = disk_bytes(root);
  walk(root, [&](const fs::path& path) { bytes += disk_bytes(path.string()); });
  return bytes;
}

FsTierOptions options_for(const std::string& root, std::uint64_t max_bytes, std::uint8_t model) {
  FsTierOptions options;
  options.root_dir = root;
  options.max_bytes = max_bytes;
  options.namespace_id.fill(model);
  options.namespace_json = "{}";
  options.eviction_policy = "prefix";
  options.op_timeout = std::chrono::minutes(10);  // a busy machine is not a broken device
  return options;
}

// Seconds of one write.
struct Cost {
  double cpu = 0, wall = 0, unqueued = 0;
};

// A tier, and one record of it at a time, written by the thread that calls.
class Writer {
 public:
  Writer(FsTierOptions options, std::uint64_t record_bytes) : row_(record_bytes) {
    options.manual_pool = &pool_;
    tier_ = make_fs_tier(options);
  }
  Tier& tier() { return *tier_; }
  // Returns ok, or that the write was declined because it would evict a chunk of its own prompt.
  bool write(const ChunkKey& key, const EntryInfo& entry_info, Cost* cost = nullptr) {
    TierOp op;
    op.id = ++last_op_;
    op.kind = OpKind::kWrite;
    op.key = key;
    op.entry_info = entry_info;
    op.may_decline = true;
    op.shards = {Shard(row_.data(), row_.size())};
    std::vector<TierOp> ops;
    ops.push_back(std::move(op));
    tier_->submit(std::move(ops));
    const std::function<void()> run = pool_->begin_next(Lane::kWrite);
    const double queued = queued_seconds(), began = now(), cpu_began = thread_seconds();
    if (run) run();
    const double cpu = thread_seconds() - cpu_began, wall = now() - began;
    if (cost != nullptr) *cost = {cpu, wall, wall - (queued_seconds() - queued)};
    std::vector<Completion> done;
    std::vector<TierRemoval> removals;
    for (;; pause_for(20e-6)) {
      tier_->poll(&done, &removals);
      if (done.empty()) continue;
      const Status& status = done.front().status;
      return status.is_ok() || status.kind() == StatusKind::kDeclined;
    }
  }

 private:
  AlignedBuffer row_;
  IoPool* pool_ = nullptr;
  std::unique_ptr<Tier> tier_;
  OpId last_op_ = 0;
};

// ---- dead

constexpr std::uint8_t kOurs = 0x11, kDead = 0x22;

struct ModelsOptions {
  std::uint64_t seconds = 0, max_bytes = 0, record_bytes = 0;
  std::uint64_t per_second = 0;  // chunks that each server writes
  std::uint64_t prompt = 0;      // chunks of a prompt
};
struct DeadOptions {
  std::uint32_t leaves = 0, files = 0;
  std::uint64_t record_bytes = 0;
};

// Keys that fall into the first leaves, in a fixed order.
class Keys {
 public:
  explicit Keys(std::uint32_t leaves) : leaves_(leaves) {}
  ChunkKey next() {
    for (;;) {
      const ChunkKey key = key_of(number_++);
      if (layout::leaf_of(key) < leaves_) return key;
    }
  }

 private:
  const std::uint32_t leaves_;
  std::uint64_t number_ = 0;
};

class FullRoot {
 public:
  FullRoot(const std::string& root, std::uint8_t owner, const DeadOptions& options)
      : name_(owner == kOurs ? "own" : "dead"), keys_(options.leaves) {
    fill(root, owner, options);
    // The ledger does not know these files: the next server counts them.
    fs::remove(root + "/" + std::string(layout::kLedgerFile));
    const std::uint64_t full = du(root);
    writer_ = std::make_unique<Writer>(options_for(root, full + (1 << 20), kOurs), options.record_bytes);
    wait_until("scan", [&] {
      std::vector<Completion> done;
      std::vector<TierRemoval> removals;
      writer_->tier().poll(&done, &removals);
      const TierStats stats = writer_->tier().stats();
      return stats.scan_complete && stats.bytes + (4 << 20) > full;
    });
    for (int i = 0; i < 300; ++i) (void)write_next(nullptr);  // until each write evicts
  }
  bool write_next(Cost* cost) {
    EntryInfo entry_info;
    entry_info.request = ++request_;
    return writer_->write(keys_.next(), entry_info, cost);
  }
  const char* name() const { return name_; }
  std::uint64_t evicted_bytes() const { return writer_->tier().stats().evicted_bytes; }

 private:
  void fill(const std::string& root, std::uint8_t owner, const DeadOptions& options) {
    {
      Writer writer(options_for(root, std::uint64_t{1} << 40, owner), options.record_bytes);
      if (!writer.write(keys_.next(), {})) give_up("the first record was not written");
    }
    fs::path first;
    walk(root, [&](const fs::path& path) {
      if (layout::parse_record(path.filename().string())) first = path;
    });
    const std::uint64_t file_bytes = layout::parse_record(first.filename().string())->file_bytes;
    const std::string epoch = first.parent_path().parent_path().string();
    for (std::uint32_t leaf = 0; leaf < options.leaves; ++leaf)
      ::mkdir((epoch + "/" + layout::leaf_path(leaf)).c_str(), 0700);
    for (std::uint64_t i = 0; i < std::uint64_t{options.leaves} * options.files; ++i) {
      const std::string path = epoch + "/" + layout::record_path(keys_.next(), file_bytes);
      const int file = ::open(path.c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
      if (file < 0 || ::posix_fallocate(file, 0, static_cast<off_t>(file_bytes)) != 0)
        give_up(path + " could not be made");
      ::close(file);
    }
  }

  const char* const name_;
  Keys keys_;
  std::unique_ptr<Writer> writer_;
  std::uint32_t request_ = 0;
};

double mean(const std::vector<double>& values) {
  double sum = 0;
  for (const double value : values) sum += value;
  return sum / static_cast<double>(values.size());
}

void measure_dead(const std::string& directory, const DeadOptions& options, int writes, int batches) {
  fs::create_directories(directory);
  FullRoot own(directory + "/own", kOurs, options), dead(directory + "/dead", kDead, options);
  for (int batch = 0; batch < batches; ++batch) {
    struct Samples {
      FullRoot& root;
      std::vector<double> cpu{}, wall{}, unqueued{};
      int refused = 0;
    } samples[] = {{own}, {dead}};
    const std::uint64_t before[] = {own.evicted_bytes(), dead.evicted_bytes()};
    for (int i = 0; i < writes; ++i) {
      for (Samples& of : samples) {
        Cost cost;
        of.refused += !of.root.write_next(&cost);
        of.cpu.push_back(cost.cpu);
        of.wall.push_back(cost.wall);
        of.unqueued.push_back(cost.unqueued);
      }
    }
    for (Samples& of : samples) {
      std::sort(of.wall.begin(), of.wall.end());
      const double evicted = static_cast<double>(of.root.evicted_bytes() - before[&of - samples]);
      fmt::print(
          "{{\"root\": \"{}\", \"mean_cpu_ms\": {:.4f}, \"median_cpu_ms\": {:.4f}, \"mean_ms\": {:.4f}, "
          "\"median_ms\": {:.4f}, \"p99_ms\": {:.4f}, \"most_ms\": {:.4f}, \"mean_unqueued_ms\": {:.4f}, "
          "\"median_unqueued_ms\": {:.4f}, \"refused\": {}, \"evicted_bytes_per_write\": {:.0f}}}\n",
          of.root.name(), mean(of.cpu) * 1e3, median(of.cpu) * 1e3, mean(of.wall) * 1e3,
          median(of.wall) * 1e3, of.wall[of.wall.size() * 99 / 100] * 1e3, of.wall.back() * 1e3,
          mean(of.unqueued) * 1e3, median(of.unqueued) * 1e3, of.refused, evicted / writes);
      std::fflush(stdout);
    }
  }
}

// ---- models

constexpr std::uint8_t kModels[] = {0x11, 0x22, 0x33};  // the last one is alone
constexpr const char* kNames[] = {"first", "second", "alone"};

// A server without threads: the benchmark calls its writes and ticks, so the result does not depend on the
// load of the machine.
class Server {
 public:
  Server(std::size_t index, const std::string& root, std::uint64_t max_bytes, std::uint64_t share,
         const ModelsOptions& models, const Clock& clock)
      : index_(index),
        share_(share),
        models_(models),
        options_(options_for(root, max_bytes, kModels[index])),
        row_(models.record_bytes),
        store_(options_, posix_file_ops(), clock) {
    store_.start();
    store_.maintain();
  }
  ~Server() { store_.close(); }
  void tick() { store_.maintain(); }
  void write() {
    const std::uint64_t number = chunks_++;
    TierOp op;
    op.kind = OpKind::kWrite;
    op.key = key(number);
    op.entry_info.request = static_cast<std::uint32_t>(number / models_.prompt + 1);
    op.entry_info.depth = static_cast<std::uint32_t>(number % models_.prompt + 1);
    if (op.entry_info.depth > 1) op.entry_info.parent = chunk_id(key(number - 1));
    op.may_decline = true;
    op.shards = {Shard(row_.data(), row_.size())};
    std::uint64_t moved = 0;
    const Status status = store_.write(op, store_.epoch(), &moved);
    refused_ += !status.is_ok() && status.kind() != StatusKind::kDeclined;
  }
  bool has_written(std::uint64_t bytes) const { return chunks_ * models_.record_bytes > bytes; }
  // The records on disk.
  void print(std::uint64_t second) const {
    NamespaceId id;
    id.fill(kModels[index_]);
    std::unordered_set<std::string> held;
    std::uint64_t bytes = 0, usable = 0;
    walk(options_.root_dir + "/" + layout::namespace_name(id), [&](const fs::path& path) {
      const auto record = layout::parse_record(path.filename().string());
      if (!record) return;
      bytes += disk_bytes(path.string());
      held.insert(record->key.hex());
    });
    for (std::uint64_t first = 0; first < chunks_; first += models_.prompt) {
      std::uint64_t chunk = first;
      while (chunk < first + models_.prompt && held.contains(key(chunk).hex())) ++chunk;
      usable += chunk - first;
    }
    fmt::print(
        "{{\"second\": {}, \"server\": \"{}\", \"chunks\": {}, \"refused\": {}, \"records\": {}, \"usable\": "
        "{}, "
        "\"bytes\": {}, \"share_bytes\": {}, \"root_bytes\": {}, \"max_bytes\": {}}}\n",
        second, kNames[index_], chunks_, refused_, held.size(), usable, bytes, share_, du(options_.root_dir),
        options_.max_bytes);
    std::fflush(stdout);
  }

 private:
  ChunkKey key(std::uint64_t number) const {
    return key_of(static_cast<std::uint64_t>(index_) << 40 | number);
  }

  const std::size_t index_;
  const std::uint64_t share_;
  const ModelsOptions models_;
  const FsTierOptions options_;
  AlignedBuffer row_;
  FsStore store_;
  std::uint64_t chunks_ = 0, refused_ = 0;
};

void measure_models(const std::string& directory, const ModelsOptions& options) {
  constexpr std::uint64_t kSampleEvery = 20;  // seconds
  fs::create_directories(directory);
  FakeClock clock;
  const std::string shared = directory + "/shared";
  const std::uint64_t share = options.max_bytes / 2;
  std::vector<std::unique_ptr<Server>> servers;
  servers.push_back(std::make_unique<Server>(0, shared, options.max_bytes, share, options, clock));
  const auto pass_second = [&] {
    for (const auto& server : servers) {
      for (std::uint64_t i = 0; i < options.per_second; ++i) server->write();
    }
    for (const auto& server : servers) server->tick();
    clock.advance(std::chrono::seconds(1));
  };
  while (!servers[0]->has_written(options.max_bytes * 5 / 4)) pass_second();
  servers[0]->print(0);
  servers.push_back(std::make_unique<Server>(1, shared, options.max_bytes, share, options, clock));
  servers.push_back(std::make_unique<Server>(2, directory + "/alone", share, share, options, clock));
  for (std::uint64_t second = 1; second <= options.seconds; ++second) {
    pass_second();
    if (second % kSampleEvery != 0) continue;
    for (const auto& server : servers) server->print(second);
  }
}

}  // namespace
}  // namespace kv_offload::bench

int main(int argc, char** argv) {
  using namespace kv_offload::bench;
  const std::string_view command = argc > 2 ? argv[1] : "";
  const auto number = [&](int at) { return std::strtoull(argv[at], nullptr, 10); };
  if (command == "dead" && argc == 8) {
    measure_dead(argv[2],
                 {static_cast<std::uint32_t>(number(3)), static_cast<std::uint32_t>(number(4)), number(5)},
                 static_cast<int>(number(6)), static_cast<int>(number(7)));
  } else if (command == "models" && argc == 8) {
    measure_models(argv[2], {number(3), number(4), number(5), number(6), number(7)});
  } else {
    fmt::print(stderr,
               "usage: {0} dead DIRECTORY LEAVES FILES RECORD_BYTES WRITES BATCHES\n"
               "       {0} models DIRECTORY SECONDS MAX_BYTES RECORD_BYTES PER_SECOND PROMPT\n",
               argv[0]);
    return 2;
  }
  std::filesystem::remove_all(argv[2]);
}
