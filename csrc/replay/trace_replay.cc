// SPDX-License-Identifier: Apache-2.0
#include "replay/trace_replay.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <queue>
#include <set>
#include <tuple>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "backends/fs/catalog.h"
#include "base/status.h"
#include "cache/hint_trust.h"
#include "cache/key_history.h"
#include "index/chunk_index.h"

namespace kv_offload {
namespace {

ChunkKey key_of(std::uint64_t block) {
  char bytes[20] = {};
  std::uint64_t mixed = block + 0x9E3779B97F4A7C15ull;  // splitmix64: spread like digests
  for (int word = 0; word < 2; ++word) {
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9ull;
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EBull;
    mixed ^= mixed >> 31;
    std::memcpy(bytes + 8 * word, &mixed, sizeof(mixed));
    mixed += block;
  }
  return ChunkKey({bytes, sizeof(bytes)});
}

class Replayer {
 public:
  Replayer(const Trace& trace, const ReplayOptions& options)
      : trace_(trace),
        options_(options),
        index_(make_index()),
        catalog_(std::make_unique<FsCatalog>(options.tier_eviction_policy)),
        key_history_(4 * options.host_chunks),
        continued_(trace.size()) {}

  ReplayResult run() {
    for (std::size_t i = 0; i < trace_.size(); ++i) {
      if (!trace_.times.empty()) advance(i);
      own_return_ = options_.late_hints ? 0 : hint_of(i);
      request(static_cast<std::uint32_t>(i + 1), i);
      if (own_return_ != 0) hint(i);
      if (i + 1 == options_.kill_after) kill(i + 1);
    }
    return result_;
  }

 private:
  // Gives the hints of all requests that end before this one begins, and prefetches what returns soon.
  void advance(std::size_t to) {
    const double now = trace_.times[to].begins;
    while (!events_.empty() && events_.top().time <= now) {
      const Event event = events_.top();
      events_.pop();
      set_now(event.time);
      if (event.is_prefetch) {
        prefetch(event.request);
      } else {
        hint(event.request);
        plan_prefetch(event.request);
      }
    }
    set_now(now);
    if (options_.hints.empty()) return;
    if (const std::uint32_t previous = trace_.times[to].previous; previous != 0) {
      continued_[previous - 1] = true;
      const double ended = trace_.times[previous - 1].ends;
      if (const double told = options_.hints[previous - 1]; told != 0)
        trust_.observe(told - ended, now - ended);
    }
    if (options_.hints[to] != 0) events_.push({trace_.times[to].ends, to, false});
  }
  void set_now(double now) {
    now_ = now;
    index_->set_now(now);
  }

  // Like Sessions, ignores hints that proved unreliable.
  double hint_of(std::size_t request) const {
    return options_.hints.empty() || !trust_.is_trusted() ? 0 : options_.hints[request];
  }

  void hint(std::size_t request) {
    const double returns_at = hint_of(request);
    if (returns_at == 0) return;
    for (const std::uint64_t block : trace_.request(request).subspan(trace_.times[request].shared)) {
      const ChunkEntry* entry = index_->find(key_of(block));
      if (entry == nullptr) return;  // later blocks are useless without it
      index_->set_return(index_->slot_of(entry), returns_at);
    }
  }

  // Like Prefetcher, begins early enough for the speed of the tier, a second to a minute before the return.
  void plan_prefetch(std::size_t request) {
    const double returns_at = hint_of(request);
    if (!options_.prefetch || options_.tier_chunks == 0 || !(returns_at > now_) || std::isinf(returns_at))
      return;
    const auto blocks = static_cast<double>(trace_.request(request).size());
    const double reads = options_.tier_chunks_per_second > 0 ? blocks / options_.tier_chunks_per_second : 0;
    events_.push({std::max(now_, returns_at - std::min(1 + 2 * reads, 60.0)), request, true});
  }

  // Reads the prompt up to the first chunk that is not recorded, or for which there is no room.
  void prefetch(std::size_t request) {
    const double returns_at = hint_of(request);
    if (continued_[request] || returns_at <= now_) return;
    held_.clear();
    const auto blocks = trace_.request(request);
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      const ChunkKey key = key_of(blocks[i]);
      if (const ChunkEntry* entry = index_->find(key)) {
        hold(index_->slot_of(entry));
        continue;
      }
      if (!recorded(key) || !may_prefetch()) break;
      if (!make_room(0, std::nextafter(static_cast<float>(returns_at), std::numeric_limits<float>::max())))
        break;
      const ChunkId parent = i == 0 ? 0 : chunk_id(key_of(blocks[i - 1]));
      const Slot slot =
          index_->insert(key, 0, 0, {0, parent, static_cast<std::uint32_t>(i), 0, 0}, ChunkState::kFetching);
      hold(slot);
      make_resident(slot, ChunkOrigin::kTier);
      index_->set_recorded(slot, true);
      index_->set_return(slot, returns_at);
      prefetched_.insert(key);
      unused_until_.emplace(returns_at + kUnusedSeconds, key);
      ++result_.prefetched;
    }
    for (const Slot slot : held_) index_->unpin(slot);
  }

  // A client that is alone has a quarter of host memory for chunks that are not used yet. A chunk that is not
  // used counts for a time after its expected return, evicted or not.
  bool may_prefetch() {
    for (; !unused_until_.empty() && unused_until_.top().first <= now_; unused_until_.pop())
      prefetched_.erase(unused_until_.top().second);
    return prefetched_.size() < options_.host_chunks / 4;
  }

  std::unique_ptr<ChunkIndex> make_index() const {
    return std::make_unique<ChunkIndex>(options_.make_policy(options_.eviction_policy), options_.host_chunks);
  }

  void kill(std::size_t requests) {
    result_.killed_with = catalog_->size();
    for (std::size_t i = requests - std::min(requests, options_.recent_requests); i < requests; ++i) {
      bool hit = true;
      for (const std::uint64_t block : trace_.request(i)) {
        const ChunkKey key = key_of(block);
        hit = hit && (recorded(key) || (options_.keep_host_memory && index_->find(key) != nullptr));
        ++result_.recent_blocks;
        result_.recent_hits += hit;
      }
    }
    restart_host();
    key_history_.clear();
    restart_tier();
    killed_ = true;
  }

  // Kept memory preserves the order of uses, but not the requests that used its chunks.
  void restart_host() {
    std::vector<std::pair<std::uint64_t, ChunkEntry>> kept;
    if (options_.keep_host_memory) {
      index_->for_each([&](Slot, ChunkEntry& entry) { kept.emplace_back(host_used_.at(entry.key), entry); });
    }
    std::sort(kept.begin(), kept.end(),
              [](const auto& one, const auto& other) { return one.first < other.first; });
    index_ = make_index();
    index_->set_now(now_);
    for (const auto& [time, entry] : kept) {
      const Slot slot =
          index_->insert(entry.key, 0, 0, {0, entry.parent, entry.depth, 0, 0}, ChunkState::kFilling);
      make_resident(slot, ChunkOrigin::kBefore);
    }
  }

  // A directory preserves the order of uses, but not which chunk precedes that of a record. (A killed server
  // also loses the last minute of uses; here none are lost.)
  void restart_tier() {
    std::vector<std::pair<std::uint64_t, FsCatalog::Record>> records;
    while (const auto record = catalog_->take_victim()) {
      records.emplace_back(last_used_[record->key], *record);
    }
    std::sort(records.begin(), records.end(),
              [](const auto& one, const auto& other) { return one.first < other.first; });
    auto restarted = std::make_unique<FsCatalog>(options_.tier_eviction_policy);
    for (const auto& [time, record] : records) restarted->insert(record, {});
    catalog_ = std::move(restarted);
  }

  void request(std::uint32_t number, std::size_t at) {
    keys_.clear();
    for (const std::uint64_t block : trace_.request(at)) keys_.push_back(key_of(block));
    ++result_.requests;
    result_.blocks += keys_.size();
    held_.clear();
    const std::uint64_t from_host = result_.host_hits, from_tier = result_.tier_hits;
    const std::size_t hits = load(number);
    result_.host_hits_of.push_back(static_cast<std::uint32_t>(result_.host_hits - from_host));
    result_.tier_hits_of.push_back(static_cast<std::uint32_t>(result_.tier_hits - from_tier));
    if (killed_) {
      result_.blocks_after += keys_.size();
      result_.hits_after += hits;
    }
    store(number, hits);
  }

  // Loads chunks that are resident or recorded, up to the first that is neither. Hits stay pinned until all
  // of them are here.
  std::size_t load(std::uint32_t number) {
    std::size_t known = 0;
    for (; known < keys_.size(); ++known) {
      const ChunkEntry* entry = index_->find(keys_[known]);
      if (entry == nullptr && !recorded(keys_[known])) break;
      if (entry != nullptr) hold(index_->slot_of(entry));
    }
    for (std::size_t i = 0; i < known; ++i) {
      if (index_->find(keys_[i]) != nullptr) {
        ++result_.host_hits;
        result_.prefetched_used += prefetched_.erase(keys_[i]);
        continue;
      }
      if (!make_room(number)) {
        known = i;
        break;
      }
      const Slot slot = insert(number, i, ChunkState::kFetching);
      hit_recorded(slot);
      index_->pin(slot);
      held_.push_back(slot);
      make_resident(slot, ChunkOrigin::kTier);
      index_->set_recorded(slot, true);
      ++result_.tier_hits;
    }
    for (std::size_t i = known; i-- > 0;) {
      const Slot slot = index_->slot_of(index_->find(keys_[i]));
      access(slot, number);
      use(slot);
    }
    for (const Slot slot : held_) index_->unpin(slot);
    return known;
  }

  void store(std::uint32_t number, std::size_t from) {
    stored_.clear();
    for (std::size_t i = from; i < keys_.size(); ++i) {
      if (const ChunkEntry* entry = index_->find(keys_[i])) {
        const Slot slot = index_->slot_of(entry);
        access(slot, number);
        if (entry->state == ChunkState::kResident) use(slot);
        continue;
      }
      // The rest of the prompt is worthless without this chunk.
      if (!make_room(number, options_.tier_chunks > 0 ? 0 : own_return_)) {
        result_.declined += keys_.size() - i;
        break;
      }
      stored_.push_back(insert(number, i, ChunkState::kFilling));
    }
    for (std::size_t i = stored_.size(); i-- > 0;) make_resident(stored_[i], ChunkOrigin::kStore);
    result_.stored += stored_.size();
    for (const Slot slot : stored_) {
      if (recorded(index_->at(slot).key)) index_->set_recorded(slot, true);
    }
    if (options_.tier.write_policy == WritePolicy::kWriteThrough) write_stored(number);
    for (const Slot slot : stored_) count_use(slot);
  }

  Slot insert(std::uint32_t number, std::size_t i, ChunkState state) {
    const ChunkId parent = i == 0 ? 0 : chunk_id(keys_[i - 1]);
    return index_->insert(keys_[i], 0, 0, {0, parent, static_cast<std::uint32_t>(i), number, 0}, state);
  }
  void make_resident(Slot slot, ChunkOrigin origin) {
    index_->make_resident(slot, origin);
    on_host_use(slot);
  }
  void access(Slot slot, std::uint32_t number) {
    index_->access(slot, number, 0);
    on_host_use(slot);
  }
  void on_host_use(Slot slot) {
    if (options_.keep_host_memory) host_used_[index_->at(slot).key] = ++uses_;
  }
  void hold(Slot slot) {
    index_->pin(slot);
    held_.push_back(slot);
  }

  // `returns_at`: as for RowProvider::take.
  bool make_room(std::uint32_t number, double returns_at = 0) {
    while (index_->size() >= options_.host_chunks) {
      const auto victim = index_->victim(number);
      if (!victim) return false;
      const double its_return = index_->at(*victim).returns_at;
      if (its_return > now_ && its_return < returns_at) return false;
      const ChunkKey key = index_->at(*victim).key;
      if (options_.tier.write_policy == WritePolicy::kOnEvict) write(*victim);
      if (options_.tier_chunks > 0) {
        catalog_->touch(key, Nanos(1));
        last_used_[key] = ++uses_;
      }
      index_->erase(*victim);
      ++result_.evicted;
    }
    return true;
  }

  bool recorded(const ChunkKey& key) const { return options_.tier_chunks > 0 && catalog_->holds(key); }
  // Chunks after a declined one are declined, too.
  void write_stored(std::uint32_t number) {
    for (std::size_t i = 0; i < stored_.size(); ++i) {
      if (write(stored_[i], number)) continue;
      result_.tier_declined += stored_.size() - i;
      return;
    }
  }
  // False if declined.
  bool write(Slot slot, std::uint32_t spared_request = 0) {
    const ChunkEntry& entry = index_->at(slot);
    if (options_.tier_chunks == 0 || catalog_->holds(entry.key)) return true;
    while (catalog_->size() >= options_.tier_chunks) {
      if (spared_request != 0 && catalog_->next_is_of(spared_request)) return false;
      const auto victim = catalog_->take_victim();
      if (!victim) return true;
      const ChunkEntry* victim_entry = index_->find(victim->key);
      if (victim_entry != nullptr && victim_entry->state == ChunkState::kResident)
        index_->set_recorded(index_->slot_of(victim_entry), false);
      ++result_.tier_evicted;
    }
    catalog_->insert({entry.key, kPageBytes}, index_->entry_info(entry));
    last_used_[entry.key] = ++uses_;
    ++result_.written;
    index_->set_recorded(slot, true);
    return true;
  }
  void hit_recorded(Slot slot) {
    const ChunkEntry& entry = index_->at(slot);
    catalog_->hit(entry.key, index_->entry_info(entry), Nanos(1));
    last_used_[entry.key] = ++uses_;
  }
  void use(Slot slot) {
    ChunkEntry& entry = index_->at(slot);
    const bool is_inherited = entry.origin == ChunkOrigin::kBefore;
    entry.origin = ChunkOrigin::kStore;
    if (is_inherited) {
      if (options_.tier.write_policy == WritePolicy::kWriteThrough) write(slot, entry.holder);
      index_->set_recorded(slot, recorded(entry.key));
    }
    if (options_.tier_chunks > 0 && options_.tier.write_policy != WritePolicy::kOnEvict) hit_recorded(slot);
    count_use(slot);
  }
  void count_use(Slot slot) {
    if (options_.tier.write_policy != WritePolicy::kReuse) return;
    const std::uint32_t uses = key_history_.count_use(index_->at(slot).key);
    if (uses >= options_.tier.reuse_threshold) write(slot);
  }

  const Trace& trace_;
  const ReplayOptions& options_;
  std::unique_ptr<ChunkIndex> index_;
  std::unique_ptr<FsCatalog> catalog_;
  KeyHistory key_history_;
  ReplayResult result_;
  std::vector<ChunkKey> keys_;  // of the current request
  std::vector<Slot> held_, stored_;
  std::unordered_map<ChunkKey, std::uint64_t> last_used_;  // of all chunks that were ever recorded
  std::unordered_map<ChunkKey, std::uint64_t> host_used_;  // of all chunks that were ever in host memory
  // The end of a request with a hint, or the time to prefetch its prompt.
  struct Event {
    double time;
    std::size_t request;
    bool is_prefetch;
    bool operator>(const Event& other) const {
      return std::tie(time, request) > std::tie(other.time, other.request);
    }
  };
  HintTrust trust_;
  double now_ = 0, own_return_ = 0;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  std::vector<bool> continued_;                  // requests whose stream has gone on
  std::unordered_set<ChunkKey> prefetched_;      // not used yet
  static constexpr double kUnusedSeconds = 660;  // Prefetcher::kGrace and kPenalty
  using Unused = std::pair<double, ChunkKey>;
  struct Later {
    bool operator()(const Unused& one, const Unused& other) const { return one.first > other.first; }
  };
  std::priority_queue<Unused, std::vector<Unused>, Later> unused_until_;
  std::uint64_t uses_ = 0;
  bool killed_ = false;
};

constexpr std::uint64_t kNever = std::numeric_limits<std::uint64_t>::max();

// Returns, for each position in trace.blocks, the next request that has the block.
std::vector<std::uint64_t> next_uses(const Trace& trace) {
  std::vector<std::uint64_t> next(trace.blocks.size(), kNever);
  std::unordered_map<std::uint64_t, std::uint64_t> seen;
  for (std::size_t i = trace.size(), end = trace.blocks.size(); i-- > 0;) {
    const auto blocks = trace.request(i);
    const std::size_t begin = end - blocks.size();
    for (std::size_t at = begin; at < end; ++at) {
      if (const auto found = seen.find(trace.blocks[at]); found != seen.end()) next[at] = found->second;
    }
    for (std::size_t at = begin; at < end; ++at) seen[trace.blocks[at]] = i;
    end = begin;
  }
  return next;
}

void require_order(const Trace& trace) {
  if (!std::is_sorted(trace.ends.begin(), trace.ends.end()) ||
      (trace.ends.empty() ? 0 : trace.ends.back()) != trace.blocks.size()) {
    throw_invalid("invalid trace: request ends must ascend and end at {}, the number of blocks",
                  trace.blocks.size());
  }
}

void require_hints(const Trace& trace, const std::vector<double>& hints) {
  if (hints.empty() || (hints.size() == trace.size() && trace.times.size() == trace.size())) return;
  throw_invalid("{} hints for {} requests, {} of them with times; hints need a trace of sessions",
                hints.size(), trace.size(), trace.times.size());
}

}  // namespace

ReplayResult replay(const Trace& trace, const ReplayOptions& options) {
  require_order(trace);
  if (options.host_chunks == 0) throw_invalid("host_chunks is 0; it must be at least 1");
  require_hints(trace, options.hints);
  if (options.kill_after > trace.size()) {
    throw_invalid("kill_after is {}; the trace has {} requests", options.kill_after, trace.size());
  }
  return Replayer(trace, options).run();
}

std::uint64_t optimal_hits(const Trace& trace, std::size_t capacity) {
  require_order(trace);
  const std::vector<std::uint64_t> next = next_uses(trace);
  struct Use {
    std::uint64_t next;
    std::size_t depth;
  };
  std::unordered_map<std::uint64_t, Use> resident;
  std::set<std::tuple<std::uint64_t, std::size_t, std::uint64_t>> order;  // next use, depth, block
  std::uint64_t hits = 0;
  std::size_t at = 0;
  for (std::size_t i = 0; i < trace.size(); ++i) {
    const auto blocks = trace.request(i);
    bool all = true;
    for (std::size_t depth = 0; depth < blocks.size(); ++depth) {
      const auto found = resident.find(blocks[depth]);
      all &= found != resident.end();
      hits += all;
      if (found == resident.end()) continue;
      order.erase({found->second.next, found->second.depth, blocks[depth]});
      resident.erase(found);
    }
    for (std::size_t depth = 0; depth < blocks.size(); ++depth, ++at) {
      if (next[at] == kNever || !resident.emplace(blocks[depth], Use{next[at], depth}).second) continue;
      order.insert({next[at], depth, blocks[depth]});
    }
    while (order.size() > capacity) {
      resident.erase(std::get<2>(*order.rbegin()));
      order.erase(std::prev(order.end()));
    }
  }
  return hits;
}

}  // namespace kv_offload
