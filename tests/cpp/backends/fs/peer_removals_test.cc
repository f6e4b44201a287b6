// SPDX-License-Identifier: Apache-2.0
// Two stores on one full root, driven by hand: the watcher forgets and reports what the evictor removes.
#include <gtest/gtest.h>

#include <fcntl.h>

#include <functional>
#include <set>
#include <utility>

#include "backends/fs/space_ledger.h"
#include "backends/fs/store.h"
#include "faulty_file_ops.h"
#include "fixture.h"

namespace kv_offload {
namespace {

using namespace testing;

// Calls back after each listing of a directory and before each move. Fails listings of leaf directories, and
// looks at records, on request.
class ListingOps : public FaultyFileOps {
 public:
  int list(int fd, std::vector<DirEntry>* entries) override {
    const fs::path path = fs::read_symlink("/proc/self/fd/" + std::to_string(fd));
    const bool is_leaf = path.parent_path().filename() == "g1";
    const int rc = is_leaf && leaves_fail ? -EIO : FaultyFileOps::list(fd, entries);
    ++lists;
    if (after_list) after_list();
    return rc;
  }
  int move(int from, const std::string& from_path, int to, const std::string& to_path, bool keep) override {
    if (before_move) before_move(from_path);
    return FaultyFileOps::move(from, from_path, to, to_path, keep);
  }
  int stat(int fd, const std::string& path, FileInfo* info) override {
    if (records_fail && path.ends_with(".rec")) return -EIO;
    return FaultyFileOps::stat(fd, path, info);
  }
  int lists = 0;
  bool leaves_fail = false, records_fail = false;
  std::function<void()> after_list;
  std::function<void(const std::string&)> before_move;
};

class FsPeerRemovalTest : public ::testing::Test {
 protected:
  static constexpr std::uint64_t kPayload = std::uint64_t{256} << 10, kMaxBytes = std::uint64_t{14} << 20;
  static constexpr std::uint32_t kRecords = 30;

  FsPeerRemovalTest() {
    for (FsStore* store : {&evictor_, &watcher_}) store->start();
    for (FsStore* store : {&evictor_, &watcher_}) store->maintain();  // each sees the other
  }
  ~FsPeerRemovalTest() override {
    for (FsStore* store : {&evictor_, &watcher_}) store->close();
  }
  FsTierOptions watching() {
    FsTierOptions options = options_for(root_, kMaxBytes);
    options.watch_removals = true;
    options.warn = [this](const std::string& line) { lines_.push_back(line); };
    return options;
  }
  static Status write(FsStore& store, std::uint32_t number) {
    Row row({kPayload});
    TierOp op;
    op.kind = OpKind::kWrite;
    op.key = key_of(number);
    op.shards = row.shards();
    std::uint64_t moved = 0;
    return store.write(op, store.epoch(), &moved);
  }
  // The watcher's records fill half of the root, and the evictor knows them.
  void fill() {
    for (std::uint32_t i = 0; i < kRecords; ++i) ASSERT_TRUE(write(watcher_, i));
    evictor_.maintain();
    ASSERT_TRUE(removals(watcher_).empty());
  }
  void evict(std::uint32_t first) {
    for (std::uint32_t i = first; i < first + 50; ++i) ASSERT_TRUE(write(evictor_, i));
  }
  static std::set<ChunkKey> removals(FsStore& store) {
    std::vector<TierRemoval> removed;
    store.catalog()->take_removals(&removed);
    EXPECT_FALSE(store.catalog()->has_removals());
    std::set<ChunkKey> keys;
    for (const TierRemoval& removal : removed) {
      EXPECT_TRUE(keys.insert(removal.key).second) << "reported twice";
    }
    return keys;
  }
  // Returns the keys of the watcher's records that are not on disk.
  std::set<ChunkKey> missing() const {
    std::set<ChunkKey> keys;
    for (std::uint32_t i = 0; i < kRecords; ++i) {
      if (path_of(root_, i).empty()) keys.insert(key_of(i));
    }
    return keys;
  }
  // Removes a file as a command or a server does that reports it to the ledger.
  void remove_and_report(std::uint32_t number) {
    const fs::path path = path_of(root_, number);
    const std::uint64_t bytes = du(path.string());
    ASSERT_TRUE(fs::remove(path));
    int error = 0;
    const Fd root = open_fd(posix_file_ops(), AT_FDCWD, root_, kOpenDirectory, 0, &error);
    SpaceLedger command(posix_file_ops(), root.get(), root_);
    command.remove(bytes, command.finished());
  }
  // Upkeep until no change of a directory can have been missed.
  void settle() {
    for (int i = 0; i < 6; ++i) {
      clock_.advance(std::chrono::seconds(1));
      watcher_.maintain();
    }
  }
  std::uint64_t lost_bytes() const {
    TierStats stats;
    watcher_.figures(&stats);
    return stats.lost_bytes;
  }
  // Counts of the root that ended, by any process.
  std::uint64_t counts() const {
    LedgerPage page{};
    std::ifstream file(root_ + "/ledger", std::ios::binary);
    file.read(reinterpret_cast<char*>(&page), sizeof(page));
    EXPECT_TRUE(page.valid());
    return page.finished;
  }

  TempDir dir_;
  std::string root_ = dir_.path() + "/root";
  FakeClock clock_;
  ListingOps ops_;
  std::vector<std::string> lines_;  // warnings of the watcher
  FsStore evictor_{options_for(root_, kMaxBytes), posix_file_ops(), clock_};
  FsStore watcher_{watching(), ops_, clock_};
};

TEST_F(FsPeerRemovalTest, records_that_another_server_evicted_are_reported_once) {
  fill();
  evict(100);
  ASSERT_FALSE(missing().empty()) << "nothing was evicted";
  EXPECT_FALSE(watcher_.catalog()->has_removals());
  watcher_.watch(nullptr);
  EXPECT_TRUE(watcher_.catalog()->has_removals());
  EXPECT_EQ(removals(watcher_), missing());
  watcher_.watch(nullptr);
  watcher_.maintain();
  EXPECT_TRUE(removals(watcher_).empty());
}

TEST_F(FsPeerRemovalTest, upkeep_finds_them_without_a_watch) {
  fill();
  evict(100);
  watcher_.maintain();
  EXPECT_EQ(removals(watcher_), missing());
}

TEST_F(FsPeerRemovalTest, a_server_without_kv_events_forgets_nothing) {
  for (std::uint32_t i = 0; i < kRecords; ++i) ASSERT_TRUE(write(evictor_, i));
  watcher_.maintain();
  for (std::uint32_t i = 100; i < 150; ++i) ASSERT_TRUE(write(watcher_, i));
  ASSERT_FALSE(missing().empty());
  evictor_.maintain();
  EXPECT_TRUE(removals(evictor_).empty());
}

TEST_F(FsPeerRemovalTest, records_that_were_never_reported_as_present_are_not_reported_as_removed) {
  fill();
  evict(100);
  watcher_.watch(nullptr);
  const std::set<ChunkKey> first = removals(watcher_);
  evict(200);  // evicts the rest, and its own records of before
  ASSERT_TRUE(path_of(root_, 100).empty());
  EXPECT_EQ(watcher_.catalog()->contains(key_of(149)), Presence::kPresent);
  watcher_.watch(nullptr);
  std::set<ChunkKey> expected = missing();
  for (const ChunkKey& key : first) expected.erase(key);
  if (path_of(root_, 149).empty()) expected.insert(key_of(149));
  EXPECT_EQ(removals(watcher_), expected);
}

TEST_F(FsPeerRemovalTest, an_eviction_without_a_write_is_noticed) {
  fill();
  remove_and_report(3);
  watcher_.watch(nullptr);
  EXPECT_EQ(removals(watcher_), std::set{key_of(3)});
}

TEST_F(FsPeerRemovalTest, a_removal_by_a_process_that_ended_before_it_reported_it_is_noticed) {
  fill();
  settle();
  ASSERT_TRUE(fs::remove(path_of(root_, 3)));
  watcher_.maintain();
  EXPECT_TRUE(removals(watcher_).empty()) << "nothing shows the removal yet";
  evictor_.close();
  watcher_.maintain();
  EXPECT_EQ(removals(watcher_), std::set{key_of(3)});
}

TEST_F(FsPeerRemovalTest, a_record_written_after_its_directory_was_listed_stays_known) {
  for (std::uint32_t i = 0; i < 10; ++i) ASSERT_TRUE(write(evictor_, i));
  watcher_.watch(nullptr);
  // Records in the directories of these, so that they are in a listed one.
  std::vector<std::uint32_t> late;
  for (std::uint32_t n = 200; late.size() < 3; ++n) {
    for (std::uint32_t i = 0; i < 10; ++i) {
      if (layout::leaf_of(key_of(n)) == layout::leaf_of(key_of(i))) late.push_back(n);
    }
  }
  ops_.lists = 0;
  ASSERT_TRUE(write(evictor_, 11));
  watcher_.watch(nullptr);
  const int last = std::exchange(ops_.lists, 0);
  ASSERT_GT(last, 5);
  ops_.after_list = [&] {
    if (ops_.lists < last) return;
    for (const std::uint32_t n : late) EXPECT_TRUE(write(watcher_, n));
  };
  ASSERT_TRUE(write(evictor_, 12));
  watcher_.watch(nullptr);
  ops_.after_list = nullptr;
  EXPECT_GE(ops_.lists, last);
  EXPECT_TRUE(removals(watcher_).empty());
  for (const std::uint32_t n : late)
    EXPECT_EQ(watcher_.catalog()->contains(key_of(n)), Presence::kPresent) << n;
}

TEST_F(FsPeerRemovalTest, a_record_written_while_it_is_forgotten_stays_known) {
  fill();
  const fs::path path = path_of(root_, 3), aside = dir_.path() + "/aside";
  fs::copy_file(path, aside);
  remove_and_report(3);
  bool written = false;
  // The second look of the watcher at this record's name follows its removal from the catalog.
  ops_.set_rule([&](Call call) -> int {
    if (call != Call::kStat || written) return 0;
    if (watcher_.catalog()->contains(key_of(3)) == Presence::kPresent) return 0;
    written = true;
    fs::rename(aside, path);
    return 0;
  });
  watcher_.watch(nullptr);
  ops_.clear();
  ASSERT_TRUE(written);
  EXPECT_EQ(watcher_.catalog()->contains(key_of(3)), Presence::kPresent);
}

TEST_F(FsPeerRemovalTest, own_changes_list_nothing) {
  for (std::uint32_t i = 0; i < 100; ++i) ASSERT_TRUE(write(watcher_, i));
  ASSERT_FALSE(removals(watcher_).empty()) << "nothing was evicted";
  ops_.lists = 0;
  watcher_.watch(nullptr);
  EXPECT_EQ(ops_.lists, 0);
  evictor_.maintain();  // it knows which records it can evict
  ASSERT_TRUE(write(evictor_, 200));
  watcher_.watch(nullptr);
  EXPECT_GT(ops_.lists, 0);
}

TEST_F(FsPeerRemovalTest, evictions_by_others_are_no_reason_to_count_the_root) {
  fill();
  settle();
  const std::uint64_t before = counts();
  std::size_t reported = 0;
  for (std::uint32_t round = 1; round <= 20; ++round) {
    evict(round * 100);
    watcher_.watch(nullptr);
    for (std::uint32_t i = 0; i < 50; ++i) (void)watcher_.catalog()->contains(key_of(round * 100 + i));
    reported += removals(watcher_).size();
    settle();
    clock_.advance(std::chrono::hours(2));
  }
  EXPECT_GT(reported, 500u);
  EXPECT_EQ(counts(), before);
  EXPECT_EQ(lost_bytes(), 0u);
  EXPECT_TRUE(lines_.empty()) << lines_.back();
  // A full root of which the others have evicted everything: no error.
  for (std::uint32_t i = 5000; i < 5100; ++i) {
    const Status status = write(watcher_, i);
    EXPECT_TRUE(status) << status.to_string();
  }
}

TEST_F(FsPeerRemovalTest, space_of_records_that_a_program_removed_is_counted_again) {
  fill();
  settle();
  for (std::uint32_t i = 0; i < kRecords; ++i) ASSERT_TRUE(fs::remove(path_of(root_, i)));
  ASSERT_TRUE(write(evictor_, 100));  // the reason for the next listing
  watcher_.watch(nullptr);
  EXPECT_EQ(removals(watcher_).size(), kRecords);
  settle();
  EXPECT_GT(lost_bytes(), 0u);
  TierStats stats;
  watcher_.figures(&stats);
  EXPECT_EQ(stats.bytes, du(root_));
}

TEST_F(FsPeerRemovalTest, a_directory_that_cannot_be_read_loses_nothing_and_is_listed_later) {
  fill();
  evict(100);
  std::uint32_t next = 151;
  // The check of single records and of directories, the directories of records, that of the epoch.
  for (const Call call : {Call::kStat, Call::kOpen, Call::kList}) {
    ASSERT_TRUE(write(evictor_, next++));
    ops_.fail_all(call, EIO);
    watcher_.watch(nullptr);
    EXPECT_TRUE(removals(watcher_).empty());
    ops_.clear();
  }
  watcher_.maintain();
  EXPECT_EQ(removals(watcher_), missing());
}

TEST_F(FsPeerRemovalTest, a_directory_whose_state_could_not_be_read_once_is_listed_later) {
  fill();
  settle();
  remove_and_report(3);
  // The first check of each directory fails; the file stays missing.
  int failed = 0;
  ops_.set_rule([&](Call call) { return call == Call::kStat && ++failed <= 60 ? -EIO : 0; });
  watcher_.watch(nullptr);
  ops_.clear();
  ASSERT_GT(failed, 0);
  EXPECT_TRUE(removals(watcher_).empty());
  watcher_.maintain();
  EXPECT_EQ(removals(watcher_), std::set{key_of(3)});
}

TEST_F(FsPeerRemovalTest, a_directory_that_fails_for_a_while_is_listed_later) {
  fill();
  evict(100);
  ops_.leaves_fail = true;
  settle();
  EXPECT_TRUE(removals(watcher_).empty());
  ops_.leaves_fail = false;
  watcher_.maintain();
  EXPECT_EQ(removals(watcher_), missing());
}

TEST_F(FsPeerRemovalTest, the_records_of_a_directory_that_vanished_are_reported) {
  fill();
  ASSERT_TRUE(write(evictor_, 100));
  settle();  // all directories were listed
  const fs::path leaf = path_of(root_, 3).parent_path();
  remove_and_report(3);
  fs::remove_all(leaf);
  watcher_.watch(nullptr);
  EXPECT_EQ(removals(watcher_), missing());
}

TEST_F(FsPeerRemovalTest, the_records_of_a_directory_that_vanished_before_it_was_checked_are_reported) {
  fill();
  ASSERT_TRUE(write(evictor_, 100));
  settle();
  const fs::path leaf = path_of(root_, 3).parent_path();
  remove_and_report(3);
  ops_.after_list = [&] {  // of the epoch
    ops_.after_list = nullptr;
    fs::remove_all(leaf);
  };
  watcher_.watch(nullptr);
  std::set<ChunkKey> reported = removals(watcher_);
  settle();
  reported.merge(removals(watcher_));
  EXPECT_TRUE(fs::create_directory(leaf));
  EXPECT_EQ(reported, missing());
}

TEST_F(FsPeerRemovalTest, records_whose_files_could_not_be_checked_for_a_while_are_reported_later) {
  fill();
  settle();
  remove_and_report(3);
  ops_.records_fail = true;
  settle();
  EXPECT_TRUE(removals(watcher_).empty());
  ops_.records_fail = false;
  watcher_.maintain();
  EXPECT_EQ(removals(watcher_), missing());
}

TEST_F(FsPeerRemovalTest, a_record_that_is_listed_while_its_server_evicts_it_is_reported) {
  fill();
  settle();
  ChunkKey victim;
  ops_.before_move = [&](const std::string& from) {
    const auto name = layout::parse_record(from.substr(from.rfind('/') + 1));
    if (!name || victim.size() > 0) return;
    victim = name->key;
    watcher_.watch(nullptr);  // as the upkeep thread does meanwhile
  };
  for (std::uint32_t i = 100; i < 160 && victim.size() == 0; ++i) {
    ASSERT_TRUE(write(evictor_, 1000 + i));  // a reason to list
    ASSERT_TRUE(write(watcher_, i));
  }
  ops_.before_move = nullptr;
  ASSERT_GT(victim.size(), 0u) << "nothing was evicted";
  std::set<ChunkKey> reported = removals(watcher_);
  settle();
  reported.merge(removals(watcher_));
  EXPECT_TRUE(reported.contains(victim));
}

// Records that the watcher never knew are removed all the time, by itself and by the other server.
TEST_F(FsPeerRemovalTest, removals_of_unknown_records_do_not_explain_those_by_a_program) {
  fill();
  std::uint32_t next = 20000;
  for (int i = 0; i < 200; ++i) ASSERT_TRUE(write(evictor_, next++));  // between two listings
  watcher_.watch(nullptr);
  for (int i = 0; i < 200; ++i) (void)write(watcher_, next++);
  const auto run = [&](int rounds, std::chrono::seconds step) {
    for (int i = 0; i < rounds; ++i) {
      (void)write(i % 2 == 0 ? evictor_ : watcher_, next++);
      for (FsStore* store : {&watcher_, &evictor_}) {
        store->watch(nullptr);
        store->maintain();
      }
      clock_.advance(step);
    }
  };
  run(10, std::chrono::seconds(1));
  int removed = 0;
  for (std::uint32_t number = next - 45; number < next - 5; ++number) {
    const fs::path path = path_of(root_, number);
    removed += !path.empty() && fs::remove(path) ? 1 : 0;
  }
  ASSERT_GT(removed, 20);
  run(240, std::chrono::seconds(30));
  EXPECT_GT(lost_bytes(), 0u);
  TierStats stats;
  watcher_.figures(&stats);
  EXPECT_LT(stats.bytes, du(root_) + (std::uint64_t{1} << 20));
}

TEST_F(FsPeerRemovalTest, a_reset_during_a_listing_reports_each_record_once) {
  fill();
  evict(100);
  ops_.after_list = [&] {
    ops_.after_list = nullptr;
    watcher_.forget(0);
  };
  watcher_.watch(nullptr);
  EXPECT_EQ(removals(watcher_).size(), kRecords);
}

}  // namespace
}  // namespace kv_offload
