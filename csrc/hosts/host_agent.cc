// SPDX-License-Identifier: Apache-2.0
#include "hosts/host_agent.h"

#include <poll.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <exception>
#include <optional>
#include <thread>
#include <utility>

#include "base/status.h"
#include "base/thread.h"
#include "hosts/frame.h"
#include "hosts/sockets.h"

namespace kv_offload {
namespace {

constexpr std::size_t kMostUnsent = std::size_t{256} << 10;  // bytes of frames that wait for the socket
constexpr std::size_t kReadAtOnce = std::size_t{64} << 10;   // bytes
constexpr Nanos kReportWait = std::chrono::seconds(1);
constexpr Nanos kAcceptPause = std::chrono::milliseconds(100);
constexpr Nanos kPublishWait = std::chrono::milliseconds(20);
constexpr Nanos kLastWords = std::chrono::milliseconds(500);  // for the last frame, at the end

// A connection that has not proved that it has the secret.
struct Stranger {
  Descriptor socket;
  HostNonce nonce{};
  Bytes unsent, arrived;
  Nanos deadline{0};
};

// The connection of the scheduler.
struct Connection {
  Connection(Descriptor accepted, const KeyedHash::Hash& key, const KeyedHash::Hash& commands)
      : socket(std::move(accepted)), writer(key), reader(commands) {}
  Descriptor socket;
  FrameWriter writer;
  FrameReader reader;
  Bytes unsent, arrived;
  std::deque<HostTiers::Frame> of_tiers;  // taken and not yet in frames
  ReportCursor cursor;
  std::deque<RankReport> reports;  // taken and not yet in frames
  bool joined = false;             // the geometry of all ranks is in frames
  bool ready = false;              // so are all reports from before the connection
  Nanos last_frame{0};             // when the last one was sent
  Nanos last_arrived{0};           // when the last one arrived
};

}  // namespace

struct HostAgent::Impl {
  Impl(std::shared_ptr<HostRegion> host_region, Options given)
      : region(std::move(host_region)), options(std::move(given)), tiers(region, [this] { wake.signal(); }) {
    if (const std::string problem = hosts_problem(); !problem.empty()) throw_resource("{}", problem);
    endpoint.address = options.address;
    listener = listen_on(options.address, &endpoint.port);
    endpoint.secret = random_bytes();
  }

  const std::shared_ptr<HostRegion> region;
  const Options options;
  const SteadyClock clock;
  HostEndpoint endpoint;
  Descriptor listener;
  WakeUp wake;
  std::atomic<bool> stopping{false};
  std::atomic<std::uint64_t> refused{0};
  std::thread watcher, server;
  HostTiers tiers;  // after `wake`, which its thread uses
  // ---- the server's
  std::vector<Stranger> strangers;
  std::unique_ptr<Connection> connection;
  Nanos accept_from{0};            // after a failure to accept, e.g. because there are too many open files
  std::optional<MemoryKept> kept;  // the answer to the scheduler's first order to keep the region

  void watch();
  void serve();
  void serve_once();
  Nanos next_wait(Nanos now) const;
  void accept_all(Nanos now);
  void greet(Nanos now);
  bool keep_greeting(Stranger& stranger, Nanos now);
  bool read_frames(Nanos now);
  bool take_frame(FrameType type, ByteSpan body, Nanos now);
  bool keep_memory(ByteSpan body, Nanos now);
  void end_connection();
  void write_frames(Nanos now);
  void append_tier_frames(Nanos now);
  void append(FrameType type, ByteSpan body, Nanos now);
  void append_geometry(Nanos now);
  void append_reports(Nanos now);
  void say_goodbye();
  bool all_published() const;
};

bool HostAgent::Impl::all_published() const {
  for (std::uint32_t i = 0; i < region->local_ranks(); ++i) {
    if (!region->is_published(region->first_rank() + i)) return false;
  }
  return true;
}

void HostAgent::Impl::watch() {
  begin_thread("kvo-reports", CpuShare::kFull);
  std::uint32_t seen = region->report_count();
  while (!stopping) {
    region->wait_for_report(seen, kReportWait);
    const std::uint32_t now = region->report_count();
    if (std::exchange(seen, now) != now) wake.signal();
  }
}

void HostAgent::Impl::serve() {
  begin_thread("kvo-agent", CpuShare::kFull);
  while (!stopping) {
    // An exception that leaves the thread would end the process. The scheduler connects again.
    try {
      serve_once();
    } catch (const std::exception&) {
      end_connection();
      strangers.clear();
    }
  }
  try {
    say_goodbye();
  } catch (const std::exception&) {  // the scheduler notices the end of the connection
  }
}

void HostAgent::Impl::serve_once() {
  const bool accepts = clock.now() >= accept_from;
  std::vector<pollfd> watched{{wake.get(), POLLIN, 0}, {accepts ? listener.get() : -1, POLLIN, 0}};
  // A client that is not authenticated yet sends or receives, never both at once.
  for (const Stranger& one : strangers)
    watched.push_back({one.socket.get(), static_cast<short>(one.unsent.empty() ? POLLIN : POLLOUT), 0});
  if (connection != nullptr) {
    // While too many orders wait, the scheduler's frames stay in the socket.
    const int reads = tiers.is_full() ? 0 : POLLIN, writes = connection->unsent.empty() ? 0 : POLLOUT;
    watched.push_back({connection->socket.get(), static_cast<short>(reads | writes), 0});
  }
  const auto wait = std::chrono::ceil<std::chrono::milliseconds>(next_wait(clock.now()));
  (void)::poll(watched.data(), watched.size(), static_cast<int>(wait.count()));
  wake.clear();
  const Nanos now = clock.now();
  greet(now);
  accept_all(now);
  if (connection == nullptr) return;
  if (!read_frames(now) || tiers.has_failed()) return end_connection();
  write_frames(now);
  if (!send_some(connection->socket, &connection->unsent)) end_connection();
}

void HostAgent::Impl::end_connection() {
  if (connection != nullptr) tiers.end_connection();
  connection.reset();
}

// False: the connection has ended, nothing arrived for too long, or the bytes violate the protocol.
bool HostAgent::Impl::read_frames(Nanos now) {
  if (tiers.is_full()) {
    connection->last_arrived = now;  // what has arrived is not read
    return true;
  }
  int error = 0;
  Bytes& arrived = connection->arrived;
  if (!receive(connection->socket, kReadAtOnce, &arrived, &error)) return false;
  std::size_t taken = 0;
  while (true) {
    FrameType type{};
    ByteSpan body;
    std::size_t used = 0;
    const auto result = connection->reader.next(ByteSpan(arrived).subspan(taken), &type, &body, &used);
    if (result == FrameReader::Result::kBroken) return false;
    if (result == FrameReader::Result::kIncomplete) break;
    connection->last_arrived = now;
    taken += used;
    if (!take_frame(type, body, now)) return false;
  }
  arrived.erase(arrived.begin(), arrived.begin() + static_cast<std::ptrdiff_t>(taken));
  return now - connection->last_arrived < options.silence;
}

bool HostAgent::Impl::take_frame(FrameType type, ByteSpan body, Nanos now) {
  if (type == FrameType::kSchedulerAlive && body.empty()) return true;
  // Orders name rows and groups, which are known once all ranks have published them.
  if (!is_of_scheduler(type) || !connection->joined) return false;
  return type == FrameType::kKeepMemory ? keep_memory(body, now) : tiers.take(type, body);
}

// Repeats its answer on a new connection: the scheduler may not have received the first one.
bool HostAgent::Impl::keep_memory(ByteSpan body, Nanos now) {
  const auto set = decode_keep_memory(body);
  if (connection->unsent.size() >= kMostUnsent) return false;  // it orders, and does not read the answers
  if (!set || region->options().keep_for.empty() || (kept && kept->set != *set)) return false;
  if (!kept) {
    region->set_region_set(*set);
    kept = {*set, region->keep()};
  }
  append(FrameType::kMemoryKept, encode(*kept), now);
  return true;
}

Nanos HostAgent::Impl::next_wait(Nanos now) const {
  Nanos until = now + kReportWait;
  if (accept_from > now) until = std::min(until, accept_from);
  for (const Stranger& one : strangers) until = std::min(until, one.deadline);
  if (connection != nullptr) {
    until = std::min(until, connection->last_arrived + options.silence);
    if (connection->unsent.empty()) until = std::min(until, connection->last_frame + options.alive_interval);
    if (!connection->joined) until = std::min(until, now + kPublishWait);
    const bool has_more = !connection->reports.empty() || !connection->of_tiers.empty();
    if (has_more && connection->unsent.size() < kMostUnsent) until = now;
  }
  return std::max(until - now, Nanos(0));
}

void HostAgent::Impl::accept_all(Nanos now) {
  while (true) {
    bool failed = false;
    Descriptor accepted = accept_on(listener, &failed);
    if (failed) accept_from = now + kAcceptPause;
    if (!accepted.is_open()) return;
    if (strangers.size() == kMostStrangers) {
      strangers.erase(strangers.begin());
      ++refused;
    }
    Stranger& one = strangers.emplace_back();
    one.socket = std::move(accepted);
    one.nonce = random_bytes();
    one.unsent = make_greeting(one.nonce);
    one.deadline = now + options.handshake_timeout;
    if (!keep_greeting(one, now)) strangers.pop_back();
  }
}

void HostAgent::Impl::greet(Nanos now) {
  std::erase_if(strangers, [&](Stranger& one) { return !keep_greeting(one, now); });
}

// False if the stranger is none any more: refused, or now the connection.
bool HostAgent::Impl::keep_greeting(Stranger& stranger, Nanos now) {
  int error = 0;
  if (!send_some(stranger.socket, &stranger.unsent) ||
      !receive(stranger.socket, kAnswerBytes - stranger.arrived.size(), &stranger.arrived, &error) ||
      now >= stranger.deadline) {
    ++refused;
    return false;
  }
  if (stranger.arrived.size() < kAnswerBytes) return true;
  const auto scheduler = check_answer(endpoint.secret, stranger.nonce, stranger.arrived);
  if (!scheduler) {
    ++refused;
    return false;
  }
  end_connection();
  connection = std::make_unique<Connection>(std::move(stranger.socket),
                                            session_key(endpoint.secret, stranger.nonce, *scheduler),
                                            command_key(endpoint.secret, stranger.nonce, *scheduler));
  tiers.begin_connection();
  connection->last_frame = connection->last_arrived = now;
  return false;
}

void HostAgent::Impl::append(FrameType type, ByteSpan body, Nanos now) {
  connection->writer.append(type, body, &connection->unsent);
  connection->last_frame = now;
}

void HostAgent::Impl::write_frames(Nanos now) {
  if (!connection->joined && all_published()) append_geometry(now);
  if (connection->joined) append_reports(now);
  if (connection->ready) append_tier_frames(now);
  if (now - connection->last_frame >= options.alive_interval && connection->unsent.empty())
    append(FrameType::kAlive, {}, now);
}

void HostAgent::Impl::append_geometry(Nanos now) {
  HostJoin join;
  join.bytes = region->options().bytes;
  join.area_bytes = region->area_bytes();
  join.num_areas = region->num_areas();
  join.num_workers = region->options().num_workers;
  join.first_rank = region->first_rank();
  join.local_ranks = region->local_ranks();
  join.version = options.version;
  join.keeps_memory = !region->options().keep_for.empty();
  join.kept = region->kept();
  append(FrameType::kJoin, encode(join), now);
  for (std::uint32_t i = 0; i < region->local_ranks(); ++i) {
    const std::uint32_t rank = region->first_rank() + i;
    append(FrameType::kGeometry, encode(GeometryFrame{rank, region->geometry(rank)}), now);
  }
  connection->joined = true;
}

void HostAgent::Impl::append_reports(Nanos now) {
  if (connection->reports.empty()) {
    std::vector<RankReport> taken;
    region->take_reports(&connection->cursor, &taken);
    connection->reports.insert(connection->reports.end(), taken.begin(), taken.end());
  }
  while (!connection->reports.empty() && connection->unsent.size() < kMostUnsent) {
    const auto count = static_cast<std::ptrdiff_t>(std::min(connection->reports.size(), kMostReports));
    const std::vector<RankReport> some(connection->reports.begin(), connection->reports.begin() + count);
    append(FrameType::kReports, encode(some), now);
    connection->reports.erase(connection->reports.begin(), connection->reports.begin() + count);
  }
  if (connection->ready || !connection->reports.empty()) return;
  append(FrameType::kReady, {}, now);
  connection->ready = true;
}

void HostAgent::Impl::append_tier_frames(Nanos now) {
  while (connection->unsent.size() < kMostUnsent) {
    if (connection->of_tiers.empty()) {
      for (HostTiers::Frame& frame : tiers.frames()) connection->of_tiers.push_back(std::move(frame));
      if (connection->of_tiers.empty()) return;
    }
    append(connection->of_tiers.front().first, connection->of_tiers.front().second, now);
    connection->of_tiers.pop_front();
  }
}

void HostAgent::Impl::say_goodbye() {
  if (connection == nullptr || !connection->ready) return;
  const Nanos end = clock.now() + kLastWords;
  bool has_taken_leave = false;
  while (clock.now() < end) {
    append_reports(clock.now());
    if (!has_taken_leave && connection->reports.empty()) {
      append(FrameType::kLeaving, {}, clock.now());
      has_taken_leave = true;
    }
    if (!send_some(connection->socket, &connection->unsent)) return;
    if (has_taken_leave && connection->unsent.empty()) return;
    pollfd writable{connection->socket.get(), POLLOUT, 0};
    (void)::poll(&writable, 1, 50);
  }
}

HostAgent::HostAgent(std::shared_ptr<HostRegion> region, Options options)
    : impl_(std::make_unique<Impl>(std::move(region), std::move(options))) {
  try {
    impl_->watcher = std::thread([this] { impl_->watch(); });
    impl_->server = std::thread([this] { impl_->serve(); });
  } catch (const std::exception& error) {
    close();
    throw_resource("cannot start a thread: {}", error.what());
  }
}

HostAgent::~HostAgent() { close(); }

std::string HostAgent::endpoint() const { return to_text(impl_->endpoint); }

std::uint64_t HostAgent::refused_connections() const { return impl_->refused; }

HostTiers& HostAgent::tiers() { return impl_->tiers; }

void HostAgent::close() {
  impl_->tiers.close();
  impl_->stopping = true;
  impl_->region->wake_report_waiters();
  impl_->wake.signal();
  if (impl_->watcher.joinable()) impl_->watcher.join();
  if (impl_->server.joinable()) impl_->server.join();
}

}  // namespace kv_offload
