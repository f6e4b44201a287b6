// SPDX-License-Identifier: Apache-2.0
// The records of all masters of a cluster. Lists go from one master to the next; operations on a record run
// on the owner of its slot.
#include <algorithm>
#include <charconv>
#include <chrono>
#include <map>
#include <utility>

#include "backends/redis/cluster.h"
#include "backends/redis/records.h"

namespace kv_offload::redis {
namespace {

class ClusterRecords final : public RemoteRecords {
 public:
  explicit ClusterRecords(const RedisRecordsOptions& options)
      : options_(options), cluster_({options.server}) {
    const Status learnt = learn(cluster_);
    if (!learnt) throw_resource("{}: {}", address_of(options.server), learnt.message());
    if (const std::uint32_t slots = cluster_.unassigned_slots(); slots > 0) {
      throw_resource("{}: {} of the cluster's {} slots are on no node, and their records would be left out",
                     address_of(options.server), slots, kSlots);
    }
    for (const NodePtr& node : cluster_.owners()) {
      RedisRecordsOptions of_node = options;
      of_node.server = node->server;
      index_of_[node.get()] = nodes_.size();
      nodes_.push_back({address_of(node->server), open_records_of_server(of_node, nullptr)});
    }
  }

  Status list(const std::string& namespace_id, std::string from, bool sizes, RemotePage* page) override;
  Status written(const RemoteRecord& record, std::int64_t* unix_nanos) override {
    Part& part = part_of(record);
    return named(part, part.records->written(record, unix_nanos));
  }
  Status read_header(const RemoteRecord& record, RecordHeader* header) override {
    Part& part = part_of(record);
    return named(part, part.records->read_header(record, header));
  }
  void use_record_sizes() override {
    for (Part& part : nodes_) part.records->use_record_sizes();
  }
  void use_keys(std::shared_ptr<const EncryptionKeys> keys) override {
    for (Part& part : nodes_) part.records->use_keys(keys);
  }
  Status verify(const RemoteRecord& record, bool repair, bool* removed) override {
    Part& part = part_of(record);
    return named(part, part.records->verify(record, repair, removed));
  }
  Status read(const RemoteRecord& record, WholeRecord* copy) override {
    Part& part = part_of(record);
    return named(part, part.records->read(record, copy));
  }
  Status read_startup_epoch(const std::string& namespace_id, std::string* name) override {
    RemoteRecord epoch;
    epoch.name = options_.key_prefix + ":" + namespace_id + ":epoch";
    Part& part = part_of(epoch);
    return named(part, part.records->read_startup_epoch(namespace_id, name));
  }
  Status remove(std::span<const RemoteRecord> records, RemoteRemoved* removed) override;

 private:
  struct Part {
    std::string address;
    std::unique_ptr<RemoteRecords> records;
  };

  // Adds the node's address to a node's failure. Failures of a record stay unchanged.
  static Status named(const Part& part, Status status) {
    if (status || status.kind() == StatusKind::kCorrupt || status.kind() == StatusKind::kNotFound)
      return status;
    return Status::error(status.kind(), fmt::format("the node {}: {}", part.address, status.message()),
                         status.error_number());
  }
  Status learn(Cluster& cluster) const {
    bool refused = false;
    return cluster.learn(std::chrono::steady_clock::now() + options_.deadline, &refused);
  }
  // Slots that moved from an unlisted node to a listed one appear in no page.
  Status has_stayed() const {
    Cluster now({options_.server});
    if (Status status = learn(now); !status) return status;
    for (std::uint32_t slot = 0; slot < kSlots; ++slot) {
      const NodePtr before = cluster_.owner_of_slot(slot), after = now.owner_of_slot(slot);
      if (after && address_of(before->server) == address_of(after->server)) continue;
      return Status::error(
          StatusKind::kIo,
          "cluster slots moved to other nodes during the listing, so the list is incomplete: run it again");
    }
    return Status::ok();
  }
  std::size_t index_of(const RemoteRecord& record) const {
    return index_of_.at(cluster_.owner(record.name).get());
  }
  Part& part_of(const RemoteRecord& record) { return nodes_[index_of(record)]; }

  const RedisRecordsOptions options_;
  Cluster cluster_;  // a snapshot of the map from opening time: at() is never called on it
  std::vector<Part> nodes_;
  std::map<const Node*, std::size_t> index_of_;
};

// Continuation tokens have the form "2@17": the third node, and its cursor. The last page verifies that no
// slot moved meanwhile.
Status ClusterRecords::list(const std::string& namespace_id, std::string from, bool sizes, RemotePage* page) {
  std::size_t at = 0;
  if (!from.empty()) {
    const char* const end = from.data() + from.size();
    const auto [stop, error] = std::from_chars(from.data(), end, at);
    if (error != std::errc() || stop == end || *stop != '@' || at >= nodes_.size())
      throw_invalid("{:?} does not continue a list of {} nodes", from, nodes_.size());
    from.erase(0, static_cast<std::size_t>(stop - from.data()) + 1);
  }
  const Part& part = nodes_[at];
  if (Status status = named(part, part.records->list(namespace_id, std::move(from), sizes, page)); !status)
    return status;
  if (!page->next.empty()) {
    page->next = fmt::format("{}@{}", at, page->next);
  } else if (at + 1 < nodes_.size()) {
    page->next = fmt::format("{}@", at + 1);
  } else {
    return has_stayed();
  }
  return Status::ok();
}

Status ClusterRecords::remove(std::span<const RemoteRecord> records, RemoteRemoved* removed) {
  std::vector<std::vector<RemoteRecord>> by_node(nodes_.size());
  for (const RemoteRecord& record : records) by_node[index_of(record)].push_back(record);
  Status first;
  for (std::size_t i = 0; i < nodes_.size(); ++i) {
    if (by_node[i].empty()) continue;
    Status status = named(nodes_[i], nodes_[i].records->remove(by_node[i], removed));
    if (first) first = std::move(status);
  }
  return first;
}

}  // namespace

std::unique_ptr<RemoteRecords> open_records_of_cluster(const RedisRecordsOptions& options) {
  return std::make_unique<ClusterRecords>(options);
}

}  // namespace kv_offload::redis
