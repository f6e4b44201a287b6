// SPDX-License-Identifier: Apache-2.0
#include "cache/retention.h"

#include <algorithm>

#include "base/make_room.h"
#include "base/steps.h"

namespace kv_offload {

Retention::Retention(const Context& context, std::uint64_t max_pinned_bytes)
    : context_(context), max_pinned_bytes_(max_pinned_bytes) {}

Nanos Retention::after(double seconds) const {
  return context_.clock.now() + std::chrono::duration_cast<Nanos>(std::chrono::duration<double>(seconds));
}

// A change of a session's hold, whose deadline is not in the set meanwhile. At the end sets the deadline, or
// removes an empty hold. The memory that this needs is allocated before the change.
class Retention::Change {
 public:
  Change(Retention& of, const SessionId& id) : of_(of), id_(id) {
    const auto found = of.holds_.find(id);
    if (found == of.holds_.end()) {
      std::set<Deadline> made;
      deadline_ = made.extract(made.emplace().first);
      hold_ = &of.holds_[id];
    } else {
      hold_ = &found->second;
      deadline_ = of.deadlines_.extract(deadline_of(id, *hold_));
    }
  }
  ~Change() {
    const auto of_client = of_.of_client_.find(hold_->client);
    if (of_client != of_.of_client_.end() && of_client->second == 0) of_.of_client_.erase(of_client);
    if (hold_->deadline() == Nanos(0)) {
      of_.holds_.erase(id_);
    } else {
      deadline_.value() = deadline_of(id_, *hold_);
      of_.deadlines_.insert(std::move(deadline_));
    }
  }
  Change(const Change&) = delete;
  Change& operator=(const Change&) = delete;
  Hold& hold() { return *hold_; }

 private:
  Retention& of_;
  const SessionId id_;
  Hold* hold_;
  std::set<Deadline>::node_type deadline_;
};

HintOutcome Retention::retain(const Prompt& prompt, double seconds) {
  Change change(*this, prompt.session);
  Hold& hold = change.hold();
  end_retention(hold, hold.retained.size());
  hold.priority = prompt.priority;
  const Nanos until = after(seconds);
  // From the last to the first, so that the head of the prompt is evicted last.
  for (const ChunkId chunk : prompt.chunks) {
    count_steps(1);
    const auto slot = context_.chunks.find(chunk);
    if (!slot || context_.chunks.at(*slot).state != ChunkState::kResident) continue;
    make_room(hold.retained, 1);
    std::uint32_t& sessions = retained_by_[chunk];
    try {
      context_.chunks.retain(*slot);
    } catch (...) {
      if (sessions == 0) retained_by_.erase(chunk);
      throw;
    }
    ++sessions;
    hold.retained.push_back(chunk);
    hold.retained_until = until;
  }
  return hold.retained.empty() ? HintOutcome::kMissing : HintOutcome::kAccepted;
}

HintOutcome Retention::pin(const Prompt& prompt, double seconds, std::uint64_t bytes) {
  Change change(*this, prompt.session);
  Hold& hold = change.hold();
  unpin(hold);
  hold.client = prompt.client;
  hold.tenant = prompt.tenant;
  std::uint64_t& of_client = of_client_[prompt.client];
  const std::uint64_t allowed = std::min(
      {max_pinned_bytes_ - pinned_bytes_, max_pinned_bytes_ / 2 - of_client, left_of_tenant(prompt.tenant)});
  const std::uint64_t most = bytes == 0 ? allowed : std::min(bytes, allowed);
  const Nanos until = after(seconds);
  bool is_here = false, is_clipped = false;
  // The head first: without it the rest is useless.
  for (auto chunk = prompt.chunks.rbegin(); chunk != prompt.chunks.rend(); ++chunk) {
    count_steps(1);
    const auto slot = context_.chunks.find(*chunk);
    if (!slot || context_.chunks.at(*slot).state != ChunkState::kResident) continue;
    if (context_.chunks.is_borrowed(*slot)) continue;  // the memory is a neighbour's
    is_here = true;
    const std::uint64_t size = bytes_of(*slot);
    if (hold.pinned_bytes + size > most) {
      is_clipped = most == allowed;
      break;
    }
    make_room(hold.pinned, 1);
    context_.chunks.pin(*slot);
    hold.pinned.push_back(*slot);
    hold.pinned_until = until;
    for (std::uint64_t* count : {&hold.pinned_bytes, &of_client, &of_tenant_[hold.tenant], &pinned_bytes_})
      *count += size;
  }
  if (!is_here) return HintOutcome::kMissing;
  if (hold.pinned.empty()) return HintOutcome::kRejected;
  return is_clipped ? HintOutcome::kClipped : HintOutcome::kAccepted;
}

void Retention::end_retention(const SessionId& session) {
  if (!holds_.contains(session)) return;
  Change change(*this, session);
  end_retention(change.hold(), change.hold().retained.size());
}

void Retention::end(const SessionId& session) {
  if (!holds_.contains(session)) return;
  Change change(*this, session);
  unpin(change.hold());
  end_retention(change.hold(), change.hold().retained.size());
}

void Retention::end_step() {
  const Nanos now = context_.clock.now();
  std::size_t left = kEndedAtOnce;
  while (left > 0 && !deadlines_.empty() && deadlines_.begin()->first <= now) {
    Change change(*this, {deadlines_.begin()->second.first, deadlines_.begin()->second.second});
    Hold& hold = change.hold();
    const std::size_t before = hold.retained.size() + hold.pinned.size();
    if (hold.pinned_until != Nanos(0) && hold.pinned_until <= now) unpin(hold);
    if (hold.retained_until != Nanos(0) && hold.retained_until <= now) end_retention(hold, left);
    left -= std::min(left, before - hold.retained.size() - hold.pinned.size());
  }
}

void Retention::forget() {
  holds_.clear();
  retained_by_.clear();
  deadlines_.clear();
  of_client_.clear();
  of_tenant_ = {};
  pinned_bytes_ = 0;
}

// In the order of retain(), so that the head of the prompt stays the most recent.
void Retention::end_retention(Hold& hold, std::size_t most) {
  const auto end = hold.retained.begin() + static_cast<std::ptrdiff_t>(std::min(most, hold.retained.size()));
  auto next = hold.retained.begin();
  const auto drop_ended = [&] {
    hold.retained.erase(hold.retained.begin(), next);
    if (hold.retained.empty()) hold.retained_until = Nanos(0);
  };
  try {
    for (; next != end; ++next) {
      count_steps(1);
      const auto sessions = retained_by_.find(*next);
      if (sessions->second > 1) {
        --sessions->second;
        continue;
      }
      const auto slot = context_.chunks.find(*next);
      if (slot && context_.chunks.at(*slot).state == ChunkState::kResident)
        context_.chunks.end_retention(*slot, hold.priority);
      retained_by_.erase(sessions);
    }
  } catch (...) {
    drop_ended();
    throw;
  }
  drop_ended();
}

std::uint64_t Retention::left_of_tenant(TenantId tenant) const {
  const TenantShares* shares = context_.chunks.tenants();
  if (shares == nullptr) return max_pinned_bytes_;
  const auto most =
      static_cast<std::uint64_t>(shares->fraction(tenant) * static_cast<double>(max_pinned_bytes_));
  return most - std::min(most, of_tenant_[tenant]);
}

void Retention::unpin(Hold& hold) {
  for (const Slot slot : hold.pinned) {
    count_steps(1);
    context_.chunks.unpin(slot);
  }
  pinned_bytes_ -= hold.pinned_bytes;
  of_tenant_[hold.tenant] -= hold.pinned_bytes;
  const auto count = of_client_.find(hold.client);
  if (count != of_client_.end() && (count->second -= hold.pinned_bytes) == 0) of_client_.erase(count);
  hold.pinned.clear();
  hold.pinned_bytes = 0;
  hold.pinned_until = Nanos(0);
}

}  // namespace kv_offload
