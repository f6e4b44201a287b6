// SPDX-License-Identifier: Apache-2.0
// Servers that share a full root: the share that each gets, and the loss of the others, measured by the
// prompts that can still be loaded from their first chunk on.
#include "backends/fs/shares.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "prompts.h"

namespace kv_offload {
namespace {

using namespace testing;

constexpr std::uint64_t kSharedBound = std::uint64_t{16} << 20;

class FsShares : public ::testing::TestWithParam<const char*> {
 protected:
  FsTierOptions options(unsigned char namespace_byte, const std::string& policy = "prefix") {
    FsTierOptions made = options_for("/root", kSharedBound);
    made.namespace_id.fill(namespace_byte);
    made.namespace_json = "{}";
    made.eviction_policy = policy;
    made.clock = &clock_;
    return made;
  }
  static std::string name(unsigned char namespace_byte) {
    return std::string(64, "0123456789"[namespace_byte & 0xf]);
  }
  std::unique_ptr<PromptServer> start(const FsTierOptions& made) {
    return std::make_unique<PromptServer>(made, disk_, clock_);
  }
  // Writes until the server evicts its own records.
  void fill(PromptServer& server) {
    while (server.stats().evicted_bytes == 0) ASSERT_TRUE(server.write_next());
    second();
    server.tick();
  }
  void second() { clock_.advance(std::chrono::seconds(1)); }
  Held held(unsigned char namespace_byte, const PromptServer& server, const std::string& epoch = "") {
    return held_in(disk_, name(namespace_byte) + epoch, server.prompts());
  }
  // At most `useless` of the held records cannot be loaded.
  void expect_usable(const Held& found, std::size_t useless, const std::string& when) {
    EXPECT_LE(found.records - found.usable, useless)
        << when << ": " << found.usable << " of " << found.records;
  }

  TimedDisk disk_;
  FakeClock clock_;
};

TEST_P(FsShares, a_new_server_gets_its_share_and_breaks_no_other_prompts) {
  const auto first = start(options(0x11, GetParam()));
  fill(*first);
  const std::size_t before = held(0x11, *first).records;
  // The oldest prompt loses its end first; with lru it loses its beginning, so all of it becomes useless.
  const std::size_t useless = GetParam() == std::string("lru") ? kChunks : 2;
  const auto second_one = start(options(0x22, GetParam()));
  first->tick();
  second_one->tick();
  for (int i = 0; i < 1600; ++i) {
    ASSERT_TRUE(second_one->write_next()) << i;
    if (i < 8 || i % 4 == 3) {  // one tick's writes need less space than is requested at once
      second();
      first->tick();
      second_one->tick();
      if (i % 160 == 159)
        expect_usable(held(0x11, *first), useless, fmt::format("after {} records of the other", i + 1));
    }
  }
  const Held theirs = held(0x11, *first), ours = held(0x22, *second_one);
  expect_usable(ours, useless, "the newcomer");
  EXPECT_EQ(first->stats().chunks, theirs.records) << "the evicting server knows what it evicted";
  const double share = static_cast<double>(theirs.records + ours.records) / 2;
  EXPECT_NEAR(static_cast<double>(ours.records), share, 0.05 * share);
  EXPECT_LT(theirs.records, before);
  EXPECT_LE(disk_.peak(), kSharedBound);
}

INSTANTIATE_TEST_SUITE_P(policies, FsShares, ::testing::Values("prefix", "lru"));

TEST_F(FsShares, a_new_server_waits_for_granted_space_and_breaks_no_prompts) {
  const auto first = start(options(0x11));
  fill(*first);
  const Held before = held(0x11, *first);
  const auto newcomer = start(options(0x22));  // asks for space
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(newcomer->write_next()) << "a declined write is not a failure";
  EXPECT_EQ(held(0x22, *newcomer).records, 0u) << "written before the other server evicted anything";
  EXPECT_EQ(held(0x11, *first).records, before.records);
  first->tick();  // evicts for the newcomer
  second();
  newcomer->tick();
  ASSERT_TRUE(newcomer->write(7, 0));
  EXPECT_EQ(held(0x22, *newcomer).records, 1u);
  expect_usable(held(0x11, *first), 2, "after the first grant");
}

// As the command copy does, next to a server that could spare the space.
TEST_F(FsShares, a_writer_that_must_not_evict_costs_the_others_nothing) {
  const auto first = start(options(0x11));
  fill(*first);
  const std::size_t before = held(0x11, *first).records;
  const std::uint64_t evicted = first->stats().evicted_bytes;
  FsTierOptions made = options(0x22);
  made.may_evict = false;
  const auto copy = start(made);
  for (int i = 0; i < 20; ++i) {
    const Status status = copy->write(0, static_cast<std::uint32_t>(i));
    ASSERT_TRUE(status || status.kind() == StatusKind::kNoSpace) << status.to_string();
    second();
    copy->tick();
    first->tick();
  }
  EXPECT_EQ(copy->write(0, 20).kind(), StatusKind::kNoSpace);
  EXPECT_EQ(held(0x11, *first).records, before);
  EXPECT_EQ(first->stats().evicted_bytes, evicted);
  EXPECT_LE(disk_.peak(), kSharedBound);
}

TEST_F(FsShares, a_reset_replica_leaves_the_other_replicas_prompts_usable) {
  const auto kept = start(options(0x11)), changed = start(options(0x11));
  fill(*kept);
  changed->store().forget(0);
  ASSERT_TRUE(changed->store().begin_epoch());
  for (int i = 0; i < 1600; ++i) {
    if (i % 4 == 0) {
      second();
      changed->tick();
      kept->tick();
    }
    ASSERT_TRUE(changed->write_next()) << i;
    if (i % 160 == 159) expect_usable(held(0x11, *kept, "/g1/"), 2, fmt::format("after {}", i));
  }
  const Held old = held(0x11, *kept, "/g1/"), fresh = held(0x11, *changed, "/g2/");
  EXPECT_NEAR(static_cast<double>(fresh.records), static_cast<double>(old.records),
              0.1 * static_cast<double>(old.records));
}

// A server that is stopped or cut off: it never ticks, and no server waits for it.
TEST_F(FsShares, a_server_that_does_not_answer_loses_only_its_oldest_prompts) {
  const auto stopped = start(options(0x11));
  fill(*stopped);
  const auto one = start(options(0x22)), two = start(options(0x33));
  for (int i = 0; i < 1500; ++i) {
    if (i % 16 == 0) {
      second();
      one->tick();
      two->tick();
    }
    ASSERT_TRUE(one->write_next()) << i;
    ASSERT_TRUE(two->write_next()) << i;
    // Each server is removing a 32nd of it, and so reaches into one more prompt.
    if (i % 150 == 149) expect_usable(held(0x11, *stopped), 3 * kChunks, fmt::format("after {}", i));
  }
  const double share = static_cast<double>(kSharedBound / kPromptRecord) / 3;
  for (const auto& [byte, server] :
       {std::pair<unsigned char, PromptServer*>{0x22, one.get()}, {0x33, two.get()}})
    EXPECT_GT(static_cast<double>(held(byte, *server).records), 0.85 * share);
  // (The directories of three namespaces take a fifth of such a small root.)
  EXPECT_GT(static_cast<double>(held(0x11, *stopped).records), 0.35 * share);
  const std::string newest = chunk_of(stopped->prompts() - 2, 0).hex();
  const std::vector<std::string> files = disk_.files();
  EXPECT_TRUE(std::any_of(files.begin(), files.end(), [&](const std::string& path) {
    return path.find(newest) != std::string::npos;
  })) << "its newest whole prompt";
  // When it is back, it reads its remaining records; the others are misses. Its first write meets many
  // missing records. Then they are counted, and the others return some space.
  (void)stopped->write(900, 0);
  for (int i = 0; i < 3; ++i) {
    second();
    for (PromptServer* server : {stopped.get(), one.get(), two.get()}) server->tick();
  }
  ASSERT_TRUE(stopped->write(900, 0));
  EXPECT_LE(disk_.peak(), kSharedBound);
}

TEST_F(FsShares, space_evicted_for_one_server_is_not_taken_by_another) {
  const auto first = start(options(0x11));
  fill(*first);
  const auto asks = start(options(0x22));
  second();
  asks->tick();   // requests space
  first->tick();  // evicts for the request
  const std::size_t granted = first->stats().evicted_bytes / kPromptRecord;
  ASSERT_GE(granted, 8u);
  const std::size_t before = held(0x11, *first).records;
  for (int i = 0; i < 200; ++i) ASSERT_TRUE(first->write_next());  // evicts its own records
  EXPECT_NEAR(static_cast<double>(held(0x11, *first).records), static_cast<double>(before), 3);
  const std::uint64_t evicted = asks->stats().evicted_bytes;
  for (int i = 0; i < 4; ++i) ASSERT_TRUE(asks->write_next()) << i;
  EXPECT_EQ(asks->stats().evicted_bytes, evicted) << "it writes into the granted space";
  EXPECT_EQ(held(0x22, *asks).records, 4u);
}

TEST_F(FsShares, space_granted_to_a_server_that_ended_is_free_again) {
  const auto first = start(options(0x11));
  fill(*first);
  {
    const auto asks = start(options(0x22));
    second();
    asks->tick();
    first->tick();
    SpaceFigures figures;
    const Fd root(disk_, disk_.open(AT_FDCWD, "/root", O_RDONLY | O_DIRECTORY, 0));
    SpaceLedger looks(disk_, root.get(), "/root", kSharedBound, 99, 0);
    ASSERT_TRUE(looks.poll(clock_.now(), &figures));
    EXPECT_GE(figures.reserved, 8 * kPromptRecord);
    looks.close();
  }
  const std::uint64_t evicted = first->stats().evicted_bytes;
  for (int i = 0; i < 4; ++i) ASSERT_TRUE(first->write_next());
  EXPECT_EQ(first->stats().evicted_bytes, evicted) << "the space is free again";
}

// ---- dead namespaces

class CountedCalls : public FaultyFileOps {
 public:
  using FaultyFileOps::FaultyFileOps;
  int list(int fd, std::vector<DirEntry>* entries) override {
    const std::size_t before = entries->size();
    const int rc = FaultyFileOps::list(fd, entries);
    listed += entries->size() - before;
    return rc;
  }
  std::size_t listed = 0;
};

TEST_F(FsShares, a_write_alongside_a_dead_namespace_lists_each_directory_once_for_many_records) {
  CountedCalls ops(disk_);
  {
    const auto dead = start(options(0x11));
    fill(*dead);
  }
  PromptServer server(options(0x22), ops, clock_);
  const std::size_t dead_before = held_in(disk_, name(0x11), 40).records;
  for (int i = 0; i < 200; ++i) ASSERT_TRUE(server.write_next()) << i;
  ops.listed = 0;
  constexpr std::size_t kWrites = 800;
  for (std::size_t i = 0; i < kWrites; ++i) {
    ASSERT_TRUE(server.write_next()) << i;
  }
  EXPECT_LT(held_in(disk_, name(0x11), 40).records, dead_before - kWrites / 2);
  // Each pass lists at most the existing records, and serves a 32nd of them.
  EXPECT_LE(ops.listed / kWrites, 2 * OldestRecords::kParts);
  EXPECT_LE(disk_.peak(), kSharedBound);
}

TEST_F(FsShares, writes_alongside_dead_bytes_never_fail_and_evict_whole_prompts) {
  std::uint32_t prompts = 0;
  {
    const auto dead = start(options(0x11));
    fill(*dead);
    prompts = dead->prompts();
  }
  const auto one = start(options(0x22)), two = start(options(0x33));
  std::size_t left = 1;
  for (int i = 0; left > 0; ++i) {
    ASSERT_LT(i, 3000);
    ASSERT_TRUE(one->write_next()) << i;
    ASSERT_TRUE(two->write_next()) << i;
    if (i % 100 != 99) continue;
    second();
    one->tick();
    two->tick();
    const Held held = held_in(disk_, name(0x11), prompts);
    expect_usable(held, 3 * kChunks, fmt::format("after {}: the oldest prompts alone have holes", i));
    left = held.records;
  }
  for (int i = 0; i < 10; ++i) {
    second();
    ASSERT_TRUE(one->write_next());
  }
  for (const std::string& path : disk_.files()) EXPECT_EQ(path.find(name(0x11)), std::string::npos) << path;
  EXPECT_LE(disk_.peak(), kSharedBound);
}

}  // namespace
}  // namespace kv_offload
