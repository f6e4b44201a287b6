// SPDX-License-Identifier: Apache-2.0
#include "cache/device_loads.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <type_traits>
#include <utility>

#include "base/make_room.h"
#include "base/status.h"
#include "base/steps.h"
#include "cache/key_history.h"

namespace kv_offload {
namespace {

std::uint64_t fingerprint_of(std::span<const ChunkKey> keys) {
  std::uint64_t sum = keys.size();
  for (const ChunkKey& key : keys) sum += KeyHistory::fingerprint(key);
  return sum;
}

}  // namespace

// The pins of a load that begins, until it has begun.
class DeviceLoads::Pins {
 public:
  Pins(HostChunks& chunks, const std::vector<Slot>& slots) : chunks_(chunks), slots_(slots) {}
  ~Pins() {
    for (; count_ > 0; --count_) chunks_.end_load(slots_[slots_.size() - count_]);
  }
  Pins(const Pins&) = delete;
  Pins& operator=(const Pins&) = delete;
  // Pins the slots from the last to the first.
  std::optional<std::uint8_t> pin_next() {
    const auto fetched_from = chunks_.begin_load(slots_[slots_.size() - count_ - 1]);
    ++count_;
    return fetched_from;
  }
  void keep() { count_ = 0; }

 private:
  HostChunks& chunks_;
  const std::vector<Slot>& slots_;
  std::size_t count_ = 0;
};

DeviceLoads::DeviceLoads(const Context& context, const CacheOptions& options)
    : groups_(context.groups),
      chunks_(context.chunks),
      write_back_(context.write_back),
      tickets_(context.tickets),
      costs_(context.costs),
      metrics_(context.metrics),
      clock_(context.clock),
      cache_blocks_(options.cache_blocks),
      blocks_per_chunk_(options.blocks_per_chunk) {}

// Returns an upper bound of the blocks that vLLM allocates for a request's whole prompt. Adds one chunk for
// the partial chunk at the end, and one block per group for draft tokens.
std::uint64_t DeviceLoads::cache_blocks_of(std::uint32_t last_end) const {
  if (last_end == 0) return cache_blocks_;
  std::uint64_t blocks = 0;
  for (const ChunkGroups::Group& group : groups_) {
    blocks += (last_end / group.tokens + 1) * std::uint64_t{blocks_per_chunk_} + 1;
  }
  return blocks;
}

// vLLM admits a load next to running ones if that leaves enough free blocks for the rest of their prompts.
// For a window group it counts blocks that were already freed as still held, so it leaves too few. Then
// requests whose loads have ended hold all blocks, none of them gets its next blocks, nothing runs that could
// free any, and the engine hangs for good (vLLM 0.31 to 0.33, Scheduler._request_remaining_blocks). Therefore
// loads run concurrently only while all of their requests fit into the cache, whatever vLLM counts. A request
// whose load has ended needs no tracking: vLLM runs it before it asks about another.
bool DeviceLoads::must_wait(std::uint32_t last_end) const {
  if (!groups_.has_windows() || cache_blocks_ == 0) return false;
  if (loading_blocks_ == 0) return false;
  return loading_blocks_ + cache_blocks_of(last_end) >= cache_blocks_;  // one block is vLLM's own
}

DeviceLoads::Begun DeviceLoads::begin(std::span<const ChunkKey> keys, const Load& load) {
  Begun begun;
  RowTransfer& transfer = begun.transfer;
  transfer.group_rows.assign(groups_.size(), 0);
  transfer.rows.reserve(keys.size());
  Job job;
  job.slots.reserve(keys.size());
  std::uint32_t group = 0;
  for (const ChunkKey& key : keys) {
    group = groups_.require_position(key, group);
    const ChunkEntry* entry = chunks_.find_resident(key);
    if (entry == nullptr) {
      throw_invalid(
          "cannot load chunk {}: it is not in host memory; load only chunks that were hits in this step",
          key.hex());
    }
    job.slots.push_back(chunks_.slot_of(entry));
    transfer.rows.push_back(entry->row);
    ++transfer.group_rows[group];
  }
  write_back_.make_room_for_uses(keys.size());
  make_room_for_one();
  Pins pins(chunks_, job.slots);
  // From the last to the first, so that the head of a prefix is evicted last.
  for (std::size_t i = job.slots.size(); i-- > 0;) {
    const Slot slot = job.slots[i];
    const auto fetched_from = pins.pin_next();
    chunks_.access(slot, load.id.request, load.priority, load.tenant);
    chunks_.claim(slot, load.family);
    if (load.returns_at > 0 && chunks_.belongs_to(slot, load.family))
      chunks_.set_return(slot, load.returns_at);
    const ChunkEntry& entry = chunks_.at(slot);
    const ChunkGroups::Group& of = groups_[entry.group];
    const std::uint32_t part = entry.depth % of.tokens;  // depth: where the chunk ends
    const std::uint32_t tokens = part == 0 ? of.tokens : part;
    if (chunks_.is_borrowed(slot)) {
      begun.hit_tokens[RequestReport::kNeighbour] += tokens;
      begun.neighbour_tokens[chunks_.neighbour_of(slot)] += tokens;
    } else {
      begun.hit_tokens[fetched_from ? *fetched_from + 1u : 0] += tokens;
    }
    job.bytes += static_cast<double>(of.bytes);
    write_back_.on_used(slot, load.tenant);
  }
  // A window's chunks stand for the whole prefix, so the widest group determines the token count.
  double tokens = 0;
  for (std::uint32_t g = 0; g < groups_.size(); ++g) {
    tokens = std::max<double>(tokens, std::uint64_t{transfer.group_rows[g]} * groups_[g].tokens);
  }
  const std::uint32_t first_group = chunks_.at(job.slots.front()).group;
  job.compute_seconds = costs_.prefill.seconds(tokens, groups_.tokens_before(first_group, load.first_end));
  job.waited_seconds = load.waited_seconds;
  job.cache_blocks = cache_blocks_of(load.last_end);
  job.began = load.began;
  job.id = load.id;
  job.ticket = transfer.ticket = tickets_.next();
  Job& running = running_.emplace(fingerprint_of(keys), Job())->second;  // the last call that may throw
  pins.keep();
  loading_blocks_ += job.cache_blocks;
  running = std::move(job);
  return begun;
}

// Checks only the last chunk of each load: other requests are least likely to use it.
bool DeviceLoads::frees_rows(const Requester& by) const {
  const auto frees = [&](const Job& job) {
    count_steps(1);
    return chunks_.frees_row(by, job.slots.back());
  };
  return std::any_of(running_.begin(), running_.end(), [&](const auto& one) { return frees(one.second); }) ||
         std::any_of(completed_.begin(), completed_.end(), frees);
}

void DeviceLoads::withdraw(Ticket ticket) {
  const auto found = std::find_if(running_.begin(), running_.end(),
                                  [&](const auto& one) { return one.second.ticket == ticket; });
  loading_blocks_ -= found->second.cache_blocks;
  for (const Slot slot : found->second.slots) chunks_.end_load(slot);
  running_.erase(found);
}

void DeviceLoads::make_room_for_one() {
  make_room(completed_, running_.size() + 1);
  // abandon() adds a running load to both; forget() then adds it again.
  make_room(abandoned_, 2 * (running_.size() + 1) + completed_.size());
}

std::optional<DeviceLoads::LoadId> DeviceLoads::complete(std::span<const ChunkKey> keys,
                                                         std::uint32_t request) {
  const auto [first, last] = running_.equal_range(fingerprint_of(keys));
  const auto is_of = [&](const auto& one) { return one.second.slots.size() == keys.size(); };
  auto found = std::find_if(first, last,
                            [&](const auto& one) { return is_of(one) && one.second.id.request == request; });
  if (found == last) found = std::find_if(first, last, is_of);
  if (found == last) return std::nullopt;
  const LoadId id = found->second.id;
  completed_.push_back(std::move(found->second));
  running_.erase(found);
  loading_blocks_ -= completed_.back().cache_blocks;
  record_outcome(completed_.back());
  if (release(completed_.back())) completed_.pop_back();
  return id;
}

void DeviceLoads::record_outcome(const Job& job) {
  const double copied = to_seconds(clock_.now() - job.began);
  costs_.on_copy(job.bytes, copied);
  const double took = job.waited_seconds + copied;
  metrics_.observe("kv_offload_load_seconds", {}, took);
  if (job.compute_seconds <= 0) return;
  const double saved = job.compute_seconds - took;
  metrics_.add(saved > 0 ? "kv_offload_saved_seconds_total" : "kv_offload_lost_seconds_total", {},
               std::abs(saved));
}

bool DeviceLoads::release(const Job& job) {
  if (!is_reported(job.ticket)) return false;
  for (const Slot slot : job.slots) chunks_.end_load(slot);
  return true;
}

// vLLM processes what a step reported before it asks again in the next step.
void DeviceLoads::poll() {
  std::erase_if(completed_, [&](const Job& job) { return release(job); });
  std::erase_if(abandoned_, [&](const AbandonedJob& job) {
    if (!is_reported(job.ticket)) return false;
    loading_blocks_ -= job.cache_blocks;
    for (const RowId row : job.rows) chunks_.release(row);
    return true;
  });
}

void DeviceLoads::forget() noexcept {
  for (auto& [fingerprint, job] : running_) forget(&job, job.cache_blocks);
  for (Job& job : completed_) forget(&job, 0);
  running_.clear();
  completed_.clear();
}

void DeviceLoads::forget(Job* job, std::uint64_t cache_blocks) noexcept {
  static_assert(std::is_same_v<Slot, RowId>);  // the rows take the place of the slots
  if (is_reported(job->ticket)) {
    job->slots.clear();
  } else {
    for (Slot& slot : job->slots) slot = chunks_.quarantine(slot);
  }
  abandoned_.push_back({job->ticket, cache_blocks, std::move(job->slots)});
}

void DeviceLoads::abandon() {
  for (auto& [fingerprint, job] : running_) {
    abandoned_.push_back({job.ticket, job.cache_blocks, {}});
    completed_.push_back(std::move(job));
  }
  running_.clear();
  poll();
}

}  // namespace kv_offload
