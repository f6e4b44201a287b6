// SPDX-License-Identifier: Apache-2.0
#include "cache/sessions.h"

#include <algorithm>
#include <limits>
#include <unordered_set>

#include "base/steps.h"
#include "policy/expected_returns.h"

namespace kv_offload {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr double kMostSeconds = 1e9;
// A session that has been overdue for this time T is expected back after kPatience * T at the earliest.
constexpr double kPatience = kReturnPatience;

bool is_return(HintType type) { return type == HintType::kResume || type == HintType::kPrefetch; }

// Appends the chunks of a group up to this one.
void append_beginning(const Prefetcher::Prompt& of, std::uint32_t group, ChunkId last,
                      std::vector<Prefetcher::Chunk>* chunks) {
  const auto is_last = [&](const Prefetcher::Chunk& chunk) {
    return chunk.group == group && chunk_id(chunk.key) == last;
  };
  const auto end = std::find_if(of.chunks.begin(), of.chunks.end(), is_last);
  if (end == of.chunks.end()) return;
  for (auto chunk = of.chunks.begin(); chunk <= end; ++chunk) {
    count_steps(1);
    if (chunk->group == group) chunks->push_back(*chunk);
  }
}

}  // namespace

Sessions::Sessions(const Context& context, const CacheOptions& options, std::uint64_t max_pinned_bytes)
    : context_(context),
      retention_({context.groups, context.chunks, context.clock}, max_pinned_bytes),
      max_sessions_(std::max<std::size_t>(options.max_sessions, 1)),
      max_of_client_((max_sessions_ + 1) / 2),
      max_remembered_(2 * context.chunks.capacity()) {}

// ---- hints

std::vector<HintOutcome> Sessions::apply(std::span<const Hint> hints) {
  named_ = 0;
  std::vector<HintOutcome> outcomes;
  outcomes.reserve(hints.size());
  for (const Hint& hint : hints) {
    const auto found = sessions_.find(hint.target);
    if (found == sessions_.end()) {
      outcomes.push_back(HintOutcome::kMissing);
      continue;
    }
    const Session& of = found->second;
    const bool may_prefetch = of.prompt != nullptr && !of.prompt->chunks.empty();
    outcomes.push_back(apply(hint, {of.chunks, of.family, of.id, of.client, of.priority, may_prefetch,
                                    overdue_since(of), of.tenant}));
    expect(of.id, hint, outcomes.back());
    if (hint.type == HintType::kRelease && outcomes.back() != HintOutcome::kRejected) forget(found->second);
  }
  return outcomes;
}

std::vector<HintOutcome> Sessions::end_turn(const Turn& turn, const RequestState& request,
                                            std::span<const Hint> hints) {
  named_ = 0;
  Chunks prompt = prompt_of(request.offers);
  const bool may_prefetch = context_.prefetcher != nullptr && turn.session && !prompt.empty();
  const Target own{prompt,      request.options.family, turn.session,
                   turn.client, request.priority(),     may_prefetch,
                   0,           request.options.tenant};
  retention_.end_retention(turn.session);  // of the earlier prompt
  cancel_prefetch(turn.session);
  learn_from(turn, request);
  std::vector<HintOutcome> outcomes(hints.size(), HintOutcome::kRejected);
  bool is_released = false;
  // First, because it needs the earlier prompt of the session.
  for (std::size_t i = 0; i < hints.size(); ++i) {
    if (hints[i].type != HintType::kSupersede) continue;
    outcomes[i] = supersede(hints[i].target ? hints[i].target : turn.session, prompt);
  }
  for (std::size_t i = 0; i < hints.size(); ++i) {
    if (hints[i].type == HintType::kSupersede) continue;
    outcomes[i] = apply(hints[i], own);
    is_released |= hints[i].type == HintType::kRelease && outcomes[i] != HintOutcome::kRejected;
  }
  if (is_released) {
    forget(turn.session);
  } else if (turn.session) {
    remember(turn, request, std::move(prompt));
    for (std::size_t i = 0; i < hints.size(); ++i) expect(turn.session, hints[i], outcomes[i]);
  }
  return outcomes;
}

HintOutcome Sessions::apply(const Hint& hint, const Target& target) {
  if (!(hint.seconds >= 0 && hint.seconds <= kMostSeconds)) return HintOutcome::kRejected;
  if (!may_name(target.chunks.size() + chunks_of(hint.trunk).size())) return HintOutcome::kRejected;
  bool is_here = false;
  switch (hint.type) {
    case HintType::kResume:
    case HintType::kPrefetch:
      if (!is_trusted(target.client)) return HintOutcome::kRejected;
      is_here =
          set_return(target.chunks, target.family, now() + seconds_until(hint, target.overdue_since), {}) ||
          target.may_prefetch;
      break;
    case HintType::kRelease:
      is_here = set_return(target.chunks, target.family, kNever, chunks_of(hint.trunk));
      break;
    case HintType::kSupersede:  // only at the end of a turn
      return HintOutcome::kRejected;
    case HintType::kRetain:
    case HintType::kPin:
      if (!target.session) return HintOutcome::kRejected;
      const Retention::Prompt prompt{target.session, target.client, target.priority, target.chunks,
                                     target.tenant};
      return hint.type == HintType::kRetain ? retention_.retain(prompt, hint.seconds)
                                            : retention_.pin(prompt, hint.seconds, hint.bytes);
  }
  return is_here ? HintOutcome::kAccepted : HintOutcome::kMissing;
}

bool Sessions::is_trusted(std::uint64_t client) const {
  const auto found = clients_.find(client);
  return found == clients_.end() || found->second.trust.is_trusted();
}

void Sessions::learn_from(const Turn& turn, const RequestState& request) {
  const auto found = sessions_.find(turn.session);
  if (found == sessions_.end() || found->second.expected == 0 || !request.first_lookup) return;
  const double actual = to_seconds(*request.first_lookup) - found->second.ended;
  if (actual < 0) return;  // it began while the earlier request ran
  clients_[found->second.client].trust.observe(found->second.expected, actual);
}

void Sessions::expect(const SessionId& id, const Hint& hint, HintOutcome outcome) {
  const auto found = sessions_.find(id);
  const double seconds = seconds_of(hint);
  if (!is_return(hint.type) || found == sessions_.end() || !(seconds >= 0 && seconds <= kMostSeconds)) return;
  Session& session = found->second;
  // Since the end of its last turn. Never 0, which means unknown.
  session.expected = std::max(seconds + now() - session.ended, 1e-3);
  if (outcome == HintOutcome::kRejected) return;
  const double until = seconds_until(hint, overdue_since(session));
  if (session.given_hints < kGivenHints) {
    ++session.given_hints;
    session.given_return = now() + seconds;
  }
  if (context_.prefetcher == nullptr) return;
  const auto wait = std::chrono::duration_cast<Nanos>(std::chrono::duration<double>(until));
  context_.prefetcher->expect(id, session.prompt, context_.clock.now() + wait,
                              hint.type == HintType::kPrefetch);
}

double Sessions::seconds_until(const Hint& hint, double overdue_since) const {
  const double overdue = overdue_since == 0 ? 0 : std::max(now() - overdue_since, 0.0);
  return std::max(seconds_of(hint), kPatience * overdue);
}

void Sessions::cancel_prefetch(const SessionId& id) {
  if (context_.prefetcher != nullptr) context_.prefetcher->cancel(id);
}

HintOutcome Sessions::supersede(const SessionId& id, const Chunks& prompt) {
  const auto found = sessions_.find(id);
  if (found == sessions_.end()) return HintOutcome::kMissing;
  if (!may_name(found->second.chunks.size() + prompt.size())) return HintOutcome::kRejected;
  set_return(found->second.chunks, found->second.family, kNever, prompt);
  cancel_prefetch(id);
  return HintOutcome::kAccepted;
}

bool Sessions::may_name(std::size_t chunks) {
  const bool may = named_ == 0 || named_ + chunks <= kMaxNamed;
  if (may) named_ += chunks;
  return may;
}

bool Sessions::set_return(const Chunks& chunks, std::uint32_t family, double returns_at,
                          const Chunks& spared) {
  const std::unordered_set<ChunkId> stay(spared.begin(), spared.end());
  bool is_here = false;
  for (const ChunkId chunk : chunks) {
    count_steps(1);
    const auto slot = context_.chunks.find(chunk);
    if (!slot || stay.contains(chunk) || !context_.chunks.belongs_to(*slot, family)) continue;
    context_.chunks.set_return(*slot, returns_at);
    is_here = true;
  }
  return is_here;
}

// ---- prompts

Sessions::Chunks Sessions::prompt_of(const Offers& offers) const {
  Chunks chunks;
  for (std::uint32_t group = 0; group < context_.groups.size(); ++group) {
    const std::span<const ChunkId> held = offers.held(group);
    if (!context_.groups[group].full_attention) {
      chunks.insert(chunks.end(), held.rbegin(), held.rend());
      continue;
    }
    std::optional<Slot> slot;  // the last chunk that was not evicted while the request ran
    for (std::size_t i = held.size(); !slot && i-- > 0;) slot = context_.chunks.find(held[i]);
    for (; slot && chunks.size() < max_remembered_; slot = context_.chunks.parent_of(*slot)) {
      count_steps(1);
      chunks.push_back(chunk_id(context_.chunks.at(*slot).key));
    }
  }
  return chunks;
}

const Sessions::Chunks& Sessions::chunks_of(const SessionId& id) const {
  static const Chunks kNone;
  const auto found = sessions_.find(id);
  return found == sessions_.end() ? kNone : found->second.chunks;
}

Sessions::Session& Sessions::session_of(const Turn& turn) {
  const auto [found, is_new] = sessions_.try_emplace(turn.session);
  Session& session = found->second;
  if (!is_new) return session;
  session.id = turn.session;
  session.client = turn.client;
  session.use = ++last_use_;
  try {
    by_use_[session.use] = &session;
    by_client_[{session.client, session.use}] = &session;
    ++clients_[session.client].sessions;  // the last call that may throw
  } catch (...) {
    by_use_.erase(session.use);
    by_client_.erase({session.client, session.use});
    sessions_.erase(found);
    throw;
  }
  return session;
}

void Sessions::remember(const Turn& turn, const RequestState& request, Chunks prompt) {
  Session& session = session_of(turn);
  session.family = request.options.family;
  session.priority = request.priority();
  session.tenant = request.options.tenant;
  Prompt keys;
  if (context_.prefetcher != nullptr) keys = keys_of(prompt, session);  // the last call that may throw
  auto by_use = by_use_.extract(session.use);
  auto by_client = by_client_.extract({session.client, session.use});
  by_use.key() = by_client.key().second = session.use = ++last_use_;
  by_use_.insert(std::move(by_use));
  by_client_.insert(std::move(by_client));
  session.ended = now();
  session.expected = session.given_return = 0;
  session.given_hints = 0;
  remembered_ -= session.size();
  session.chunks = std::move(prompt);
  session.prompt = std::move(keys);
  remembered_ += session.size();
  if (clients_[session.client].sessions > max_of_client_) {
    forget(*by_client_.lower_bound({session.client, 0})->second);
  }
  while (is_full()) forget(*by_use_.begin()->second);
}

Sessions::Prompt Sessions::keys_of(const Chunks& chunks, const Session& session) const {
  auto prompt = std::make_shared<Prefetcher::Prompt>();
  prompt->client = session.client;
  prompt->family = session.family;
  prompt->priority = session.priority;
  prompt->tenant = session.tenant;
  std::size_t begin = 0;  // of the current group
  // Merges the group with those before it by depth: a request needs the chunks of all groups.
  const auto end_group = [&] {
    const auto first = prompt->chunks.begin();
    std::inplace_merge(first, first + static_cast<std::ptrdiff_t>(begin), prompt->chunks.end(),
                       [](const auto& one, const auto& other) { return one.depth < other.depth; });
    begin = prompt->chunks.size();
  };
  std::optional<std::uint32_t> group;
  for (auto id = chunks.rbegin(); id != chunks.rend(); ++id) {
    count_steps(1);
    const auto slot = context_.chunks.find(*id);
    if (!slot) continue;
    const ChunkEntry& entry = context_.chunks.at(*slot);
    const bool is_first = group != entry.group;
    if (is_first) end_group();
    group = entry.group;
    // The chunks before it were evicted while the device had them.
    if (is_first && entry.parent != 0 && session.prompt != nullptr &&
        session.prompt->chunks.size() + chunks.size() <= max_remembered_)
      append_beginning(*session.prompt, entry.group, entry.parent, &prompt->chunks);
    prompt->chunks.push_back({entry.key, entry.parent, entry.depth, entry.group});
  }
  end_group();
  for (const Prefetcher::Chunk& chunk : prompt->chunks) prompt->bytes += context_.groups[chunk.group].bytes;
  return prompt;
}

void Sessions::forget(const SessionId& id) {
  const auto found = sessions_.find(id);
  if (found != sessions_.end()) forget(found->second);
  retention_.end(id);
}

void Sessions::forget(Session& session) {
  count_steps(1);
  retention_.end(session.id);
  cancel_prefetch(session.id);
  by_use_.erase(session.use);
  by_client_.erase({session.client, session.use});
  remembered_ -= session.size();
  const auto client = clients_.find(session.client);
  if (--client->second.sessions == 0) clients_.erase(client);
  sessions_.erase(SessionId(session.id));
}

void Sessions::forget() {
  retention_.forget();
  sessions_.clear();
  by_use_.clear();
  by_client_.clear();
  clients_.clear();
  remembered_ = 0;
}

}  // namespace kv_offload
