// SPDX-License-Identifier: Apache-2.0
// Two hosts in one process: each has a region with its own name, and they talk over the loopback interface.
#include "hosts/host_links.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/refused_chunks.h"
#include "cache/cache_types.h"
#include "hosts/frame.h"
#include "hosts/host_agent.h"
#include "hosts/sockets.h"
#include "memory/shm_fixture.h"
#include "tier/loopback_server.h"

namespace kv_offload {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::holds_soon;
using ::testing::IsEmpty;

constexpr Nanos kPatience = std::chrono::minutes(2);
const char* const kVersion = "1.2.3";

// Blocking reads and writes of a peer that the test plays. They end after kPatience.
class Peer {
 public:
  explicit Peer(int fd) : fd_(fd) {
    const ::timeval patience{.tv_sec = 120, .tv_usec = 0};
    (void)::setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
  }
  ~Peer() { ::close(fd_); }
  Peer(const Peer&) = delete;
  Peer& operator=(const Peer&) = delete;

  // Connects to an agent.
  static std::unique_ptr<Peer> of(const HostEndpoint& endpoint) {
    int error = 0;
    Descriptor socket = start_connect(endpoint.address, endpoint.port, &error);
    EXPECT_EQ(error, 0);
    EXPECT_TRUE(holds_soon([&] { return connect_error(socket) == 0; }));
    const int fd = ::dup(socket.get());
    (void)::fcntl(fd, F_SETFL, 0);  // blocking
    return std::make_unique<Peer>(fd);
  }

  void send(ByteSpan bytes) const {
    (void)testing::send_all(fd_, {reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  }
  // Returns fewer bytes if the connection ended.
  Bytes read(std::size_t count) const {
    Bytes bytes(count);
    std::size_t have = 0;
    while (have < count) {
      const ::ssize_t got = ::recv(fd_, bytes.data() + have, count - have, 0);
      if (got <= 0) break;
      have += static_cast<std::size_t>(got);
    }
    bytes.resize(have);
    return bytes;
  }
  bool has_ended() const { return read(1).empty(); }

 private:
  const int fd_;
};

class HostsTest : public ShmTest {
 protected:
  static constexpr std::uint32_t kRanks = 3;  // rank 0 here, ranks 1 and 2 on the other host

  explicit HostsTest(std::string keep_for = {}) : keep_for_(std::move(keep_for)) {
    for (std::uint32_t number = 0; number < kRanks; ++number)
      ranks_[number] =
          HostRegion::attach_worker(number == 0 ? here() : there(), number, some_geometry(number));
    scheduler_ = HostRegion::attach_scheduler(here());
  }

  RegionOptions here() const {
    RegionOptions made = options(6 * kMiB, kRanks);
    made.local_ranks = 1;
    made.keep_for = keep_for_;
    return made;
  }
  RegionOptions there() const {
    RegionOptions made = options(6 * kMiB, kRanks, "engine host 1");
    made.first_rank = 1;
    made.local_ranks = 2;
    made.keep_for = keep_for_;
    return made;
  }
  HostRegion& rank(std::uint32_t number) { return *ranks_[number]; }
  std::unique_ptr<HostAgent> agent(Nanos handshake_timeout = std::chrono::seconds(60),
                                   Nanos silence = kPatience) {
    HostAgent::Options made;
    made.address = "127.0.0.1";
    made.version = kVersion;
    made.handshake_timeout = handshake_timeout;
    made.silence = silence;
    return std::make_unique<HostAgent>(ranks_[1], made);
  }
  static HostLinks::Options link_options() {
    HostLinks::Options made;
    made.version = kVersion;
    made.silence = made.alive_interval = kPatience;
    made.connect_timeout = kPatience;
    made.first_pause = made.last_pause = std::chrono::milliseconds(1);
    return made;
  }
  std::unique_ptr<HostLinks> links(const HostLinks::Options& options = link_options()) {
    return std::make_unique<HostLinks>(scheduler_, std::vector<RemoteHost>{{1, 2}}, options);
  }
  void announce(const std::string& endpoint) { rank(0).set_endpoint(1, endpoint); }

  // The union of all ranks' results; 1 << 62 while one is pending.
  std::uint64_t result(Ticket ticket) const {
    std::uint64_t failed = 0;
    return scheduler_->result(ticket, &failed) == TicketResult::kDone ? failed : std::uint64_t{1} << 62;
  }

  const std::string keep_for_;
  std::shared_ptr<HostRegion> scheduler_;
  std::shared_ptr<HostRegion> ranks_[kRanks];
};

TEST_F(HostsTest, the_scheduler_receives_layouts_and_results_of_ranks_on_another_host) {
  const auto links = this->links();
  EXPECT_TRUE(scheduler_->is_cut_off());
  EXPECT_THAT(links->wait_until_connected(Nanos(0)).message(), HasSubstr("the host of ranks 1 to 2"));
  const auto agent = this->agent();
  announce(agent->endpoint());
  ASSERT_TRUE(links->wait_until_connected(kPatience).is_ok());
  EXPECT_FALSE(scheduler_->is_cut_off());
  EXPECT_THAT(links->lost_hosts(), IsEmpty());
  ASSERT_TRUE(scheduler_->wait_for_ranks(Nanos(0)).is_ok());
  EXPECT_EQ(scheduler_->geometry(2).fingerprint, some_geometry(2).fingerprint);
  EXPECT_EQ(scheduler_->geometry(2).shard_bytes, some_geometry(2).shard_bytes);
  rank(0).report(0, 7, 0b001);
  rank(1).report(1, 7, 0b010);
  EXPECT_NE(result(7), 0b011u) << "rank 2 has not reported";
  rank(2).report(2, 7, 0b100);
  EXPECT_TRUE(holds_soon([&] { return result(7) == 0b111; }));
}

TEST_F(HostsTest, reports_from_before_the_connection_arrive_before_the_host_counts_as_connected) {
  for (Ticket ticket = 1; ticket <= 5000; ++ticket) {
    for (std::uint32_t number = 0; number < kRanks; ++number) rank(number).report(number, ticket, ticket);
  }
  const auto agent = this->agent();
  announce(agent->endpoint());
  const auto links = this->links();
  ASSERT_TRUE(links->wait_until_connected(kPatience).is_ok());
  for (Ticket ticket = 1; ticket <= 5000; ++ticket) ASSERT_EQ(result(ticket), ticket);
}

TEST_F(HostsTest, many_reports_at_once_all_arrive) {
  const auto agent = this->agent();
  announce(agent->endpoint());
  const auto links = this->links();
  ASSERT_TRUE(links->wait_until_connected(kPatience).is_ok());
  const Ticket last = HostRegion::kTicketSlots;
  for (Ticket ticket = 1; ticket <= last; ++ticket) {
    for (std::uint32_t number = 0; number < kRanks; ++number) rank(number).report(number, ticket, ticket);
  }
  EXPECT_TRUE(holds_soon([&] {
    for (Ticket ticket = 1; ticket <= last; ++ticket) {
      if (result(ticket) != ticket) return false;
    }
    return true;
  }));
}

TEST_F(HostsTest, a_host_that_shuts_down_cuts_the_region_off) {
  auto agent = this->agent();
  announce(agent->endpoint());
  const auto links = this->links();
  ASSERT_TRUE(links->wait_until_connected(kPatience).is_ok());
  rank(1).report(1, 9, 0);
  rank(2).report(2, 9, 0);
  rank(0).report(0, 9, 0);
  agent->close();
  EXPECT_TRUE(holds_soon([&] { return scheduler_->is_cut_off(); }));
  EXPECT_EQ(result(9), 0u) << "the last reports were lost";
  EXPECT_TRUE(holds_soon([&] { return links->lost_hosts() == std::vector<std::uint32_t>{1}; }));
  EXPECT_THAT(links->take_events(), ElementsAre(HasSubstr("127.0.0.1: it has shut down; all lookups")));
}

TEST_F(HostsTest, a_lost_connection_is_replaced_and_reports_from_meanwhile_arrive) {
  const auto agent = this->agent();
  announce(agent->endpoint());
  const auto links = this->links();
  ASSERT_TRUE(links->wait_until_connected(kPatience).is_ok());
  // Another connection with the secret replaces that of the links.
  const auto endpoint = parse_endpoint(agent->endpoint());
  const auto peer = Peer::of(*endpoint);
  std::uint32_t version = 0;
  const auto host = parse_greeting(peer->read(kGreetingBytes), &version);
  ASSERT_TRUE(host);
  peer->send(make_answer(endpoint->secret, *host, HostNonce{}));
  for (std::uint32_t number = 0; number < kRanks; ++number) rank(number).report(number, 3, 0b10);
  std::vector<std::string> events;
  EXPECT_TRUE(holds_soon([&] {
    for (const std::string& event : links->take_events()) events.push_back(event);
    return events.size() >= 2;
  }));
  EXPECT_THAT(events.at(0), HasSubstr("lost the connection to the host of ranks 1 to 2 at 127.0.0.1"));
  EXPECT_THAT(events.at(1), HasSubstr("is connected again"));
  EXPECT_TRUE(holds_soon([&] { return result(3) == 0b10; }));
  EXPECT_TRUE(holds_soon([&] { return !scheduler_->is_cut_off(); }));
}

TEST_F(HostsTest, an_agent_ends_the_connection_of_a_silent_scheduler) {
  const auto agent = this->agent(kPatience, std::chrono::milliseconds(1));
  const auto endpoint = parse_endpoint(agent->endpoint());
  const auto peer = Peer::of(*endpoint);
  std::uint32_t version = 0;
  const auto host = parse_greeting(peer->read(kGreetingBytes), &version);
  ASSERT_TRUE(host);
  peer->send(make_answer(endpoint->secret, *host, HostNonce{}));
  // It has sent its layouts, or not; it sends no endless stream of messages.
  EXPECT_LT(peer->read(1 << 20).size(), std::size_t{1} << 20);
  EXPECT_EQ(agent->refused_connections(), 0u);
}

TEST_F(HostsTest, an_agent_closes_a_connection_without_the_secret) {
  const auto agent = this->agent();
  auto endpoint = parse_endpoint(agent->endpoint());
  const auto peer = Peer::of(*endpoint);
  std::uint32_t version = 0;
  const auto host = parse_greeting(peer->read(kGreetingBytes), &version);
  ASSERT_TRUE(host);
  peer->send(make_answer(HostSecret{}, *host, HostNonce{}));
  EXPECT_TRUE(peer->has_ended());
  EXPECT_EQ(agent->refused_connections(), 1u);
}

TEST_F(HostsTest, an_answer_is_not_accepted_on_a_second_connection) {
  const auto agent = this->agent();
  const auto endpoint = parse_endpoint(agent->endpoint());
  const auto first = Peer::of(*endpoint), second = Peer::of(*endpoint);
  std::uint32_t version = 0;
  const auto host = parse_greeting(first->read(kGreetingBytes), &version);
  const auto other = parse_greeting(second->read(kGreetingBytes), &version);
  ASSERT_TRUE(host && other);
  EXPECT_NE(*host, *other);
  second->send(make_answer(endpoint->secret, *host, HostNonce{}));
  EXPECT_TRUE(second->has_ended());
}

TEST_F(HostsTest, silent_strangers_are_dropped_and_do_not_keep_the_scheduler_out) {
  const auto agent = this->agent();
  const auto endpoint = parse_endpoint(agent->endpoint());
  std::vector<std::unique_ptr<Peer>> strangers;
  for (std::size_t i = 0; i < HostAgent::kMostStrangers + 2; ++i) strangers.push_back(Peer::of(*endpoint));
  EXPECT_EQ(strangers.front()->read(kGreetingBytes).size(), kGreetingBytes);
  EXPECT_TRUE(strangers.front()->has_ended()) << "there were too many";
  announce(agent->endpoint());
  const auto links = this->links();
  EXPECT_TRUE(links->wait_until_connected(kPatience).is_ok());
}

TEST_F(HostsTest, a_connection_without_a_greeting_is_closed_in_time) {
  const auto agent = this->agent(std::chrono::milliseconds(1));
  const auto peer = Peer::of(*parse_endpoint(agent->endpoint()));
  EXPECT_EQ(peer->read(kGreetingBytes).size(), kGreetingBytes);
  EXPECT_TRUE(peer->has_ended());
}

TEST_F(HostsTest, a_scheduler_that_sends_unauthenticated_messages_is_disconnected) {
  const auto agent = this->agent();
  const auto endpoint = parse_endpoint(agent->endpoint());
  const auto peer = Peer::of(*endpoint);
  std::uint32_t version = 0;
  const auto host = parse_greeting(peer->read(kGreetingBytes), &version);
  Bytes answer = make_answer(endpoint->secret, *host, HostNonce{});
  peer->send(answer);
  Bytes forged;
  FrameWriter(KeyedHash::Hash{}).append(FrameType::kCancel, Bytes(11), &forged);
  peer->send(forged);
  while (!peer->read(1).empty()) {  // what was on its way
  }
  EXPECT_EQ(agent->refused_connections(), 0u);
}

TEST_F(HostsTest, an_agent_needs_an_address_of_its_host) {
  HostAgent::Options made;
  for (const char* address : {"localhost", "203.0.113.1"}) {
    made.address = address;
    EXPECT_THAT(message_of<ResourceError>([&] { HostAgent(ranks_[1], made); }), HasSubstr("VLLM_HOST_IP"));
  }
}

TEST_F(HostsTest,
       the_wait_for_tiers_ends_with_the_first_host_that_cannot_open_them_or_names_all_missing_ones) {
  HostLinks links(scheduler_, {{1, 1}, {2, 1}}, link_options());
  const std::vector<std::vector<EpochChoice>> epochs(2, std::vector<EpochChoice>(1));
  const auto message = [&](Nanos timeout) {
    return message_of<ResourceError>([&] { (void)links.open_tiers("", epochs, timeout); });
  };
  EXPECT_THAT(message(Nanos(1)), AllOf(HasSubstr("the tiers of the host of rank 1 cannot be used"),
                                       HasSubstr("; the tiers of the host of rank 2 cannot be used")));
  rank(0).set_endpoint(2, "no address");
  const SteadyClock clock;
  const Nanos before = clock.now();
  EXPECT_EQ(message(std::chrono::seconds(20)),
            "the tiers of the host of rank 2 cannot be used: rank 0 gave an invalid address");
  EXPECT_LT(clock.now() - before, std::chrono::seconds(20)) << "it waited for the other host first";
}

TEST_F(HostsTest, hosts_must_have_the_ranks_that_are_not_here) {
  const auto make = [&](std::vector<RemoteHost> hosts) {
    return message_of<InvalidArgument>([&] { HostLinks(scheduler_, std::move(hosts), link_options()); });
  };
  EXPECT_THAT(make({}), HasSubstr("hosts for 1 ranks"));
  EXPECT_THAT(make({{1, 1}}), HasSubstr("hosts for 2 ranks"));
  EXPECT_THAT(make({{2, 1}}), HasSubstr("1 ranks from rank 2"));
  EXPECT_THAT(make({{1, 3}}), HasSubstr("3 ranks from rank 1"));
  EXPECT_THAT(make({{1, 0}}), HasSubstr("0 ranks"));
}

// The test plays the other host.
class FakeHostTest : public HostsTest {
 protected:
  explicit FakeHostTest(std::string keep_for = {})
      : HostsTest(std::move(keep_for)), listener_(testing::loopback_listener(&port_)) {
    announce(to_text({"127.0.0.1", port_, secret_}));
  }
  ~FakeHostTest() override { ::close(listener_); }

  std::unique_ptr<Peer> accept() const {
    return std::make_unique<Peer>(::accept(listener_, nullptr, nullptr));
  }
  // Accepts a connection of the links and completes the handshake.
  std::unique_ptr<Peer> handshake() {
    auto peer = accept();
    const HostNonce nonce = random_bytes();
    peer->send(make_greeting(nonce));
    const auto scheduler = check_answer(secret_, nonce, peer->read(kAnswerBytes));
    EXPECT_TRUE(scheduler) << "the scheduler did not prove that it has the secret";
    if (scheduler) writer_ = std::make_unique<FrameWriter>(session_key(secret_, nonce, *scheduler));
    if (scheduler) reader_ = std::make_unique<FrameReader>(command_key(secret_, nonce, *scheduler));
    return peer;
  }
  Bytes frame(FrameType type, ByteSpan body = {}) {
    Bytes bytes;
    writer_->append(type, body, &bytes);
    return bytes;
  }
  HostJoin join() const {
    return {here().bytes, scheduler_->area_bytes(), kRanks, kRanks, 1, 2, kVersion, !keep_for_.empty(), {}};
  }
  void send_geometry(const Peer& peer, std::uint32_t rank) {
    peer.send(frame(FrameType::kGeometry, encode(GeometryFrame{rank, some_geometry(rank)})));
  }
  // Sends all frames up to kReady.
  void send_all(const Peer& peer) {
    peer.send(frame(FrameType::kJoin, encode(join())));
    send_geometry(peer, 1);
    send_geometry(peer, 2);
    peer.send(frame(FrameType::kReady));
  }
  // Waits until the links are not connected for this reason.
  static ::testing::AssertionResult fails_with(const HostLinks& links, StatusKind kind, const char* text) {
    Status status;
    if (holds_soon([&] {
          status = links.wait_until_connected(Nanos(0));
          return status.kind() == kind && has(status.message(), text);
        }))
      return ::testing::AssertionSuccess();
    return ::testing::AssertionFailure() << status.to_string();
  }
  // Connects several times, and returns the pauses after the losses of all connections but the last.
  std::vector<std::string> pauses_between_connections(const HostLinks::Options& options, int connections) {
    const auto links = this->links(options);
    for (int i = 0; i < connections; ++i) {
      const auto peer = handshake();
      send_all(*peer);
      EXPECT_TRUE(links->wait_until_connected(kPatience).is_ok());
    }
    std::vector<std::string> pauses;
    for (const std::string& event : links->take_events()) {
      const std::string before = "next attempt in ";
      const std::size_t at = event.find(before);
      if (at != std::string::npos) pauses.push_back(event.substr(at + before.size()));
    }
    if (pauses.size() == static_cast<std::size_t>(connections))
      pauses.pop_back();  // the last may be lost, too
    return pauses;
  }
  // Connects, sends this frame after the join, and expects that the host is refused for this reason.
  void expect_refused(FrameType type, ByteSpan body, const char* text) {
    const auto links = this->links();
    const auto peer = handshake();
    peer->send(frame(FrameType::kJoin, encode(join())));
    peer->send(frame(type, body));
    EXPECT_TRUE(fails_with(*links, StatusKind::kUnavailable, text));
    EXPECT_TRUE(peer->has_ended());
    EXPECT_TRUE(scheduler_->is_cut_off());
  }

  HostSecret secret_ = {1, 2, 3};
  std::uint16_t port_ = 0;
  const int listener_;
  std::unique_ptr<FrameWriter> writer_;
  std::unique_ptr<FrameReader> reader_;
};

TEST_F(FakeHostTest, a_host_is_connected_when_it_has_sent_the_layout_of_all_its_ranks) {
  const auto links = this->links();
  const auto peer = handshake();
  send_all(*peer);
  EXPECT_TRUE(links->wait_until_connected(kPatience).is_ok());
}

TEST_F(FakeHostTest, malformed_messages_about_tiers_are_refused) {
  for (const FrameType type : {FrameType::kResults, FrameType::kOps}) {
    const auto links = this->links();
    const auto peer = handshake();
    send_all(*peer);
    peer->send(frame(FrameType::kOpsEnded));
    peer->send(frame(type, Bytes(2)));
    EXPECT_TRUE(fails_with(*links, StatusKind::kUnavailable, "a message about its tiers is malformed"));
  }
}

TEST_F(FakeHostTest, a_host_that_sends_more_than_an_idle_engine_keeps_is_connected_again) {
  const auto links = this->links();
  {
    const auto peer = handshake();
    send_all(*peer);
    peer->send(frame(FrameType::kOpsEnded));
    ASSERT_TRUE(links->wait_until_connected(kPatience).is_ok());
    std::thread opener([&] {
      EXPECT_THAT(
          // The order waits for another connection, and this host makes none before the time is over.
          message_of<ResourceError>(
              [&] { (void)links->open_tiers("", {{EpochChoice{}}}, std::chrono::seconds(5)); }),
          HasSubstr("it sent more than an idle engine can keep"));
    });
    peer->read(45);  // the request to open
    TierRemovals removals{0, 0, {}};
    for (std::size_t i = 0; i < kMostKeys; ++i) {
      const std::string key(32, static_cast<char>(i));
      removals.removals.push_back(
          {ChunkKey::unchecked(key.data(), key.size()), TierRemoval::Reason::kEvicted});
    }
    const Bytes body = encode(removals);
    for (std::size_t sent = 0; sent <= TierChannel::kMostWaiting; sent += body.size())
      peer->send(frame(FrameType::kRemovals, body));
    EXPECT_LT(peer->read(1 << 20).size(), std::size_t{1} << 20) << "the connection goes on";
    opener.join();
  }
  const auto peer = handshake();
  send_all(*peer);
  EXPECT_TRUE(links->wait_until_connected(kPatience).is_ok());
}

TEST_F(FakeHostTest, a_host_is_not_connected_before_the_layout_of_its_last_rank) {
  const auto links = this->links();
  const auto peer = handshake();
  peer->send(frame(FrameType::kJoin, encode(join())));
  send_geometry(*peer, 1);
  peer->send(frame(FrameType::kReady));
  EXPECT_TRUE(fails_with(*links, StatusKind::kUnavailable, "did not send the layout of rank 2"));
}

TEST_F(FakeHostTest, a_host_whose_ranks_have_not_all_started_is_named) {
  const auto links = this->links();
  const auto peer = handshake();
  peer->send(frame(FrameType::kAlive));
  EXPECT_TRUE(
      fails_with(*links, StatusKind::kTimeout, "it is reachable, but not all of its ranks have started"));
}

TEST_F(FakeHostTest, another_program_at_the_address_is_named) {
  const auto links = this->links();
  accept()->send(Bytes(kGreetingBytes, 'x'));
  EXPECT_TRUE(fails_with(*links, StatusKind::kTimeout, "another program answers"));
}

TEST_F(FakeHostTest, another_protocol_is_refused_with_both_versions) {
  const auto links = this->links();
  Bytes greeting = make_greeting({});
  greeting[8] = kHostProtocol + 1;
  accept()->send(greeting);
  const std::string both =
      fmt::format("protocol {} and this host protocol {}", kHostProtocol + 1, kHostProtocol);
  EXPECT_TRUE(fails_with(*links, StatusKind::kUnavailable, both.c_str()));
}

TEST_F(FakeHostTest, a_host_without_the_secret_is_rejected) {
  const auto links = this->links();
  const auto peer = accept();
  const HostNonce nonce{};
  peer->send(make_greeting(nonce));
  peer->read(kAnswerBytes);
  writer_ = std::make_unique<FrameWriter>(session_key(HostSecret{}, nonce, HostNonce{}));
  send_all(*peer);
  EXPECT_TRUE(peer->has_ended());
  const auto next_attempt = accept();  // which does not hide the reason
  EXPECT_TRUE(fails_with(*links, StatusKind::kTimeout, "authentication of a message failed"));
  EXPECT_FALSE(scheduler_->is_published(1));
}

TEST_F(FakeHostTest, a_changed_message_ends_the_connection_and_the_host_is_tried_again) {
  const auto links = this->links();
  {
    const auto peer = handshake();
    send_all(*peer);
    ASSERT_TRUE(links->wait_until_connected(kPatience).is_ok());
    const std::vector<RankReport> reports = {{1, 5, 0}, {2, 5, 0}};
    Bytes changed = frame(FrameType::kReports, encode(reports));
    changed[10] ^= 1;
    peer->send(changed);
    EXPECT_TRUE(peer->has_ended());
    EXPECT_TRUE(scheduler_->is_cut_off());
  }
  rank(0).report(0, 5, 0);
  EXPECT_NE(result(5), 0u) << "a changed report was believed";
  const auto peer = handshake();
  send_all(*peer);
  EXPECT_TRUE(links->wait_until_connected(kPatience).is_ok());
}

TEST_F(FakeHostTest, a_message_longer_than_possible_ends_the_connection) {
  const auto links = this->links();
  const auto peer = handshake();
  peer->send(Bytes{0xFF, 0xFF, 0xFF, 0xFF});
  EXPECT_TRUE(peer->has_ended());
}

TEST_F(FakeHostTest, a_host_that_falls_silent_is_lost) {
  HostLinks::Options made = link_options();
  made.silence = std::chrono::milliseconds(1);
  const auto links = this->links(made);
  const auto peer = handshake();
  EXPECT_TRUE(peer->has_ended());
  EXPECT_TRUE(fails_with(*links, StatusKind::kTimeout, "nothing arrived for 0.001 s"));
}

TEST_F(FakeHostTest, a_silent_host_is_lost_before_a_lookup_times_out) {
  const Nanos silence = HostLinks::Options{}.silence;
  EXPECT_LT(silence, CacheOptions{}.lookup_timeout);
  EXPECT_GE(silence, 3 * HostAgent::Options{}.alive_interval) << "a busy host would count as lost";
  EXPECT_GE(HostAgent::Options{}.silence, 3 * HostLinks::Options{}.alive_interval)
      << "a busy scheduler would count as lost";
}

TEST_F(FakeHostTest, a_scheduler_without_orders_sends_keep_alive_messages) {
  HostLinks::Options made = link_options();
  made.alive_interval = std::chrono::milliseconds(1);
  const auto links = this->links(made);
  const auto peer = handshake();
  const auto next_type = [&] {
    const Bytes bytes = peer->read(37);  // length 4, type 1, tag 32
    return bytes.size() == 37 ? static_cast<FrameType>(bytes[4]) : FrameType::kLeaving;
  };
  EXPECT_EQ(next_type(), FrameType::kSchedulerAlive) << "before the ranks have started";
  send_all(*peer);
  ASSERT_TRUE(links->wait_until_connected(kPatience).is_ok());
  for (int i = 0; i < 3; ++i) EXPECT_EQ(next_type(), FrameType::kSchedulerAlive);
}

TEST_F(FakeHostTest, a_host_that_accepts_and_does_not_greet_is_named) {
  HostLinks::Options made = link_options();
  made.connect_timeout = std::chrono::milliseconds(1);
  const auto links = this->links(made);
  EXPECT_TRUE(fails_with(*links, StatusKind::kTimeout, "no greeting arrived"));
}

TEST_F(FakeHostTest, a_port_where_no_program_listens_is_named) {
  ::shutdown(listener_, SHUT_RDWR);
  const auto links = this->links();
  EXPECT_TRUE(fails_with(*links, StatusKind::kTimeout, "at 127.0.0.1: cannot connect: Connection refused"));
}

TEST_F(FakeHostTest, another_package_version_is_refused_with_both_versions) {
  const auto links = this->links();
  const auto peer = handshake();
  HostJoin other = join();
  other.version = "9.9";
  peer->send(frame(FrameType::kJoin, encode(other)));
  EXPECT_TRUE(fails_with(*links, StatusKind::kUnavailable, "has vllm-kv-offload 9.9 and this host 1.2.3"));
}

TEST_F(FakeHostTest, other_sizes_are_refused_with_both_values) {
  const auto links = this->links();
  const auto peer = handshake();
  HostJoin other = join();
  other.bytes = 12345678;
  peer->send(frame(FrameType::kJoin, encode(other)));
  EXPECT_TRUE(fails_with(*links, StatusKind::kUnavailable,
                         "its cpu_bytes_to_use is 12345678 and that of this host is 6291456"));
}

TEST_F(FakeHostTest, another_number_of_areas_is_refused) {
  const auto links = this->links();
  const auto peer = handshake();
  HostJoin other = join();
  other.num_areas = 1;
  peer->send(frame(FrameType::kJoin, encode(other)));
  EXPECT_TRUE(
      fails_with(*links, StatusKind::kUnavailable,
                 "it reports 1 areas of host memory for the engine's 3 ranks and this host 3, so the hosts "
                 "disagree on the ranks that hold the same KV cache (MLA): start the same model"));
}

TEST_F(FakeHostTest, other_ranks_than_expected_are_refused) {
  const auto links = this->links();
  const auto peer = handshake();
  HostJoin other = join();
  other.first_rank = 2;
  peer->send(frame(FrameType::kJoin, encode(other)));
  EXPECT_TRUE(fails_with(*links, StatusKind::kUnavailable, "it has 2 ranks from rank 2 on"));
}

TEST_F(FakeHostTest, a_report_before_the_join_is_refused) {
  const auto links = this->links();
  const auto peer = handshake();
  peer->send(frame(FrameType::kReports, encode(std::vector<RankReport>{{1, 5, 0}})));
  EXPECT_TRUE(fails_with(*links, StatusKind::kUnavailable, "before it joined"));
}

TEST_F(FakeHostTest, a_report_for_a_rank_of_another_host_is_refused) {
  const std::vector<RankReport> reports = {{1, 5, 0}, {2, 5, 0}, {0, 5, 0}};
  expect_refused(FrameType::kReports, encode(reports),
                 "it sent the result of job 5 of rank 0, which it does not run");
  EXPECT_NE(result(5), 0u) << "a part of the message was believed";
}

TEST_F(FakeHostTest, a_report_without_a_job_is_refused) {
  expect_refused(FrameType::kReports, encode(std::vector<RankReport>{{1, kNoTicket, 0}}), "job 0 of rank 1");
}

TEST_F(FakeHostTest, malformed_reports_are_refused) {
  expect_refused(FrameType::kReports, Bytes(19), "results of jobs is malformed");
}

TEST_F(FakeHostTest, the_layout_of_a_rank_of_another_host_is_refused) {
  expect_refused(FrameType::kGeometry, encode(GeometryFrame{0, some_geometry(0)}), "malformed");
  EXPECT_EQ(scheduler_->geometry(0).fingerprint, some_geometry(0).fingerprint);
}

TEST_F(FakeHostTest, a_layout_with_too_many_groups_is_refused) {
  const RankGeometry geometry{std::vector<std::uint64_t>(kMostGroups + 1, 1), "layout"};
  expect_refused(FrameType::kGeometry, encode(GeometryFrame{1, geometry}), "KV cache groups were given");
}

TEST_F(FakeHostTest, a_layout_that_changes_is_refused) {
  const auto links = this->links();
  {
    const auto peer = handshake();
    send_all(*peer);
    ASSERT_TRUE(links->wait_until_connected(kPatience).is_ok());
  }
  const auto peer = handshake();
  peer->send(frame(FrameType::kJoin, encode(join())));
  peer->send(frame(FrameType::kGeometry, encode(GeometryFrame{1, {{1, 2}, "other"}})));
  EXPECT_TRUE(fails_with(*links, StatusKind::kUnavailable, "and now has chunks of 1, 2 bytes"));
  EXPECT_THAT(links->take_events(), ::testing::Contains(HasSubstr("no longer fits")))
      << "nobody waits for the connection any more, so a log line must say it";
}

// The test plays a host whose memory outlives the engine.
class FakeKeptHostTest : public FakeHostTest {
 protected:
  FakeKeptHostTest() : FakeHostTest("model") {}

  // Connects, and orders the host to keep its memory on another thread.
  std::unique_ptr<Peer> connect() {
    links_ = links();
    auto peer = handshake();
    send_all(*peer);
    EXPECT_TRUE(links_->wait_until_connected(kPatience).is_ok());
    keeper_ = std::thread([this] {
      try {
        memory_ = links_->keep_memory(kPatience);
        has_returned_ = true;
      } catch (const ResourceError& error) {
        problem_ = error.what();
      }
    });
    return peer;
  }
  RegionSet read_order(const Peer& peer) const {
    Bytes bytes = peer.read(4);
    const Bytes rest = peer.read(1 + sizeof(RegionSet) + sizeof(KeyedHash::Hash));
    bytes.insert(bytes.end(), rest.begin(), rest.end());
    FrameType type{};
    ByteSpan body;
    std::size_t used = 0;
    EXPECT_EQ(reader_->next(bytes, &type, &body, &used), FrameReader::Result::kFrame);
    EXPECT_EQ(type, FrameType::kKeepMemory);
    return decode_keep_memory(body).value_or(RegionSet{});
  }
  ~FakeKeptHostTest() override {
    if (keeper_.joinable()) keeper_.join();
  }

  std::unique_ptr<HostLinks> links_;
  std::thread keeper_;
  std::atomic<bool> has_returned_{false};
  KeptMemory memory_;
  std::string problem_;
};

TEST_F(FakeKeptHostTest, an_order_to_keep_memory_is_repeated_on_the_next_connection) {
  RegionSet order;
  { order = read_order(*connect()); }
  EXPECT_TRUE(is_set(order));
  EXPECT_EQ(scheduler_->kept().set, order);
  const auto peer = handshake();
  send_all(*peer);
  EXPECT_EQ(read_order(*peer), order);
  EXPECT_FALSE(has_returned_) << "the host has not confirmed it";
  peer->send(frame(FrameType::kMemoryKept, encode(MemoryKept{order, true})));
  keeper_.join();
  EXPECT_TRUE(has_returned_);
  EXPECT_THAT(memory_.ending, IsEmpty());
}

TEST_F(FakeKeptHostTest, a_host_whose_memory_ends_with_the_engine_is_named) {
  const auto peer = connect();
  peer->send(frame(FrameType::kMemoryKept, encode(MemoryKept{read_order(*peer), false})));
  keeper_.join();
  EXPECT_THAT(memory_.ending, ElementsAre("the host of ranks 1 to 2 at 127.0.0.1"));
}

TEST_F(FakeKeptHostTest, an_answer_that_fits_no_order_is_refused) {
  RegionSet other;
  {
    const auto peer = connect();
    other = read_order(*peer);
    other[1] ^= 1;
    peer->send(frame(FrameType::kMemoryKept, encode(MemoryKept{other, true})));
    keeper_.join();
    EXPECT_THAT(problem_, HasSubstr("a message about its host memory is malformed"));
    links_.reset();
  }
  const char* const text = "a message about its host memory is malformed";
  expect_refused(FrameType::kMemoryKept, encode(MemoryKept{other, true}), text);
  expect_refused(FrameType::kMemoryKept, Bytes(16, 1), text);
}

TEST_F(FakeKeptHostTest, a_host_that_does_not_confirm_is_named) {
  const auto links = this->links();
  const auto peer = handshake();
  send_all(*peer);
  ASSERT_TRUE(links->wait_until_connected(kPatience).is_ok());
  EXPECT_EQ(message_of<ResourceError>([&] { (void)links->keep_memory(Nanos(1)); }),
            "these hosts have not confirmed that they keep their host memory: the host of ranks 1 to 2 at "
            "127.0.0.1");
}

TEST_F(FakeKeptHostTest, an_exception_of_the_caller_ends_the_waits_for_a_host) {
  HostLinks::Options made = link_options();
  int calls = 0;
  made.on_wait = [&calls] {
    if (++calls % 2 == 0) throw std::domain_error("Ctrl-C");
  };
  HostLinks links(scheduler_, {{1, 2}}, made);
  const auto peer = handshake();
  send_all(*peer);
  ASSERT_TRUE(links.wait_until_connected(kPatience).is_ok());
  EXPECT_THROW((void)links.keep_memory(std::chrono::seconds(20)), std::domain_error);
  EXPECT_EQ(calls, 2);
  EXPECT_THROW((void)links.open_tiers("", {{}}, std::chrono::seconds(20)), std::domain_error);
  EXPECT_EQ(calls, 4);
}

TEST_F(FakeKeptHostTest, another_setting_is_refused_with_both_values) {
  const auto links = this->links();
  const auto peer = handshake();
  HostJoin other = join();
  other.keeps_memory = false;
  peer->send(frame(FrameType::kJoin, encode(other)));
  EXPECT_TRUE(fails_with(*links, StatusKind::kUnavailable,
                         "its keep_host_memory is false and that of this host is true"));
}

TEST_F(FakeHostTest, the_pause_grows_while_connections_do_not_last) {
  HostLinks::Options made = link_options();
  made.last_pause = std::chrono::milliseconds(4);
  made.min_lifetime = std::chrono::hours(24);
  EXPECT_THAT(pauses_between_connections(made, 5), ElementsAre("0.001 s", "0.002 s", "0.004 s", "0.004 s"));
}

TEST_F(FakeHostTest, the_first_pause_follows_a_connection_that_lasted) {
  HostLinks::Options made = link_options();
  made.last_pause = std::chrono::milliseconds(4);
  made.min_lifetime = Nanos(0);
  EXPECT_THAT(pauses_between_connections(made, 4), ElementsAre("0.001 s", "0.001 s", "0.001 s"));
}

TEST_F(FakeHostTest, a_stranger_at_the_address_of_a_lost_host_does_not_end_the_attempts) {
  const auto links = this->links();
  {
    const auto peer = handshake();
    send_all(*peer);
    ASSERT_TRUE(links->wait_until_connected(kPatience).is_ok());
  }
  Bytes greeting = make_greeting({});
  greeting[8] = kHostProtocol + 1;  // the protocol, which nothing proves
  accept()->send(greeting);
  const auto peer = handshake();
  send_all(*peer);
  EXPECT_TRUE(links->wait_until_connected(kPatience).is_ok());
}

}  // namespace
}  // namespace kv_offload
