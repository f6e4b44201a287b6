// SPDX-License-Identifier: Apache-2.0
#include "backends/redis/removal_notices.h"

#include <algorithm>
#include <utility>

namespace kv_offload::redis {
namespace {

// The channel of redirected notices; its name is part of the protocol.
constexpr std::string_view kChannel = "__redis__:invalidate";

bool is_text(const Reply& reply, std::string_view text) {
  return reply.kind == Reply::Kind::kString && reply.text == text;
}

// Returns the failure that an error reply stands for.
Status refused(const Reply& reply, std::string_view command) {
  return Status::error(is_transient(reply.text) ? StatusKind::kIo : StatusKind::kDeclined,
                       fmt::format("the server refused {}: {}", command, refusal(reply.text).message()));
}

}  // namespace

Status RemovalNotices::connect(Node& node, Deadline until, Feed* feed) {
  bool rejected = false;
  Feed made;
  if (Status status = node.connections.take(until, &made.subscriber, &rejected); !status) return status;
  if (Status status = node.connections.take(until, &made.tracker, &rejected); !status) return status;
  std::vector<Reply> replies;
  const std::array subscribe{Connection::Command{"CLIENT", "ID"}, Connection::Command{"SUBSCRIBE", kChannel}};
  if (Status status = made.subscriber->call_all(subscribe, until, &replies); !status) return status;
  if (replies[0].kind == Reply::Kind::kError) return refused(replies[0], "CLIENT ID");
  if (replies[1].kind == Reply::Kind::kError) return refused(replies[1], "SUBSCRIBE");
  if (replies[0].kind != Reply::Kind::kInteger) return unexpected_reply();
  const std::string id = std::to_string(replies[0].integer);
  Reply reply;
  const Connection::Command track{"CLIENT", "TRACKING", "ON", "REDIRECT", id, "BCAST", "PREFIX", prefix_};
  if (Status status = made.tracker->call(track, until, &reply); !status) return status;
  if (reply.kind == Reply::Kind::kError) return refused(reply, "CLIENT TRACKING");
  if (reply.kind != Reply::Kind::kStatus) return unexpected_reply();
  made.begun = std::chrono::steady_clock::now();
  made.due = made.begun + check_every_;
  made.wait = feed->wait;
  *feed = std::move(made);
  return Status::ok();
}

// Returns false for a message that a subscriber does not get.
bool RemovalNotices::read(const Reply& message, Feed* feed, Changes* changes) const {
  if (message.kind != Reply::Kind::kArray || message.elements.empty()) return false;
  const std::vector<Reply>& parts = message.elements;
  if (is_text(parts[0], "pong")) {
    feed->asked = false;
    return true;
  }
  if (parts.size() != 3 || !is_text(parts[0], "message") || !is_text(parts[1], kChannel)) return false;
  if (parts[2].kind == Reply::Kind::kNil) {  // FLUSHALL, FLUSHDB
    changes->all = true;
    return true;
  }
  if (parts[2].kind != Reply::Kind::kArray) return false;
  for (const Reply& key : parts[2].elements) {
    if (key.kind != Reply::Kind::kString) return false;
    changes->keys.push_back(key.text);
  }
  return true;
}

Status RemovalNotices::receive(Deadline until, Feed* feed, Changes* changes) {
  std::vector<Reply> messages;
  if (Status status = feed->subscriber->receive_pushed(until, &messages); !status) return status;
  for (const Reply& message : messages) {
    if (!read(message, feed, changes)) return unexpected_reply();
  }
  if (feed->tracker->stale()) return Status::error(StatusKind::kIo, "the connection was closed");
  return Status::ok();
}

// A connection that ended without notice (a firewall that forgot it) delivers nothing and no error.
Status RemovalNotices::check(Deadline until, Feed* feed) {
  feed->due = std::chrono::steady_clock::now() + check_every_;
  if (std::exchange(feed->asked, true))
    return Status::error(StatusKind::kTimeout, "the server does not respond");
  Reply reply;
  if (Status status = feed->tracker->call({"PING"}, until, &reply); !status) return status;
  return feed->subscriber->send_pushed({"PING"}, until);
}

void RemovalNotices::failed(const Status& status, Feed* feed) {
  const Time now = std::chrono::steady_clock::now();
  const bool lasted = feed->subscriber && now - feed->begun >= kLasting;
  const bool is_refused = status.kind() == StatusKind::kDeclined;
  const auto wait = is_refused ? kAskAgainAfter : lasted ? std::chrono::seconds{0} : feed->wait;
  const auto next = std::clamp(2 * wait, kRetryAfter, kRetryAtMost);
  *feed = Feed{nullptr, nullptr, {}, now + wait, next, false, is_refused ? status.message() : std::string()};
}

RemovalNotices::Changes RemovalNotices::take(const std::atomic<bool>& stopped) {
  Changes changes;
  const Deadline until = std::chrono::steady_clock::now() + kWaitAtMost;
  const std::vector<NodePtr> owners = cluster_.owners();
  std::erase_if(feeds_, [&](const auto& one) {
    return std::find(owners.begin(), owners.end(), one.first) == owners.end();
  });
  std::string problem;
  for (const NodePtr& node : owners) {
    Feed& feed = feeds_[node];
    const Time now = std::chrono::steady_clock::now();
    if (!stopped && now < until) {  // others have their turn in a later call, when this node waits
      Status status;
      if (feed.subscriber) {
        status = receive(until, &feed, &changes);
        if (status && now >= feed.due) status = check(until, &feed);
        if (!status) failed(status, &feed);
      }
      if (!feed.subscriber && now >= feed.due && !node->is_out_of_service(OpKind::kRead)) {
        status = connect(*node, until, &feed);
        changes.all |= status.is_ok();  // changes until now were not reported
        if (!status) failed(status, &feed);
      }
    }
    if (problem.empty()) problem = feed.refusal;
  }
  const MutexLock lock(mutex_);
  problem_ = std::move(problem);
  return changes;
}

std::string RemovalNotices::problem() const {
  const MutexLock lock(mutex_);
  return problem_;
}

}  // namespace kv_offload::redis
