// SPDX-License-Identifier: Apache-2.0
#include "backends/redis/probe.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <vector>

#include "backends/redis/cluster.h"
#include "base/aligned_buffer.h"

namespace kv_offload::redis {
namespace {

using std::chrono::steady_clock;

constexpr int kPings = 9;
// Server memory per record byte, as an upper bound: the allocator rounds up by at most half, and connection
// buffers hold each value once more while it is sent.
constexpr double kMemoryPerByte = 2.5;
constexpr std::uint64_t kFreePart = 4;

std::string line_of(std::string_view info, std::string_view name) {
  const std::string start = fmt::format("\n{}:", name);
  const std::size_t at = info.find(start);
  if (at == info.npos) return {};
  const std::string_view rest = info.substr(at + start.size());
  return std::string(rest.substr(0, rest.find("\r\n")));
}
std::uint64_t number_of(const std::string& text) {
  std::uint64_t value = 0;
  std::from_chars(text.data(), text.data() + text.size(), value);
  return value;
}
double seconds_since(steady_clock::time_point start) {
  return std::chrono::duration<double>(steady_clock::now() - start).count();
}

class Prober {
 public:
  Prober(const std::vector<Server>& seeds, Deadline until)
      : seed_(seeds.front()), until_(until), cluster_(seeds) {
    bool refused = false;
    const Status status = cluster_.learn(until, &refused);
    if (refused) throw_invalid("{}: {}", address_of(seed_), status.message());
    check(status);
  }
  // A node that does not respond must not use up the others' time.
  void ask(Probe* found) {
    found->cluster = cluster_.is_cluster();
    const std::vector<NodePtr> nodes = cluster_.owners();
    for (std::size_t i = 0; i < nodes.size(); ++i) {
      NodeProbe& probed = found->nodes.emplace_back();
      probed.address = address_of(nodes[i]->server);
      Status status =
          ask_node(*nodes[i], share_of(until_, nodes.size() - i + 1), &probed, &found->ping_seconds);
      if (!status) probed.failure = status.message();
      if (!status && found->cluster) {  // transfer() must not wait for its keys
        for (auto& flag : nodes[i]->out_of_service) flag = true;
      }
      if (!status && !found->cluster) check(status);
    }
  }
  void transfer(const std::string& key_prefix, std::uint64_t bytes, unsigned most, Probe* found) {
    const unsigned records = fitting_records(*found, bytes, most);
    if (records == 0) return;
    const AlignedBuffer record(bytes), back(bytes);
    std::fill(record.span().begin(), record.span().end(), std::byte{0x5a});
    const auto key = [&](unsigned i) { return fmt::format("{}:probe:{}:{}", key_prefix, getpid(), i); };
    const std::span<const std::byte> from = record.span();
    const std::span<std::byte> to = back.span();
    std::vector<std::string> written, sent;
    Status failure;
    Reply reply;
    double writing = 0, reading = 0;  // successful transfers only, without the wait for a node that is down
    for (unsigned i = 0; i < 2 * records && written.size() < records && found->write_refused.empty(); ++i) {
      std::string name = key(i);
      reply = {};
      sent.push_back(name);
      const auto start = steady_clock::now();
      Status status = at(name, OpKind::kWrite, &reply, [&](Connection& connection, Reply* answer) {
        return connection.set(name, {&from, 1}, {"EX", "60"}, step_deadline(), answer);
      });
      const bool refused = reply.kind == Reply::Kind::kError;
      // In a cluster one node may be loading or refuse writes; the others are still measured.
      if (refused &&
          !(cluster_.is_cluster() && (is_transient(reply.text) || refuses_only_writes(reply.text)))) {
        found->write_refused = refusal(reply.text).message();
      } else if (!status) {
        failure = std::move(status);
        if (!cluster_.is_cluster()) break;
      } else {
        writing += seconds_since(start);
        written.push_back(std::move(name));
      }
    }
    if (written.empty() && found->write_refused.empty()) {
      remove(sent);
      return check(failure);
    }
    found->records = static_cast<unsigned>(written.size());
    if (!written.empty()) found->bytes_per_record = memory_usage(written.front());
    std::size_t read = 0, dropped = 0;
    for (const std::string& name : written) {
      if (!found->write_refused.empty()) break;
      std::uint64_t length = 0;
      const auto start = steady_clock::now();
      Status status = at(name, OpKind::kRead, &reply, [&](Connection& connection, Reply* answer) {
        return connection.get(name, {&to, 1}, to.size(), step_deadline(), answer, &length);
      });
      if (status) ++(reply.kind == Reply::Kind::kString ? read : dropped);
      if (status) reading += seconds_since(start);
      if (!status) failure = std::move(status);
    }
    remove(sent);
    if (!found->write_refused.empty()) return;
    if (dropped > 0) {
      found->write_refused = "the server dropped records at once: it has no room for them";
      return;
    }
    if (read == 0) return check(failure);
    found->write_bytes_per_second = static_cast<double>(bytes * written.size()) / writing;
    found->read_bytes_per_second = static_cast<double>(bytes * read) / reading;
  }

 private:
  void check(const Status& status) const {
    if (!status) throw_resource("{}: {}", address_of(seed_), status.message());
  }
  // Also removes records whose write got no reply. Records that cannot be removed now expire.
  void remove(const std::vector<std::string>& names) {
    Reply reply;
    for (const std::string& name : names) (void)call(name, {"DEL", name}, &reply);
  }
  // Keys are spread over the nodes at random, so the fullest node sets the limit.
  static unsigned fitting_records(const Probe& found, std::uint64_t bytes, unsigned most) {
    for (const NodeProbe& node : found.nodes) {
      const auto free = node.failure.empty() ? node.free_bytes() : std::nullopt;
      if (!free) continue;
      const double fitting =
          static_cast<double>(*free / kFreePart) / (kMemoryPerByte * static_cast<double>(bytes));
      most = static_cast<unsigned>(std::min<double>(most, fitting));
    }
    return most;
  }
  // Leaves time for the other nodes when one is silent.
  Deadline step_deadline() const { return share_of(until_, 3); }
  Status at(std::string_view key, OpKind kind, Reply* reply, const Cluster::Work& work) {
    return cluster_.at(key, kind, step_deadline(), reply, work);
  }
  Status call(std::string_view key, const Connection::Command& words, Reply* reply) {
    return at(key, OpKind::kRead, reply, [&](Connection& connection, Reply* answer) {
      return connection.call(words, step_deadline(), answer);
    });
  }
  // Returns the server memory that the value takes with its key, including allocator overhead; 0: not
  // reported.
  std::uint64_t memory_usage(const std::string& key) {
    Reply reply;
    // A missing permission or an unknown command is not a failure of the node.
    const Status status = at(key, OpKind::kRead, &reply, [&](Connection& connection, Reply* answer) {
      Status called = connection.call({"MEMORY", "USAGE", key}, step_deadline(), answer);
      if (called && answer->kind == Reply::Kind::kError && !redirect_of(*answer)) *answer = {};
      return called;
    });
    const bool reported = status && reply.kind == Reply::Kind::kInteger && reply.integer > 0;
    return reported ? static_cast<std::uint64_t>(reply.integer) : 0;
  }
  static Status ask_node(Node& node, Deadline until, NodeProbe* found, double* ping_seconds) {
    std::unique_ptr<Connection> connection;
    bool refused = false;
    if (Status status = node.connections.take(until, &connection, &refused); !status) return status;
    Reply reply;
    std::vector<double> times;
    for (int i = 0; *ping_seconds == 0 && i < kPings; ++i) {
      const auto start = steady_clock::now();
      if (Status status = connection->call({"PING"}, until, &reply); !status) return status;
      times.push_back(seconds_since(start));
    }
    std::sort(times.begin(), times.end());
    if (!times.empty()) *ping_seconds = times[times.size() / 2];
    if (Status status = connection->call({"INFO"}, until, &reply); !status) return status;
    node.connections.give_back(std::move(connection));
    const std::string& info = reply.text;
    found->version = line_of(info, "valkey_version");
    found->version =
        found->version.empty() ? "Redis " + line_of(info, "redis_version") : "Valkey " + found->version;
    found->role = line_of(info, "role");
    found->eviction_policy = line_of(info, "maxmemory_policy");
    found->used_bytes = number_of(line_of(info, "used_memory"));
    found->max_bytes = number_of(line_of(info, "maxmemory"));
    found->host_bytes = number_of(line_of(info, "total_system_memory"));
    return Status::ok();
  }

  const Server seed_;
  const Deadline until_;
  Cluster cluster_;
};

}  // namespace

std::optional<std::uint64_t> NodeProbe::free_bytes() const {
  const std::uint64_t bound = max_bytes != 0 ? max_bytes : host_bytes;
  if (bound == 0) return std::nullopt;
  return bound - std::min(bound, used_bytes);
}

Probe probe(const std::vector<Server>& seeds, const std::string& key_prefix, std::uint64_t record_bytes,
            unsigned records, Nanos deadline) {
  Probe found;
  Prober prober(seeds, steady_clock::now() + deadline);
  prober.ask(&found);
  if (records > 0) prober.transfer(key_prefix, record_bytes, records, &found);
  return found;
}

}  // namespace kv_offload::redis
