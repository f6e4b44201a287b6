// SPDX-License-Identifier: Apache-2.0
// Cluster: the servers that keep the records, and the owner of each key. A standalone server is a cluster of
// one node that owns every key; the server reports which of the two it is.
//
// In a cluster, the slot map is loaded at startup, once a minute, and about a second after a node failed or
// redirected a key. Until then MOVED and ASK are followed, each to a bounded depth. We trust what a
// node reports about other nodes: we connect to any address it names, as the same user, with the same TLS
// rules.
//
// A node that fails an op is out of service, i.e. skipped, until it answers upkeep. Meanwhile ops for its
// keys end at once with kUnavailable, which does not count against the device as a whole. If all nodes are
// out of service, ops still try each of them, so that the failure counters see the outage. A standalone
// server is never out of service.
//
// Thread-safe. No call waits past its deadline.
#pragma once

#include <array>
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "backends/redis/connections.h"
#include "backends/redis/slots.h"
#include "base/thread_annotations.h"
#include "tier/tier.h"

namespace kv_offload::redis {

// Not ok: an error reply that means the device failed. Redirects are ok.
Status failure_of(const Reply& reply);

// Returns the deadline for one of `left` remaining attempts: half of the remaining time, or all of it for the
// last.
Deadline share_of(Deadline until, std::size_t left);

struct Node {
  Node(const Server& where, const std::shared_ptr<TlsContext>& tls)
      : server(where), connections(where, tls) {}
  const Server server;
  Connections connections;
  std::array<std::atomic<bool>, 2> out_of_service{};  // by OpKind
  bool is_out_of_service(OpKind kind) const { return out_of_service[static_cast<std::size_t>(kind)].load(); }
};
using NodePtr = std::shared_ptr<Node>;

class Cluster {
 public:
  static constexpr int kMostRedirects = 5;         // per op
  static constexpr std::size_t kMostNodes = 1000;  // above the size of any real cluster
  static constexpr Nanos kPingAtMost = std::chrono::seconds(1);

  // `seeds`: not empty; all use the same connection settings. Does not connect. Throws ResourceError (TLS).
  explicit Cluster(std::vector<Server> seeds);

  // Asks the servers until one reports the key owners. *refused: a server rejected the connection settings,
  // which waiting does not fix.
  Status learn(Deadline until, bool* refused) EXCLUDES(mutex_);
  bool is_known() const EXCLUDES(mutex_);
  bool is_cluster() const EXCLUDES(mutex_);
  // True if a server that was taken for standalone redirected a key.
  bool may_be_cluster() const { return stale_ && !is_cluster(); }
  // A server reported that it is a cluster node.
  void report_cluster_node() {
    if (!is_cluster()) stale_ = true;
  }
  // Upkeep, about once a second: reloads the map if needed and checks the nodes that are out of service.
  void maintain(Deadline until, const std::atomic<bool>& stopped) EXCLUDES(mutex_);
  // The nodes that own keys; the only server if it is standalone.
  std::vector<NodePtr> owners() const EXCLUDES(mutex_);
  // The owner of the key; null: none known.
  NodePtr owner(std::string_view key) const EXCLUDES(mutex_) { return owner_of_slot(slot_of(key)); }
  NodePtr owner_of_slot(std::uint32_t slot) const EXCLUDES(mutex_) {
    return owner_of(static_cast<std::uint16_t>(slot)).node;
  }
  std::uint32_t unassigned_slots() const EXCLUDES(mutex_);
  void close() EXCLUDES(mutex_);  // closes connections as Connections::close() does

  // One exchange on a connection. Ok means that the server replied; *reply shows whether it refused or
  // redirected the command.
  using Work = std::function<Status(Connection& connection, Reply* reply)>;
  // Runs `work` on the node that owns the key, and again on the target of a redirect. Not ok: the device
  // failed, which includes error replies that say so. Other error replies are results.
  Status at(std::string_view key, OpKind kind, Deadline until, Reply* reply, const Work& work)
      EXCLUDES(mutex_);
  // Sends "VERB key" for each key to its owner, to all nodes concurrently. Ok if any key was answered:
  // (*answered)[i] says which, and (*replies)[i] is the reply. Not ok: the first failure.
  Status at_each(std::span<const std::string> keys, std::string_view verb, Deadline until,
                 std::vector<Reply>* replies, std::vector<bool>* answered) EXCLUDES(mutex_);

 private:
  struct Target {
    NodePtr node;  // null: no known owner of the slot
    bool asking = false;
  };
  struct NodeBatch;
  struct Gathering;

  Target owner_of(std::uint16_t slot) const EXCLUDES(mutex_);
  Target follow(const Redirect& redirect, std::uint16_t slot, const Node& from) EXCLUDES(mutex_);
  // Finds the target of a redirect from `from`.
  Status resolve_redirect(const Redirect& redirect, std::string_view key, const Node& from, int redirects,
                          Target* target) EXCLUDES(mutex_);
  using Nodes = std::map<std::string, NodePtr>;            // by address and certificate name
  NodePtr node_at(const Server& server) REQUIRES(mutex_);  // null: too many nodes
  // Returns the node of the server, known or new, and adds it to `kept_nodes`. Null: too many nodes.
  NodePtr keep_node(const Server& server, Nodes* kept_nodes) REQUIRES(mutex_);
  Status run_on_node(const Target& target, OpKind kind, Deadline until, Reply* reply, const Work& work);
  // Not ok if the node is out of service, so that an op for it must fail at once.
  Status service_status(const Node& node, OpKind kind) const EXCLUDES(mutex_);
  // Records a failure at a node. Only the op that takes the node out of service reports the failure itself.
  Status failed_at(Node& node, OpKind kind, Status failure);
  std::vector<NodePtr> out_of_service_nodes() const EXCLUDES(mutex_);
  static void ping(Node& node, Deadline until);     // puts the node back into service if it answers
  std::vector<NodePtr> sources() EXCLUDES(mutex_);  // nodes that may know the map, likeliest first
  Status fetch_slot_map(Node& source, Deadline until, bool* refused, std::vector<SlotRange>* ranges,
                        bool* standalone) EXCLUDES(mutex_);
  Status adopt(const NodePtr& source, const std::vector<SlotRange>& ranges) EXCLUDES(mutex_);
  Status send_to(NodeBatch& batch, std::span<const std::string> keys, std::string_view verb, Deadline until);
  Status receive_from(NodeBatch& batch, Deadline until);

  const std::vector<Server> seeds_;
  const std::shared_ptr<TlsContext> tls_;
  std::atomic<bool> stale_{false};           // the map, or the knowledge that there is none, must be reloaded
  std::atomic<bool> was_redirected_{false};  // by a server that was taken for standalone
  std::atomic<unsigned> maintain_calls_{0};
  mutable Mutex mutex_;
  bool closed_ GUARDED_BY(mutex_) = false;
  Nodes nodes_ GUARDED_BY(mutex_);                  // all known nodes
  std::vector<NodePtr> owners_ GUARDED_BY(mutex_);  // each once
  // Empty: standalone; else one per slot, null where unknown.
  std::vector<NodePtr> slots_ GUARDED_BY(mutex_);
};

}  // namespace kv_offload::redis
