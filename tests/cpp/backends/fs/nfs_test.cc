// SPDX-License-Identifier: Apache-2.0
// Hosts that share a directory over NFS (nfs_host.h). Cached state never causes a wrong answer, a byte above
// the bound, or a record that is reported as present and is missing.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <thread>

#include "backends/fs/space_ledger.h"
#include "backends/fs/store.h"
#include "faulty_file_ops.h"
#include "fixture.h"
#include "nfs_host.h"
#include "process_ops.h"

namespace kv_offload {
namespace {

using namespace testing;
using std::chrono::seconds;

constexpr std::uint64_t kRootBound = std::uint64_t{1} << 20;
constexpr std::uint64_t kPayload = 16384, kRecordOnDisk = kPayload + 4096;

// A host with a store that is driven by hand: upkeep runs only where a test calls it.
struct NfsUser {
  NfsUser(NfsServer& server, const FsTierOptions& given, const std::string& boot, const Clock& clock)
      : host(server, between), options(given) {
    process.on_host(boot);
    options.warn = [this](const std::string& line) { warnings.push_back(line); };
    store = std::make_unique<FsStore>(options, host, clock);
    store->start();
  }
  ~NfsUser() { store->close(); }

  TierOp op_of(OpKind kind, std::uint32_t number, const Row& row) {
    TierOp op;
    op.kind = kind;
    op.key = key_of(number);
    op.shards = row.shards();
    return op;
  }
  Status write(std::uint32_t number) {
    Row row({kPayload});
    row.fill(number + weights);
    std::uint64_t moved = 0;
    return store->write(op_of(OpKind::kWrite, number, row), store->epoch(), &moved);
  }
  Status read(std::uint32_t number) {
    Row row({kPayload});
    std::uint64_t moved = 0;
    const Status status = store->read(op_of(OpKind::kRead, number, row), store->epoch(), &moved);
    EXPECT_TRUE(!status || row.holds(number + weights)) << "wrong bytes of " << number;
    return status;
  }
  bool finds(std::uint32_t number) {
    std::vector<ChunkKey> keys;
    store->catalog()->begin_lookup(std::vector{key_of(number)}, 0, &keys);
    std::vector<bool> present(keys.size());
    if (!keys.empty()) {
      EXPECT_TRUE(store->locate(keys, KeyOrder::kNone, store->epoch(), &present));
    }
    return store->catalog()->contains(key_of(number)) == Presence::kPresent;
  }
  Status reset(std::uint32_t new_weights) {
    store->forget(0);
    weights = new_weights;
    return store->begin_epoch();
  }

  ProcessOps process;
  FaultyFileOps between{process};
  NfsHost host;
  FsTierOptions options;
  std::vector<std::string> warnings;
  std::unique_ptr<FsStore> store;
  std::uint32_t weights = 0;
};

class FsNfsTest : public ::testing::Test {
 protected:
  std::unique_ptr<NfsUser> host(const std::string& name, unsigned char namespace_byte = 0x11) {
    FsTierOptions options = options_for(root_, kRootBound);
    options.namespace_id.fill(namespace_byte);
    return std::make_unique<NfsUser>(server_, options, name, clock_);
  }
  // Both hosts see each other, and the root is counted.
  void settle(const std::vector<NfsUser*>& users) {
    for (int round = 0; round < 4; ++round) {
      for (NfsUser* user : users) user->store->maintain();
      clock_.advance(seconds(1));
    }
  }
  void fill(NfsUser& user, std::uint32_t first, std::uint32_t records) {
    for (std::uint32_t i = first; i < first + records; ++i) {
      const Status status = user.write(i);
      ASSERT_TRUE(status) << status.to_string();
    }
  }
  std::uint64_t usage(NfsUser& user) {
    TierStats stats;
    user.store->figures(&stats);
    return stats.bytes;
  }

  TempDir dir_;
  std::string root_ = dir_.path() + "/root";
  FakeClock clock_;
  NfsServer server_;
  std::unique_ptr<NfsUser> a_ = host("a"), b_ = host("b");
};

TEST_F(FsNfsTest, a_record_is_found_by_a_host_that_cached_its_absence) {
  settle({a_.get(), b_.get()});
  ASSERT_TRUE(a_->write(1));
  ASSERT_TRUE(b_->finds(1)) << "the size of its group is known from here on";
  for (std::uint32_t i = 2; i < 20; ++i) {  // in leaves that exist, and in leaves that do not
    ASSERT_FALSE(b_->finds(i));
    clock_.advance(RecordIndex::kLookupRetryDelay);
    ASSERT_FALSE(b_->finds(i)) << "the host caches the absence now";
    ASSERT_TRUE(a_->write(i));
    clock_.advance(RecordIndex::kLookupRetryDelay);
    EXPECT_TRUE(b_->finds(i)) << i;
    EXPECT_TRUE(b_->read(i)) << i;
  }
}

TEST_F(FsNfsTest, the_first_record_of_a_group_is_found_in_a_leaf_that_did_not_exist) {
  settle({a_.get(), b_.get()});
  ASSERT_FALSE(b_->finds(1));
  clock_.advance(RecordIndex::kLookupRetryDelay);
  ASSERT_FALSE(b_->finds(1));
  ASSERT_TRUE(a_->write(1));
  clock_.advance(RecordIndex::kLookupRetryDelay);
  EXPECT_TRUE(b_->finds(1));
}

TEST_F(FsNfsTest, scans_find_records_written_by_others) {
  settle({a_.get(), b_.get()});
  for (std::uint32_t burst = 0; burst < 3; ++burst) {
    fill(*a_, burst * 8, 8);
    clock_.advance(seconds(30));
    b_->store->maintain();
    TierStats stats;
    b_->store->figures(&stats);
    EXPECT_EQ(stats.chunks, (burst + 1) * 8);
  }
}

TEST_F(FsNfsTest, scans_read_a_changed_leaf_again) {
  settle({a_.get(), b_.get()});
  std::uint32_t same_leaf = 2, other_leaf = 2;
  while (layout::leaf_of(key_of(same_leaf)) != layout::leaf_of(key_of(1))) ++same_leaf;
  while (layout::leaf_of(key_of(other_leaf)) == layout::leaf_of(key_of(1))) ++other_leaf;
  ASSERT_TRUE(a_->write(1));
  ASSERT_TRUE(a_->write(other_leaf));
  const fs::path leaf = path_of(root_, 1).parent_path();
  fs::last_write_time(leaf, fs::last_write_time(leaf) - std::chrono::hours(1));
  const auto poll = [&] {
    clock_.advance(seconds(30));
    b_->store->maintain();
    TierStats stats;
    b_->store->figures(&stats);
    return stats.chunks;
  };
  EXPECT_EQ(poll(), 2u);
  EXPECT_EQ(poll(), 2u);  // lists both leaves once more; they have settled then
  ASSERT_TRUE(a_->write(same_leaf));
  EXPECT_EQ(poll(), 3u) << "its host caches when the directory last changed";
}

TEST_F(FsNfsTest, a_record_evicted_by_another_host_is_a_miss_at_any_moment) {
  settle({a_.get(), b_.get()});
  fill(*a_, 1, 3);
  for (std::uint32_t i = 1; i <= 3; ++i) ASSERT_TRUE(b_->finds(i));
  ASSERT_TRUE(fs::remove(path_of(root_, 1)));
  EXPECT_EQ(b_->read(1).kind(), StatusKind::kNotFound);
  // During the read: before the n-th fstat of the open file.
  const auto meanwhile = [&](int n, std::uint32_t number,
                             const std::function<void(const fs::path&)>& change) {
    b_->between.set_rule([&, change, looks = 0](Call call) mutable {
      if (call == Call::kFstat && ++looks == n) change(path_of(root_, number));
      return 0;
    });
    const Status status = b_->read(number);
    b_->between.clear();
    return status;
  };
  for (int n = 1; n <= 3; ++n) {  // at the open, at the size check, at the read
    ASSERT_TRUE(a_->write(10));
    ASSERT_TRUE(b_->finds(10));
    const Status status = meanwhile(n, 10, [](const fs::path& path) { fs::remove(path); });
    EXPECT_EQ(status.kind(), StatusKind::kNotFound) << n << ": " << status.to_string();
    ASSERT_EQ(a_->read(10).kind(), StatusKind::kNotFound);
    clock_.advance(RecordIndex::kLookupRetryDelay);
  }
  const auto recycle = [&](const fs::path& path) {
    const fs::path temporary = path.parent_path() / "recycled";
    fs::rename(path, temporary);
    flip_a_bit(temporary);
    server_.changed(path.parent_path().string());
  };
  const Status status = meanwhile(3, 3, recycle);  // another record is written into its file
  EXPECT_EQ(status.kind(), StatusKind::kNotFound) << status.to_string();
}

TEST_F(FsNfsTest, a_damaged_record_is_still_reported_as_damaged) {  // the control of the test above
  settle({a_.get(), b_.get()});
  ASSERT_TRUE(a_->write(1));
  ASSERT_TRUE(b_->finds(1));
  flip_a_bit(path_of(root_, 1));
  EXPECT_EQ(b_->read(1).kind(), StatusKind::kCorrupt);
  EXPECT_TRUE(path_of(root_, 1).empty());
}

TEST_F(FsNfsTest, a_record_written_by_two_hosts_is_counted_once) {
  settle({a_.get(), b_.get()});
  for (std::uint32_t i = 0; i < 12; ++i) {
    ASSERT_FALSE(b_->finds(i));  // so it computes and writes the record too
    ASSERT_TRUE(a_->write(i));
    ASSERT_TRUE(b_->write(i));
  }
  EXPECT_EQ(usage(*b_), du(root_)) << "counted once";
}

TEST_F(FsNfsTest, a_reported_write_is_on_disk) {
  settle({a_.get(), b_.get()});
  ASSERT_TRUE(a_->write(1));
  FileInfo info;  // its host caches the name from before b evicted it
  const fs::path path = path_of(root_, 1);
  ASSERT_EQ(a_->host.stat(AT_FDCWD, path.string(), &info), 0);
  ASSERT_EQ(b_->host.unlink(AT_FDCWD, path.string()), 0);
  ASSERT_EQ(a_->read(1).kind(), StatusKind::kNotFound);
  ASSERT_TRUE(b_->write(1));
  ASSERT_EQ(a_->host.stat(AT_FDCWD, path.string(), &info), 0);
  ASSERT_EQ(b_->host.unlink(AT_FDCWD, path.string()), 0);
  ASSERT_EQ(a_->host.stat(AT_FDCWD, path.string(), &info), 0) << "the test needs a host that caches the name";
  ASSERT_TRUE(a_->write(1));
  EXPECT_TRUE(fs::exists(path));
}

TEST_F(FsNfsTest, a_count_includes_files_that_another_host_just_created) {
  settle({a_.get(), b_.get()});
  std::vector<DirEntry> names;  // a caches the root's content
  int error = 0;
  const Fd root = open_fd(a_->host, AT_FDCWD, root_, O_RDONLY | O_DIRECTORY, 0, &error);
  ASSERT_EQ(a_->host.list(root.get(), &names), 0);
  auto other_model = host("c", 0x22);
  settle({other_model.get()});
  fill(*other_model, 0, 30);
  fs::resize_file(root_ + "/" + std::string(layout::kLedgerFile), 0);  // the total is in doubt
  settle({a_.get()});
  EXPECT_GE(usage(*a_), du(root_));
  for (std::uint32_t i = 0; i < 60; ++i) {
    (void)a_->write(i);
    ASSERT_LE(du(root_), kRootBound);
  }
}

TEST_F(FsNfsTest, resets_on_alternating_hosts_each_begin_an_epoch) {
  settle({a_.get(), b_.get()});
  std::uint32_t weights = 0;
  for (int round = 0; round < 4; ++round) {
    for (NfsUser* user : {a_.get(), b_.get()}) {
      const Status status = user->reset(weights += 1000);
      ASSERT_TRUE(status) << "round " << round << ": " << status.to_string();
      ASSERT_TRUE(user->write(1));
      settle({a_.get(), b_.get()});
    }
    for (NfsUser* user : {a_.get(), b_.get()}) EXPECT_TRUE(user->read(1)) << "each its own";
  }
  EXPECT_EQ(records_in(root_).size(), 2u) << "obsolete records were removed";
}

TEST_F(FsNfsTest, a_disconnected_host_does_not_affect_others_and_recovers) {
  settle({a_.get(), b_.get()});
  std::uint32_t next = 0;
  for (int cut = 0; cut < 2; ++cut) {
    fill(*a_, next, 20);
    next += 20;
    b_->host.cut_off();
    Status theirs;
    std::thread stuck([&] { theirs = b_->write(900 + static_cast<std::uint32_t>(cut)); });
    for (int i = 0; i < 8; ++i) {
      clock_.advance(seconds(1));
      a_->store->maintain();
    }
    fill(*a_, next, 60);  // evicts without waiting for the host that does not answer
    next += 60;
    EXPECT_LE(du(root_), kRootBound);
    b_->host.heal();
    stuck.join();
    EXPECT_LE(du(root_), kRootBound + kRecordOnDisk);
    settle({a_.get(), b_.get()});
    clock_.advance(seconds(61));
    settle({a_.get(), b_.get()});
    EXPECT_TRUE(b_->write(950 + static_cast<std::uint32_t>(cut)));
    EXPECT_TRUE(b_->finds(next - 1));
    EXPECT_TRUE(b_->read(next - 1));
    EXPECT_LE(du(root_), kRootBound);
  }
  EXPECT_TRUE(b_->warnings.empty()) << b_->warnings[0];
  EXPECT_TRUE(a_->warnings.empty()) << a_->warnings[0];
}

// Random operations of two hosts in any order, one of which has a clock that is ten minutes ahead.
TEST_F(FsNfsTest, any_order_of_operations_keeps_the_bytes_and_the_bound) {
  b_->host.set_clock_ahead(std::int64_t{600} * 1'000'000'000);
  settle({a_.get(), b_.get()});
  std::mt19937 random(7);
  std::uint32_t weights = 0;
  std::map<StatusKind, int> reads;
  for (int step = 0; step < 2500; ++step) {
    NfsUser& user = random() % 2 == 0 ? *a_ : *b_;
    const std::uint32_t number = random() % 70;
    switch (random() % 8) {
      case 0:
      case 1:
      case 2: {
        const Status status = user.write(number);
        ASSERT_TRUE(status) << "step " << step << ": " << status.to_string();
        break;
      }
      case 3:
      case 4:
      case 5:
        if (user.finds(number)) ++reads[user.read(number).kind()];
        break;
      case 6:
        clock_.advance(seconds(1));
        user.store->maintain();
        break;
      default:
        if (random() % 40 == 0) {
          ASSERT_TRUE(user.reset(weights += 1000)) << "step " << step;
        }
    }
    if (step % 10 == 0) {
      ASSERT_LE(du(root_), kRootBound + 2 * kRecordOnDisk) << "step " << step;
    }
  }
  for (const auto& [kind, count] : reads)
    EXPECT_TRUE(kind == StatusKind::kOk || kind == StatusKind::kNotFound) << to_string(kind) << ": " << count;
  EXPECT_GT(reads[StatusKind::kOk], 100);
  for (const NfsUser* user : {a_.get(), b_.get()}) EXPECT_TRUE(user->warnings.empty()) << user->warnings[0];
}

// ---- the ledger page

class SpaceOnNfs : public ::testing::Test {
 protected:
  std::unique_ptr<SpaceLedger> open(std::uint64_t writer, FileOps& ops) {
    return std::make_unique<SpaceLedger>(ops, root_.get(), dir_.path(), kRootBound, writer, writer);
  }
  // Replaces the page as a process does that finds it locked for too long.
  void replace_the_page(FileOps& ops) {
    const std::string name(layout::kLedgerFile);
    int error = 0;
    const Fd held = open_fd(ops, root_.get(), name, O_RDWR, 0, &error);  // the replacing process has it open
    const Fd fd = open_fd(ops, root_.get(), "new", O_RDWR | O_CREAT, 0600, &error);
    ASSERT_TRUE(held && fd);
    ASSERT_EQ(ops.rename(root_.get(), "new", name, false), 0);
  }
  std::size_t seen_by(FileOps& ops) {
    const std::unique_ptr<SpaceLedger> third = open(99, ops);
    SpaceFigures figures;
    EXPECT_TRUE(third->poll(Nanos{0}, &figures));
    third->close();
    return figures.writers.size() - 1;
  }

  TempDir dir_;
  NfsServer server_;
  NfsHost host_{server_}, another_{server_};
  int error_ = 0;
  Fd root_ = open_fd(posix_file_ops(), AT_FDCWD, dir_.path(), O_RDONLY | O_DIRECTORY, 0, &error_);
};

TEST_F(SpaceOnNfs, all_processes_move_to_a_replaced_ledger_page) {
  const std::unique_ptr<SpaceLedger> one = open(1, host_), two = open(3, another_);
  for (NfsHost* by : {&host_, &another_}) {
    replace_the_page(*by);
    for (int change = 0; change < 2; ++change) {  // the other host may see the replacement one change late
      one->add(10);
      two->add(10);
    }
    EXPECT_EQ(seen_by(host_), 2u) << "both use the page that has the name";
  }
  SpaceFigures figures;
  EXPECT_TRUE(one->poll(Nanos{0}, &figures));
  EXPECT_NE(figures.state, SpaceState::kNotExclusive) << "their locks worked";
}

TEST_F(SpaceOnNfs, a_process_declared_dead_by_its_host_becomes_visible_again) {
  const std::unique_ptr<SpaceLedger> one = open(1, host_);
  const std::string presence = layout::presence_name(1);
  ASSERT_EQ(host_.unlink(root_.get(), presence), 0);
  SpaceFigures figures;
  EXPECT_TRUE(one->poll(Nanos{0}, &figures));
  EXPECT_TRUE(fs::exists(dir_.path() + "/" + presence));
}

}  // namespace
}  // namespace kv_offload
