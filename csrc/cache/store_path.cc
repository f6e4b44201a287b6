// prepare_store and complete_store.
#include <algorithm>

#include "cache/cache_impl.h"

namespace kv_offload {
namespace {

constexpr std::size_t kAhead = 8;  // of what comes, the cells are fetched ahead of its turn

}  // namespace

// Rows that a prepare_store took and has not handed out yet. No rank knows of them: when it throws they are
// free at once, and their keys absent.
class TieredCache::Impl::Taken {
 public:
  Taken(HostChunks& chunks, std::size_t most) : chunks_(chunks) { slots_.reserve(most); }
  ~Taken() {
    if (row_ != kNoRow) chunks_.free(row_);
    for (const Slot slot : slots_) chunks_.discard(slot);
  }
  Taken(const Taken&) = delete;
  Taken& operator=(const Taken&) = delete;
  void hold(RowId row) { row_ = row; }
  void fill(Slot slot) {  // the entry that the row became
    row_ = kNoRow;
    slots_.push_back(slot);
  }
  void hand_out() { slots_.clear(); }

 private:
  HostChunks& chunks_;
  RowId row_ = kNoRow;
  std::vector<Slot> slots_;
};

StoreGrant TieredCache::Impl::prepare_store(RequestHandle handle, std::span<const ChunkKey> keys,
                                            std::span<const std::uint32_t> depths) {
  RequestState& request = require_live(handle);
  if (!depths.empty() && depths.size() != keys.size()) {
    throw_invalid("{} depths were given for {} keys; give one per key or none", depths.size(), keys.size());
  }
  std::uint32_t group = 0;
  for (const ChunkKey& key : keys) group = groups.require_position(key, group);
  admit(handle, request);
  StoreGrant grant;
  if (closed || request.options.skip_store) return grant;
  grant.transfer.group_rows.assign(groups.size(), 0);
  grant.accepted.reserve(keys.size());
  grant.transfer.rows.reserve(keys.size());
  std::vector<std::uint64_t> fresh(groups.size(), 0);
  note_prefill(request, keys, depths);
  Taken taken(chunks, keys.size());
  group = 0;
  for (std::uint32_t i = 0; i < keys.size(); ++i) {
    if (i + kAhead < keys.size()) chunks.prefetch(keys[i + kAhead]);
    const ChunkKey& key = keys[i];
    group = groups.require_position(key, group);
    const std::uint32_t depth = depths.empty() ? 0 : depths[i];
    const ChunkId parent =
        groups[group].full_attention ? request.follow(group, key, depths.empty() ? i + 1 : depth) : 0;
    if (const ChunkEntry* known = chunks.find(key)) {
      const Slot slot = chunks.slot_of(known);
      chunks.access(slot, request.number, request.priority());
      if (known->state == ChunkState::kResident) write_back.note_used(slot);
      continue;
    }
    fresh[group] += groups[group].tokens;
    auto& declined = request.declined[group];
    if (declined && *declined == key) declined.reset();  // vLLM starts from there again
    if (declined) continue;
    const RowId row = row_supply.take(group, request.number, &grant.evicted);
    if (row == kNoRow) {
      declined = key;
      continue;
    }
    taken.hold(row);
    if (grant.transfer.ticket == kNoTicket) grant.transfer.ticket = tickets.next();
    taken.fill(chunks.insert_filling(key, group, row, request.about(parent, depth), grant.transfer.ticket));
    grant.accepted.push_back(i);
    grant.transfer.rows.push_back(row);
    ++grant.transfer.group_rows[group];
  }
  for (std::uint32_t g = 0; g < groups.size(); ++g) {
    const std::uint64_t declined = fresh[g] / groups[g].tokens - grant.transfer.group_rows[g];
    if (declined == 0) continue;
    metrics.add("kv_offload_dropped_bytes_total", {"cpu", "pressure"},
                static_cast<double>(declined * groups[g].bytes));
  }
  row_supply.flush_metrics();
  taken.hand_out();
  return grant;
}

// What is offered now is computed in this step, but for what the device cache had
// and for what vLLM offers again (after a reset). The widest group says how much.
void TieredCache::Impl::note_prefill(RequestState& request, std::span<const ChunkKey> keys,
                                     std::span<const std::uint32_t> depths) {
  double most = 0, context_of_most = 0;
  for (std::size_t begin = 0, end = 0; begin < keys.size(); begin = end) {
    const std::uint32_t id = keys[begin].group_id();
    while (end < keys.size() && keys[end].group_id() == id) ++end;
    const auto group = groups.position_of(keys[begin]);
    if (!group) return;
    const std::uint32_t chunk = groups[*group].tokens;
    std::uint32_t& offered = request.offered_end[*group];
    double tokens = 0, token_context = 0;
    for (std::size_t i = begin; i < end; ++i) {
      const std::uint32_t depth = depths.empty() ? 0 : depths[i];
      const bool before = depth > 0 && (depth <= offered || depth < request.first_end);
      if (before || (request.first_end == 0 && chunks.find(keys[i]) != nullptr)) continue;
      tokens += chunk;
      token_context += depth > chunk ? static_cast<double>(chunk) * (depth - 0.5 * chunk) : 0;
    }
    if (!depths.empty()) offered = std::max(offered, depths[end - 1]);
    if (tokens <= most) continue;
    most = tokens;
    context_of_most = token_context / tokens;
  }
  if (most > 0) costs.prefill.note(most, context_of_most);
}

void TieredCache::Impl::complete_store(std::span<const ChunkKey> keys, bool success) {
  std::vector<Slot> stored;
  stored.reserve(keys.size());
  Ticket known = kNoTicket;
  TicketResult result = TicketResult::kPending;
  std::uint64_t failed_groups = 0;
  for (const ChunkKey& key : keys) {
    const ChunkEntry* entry = chunks.find(key);
    if (entry == nullptr || entry->state != ChunkState::kFilling) continue;
    if (entry->ticket != known) {
      known = entry->ticket;
      failed_groups = 0;
      result = tickets.store_result(known, &failed_groups);
    }
    const Slot slot = chunks.slot_of(entry);
    if (!success || result != TicketResult::kDone || (failed_groups >> entry->group & 1) != 0) {
      fail_store(slot);
    } else {
      stored.push_back(slot);
    }
  }
  // The deepest first, so that the head of a prefix is the last to go.
  std::sort(stored.begin(), stored.end(), [&](Slot a, Slot b) {
    const std::uint32_t depth_a = chunks.at(a).depth, depth_b = chunks.at(b).depth;
    return depth_a != depth_b ? depth_a > depth_b : chunks.at(a).row > chunks.at(b).row;
  });
  double tokens = 0;
  for (std::size_t i = 0; i < stored.size(); ++i) {
    if (i + kAhead < stored.size()) chunks.prefetch(stored[i + kAhead]);
    chunks.finish_store(stored[i]);
    tokens += groups[chunks.at(stored[i]).group].tokens;
  }
  if (tokens > 0) metrics.add("kv_offload_stored_tokens_total", {}, tokens);
  std::reverse(stored.begin(), stored.end());
  write_back.note_stored(stored);
}

void TieredCache::Impl::fail_store(Slot slot) {
  metrics.add("kv_offload_failures_total", {"cpu", "store", "device"});
  memory.note_gone(chunks.at(slot).key, static_cast<std::uint8_t>(MissReason::kIoError));
  chunks.discard_store(slot);
}

StoreGrant TieredCache::prepare_store(RequestHandle request, std::span<const ChunkKey> keys,
                                      std::span<const std::uint32_t> depths) {
  return impl_->prepare_store(request, keys, depths);
}

void TieredCache::complete_store(std::span<const ChunkKey> keys, bool success) {
  if (!impl_->closed) impl_->complete_store(keys, success);
}

}  // namespace kv_offload
