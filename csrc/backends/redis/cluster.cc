// SPDX-License-Identifier: Apache-2.0
#include "backends/redis/cluster.h"

#include <algorithm>
#include <set>
#include <utility>

namespace kv_offload::redis {
namespace {

constexpr unsigned kLearnInterval = 60;  // calls of maintain()

// Refuses a Sentinel, which answers PING and INFO like a server but stores no keys. Every real server reports
// cluster_enabled in the requested section; a second command is needed only if it is missing.
Status refuse_sentinel(Connection& connection, const Reply& info, Deadline until, bool* refused) {
  if (info.kind == Reply::Kind::kError || info.text.find("cluster_enabled:") != info.text.npos) {
    return Status::ok();
  }
  Reply server;
  if (Status status = connection.call({"INFO", "server"}, until, &server); !status) return status;
  if (server.text.find("redis_mode:sentinel") == server.text.npos) return Status::ok();
  *refused = true;
  return Status::error(StatusKind::kIo,
                       "this is a Sentinel, which stores no records: give the address of the primary, or one "
                       "that always leads to it (a proxy or a service), or use a cluster");
}

// The identity of a node. A node whose certificate must carry another name is another node.
std::string id_of(const Server& server) { return address_of(server) + " " + server.tls_name; }

Status not_known() {
  return Status::error(StatusKind::kIo, "no server has responded yet, so the owner of the key is unknown");
}
// kUnavailable: other slots are still served, so the device works.
Status no_owner(std::uint16_t slot) {
  return Status::error(StatusKind::kUnavailable, fmt::format("no node of the cluster has slot {}", slot));
}
Status no_map(std::string_view why) {
  return Status::error(StatusKind::kIo, fmt::format("the node reports no slot map (CLUSTER SLOTS): {}", why));
}

}  // namespace

Status failure_of(const Reply& reply) {
  if (reply.kind != Reply::Kind::kError || redirect_of(reply)) return Status::ok();
  Status failure = refusal(reply.text);
  return failure.kind() == StatusKind::kIo ? failure : Status::ok();
}

Deadline share_of(Deadline until, std::size_t left) {
  const Deadline now = std::chrono::steady_clock::now();
  return left > 1 && until > now ? now + (until - now) / 2 : until;
}

Cluster::Cluster(std::vector<Server> seeds)
    : seeds_(std::move(seeds)), tls_(make_tls_context(seeds_.front())) {
  const MutexLock lock(mutex_);
  for (const Server& seed : seeds_) (void)node_at(seed);
}

NodePtr Cluster::keep_node(const Server& server, Nodes* kept_nodes) {
  const std::string id = id_of(server);
  if (const auto found = kept_nodes->find(id); found != kept_nodes->end()) return found->second;
  if (kept_nodes->size() >= kMostNodes + seeds_.size()) return nullptr;
  const auto known = nodes_.find(id);
  NodePtr node = known != nodes_.end() ? known->second : std::make_shared<Node>(server, tls_);
  if (closed_) node->connections.close();
  kept_nodes->emplace(id, node);
  return node;
}
NodePtr Cluster::node_at(const Server& server) { return keep_node(server, &nodes_); }

bool Cluster::is_known() const {
  const MutexLock lock(mutex_);
  return !owners_.empty();
}
bool Cluster::is_cluster() const {
  const MutexLock lock(mutex_);
  return !slots_.empty();
}

std::vector<NodePtr> Cluster::owners() const {
  const MutexLock lock(mutex_);
  return owners_;
}

std::uint32_t Cluster::unassigned_slots() const {
  const MutexLock lock(mutex_);
  return static_cast<std::uint32_t>(std::count(slots_.begin(), slots_.end(), nullptr));
}

void Cluster::close() {
  const MutexLock lock(mutex_);
  closed_ = true;
  for (auto& [id, node] : nodes_) node->connections.close();
}

// ---- learning the map

// Returns the nodes to request the map from: healthy owners, then other nodes, then nodes that are out of
// service. Within each group the seeds come first, because an operator configured them.
std::vector<NodePtr> Cluster::sources() {
  const std::vector<NodePtr> owner_list = owners();
  const std::set<NodePtr> owner_set(owner_list.begin(), owner_list.end());
  std::vector<NodePtr> all;
  const MutexLock lock(mutex_);
  if (slots_.empty()) {
    for (const Server& seed : seeds_) all.push_back(node_at(seed));
    return all;
  }
  for (const Server& seed : seeds_) all.push_back(node_at(seed));
  for (const auto& [id, node] : nodes_) {
    if (std::find(all.begin(), all.end(), node) == all.end()) all.push_back(node);
  }
  std::stable_sort(all.begin(), all.end(), [&](const NodePtr& one, const NodePtr& other) {
    const auto rank = [&](const NodePtr& node) {
      if (node->is_out_of_service(OpKind::kRead) || node->is_out_of_service(OpKind::kWrite)) return 2;
      return owner_set.contains(node) ? 0 : 1;
    };
    return rank(one) < rank(other);
  });
  return all;
}

// *standalone: the server is not a cluster node.
Status Cluster::fetch_slot_map(Node& source, Deadline until, bool* refused, std::vector<SlotRange>* ranges,
                               bool* standalone) {
  std::unique_ptr<Connection> connection;
  if (Status status = source.connections.take(until, &connection, refused); !status) return status;
  Reply info, map;
  if (Status status = connection->call({"INFO", "cluster"}, until, &info); !status) return status;
  if (info.kind == Reply::Kind::kError && is_transient(info.text)) return refusal(info.text);
  if (Status status = refuse_sentinel(*connection, info, until, refused); !status) return status;
  const bool is_node = info.text.find("cluster_enabled:1") != std::string::npos;
  // Several nodes are configured, and this user may not run INFO.
  const bool info_refused = info.kind == Reply::Kind::kError && seeds_.size() > 1;
  *standalone = !is_node && !was_redirected_ && !info_refused;
  if (*standalone) {
    source.connections.give_back(std::move(connection));
    return Status::ok();
  }
  if (Status status = connection->call_for_map({"CLUSTER", "SLOTS"}, until, &map); !status) return status;
  source.connections.give_back(std::move(connection));
  *standalone = info_refused && map.text.starts_with("ERR ");  // "... cluster support disabled"
  if (*standalone) return Status::ok();
  if (map.kind == Reply::Kind::kError && !is_node && !info_refused) {
    *refused = true;
    return Status::error(StatusKind::kIo,
                         "the server redirects keys (MOVED) but is not a cluster node: give the address of a "
                         "node, or of a server that stores all keys itself");
  }
  if (map.kind == Reply::Kind::kError) {
    *refused = is_configuration_error(map.text);
    return refusal(map.text);
  }
  auto found = slot_ranges(map);
  if (!found) return no_map("malformed reply");
  if (found->empty()) return no_map("no slot is assigned to a node yet");
  *ranges = std::move(*found);
  return Status::ok();
}

Status Cluster::adopt(const NodePtr& source, const std::vector<SlotRange>& ranges) {
  const MutexLock lock(mutex_);
  std::vector<NodePtr> slots(kSlots), owners;
  Nodes kept_nodes;
  for (const Server& seed : seeds_) (void)keep_node(seed, &kept_nodes);
  for (const SlotRange& range : ranges) {
    const NodePtr owner = keep_node(server_at(range.owner, source->server), &kept_nodes);
    if (!owner) return no_map(fmt::format("it has more than {} nodes", kMostNodes));
    std::fill(slots.begin() + range.first, slots.begin() + range.last + 1, owner);
    if (std::find(owners.begin(), owners.end(), owner) == owners.end()) owners.push_back(owner);
  }
  for (const SlotRange& range : ranges) {
    for (const Endpoint& replica : range.replicas)
      (void)keep_node(server_at(replica, source->server), &kept_nodes);
  }
  slots_.swap(slots);
  owners_.swap(owners);
  nodes_.swap(kept_nodes);
  for (const auto& [id, node] : kept_nodes) {
    if (!nodes_.contains(id)) node->connections.close();
  }
  return Status::ok();
}

Status Cluster::learn(Deadline until, bool* refused) {
  stale_ = false;  // cleared before asking, so that changes found meanwhile count
  const std::vector<NodePtr> source_nodes = sources();
  const bool was_cluster = is_cluster();
  Status failure = not_known();
  bool any_refused = false;
  for (std::size_t i = 0; i < source_nodes.size(); ++i) {
    // An attempt may use up the time left for the others.
    if (i > 0 && std::chrono::steady_clock::now() >= until) break;
    const NodePtr& source = source_nodes[i];
    std::vector<SlotRange> ranges;
    bool standalone = false, no = false;
    Status status =
        fetch_slot_map(*source, share_of(until, source_nodes.size() - i), &no, &ranges, &standalone);
    if (status && standalone && was_cluster) status = no_map("the node has left the cluster");
    if (status && standalone && !was_cluster) {
      const MutexLock lock(mutex_);
      if (seeds_.size() > 1) {
        *refused = true;
        return Status::error(
            StatusKind::kIo,
            fmt::format("{} is not a cluster node, but other_nodes is set: remove other_nodes",
                        address_of(source->server)));
      }
      owners_ = {source};
      return Status::ok();
    }
    if (status) status = adopt(source, ranges);
    if (status) return status;
    // A refusal is more useful to report than a timeout.
    if (!any_refused || no) failure = std::move(status);
    any_refused |= no;
  }
  stale_ = true;
  *refused = any_refused;
  return failure;
}

void Cluster::maintain(Deadline until, const std::atomic<bool>& stopped) {
  const std::vector<NodePtr> before = owners();
  bool any_out_of_service = false;
  for (const NodePtr& node : before)
    any_out_of_service |= node->is_out_of_service(OpKind::kRead) || node->is_out_of_service(OpKind::kWrite);
  const unsigned calls = ++maintain_calls_;
  const bool due = calls % kLearnInterval == 0 && is_cluster();
  bool refused = false;
  if (stale_ || any_out_of_service || due) (void)learn(share_of(until, 2), &refused);
  const std::vector<NodePtr> unavailable = out_of_service_nodes();
  for (std::size_t i = 0; i < unavailable.size(); ++i) {
    // Starts with another node each time: silent nodes may use up the whole time.
    if (stopped || std::chrono::steady_clock::now() >= until) return;
    Node& node = *unavailable[(calls + i) % unavailable.size()];
    ping(node, std::min(until, std::chrono::steady_clock::now() + kPingAtMost));
  }
}

// Covers owners of keys, and nodes that only received ASK redirects.
std::vector<NodePtr> Cluster::out_of_service_nodes() const {
  std::vector<NodePtr> found;
  const MutexLock lock(mutex_);
  for (const auto& [id, node] : nodes_) {
    if (node->is_out_of_service(OpKind::kRead) || node->is_out_of_service(OpKind::kWrite))
      found.push_back(node);
  }
  return found;
}

void Cluster::ping(Node& node, Deadline until) {
  std::unique_ptr<Connection> connection;
  Reply reply;
  bool refused = false;
  if (!node.connections.take(until, &connection, &refused)) return;
  if (!connection->call({"PING"}, until, &reply)) return node.connections.drop_idle();
  node.connections.give_back(std::move(connection));
  const bool answers = reply.kind == Reply::Kind::kStatus;
  const bool reads = reply.kind == Reply::Kind::kError && refuses_only_writes(reply.text);
  if (answers || reads) node.out_of_service[static_cast<std::size_t>(OpKind::kRead)] = false;
  if (answers) node.out_of_service[static_cast<std::size_t>(OpKind::kWrite)] = false;
}

// ---- one key

Cluster::Target Cluster::owner_of(std::uint16_t slot) const {
  const MutexLock lock(mutex_);
  if (!slots_.empty()) return {slots_[slot]};
  return {owners_.empty() ? nullptr : owners_.front()};
}

Cluster::Target Cluster::follow(const Redirect& redirect, std::uint16_t slot, const Node& from) {
  const MutexLock lock(mutex_);
  const Server to = server_at(redirect.to, from.server);
  // Prefer a known node at this address: the map may have given it a certificate name, which a redirect does
  // not carry. If there are several, use the last one.
  NodePtr node;
  const std::string start = address_of(to) + " ";
  for (auto known = nodes_.lower_bound(start); known != nodes_.end() && known->first.starts_with(start);
       ++known)
    node = known->second;
  if (!node) node = node_at(to);
  if (node && !redirect.asking) {
    slots_[slot] = node;
    if (std::find(owners_.begin(), owners_.end(), node) == owners_.end()) owners_.push_back(node);
  }
  return {node, redirect.asking};
}

Status Cluster::resolve_redirect(const Redirect& redirect, std::string_view key, const Node& from,
                                 int redirects, Target* target) {
  if (!redirect.asking) stale_ = true;
  if (!is_cluster()) {
    stale_ = was_redirected_ = true;
    return Status::error(
        StatusKind::kIo,
        "the server redirected the key (MOVED), as cluster nodes do: checking whether it is one");
  }
  if (redirects >= kMostRedirects) {
    return Status::error(StatusKind::kIo, "too many redirects between the cluster's nodes");
  }
  const std::uint16_t slot = slot_of(key);
  if (redirect.slot != slot) {
    return Status::error(StatusKind::kIo, "the node redirected the key with the number of another slot");
  }
  *target = redirect.has_no_address ? Target{} : follow(redirect, slot, from);
  if (target->node) return Status::ok();
  stale_ = true;  // the map may have a usable address
  return Status::error(StatusKind::kUnavailable, "the node redirected the key without a usable address");
}

Status Cluster::service_status(const Node& node, OpKind kind) const {
  if (!node.is_out_of_service(kind)) return Status::ok();
  for (const NodePtr& other : owners()) {
    if (!other->is_out_of_service(kind)) {
      return Status::error(
          StatusKind::kUnavailable,
          fmt::format("the node {} failed and is out of service until it answers", address_of(node.server)));
    }
  }
  return Status::ok();
}

Status Cluster::failed_at(Node& node, OpKind kind, Status failure) {
  if (!is_cluster()) return failure;
  const std::string where = address_of(node.server);
  const bool was_out_of_service = node.out_of_service[static_cast<std::size_t>(kind)].exchange(true);
  if (!was_out_of_service) stale_ = true;
  const bool is_repeated = was_out_of_service && !service_status(node, kind);
  return Status::error(is_repeated ? StatusKind::kUnavailable : failure.kind(),
                       fmt::format("the node {}: {}", where, failure.message()), failure.error_number());
}

Status Cluster::run_on_node(const Target& target, OpKind kind, Deadline until, Reply* reply,
                            const Work& work) {
  Node& node = *target.node;
  *reply = {};
  if (Status service = service_status(node, kind); !service) return service;
  std::unique_ptr<Connection> connection;
  bool refused = false;
  Status status = node.connections.take(until, &connection, &refused);
  if (status && target.asking) status = connection->call({"ASKING"}, until, reply);
  if (status && reply->kind != Reply::Kind::kError) status = work(*connection, reply);
  // The failure probably broke the idle connections, too.
  if (!status) node.connections.drop_idle();
  if (reply->kind == Reply::Kind::kError && reply->text.starts_with("READONLY ")) {
    connection.reset();
    node.connections.drop_idle();
  }
  node.connections.give_back(std::move(connection));
  if (status) status = failure_of(*reply);
  return status ? status : failed_at(node, kind, std::move(status));
}

Status Cluster::at(std::string_view key, OpKind kind, Deadline until, Reply* reply, const Work& work) {
  const std::uint16_t slot = slot_of(key);
  if (!is_known()) return not_known();
  Target target = owner_of(slot);
  for (int redirects = 0;; ++redirects) {
    if (!target.node) {
      stale_ = true;
      return no_owner(slot);
    }
    if (Status status = run_on_node(target, kind, until, reply, work); !status) return status;
    const std::optional<Redirect> redirect = redirect_of(*reply);
    if (!redirect) return Status::ok();
    const NodePtr from = target.node;
    if (Status status = resolve_redirect(*redirect, key, *from, redirects, &target); !status) return status;
  }
}

}  // namespace kv_offload::redis
