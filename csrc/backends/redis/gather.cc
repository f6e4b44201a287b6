// SPDX-License-Identifier: Apache-2.0
// Cluster::at_each: looks up many keys on their owners, on all nodes concurrently.
#include <poll.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "backends/redis/cluster.h"

namespace kv_offload::redis {

// The keys that are looked up on one node in one round.
struct Cluster::NodeBatch {
  Target target;
  std::vector<std::size_t> keys;  // indexes into the keys
  std::unique_ptr<Connection> connection;
  std::vector<Reply> replies;  // one per key
};

namespace {

// Returns the first node with something to read, or the first of the list after the timeout.
template <typename NodeBatch>
std::size_t first_ready(const std::vector<NodeBatch>& batch, Deadline until) {
  std::vector<pollfd> watched;
  for (std::size_t i = 0; i < batch.size(); ++i) {
    if (batch[i].connection->stale()) return i;
    watched.push_back({batch[i].connection->descriptor(), POLLIN, 0});
  }
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - std::chrono::steady_clock::now());
  (void)poll(watched.data(), watched.size(), static_cast<int>(std::clamp<long>(left.count(), 0, 1'000'000)));
  const auto ready =
      std::find_if(watched.begin(), watched.end(), [](const pollfd& one) { return one.revents != 0; });
  return ready == watched.end() ? 0 : static_cast<std::size_t>(ready - watched.begin());
}

}  // namespace

Status Cluster::send_to(NodeBatch& batch, std::span<const std::string> keys, std::string_view verb,
                        Deadline until) {
  Node& node = *batch.target.node;
  if (Status service = service_status(node, OpKind::kRead); !service) return service;
  std::vector<Connection::Command> commands;
  for (const std::size_t key : batch.keys) {
    if (batch.target.asking) commands.push_back({"ASKING"});
    commands.push_back({verb, keys[key]});
  }
  bool refused = false;
  Status status = node.connections.take(until, &batch.connection, &refused);
  if (status) status = batch.connection->send_all(commands, until);
  if (!status) node.connections.drop_idle();
  return status ? status : failed_at(node, OpKind::kRead, std::move(status));
}

Status Cluster::receive_from(NodeBatch& batch, Deadline until) {
  Node& node = *batch.target.node;
  const std::size_t each = batch.target.asking ? 2 : 1;
  std::vector<Reply> replies;
  Status status = batch.connection->receive_all(each * batch.keys.size(), until, &replies);
  if (!status) {
    node.connections.drop_idle();
    return failed_at(node, OpKind::kRead, std::move(status));
  }
  node.connections.give_back(std::move(batch.connection));
  bool any = false;
  for (std::size_t i = each - 1; i < replies.size(); i += each) {
    Status status_of_reply = failure_of(replies[i]);
    any |= status_of_reply.is_ok();
    if (status) status = std::move(status_of_reply);
    batch.replies.push_back(std::move(replies[i]));
  }
  // A node that refuses some keys and answers others has not failed.
  return any ? Status::ok() : failed_at(node, OpKind::kRead, std::move(status));
}

// Works in rounds. Each round asks all nodes and leaves redirected keys for the next.
struct Cluster::Gathering {
  Cluster& cluster;
  const std::span<const std::string> keys;
  const std::string_view verb;
  const Deadline until;
  std::vector<Reply>* const replies;
  std::vector<bool>* const answered;
  std::vector<std::pair<std::size_t, Target>> waiting{};  // index of the key, and where to ask for it
  Status failure{};
  bool any = false;

  void failed(Status status) {
    // The original failure has more information than kUnavailable from a node that is out of service.
    if (failure || failure.kind() == StatusKind::kUnavailable) failure = std::move(status);
  }
  // Sends each node its keys.
  std::vector<NodeBatch> send() {
    std::map<std::pair<const Node*, bool>, NodeBatch> round;
    for (auto& [key, target] : waiting) {
      if (!target.node) {
        cluster.stale_ = true;
        failed(Status::error(cluster.is_known() ? StatusKind::kUnavailable : StatusKind::kIo,
                             "the owner of the key is unknown"));
        continue;
      }
      NodeBatch& batch = round[{target.node.get(), target.asking}];
      batch.target = target;
      batch.keys.push_back(key);
    }
    waiting.clear();
    std::vector<NodeBatch> sent;
    std::vector<NodeBatch*> order;
    for (auto& [id, batch] : round) order.push_back(&batch);
    // Nodes with an idle connection first, because connecting may take long.
    std::stable_partition(order.begin(), order.end(),
                          [](NodeBatch* batch) { return batch->target.node->connections.has_idle(); });
    for (NodeBatch* batch : order) {
      // Limits the connect time, so that the others have time left for their replies.
      Status status = cluster.send_to(*batch, keys, verb, share_of(until, round.size()));
      if (status) sent.push_back(std::move(*batch));
      if (!status) failed(std::move(status));
    }
    return sent;
  }
  void take(NodeBatch& batch, int redirects) {
    for (std::size_t i = 0; i < batch.keys.size(); ++i) {
      const std::size_t key = batch.keys[i];
      if (const auto redirect = redirect_of(batch.replies[i])) {
        Target next;
        Status status = cluster.resolve_redirect(*redirect, keys[key], *batch.target.node, redirects, &next);
        if (status) waiting.emplace_back(key, next);
        if (!status) failed(std::move(status));
        continue;
      }
      if (Status status_of_reply = failure_of(batch.replies[i]); !status_of_reply) {
        failed(std::move(status_of_reply));
        continue;
      }
      (*replies)[key] = std::move(batch.replies[i]);
      (*answered)[key] = any = true;
    }
  }
};

Status Cluster::at_each(std::span<const std::string> keys, std::string_view verb, Deadline until,
                        std::vector<Reply>* replies, std::vector<bool>* answered) {
  replies->assign(keys.size(), {});
  answered->assign(keys.size(), false);
  Gathering all{*this, keys, verb, until, replies, answered};
  for (std::size_t i = 0; i < keys.size(); ++i) all.waiting.emplace_back(i, owner_of(slot_of(keys[i])));
  for (int redirects = 0; !all.waiting.empty(); ++redirects) {
    // Reads whichever reply is ready first, so that a silent node does not delay the others.
    for (std::vector<NodeBatch> sent = all.send(); !sent.empty();) {
      const std::size_t ready = first_ready(sent, share_of(until, sent.size()));
      NodeBatch batch = std::move(sent[ready]);
      sent.erase(sent.begin() + static_cast<std::ptrdiff_t>(ready));
      Status status = receive_from(batch, share_of(until, sent.size() + 1));
      if (status) all.take(batch, redirects);
      if (!status) all.failed(std::move(status));
    }
  }
  return all.any || keys.empty() ? Status::ok() : all.failure;
}

}  // namespace kv_offload::redis
