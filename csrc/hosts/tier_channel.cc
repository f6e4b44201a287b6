// SPDX-License-Identifier: Apache-2.0
#include "hosts/tier_channel.h"

namespace kv_offload {
namespace {

constexpr std::size_t kMuch = std::size_t{4} << 20;  // bytes of frames that wait to be sent

}  // namespace

template <typename What>
void TierChannel::add_event(std::uint8_t tier, What what, Nanos now) {
  events_[tier].push_back({now, std::move(what)});
}

void TierChannel::begin_connection() {
  const MutexLock lock(mutex_);
  connected_ = true;
  ++connection_;
  is_ready_ = false;
}

void TierChannel::end_connection(const std::string& problem) {
  {
    const MutexLock lock(mutex_);
    if (!connected_) return;
    connected_ = is_ready_ = false;
    problem_ = problem;
    outbox_.clear();
    outbox_bytes_ = 0;
    for (std::uint8_t tier = 0; tier < events_.size(); ++tier) add_event(tier, Lost{}, Nanos(0));
  }
  changed_.notify_all();
}

bool TierChannel::deliver(FrameType type, ByteSpan body, Nanos now) {
  const auto pass_on = [&](auto frame) {
    if (!frame) return false;
    const MutexLock lock(mutex_);
    // Before kOpsEnded of this connection nothing belongs to it.
    if (!is_ready_) return true;
    if (frame->tier >= events_.size()) return false;
    const std::uint8_t tier = frame->tier;
    add_event(tier, std::move(*frame), now);
    return true;
  };
  bool taken = true;
  switch (type) {
    case FrameType::kOpsEnded: {
      if (!body.empty()) return false;
      const MutexLock lock(mutex_);
      if (is_ready_) return false;
      is_ready_ = true;
      for (std::uint8_t tier = 0; tier < events_.size(); ++tier) add_event(tier, Ready{connection_}, now);
      break;
    }
    case FrameType::kTiersOpened: {
      auto opened = decode_tiers_opened(body);
      if (!opened) return false;
      const MutexLock lock(mutex_);
      if (opened->round == round_) opened_.push_back(std::move(*opened));
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
      return false;
  }
  changed_.notify_all();
  return taken;
}

std::vector<TierChannel::Frame> TierChannel::take_frames() {
  const MutexLock lock(mutex_);
  outbox_bytes_ = 0;
  return std::exchange(outbox_, {});
}

bool TierChannel::send(ConnectionNumber connection, std::vector<Frame> frames, bool may_drop) {
  {
    const MutexLock lock(mutex_);
    if (!connected_ || connection != connection_) return false;
    if (may_drop && outbox_bytes_ > kMuch) return false;
    outbox_.reserve(outbox_.size() + frames.size());  // nothing from here on can fail
    for (Frame& frame : frames) {
      outbox_bytes_ += frame.second.size();
      outbox_.push_back(std::move(frame));
    }
  }
  wake_();
  return true;
}

std::vector<TierChannel::Event> TierChannel::take_events(std::uint8_t tier) {
  const MutexLock lock(mutex_);
  return std::exchange(events_[tier], {});
}

void TierChannel::wait(std::uint8_t tier, Nanos timeout) {
  const MutexLock lock(mutex_);
  if (events_[tier].empty()) changed_.wait_for(mutex_, timeout);
}

Status TierChannel::open(const OpenTiers& request, std::size_t tiers, Nanos timeout,
                         std::vector<std::uint64_t>* epochs) {
  const SteadyClock clock;
  const Nanos end = clock.now() + timeout;
  {
    const MutexLock lock(mutex_);
    round_ = request.round;
    opened_.clear();
    events_.resize(tiers);
    if (is_ready_) {  // a request that comes later than kOpsEnded
      for (auto& events : events_) {
        if (events.empty()) events.push_back({Nanos(0), Ready{connection_}});
      }
    }
    outbox_.emplace_back(FrameType::kOpenTiers, encode(request));
  }
  wake_();
  const MutexLock lock(mutex_);
  while (opened_.empty()) {
    const Nanos left = end - clock.now();
    if (!connected_) return Status::error(StatusKind::kUnavailable, problem_);
    if (left <= Nanos(0)) return Status::error(StatusKind::kTimeout, "it did not open its tiers in time");
    changed_.wait_for(mutex_, left);
  }
  const TiersOpened opened = std::move(opened_.front());
  if (!opened.problem.empty()) return Status::error(StatusKind::kUnavailable, opened.problem);
  if (opened.epochs.size() != tiers) {
    return Status::error(StatusKind::kUnavailable,
                         fmt::format("it has {} tiers and this host {}: start vLLM with the same settings on "
                                     "all hosts",
                                     opened.epochs.size(), tiers));
  }
  *epochs = opened.epochs;
  return Status::ok();
}

}  // namespace kv_offload
