// SPDX-License-Identifier: Apache-2.0
// Resets during ops in flight, alongside other processes, and on a device that fails or hangs.
#include <fcntl.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <set>
#include <thread>

#include "backends/fs/fs_epoch.h"
#include "backends/fs/layout.h"
#include "backends/fs/space_ledger.h"
#include "backends/fs/store.h"
#include "faulty_file_ops.h"
#include "fixture.h"
#include "tier/io_pool.h"

namespace kv_offload {
namespace {

using namespace testing;
using std::chrono::seconds;

class FsTierReset : public ::testing::Test {
 protected:
  FsTierOptions timed_options() {
    FsTierOptions options = options_for(root_);
    options.clock = &clock_;
    options.file_ops = &ops_;
    return options;
  }
  void tick(TierUser& user) {
    clock_.advance(seconds(1));
    user.poll();
  }
  bool lies_in(std::uint32_t number, const std::string& epoch) {
    bool found = false;
    for (const fs::path& path : records_in(root_)) {
      found |= path.string().find("/" + epoch + "/") != std::string::npos &&
               path.filename().string().starts_with(key_of(number).hex());
    }
    return found;
  }
  std::set<std::string> epochs() {
    std::set<std::string> found;
    walk(root_, [&](const fs::path& path) {
      const std::string name = path.filename().string();
      if (layout::parse_epoch(name)) found.insert(name);
    });
    return found;
  }

  TempDir dir_;
  std::string root_ = dir_.path() + "/root";
  FaultyFileOps ops_;
  FakeClock clock_;
};

// ---- ops in flight

TEST_F(FsTierReset, an_op_that_a_thread_started_before_a_reset_leaves_nothing_after_it) {
  IoPool* pool = nullptr;
  FsTierOptions options = timed_options();
  options.manual_pool = &pool;
  TierUser user(options);
  const OpId write = user.start(OpKind::kWrite, 1, {8192});
  const auto begun = pool->begin_next(Lane::kWrite);
  ASSERT_FALSE(user.tier().cancel(write));
  ASSERT_TRUE(user.tier().reset());
  begun();
  EXPECT_EQ(user.finish(write).status.kind(), StatusKind::kCancelled);
  EXPECT_EQ(user.tier().contains(key_of(1)), Presence::kAbsent);
  EXPECT_TRUE(records_in(root_).empty());
}

TEST_F(FsTierReset, a_queued_op_that_was_not_cancelled_leaves_nothing_after_a_reset) {
  IoPool* pool = nullptr;
  FsTierOptions options = timed_options();
  options.manual_pool = &pool;
  TierUser user(options);
  const OpId write = user.start(OpKind::kWrite, 1, {8192});
  ASSERT_TRUE(user.tier().reset());
  const OpId newer = user.start(OpKind::kWrite, 2, {8192});
  while (const auto next = pool->begin_next(Lane::kWrite)) next();
  EXPECT_EQ(user.finish(write).status.kind(), StatusKind::kCancelled);
  EXPECT_TRUE(user.finish(newer).status);
  const OpId read = user.start(OpKind::kRead, 2, {8192});
  ASSERT_TRUE(user.tier().reset());
  pool->begin_next(Lane::kRead)();
  EXPECT_EQ(user.finish(read).status.kind(), StatusKind::kCancelled);
}

// ThreadPoolTier checks the epoch before and after a call; during the call, the store must check it.
TEST_F(FsTierReset, a_write_that_a_reset_overtakes_inside_the_store_leaves_nothing) {
  FsStore store(timed_options(), ops_, clock_);
  const RecordStore::EpochPtr before = store.epoch();
  store.forget(0);
  ASSERT_TRUE(store.begin_epoch());
  Row row({8192});
  row.fill(1);
  TierOp op;
  op.kind = OpKind::kWrite;
  op.key = key_of(1);
  op.shards = row.shards();
  std::uint64_t moved = 0;
  EXPECT_EQ(store.write(op, before, &moved).kind(), StatusKind::kCancelled);
  EXPECT_TRUE(records_in(root_).empty());
  store.close();
}

// With threads: however a write and a reset interleave, no bytes from before the reset remain.
TEST_F(FsTierReset, no_byte_from_before_a_reset_returns_at_any_interleaving) {
  FsTierOptions options = options_for(root_);
  TierUser user(options);
  user.wait_for_scan();
  for (std::uint32_t round = 0; round < 100; ++round) {
    std::vector<OpId> writes;
    for (std::uint32_t i = 0; i < 16; ++i) writes.push_back(user.start(OpKind::kWrite, i, {4096}));
    if (round % 2 == 0) (void)user.finish(writes[round % 16]);  // otherwise no write may have started yet
    for (const OpId id : writes) (void)user.tier().cancel(id);
    ASSERT_TRUE(user.tier().reset());
    for (const OpId id : writes) (void)user.finish(id);
    for (std::uint32_t i = 0; i < 16; ++i) ASSERT_FALSE(user.has(i)) << "in round " << round;
  }
}

// ---- several processes

TEST_F(FsTierReset, a_reset_of_one_server_leaves_the_other_its_own_records) {
  TierUser a(timed_options()), b(timed_options());
  b.wait_for_scan();
  ASSERT_TRUE(b.write(1));
  ASSERT_TRUE(a.tier().reset());
  a.weights = 1;  // a has new weights; those of b are unchanged
  ASSERT_TRUE(a.write(1));
  ASSERT_TRUE(a.write(2));
  for (int i = 0; i < 3; ++i) {
    tick(a);
    tick(b);
    ASSERT_TRUE(a.until([&] { return b.tier().stats().diverged; }));
  }
  EXPECT_FALSE(a.tier().stats().diverged);
  EXPECT_TRUE(b.read(1)) << "its own";
  EXPECT_TRUE(a.read(1));
  EXPECT_FALSE(b.has(2)) << "of other weights";
  ASSERT_TRUE(b.write(3));
  EXPECT_TRUE(b.read(3));
  EXPECT_TRUE(lies_in(3, "g1"));
  tick(a);
  EXPECT_FALSE(a.has(3)) << "of other weights";
}

TEST_F(FsTierReset, records_in_use_by_another_server_are_not_reclaimed) {
  auto a = std::make_unique<TierUser>(timed_options());
  a->wait_for_scan();
  TierUser b(timed_options());
  b.wait_for_scan();
  ASSERT_TRUE(b.write(1));
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(a->tier().reset());  // a has the lease, and reclaims after each
  EXPECT_TRUE(a->until([&] {
    tick(*a);
    return epochs() == std::set<std::string>{"g1", "g4"};
  }));
  EXPECT_TRUE(b.read(1));
  ASSERT_TRUE(b.tier().reset());
  EXPECT_TRUE(a->until([&] {
    tick(*a);
    return epochs() == std::set<std::string>{"g4", "g5"};
  }));
  EXPECT_FALSE(b.has(1));
  a.reset();
  EXPECT_TRUE(b.until([&] {
    tick(b);
    return epochs() == std::set<std::string>{"g5"};
  }));
}

// Records written after a reset belong to weights that only one process has in memory. A new process has the
// weights that its namespace names, because no reset changed them.
TEST_F(FsTierReset, a_new_process_finds_no_records_from_before_a_reset_nor_of_a_reset_process) {
  auto a = std::make_unique<TierUser>(timed_options());
  auto b = std::make_unique<TierUser>(timed_options());
  b->wait_for_scan();
  ASSERT_TRUE(b->write(1));
  ASSERT_TRUE(a->tier().reset());
  a->weights = 1;
  ASSERT_TRUE(a->write(2));
  {
    std::vector<std::string> warnings;
    FsTierOptions options = timed_options();
    options.warn = [&](const std::string& line) { warnings.push_back(line); };
    TierUser beside(options);
    ASSERT_EQ(warnings.size(), 1u);
    EXPECT_NE(warnings[0].find("was reset"), std::string::npos);
    EXPECT_FALSE(beside.has(1));
    EXPECT_FALSE(beside.has(2));
  }
  a.reset();
  b.reset();
  auto c = std::make_unique<TierUser>(timed_options());
  EXPECT_FALSE(c->has(1));
  EXPECT_FALSE(c->has(2));
  ASSERT_TRUE(c->write(3));
  TierUser beside(timed_options());
  EXPECT_TRUE(beside.has(3)) << "new processes share";
  c.reset();
  TierUser d(timed_options());
  EXPECT_TRUE(d.has(3) && d.read(3)) << "and its records are kept";
}

TEST_F(FsTierReset, records_of_a_reset_process_are_reclaimed_after_it_ended) {
  auto a = std::make_unique<TierUser>(timed_options());
  auto b = std::make_unique<TierUser>(timed_options());
  b->wait_for_scan();
  ASSERT_TRUE(b->write(1));
  ASSERT_TRUE(a->tier().reset());
  ASSERT_TRUE(a->write(2));
  a.reset();
  EXPECT_TRUE(b->until([&] {
    tick(*b);
    return !lies_in(2, "g2");
  }));
  // The upkeep may still run, so this repeats it to its end.
  fs::path namespace_directory;
  walk(root_, [&](const fs::path& path) {
    if (path.filename() == "g2") namespace_directory = path.parent_path();
  });
  int error = 0;
  const Fd namespace_fd =
      open_fd(posix_file_ops(), AT_FDCWD, namespace_directory.string(), O_RDONLY | O_DIRECTORY, 0, &error);
  ASSERT_TRUE(namespace_fd);
  (void)reclaim_unused_epochs(posix_file_ops(), namespace_fd.get(), std::nullopt, std::atomic<bool>{false},
                              [](std::uint64_t) {});
  EXPECT_EQ(epochs(), (std::set<std::string>{"g1", "g2"})) << "a newer process would use g1 again";
  EXPECT_TRUE(b->read(1));
  b.reset();
  TierUser c(timed_options());
  EXPECT_FALSE(c.has(1)) << "the reset is remembered after its records were reclaimed";
  const auto marks = [&] {
    std::set<std::string> found;
    walk(root_, [&](const fs::path& path) {
      if (layout::parse_mark(path.filename().string())) found.insert(path.filename().string());
    });
    return found;
  };
  // The marks of an epoch are removed after its directory.
  EXPECT_TRUE(c.until([&] {
    tick(c);
    return epochs() == std::set<std::string>{"g3"} && marks() == std::set<std::string>{"g3.open"};
  }));
}

// As on NFS: locks on directories are visible on one host, and locks on files on all.
class HostLocalDirectoryLocks : public FaultyFileOps {
 public:
  int flock(int fd, int operation) override {
    FileInfo info;
    return fstat(fd, &info) == 0 && info.is_directory() ? 0 : FaultyFileOps::flock(fd, operation);
  }
};

TEST_F(FsTierReset, hosts_that_were_each_reset_do_not_affect_one_another) {
  HostLocalDirectoryLocks hosts[3];
  std::vector<std::unique_ptr<TierUser>> users;
  for (HostLocalDirectoryLocks& ops : hosts) {
    FsTierOptions options = timed_options();
    options.file_ops = &ops;
    users.push_back(std::make_unique<TierUser>(options));
    users.back()->wait_for_scan();
  }
  std::set<std::string> expected;
  for (std::uint32_t i = 0; i < users.size(); ++i) {
    ASSERT_TRUE(users[i]->tier().reset());
    ASSERT_TRUE(users[i]->write(i));
    expected.insert(layout::epoch_directory_name(i + 2));
  }
  for (int round = 0; round < 3; ++round) {
    for (const auto& user : users) tick(*user);
  }
  EXPECT_TRUE(users[0]->until([&] {
    tick(*users[0]);
    return epochs() == expected;
  }));
  for (std::uint32_t i = 0; i < users.size(); ++i) EXPECT_TRUE(users[i]->read(i)) << i;
}

TEST_F(FsTierReset, a_reset_replica_gets_its_share_of_a_full_root) {
  constexpr std::uint64_t kBound = std::uint64_t{4} << 20;  // directories take a third
  constexpr std::uint64_t kRecord = 16384 + 4096;
  FsTierOptions options = timed_options();
  options.max_bytes = kBound;
  TierUser a(options), b(options);
  a.wait_for_scan();
  b.wait_for_scan();
  for (std::uint32_t i = 0; i < 200; ++i) (void)b.write(i, {16384});
  ASSERT_TRUE(a.tier().reset());
  a.weights = 1;
  for (std::uint32_t i = 0; i < 200; ++i) {
    tick(a);
    tick(b);
    const auto takes = [&](TierUser& user, std::uint32_t number) {
      return user.until([&] {
        if (user.write(number, {16384})) return true;
        tick(user);
        return false;
      });
    };
    ASSERT_TRUE(takes(a, 1000 + i)) << i;
    ASSERT_TRUE(takes(b, 2000 + i)) << i;
  }
  // Half of an equal share: directories take a third of the bound, and the last eviction may have been large.
  for (TierUser* user : {&a, &b}) EXPECT_GT(user->tier().stats().chunks, kBound / kRecord / 6);
  EXPECT_LE(du(root_), kBound + 2 * kRecord);
}

TEST_F(FsTierReset, files_of_later_processes_are_counted_before_their_removal) {
  TierUser b(timed_options());
  b.wait_for_scan();
  ASSERT_TRUE(b.write(1));
  tick(b);
  ASSERT_TRUE(b.usage_becomes_exact(root_));
  for (int i = 0; i < 8; ++i) ASSERT_TRUE(TierUser(timed_options()).tier().reset());
  EXPECT_TRUE(b.until([&] {
    tick(b);
    return epochs() == std::set<std::string>{"g1", "g16"};
  }));
  // Reads the current ledger page: b last looked at it some time ago.
  const Fd root(posix_file_ops(), ::open(root_.c_str(), O_RDONLY | O_DIRECTORY));
  EXPECT_GE(recorded_usage(posix_file_ops(), root.get()).value_or(0), du(root_));
}

// As if removed by hand.
TEST_F(FsTierReset, an_epoch_directory_removed_while_in_use_is_replaced) {
  TierUser user(timed_options());
  ASSERT_TRUE(user.write(1));
  walk(root_, [](const fs::path& path) {
    if (path.filename() == "g1") fs::remove_all(path);
  });
  tick(user);
  EXPECT_TRUE(user.until([&] { return epochs() == std::set<std::string>{"g2"}; }));
  EXPECT_TRUE(user.until([&] { return user.tier().stats().writable; }));
  EXPECT_FALSE(user.has(1));
  EXPECT_TRUE(user.write(1));
  EXPECT_TRUE(user.read(1));
}

// Between two scans of a server, another server is reset, and directories are removed by hand. An epoch that
// new servers share would have given them records of the old weights.
TEST_F(FsTierReset, an_epoch_replaced_after_anothers_reset_is_not_shared) {
  const auto remove = [&](const std::set<std::string>& which) {
    walk(root_, [&](const fs::path& path) {
      if (which.contains(path.filename().string())) fs::remove_all(path);
    });
  };
  const auto marks = [&] {
    std::set<std::string> names;
    walk(root_, [&](const fs::path& path) { names.insert(path.filename().string()); });
    return names;
  };
  using Removed = std::set<std::string>;
  for (const bool reset : {true, false}) {
    for (const Removed& removed : {Removed{"g1"}, Removed{"g1", "g2"}, Removed{std::string(64, '1')}}) {
      fs::remove_all(root_);
      FsStore store(timed_options(), ops_, clock_), other(timed_options(), ops_, clock_);
      store.maintain();
      if (reset) {
        other.forget(0);
        ASSERT_TRUE(other.begin_epoch());
      }
      remove(removed);
      if (removed.contains(std::string(64, '1'))) other.maintain();  // creates its own again
      for (int again = 0; again < 2; ++again) {
        store.maintain();
        const auto own = std::static_pointer_cast<FsEpoch>(store.epoch());
        ASSERT_TRUE(own);
        const std::string name = layout::epoch_directory_name(own->number);
        EXPECT_EQ(marks().contains(name + ".reset"), reset) << removed.size() << " " << again << " " << name;
        remove({name});
      }
      for (FsStore* each : {&store, &other}) each->close();
    }
  }
}

// Its epoch directory was removed by hand, and upkeep creates another one during the reset.
TEST_F(FsTierReset, a_reset_while_upkeep_creates_an_epoch_creates_its_own) {
  FsStore store(timed_options(), ops_, clock_);
  walk(root_, [](const fs::path& path) {
    if (path.filename() == "g1") fs::remove_all(path);
  });
  ops_.block(Call::kMkdir);
  std::thread upkeep([&] { store.maintain(); });
  ops_.wait_for_blocked_in(Call::kMkdir);
  store.forget(0);
  ops_.release();
  upkeep.join();
  EXPECT_TRUE(store.begin_epoch());
  std::set<std::string> names;
  walk(root_, [&](const fs::path& path) { names.insert(path.filename().string()); });
  EXPECT_TRUE(names.contains(*epochs().rbegin() + ".reset")) << "a new process must not share it";
}

TEST_F(FsTierReset, a_reset_server_evicts_from_epochs_of_others_if_necessary) {
  constexpr std::uint64_t kBound = std::uint64_t{2} << 20;
  FsTierOptions options = timed_options();
  options.max_bytes = kBound;
  TierUser a(options);
  a.wait_for_scan();
  TierUser b(options);
  b.wait_for_scan();
  for (std::uint32_t i = 0; i < 200; ++i) (void)b.write(i, {16384});
  ASSERT_TRUE(a.tier().reset());
  a.weights = 1;
  EXPECT_TRUE(a.until([&] {
    tick(a);
    return a.write(1000, {16384}) && a.read(1000, {16384});
  })) << "b filled the root, and a has no records of its own to evict";
  EXPECT_LE(du(root_), kBound + 65536);
}

// ---- failures

TEST_F(FsTierReset, a_failed_reset_leaves_an_empty_tier_until_retried) {
  TierUser user(timed_options());
  ASSERT_TRUE(user.write(1));
  ops_.fail_all(Call::kMkdir, EIO);
  EXPECT_EQ(user.tier().reset().kind(), StatusKind::kIo);
  EXPECT_FALSE(user.has(1));
  EXPECT_FALSE(user.tier().stats().writable);
  EXPECT_EQ(user.write(1).kind(), StatusKind::kUnavailable);
  ops_.clear();
  EXPECT_TRUE(user.until([&] {
    tick(user);
    return user.tier().stats().writable;
  }));
  EXPECT_FALSE(user.has(1));
  EXPECT_TRUE(user.write(1));
  EXPECT_TRUE(user.read(1));
}

TEST_F(FsTierReset, a_reset_that_times_out_completes_in_the_background) {
  FsTierOptions options = timed_options();
  options.op_timeout = std::chrono::milliseconds(20);  // real time here
  TierUser user(options);
  ASSERT_TRUE(user.write(1));
  ops_.block(Call::kMkdir);
  EXPECT_EQ(user.tier().reset().kind(), StatusKind::kTimeout);
  EXPECT_EQ(user.tier().contains(key_of(1)), Presence::kAbsent);
  EXPECT_FALSE(user.tier().stats().writable);
  ops_.release();
  EXPECT_TRUE(user.until([&] { return user.tier().stats().writable; }));
  EXPECT_FALSE(user.has(1));
  EXPECT_TRUE(user.write(2));
  EXPECT_TRUE(user.read(2));
}

// The probe of an open breaker ended without a device access, and must not close the breaker.
TEST_F(FsTierReset, a_probe_that_a_reset_ended_does_not_close_the_breaker) {
  IoPool* pool = nullptr;
  FsTierOptions options = timed_options();
  options.manual_pool = &pool;
  TierUser user(options);
  ops_.fail_all(Call::kPwritev, EIO);
  std::uint32_t number = 0;
  const auto write = [&] {
    const OpId id = user.start(OpKind::kWrite, ++number, {8192});
    if (const auto body = pool->begin_next(Lane::kWrite)) body();
    return user.finish(id).status.kind();
  };
  while (user.tier().stats().breaker_trips == 0) ASSERT_EQ(write(), StatusKind::kIo);
  clock_.advance(std::chrono::seconds(120));
  const OpId probe = user.start(OpKind::kWrite, 100, {8192});
  ASSERT_TRUE(user.tier().reset());
  pool->begin_next(Lane::kWrite)();
  EXPECT_EQ(user.finish(probe).status.kind(), StatusKind::kCancelled);
  EXPECT_EQ(write(), StatusKind::kIo);           // this write is the probe
  EXPECT_EQ(write(), StatusKind::kUnavailable);  // the failed probe opened the breaker again
}

TEST_F(FsTierReset, a_server_that_was_reset_is_not_reported_as_diverged) {
  const FsTierOptions options = timed_options();
  FsStore a(options, ops_, clock_), b(options, ops_, clock_), not_reset(options, ops_, clock_);
  for (FsStore* store : {&a, &b}) {
    store->forget(0);
    ASSERT_TRUE(store->begin_epoch());
  }
  const auto is_apart = [](FsStore& store) {
    store.maintain();
    TierStats stats;
    store.figures(&stats);
    store.close();
    return stats.diverged;
  };
  EXPECT_FALSE(is_apart(a));
  EXPECT_FALSE(is_apart(b));
  EXPECT_TRUE(is_apart(not_reset));
}

}  // namespace
}  // namespace kv_offload
