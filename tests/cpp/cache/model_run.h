// SPDX-License-Identifier: Apache-2.0
// Runs random operations on a TieredCache: a scheduler that behaves like vLLM's, ranks that copy
// late, fail or do not report, a tier whose ops end in any order with any result, and resets
// that change the weights. A simple reference model defines the allowed behaviour; deviations
// are collected in violations().
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "cache/cache_fixture.h"

namespace kv_offload {

// Faults injected around the cache, to check that the model detects them.
enum class Planted {
  kNone,
  kWrongRow,             // a rank copies into another chunk's row
  kEarlyCompletion,      // ranks report a store before the copy ends
  kSkippedVerification,  // the tier accepts a corrupt record
  kStaleRow,             // ranks report jobs from before a reset as ended, and continue to copy
};

struct ModelOptions {
  std::uint64_t seed = 1;
  std::uint64_t rows = 24;
  std::vector<std::uint64_t> shard_bytes{200};
  std::vector<bool> full_attention{true};  // false: the group has a window of two chunks
  TierSlotOptions tier{};
  LoadPolicy load_policy = LoadPolicy::kAlways;
  std::string eviction_policy = "lru";
  bool step_ends_before_stores = false;  // vLLM 0.32
  Planted planted = Planted::kNone;
};

class ModelRun {
 public:
  explicit ModelRun(ModelOptions options);
  // Calls the cache at least `calls` times.
  void run(std::uint64_t calls);
  // Ends all jobs and requests, and checks that no pin, row or request remains.
  void quiesce();

  const std::vector<std::string>& violations() const { return violations_; }
  // Event counts, which show that the run covered each case.
  std::map<std::string, std::uint64_t> happened;

 private:
  enum class Phase { kWaiting, kLoading, kRunning };
  struct Request {
    RequestHandle handle = 0;
    RequestOptions options;
    std::vector<std::vector<ChunkKey>> keys;  // per group
    Phase phase = Phase::kWaiting;
    std::size_t stored = 0;  // chunks offered so far
    std::uint32_t jobs = 0;  // in flight
    Nanos waits_since{-1};   // time of the first pending lookup since the last admission
    Nanos looked_up{0};      // time of the last lookup
  };
  struct Job {
    bool store = false;
    bool stale = false;  // started before a reset: vLLM drops its completion
    bool reported = false;
    std::uint32_t request = 0;  // serial
    std::uint64_t weights = 0;
    std::vector<ChunkKey> keys;
    std::vector<std::uint32_t> groups;  // of each key
    RowTransfer transfer;
  };

  void violate(std::string what);
  bool chance(int percent) { return static_cast<int>(random_() % 100) < percent; }
  TieredCache& cache() { return *world_.cache; }

  void begin_request();
  void step();
  void admit_or_wait(std::uint32_t serial, Request& request);
  LookupResult look(Request& request, const ChunkKey& key);
  // Finds the chunks of each group to load. Returns false while a lookup is pending.
  bool find_hits(Request& request, std::vector<std::vector<ChunkKey>>* hits);
  void load(std::uint32_t serial, Request& request, const std::vector<std::vector<ChunkKey>>& hits);
  void offer(std::uint32_t serial, Request& request);
  void check_granted(const ChunkKey& key, RowId row);
  void end_request(std::uint32_t serial);
  void reset();

  void work_on_jobs(int percent);
  void finish_job(Job& job);
  void copy(const Job& job);
  void check_loaded(const Job& job, const char* when);
  void work_on_tier();
  void drain_events();

  ModelOptions options_;
  std::mt19937_64 random_;
  World world_;
  std::map<std::uint32_t, Request> requests_;
  std::uint32_t last_serial_ = 0;
  std::deque<Job> jobs_;
  std::uint64_t weights_ = 0;  // = resets so far
  std::uint64_t calls_ = 0;
  std::set<ChunkKey> resident_;  // according to the events
  std::set<ChunkKey> filling_;
  std::vector<std::string> violations_;
};

}  // namespace kv_offload
