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

// Bytes of frames that wait to be sent.
constexpr std::size_t kFew = std::size_t{64} << 10, kMuch = std::size_t{4} << 20;

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
      for (Waiting& waiting : waiting_) {
        waiting.is_lost = true;
        waiting.events.clear();
        waiting.bytes = 0;
      }
    }
  }
  changed_.notify_all();
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
    waiting.events.push_back({now, std::move(*frame)});
    return Delivery::kTaken;
  };
  Delivery taken = Delivery::kTaken;
  switch (type) {
    case FrameType::kOpsEnded: {
      if (!body.empty()) return Delivery::kMalformed;
      const MutexLock lock(mutex_);
      if (is_ready_) return Delivery::kMalformed;
      for (Waiting& waiting : waiting_) waiting.events.push_back({now, Ready{connection_}});
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
  std::vector<Queued> taken;
  {
    const MutexLock lock(mutex_);
    outbox_bytes_ = 0;
    taken.swap(outbox_);
  }
  std::vector<Frame> frames;
  frames.reserve(taken.size());
  for (Queued& queued : taken) {
    if (!queued.uses) {
      frames.push_back(std::move(queued.frame));
      continue;
    }
    const std::span<const TierUse> uses(*queued.uses);
    for (std::size_t at = 0; at < uses.size(); at += kMostUses) {
      const std::size_t count = std::min(kMostUses, uses.size() - at);
      frames.emplace_back(FrameType::kUses, encode_uses(queued.tier, false, uses.subspan(at, count)));
    }
  }
  return frames;
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
      outbox_.push_back({std::move(frame), 0, nullptr});
    }
    wakes = wakes || outbox_bytes_ > kFew;
  }
  if (wakes) wake_();
  return true;
}

void TierChannel::send_uses(ConnectionNumber connection, std::uint8_t tier, TierUses uses) {
  const std::size_t bytes = uses->size() * sizeof(TierUse);
  bool wakes = false;
  {
    const MutexLock lock(mutex_);
    if (!takes(connection, true)) return;
    outbox_.push_back({{FrameType::kUses, {}}, tier, std::move(uses)});
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
  outbox_.push_back({{FrameType::kOpenTiers, encode(request_)}, 0, nullptr});
}

void TierChannel::begin_open(std::vector<EpochChoice> epochs, std::string text) {
  {
    const MutexLock lock(mutex_);
    request_.epochs = std::move(epochs);
    request_.text = std::move(text);
    opened_.reset();
    waiting_.clear();
    waiting_.resize(request_.epochs.size());
    if (is_ready_) {  // this request comes later than kOpsEnded
      for (Waiting& waiting : waiting_) waiting.events.push_back({Nanos(0), Ready{connection_}});
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
