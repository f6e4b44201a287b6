// A random life of a TieredCache: a scheduler that behaves as vLLM's does, ranks
// that copy late, fail or forget to report, a tier whose ops end in any order and
// any way, resets that change the weights. A plain model says what may happen;
// what must not is collected in violations().
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

// Faults planted in the world around the cache, to see the model catch them.
enum class Planted {
  kNone,
  kWrongRow,             // a rank copies into another chunk's row
  kEarlyCompletion,      // ranks report a store before they copied
  kSkippedVerification,  // the tier takes garbage for a good record
  kStaleRow,             // ranks report jobs of before a reset as ended, and copy on
};

struct ModelOptions {
  std::uint64_t seed = 1;
  std::uint64_t rows = 24;
  std::vector<std::uint64_t> shard_bytes{200};
  std::vector<bool> full_attention{true};  // a group that is not has a window of two chunks
  TierSlotOptions tier{};
  LoadPolicy load_policy = LoadPolicy::kAlways;
  std::string eviction_policy = "lru";
  bool step_ends_before_stores = false;  // vLLM 0.32
  Planted planted = Planted::kNone;
};

class ModelRun {
 public:
  explicit ModelRun(ModelOptions options);
  // Calls of the cache, until there were at least this many.
  void run(std::uint64_t calls);
  // Everything ends; nothing may be left.
  void quiesce();

  const std::vector<std::string>& violations() const { return violations_; }
  // How often what happened: that the run was worth it.
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
    Nanos waits_since{-1};   // of the first pending answer since it was admitted last
  };
  struct Job {
    bool store = false;
    bool stale = false;  // of before a reset: vLLM drops its completion
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
  // Chunks of each group to load, or nothing while an answer is pending.
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
  std::set<ChunkKey> resident_;  // as the events say
  std::set<ChunkKey> filling_;
  std::vector<std::string> violations_;
};

}  // namespace kv_offload
