// prepare_load and complete_load.
//
// vLLM tells which keys of a load have ended, not which load. Two loads may
// share keys, so a load is known again by the fold of all of its keys; its pins
// go when its ticket is reported too, which is what says that no rank reads its
// rows any more.
#include <algorithm>

#include "cache/cache_impl.h"

namespace kv_offload {
namespace {

std::uint64_t fold(std::span<const ChunkKey> keys) {
  std::uint64_t sum = keys.size();
  for (const ChunkKey& key : keys) sum += KeyMemory::fingerprint(key);
  return sum;
}

}  // namespace

// Upper bound of what vLLM gives a request for its whole prompt. A chunk more, for
// the part of one at its end, and one block of each group for what it drafts.
std::uint64_t TieredCache::Impl::cache_blocks_of(const RequestState& request) const {
  if (request.last_end == 0) return options.cache_blocks;
  std::uint64_t blocks = 0;
  for (const ChunkGroups::Group& group : groups) {
    blocks += (request.last_end / group.tokens + 1) * std::uint64_t{options.blocks_per_chunk} + 1;
  }
  return blocks;
}

// vLLM admits a load beside others that run when it leaves free what those still
// need for the rest of their prompts. Of a group with a window it counts blocks that
// were given back as if they were still held, so it leaves too few: requests whose
// loads ended hold all blocks, none of them gets its next ones, nothing runs that could
// give any back, and the engine stands still for good (0.31 to 0.33, Scheduler.
// _request_remaining_blocks). So loads run side by side only as long as all of their
// requests fit into the cache, whatever vLLM counts. One whose load ended needs no
// watching: vLLM lets it run before it asks about another.
bool TieredCache::Impl::must_hold_back(const RequestState& request) const {
  if (!groups.has_windows() || options.cache_blocks == 0) return false;
  std::uint64_t loading = 0;
  for (const LoadJob& job : load_jobs) loading += job.completed ? 0 : job.cache_blocks;
  for (const ForgottenLoad& load : forgotten_loads) loading += load.cache_blocks;
  if (loading == 0) return false;
  return loading + cache_blocks_of(request) >= options.cache_blocks;  // one is vLLM's own
}

RowTransfer TieredCache::Impl::prepare_load(RequestHandle handle, std::span<const ChunkKey> keys) {
  RequestState& request = require_live(handle);
  if (closed) throw_invalid("prepare_load was called after close()");
  RowTransfer transfer;
  transfer.group_rows.assign(groups.size(), 0);
  if (keys.empty()) return transfer;
  LoadJob job;
  job.fold = fold(keys);
  job.slots.reserve(keys.size());
  transfer.rows.reserve(keys.size());
  std::uint32_t group = 0;
  for (const ChunkKey& key : keys) {
    group = groups.require_position(key, group);
    const ChunkEntry* entry = chunks.find(key);
    if (entry == nullptr || entry->state != ChunkState::kResident) {
      throw_invalid(
          "chunk {} is to be loaded but is not in host memory; load only what was a hit in this step",
          key.hex());
    }
    job.slots.push_back(chunks.slot_of(entry));
    transfer.rows.push_back(entry->row);
    request.offered[group] = {chunk_id(key), entry->depth};
    ++transfer.group_rows[group];
  }
  RequestReport::Places hit_tokens{};
  // From the last to the first: the head of a prefix is the last to go.
  for (std::size_t i = job.slots.size(); i-- > 0;) {
    const Slot slot = job.slots[i];
    const ChunkEntry& entry = chunks.at(slot);
    const auto fetched_from = chunks.begin_load(slot);
    chunks.access(slot, request.number, request.priority());
    hit_tokens[fetched_from ? *fetched_from + 1u : 0] += groups[entry.group].tokens;
    job.bytes += static_cast<double>(groups[entry.group].bytes);
    write_back.note_used(slot);
  }
  for (std::size_t i = 0; i < hit_tokens.size(); ++i) {
    if (hit_tokens[i] == 0) continue;
    const std::string_view tier = i == 0 ? "cpu" : ops.name(i - 1);
    request.report.hit_tokens[i] += hit_tokens[i];
    metrics.add("kv_offload_hit_tokens_total", {tier}, static_cast<double>(hit_tokens[i]));
    metrics.add("kv_offload_lookup_tokens_total", {}, static_cast<double>(hit_tokens[i]));
  }
  // A window's chunks stand for all of the prefix: the widest group says how much it is.
  double tokens = 0;
  for (std::uint32_t g = 0; g < groups.size(); ++g) {
    tokens = std::max<double>(tokens, std::uint64_t{transfer.group_rows[g]} * groups[g].tokens);
  }
  job.compute_seconds =
      costs.prefill.seconds(tokens, context_of(request, chunks.at(job.slots.front()).group));
  if (request.waiting || request.expired)
    job.waited_seconds = to_seconds(request.pass_time - request.waits_since);
  job.cache_blocks = cache_blocks_of(request);
  job.prepared = request.pass_step == step ? request.pass_time : clock.now();
  admit(handle, request);
  job.ticket = transfer.ticket = tickets.next();
  load_jobs.push_back(std::move(job));
  return transfer;
}

void TieredCache::Impl::complete_load(std::span<const ChunkKey> keys) {
  const std::uint64_t wanted = fold(keys);
  const auto job = std::find_if(load_jobs.begin(), load_jobs.end(), [&](const LoadJob& candidate) {
    return !candidate.completed && candidate.fold == wanted && candidate.slots.size() == keys.size();
  });
  if (job == load_jobs.end()) return;  // of before a reset
  job->completed = true;
  note_outcome(*job);
  if (release_load(*job)) load_jobs.erase(job);
}

bool TieredCache::Impl::release_load(const LoadJob& job) {
  if (!tickets.is_reported(job.ticket, TicketKind::kLoad)) return false;
  for (const Slot slot : job.slots) chunks.end_load(slot);
  return true;
}

// What a step reported vLLM takes up before it asks in the next one.
void TieredCache::Impl::poll_loads() {
  std::erase_if(load_jobs, [&](const LoadJob& job) { return job.completed && release_load(job); });
  std::erase_if(forgotten_loads, [&](const ForgottenLoad& load) {
    return tickets.is_reported(load.ticket, TicketKind::kLoad);
  });
}

RowTransfer TieredCache::prepare_load(RequestHandle request, std::span<const ChunkKey> keys) {
  return impl_->prepare_load(request, keys);
}

void TieredCache::complete_load(std::span<const ChunkKey> keys) {
  if (!impl_->closed) impl_->complete_load(keys);
}

int TieredCache::load_source(const ChunkKey& key) const {
  const ChunkEntry* entry = impl_->chunks.find(key);
  if (entry == nullptr || entry->origin != ChunkOrigin::kTier) return -1;
  return entry->tier;
}

}  // namespace kv_offload
