// SPDX-License-Identifier: Apache-2.0
// The bound holds with any writers and any deaths.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>

#include "fixture.h"
#include "writer_processes.h"

namespace kv_offload {
namespace {

using namespace testing;

constexpr std::uint64_t kBound = std::uint64_t{2} << 20;
constexpr std::uint64_t kRecord = 65536 + 4096;
const ShardSizes kShards = {65536};

class FsTierBound : public ::testing::Test {
 protected:
  // Leaves a temporary file, like a process that died during a write.
  void leave_temporary(const std::string& directory, std::uint64_t bytes) {
    fs::create_directories(directory);
    const std::string path = directory + "/.tmp-999999-00000000000000aa-" + std::to_string(++left_);
    std::ofstream(path) << std::string(bytes, 'x');
  }
  // Options with a clock that only the test advances.
  FsTierOptions timed_options() {
    FsTierOptions options = options_for(root_, kBound);
    options.clock = &clock_;
    return options;
  }

  TempDir dir_;
  std::string root_ = dir_.path() + "/root";
  FakeClock clock_;
  int left_ = 0;
};

TEST_F(FsTierBound, writing_four_times_the_bound_never_exceeds_the_bound) {
  TierUser user(options_for(root_, kBound));
  std::uint64_t most = 0;
  for (std::uint32_t i = 0; i < 4 * kBound / kRecord; ++i) {
    const OpId id = user.start(OpKind::kWrite, i, kShards);
    while (!user.ended(id)) most = std::max(most, du(root_));
    EXPECT_TRUE(user.finish(id).status) << user.finish(id).status.to_string();
    most = std::max(most, du(root_));
    ASSERT_LE(most, kBound);
  }
  EXPECT_GT(most, kBound * 8 / 10) << "the bound is hardly used";
  const TierStats stats = user.tier().stats();
  EXPECT_EQ(stats.bytes, du(root_));
  EXPECT_EQ(stats.chunks, records_in(root_).size());
  EXPECT_GT(stats.evicted_bytes, 2 * kBound);
  EXPECT_GT(user.removed(TierRemoval::Reason::kEvicted), 0u);
}

TEST_F(FsTierBound, a_start_with_a_smaller_bound_shrinks_the_root_without_a_write) {
  constexpr std::uint64_t kSmaller = kBound / 2;
  {
    TierUser user(options_for(root_, kBound));
    for (std::uint32_t i = 0; i < 28; ++i) ASSERT_TRUE(user.write(i, kShards));
  }
  ASSERT_GT(du(root_), kSmaller);
  FsTierOptions options = timed_options();
  options.max_bytes = kSmaller;
  TierUser user(options);
  user.wait_for_scan();
  EXPECT_TRUE(user.until([&] {
    clock_.advance(std::chrono::seconds(1));
    user.poll();
    return du(root_) <= kSmaller;
  })) << du(root_);
  EXPECT_GT(du(root_), kSmaller * 8 / 10);
  EXPECT_TRUE(user.has(27));
  EXPECT_FALSE(user.has(0));
}

TEST_F(FsTierBound, eviction_follows_recency) {
  TierUser user(options_for(root_, kBound));
  std::uint32_t next = 0;
  while (user.tier().stats().evicted_bytes == 0) {
    if (next > 4) user.tier().touch(key_of(2));
    ASSERT_TRUE(user.write(next++, kShards));
  }
  EXPECT_FALSE(user.has(0));
  for (std::uint32_t i = 0; i < 5; ++i) ASSERT_TRUE(user.write(next++, kShards));
  EXPECT_TRUE(user.has(2)) << "touched";
  EXPECT_FALSE(user.has(1));
  EXPECT_FALSE(user.has(3));
  EXPECT_TRUE(user.has(next - 1));
}

// A count reads file times, which lag behind the state in memory by up to a minute.
TEST_F(FsTierBound, recency_survives_a_recount) {
  TierUser user(timed_options()), other(timed_options());
  user.wait_for_scan();
  other.wait_for_scan();
  for (std::uint32_t i = 0; i < 10; ++i) ASSERT_TRUE(user.write(i, kShards));
  user.tier().touch(key_of(0));
  // Another server writes more than a sixteenth of the bound, which makes a count due.
  for (std::uint32_t i = 100; i < 104; ++i) ASSERT_TRUE(other.write(i, kShards));
  EXPECT_TRUE(user.until([&] {
    clock_.advance(std::chrono::seconds(2));
    user.poll();
    return user.has(100) && user.has(103);
  }));
  EXPECT_TRUE(user.usage_becomes_exact(root_));
  std::uint32_t next = 1000;
  while (user.removed(TierRemoval::Reason::kEvicted) < 9) ASSERT_TRUE(user.write(next++, kShards));
  EXPECT_FALSE(user.has(9));
  EXPECT_TRUE(user.has(0)) << "used last of the ten";
}

TEST_F(FsTierBound, recency_survives_a_restart) {
  {
    TierUser user(timed_options());
    for (std::uint32_t i = 0; i < 10; ++i) ASSERT_TRUE(user.write(i, kShards));
    user.tier().touch(key_of(3));
    user.tier().touch(key_of(0));
  }
  TierUser user(timed_options());
  user.wait_for_scan();
  std::uint32_t next = 100;
  while (user.removed(TierRemoval::Reason::kEvicted) < 9) ASSERT_TRUE(user.write(next++, kShards));
  // 1, 2, 4 ... 9 were evicted first, then 3, then 0.
  EXPECT_TRUE(user.has(0));
  EXPECT_FALSE(user.has(3));
}

TEST_F(FsTierBound, a_record_that_is_read_is_not_evicted) {
  TierUser user(options_for(root_, kBound));
  ASSERT_TRUE(user.write(0, kShards));
  for (std::uint32_t i = 1; i < 100; ++i) {
    if (!user.has(0)) break;
    const OpId read = user.start(OpKind::kRead, 0, kShards);
    ASSERT_TRUE(user.write(i, kShards));
    const Status status = user.finish(read).status;
    EXPECT_TRUE(status || status.kind() == StatusKind::kNotFound) << status.to_string();
  }
}

TEST_F(FsTierBound, files_of_dead_processes_are_removed_before_any_record) {
  FsTierOptions dead = options_for(root_, kBound);
  dead.namespace_id.fill(0x22);
  dead.namespace_json = "{}";
  {
    TierUser user(dead);
    for (std::uint32_t i = 0; i < 8; ++i) ASSERT_TRUE(user.write(i, kShards));
  }
  TierUser first(options_for(root_, kBound));  // creates the namespace
  ASSERT_TRUE(first.write(0, kShards));
  first.tier().close();
  const std::string name(64, '1');
  leave_temporary(root_ + "/" + name + "/g1/00", 200000);
  leave_temporary(root_ + "/" + std::string(64, '2') + "/g1/01", 200000);

  TierUser user(timed_options());
  user.wait_for_scan();
  EXPECT_TRUE(user.until([&] { return temporaries_in(root_).empty(); }));
  std::uint32_t next = 1;
  while (fs::exists(root_ + "/" + std::string(64, '2'))) {
    ASSERT_TRUE(user.write(next++, kShards));
    ASSERT_LE(du(root_), kBound);
    if (!fs::exists(root_ + "/" + std::string(64, '2'))) break;  // its last bytes may not have been enough
    ASSERT_EQ(user.removed(TierRemoval::Reason::kEvicted), 0u);
    ASSERT_TRUE(user.has(0));
  }
}

TEST_F(FsTierBound, foreign_files_count_and_stay) {
  fs::create_directories(root_ + "/mine");
  std::ofstream(root_ + "/mine/data") << std::string(1 << 20, 'x');
  fs::permissions(root_, fs::perms::owner_all);
  TierUser user(options_for(root_, kBound));
  user.wait_for_scan();
  for (std::uint32_t i = 0; i < 40; ++i) {
    (void)user.write(i, kShards);
    ASSERT_LE(du(root_), kBound);
  }
  EXPECT_EQ(fs::file_size(root_ + "/mine/data"), std::uint64_t{1} << 20);
  EXPECT_GT(user.tier().stats().chunks, 5u);
}

TEST_F(FsTierBound, a_namespace_that_a_process_has_open_is_not_garbage) {
  FsTierOptions other = options_for(root_, kBound);
  other.namespace_id.fill(0x22);
  other.namespace_json = "{}";
  TierUser evictor(options_for(root_, kBound));
  TierUser neighbour(other);
  neighbour.wait_for_scan();
  for (std::uint32_t i = 0; i < 5; ++i) ASSERT_TRUE(neighbour.write(i, kShards));
  for (std::uint32_t i = 0; i < 60; ++i) {
    ASSERT_TRUE(evictor.write(i, kShards));
    ASSERT_LE(du(root_), kBound);
  }
  for (std::uint32_t i = 0; i < 5; ++i) EXPECT_TRUE(neighbour.read(i, kShards));
}

TEST_F(FsTierBound, two_servers_that_share_a_root_stay_below_the_bound_together) {
  FsTierOptions options = timed_options();
  options.op_timeout = std::chrono::hours(24);  // the clock runs fast here
  TierUser a(options), b(options);
  a.wait_for_scan();
  b.wait_for_scan();
  std::size_t written_by_a = 0, read_by_a = 0, read_by_b = 0;
  for (std::uint32_t i = 0; i < 60; ++i) {
    const OpId one = a.start(OpKind::kWrite, i, kShards), two = b.start(OpKind::kWrite, 1000 + i, kShards);
    written_by_a += a.finish(one).status.is_ok();
    const Status status = b.finish(two).status;  // each server evicts for itself
    EXPECT_TRUE(status) << status.to_string();
    ASSERT_LE(du(root_), kBound + kRecord);
    for (std::uint32_t j = 0; j <= i; ++j) {  // evicted or right
      if (a.has(j)) read_by_a += a.read(j, kShards).is_ok();
    }
    const Status read = b.read(1000 + i, kShards);  // a may have evicted since
    EXPECT_TRUE(read || read.kind() == StatusKind::kNotFound) << read.to_string();
    read_by_b += read.is_ok();
  }
  EXPECT_GT(written_by_a, 30u);
  EXPECT_GT(read_by_a, 100u);
  EXPECT_GT(read_by_b, 30u);
}

TEST_F(FsTierBound, two_writers_of_one_record_keep_one_copy) {
  TierUser a(options_for(root_, kBound)), b(options_for(root_, kBound));
  b.wait_for_scan();
  for (std::uint32_t i = 0; i < 5; ++i) {
    const OpId one = a.start(OpKind::kWrite, i, kShards), two = b.start(OpKind::kWrite, i, kShards);
    EXPECT_TRUE(a.finish(one).status);
    EXPECT_TRUE(b.finish(two).status);
    EXPECT_TRUE(a.read(i, kShards));
    EXPECT_TRUE(b.read(i, kShards));
  }
  EXPECT_EQ(records_in(root_).size(), 5u);
}

// Forks a child process that fills the root; the caller kills it during a write.
pid_t writer_process(const std::string& root, int* ready) {
  int ends[2];
  if (::pipe(ends) != 0) return -1;
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(120);  // a child must not hang the test
    TierUser user(options_for(root, kBound));
    for (std::uint32_t i = 0;; ++i) {
      (void)user.write(i, kShards);
      const char byte = 1;
      if (i == 40 && ::write(ends[1], &byte, 1) != 1) ::_exit(1);
    }
  }
  ::close(ends[1]);
  *ready = ends[0];
  return child;
}

TEST_F(FsTierBound, a_killed_writer_causes_no_drift) {
  int ready = -1;
  const pid_t child = writer_process(root_, &ready);
  ASSERT_GT(child, 0);
  char byte;
  ASSERT_EQ(::read(ready, &byte, 1), 1);
  // Uses the real clock. A pause of twenty times its duration follows a recount. A clock that a test moves
  // once per attempt may run much faster during the recount than during the pause.
  FsTierOptions options = options_for(root_, kBound);
  options.op_timeout = std::chrono::minutes(2);  // a slow disk must not open the breaker
  TierUser user(options);
  user.wait_for_scan();
  for (std::uint32_t i = 500; i < 520; ++i) {
    const Status status = user.write(i, kShards);
    // The child may be stopped while it holds the ledger's lock. We then replace the ledger and count again.
    const bool counts_again = status.kind() == StatusKind::kIo && status.error_number() == ENOENT;
    EXPECT_TRUE(status || counts_again || status.kind() == StatusKind::kNoSpace) << status.to_string();
    // Stopped meanwhile: a concurrent walk may count both an evicted record and its successor.
    ::kill(child, SIGSTOP);
    ::waitpid(child, nullptr, WUNTRACED);
    const std::uint64_t held = du(root_);
    ::kill(child, SIGCONT);
    ASSERT_LE(held, kBound + 2 * kRecord);
  }
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  ::close(ready);
  for (std::uint32_t i = 1000; i < 1040; ++i) {
    // A tick finds the records that the dead process wrote since our scan.
    EXPECT_TRUE(user.until([&] { return user.write(i, kShards).is_ok(); }));
    ASSERT_LE(du(root_), kBound);
    EXPECT_TRUE(user.read(i, kShards));
  }
  // The file that the dead process was about to write may remain in the total until upkeep has counted.
  EXPECT_TRUE(user.until([&] {
    user.poll();
    return temporaries_in(root_).empty();
  }));
  EXPECT_TRUE(user.usage_becomes_exact(root_));
}

TEST_F(FsTierBound, three_processes_keep_the_bound_and_one_is_killed) {
  WriterProcesses writers(kShards);
  for (const std::uint8_t byte : {0x11, 0x11, 0x22}) {
    FsTierOptions options = options_for(root_, kBound);
    options.namespace_id.fill(byte);
    writers.start(options, WriterProcesses::Time::kFast);
  }
  std::uint64_t most = 0, samples = 0;
  // Runs until the processes wrote this many more records and enough samples were taken. (The split of the
  // space depends on speed.)
  const auto sample = [&](std::uint64_t more) {
    const auto all = [&] { return writers.written(0) + writers.written(1) + writers.written(2); };
    const std::uint64_t start = all();
    const std::uint64_t often = samples + 30;
    const auto done = [&] { return all() >= start + more && samples >= often; };
    const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(240);
    while (!done() && std::chrono::steady_clock::now() < give_up) {
      most = std::max(most, writers.held(root_));
      ++samples;
    }
    return done();
  };
  EXPECT_TRUE(sample(120)) << writers.written(0) << " " << writers.written(1) << " " << writers.written(2);
  writers.kill(0);
  EXPECT_TRUE(sample(80)) << writers.written(1) << " " << writers.written(2);
  EXPECT_LE(most, kBound + 3 * kRecord);
  EXPECT_GT(most, kBound * 8 / 10);
}

TEST_F(FsTierBound, a_process_killed_at_any_moment_leaves_a_consistent_root) {
  for (int round = 0; round < 5; ++round) {
    int ready = -1;
    const pid_t child = writer_process(root_, &ready);
    ASSERT_GT(child, 0);
    char byte;
    ASSERT_EQ(::read(ready, &byte, 1), 1);
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    ::close(ready);
    TierUser user(options_for(root_, kBound));
    user.wait_for_scan();
    EXPECT_LE(du(root_), kBound);
    EXPECT_TRUE(user.usage_becomes_exact(root_));
    EXPECT_TRUE(temporaries_in(root_).empty());
    std::size_t found = 0;
    for (std::uint32_t i = 0; i < 2000; ++i) {
      if (!user.has(i)) continue;
      ++found;
      EXPECT_TRUE(user.read(i, kShards));
    }
    EXPECT_EQ(found, records_in(root_).size());
  }
}

}  // namespace
}  // namespace kv_offload
