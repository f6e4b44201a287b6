// SPDX-License-Identifier: Apache-2.0
#include "cache/store_path.h"

#include <algorithm>
#include <string_view>
#include <utility>
#include <vector>

#include "base/refused_chunks.h"
#include "base/status.h"

namespace kv_offload {
namespace {

constexpr std::size_t kAhead = 8;  // prefetch distance in chunks

// Rows that prepare() took and has not returned yet. No rank knows them, so if prepare() throws they are free
// at once and their keys absent.
class TakenRows {
 public:
  TakenRows(HostChunks& chunks, std::size_t most) : chunks_(chunks) { slots_.reserve(most); }
  ~TakenRows() {
    chunks_.leave_neighbours();
    if (row_ != kNoRow) chunks_.free(row_);
    for (const Slot slot : slots_) chunks_.discard(slot);
  }
  TakenRows(const TakenRows&) = delete;
  TakenRows& operator=(const TakenRows&) = delete;
  void hold(RowId row) { row_ = row; }
  void hold_as(Slot slot) {  // the chunk that now owns the row
    row_ = kNoRow;
    slots_.push_back(slot);
  }
  void release_all() { slots_.clear(); }

 private:
  HostChunks& chunks_;
  RowId row_ = kNoRow;
  std::vector<Slot> slots_;
};

}  // namespace

StoreGrant StorePath::prepare(RequestHandle handle, std::span<const ChunkKey> keys,
                              std::span<const std::uint32_t> depths) {
  const RequestState& request = context_.requests.require_live(handle);
  if (!depths.empty() && depths.size() != keys.size()) {
    throw_invalid("{} depths were given for {} keys; give one per key or none", depths.size(), keys.size());
  }
  std::uint32_t group = 0;
  for (const ChunkKey& key : keys) group = context_.groups.require_position(key, group);
  context_.requests.admit(handle);
  if (closed_ || request.options.skip_store) return {};
  learn_prefill(handle, keys, depths);
  return take_rows(handle, keys, depths);
}

StoreGrant StorePath::take_rows(RequestHandle handle, std::span<const ChunkKey> keys,
                                std::span<const std::uint32_t> depths) {
  const RequestState& request = context_.requests.at(handle);
  Offers& offers = context_.requests.offers(handle);
  StoreGrant grant;
  grant.transfer.group_rows.assign(context_.groups.size(), 0);
  grant.accepted.reserve(keys.size());
  grant.transfer.rows.reserve(keys.size());
  std::vector<std::uint64_t> new_chunks(context_.groups.size(), 0);
  TakenRows taken(context_.chunks, keys.size());
  const bool hears_all = context_.tickets.hear_all_ranks();
  // A tier writes only what is stored in host memory. So with a tier, all chunks are stored.
  const double returns_at = context_.write_back.writes() ? 0 : request.returns_at(context_.chunks.now());
  std::uint32_t group = 0;
  for (std::uint32_t i = 0; i < keys.size(); ++i) {
    if (i + kAhead < keys.size()) context_.chunks.prefetch(keys[i + kAhead]);
    const ChunkKey& key = keys[i];
    group = context_.groups.position_of(key).value_or(group);  // prepare() has checked it
    const std::uint32_t depth = depths.empty() ? 0 : depths[i];
    // Only chunks of full-attention groups form a chain and have a parent.
    const ChunkId parent =
        context_.groups[group].full_attention ? offers.follow(group, key, depths.empty() ? i + 1 : depth) : 0;
    // Already has a row in some state: a use, and neither accepted nor declined.
    if (const ChunkEntry* known = context_.chunks.find(key)) {
      const Slot slot = context_.chunks.slot_of(known);
      context_.chunks.access(slot, request.number, request.priority(), request.options.tenant);
      hold(request, offers, slot, false);
      if (known->state == ChunkState::kResident) context_.write_back.on_used(slot, request.options.tenant);
      continue;
    }
    if (context_.chunks.may_be_at_neighbour(key) && context_.chunks.use_neighbours(key, group))
      continue;  // not stored twice
    ++new_chunks[group];
    // After the first decline of a group, its later keys are declined too, which avoids holes.
    if (offers.is_declined(group, key)) continue;
    const RowId row = hears_all
                          ? context_.row_provider.take(group, request.requester(), &grant.evicted, returns_at)
                          : kNoRow;
    if (row == kNoRow) {
      offers.decline(group, key);
      continue;
    }
    taken.hold(row);
    if (grant.transfer.ticket == kNoTicket) grant.transfer.ticket = context_.tickets.next();
    const bool first = grant.transfer.group_rows[group] == 0;
    const Slot slot = context_.chunks.insert_filling(key, group, row, request.entry_info(parent, depth),
                                                     grant.transfer.ticket, first);
    taken.hold_as(slot);
    hold(request, offers, slot, true);
    grant.accepted.push_back(i);
    grant.transfer.rows.push_back(row);
    ++grant.transfer.group_rows[group];
  }
  count_declined(grant, new_chunks, hears_all);
  context_.row_provider.flush_metrics();
  taken.release_all();
  return grant;
}

void StorePath::hold_for_session(const RequestState& request, Offers& offers, Slot slot) {
  if (request.options.returns_in > 0 && context_.chunks.belongs_to(slot, request.options.family))
    context_.chunks.set_return(slot, request.returns_at(context_.chunks.now()));
  const ChunkEntry& entry = context_.chunks.at(slot);
  offers.hold(entry.group, chunk_id(entry.key));
}

void StorePath::count_declined(const StoreGrant& grant, std::span<const std::uint64_t> new_chunks,
                               bool hears_all) {
  for (std::uint32_t g = 0; g < context_.groups.size(); ++g) {
    const std::uint64_t declined = new_chunks[g] - grant.transfer.group_rows[g];
    if (declined == 0) continue;
    context_.metrics.add("kv_offload_dropped_bytes_total",
                         {"cpu", hears_all ? std::string_view("pressure") : to_string(MissReason::kHostLost)},
                         static_cast<double>(declined * context_.groups[g].bytes));
  }
}

// Chunks offered now are computed in this step, except those that the GPU's prefix cache had and those that
// vLLM offers again (after a reset). The group with the most tokens determines the amount.
void StorePath::learn_prefill(RequestHandle handle, std::span<const ChunkKey> keys,
                              std::span<const std::uint32_t> depths) {
  const RequestState& request = context_.requests.at(handle);
  double most = 0, context_of_most = 0;
  for (std::size_t begin = 0, end = 0; begin < keys.size(); begin = end) {
    const std::uint32_t id = keys[begin].group_id();
    while (end < keys.size() && keys[end].group_id() == id) ++end;
    const auto group = context_.groups.position_of(keys[begin]);
    if (!group) return;
    const std::uint32_t chunk = context_.groups[*group].tokens;
    const std::uint32_t offered = request.offers.end(*group);
    double tokens = 0, token_context = 0;
    for (std::size_t i = begin; i < end; ++i) {
      const std::uint32_t depth = depths.empty() ? 0 : depths[i];
      // Offered before, or a hit of the prefix cache: not computed in this step. Without a span, chunks that
      // already have a row count as not computed.
      const bool before = depth > 0 && (depth <= offered || depth < request.first_end);
      if (before || (request.first_end == 0 && context_.chunks.find(keys[i]) != nullptr)) continue;
      tokens += chunk;
      token_context += depth > chunk ? static_cast<double>(chunk) * (depth - 0.5 * chunk) : 0;
    }
    if (!depths.empty()) context_.requests.offers(handle).extend(*group, depths[end - 1]);
    if (tokens <= most) continue;
    most = tokens;
    context_of_most = token_context / tokens;
  }
  if (most > 0) context_.costs.prefill.observe(most, context_of_most);
}

void StorePath::complete(std::span<const ChunkKey> keys, bool success) {
  try {
    finish(keys, success);
  } catch (...) {
    // vLLM does not repeat the call: chunks that are not resident yet would never be.
    for (const ChunkKey& key : keys) {
      const ChunkEntry* entry = context_.chunks.find(key);
      if (entry != nullptr && entry->state == ChunkState::kFilling)
        context_.chunks.discard_store(context_.chunks.slot_of(entry));
    }
    throw;
  }
}

void StorePath::finish(std::span<const ChunkKey> keys, bool success) {
  std::vector<Slot> stored;
  stored.reserve(keys.size());
  Ticket known = kNoTicket;
  TicketResult result = TicketResult::kPending;
  std::uint64_t failed_groups = 0;
  for (const ChunkKey& key : keys) {
    const ChunkEntry* entry = context_.chunks.find(key);
    if (entry == nullptr || entry->state != ChunkState::kFilling) continue;
    if (entry->ticket != known) {
      known = entry->ticket;
      failed_groups = 0;
      result = context_.tickets.store_result(known, &failed_groups);
    }
    const Slot slot = context_.chunks.slot_of(entry);
    // A rank of another host may report after vLLM has completed the store. Otherwise a chunk is stored only
    // if vLLM and all ranks succeeded; a rank can refuse the chunks of single groups.
    if (success && result == TicketResult::kPending && context_.tickets.may_be_late()) {
      finish_later(known, key);
    } else if (!success || result != TicketResult::kDone || failed_groups == kDeviceFailed) {
      fail(slot);
    } else if (is_refused(failed_groups, entry->group, entry->first)) {
      refuse(slot);
    } else {
      stored.push_back(slot);
    }
  }
  // Deepest first, so that the head of a prefix is evicted last.
  std::sort(stored.begin(), stored.end(), [&](Slot a, Slot b) {
    const ChunkEntry &first = context_.chunks.at(a), &second = context_.chunks.at(b);
    return first.depth != second.depth ? first.depth > second.depth : first.row > second.row;
  });
  double tokens = 0, bytes = 0;
  for (std::size_t i = 0; i < stored.size(); ++i) {
    if (i + kAhead < stored.size()) context_.chunks.prefetch(stored[i + kAhead]);
    context_.chunks.finish_store(stored[i]);
    const auto& group = context_.groups[context_.chunks.at(stored[i]).group];
    tokens += group.tokens;
    bytes += static_cast<double>(group.bytes);
  }
  if (!stored.empty()) {
    context_.metrics.add("kv_offload_stored_tokens_total", {}, tokens);
    context_.metrics.add("kv_offload_stored_bytes_total", {}, bytes);
  }
  std::reverse(stored.begin(), stored.end());
  context_.write_back.on_stored(stored);
}

void StorePath::finish_later(Ticket ticket, const ChunkKey& key) {
  if (late_.empty() || late_.back().ticket != ticket) late_.push_back({ticket, {}});
  late_.back().keys.push_back(key);
}

void StorePath::poll() {
  for (std::size_t i = 0; i < late_.size();) {
    std::uint64_t failed_groups = 0;
    if (context_.tickets.store_result(late_[i].ticket, &failed_groups) == TicketResult::kPending) {
      ++i;
      continue;
    }
    LateStore store = std::move(late_[i]);
    late_.erase(late_.begin() + static_cast<std::ptrdiff_t>(i));
    // A reset may have dropped a chunk, and a later store may fill it again.
    std::erase_if(store.keys, [&](const ChunkKey& key) {
      const ChunkEntry* entry = context_.chunks.find(key);
      return entry == nullptr || entry->ticket != store.ticket;
    });
    complete(store.keys, true);
  }
}

void StorePath::fail(Slot slot) {
  context_.metrics.add("kv_offload_failures_total", {"cpu", "store", "device"});
  drop(slot, MissReason::kIoError);
}

void StorePath::refuse(Slot slot) {
  context_.metrics.add("kv_offload_dropped_bytes_total", {"cpu", "incomplete"},
                       static_cast<double>(context_.groups[context_.chunks.at(slot).group].bytes));
  drop(slot, MissReason::kIncomplete);
}

void StorePath::drop(Slot slot, MissReason reason) {
  context_.key_history.record_removal(context_.chunks.at(slot).key, static_cast<std::uint8_t>(reason));
  context_.chunks.discard_store(slot);
}

}  // namespace kv_offload
