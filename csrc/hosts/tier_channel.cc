// SPDX-License-Identifier: Apache-2.0
#include "hosts/tier_channel.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <new>
#include <type_traits>

#include "base/make_room.h"

namespace kv_offload {
namespace {

// Bytes that wait to be sent.
constexpr std::size_t kFew = std::size_t{64} << 10, kMuch = std::size_t{4} << 20;
constexpr std::size_t kMostKept = 1024;  // elements of an empty list whose memory is kept

// Calls make(elements) for at most `most` elements at once.
template <typename Element, typename Make>
void for_some(std::span<const Element> all, std::size_t most, Make make) {
  for (std::size_t at = 0; at < all.size(); at += most)
    make(all.subspan(at, std::min(most, all.size() - at)));
}

}  // namespace

TierChannel::TierChannel(std::function<void()> wake) : wake_(std::move(wake)) {
  // Starts at a random number: the host may still answer an earlier scheduler.
  const auto bytes = random_bytes();
  std::memcpy(&request_.round, bytes.data(), sizeof request_.round);
}

void TierChannel::begin_connection() {
  const MutexLock lock(mutex_);
  connected_ = true;
  ++connection_;
  is_ready_ = false;
  // The request or the answer may have been lost.
  if (!waiting_.empty() && !opened_) send_request();
}

void TierChannel::end_connection(const std::string& problem, bool is_final) noexcept {
  {
    const MutexLock lock(mutex_);
    is_final_ = is_final_ || is_final;
    try {
      problem_ = problem;
    } catch (const std::bad_alloc&) {
      problem_.clear();
    }
    if (connected_) {
      connected_ = is_ready_ = false;
      outbox_.clear();
      outbox_bytes_ = 0;
      // The results that they contain count as unknown, like those that never arrived.
      for (std::size_t tier = 0; tier < waiting_.size(); ++tier) {
        Waiting& waiting = waiting_[tier];
        waiting.is_lost = true;
        waiting.events.clear();
        waiting.bytes = 0;
        set_has_events(tier, true);
      }
    }
  }
  changed_.notify_all();
}

void TierChannel::set_has_events(std::size_t tier, bool has) {
  const std::uint32_t bit = std::uint32_t{1} << tier, old = has_events_.load(std::memory_order_relaxed);
  has_events_.store(has ? old | bit : old & ~bit, std::memory_order_release);
}

void TierChannel::add_event(std::size_t tier, Event event) {
  waiting_[tier].events.push_back(std::move(event));
  set_has_events(tier, true);
}

TierChannel::Delivery TierChannel::deliver(FrameType type, ByteSpan body, Nanos now) {
  const auto pass_on = [&](auto frame) {
    if (!frame) return Delivery::kMalformed;
    const MutexLock lock(mutex_);
    // Before kOpsEnded of this connection nothing belongs to it.
    if (!is_ready_ || waiting_.empty()) return Delivery::kTaken;
    if (frame->tier >= waiting_.size()) return Delivery::kMalformed;
    Waiting& waiting = waiting_[frame->tier];
    if constexpr (std::is_same_v<std::decay_t<decltype(*frame)>, TierState>) {
      // An idle engine takes no events: only the last state is kept.
      const auto older = std::find_if(waiting.events.begin(), waiting.events.end(), [](const Event& event) {
        return std::holds_alternative<TierState>(event.what);
      });
      if (older != waiting.events.end()) {
        *older = {now, std::move(*frame)};
        return Delivery::kTaken;
      }
    } else {
      if (waiting.bytes + body.size() > kMostWaiting) return Delivery::kTooMuch;
      waiting.bytes += body.size();
    }
    add_event(frame->tier, {now, std::move(*frame)});
    return Delivery::kTaken;
  };
  Delivery taken = Delivery::kTaken;
  switch (type) {
    case FrameType::kOpsEnded: {
      if (!body.empty()) return Delivery::kMalformed;
      const MutexLock lock(mutex_);
      if (is_ready_) return Delivery::kMalformed;
      for (std::size_t tier = 0; tier < waiting_.size(); ++tier) add_event(tier, {now, Ready{connection_}});
      is_ready_ = true;
      break;
    }
    case FrameType::kTiersOpened: {
      auto opened = decode_tiers_opened(body);
      if (!opened) return Delivery::kMalformed;
      const MutexLock lock(mutex_);
      if (opened->round != request_.round) break;
      opened_ = std::move(*opened);
      // The frames before this one are about tiers that the host has closed.
      for (Waiting& waiting : waiting_) {
        std::erase_if(waiting.events,
                      [](const Event& event) { return !std::holds_alternative<Ready>(event.what); });
        waiting.bytes = 0;
      }
      break;
    }
    case FrameType::kResults:
      taken = pass_on(decode_results(body));
      break;
    case FrameType::kAnswers:
      taken = pass_on(decode_answers(body));
      break;
    case FrameType::kRemovals:
      taken = pass_on(decode_removals(body));
      break;
    case FrameType::kResetDone:
      taken = pass_on(decode_reset_done(body));
      break;
    case FrameType::kState:
      taken = pass_on(decode_state(body));
      break;
    default:
      return Delivery::kMalformed;
  }
  changed_.notify_all();
  return taken;
}

std::vector<TierChannel::Frame> TierChannel::take_frames() {
  taken_.clear();  // if the last call threw
  {
    const MutexLock lock(mutex_);
    outbox_bytes_ = 0;
    taken_.swap(outbox_);
  }
  std::vector<Frame> frames;
  frames.reserve(taken_.size());
  for (Queued& queued : taken_) append_frames(queued, &frames);
  // Without what it contained. The scheduler's thread allocates no list in each step.
  taken_.clear();
  if (taken_.capacity() > kMostKept) std::vector<Queued>().swap(taken_);
  return frames;
}

void TierChannel::append_frames(Queued& queued, std::vector<Frame>* frames) {
  if (Frame* frame = std::get_if<Frame>(&queued)) {
    frames->push_back(std::move(*frame));
  } else if (const TierOps* ops = std::get_if<TierOps>(&queued)) {
    for_some<HostOp>(ops->ops, kMostOps, [&](std::span<const HostOp> some) {
      frames->emplace_back(FrameType::kOps, encode_ops(ops->tier, some));
    });
  } else {
    const Uses& uses = std::get<Uses>(queued);
    for_some<TierUse>(*uses.uses, kMostUses, [&](std::span<const TierUse> some) {
      frames->emplace_back(FrameType::kUses, encode_uses(uses.tier, false, some));
    });
  }
}

bool TierChannel::takes(ConnectionNumber connection, bool may_drop) const {
  return connected_ && connection == connection_ && !(may_drop && outbox_bytes_ > kMuch);
}

bool TierChannel::send(ConnectionNumber connection, std::vector<Frame> frames, bool may_drop) {
  bool wakes = !may_drop;
  {
    const MutexLock lock(mutex_);
    if (!takes(connection, may_drop)) return false;
    make_room(outbox_, frames.size());  // nothing from here on can fail
    for (Frame& frame : frames) {
      outbox_bytes_ += frame.second.size();
      outbox_.emplace_back(std::move(frame));
    }
    wakes = wakes || outbox_bytes_ > kFew;
  }
  if (wakes) wake_();
  return true;
}

bool TierChannel::send_ops(ConnectionNumber connection, TierOps ops) {
  {
    const MutexLock lock(mutex_);
    if (!takes(connection, false)) return false;
    const std::size_t bytes = ops.ops.size() * sizeof(HostOp);
    outbox_.emplace_back(std::move(ops));
    outbox_bytes_ += bytes;
  }
  wake_();
  return true;
}

void TierChannel::send_uses(ConnectionNumber connection, std::uint8_t tier, TierUses uses) {
  const std::size_t bytes = uses->size() * sizeof(TierUse);
  bool wakes = false;
  {
    const MutexLock lock(mutex_);
    if (!takes(connection, true)) return;
    outbox_.emplace_back(Uses{tier, std::move(uses)});
    outbox_bytes_ += bytes;
    wakes = outbox_bytes_ > kFew;
  }
  if (wakes) wake_();
}

std::vector<TierChannel::Event> TierChannel::take_events(std::uint8_t tier) {
  const MutexLock lock(mutex_);
  Waiting& waiting = waiting_[tier];
  std::vector<Event> taken;
  if (waiting.is_lost) {
    taken.reserve(1 + waiting.events.size());
    taken.push_back({Nanos(0), Lost{}});
    std::move(waiting.events.begin(), waiting.events.end(), std::back_inserter(taken));
  } else {
    taken = std::move(waiting.events);
  }
  waiting.is_lost = false;
  waiting.events.clear();
  waiting.bytes = 0;
  set_has_events(tier, false);
  return taken;
}

void TierChannel::wait(std::uint8_t tier, Nanos timeout) {
  const MutexLock lock(mutex_);
  if (waiting_[tier].events.empty() && !waiting_[tier].is_lost) changed_.wait_for(mutex_, timeout);
}

// Each order has a new round number, so the answer to an earlier order is ignored: the host closes those
// tiers when it executes this order.
void TierChannel::send_request() {
  ++request_.round;
  outbox_.emplace_back(Frame{FrameType::kOpenTiers, encode(request_)});
}

void TierChannel::begin_open(std::vector<EpochChoice> epochs, std::string text) {
  {
    const MutexLock lock(mutex_);
    request_.epochs = std::move(epochs);
    request_.text = std::move(text);
    opened_.reset();
    waiting_.clear();
    waiting_.resize(request_.epochs.size());
    for (std::size_t tier = 0; tier < waiting_.size(); ++tier) {
      set_has_events(tier, false);
      if (is_ready_) add_event(tier, {Nanos(0), Ready{connection_}});  // the request comes after kOpsEnded
    }
    if (connected_) send_request();
  }
  wake_();
}

Status TierChannel::wait_until_open(Nanos timeout, std::vector<OpenedTier>* tiers) {
  const SteadyClock clock;
  const Nanos end = clock.now() + timeout;
  const MutexLock lock(mutex_);
  while (!opened_) {
    const Nanos left = end - clock.now();
    if (!connected_ && is_final_) return Status::error(StatusKind::kUnavailable, problem_);
    if (left <= Nanos(0)) {
      return Status::error(StatusKind::kTimeout,
                           connected_ ? "it did not open its tiers in time"
                                      : fmt::format("the connection was lost and could not be established "
                                                    "again in time: {}",
                                                    problem_));
    }
    changed_.wait_for(mutex_, left);
  }
  if (!opened_->problem.empty()) return Status::error(StatusKind::kUnavailable, opened_->problem);
  if (opened_->tiers.size() != waiting_.size()) {
    return Status::error(StatusKind::kUnavailable,
                         fmt::format("it has {} tiers and this host {}: start vLLM with the same settings on "
                                     "all hosts",
                                     opened_->tiers.size(), waiting_.size()));
  }
  *tiers = opened_->tiers;
  return Status::ok();
}

}  // namespace kv_offload
