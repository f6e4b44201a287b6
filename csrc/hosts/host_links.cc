// SPDX-License-Identifier: Apache-2.0
#include "hosts/host_links.h"

#include <poll.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <optional>
#include <stdexcept>
#include <thread>
#include <utility>

#include "base/thread.h"
#include "base/thread_annotations.h"
#include "hosts/frame.h"
#include "hosts/sockets.h"

namespace kv_offload {
namespace {

constexpr std::size_t kRead = std::size_t{64} << 10;  // bytes read at once
constexpr Nanos kEndpointPoll = std::chrono::milliseconds(20);
constexpr Nanos kWait = std::chrono::seconds(1);
constexpr Nanos kWaitTurn = std::chrono::milliseconds(200);  // Options::on_wait
constexpr Nanos kOpenTurn = std::chrono::milliseconds(20);   // the wait for one host while several open tiers
constexpr std::size_t kMostEvents = 64;  // that were not taken yet; later ones are dropped
constexpr std::size_t kMostUnsentOrders = std::size_t{256} << 10;  // bytes of frames that wait for the socket

enum class State : std::uint8_t {
  kNoEndpoint,  // rank 0 has not said where the host listens
  kPausing,     // until `deadline`, then it is tried again
  kConnecting,  // until `deadline`
  kGreeting,    // connected; until the host's greeting or `deadline`
  kJoining,     // authenticated; the host sends what it has
  kConnected,
  kUnfit,  // for good
};

struct Link {
  RemoteHost host;
  std::size_t number = 0;  // in Impl::links
  State state = State::kNoEndpoint;
  std::optional<HostEndpoint> endpoint;
  // Why the host is not connected. Keeps the last failure until the first authenticated message of a new
  // attempt.
  std::string problem = "rank 0 does not know its address yet";
  Nanos deadline{0};  // in kJoining and kConnected: the end of the silence that is allowed
  Nanos pause{0};
  Nanos connected_at{0};
  Nanos last_sent{0};        // when the last frame to the host was made
  bool orders_wait = false;  // the channel may have frames that did not fit into `unsent`
  Descriptor socket;
  Bytes unsent, arrived;
  std::unique_ptr<FrameReader> reader;
  std::unique_ptr<FrameWriter> writer;
  std::shared_ptr<TierChannel> channel;
  bool joined = false;
  bool keep_ordered = false;  // on this connection
  bool was_connected = false;
};

// Why a host has no part of the memory of the earlier engine.
std::string_view reason_of(const KeptRegion& kept) {
  switch (kept.origin) {
    case RegionOrigin::kNew:
      return "it has no host memory of an earlier engine: was it restarted, or did another start need the "
             "memory?";
    case RegionOrigin::kReplaced:
      return "its host memory had other sizes or another version, was damaged, or was from before a reboot, "
             "and was removed";
    case RegionOrigin::kInUse:
      return "other processes still use its host memory";
    case RegionOrigin::kAdopted:
      break;
  }
  return is_set(kept.set) ? "its host memory was last used by another engine, or with other hosts"
                          : "its host memory is of an engine whose start failed";
}

RegionSet new_region_set() {
  const auto random = random_bytes();
  RegionSet set;
  std::memcpy(set.data(), random.data(), sizeof set);
  set[0] |= 1;  // never 0
  return set;
}

std::string describe(const RankGeometry& geometry) {
  return fmt::format("chunks of {} bytes and the layout {}", fmt::join(geometry.shard_bytes, ", "),
                     geometry.fingerprint);
}

class Events {
 public:
  void add(std::string event) EXCLUDES(mutex_) {
    const MutexLock lock(mutex_);
    if (events_.size() < kMostEvents) events_.push_back(std::move(event));
  }
  std::vector<std::string> take() EXCLUDES(mutex_) {
    const MutexLock lock(mutex_);
    return std::exchange(events_, {});
  }

 private:
  Mutex mutex_;
  std::vector<std::string> events_ GUARDED_BY(mutex_);  // at most kMostEvents
};

}  // namespace

struct HostLinks::Impl {
  Impl(std::shared_ptr<HostRegion> host_region, std::vector<RemoteHost> hosts, Options given);

  const std::shared_ptr<HostRegion> region;
  const Options options;
  const SteadyClock clock;
  const std::shared_ptr<WakeUp> wake = std::make_shared<WakeUp>();  // shared: a tier may outlive this object
  std::atomic<bool> stopping{false};
  const std::shared_ptr<Events> events = std::make_shared<Events>();  // shared for the same reason as `wake`
  std::thread thread;
  std::vector<Link> links;  // the thread's; the hosts and channels never change

  // ---- what other threads see
  mutable Mutex mutex;
  mutable CondVar changed;
  std::vector<std::string> missing GUARDED_BY(mutex);  // hosts that are not connected, and why
  std::vector<std::uint32_t> lost GUARDED_BY(mutex);   // their numbers
  std::string unfit GUARDED_BY(mutex);                 // the first host that does not fit, and why
  // ---- by link
  std::vector<std::optional<KeptRegion>> kept GUARDED_BY(mutex);  // as in the host's first join
  std::optional<RegionSet> keep_order GUARDED_BY(mutex);          // of all links
  std::vector<std::optional<bool>> keep_answers GUARDED_BY(mutex);

  void run();
  void run_once();
  void step(Link& link, Nanos now);
  void connect(Link& link, Nanos now);
  void greet(Link& link, Nanos now);
  void read(Link& link, Nanos now);
  void append_frames(Link& link, Nanos now);
  void take_frames(Link& link, Nanos now);
  void take_frame(Link& link, FrameType type, ByteSpan body, Nanos now);
  void join(Link& link, ByteSpan body);
  void order_keep(Link& link, Nanos now);
  void enter_kept(Link& link, ByteSpan body);
  void publish(Link& link, ByteSpan body);
  void enter_reports(Link& link, ByteSpan body);
  void set_connected(Link& link);
  void drop(Link& link, Nanos now, bool is_final = false);
  void lose(Link& link, const std::string& problem, Nanos now, bool is_final = false);
  void refuse(Link& link, const std::string& problem);
  void publish_state();
  static std::string name_of(const Link& link);
  static bool is_live(const Link& link) { return link.socket.is_open(); }
  static bool has(const Link& link, std::uint32_t rank) {
    return rank >= link.host.first_rank && rank - link.host.first_rank < link.host.ranks;
  }
};

HostLinks::Impl::Impl(std::shared_ptr<HostRegion> host_region, std::vector<RemoteHost> hosts, Options given)
    : region(std::move(host_region)), options(std::move(given)) {
  if (const std::string problem = hosts_problem(); !problem.empty()) throw_resource("{}", problem);
  std::uint32_t next = region->local_ranks();
  for (const RemoteHost& host : hosts) {
    if (host.first_rank != next || host.ranks == 0 || host.ranks > region->options().num_workers - next) {
      throw_invalid("a host with {} ranks from rank {} on was given; the next rank is {} of {}", host.ranks,
                    host.first_rank, next, region->options().num_workers);
    }
    next += host.ranks;
    Link& link = links.emplace_back();
    link.host = host;
    link.number = links.size() - 1;
    link.channel = std::make_shared<TierChannel>([wake = wake] { wake->signal(); });
  }
  if (next != region->options().num_workers)
    throw_invalid("hosts for {} ranks were given; the engine has {}", next, region->options().num_workers);
  {
    const MutexLock lock(mutex);
    kept.resize(links.size());
    keep_answers.resize(links.size());
  }
  region->set_cut_off(true);
  publish_state();
}

std::string HostLinks::Impl::name_of(const Link& link) {
  const std::string where = link.endpoint ? fmt::format(" at {}", link.endpoint->address) : "";
  if (link.host.ranks == 1) return fmt::format("the host of rank {}{}", link.host.first_rank, where);
  return fmt::format("the host of ranks {} to {}{}", link.host.first_rank,
                     link.host.first_rank + link.host.ranks - 1, where);
}

void HostLinks::Impl::run() {
  begin_thread("kvo-hosts", CpuShare::kFull);
  while (!stopping) {
    // An exception that leaves the thread would end the process.
    try {
      run_once();
    } catch (const std::exception&) {  // out of memory: without allocating anything
      region->set_cut_off(true);
      for (Link& link : links) {
        if (is_live(link)) drop(link, clock.now());
      }
    }
  }
}

void HostLinks::Impl::run_once() {
  const Nanos before = clock.now();
  Nanos until = before + kWait;
  std::vector<pollfd> watched{{wake->get(), POLLIN, 0}};
  for (const Link& link : links) {
    if (link.state == State::kNoEndpoint)
      until = std::min(until, before + kEndpointPoll);
    else if (link.state != State::kUnfit)
      until = std::min(until, link.deadline);
    if (!is_live(link)) continue;
    // An idle link sends a keep-alive frame; orders that did not fit follow as soon as there is space.
    if (link.writer != nullptr && link.unsent.empty())
      until = std::min(until, link.last_sent + options.alive_interval);
    if (link.orders_wait && link.unsent.size() < kMostUnsentOrders) until = before;
    const bool writes = link.state == State::kConnecting || !link.unsent.empty();
    watched.push_back({link.socket.get(), static_cast<short>(writes ? POLLIN | POLLOUT : POLLIN), 0});
  }
  const auto wait = std::chrono::ceil<std::chrono::milliseconds>(std::max(until - before, Nanos(0)));
  (void)::poll(watched.data(), watched.size(), static_cast<int>(wait.count()));
  wake->clear();
  for (Link& link : links) step(link, clock.now());
  publish_state();
}

void HostLinks::Impl::step(Link& link, Nanos now) {
  switch (link.state) {
    case State::kNoEndpoint: {
      const std::string text = region->endpoint(link.host.first_rank);
      if (text.empty()) return;
      link.endpoint = parse_endpoint(text);
      if (!link.endpoint) return refuse(link, "rank 0 gave an invalid address");
      link.problem = "the connection has not been established yet";
      return connect(link, now);
    }
    case State::kPausing:
      if (now >= link.deadline) connect(link, now);
      return;
    case State::kConnecting: {
      // Writable: connected or failed. Before that, wait until the deadline.
      pollfd writable{link.socket.get(), POLLOUT, 0};
      if (::poll(&writable, 1, 0) == 1) {
        if (const int error = connect_error(link.socket); error != 0)
          return lose(link, fmt::format("cannot connect: {}", std::strerror(error)), now);
        link.state = State::kGreeting;
        return greet(link, now);
      }
      if (now >= link.deadline) lose(link, "cannot connect: no answer; does a firewall block it?", now);
      return;
    }
    case State::kGreeting:
      return greet(link, now);
    case State::kJoining:
    case State::kConnected:
      return read(link, now);
    case State::kUnfit:
      return;
  }
}

void HostLinks::Impl::connect(Link& link, Nanos now) {
  int error = 0;
  link.socket = start_connect(link.endpoint->address, link.endpoint->port, &error);
  if (error != 0) return lose(link, fmt::format("cannot connect: {}", std::strerror(error)), now);
  link.state = State::kConnecting;
  link.deadline = now + options.connect_timeout;
}

void HostLinks::Impl::greet(Link& link, Nanos now) {
  int error = 0;
  if (!receive(link.socket, kGreetingBytes - link.arrived.size(), &link.arrived, &error))
    return lose(link, "the connection was closed before the greeting", now);
  if (link.arrived.size() < kGreetingBytes) {
    if (now >= link.deadline) lose(link, "no greeting arrived", now);
    return;
  }
  std::uint32_t version = 0;
  const auto host = parse_greeting(link.arrived, &version);
  // The greeting proves nothing: once the host was connected, something else may answer at its address.
  if (!host && version != 0 && version != kHostProtocol && !link.was_connected) {
    return refuse(link,
                  fmt::format("it uses protocol {} and this host protocol {}: install the same version of "
                              "vllm-kv-offload on all hosts",
                              version, kHostProtocol));
  }
  if (!host) return lose(link, "another program answers at its address", now);
  const HostNonce scheduler = random_bytes();
  link.unsent = make_answer(link.endpoint->secret, *host, scheduler);
  link.reader = std::make_unique<FrameReader>(session_key(link.endpoint->secret, *host, scheduler));
  link.writer = std::make_unique<FrameWriter>(command_key(link.endpoint->secret, *host, scheduler));
  link.arrived.clear();
  link.joined = false;
  link.state = State::kJoining;
  link.deadline = now + options.silence;
  link.last_sent = now;
  read(link, now);
}

void HostLinks::Impl::append_frames(Link& link, Nanos now) {
  const auto append = [&](FrameType type, ByteSpan body) {
    link.writer->append(type, body, &link.unsent);
    link.last_sent = now;
  };
  if (link.state == State::kConnected && !link.keep_ordered) order_keep(link, now);
  link.orders_wait = link.unsent.size() >= kMostUnsentOrders;
  if (link.state == State::kConnected && !link.orders_wait) {
    for (const TierChannel::Frame& frame : link.channel->take_frames()) append(frame.first, frame.second);
  }
  if (link.unsent.empty() && now - link.last_sent >= options.alive_interval)
    append(FrameType::kSchedulerAlive, {});
}

void HostLinks::Impl::order_keep(Link& link, Nanos now) {
  const MutexLock lock(mutex);
  if (!keep_order || keep_answers[link.number]) return;
  link.writer->append(FrameType::kKeepMemory, encode(*keep_order), &link.unsent);
  link.last_sent = now;
  link.keep_ordered = true;
}

void HostLinks::Impl::enter_kept(Link& link, ByteSpan body) {
  const auto given = decode_memory_kept(body);
  const MutexLock lock(mutex);
  if (!given || !link.keep_ordered || given->set != *keep_order)
    throw_invalid("a message about its host memory is malformed");
  keep_answers[link.number] = given->is_kept;
}

void HostLinks::Impl::read(Link& link, Nanos now) {
  int error = 0;
  append_frames(link, now);
  const std::size_t before = link.arrived.size();
  const bool is_open =
      send_some(link.socket, &link.unsent) && receive(link.socket, kRead, &link.arrived, &error);
  if (link.arrived.size() > before) take_frames(link, now);
  if (!is_live(link)) return;
  if (!is_open) {
    return lose(link,
                error == 0 ? std::string("it closed the connection")
                           : fmt::format("the connection was lost: {}", std::strerror(error)),
                now);
  }
  if (now >= link.deadline)
    lose(link, fmt::format("nothing arrived for {:.3g} s", to_seconds(options.silence)), now);
}

void HostLinks::Impl::take_frames(Link& link, Nanos now) {
  std::size_t taken = 0;
  while (is_live(link)) {
    FrameType type{};
    ByteSpan body;
    std::size_t used = 0;
    const auto result = link.reader->next(ByteSpan(link.arrived).subspan(taken), &type, &body, &used);
    if (result == FrameReader::Result::kIncomplete) break;
    if (result == FrameReader::Result::kBroken)
      return lose(link, "the authentication of a message failed", now);
    link.deadline = now + options.silence;
    taken += used;
    if (type == FrameType::kLeaving) return lose(link, "it has shut down", now, true);
    try {
      take_frame(link, type, body, now);
    } catch (const InvalidArgument& problem) {
      return refuse(link, problem.what());
    }
  }
  if (!is_live(link)) return;  // `arrived` is empty
  link.arrived.erase(link.arrived.begin(), link.arrived.begin() + static_cast<std::ptrdiff_t>(taken));
}

// Throws InvalidArgument if the host does not fit.
void HostLinks::Impl::take_frame(Link& link, FrameType type, ByteSpan body, Nanos now) {
  if (!link.joined && type != FrameType::kJoin && type != FrameType::kAlive)
    throw_invalid("it sent message {} before it joined", static_cast<unsigned>(type));
  switch (type) {
    case FrameType::kJoin:
      return join(link, body);
    case FrameType::kGeometry:
      return publish(link, body);
    case FrameType::kReports:
      return enter_reports(link, body);
    case FrameType::kReady:
      return set_connected(link);
    case FrameType::kMemoryKept:
      return enter_kept(link, body);
    case FrameType::kAlive:
      // A host joins when all of its ranks have published their layouts; until then it sends only this.
      if (!link.joined) link.problem = "it is reachable, but not all of its ranks have started";
      return;
    case FrameType::kLeaving:
      return;
    default:
      if (link.state != State::kConnected)
        throw_invalid("it sent message {} too early", static_cast<unsigned>(type));
      switch (link.channel->deliver(type, body, now)) {
        case TierChannel::Delivery::kTaken:
          return;
        case TierChannel::Delivery::kMalformed:
          throw_invalid("a message about its tiers is malformed");
        case TierChannel::Delivery::kTooMuch:
          return lose(link, "it sent more than an idle engine can keep", now);
      }
  }
}

void HostLinks::Impl::join(Link& link, ByteSpan body) {
  const auto given = decode_join(body);
  if (!given) throw_invalid("its first message is malformed");
  const auto check = [](const char* what, const auto& theirs, const auto& ours) {
    if (theirs == ours) return;
    throw_invalid("its {} is {} and that of this host is {}: start vLLM with the same settings on all hosts",
                  what, theirs, ours);
  };
  if (given->version != options.version) {
    throw_invalid("it has vllm-kv-offload {} and this host {}: install the same version on all hosts",
                  given->version, options.version);
  }
  check("cpu_bytes_to_use", given->bytes, region->options().bytes);
  check("number of ranks", given->num_workers, region->options().num_workers);
  if (given->num_areas != region->num_areas()) {
    throw_invalid(
        "it reports {} areas of host memory for the engine's {} ranks and this host {}, so the hosts "
        "disagree on the ranks that hold the same KV cache (MLA): start the same model with the same "
        "settings and the same vLLM on all hosts",
        given->num_areas, given->num_workers, region->num_areas());
  }
  check("size of a rank's area", given->area_bytes, region->area_bytes());
  if (given->first_rank != link.host.first_rank || given->local_ranks != link.host.ranks) {
    throw_invalid("it has {} ranks from rank {} on; {} from rank {} on were expected", given->local_ranks,
                  given->first_rank, link.host.ranks, link.host.first_rank);
  }
  check("keep_host_memory", given->keeps_memory, !region->options().keep_for.empty());
  {
    const MutexLock lock(mutex);
    if (!kept[link.number]) kept[link.number] = given->kept;
  }
  link.joined = true;
  link.problem = "it has not sent the layouts of all of its ranks yet";
}

void HostLinks::Impl::publish(Link& link, ByteSpan body) {
  const auto given = decode_geometry(body);
  if (!given || !has(link, given->rank)) throw_invalid("a message about the layout of a rank is malformed");
  if (!region->is_published(given->rank)) return region->publish_remote(given->rank, given->geometry);
  const RankGeometry known = region->geometry(given->rank);
  if (known.shard_bytes == given->geometry.shard_bytes && known.fingerprint == given->geometry.fingerprint)
    return;
  throw_invalid("rank {} had {} and now has {}", given->rank, describe(known), describe(given->geometry));
}

void HostLinks::Impl::enter_reports(Link& link, ByteSpan body) {
  const auto given = decode_reports(body);
  if (!given) throw_invalid("a message with the results of jobs is malformed");
  for (const RankReport& report : *given) {
    if (!has(link, report.rank) || report.ticket == kNoTicket)
      throw_invalid("it sent the result of job {} of rank {}, which it does not run", report.ticket,
                    report.rank);
  }
  for (const RankReport& report : *given) region->report(report.rank, report.ticket, report.failed_groups);
}

void HostLinks::Impl::set_connected(Link& link) {
  for (std::uint32_t i = 0; i < link.host.ranks; ++i) {
    if (!region->is_published(link.host.first_rank + i))
      throw_invalid("it did not send the layout of rank {}", link.host.first_rank + i);
  }
  if (link.state != State::kConnected) link.channel->begin_connection();
  link.state = State::kConnected;
  link.connected_at = clock.now();
  wake->signal();  // an order to keep its memory may wait
  if (!link.was_connected) link.pause = Nanos(0);
  if (std::exchange(link.was_connected, true))
    events->add(fmt::format("{} is connected again; its chunks are used again", name_of(link)));
}

void HostLinks::Impl::lose(Link& link, const std::string& problem, Nanos now, bool is_final) {
  // Before the caller reads on: no lookup may hit while the host is lost.
  region->set_cut_off(true);
  const bool was_connected = link.state == State::kConnected;
  link.problem = problem;
  drop(link, now, is_final);
  if (!was_connected) return;
  events->add(fmt::format(
      "lost the connection to {}: {}; all lookups are misses until it is connected again; next attempt in "
      "{:.3g} s",
      name_of(link), problem, to_seconds(link.pause)));
}

void HostLinks::Impl::drop(Link& link, Nanos now, bool is_final) {
  link.channel->end_connection(link.problem, is_final);
  // A connection that is lost again soon does not reset the pause.
  if (link.state == State::kConnected && now - link.connected_at >= options.min_lifetime)
    link.pause = Nanos(0);
  link.socket.reset();
  link.unsent.clear();
  link.arrived.clear();
  link.reader.reset();
  link.writer.reset();
  link.keep_ordered = false;
  link.pause = std::clamp(2 * link.pause, options.first_pause, options.last_pause);
  link.state = State::kPausing;
  link.deadline = now + link.pause;
}

void HostLinks::Impl::refuse(Link& link, const std::string& problem) {
  region->set_cut_off(true);
  link.problem = problem;
  drop(link, clock.now(), true);
  link.state = State::kUnfit;
  if (!link.was_connected) return;  // wait_until_connected() says so
  events->add(
      fmt::format("{} no longer fits: {}; it is not tried again, and all lookups are misses until "
                  "the engine is restarted",
                  name_of(link), problem));
}

void HostLinks::Impl::publish_state() {
  std::vector<std::string> now_missing;
  std::vector<std::uint32_t> now_lost;
  std::string now_unfit;
  for (std::uint32_t i = 0; i < links.size(); ++i) {
    const Link& link = links[i];
    if (link.state == State::kConnected) continue;
    now_lost.push_back(i + 1);
    now_missing.push_back(fmt::format("{}: {}", name_of(link), link.problem));
    if (link.state == State::kUnfit && now_unfit.empty()) now_unfit = now_missing.back();
  }
  region->set_cut_off(!now_missing.empty() || stopping);
  const MutexLock lock(mutex);
  missing = std::move(now_missing);
  lost = std::move(now_lost);
  unfit = std::move(now_unfit);
  changed.notify_all();
}

HostLinks::HostLinks(std::shared_ptr<HostRegion> region, std::vector<RemoteHost> hosts, Options options)
    : impl_(std::make_unique<Impl>(std::move(region), std::move(hosts), std::move(options))) {
  impl_->thread = std::thread([impl = impl_.get()] { impl->run(); });
}

HostLinks::~HostLinks() { close(); }

Status HostLinks::wait_until_connected(Nanos timeout) const {
  const Nanos end = impl_->clock.now() + timeout;
  const MutexLock lock(impl_->mutex);
  while (true) {
    if (!impl_->unfit.empty()) return Status::error(StatusKind::kUnavailable, impl_->unfit);
    if (impl_->missing.empty()) return Status::ok();
    const Nanos left = end - impl_->clock.now();
    if (left <= Nanos(0))
      return Status::error(StatusKind::kTimeout, fmt::format("{}", fmt::join(impl_->missing, "; ")));
    impl_->changed.wait_for(impl_->mutex, left);
  }
}

std::vector<std::vector<OpenedTier>> HostLinks::open_tiers(
    const std::string& text, const std::vector<std::vector<EpochChoice>>& epochs, Nanos timeout) {
  if (text.size() > kMostOpenText)
    throw_resource("the settings of the tiers have {} bytes; at most {} are possible", text.size(),
                   kMostOpenText);
  for (const std::vector<EpochChoice>& of_host : epochs) {
    if (of_host.size() > kMostTiers)
      throw_invalid("{} tiers were given; at most {} are possible", of_host.size(), kMostTiers);
  }
  const Nanos end = impl_->clock.now() + timeout;
  // A host may count a large directory: all at once.
  for (std::size_t host = 0; host < impl_->links.size(); ++host)
    impl_->links[host].channel->begin_open(epochs.at(host), text);
  std::vector<std::vector<OpenedTier>> tiers(impl_->links.size());
  const auto problem_of = [&](std::size_t host, const Status& opened) {
    return fmt::format("the tiers of {} cannot be used: {}", Impl::name_of(impl_->links[host]),
                       opened.message());
  };
  std::vector<Status> opened(tiers.size(), Status::error(StatusKind::kTimeout, ""));
  // In turns: the failure of one host ends the wait for all.
  for (;;) {
    bool all = true;
    for (std::size_t host = 0; host < tiers.size(); ++host) {
      if (opened[host]) continue;
      if (impl_->options.on_wait) impl_->options.on_wait();
      const Nanos turn = std::min(kOpenTurn, end - impl_->clock.now());
      opened[host] = impl_->links[host].channel->wait_until_open(turn, &tiers[host]);
      all = all && opened[host].is_ok();
      if (!opened[host] && opened[host].kind() != StatusKind::kTimeout)
        throw_resource("{}", problem_of(host, opened[host]));
    }
    if (all) return tiers;
    if (impl_->clock.now() < end) continue;
    std::vector<std::string> missing;
    for (std::size_t host = 0; host < tiers.size(); ++host) {
      if (!opened[host]) missing.push_back(problem_of(host, opened[host]));
    }
    throw_resource("{}", fmt::join(missing, "; "));
  }
}

KeptMemory HostLinks::keep_memory(Nanos timeout) {
  const Nanos end = impl_->clock.now() + timeout;
  const auto name_of = [&](std::size_t host) {
    if (host > 0) return Impl::name_of(impl_->links[host - 1]);
    return fmt::format("the host of rank 0");
  };
  std::vector<KeptRegion> regions{impl_->region->kept()};  // by host
  {
    const MutexLock lock(impl_->mutex);
    if (impl_->keep_order) throw std::logic_error("keep_memory() was called twice");
    for (const auto& kept : impl_->kept) {
      if (!kept) throw std::logic_error("keep_memory() was called before all hosts were connected");
      regions.push_back(*kept);
    }
  }
  RegionSet set{};
  for (const KeptRegion& region : regions) {
    if (!is_set(set)) set = region.set;
  }
  KeptMemory memory;
  for (std::size_t host = 0; host < regions.size() && is_set(set); ++host) {
    if (regions[host].set == set) continue;
    memory.missing.push_back(fmt::format("{}: {}", name_of(host), reason_of(regions[host])));
  }
  if (!is_set(set) || !memory.missing.empty()) set = new_region_set();
  impl_->region->set_region_set(set);
  memory.identity = fmt::format("{:016x}{:016x}", set[0], set[1]);
  {
    const MutexLock lock(impl_->mutex);
    impl_->keep_order = set;
  }
  impl_->wake->signal();
  const auto has_answered = [](const auto& answer) { return answer.has_value(); };
  for (;;) {
    if (impl_->options.on_wait) impl_->options.on_wait();
    const MutexLock lock(impl_->mutex);
    if (std::all_of(impl_->keep_answers.begin(), impl_->keep_answers.end(), has_answered)) {
      for (std::size_t host = 1; host < regions.size(); ++host) {
        if (!*impl_->keep_answers[host - 1]) memory.ending.push_back(name_of(host));
      }
      return memory;
    }
    const Nanos left = end - impl_->clock.now();
    if (!impl_->unfit.empty()) throw_resource("not all hosts keep their host memory: {}", impl_->unfit);
    if (left <= Nanos(0)) {
      std::vector<std::string> silent;
      for (std::size_t host = 1; host < regions.size(); ++host) {
        if (!impl_->keep_answers[host - 1]) silent.push_back(name_of(host));
      }
      throw_resource("these hosts have not confirmed that they keep their host memory: {}{}{}",
                     fmt::join(silent, ", "),
                     impl_->missing.empty() ? "" : "; not connected: ", fmt::join(impl_->missing, "; "));
    }
    impl_->changed.wait_for(impl_->mutex, std::min(left, kWaitTurn));
  }
}

std::size_t HostLinks::num_hosts() const { return impl_->links.size(); }

RemoteHost HostLinks::host(std::size_t host) const { return impl_->links.at(host).host; }

std::unique_ptr<Tier> HostLinks::remote_tier(std::size_t host, std::uint8_t tier,
                                             RemoteTierOptions options) const {
  return make_remote_tier(impl_->links.at(host).channel, tier, std::move(options));
}

std::vector<std::uint32_t> HostLinks::lost_hosts() const {
  const MutexLock lock(impl_->mutex);
  return impl_->lost;
}

std::vector<std::string> HostLinks::take_events() { return impl_->events->take(); }

std::function<void(std::string)> HostLinks::event_sink() const {
  return [events = impl_->events](std::string event) { events->add(std::move(event)); };
}

void HostLinks::close() {
  impl_->stopping = true;
  impl_->wake->signal();
  if (impl_->thread.joinable()) impl_->thread.join();
  impl_->region->set_cut_off(true);
  for (const Link& link : impl_->links) link.channel->end_connection("the engine shuts down", true);
}

}  // namespace kv_offload
