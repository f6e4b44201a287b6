// Cluster: the servers that keep the records, and which of them has a key. One server alone is a cluster of
// one node that has every key; which of the two it is, the server says.
//
// Of a cluster the map of its slots is learnt at the start, once a minute, and about a second after a node
// failed or sent a key elsewhere. MOVED and ASK are followed meanwhile, each to a bounded depth. All that a
// node says is believed of nodes, too: where it sends us we go, as the same user, by the same rules of TLS.
//
// A node that fails an op rests until upkeep has had an answer from it: ops for its keys end at once, as
// kUnavailable, which says nothing against the device as a whole. While all rest, each is tried all the same,
// so that whoever counts failures sees them. A server alone never rests.
//
// Any thread. No call waits past its deadline, name look-ups apart.
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

#include "base/thread_annotations.h"
#include "storage/redis/connections.h"
#include "storage/redis/slots.h"
#include "storage/tier.h"

namespace kv_offload::redis {

// Not ok: an error reply that says that the device failed. A redirect says no such thing.
Status failure_of(const Reply& reply);

// The part of the time that one of `left` attempts may take, when the others are to have some, too.
Deadline share_of(Deadline until, std::size_t left);

struct Node {
  Node(const Server& where, const std::shared_ptr<TlsContext>& tls)
      : server(where), connections(where, tls) {}
  const Server server;
  Connections connections;
  std::array<std::atomic<bool>, 2> rests{};  // by OpKind
  bool rests_for(OpKind kind) const { return rests[static_cast<std::size_t>(kind)].load(); }
};
using NodePtr = std::shared_ptr<Node>;

class Cluster {
 public:
  static constexpr int kMostRedirects = 5;         // of one op
  static constexpr std::size_t kMostNodes = 1000;  // more than any cluster has
  static constexpr Nanos kPingAtMost = std::chrono::seconds(1);

  // `seeds`: not empty; spoken to alike. Asks nobody. Throws ResourceError (TLS).
  explicit Cluster(std::vector<Server> seeds);

  // Asks the servers, until one tells who has which keys. *refused: those that answered said no to how they
  // are spoken to, which waiting does not change.
  Status learn(Deadline until, bool* refused) EXCLUDES(mutex_);
  bool is_known() const EXCLUDES(mutex_);
  bool is_cluster() const EXCLUDES(mutex_);
  // A server that was taken to be alone sent a key elsewhere.
  bool is_in_doubt() const { return stale_ && !is_cluster(); }
  // One says that it is a node of a cluster.
  void note_a_node() {
    if (!is_cluster()) stale_ = true;
  }
  // Upkeep, about once a second: learns what changed, and looks after nodes that rest.
  void keep_up(Deadline until, const std::atomic<bool>& stopped) EXCLUDES(mutex_);
  // The nodes that have keys; one server alone: that one.
  std::vector<NodePtr> owners() const EXCLUDES(mutex_);
  // Which of them has the key; null: none, as far as is known.
  NodePtr owner(std::string_view key) const EXCLUDES(mutex_) { return owner_of_slot(slot_of(key)); }
  NodePtr owner_of_slot(std::uint32_t slot) const EXCLUDES(mutex_) {
    return owner_of(static_cast<std::uint16_t>(slot)).node;
  }
  std::uint32_t slots_of_nobody() const EXCLUDES(mutex_);
  void close() EXCLUDES(mutex_);  // of connections, as Connections::close()

  // One exchange on a connection. It ends with ok when the server answered, whatever it answered; *reply is
  // what shows whether it refused or redirected the command.
  using Work = std::function<Status(Connection& connection, Reply* reply)>;
  // Works at the node that has the key, again where that redirects. Not ok: the device failed, an error reply
  // included that says so. Other error replies are answers.
  Status at(std::string_view key, OpKind kind, Deadline until, Reply* reply, const Work& work)
      EXCLUDES(mutex_);
  // Asks for each key "VERB key" where it lies, all nodes at the same time. Ok when any of the keys was
  // answered; (*answered)[i] says which, and (*replies)[i] is the answer. Not ok: the first failure.
  Status at_each(std::span<const std::string> keys, std::string_view verb, Deadline until,
                 std::vector<Reply>* replies, std::vector<bool>* answered) EXCLUDES(mutex_);

 private:
  struct Target {
    NodePtr node;  // none: nobody has the slot, as far as is known
    bool asking = false;
  };
  struct Asked;
  struct Gathering;

  Target owner_of(std::uint16_t slot) const EXCLUDES(mutex_);
  Target follow(const Redirect& redirect, std::uint16_t slot, const Node& from) EXCLUDES(mutex_);
  // Where an answer of `from` sends us next.
  Status next_of(const Redirect& redirect, std::string_view key, const Node& from, int redirects,
                 Target* target) EXCLUDES(mutex_);
  using Nodes = std::map<std::string, NodePtr>;            // by address and name
  NodePtr node_at(const Server& server) REQUIRES(mutex_);  // null: there are too many
  // That of the server, known or new, among those that are to stay. Null: there are too many.
  NodePtr keep(const Server& server, Nodes* staying) REQUIRES(mutex_);
  Status on_node(const Target& target, OpKind kind, Deadline until, Reply* reply, const Work& work);
  // Is an op for the node to be refused at once?
  Status rest_of(const Node& node, OpKind kind) const EXCLUDES(mutex_);
  // What becomes of a failure at a node: told once, by the op that makes it rest.
  Status failed_at(Node& node, OpKind kind, Status failure);
  std::vector<NodePtr> those_that_rest() const EXCLUDES(mutex_);
  static void ping(Node& node, Deadline until);     // does it still have to rest?
  std::vector<NodePtr> sources() EXCLUDES(mutex_);  // who may know the map; the likeliest first
  Status ask_for_map(Node& source, Deadline until, bool* refused, std::vector<SlotRange>* ranges, bool* alone)
      EXCLUDES(mutex_);
  Status adopt(const NodePtr& source, const std::vector<SlotRange>& ranges) EXCLUDES(mutex_);
  Status send_to(Asked& asked, std::span<const std::string> keys, std::string_view verb, Deadline until);
  Status receive_from(Asked& asked, Deadline until);

  const std::vector<Server> seeds_;
  const std::shared_ptr<TlsContext> tls_;
  std::atomic<bool> stale_{false};           // the map, or that there is none
  std::atomic<bool> was_redirected_{false};  // by a server that was taken to be alone
  std::atomic<unsigned> kept_up_{0};
  mutable Mutex mutex_;
  bool closed_ GUARDED_BY(mutex_) = false;
  Nodes nodes_ GUARDED_BY(mutex_);                  // all that are known
  std::vector<NodePtr> owners_ GUARDED_BY(mutex_);  // each once
  std::vector<NodePtr> slots_
      GUARDED_BY(mutex_);  // empty: no cluster; or one for each slot, null where unknown
};

}  // namespace kv_offload::redis
