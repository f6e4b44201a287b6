#include "storage/redis/probe.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <vector>

#include "base/aligned_buffer.h"

namespace kv_offload::redis {
namespace {

using std::chrono::steady_clock;

constexpr int kPings = 9;

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
  Prober(const Server& server, Deadline until) : server_(server), until_(until) {
    bool refused = false;
    check(Connection::open(server, make_tls_context(server), until, &connection_, &refused));
  }
  void ping(Probe* found) {
    std::vector<double> times;
    for (int i = 0; i < kPings; ++i) {
      const auto start = steady_clock::now();
      call({"PING"});
      times.push_back(seconds_since(start));
    }
    std::sort(times.begin(), times.end());
    found->ping_seconds = times[kPings / 2];
  }
  void ask(Probe* found) {
    const std::string info = call({"INFO"}).text;
    if (line_of(info, "cluster_enabled") == "1") check(refusal("MOVED"));
    found->version = line_of(info, "valkey_version");
    found->version =
        found->version.empty() ? "Redis " + line_of(info, "redis_version") : "Valkey " + found->version;
    found->role = line_of(info, "role");
    found->eviction_policy = line_of(info, "maxmemory_policy");
    found->used_bytes = number_of(line_of(info, "used_memory"));
    found->max_bytes = number_of(line_of(info, "maxmemory"));
  }
  void transfer(const std::string& key_prefix, std::uint64_t bytes, unsigned records, Probe* found) {
    const AlignedBuffer record(bytes), back(bytes);
    std::fill(record.span().begin(), record.span().end(), std::byte{0x5a});
    const auto key = [&](unsigned i) { return fmt::format("{}:probe:{}:{}", key_prefix, getpid(), i); };
    const std::span<const std::byte> from = record.span();
    const std::span<std::byte> to = back.span();
    Reply reply;
    unsigned written = 0;
    auto start = steady_clock::now();
    for (; written < records && found->write_refused.empty(); ++written) {
      check(connection_->set(key(written), {&from, 1}, {"EX", "60"}, until_, &reply));
      if (reply.kind == Reply::Kind::kError) found->write_refused = refusal(reply.text).message();
    }
    const double writing = seconds_since(start);
    start = steady_clock::now();
    bool all = true;
    for (unsigned i = 0; i < written && found->write_refused.empty(); ++i) {
      std::uint64_t length = 0;
      check(connection_->get(key(i), {&to, 1}, until_, &reply, &length));
      all &= reply.kind == Reply::Kind::kString;
    }
    const double reading = seconds_since(start);
    for (unsigned i = 0; i < written; ++i) call({"DEL", key(i)});
    if (!found->write_refused.empty()) return;
    if (!all) {
      found->write_refused = "the server dropped records at once: it has no room for them";
      return;
    }
    const double total = static_cast<double>(bytes) * written;
    found->write_bytes_per_second = total / writing;
    found->read_bytes_per_second = total / reading;
  }

 private:
  void check(const Status& status) const {
    if (!status) throw_resource("{}: {}", address_of(server_), status.message());
  }
  Reply call(const Connection::Words& words) {
    Reply reply;
    check(connection_->call(words, until_, &reply));
    return reply;
  }

  const Server& server_;
  const Deadline until_;
  std::unique_ptr<Connection> connection_;
};

}  // namespace

Probe probe(const Server& server, const std::string& key_prefix, std::uint64_t record_bytes, unsigned records,
            Nanos deadline) {
  Probe found;
  Prober prober(server, steady_clock::now() + deadline);
  prober.ping(&found);
  prober.ask(&found);
  if (records > 0) prober.transfer(key_prefix, record_bytes, records, &found);
  return found;
}

}  // namespace kv_offload::redis
