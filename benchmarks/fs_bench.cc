// SPDX-License-Identifier: Apache-2.0
// How fast are records written, read back from a cold cache, written into a full
// root, and found again at start? One JSON object per line on stdout. fs_bench.py
// compares it with fio, full_root.py compares `full` with `replace`.
//
//   fs_bench io ROOT RECORD_BYTES TOTAL_BYTES THREADS MEMORY
//   fs_bench full ROOT RECORD_BYTES TOTAL_BYTES THREADS MEMORY
//   fs_bench replace DIRECTORY RECORD_BYTES TOTAL_BYTES THREADS MEMORY
//   fs_bench start ROOT RECORDS
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "backends/fs/layout.h"
#include "backends/fs/tier.h"
#include "bench.h"

namespace kv_offload {
namespace {

using bench::key_of;
using bench::now;

constexpr std::uint64_t kWarmUp = 32;  // records

double seconds(const timeval& time) {
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) / 1e6;
}

// The CPU seconds of this process so far.
double cpu_seconds() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

[[noreturn]] void give_up(const std::string& what) {
  fmt::print(stderr, "{}\n", what);
  std::exit(1);
}

FsTierOptions options_for(const std::string& root) {
  FsTierOptions options;
  options.root_dir = root;
  options.max_bytes = std::uint64_t{1} << 40;
  options.namespace_json = "{}";
  options.op_timeout = std::chrono::minutes(10);  // a busy machine is not a broken device
  return options;
}

// Memory like that of a host region, and of vLLM's: a file in /dev/shm.
class Rows {
 public:
  // Has as many rows as fit into the file.
  Rows(const std::string& path, std::size_t bytes)
      : bytes_(bytes), size_(std::filesystem::file_size(path) / bytes * bytes) {
    const int fd = ::open(path.c_str(), O_RDWR);
    void* memory = ::mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    ::close(fd);
    memory_ = static_cast<std::byte*>(memory);
  }
  ~Rows() { ::munmap(memory_, size_); }
  Rows(const Rows&) = delete;
  Rows& operator=(const Rows&) = delete;
  std::size_t count() const { return size_ / bytes_; }
  Shard operator[](std::size_t row) const { return {memory_ + row * bytes_, bytes_}; }

 private:
  std::size_t bytes_, size_;
  std::byte* memory_ = nullptr;
};

// Transfers keys from `first` on in order, as many concurrently as there are rows.
double run(Tier& tier, OpKind kind, std::uint64_t first, std::uint64_t count, const Rows& rows) {
  std::vector<std::size_t> free_rows, row_of(count);
  for (std::size_t i = 0; i < rows.count(); ++i) free_rows.push_back(i);
  std::vector<Completion> completions;
  std::vector<TierRemoval> removals;
  std::uint64_t next = 0, ended = 0;
  const double started = now();
  while (ended < count) {
    std::vector<TierOp> ops;
    for (; next < count && !free_rows.empty(); ++next) {
      row_of[next] = free_rows.back();
      free_rows.pop_back();
      TierOp op;
      op.id = next;
      op.kind = kind;
      op.key = key_of(first + next);
      op.shards.push_back(rows[row_of[next]]);
      ops.push_back(std::move(op));
    }
    if (!ops.empty()) tier.submit(std::move(ops));
    completions.clear();
    tier.poll(&completions, &removals);
    for (const Completion& completion : completions) {
      if (!completion.status) give_up(completion.status.to_string());
      free_rows.push_back(row_of[completion.id]);
      ++ended;
    }
    if (completions.empty()) std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  return now() - started;
}

void bench_io(const std::string& root, std::uint64_t record, std::uint64_t total, unsigned threads,
              const std::string& memory) {
  if (threads < 2) {  // one of them must be able to write
    fmt::print(stderr, "{} threads were given; give at least 2\n", threads);
    std::exit(2);
  }
  FsTierOptions options = options_for(root);
  options.n_write_threads = threads;
  const Rows rows(memory, record);
  const std::uint64_t count = total / record;
  auto tier = make_fs_tier(options);
  // Creates the directories of the root and the buffers of the tier, which a root in use already has.
  std::uint64_t others = count;
  (void)run(*tier, OpKind::kWrite, others, std::uint64_t{8} * layout::kLeaves, Rows(memory, kPageBytes));
  others += std::uint64_t{8} * layout::kLeaves;
  (void)run(*tier, OpKind::kWrite, others, kWarmUp, rows);
  ::sync();
  const double write_seconds = run(*tier, OpKind::kWrite, 0, count, rows);
  // No byte may be read from memory.
  for (const auto& entry : std::filesystem::recursive_directory_iterator(root)) {
    if (!entry.is_regular_file()) continue;
    const int fd = ::open(entry.path().c_str(), O_RDONLY);
    ::posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    ::close(fd);
  }
  // Writer threads read too: together, the number of reads in flight. The tier has measurements, as in a
  // server.
  tier = nullptr;
  options.n_write_threads = 1;
  options.n_read_threads = threads - 1;
  tier = make_fs_tier(options);
  while (!tier->stats().scan_complete) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  (void)run(*tier, OpKind::kRead, others, kWarmUp, rows);
  const double read_seconds = run(*tier, OpKind::kRead, 0, count, rows);
  const TierStats stats = tier->stats();
  const auto bytes = static_cast<double>(count * record);
  fmt::print(
      "{{\"record_bytes\": {}, \"records\": {}, \"threads\": {}, \"write_bytes_per_second\": {:.0f}, "
      "\"read_bytes_per_second\": {:.0f}, \"direct_ops\": {}, \"buffered_ops\": {}}}\n",
      record, count, threads, bytes / write_seconds, bytes / read_seconds, stats.direct_ops,
      stats.buffered_ops);
}

void print_writes(std::uint64_t record, std::uint64_t count, double wall, double cpu) {
  fmt::print("{{\"records\": {}, \"write_bytes_per_second\": {:.0f}, \"cpu_seconds_per_record\": {:.9f}}}\n",
             count, static_cast<double>(count * record) / wall, cpu / static_cast<double>(count));
}

// Fills a root of TOTAL bytes, and then writes so much that all of its records are evicted.
void bench_full(const std::string& root, std::uint64_t record, std::uint64_t total, unsigned threads,
                const std::string& memory) {
  FsTierOptions options = options_for(root);
  options.max_bytes = total;
  options.n_write_threads = threads;
  const Rows rows(memory, record);
  auto tier = make_fs_tier(options);
  std::uint64_t written = 0;
  const auto until_evicted = [&](std::uint64_t bytes) {
    while (tier->stats().evicted_bytes < bytes) {
      const std::uint64_t some = rows.count() / 2;
      (void)run(*tier, OpKind::kWrite, written, some, rows);
      written += some;
    }
  };
  until_evicted(1);
  // As after a restart: the existing records have been counted.
  tier = nullptr;
  tier = make_fs_tier(options);
  while (!tier->stats().scan_complete) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  until_evicted(kWarmUp * record);
  ::sync();
  const std::uint64_t count = total / record, evicted = tier->stats().evicted_bytes;
  const double cpu_before = cpu_seconds();
  const double wall = run(*tier, OpKind::kWrite, written, count, rows);
  const double cpu = cpu_seconds() - cpu_before;
  if (tier->stats().evicted_bytes - evicted < (count - 1) * record) give_up("the root was not full");
  print_writes(record, count, wall, cpu);
}

// The same with plain calls and without a checksum: removes the oldest file, writes a new one and renames it.
void bench_replace(const std::string& directory, std::uint64_t record, std::uint64_t total, unsigned threads,
                   const std::string& memory) {
  const Rows rows(memory, record);
  const std::uint64_t count = total / record;
  for (std::uint32_t leaf = 0; leaf < layout::kLeaves; ++leaf)
    std::filesystem::create_directories(directory + "/" + layout::leaf_path(leaf));
  const auto path_of = [&](std::uint64_t number) {
    return directory + "/" + layout::record_path(key_of(number), record);
  };
  const auto write = [&](std::uint64_t number, bool replace, Shard row) {
    if (replace && ::unlink(path_of(number - count).c_str()) != 0) give_up("unlink failed");
    const std::string temporary = path_of(number) + ".tmp";
    const int fd = ::open(temporary.c_str(), O_CREAT | O_EXCL | O_WRONLY | O_DIRECT, 0600);
    if (fd < 0 || ::pwrite(fd, row.data(), record, 0) != static_cast<ssize_t>(record))
      give_up("write failed");
    ::close(fd);
    if (::rename(temporary.c_str(), path_of(number).c_str()) != 0) give_up("rename failed");
  };
  const auto all = [&](std::uint64_t first, bool replace) {
    std::atomic<std::uint64_t> next{0};
    std::vector<std::thread> workers;
    for (unsigned worker = 0; worker < threads; ++worker) {
      workers.emplace_back([&, worker] {
        std::size_t turn = 0;  // through its share of the rows
        for (std::uint64_t at; (at = next.fetch_add(1)) < count;)
          write(first + at, replace, rows[(turn++ * threads + worker) % rows.count()]);
      });
    }
    for (std::thread& worker : workers) worker.join();
  };
  all(0, false);
  ::sync();
  const double cpu_before = cpu_seconds(), started = now();
  all(count, true);
  print_writes(record, count, now() - started, cpu_seconds() - cpu_before);
}

// Header-sized files with the names of records: a start reads only these.
void make_records(const std::string& root, std::uint64_t count) {
  { const auto tier = make_fs_tier(options_for(root)); }
  const std::string epoch = root + "/" + std::string(64, '0') + "/g1/";
  for (std::uint64_t number = 0; number < count; ++number) {
    const std::string path = epoch + layout::record_path(key_of(number), 4096);
    int fd = ::open(path.c_str(), O_CREAT | O_WRONLY, 0600);
    if (fd < 0) {
      const std::uint32_t leaf = layout::leaf_of(key_of(number));
      ::mkdir((epoch + layout::leaf_path(leaf)).c_str(), 0700);
      fd = ::open(path.c_str(), O_CREAT | O_WRONLY, 0600);
    }
    if (fd < 0) std::exit(1);
    ::close(fd);
  }
}

void bench_start(const std::string& root, std::uint64_t count) {
  make_records(root, count);
  const double cpu_before = cpu_seconds();
  const double started = now();
  const auto tier = make_fs_tier(options_for(root));
  const double opened = now();
  const ChunkKey last = key_of(count - 1);
  Presence presence = Presence::kUnknown;
  std::vector<Completion> completions;
  std::vector<TierRemoval> removals;
  tier->prefetch_presence({last}, KeyOrder::kNone);
  do {
    std::this_thread::yield();
    presence = tier->contains(last);
  } while (presence == Presence::kUnknown || presence == Presence::kLookupPending);
  const double answered = now();
  while (!tier->stats().names_complete) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  const double complete = now();
  while (!tier->stats().scan_complete) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  const double ordered = now();
  const std::uint64_t chunks = tier->stats().chunks;
  const double cpu = cpu_seconds() - cpu_before;
  const double lookups_started = now();
  std::uint64_t present = 0;
  constexpr std::uint64_t kLookups = 4096;
  for (std::uint64_t i = 0; i < kLookups; ++i)
    present += tier->contains(key_of(i * 7 % count)) == Presence::kPresent;
  const double lookups = now() - lookups_started;
  fmt::print(
      "{{\"records\": {}, \"found\": {}, \"open_seconds\": {:.4f}, \"first_lookup_seconds\": {:.4f}, "
      "\"first_lookup_hit\": {}, \"complete_seconds\": {:.3f}, \"ordered_seconds\": {:.3f}, \"cpu_seconds\": "
      "{:.3f}, "
      "\"lookup_4096_seconds\": {:.6f}, "
      "\"lookups_hit\": {}}}\n",
      count, chunks, opened - started, answered - opened, presence == Presence::kPresent, complete - started,
      ordered - started, cpu, lookups, present);
}

}  // namespace
}  // namespace kv_offload

int main(int argc, char** argv) {
  const std::vector<std::string> args(argv + 1, argv + argc);
  using Bench = void (*)(const std::string&, std::uint64_t, std::uint64_t, unsigned, const std::string&);
  const std::map<std::string, Bench> benches = {
      {"io", kv_offload::bench_io}, {"full", kv_offload::bench_full}, {"replace", kv_offload::bench_replace}};
  if (args.size() == 6 && benches.contains(args[0])) {
    benches.at(args[0])(args[1], std::stoull(args[2]), std::stoull(args[3]),
                        static_cast<unsigned>(std::stoul(args[4])), args[5]);
    return 0;
  }
  if (args.size() == 3 && args[0] == "start") {
    kv_offload::bench_start(args[1], std::stoull(args[2]));
    return 0;
  }
  fmt::print(stderr,
             "usage: fs_bench io|full|replace ROOT RECORD_BYTES TOTAL_BYTES THREADS MEMORY\n"
             "       fs_bench start ROOT RECORDS\n");
  return 2;
}
