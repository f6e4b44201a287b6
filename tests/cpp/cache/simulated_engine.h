// SPDX-License-Identifier: Apache-2.0
// Simulates a serving engine and its tiers in virtual time around a real TieredCache. TTFT
// follows from a cost law that the test sets, so tests can compare loading with recomputing.
// No bytes are copied and no call waits.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cache/tiered_cache.h"

namespace kv_offload {

inline Nanos nanos(double seconds) { return Nanos(static_cast<std::int64_t>(seconds * 1e9)); }

// A device that reads one record at a time.
class SimulatedTier final : public Tier {
 public:
  SimulatedTier(std::string name, const Clock& clock) : name_(std::move(name)), clock_(clock) {}

  double bytes_per_second = 1e9;
  double latency_seconds = 0;
  double noise = 0;    // relative variation of the speed of single reads
  bool stuck = false;  // no read ends
  std::set<ChunkKey> records;
  std::uint64_t read_bytes = 0;  // of reads that ended
  std::uint64_t submitted_reads = 0;

  std::string_view name() const override { return name_; }
  void submit(std::vector<TierOp> ops) override {
    work();
    for (TierOp& op : ops) {
      if (op.kind != OpKind::kRead) {
        records.insert(op.key);
        ended_.push_back({op.id, op.kind, op.key, Status::ok(), 0, 0, 0});
        continue;
      }
      ++submitted_reads;
      std::uint64_t bytes = 0;
      for (const Shard& shard : op.shards) bytes += shard.size();
      queue_.push_back({op.id, op.key, bytes, clock_.now()});
    }
  }
  bool cancel(OpId id) override {
    work();
    for (auto it = queue_.begin(); it != queue_.end(); ++it) {
      if (it->id != id) continue;
      const bool runs = it == queue_.begin() && std::max(free_at_, it->submitted) < clock_.now();
      if (runs && !stuck) return false;
      ended_.push_back(
          {id, OpKind::kRead, it->key, Status::error(StatusKind::kCancelled, "cancelled"), 0, 0, 0});
      queue_.erase(it);
      return true;
    }
    return false;
  }
  void poll(std::vector<Completion>* completions, std::vector<TierRemoval>*) override {
    work();
    const auto later = std::stable_partition(ended_.begin(), ended_.end(), [&](const Completion& completion) {
      return completion.seconds <= 0 || at_[completion.id] <= clock_.now();
    });
    for (auto it = ended_.begin(); it != later; ++it) {
      at_.erase(it->id);
      completions->push_back(std::move(*it));
    }
    ended_.erase(ended_.begin(), later);
  }
  Presence contains(const ChunkKey& key) const override {
    return records.contains(key) ? Presence::kPresent : Presence::kAbsent;
  }
  void prefetch_presence(std::vector<ChunkKey>, const LookupOptions&) override {}
  void touch(const ChunkKey&) override {}
  Status reset(std::uint64_t) override {
    records.clear();
    return Status::ok();
  }
  TierStats stats() const override { return {}; }
  void close() override {
    while (!queue_.empty()) {
      ended_.push_back({queue_.front().id, OpKind::kRead, queue_.front().key,
                        Status::error(StatusKind::kCancelled, "closed"), 0, 0, 0});
      queue_.pop_front();
    }
    at_.clear();
  }
  double estimate_read_seconds(std::uint64_t) const override { return 0; }

 private:
  struct Queued {
    OpId id;
    ChunkKey key;
    std::uint64_t bytes;
    Nanos submitted;
  };
  double wobble(OpId id) const {  // deterministic per op
    return 1 + noise * (2 * static_cast<double>(id * 0x9E3779B97F4A7C15ull >> 40) / (1 << 24) - 1);
  }
  // Completes the reads that have ended by now. A later read uses the speed at its start.
  void work() {
    while (!stuck && !queue_.empty()) {
      const Queued& op = queue_.front();
      const Nanos start = std::max(free_at_, op.submitted);
      const Nanos end = start + nanos(static_cast<double>(op.bytes) / bytes_per_second * wobble(op.id));
      if (start > clock_.now() || end > clock_.now()) return;
      free_at_ = end;
      const Nanos arrives = end + nanos(latency_seconds);
      read_bytes += op.bytes;
      at_[op.id] = arrives;
      ended_.push_back({op.id, OpKind::kRead, op.key, Status::ok(), op.bytes, to_seconds(arrives - start),
                        to_seconds(start - op.submitted)});
      queue_.pop_front();
    }
  }

  const std::string name_;
  const Clock& clock_;
  Nanos free_at_{0};
  std::deque<Queued> queue_;
  std::vector<Completion> ended_;
  std::map<OpId, Nanos> at_;
};

// The order in which vLLM ends a step and offers the step's chunks.
enum class StepOrder { kStoresFirst /* 0.33 */, kStepEndFirst /* 0.32 */, kOneAhead /* async scheduling */ };

struct EngineOptions {
  double step_seconds = 0.005;       // a step that computes nothing
  double token_seconds = 100e-6;     // 10,000 tokens/s at the start of a prompt
  double context_seconds = 2e-9;     // additional time per preceding token
  std::uint32_t step_tokens = 2048;  // vLLM cuts longer prompts
  double copy_bytes_per_second = 1e12;
  double copy_latency_seconds = 0;
  double wait_step_seconds = 0.0005;  // step interval of an engine that only waits,
  double wait_step_share = 0;         // or this share of the time waited so far, if larger
  StepOrder order = StepOrder::kStoresFirst;
  std::uint64_t rows = 16384;
  std::vector<double> tiers{1e9};  // bytes per second
  std::uint32_t window = 0;        // window of a second group, in chunks; the group stores nothing
  CacheOptions cache{};
};

class SimulatedEngine {
 public:
  static constexpr std::uint32_t kChunk = 16;         // tokens
  static constexpr std::uint64_t kChunkBytes = 4096;  // 256 bytes a token

  explicit SimulatedEngine(EngineOptions engine_options = {}) : options(std::move(engine_options)) {
    static std::uint32_t number = 0;
    RegionOptions region_options;
    region_options.engine_id = "simulated-" + std::to_string(::getpid()) + "-" + std::to_string(++number);
    region_options.bytes = options.rows * kChunkBytes;
    region_ = HostRegion::attach_scheduler(region_options);
    rank_ = HostRegion::attach_worker(region_options, 0, {{kChunkBytes}, "simulated"});
    CacheOptions cache_options = options.cache;
    cache_options.groups.resize(options.window > 0 ? 2 : 1);
    for (GroupGeometry& group : cache_options.groups) {
      group.group_id = static_cast<std::uint32_t>(&group - cache_options.groups.data());
      group.shard_bytes[0] = kChunkBytes;
      group.tokens_per_chunk = kChunk;
    }
    cache_options.full_attention = {true, false};
    cache_options.full_attention.resize(cache_options.groups.size());
    std::vector<std::unique_ptr<Tier>> made;
    for (std::size_t t = 0; t < options.tiers.size(); ++t) {
      auto tier = std::make_unique<SimulatedTier>("tier" + std::to_string(t), clock);
      tier->bytes_per_second = options.tiers[t];
      tiers.push_back(tier.get());
      made.push_back(std::move(tier));
    }
    cache = std::make_unique<TieredCache>(cache_options, region_, std::move(made), metrics, clock);
  }

  struct Prompt {
    std::vector<ChunkKey> keys;
    std::uint32_t tokens() const { return static_cast<std::uint32_t>(keys.size()) * kChunk + kTail; }
  };
  struct Served {
    double first_token_seconds = 0;
    std::uint32_t loaded_tokens = 0;
  };

  Prompt new_prompt(std::uint32_t chunks) {
    Prompt prompt;
    ++last_prompt_;
    for (std::uint32_t i = 0; i < chunks; ++i) {
      std::uint64_t words[2] = {(last_prompt_ << 20 | i) * 0x9E3779B97F4A7C15ull, last_prompt_ << 20 | i};
      std::string bytes(reinterpret_cast<const char*>(words), sizeof(words));
      prompt.keys.push_back(ChunkKey(bytes + std::string(4, '\0')));
    }
    return prompt;
  }
  // Puts chunks [from, to) of the prompt on a tier.
  void put(const Prompt& prompt, std::size_t tier, std::size_t from = 0, std::size_t to = ~std::size_t{0}) {
    for (std::size_t i = from; i < std::min(to, prompt.keys.size()); ++i)
      tiers[tier]->records.insert(prompt.keys[i]);
  }
  // Puts the window chunks before the end of the prompt on a tier.
  void put_window(const Prompt& prompt, std::size_t tier) {
    for (const ChunkKey& key : window_of(prompt, prompt.keys.size())) tiers[tier]->records.insert(key);
  }
  // Returns the seconds to compute the tokens after `from` without a connector.
  double compute_seconds(const Prompt& prompt, std::uint32_t from = 0) const {
    double seconds = 0;
    for (std::uint32_t at = from; at < prompt.tokens();) {
      const std::uint32_t tokens = std::min(options.step_tokens, prompt.tokens() - at);
      seconds += step_seconds(at, tokens);
      at += tokens;
    }
    return seconds;
  }

  // Serves one request alone. Returns its TTFT and the number of loaded tokens.
  Served serve(const Prompt& prompt, const RequestOptions& request_options = {}, int decode_steps = 8) {
    const Nanos arrived = clock.now();
    const RequestHandle request = cache->begin_request("r", request_options);
    if (tells_span) cache->set_span(request, kChunk, static_cast<std::uint32_t>(prompt.keys.size()) * kChunk);
    std::size_t hits = 0;
    while (!look(request, prompt, &hits)) {
      cache->end_step();
      pass(std::max(options.wait_step_seconds, options.wait_step_share * to_seconds(clock.now() - arrived)));
    }
    Served served;
    served.loaded_tokens = static_cast<std::uint32_t>(hits) * kChunk;
    if (hits > 0) load(request, prompt, hits);
    compute(request, prompt, served.loaded_tokens, decode_steps, &served.first_token_seconds, arrived);
    last_report = cache->report(request);
    cache->end_request(request);
    return served;
  }
  void pass(double seconds) { clock.advance(nanos(seconds)); }
  double counter(std::string_view name, Metrics::Labels labels = {}) const {
    return metrics.value(name, labels);
  }
  double decisions(std::string_view choice) const { return counter("kv_offload_decisions_total", {choice}); }

  EngineOptions options;
  bool tells_span = true;
  FakeClock clock;
  Metrics metrics;
  std::vector<SimulatedTier*> tiers;
  RequestReport last_report;

 private:
  static constexpr std::uint32_t kTail = 8;  // tokens after the last whole chunk of a prompt

  double step_seconds(std::uint32_t context, std::uint32_t tokens) const {
    return options.step_seconds +
           tokens * (options.token_seconds + options.context_seconds * (context + tokens / 2.0));
  }
  // False while an answer is pending.
  bool look(RequestHandle request, const Prompt& prompt, std::size_t* hits) {
    *hits = 0;
    bool pending = false;
    for (const ChunkKey& key : prompt.keys) {
      const LookupResult result = cache->lookup(request, key);
      if (result == LookupResult::kMiss) break;
      pending |= result != LookupResult::kHit;
      ++*hits;
    }
    bool window_misses = false;
    for (const ChunkKey& key : window_of(prompt, *hits)) {
      const LookupResult result = cache->lookup(request, key);
      window_misses |= result == LookupResult::kMiss;
      pending |= result == LookupResult::kPending || result == LookupResult::kRetry;
    }
    if (window_misses) *hits = 0;  // treat all earlier windows as missing too
    return !pending || *hits == 0;
  }
  // From last to first, the order of vLLM's lookups.
  std::vector<ChunkKey> window_of(const Prompt& prompt, std::size_t end) const {
    std::vector<ChunkKey> keys;
    for (std::size_t i = end; i-- > 0 && keys.size() < options.window;) {
      std::string bytes(prompt.keys[i].bytes());
      bytes.back() = 1;  // the group's number, big-endian
      keys.emplace_back(bytes);
    }
    return keys;
  }
  void load(RequestHandle request, const Prompt& prompt, std::size_t hits) {
    std::vector<ChunkKey> keys(prompt.keys.begin(), prompt.keys.begin() + static_cast<long>(hits));
    const std::vector<ChunkKey> window = window_of(prompt, hits);
    keys.insert(keys.end(), window.rbegin(), window.rend());
    const RowTransfer transfer = cache->prepare_load(request, keys);
    cache->end_step();
    pass(options.copy_latency_seconds +
         static_cast<double>(hits * kChunkBytes) / options.copy_bytes_per_second);
    rank_->report(0, transfer.ticket, 0);
    cache->complete_load(keys);
  }
  // The prompt's steps from `at` on, then steps of one token each.
  void compute(RequestHandle request, const Prompt& prompt, std::uint32_t at, int decode_steps,
               double* first_token, Nanos arrived) {
    double runs = 0;  // duration of the previous step, with async scheduling
    while (at < prompt.tokens() || decode_steps-- > 0) {
      const std::uint32_t tokens = std::min(options.step_tokens, std::max(prompt.tokens(), at) - at);
      const std::vector<ChunkKey> keys = offered(prompt, at, at + tokens);
      const double seconds = step_seconds(at, tokens);
      if (options.order == StepOrder::kStepEndFirst) cache->end_step();
      store(request, keys, at / kChunk);
      if (options.order != StepOrder::kStepEndFirst) cache->end_step();
      at += tokens;
      const bool last = tokens > 0 && at >= prompt.tokens();
      pass(options.order == StepOrder::kOneAhead ? std::exchange(runs, seconds) : seconds);
      if (last)
        *first_token = to_seconds(clock.now() - arrived) + (options.order == StepOrder::kOneAhead ? runs : 0);
    }
    if (options.order == StepOrder::kOneAhead) pass(runs);
  }
  static std::vector<ChunkKey> offered(const Prompt& prompt, std::uint32_t from, std::uint32_t to) {
    std::vector<ChunkKey> keys;
    for (std::uint32_t i = (from + kChunk - 1) / kChunk; i < to / kChunk && i < prompt.keys.size(); ++i) {
      keys.push_back(prompt.keys[i]);
    }
    return keys;
  }
  void store(RequestHandle request, const std::vector<ChunkKey>& keys, std::uint32_t first) {
    std::vector<std::uint32_t> depths;
    for (std::uint32_t i = 0; i < keys.size(); ++i) depths.push_back((first + i + 1) * kChunk);
    const StoreGrant grant = cache->prepare_store(request, keys, depths);
    if (grant.transfer.ticket == kNoTicket) return;
    rank_->report(0, grant.transfer.ticket, 0);
    std::vector<ChunkKey> stored;
    for (const std::uint32_t i : grant.accepted) stored.push_back(keys[i]);
    cache->complete_store(stored);
  }

  std::shared_ptr<HostRegion> region_, rank_;
  std::uint64_t last_prompt_ = 0;

 public:
  std::unique_ptr<TieredCache> cache;  // declared last, so it is destroyed before the members it uses
};

}  // namespace kv_offload
