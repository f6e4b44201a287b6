// SPDX-License-Identifier: Apache-2.0
// Shared by the benchmarks of remote tiers: compares a tier with its client library alone, in the same run.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "base/aligned_buffer.h"
#include "base/thread.h"
#include "bench.h"
#include "tier/tier.h"

namespace kv_offload::bench {

// Returns the number of threads that read in a tier with this number of reader threads and as many writer
// threads, which read too.
constexpr std::size_t readers(std::size_t threads) { return 2 * threads; }
// Lowers the priority of the thread, as a tier does for its writer threads. The library's threads need the
// same priorities: all of them when they write, and the second half of them when they read.
inline void give_way() { begin_thread("library", CpuShare::kBackground); }

struct Rates {
  double write = 0, read = 0;          // GB/s
  double write_cpu = 0, read_cpu = 0;  // seconds of this process, on all cores, per GB
};

// Returns the CPU time of all threads of this process, including ended ones, except the calling thread, which
// only polls.
inline double cpu_seconds() {
  const auto used = [](clockid_t by) {
    timespec time{};
    clock_gettime(by, &time);
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) / 1e9;
  };
  return used(CLOCK_PROCESS_CPUTIME_ID) - used(CLOCK_THREAD_CPUTIME_ID);
}

[[noreturn]] inline void refused(const Status& status) {
  std::fprintf(stderr, "the tier was refused: %s\n", status.to_string().c_str());
  std::exit(1);
}

// Runs `begin(thread)`, then `work(thread, record)` for each remaining record, on this number of threads.
// Returns seconds.
template <typename Begin, typename Work>
double timed(std::size_t threads, std::size_t records, Begin begin, Work work) {
  const double start = now();
  std::vector<std::thread> running;
  std::atomic<std::size_t> next{0};
  for (std::size_t t = 0; t < threads; ++t) {
    running.emplace_back([&, t] {
      begin(t);
      for (std::size_t record = 0; (record = next.fetch_add(1)) < records;) work(t, record);
    });
  }
  for (std::thread& thread : running) thread.join();
  return now() - start;
}

// Runs the library on this number of threads, with the priorities of a tier: all writers, and half of the
// readers, have a low one. Calls `work(thread, record)`. Returns seconds.
template <typename Work>
double timed_writes(std::size_t threads, std::size_t records, Work work) {
  return timed(
      threads, records, [](std::size_t) { give_way(); }, work);
}
template <typename Work>
double timed_reads(std::size_t threads, std::size_t records, Work work) {
  const auto begin = [=](std::size_t thread) {
    if (thread >= threads) give_way();
  };
  return timed(readers(threads), records, begin, work);
}

// Writes or reads all records, as many concurrently as there are rows. Their keys begin at `first`. Returns
// GB/s.
inline double pass(Tier& tier, OpKind kind, std::vector<AlignedBuffer>& rows, std::size_t bytes,
                   std::size_t records, std::size_t first = 0) {
  const double start = now();
  std::vector<Completion> done;
  std::vector<TierRemoval> removals;
  std::size_t submitted = 0;
  std::vector<std::size_t> free_rows;
  for (std::size_t i = 0; i < rows.size(); ++i) free_rows.push_back(i);
  std::vector<std::size_t> row_of(records);
  for (std::size_t ended = 0; ended < records;) {
    while (submitted < records && !free_rows.empty()) {
      row_of[submitted] = free_rows.back();
      free_rows.pop_back();
      std::vector<TierOp> ops(1);
      ops[0].id = submitted + 1;
      ops[0].kind = kind;
      ops[0].key = key_of(first + submitted);
      ops[0].shards = {rows[row_of[submitted]].span().first(bytes)};
      tier.submit(std::move(ops));
      ++submitted;
    }
    done.clear();
    tier.poll(&done, &removals);
    for (const Completion& completion : done) {
      if (!completion.status) refused(completion.status);
      free_rows.push_back(row_of[completion.id - 1]);
      ++ended;
    }
    // The interval of an idle engine core of vLLM (v1/engine/core.py). More frequent polls would take a few
    // percent of two cores from the server.
    if (done.empty()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return static_cast<double>(bytes * records) / 1e9 / (now() - start);
}

// The number of records that an engine submits at once, those of a prompt. With fewer queued records than the
// threads complete between two polls, the polls would be measured.
constexpr std::size_t at_once(std::size_t threads) { return std::max<std::size_t>(2 * readers(threads), 32); }

// Rows for that number of records, or for all if there are fewer. The bytes cannot be compressed and are not
// text, because some stores compress such data.
inline std::vector<AlignedBuffer> rows_for(std::size_t threads, std::size_t bytes, std::size_t records) {
  std::vector<AlignedBuffer> rows;
  std::mt19937_64 numbers;
  for (std::size_t i = 0; i < std::min(at_once(threads), records); ++i) {
    rows.emplace_back(bytes);
    for (std::size_t at = 0; at + sizeof(std::uint64_t) <= bytes; at += sizeof(std::uint64_t)) {
      const std::uint64_t number = numbers();
      std::memcpy(rows.back().data() + at, &number, sizeof(number));
    }
  }
  return rows;
}

inline bool is_known(const Tier& tier, const ChunkKey& key) {
  const kv_offload::Presence presence = tier.contains(key);
  return presence != kv_offload::Presence::kUnknown && presence != kv_offload::Presence::kLookupPending;
}

inline Rates write_and_read(Tier& tier, std::size_t threads, std::size_t bytes, std::size_t records) {
  std::vector<AlignedBuffer> rows = rows_for(threads, bytes, records);
  // Like an engine when a prompt arrives.
  std::vector<ChunkKey> keys;
  for (std::size_t i = 0; i < records; ++i) keys.push_back(key_of(i));
  while (!is_known(tier, keys.back())) {
    tier.prefetch_presence(keys, KeyOrder::kPrefix);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  Rates rates;
  const double total = static_cast<double>(bytes * records) / 1e9, start = cpu_seconds();
  rates.write = pass(tier, OpKind::kWrite, rows, bytes, records);
  const double written = cpu_seconds();
  rates.read = pass(tier, OpKind::kRead, rows, bytes, records);
  rates.write_cpu = (written - start) / total;
  rates.read_cpu = (cpu_seconds() - written) / total;
  return rates;
}

inline std::vector<std::size_t> numbers(const std::string& text) {
  std::vector<std::size_t> values;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, ',');) values.push_back(std::stoul(part));
  return values;
}

struct Presence {
  double seconds = 0;  // until all results are known
  // CPU time of the scheduler's thread: one lookup of each key while it is unknown, their submission, and one
  // lookup of each key when all results are known.
  double unknown_seconds = 0, ask_seconds = 0, known_seconds = 0;
};

// Looks up the keys of a prompt once, like an engine for a new prompt.
inline Presence queue_lookup(Tier& tier, const std::vector<ChunkKey>& keys) {
  const auto used = [] {
    timespec time{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) / 1e9;
  };
  Presence spent;
  std::vector<ChunkKey> given = keys;  // an engine has looked up each of them before
  const auto look = [&](bool known) {
    const double before = used();
    for (const ChunkKey& key : keys) {
      if (is_known(tier, key) != known) std::exit(1);
    }
    return used() - before;
  };
  spent.unknown_seconds = look(false);
  const double start = now(), before = used();
  tier.prefetch_presence(std::move(given), KeyOrder::kPrefix);
  spent.ask_seconds = used() - before;
  for (std::size_t known = 0; known < keys.size();) {
    while (known < keys.size() && is_known(tier, keys[known])) ++known;
    if (known < keys.size()) std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  spent.seconds = now() - start;
  spent.known_seconds = look(true);
  return spent;
}

// `alone(keys)` looks the keys up with the library and returns seconds; `fresh()` makes a tier without known
// keys. `rounds`: one more if it is odd, because the order alternates. Prints the medians and minima as JSON:
// on a busy machine, the other values depend on other programs.
template <typename Alone, typename Fresh>
void compare_presence(std::size_t count, unsigned rounds, Alone alone, Fresh fresh) {
  std::vector<ChunkKey> keys;
  for (std::size_t i = 0; i < count; ++i) keys.push_back(key_of(i));
  std::vector<double> library, ours, unknown, asking, known;
  rounds += rounds % 2;
  for (unsigned round = 0; round < rounds; ++round) {
    const auto tier = fresh();
    // Connects all threads and grows the table, as in a running engine.
    std::vector<ChunkKey> others;
    for (std::size_t i = 0; i < 3 * count; ++i) others.push_back(key_of(3 * count * (round + 2) + i));
    (void)queue_lookup(*tier, others);
    if (round % 2 == 0) library.push_back(alone(keys));
    const Presence spent = queue_lookup(*tier, keys);
    if (round % 2 != 0) library.push_back(alone(keys));
    ours.push_back(spent.seconds);
    asking.push_back(spent.ask_seconds);
    unknown.push_back(spent.unknown_seconds);
    known.push_back(spent.known_seconds);
  }
  const auto least = [](const std::vector<double>& of) { return *std::min_element(of.begin(), of.end()); };
  std::printf("[\n  {\"keys\": %zu, \"rounds\": %u", count, rounds);
  std::printf(", \"median_ms\": {\"library\": %.2f, \"tier\": %.2f, \"ratio\": %.2f}", median(library) * 1e3,
              median(ours) * 1e3, median(ours) / median(library));
  std::printf(", \"least_ms\": {\"library\": %.2f, \"tier\": %.2f, \"ratio\": %.2f}", least(library) * 1e3,
              least(ours) * 1e3, least(ours) / least(library));
  std::printf(
      ", \"scheduler_cpu_ms\": {\"unknown\": %.3f, \"prefetch_presence\": %.3f, \"known\": %.3f}}\n]\n",
      median(unknown) * 1e3, median(asking) * 1e3, median(known) * 1e3);
}

// Prints the medians and their ratio as JSON, and the CPU time per GB, which does not depend on other
// programs. The order alternates, after a round that is not counted: a server becomes slower while it fills,
// and the first of two equal programs seemed up to a fifth faster. `rounds`: one more if it is odd.
// `before()` empties the server; `alone` and `tier` receive the bytes and the number of records.
template <typename Before, typename Alone, typename Through>
void compare(std::size_t kib, std::size_t threads, unsigned rounds, std::size_t total_mebibytes,
             Before before, Alone alone, Through tier) {
  const std::size_t bytes = kib << 10;
  const std::size_t records = std::max<std::size_t>((total_mebibytes << 20) / bytes, 2 * readers(threads));
  rounds += rounds % 2;
  std::vector<double> write[2], read[2], write_cpu[2], read_cpu[2];
  for (unsigned round = 0; round <= rounds; ++round) {
    Rates library, ours;
    for (const bool is_library : {round % 2 == 0, round % 2 != 0}) {
      before();
      (is_library ? library : ours) = is_library ? alone(bytes, records) : tier(bytes, records);
    }
    if (round == 0) continue;
    write[0].push_back(library.write);
    write[1].push_back(ours.write);
    read[0].push_back(library.read);
    read[1].push_back(ours.read);
    write_cpu[0].push_back(library.write_cpu);
    write_cpu[1].push_back(ours.write_cpu);
    read_cpu[0].push_back(library.read_cpu);
    read_cpu[1].push_back(ours.read_cpu);
  }
  std::printf("  {\"record_kib\": %zu, \"threads\": %zu, \"rounds\": %u", kib, threads, rounds);
  const auto print = [](const char* what, const std::vector<double>(&seen)[2]) {
    const double library = median(seen[0]), ours = median(seen[1]);
    if (library <= 0) return;  // not measured
    std::printf(", \"%s\": {\"library\": %.3f, \"tier\": %.3f, \"ratio\": %.2f}", what, library, ours,
                ours / library);
  };
  print("write_gb_s", write);
  print("read_gb_s", read);
  print("write_cpu_s_per_gb", write_cpu);
  print("read_cpu_s_per_gb", read_cpu);
  std::printf("}");
}

}  // namespace kv_offload::bench
