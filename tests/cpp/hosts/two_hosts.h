// SPDX-License-Identifier: Apache-2.0
// An engine on two hosts, both in this process: each host has one area, a region and a directory of its own,
// and they talk over the loopback interface. A derived class may open tiers of another kind, or give each
// host several ranks that share its area.
#pragma once

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "backends/fs/faulty_file_ops.h"
#include "backends/fs/fixture.h"
#include "hosts/host_agent.h"
#include "hosts/host_links.h"
#include "hosts/open_tiers.h"
#include "hosts/sockets.h"
#include "memory/row_shards.h"
#include "memory/shm_fixture.h"
#include "tier/loopback_server.h"

namespace kv_offload::testing {

// A connection to the agent of the other host that proves that it has the secret. It replaces that of the
// scheduler.
class OtherScheduler {
 public:
  explicit OtherScheduler(const HostEndpoint& endpoint) {
    int error = 0;
    socket_ = start_connect(endpoint.address, endpoint.port, &error);
    Bytes greeting;
    EXPECT_TRUE(holds_soon([&] {
      return receive(socket_, kGreetingBytes - greeting.size(), &greeting, &error) &&
             greeting.size() == kGreetingBytes;
    }));
    std::uint32_t version = 0;
    const auto host = parse_greeting(greeting, &version);
    EXPECT_TRUE(host);
    Bytes answer = make_answer(endpoint.secret, *host, HostNonce{});
    EXPECT_TRUE(send_some(socket_, &answer));
    EXPECT_TRUE(answer.empty());
    writer_ = std::make_unique<FrameWriter>(command_key(endpoint.secret, *host, HostNonce{}));
    reader_ = std::make_unique<FrameReader>(session_key(endpoint.secret, *host, HostNonce{}));
  }
  // Waits for a frame of this type.
  bool reads(FrameType wanted) {
    return holds_soon([&] {
      int error = 0;
      (void)receive(socket_, 4096, &arrived_, &error);
      FrameType type{};
      ByteSpan body;
      std::size_t used = 0;
      if (reader_->next(arrived_, &type, &body, &used) != FrameReader::Result::kFrame) return false;
      arrived_.erase(arrived_.begin(), arrived_.begin() + static_cast<std::ptrdiff_t>(used));
      seen_.push_back(type);
      return type == wanted;
    });
  }
  bool has_seen(FrameType type) const { return std::find(seen_.begin(), seen_.end(), type) != seen_.end(); }
  void send(FrameType type, ByteSpan body) {
    Bytes bytes;
    writer_->append(type, body, &bytes);
    EXPECT_TRUE(send_some(socket_, &bytes));
  }
  bool is_closed_soon() {
    return holds_soon([&] {
      int error = 0;
      Bytes ignored;
      return !receive(socket_, 4096, &ignored, &error);
    });
  }

 private:
  Descriptor socket_;
  std::unique_ptr<FrameWriter> writer_;
  std::unique_ptr<FrameReader> reader_;
  Bytes arrived_;
  std::vector<FrameType> seen_;
};

class TwoHosts : public ShmTest {
 protected:
  static constexpr std::uint32_t kHosts = 2;
  static constexpr std::uint64_t kShardBytes = 8192;
  static constexpr Nanos kPatience = std::chrono::minutes(2);

  TwoHosts() {
    remote_.reset_timeout = remote_.close_wait = kPatience;
    for (std::uint32_t host = 0; host < kHosts; ++host) {
      options_[host] = options_for(root_[host].path());
      options_[host].file_ops = &ops_[host];
    }
  }
  ~TwoHosts() override { stop(); }

  RegionOptions region_options(std::uint32_t host) const {
    RegionOptions made = options(4 * kMiB, kHosts * ranks_each_, host == 0 ? "engine" : "engine host 1");
    made.num_areas = kHosts;
    made.first_rank = host * ranks_each_;
    made.local_ranks = ranks_each_;
    return made;
  }

  // Starts the engine: its regions, the agent of host 1, the connection, and the tiers of both hosts.
  void start() {
    for (std::uint32_t host = 0; host < kHosts; ++host) {
      for (std::uint32_t i = ranks_each_; i-- > 0;) {
        region_[host] = HostRegion::attach_worker(region_options(host), host * ranks_each_ + i,
                                                  {{kShardBytes, host * kPageBytes}, "layout"});
      }
    }
    scheduler_ = HostRegion::attach_scheduler(region_options(0));
    HostAgent::Options agent;
    agent.address = "127.0.0.1";
    agent.version = "1.2.3";
    agent.silence = kPatience;
    agent_ = std::make_unique<HostAgent>(region_[1], agent);
    opener_ = std::thread([this, &tiers = agent_->tiers()] { answer_requests(tiers); });
    region_[0]->set_endpoint(ranks_each_, agent_->endpoint());
    HostLinks::Options made;
    made.version = "1.2.3";
    made.silence = made.alive_interval = made.connect_timeout = kPatience;
    made.first_pause = made.last_pause = std::chrono::milliseconds(1);
    links_ =
        std::make_unique<HostLinks>(scheduler_, std::vector<RemoteHost>{{ranks_each_, ranks_each_}}, made);
    ASSERT_TRUE(links_->wait_until_connected(kPatience).is_ok());
    Tiers opened = open_on_all_hosts(*links_, *scheduler_, 1,
                                     [&](const std::vector<EpochChoice>& epochs) {
                                       Tiers own;
                                       own.push_back(open_part(0, epochs[0]));
                                       return own;
                                     },
                                     "settings", {kPatience, remote_, {Nanos(0), nullptr}});
    tier_ = std::move(opened[0]);
  }
  void stop() {
    for (FaultyFileOps& ops : ops_) {
      ops.release();
      ops.clear();
    }
    tier_.reset();
    links_.reset();
    if (agent_ != nullptr) agent_->close();
    if (opener_.joinable()) opener_.join();
    // A closed tier leaves a thread that does not end within its `close_wait`.
    for (FaultyFileOps& ops : ops_) ops.wait_for_all_closed();
    agent_.reset();
    scheduler_.reset();
    for (auto& region : region_) region.reset();
  }
  void restart() {
    stop();
    start();
  }

  // ---- chunks. The bytes of a part depend on the number, the host and `weights`.
  std::byte byte_of(std::uint32_t number, std::uint32_t host) const {
    return static_cast<std::byte>(number * 7 + host * 101 + weights * 31 + 1);
  }
  std::span<std::byte> part(std::uint32_t number, std::uint32_t host) const {
    return region_[host]->shard(host, row_of(number), kShardBytes);
  }
  static RowId row_of(std::uint32_t number) { return 2 * number; }
  OpId start_op(OpKind kind, std::uint32_t number, Nanos deadline = Nanos(0)) {
    for (std::uint32_t host = 0; host < kHosts; ++host) {
      const int byte = kind == OpKind::kWrite ? static_cast<int>(byte_of(number, host)) : 0xEE;
      std::memset(part(number, host).data(), byte, kShardBytes);
    }
    TierOp op;
    op.id = ++last_op_;
    op.kind = kind;
    op.key = key_of(number);
    op.row = row_of(number);
    const std::uint64_t bytes[kHosts] = {kShardBytes, kShardBytes};
    op.shards = shards_of_row(*scheduler_, op.row, bytes, 1);
    op.memory = scheduler_;
    op.deadline = deadline;
    std::vector<TierOp> ops;
    ops.push_back(std::move(op));
    tier_->submit(std::move(ops));
    return last_op_;
  }
  void poll() {
    std::vector<Completion> ended;
    tier_->poll(&ended, &removals_);
    for (Completion& completion : ended) {
      EXPECT_FALSE(done_.contains(completion.id)) << "an op ended twice";
      done_.emplace(completion.id, std::move(completion));
    }
  }
  bool has_ended(OpId id) {
    poll();
    return done_.contains(id);
  }
  Completion finish(OpId id) {
    EXPECT_TRUE(holds_soon([&] { return has_ended(id); })) << "the op did not end";
    return done_.at(id);
  }
  Status write(std::uint32_t number) { return finish(start_op(OpKind::kWrite, number)).status; }
  // Ok also means that the bytes of all parts are right.
  Status read(std::uint32_t number) {
    const Status status = finish(start_op(OpKind::kRead, number)).status;
    if (!status) return status;
    for (std::uint32_t host = 0; host < kHosts; ++host) {
      const std::span<std::byte> bytes = part(number, host);
      EXPECT_TRUE(std::all_of(bytes.begin(), bytes.end(),
                              [&](std::byte byte) { return byte == byte_of(number, host); }))
          << "wrong bytes on host " << host;
    }
    return status;
  }
  // Looks a chunk up until there is an answer.
  bool has(std::uint32_t number) {
    Presence presence = Presence::kUnknown;
    EXPECT_TRUE(holds_soon([&] {
      poll();
      presence = tier_->contains(key_of(number));
      if (presence == Presence::kStaleMiss) tier_->forget_miss(key_of(number));
      if (presence == Presence::kStaleMiss || presence == Presence::kUnknown)
        tier_->prefetch_presence({key_of(number)}, KeyOrder::kNone);
      return presence == Presence::kAbsent || presence == Presence::kPresent ||
             presence == Presence::kLookupFailed;
    }));
    return presence == Presence::kPresent;
  }
  std::size_t records_on(std::uint32_t host) const { return records_in(root_[host].path()).size(); }
  bool has_records_soon(std::size_t count) {
    return holds_soon([&] {
      poll();
      return records_on(0) == count && records_on(1) == count;
    });
  }
  HostEndpoint endpoint() const { return *parse_endpoint(agent_->endpoint()); }
  // Ends the scheduler's connection; it is made again.
  void lose_connection() {
    OtherScheduler other(endpoint());
    EXPECT_TRUE(holds_soon([&] { return !links_->take_events().empty(); }));
  }
  void wait_until_usable() {
    EXPECT_TRUE(holds_soon([&] {
      poll();
      return tier_->stats().writable && tier_->stats().readable;
    }));
  }

  TempDir root_[kHosts];
  FaultyFileOps ops_[kHosts];
  FsTierOptions options_[kHosts];
  std::shared_ptr<HostRegion> region_[kHosts], scheduler_;
  std::unique_ptr<HostAgent> agent_;
  std::unique_ptr<HostLinks> links_;
  std::unique_ptr<Tier> tier_;
  std::vector<TierRemoval> removals_;
  std::uint32_t weights = 0;
  std::uint32_t ranks_each_ = 1;  // of a host; set it before start()
  RemoteTierOptions remote_;
  std::string problem_;  // host 1 does not open its tiers for this reason

  // Opens the tier of one host. Called by one thread at a time.
  virtual std::unique_ptr<Tier> open_part(std::uint32_t host, EpochChoice epoch) {
    FsTierOptions chosen = options_[host];
    chosen.epoch = epoch;
    return make_fs_tier(chosen);
  }

 private:
  void answer_requests(HostTiers& tiers) {
    while (!tiers.is_closed()) {
      const auto request = tiers.wait_for_request(kPatience);
      if (!request) continue;
      EXPECT_EQ(request->text, "settings");
      if (!problem_.empty()) {
        tiers.refuse(request->round, problem_);
        continue;
      }
      tiers.close_tiers();
      Tiers opened;
      try {
        opened.push_back(open_part(1, request->epochs.at(0)));
      } catch (const ResourceError& error) {
        tiers.refuse(request->round, error.what());
        continue;
      }
      tiers.open(request->round, std::move(opened));
    }
  }

  std::thread opener_;
  std::map<OpId, Completion> done_;
  OpId last_op_ = 0;
};

}  // namespace kv_offload::testing
