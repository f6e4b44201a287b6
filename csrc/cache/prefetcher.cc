// SPDX-License-Identifier: Apache-2.0
#include "cache/prefetcher.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/steps.h"

namespace kv_offload {
namespace {

constexpr std::string_view kMetric = "kv_offload_prefetched_bytes_total";
constexpr double kEvictFirst = std::numeric_limits<double>::infinity();  // as an expected return
constexpr std::size_t kAskedAtOnce = 64;  // chunks whose presence is looked up in one batch
constexpr double kStepSeconds = 0.02;     // each step continues at most kReadsInFlight reads
constexpr TierIo::Waiter kWaiter = 0;     // no request has this number
constexpr int kNoTier = -1, kUnknownTier = -2;

}  // namespace

Prefetcher::Prefetcher(const Context& context, std::uint64_t max_bytes)
    : with_(context), max_bytes_(max_bytes) {
  with_.chunks.set_on_removed([this](const ChunkEntry& entry) {
    if (present_.empty()) return;
    const auto found = present_.find(entry.key);
    if (found == present_.end()) return;
    found->second->end = end_of(entry);
    present_.erase(found);
  });
}

Prefetcher::~Prefetcher() { with_.chunks.set_on_removed({}); }

void Prefetcher::expect(const SessionId& session, std::shared_ptr<const Prompt> prompt, Nanos returns_at,
                        bool begins_now) {
  const auto earlier = tasks_.find(session);
  if (earlier != tasks_.end() && earlier->second.prompt == prompt) begins_now |= earlier->second.begins_now;
  cancel(session);
  if (prompt == nullptr || prompt->chunks.empty()) return;
  Use& client = clients_[prompt->client];
  Use& tenant = tenants_[prompt->tenant];
  try {
    Queue made;
    const Due at{begins_now ? Nanos(0) : returns_at, {session.high, session.low}};
    auto place = made.extract(made.insert(at).first);
    Task& task = tasks_[session];  // the last call that may throw
    Queue& scheduled = queues_[prompt->tenant].scheduled;
    scheduled.insert(std::move(place));
    task = {std::move(prompt), returns_at, begins_now, at, &scheduled};
    ++client.prompts;
    ++tenant.prompts;
  } catch (...) {
    remove_if_unused(prompt->client);
    throw;
  }
}

void Prefetcher::cancel(const SessionId& session) {
  const auto found = tasks_.find(session);
  if (found == tasks_.end()) return;
  found->second.queue->erase(found->second.at);
  const std::uint64_t client = found->second.prompt->client;
  --tenants_[found->second.prompt->tenant].prompts;
  tasks_.erase(found);
  --clients_.at(client).prompts;
  remove_if_unused(client);
}

void Prefetcher::forget() {
  tasks_.clear();
  queues_ = {};
  in_flight_.clear();
  for (const Prefetched& chunk : prefetched_) {
    if (chunk.is_wasted) continue;
    const ChunkEntry* entry = chunk.end == End::kNone ? with_.chunks.find(chunk.key) : nullptr;
    const End end = entry != nullptr ? end_of(*entry) : chunk.end;
    if (end == End::kUsed) uncounted_used_ += chunk.bytes;
    if (end == End::kUnused) uncounted_unused_ += chunk.bytes;
  }
  present_.clear();
  prefetched_.clear();
  clients_.clear();
  tenants_ = {};
  unused_bytes_ = 0;
}

void Prefetcher::run(Nanos now, bool is_idle) {
  count_forgotten();
  if (tasks_.empty() && prefetched_.empty()) return;
  remove_finished_reads();
  review_prefetched(now);
  const std::size_t visits = is_idle ? kPromptsWhenIdle : kPromptsPerStep;
  const Nanos end = now + (is_idle ? kIdleHorizon : kMaxLead);
  const auto has_work = [end](const Queues& queues) {
    return !queues.waiting.empty() || (!queues.scheduled.empty() && queues.scheduled.begin()->first <= end);
  };
  const auto tenants = static_cast<std::size_t>(std::ranges::count_if(queues_, has_work));
  for (Queues& queues : queues_) {
    if (!has_work(queues)) continue;
    const std::size_t most = visits / tenants;
    // Half of those that were visited, so that prompts that wait for room never take all visits.
    queues.visited = std::min(queues.visited, most);
    const std::size_t others = queues.ready.empty() ? most : queues.visited;
    std::size_t back = std::min(is_idle ? most : others / 2, queues.waiting.size());
    queues.visited -= std::min(queues.visited, 2 * back);
    for (; back > 0; --back) move(first_of(queues.waiting), &queues.ready);
    add_due(queues, now, end, is_idle, most);
  }
  visit_ready(now, is_idle, visits);
}

void Prefetcher::visit_ready(Nanos now, bool is_idle, std::size_t most) {
  std::size_t chunks = is_idle ? kChunksWhenIdle : kChunksPerStep;
  std::array<Queue::iterator, TenantShares::kMaxTenants> next;
  std::uint32_t left = 0;  // tenants with tasks to visit
  for (std::size_t i = 0; i < next.size(); ++i) {
    next[i] = queues_[i].ready.begin();
    if (next[i] != queues_[i].ready.end()) left |= std::uint32_t{1} << i;
  }
  for (; left != 0 && most > 0 && chunks > 0; --most) {
    if (in_flight_.size() >= kReadsInFlight && !is_idle) break;
    count_steps(1);
    const TenantId tenant = turns_.next(left);
    const SessionId session = session_of(*next[tenant]++);
    if (next[tenant] == queues_[tenant].ready.end()) left &= ~(std::uint32_t{1} << tenant);
    const std::uint64_t before = tenants_[tenant].bytes;
    ++queues_[tenant].visited;
    visit(session, now, is_idle, &chunks);
    const std::uint64_t read = tenants_[tenant].bytes - before;
    const double cost = static_cast<double>(read + with_.groups[0].bytes);
    turns_.charge(tenant, cost / with_.chunks.reader(tenant).weight);
  }
}

// Half of the prompts that are checked are the earliest ones. The others follow those of the last call: a
// long prompt may be due before a short one that returns earlier.
void Prefetcher::add_due(Queues& queues, Nanos now, Nanos end, bool is_idle, std::size_t most) {
  const Queue& scheduled = queues.scheduled;
  for (const bool is_earliest : {true, false}) {
    auto next = is_earliest || is_idle ? scheduled.begin() : scheduled.upper_bound(queues.last);
    // All prompts up to the horizon have been checked: start again.
    if (next == scheduled.end() || next->first > end) next = scheduled.begin();
    for (std::size_t left = most / 2; left > 0 && next != scheduled.end() && next->first <= end; --left) {
      count_steps(1);
      const Due at = *next++;
      if (!is_earliest) queues.last = at;
      Task& task = tasks_.at(session_of(at));
      if (is_idle || is_due(task, now)) move(task, &queues.ready);
    }
  }
}

bool Prefetcher::is_due(const Task& task, Nanos now) const {
  return task.begins_now || task.returns_at <= now + lead_of(*task.prompt);
}

void Prefetcher::visit(const SessionId& session, Nanos now, bool is_idle, std::size_t* chunks) {
  Task& task = tasks_.at(session);
  if (now > task.returns_at + kGrace) return cancel(session);
  const bool is_due_now = is_due(task, now);
  if (!is_due_now && !is_idle) return move(task, &queues_of(task).scheduled);
  // What was read while the engine was idle may have been evicted or cancelled since.
  if (!task.is_due) task.next = task.asked = 0;
  task.is_due = is_due_now && !is_idle;
  const Step step = advance(task, chunks, is_idle);
  if (!task.is_due) return move(task, &queues_of(task).scheduled);
  if (step == Step::kEnd) return cancel(session);
  if (step == Step::kLater) move(task, &queues_of(task).waiting);
}

void Prefetcher::move(Task& task, Queue* to) {
  auto place = task.queue->extract(task.at);
  if (to == &queues_of(task).waiting) {
    task.at.first = Nanos(++last_wait_);
  } else {
    task.at.first = task.begins_now ? Nanos(0) : task.returns_at;
  }
  place.value() = task.at;
  to->insert(std::move(place));
  task.queue = to;
}

void Prefetcher::make_way() {
  for (; in_flight_.size() > kReadsInFlight; in_flight_.pop_back()) {
    count_steps(1);
    // A read without waiters is cancelled.
    if (const auto read = with_.ops.await(in_flight_.back(), kWaiter))
      with_.ops.stop_awaiting(*read, kWaiter);
  }
}

Nanos Prefetcher::lead_of(const Prompt& prompt) const {
  double seconds = kStepSeconds * static_cast<double>(prompt.chunks.size() / kReadsInFlight);
  double slowest = 0;
  for (std::size_t tier = 0; tier < with_.ops.size(); ++tier)
    slowest = std::max(slowest, with_.ops.estimate_read_seconds(tier, prompt.bytes));
  seconds = std::min(seconds + 2 * slowest, to_seconds(kMaxLead - kMinLead));
  return kMinLead + std::chrono::duration_cast<Nanos>(std::chrono::duration<double>(seconds));
}

// ---- chunks that were prefetched

void Prefetcher::remove_finished_reads() {
  std::erase_if(in_flight_, [&](Slot slot) { return with_.chunks.at(slot).state != ChunkState::kFetching; });
}

void Prefetcher::review_prefetched(Nanos now) {
  for (std::size_t left = std::min(prefetched_.size(), kChunksPerStep); left > 0; --left) {
    count_steps(1);
    const Prefetched& chunk = prefetched_.front();
    if (!review(prefetched_.front(), now)) {
      prefetched_.splice(prefetched_.end(), prefetched_, prefetched_.begin());
    } else {
      clients_.at(chunk.client).bytes -= chunk.bytes;
      tenants_[chunk.tenant].bytes -= chunk.bytes;
      remove_if_unused(chunk.client);
      prefetched_.pop_front();
    }
  }
}

Prefetcher::End Prefetcher::end_of(const ChunkEntry& entry) {
  if (entry.state != ChunkState::kResident) return End::kFailed;
  return entry.holder != 0 ? End::kUsed : End::kUnused;
}

bool Prefetcher::review(Prefetched& chunk, Nanos now) {
  if (chunk.is_wasted) return now > chunk.expires;
  End end = chunk.end;
  if (const ChunkEntry* entry = end == End::kNone ? with_.chunks.find(chunk.key) : nullptr) {
    if (entry->state != ChunkState::kResident) return false;  // its read has not ended
    end = end_of(*entry);
    const double returns_at = entry->returns_at;  // a later hint may have moved it
    if (end == End::kUnused) {
      if (now <= chunk.expires || (std::isfinite(returns_at) && returns_at > to_seconds(now - kGrace)))
        return false;
      with_.chunks.set_return(with_.chunks.slot_of(entry), kEvictFirst);
    }
  }
  count(end, chunk.bytes);  // first, because it may throw
  unused_bytes_ -= chunk.bytes;
  if (chunk.end == End::kNone) present_.erase(chunk.key);
  chunk.end = end;
  chunk.is_wasted = end == End::kUnused;
  chunk.expires = now + kPenalty;
  return !chunk.is_wasted;
}

void Prefetcher::count(End end, std::uint64_t bytes) {
  if (end == End::kUsed) with_.metrics.add(kMetric, {"used"}, static_cast<double>(bytes));
  if (end == End::kUnused) with_.metrics.add(kMetric, {"unused"}, static_cast<double>(bytes));
}

void Prefetcher::count_forgotten() {
  for (const auto& [end, bytes] :
       {std::pair{End::kUsed, &uncounted_used_}, {End::kUnused, &uncounted_unused_}}) {
    if (*bytes == 0) continue;
    count(end, *bytes);
    *bytes = 0;
  }
}

bool Prefetcher::has_room(const Task& task, std::uint64_t bytes) const {
  const std::uint64_t its_bytes = clients_.at(task.prompt->client).bytes;
  const std::uint64_t its_limit = clients_.size() > 1 ? max_bytes_ / 2 : max_bytes_;
  const TenantId tenant = task.prompt->tenant;
  return unused_bytes_ + bytes <= max_bytes_ && its_bytes + bytes <= its_limit &&
         tenants_[tenant].bytes + bytes <= limit_of(tenant);
}

std::uint64_t Prefetcher::limit_of(TenantId tenant) const {
  const TenantShares* shares = with_.chunks.tenants();
  if (shares == nullptr) return max_bytes_;
  const auto share_of = [&](std::size_t of) {
    return static_cast<std::uint64_t>(shares->weight(static_cast<TenantId>(of)) *
                                      static_cast<double>(max_bytes_));
  };
  std::uint64_t others = 0;  // what other tenants use, and the rest of the shares that they may need
  for (std::size_t i = 0; i < shares->size(); ++i) {
    if (i != tenant && !tenants_[i].is_none()) others += std::max(tenants_[i].bytes, share_of(i));
  }
  return std::max(share_of(tenant), max_bytes_ - std::min(max_bytes_, others));
}

void Prefetcher::remove_if_unused(std::uint64_t client) {
  const auto found = clients_.find(client);
  if (found->second.is_none()) clients_.erase(found);
}

// ---- reads

Prefetcher::Step Prefetcher::advance(Task& task, std::size_t* chunks, bool is_idle) {
  const std::vector<Chunk>& prompt = task.prompt->chunks;
  PlannedReads reads(with_.chunks, with_.ops, std::min(prompt.size() - task.next, *chunks));
  Step step = Step::kNext;
  while (step == Step::kNext && task.next < prompt.size() && *chunks > 0) {
    if (!is_idle && in_flight_.size() >= kReadsInFlight) break;
    --*chunks;
    count_steps(1);
    step = fetch(task, prompt[task.next], &reads);
    if (step == Step::kNext) ++task.next;
  }
  if (reads.size() > 0) reads.submit(task.returns_at + kGrace, false);
  return task.next == prompt.size() ? Step::kEnd : step;
}

Prefetcher::Step Prefetcher::fetch(Task& task, const Chunk& chunk, PlannedReads* reads) {
  if (with_.chunks.find(chunk.key) != nullptr) return Step::kNext;
  if (with_.chunks.use_neighbours(chunk.key, chunk.group)) return Step::kNext;
  const ChunkGroups::Group& group = with_.groups[chunk.group];
  const int tier = tier_of(task, chunk);
  if (tier == kUnknownTier) return Step::kLater;
  if (tier == kNoTier) return group.full_attention ? Step::kEnd : Step::kNext;
  if (!has_room(task, group.bytes)) return Step::kLater;
  // The index rounds returns to float: chunks of this prompt must not count as expected later.
  const auto returns_at = static_cast<float>(to_seconds(task.returns_at));
  const RowId row = with_.row_provider.take_spare(
      chunk.group, task.prompt->tenant, std::nextafter(returns_at, std::numeric_limits<float>::infinity()));
  if (row == kNoRow) return Step::kLater;
  FreeRow free_row(with_.chunks, row);
  const EntryInfo entry_info{0, chunk.parent, chunk.depth, 0, task.prompt->priority, 0, task.prompt->tenant};
  const Slot slot = with_.chunks.insert_fetching(chunk.key, chunk.group, row, entry_info);
  free_row.keep();
  reads->add({slot, static_cast<std::uint8_t>(tier)});
  with_.chunks.claim(slot, task.prompt->family, true);
  with_.chunks.set_return(slot, to_seconds(task.returns_at));
  std::list<Prefetched> added;
  added.push_back(
      {chunk.key, task.prompt->client, group.bytes, task.prompt->tenant, task.returns_at + kGrace});
  in_flight_.push_back(slot);
  try {
    present_.emplace(chunk.key, added.begin());  // the last call that may throw
  } catch (...) {
    in_flight_.pop_back();  // the slot becomes free
    throw;
  }
  prefetched_.splice(prefetched_.end(), added);
  unused_bytes_ += group.bytes;
  clients_.at(task.prompt->client).bytes += group.bytes;
  tenants_[task.prompt->tenant].bytes += group.bytes;
  return Step::kNext;
}

int Prefetcher::tier_of(Task& task, const Chunk& chunk) {
  const bool was_asked = task.next < task.asked;
  int found = kNoTier;
  for (std::size_t tier = 0; tier < with_.ops.size(); ++tier) {
    if (!with_.ops.is_readable(tier)) continue;
    const Presence presence = with_.ops.contains(tier, chunk.key);
    if (presence == Presence::kPresent) return static_cast<int>(tier);
    if (presence == Presence::kAbsent || presence == Presence::kLookupFailed) continue;
    // The prompt has asked already: a stale miss is the answer, or it would ask forever.
    if (presence == Presence::kStaleMiss && was_asked) continue;
    found = kUnknownTier;
    if (!was_asked) {
      ask(tier, task);
    } else if (presence == Presence::kSkipped) {  // by a request's lookup that had begun before
      with_.ops.queue_lookup(tier, chunk.key, presence, task.prompt->tenant, {});
    }
  }
  if (found == kUnknownTier && !was_asked) task.asked = task.next + kAskedAtOnce;
  return found;
}

void Prefetcher::ask(std::size_t tier, const Task& task) {
  const std::vector<Chunk>& prompt = task.prompt->chunks;
  const std::size_t end = std::min(prompt.size(), task.next + kAskedAtOnce);
  for (std::size_t i = task.next; i < end; ++i) {
    count_steps(1);
    const Presence presence = with_.ops.contains(tier, prompt[i].key);
    if (must_ask(presence)) with_.ops.queue_lookup(tier, prompt[i].key, presence, task.prompt->tenant, {});
  }
}

}  // namespace kv_offload
