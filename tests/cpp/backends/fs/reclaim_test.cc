// SPDX-License-Identifier: Apache-2.0
#include "backends/fs/reclaim.h"

#include <gtest/gtest.h>

#include <fcntl.h>
#include <sys/stat.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <limits>
#include <map>
#include <set>
#include <string>

#include "backends/fs/root.h"
#include "faulty_file_ops.h"
#include "fixture.h"

namespace kv_offload {
namespace {

using namespace testing;

constexpr std::int64_t kSecond = 1'000'000'000;
constexpr std::uint64_t kRecordBytes = 12288;  // header and 8192 bytes

std::int64_t now_nanos() {
  return std::chrono::duration_cast<Nanos>(std::chrono::system_clock::now().time_since_epoch()).count();
}

// Two namespaces with six records each. Record 0 is the oldest, and the namespaces alternate in age.
class FsReclaimTest : public ::testing::Test {
 protected:
  FsReclaimTest() {
    second_.namespace_id.fill(0x22);
    second_.namespace_json = "{}";
    for (const FsTierOptions& options : {first_, second_}) {
      TierUser user(options);
      for (std::uint32_t i = 0; i < 6; ++i) EXPECT_TRUE(user.write(i));
    }
    const std::int64_t start = now_nanos() - 10'000 * kSecond;
    for (std::uint32_t i = 0; i < 6; ++i) {
      set_used('1', i, start + (2 * i) * kSecond);
      set_used('2', i, start + (2 * i + 1) * kSecond);
    }
    for (const char space : {'1', '2'}) set_time(root_ + "/" + std::string(64, space) + "/open", start);
  }
  fs::path record(char space, std::uint32_t number) {
    return path_of(root_ + "/" + std::string(64, space), number);
  }
  void set_time(const fs::path& path, std::int64_t nanos) {
    const timespec time{nanos / kSecond, nanos % kSecond};
    const timespec times[2] = {time, time};
    ASSERT_EQ(::utimensat(AT_FDCWD, path.c_str(), times, 0), 0);
  }
  void set_used(char space, std::uint32_t number, std::int64_t nanos) {
    set_time(record(space, number), nanos);
  }
  EvictReport evict(std::uint64_t target, std::int64_t dead_before = 0, bool dry_run = false) {
    return FsRoot(root_).evict({target, dead_before, dry_run}, {});
  }
  // Returns the remaining records of a namespace.
  std::vector<std::uint32_t> left(char space) {
    std::vector<std::uint32_t> numbers;
    for (std::uint32_t i = 0; i < 6; ++i) {
      if (!record(space, i).empty()) numbers.push_back(i);
    }
    return numbers;
  }
  // Two servers of the first namespace, both of which end. Only one was reset: the other kept the older
  // records.
  void reset_by_one_of_two() {
    TierUser other(first_);
    ASSERT_TRUE(TierUser(first_).tier().reset());
  }
  using Numbers = std::vector<std::uint32_t>;

  TempDir dir_;
  std::string root_ = dir_.path() + "/root";
  FsTierOptions first_ = options_for(root_), second_ = options_for(root_);
};

TEST_F(FsReclaimTest, nothing_is_evicted_below_the_target) {
  const std::uint64_t before = du(root_);
  EXPECT_EQ(evict(before).bytes_freed, 0u);
  EXPECT_EQ(du(root_), before);
}

TEST_F(FsReclaimTest, the_least_recently_used_records_of_all_namespaces_are_evicted_first) {
  const std::uint64_t before = du(root_);
  const EvictReport report = evict(before - 5 * kRecordBytes + 1);
  EXPECT_EQ(report.records, 5u);
  EXPECT_EQ(report.bytes_before, before);
  EXPECT_EQ(report.bytes_freed, 5 * kRecordBytes);
  EXPECT_EQ(du(root_), before - 5 * kRecordBytes);
  EXPECT_EQ(left('1'), (Numbers{3, 4, 5}));
  EXPECT_EQ(left('2'), (Numbers{2, 3, 4, 5}));
}

TEST_F(FsReclaimTest, a_record_used_after_it_was_listed_stays) {
  const std::uint64_t target = du(root_) - 4 * kRecordBytes;
  bool used = false;
  const auto use_the_oldest = [&](std::uint64_t) {
    if (!used) set_used('1', 0, now_nanos());
    used = true;
  };
  const EvictReport report = FsRoot(root_).evict({target, 0, false}, use_the_oldest);
  EXPECT_EQ(report.records, 4u) << "another one is evicted instead";
  EXPECT_EQ(left('1'), (Numbers{0, 3, 4, 5}));
  EXPECT_EQ(left('2'), (Numbers{2, 3, 4, 5}));
}

// An eviction is judged by the prompts that it leaves: a chunk can be loaded only if all earlier chunks
// exist.
class FsReclaimPrompts : public ::testing::TestWithParam<bool> {
 protected:
  static constexpr std::uint32_t kPrompts = 24, kChunks = 16;
  static constexpr std::uint32_t kWriters = 2;  // prompts that are written concurrently

  FsReclaimPrompts() {
    TierUser user(options_for(root_));
    for (std::uint32_t i = 0; i < kPrompts * kChunks; ++i) {
      EXPECT_TRUE(user.write(i));
      number_of_[key_of(i).hex()] = i;
    }
    for (const fs::path& path : records_in(root_)) {
      const std::uint32_t prompt = number(path) / kChunks, chunk = number(path) % kChunks;
      const std::uint32_t at = (prompt / kWriters * kChunks + chunk) * kWriters + prompt % kWriters;
      const timespec time{1'000'000 + static_cast<time_t>(at), 0};
      const timespec times[2] = {time, time};
      EXPECT_EQ(::utimensat(AT_FDCWD, path.c_str(), times, 0), 0);
    }
    const timespec old[2] = {{1'000'000, 0}, {1'000'000, 0}};
    EXPECT_EQ(::utimensat(AT_FDCWD, (root_ + "/" + std::string(64, '1') + "/open").c_str(), old, 0), 0);
  }
  std::uint32_t number(const fs::path& path) const {
    return number_of_.at(layout::parse_record(path.filename().string())->key.hex());
  }
  std::set<std::uint32_t> left() const {
    std::set<std::uint32_t> numbers;
    for (const fs::path& path : records_in(root_)) numbers.insert(number(path));
    return numbers;
  }
  // Counts the records whose prompt misses an earlier record.
  static std::size_t useless(const std::set<std::uint32_t>& numbers) {
    std::size_t usable = 0;
    for (std::uint32_t prompt = 0; prompt < kPrompts; ++prompt) {
      for (std::uint32_t chunk = 0; chunk < kChunks && numbers.contains(prompt * kChunks + chunk); ++chunk)
        ++usable;
    }
    return numbers.size() - usable;
  }
  std::int64_t dead_before() const { return GetParam() ? now_nanos() : 0; }

  TempDir dir_;
  std::string root_ = dir_.path() + "/root";
  std::map<std::string, std::uint32_t> number_of_;
};

TEST_P(FsReclaimPrompts, only_prompts_at_the_edge_of_the_evicted_range_lose_their_beginning) {
  const std::uint64_t target = du(root_) - kPrompts * kChunks / 3 * kRecordBytes;
  (void)FsRoot(root_).evict({target, dead_before(), false}, {});
  const std::set<std::uint32_t> numbers = left();
  EXPECT_EQ(numbers.size(), kPrompts * kChunks * 2 / 3);
  EXPECT_LE(useless(numbers), kWriters * kChunks);
  for (std::uint32_t prompt = kPrompts / 2; prompt < kPrompts; ++prompt)
    EXPECT_TRUE(numbers.contains(prompt * kChunks)) << "a newer prompt was evicted: " << prompt;
}

TEST_P(FsReclaimPrompts, prompts_stay_usable_when_the_eviction_stops_early) {
  const std::uint64_t target = du(root_) - kPrompts * kChunks * 3 / 4 * kRecordBytes;
  // Stops in the middle of prompts: their remaining chunks start with the first one.
  constexpr std::size_t kRemoved = kPrompts * kChunks / 3 + kWriters * kChunks / 2;
  struct Ended {};
  std::size_t removed = 0;
  const auto end_early = [&](std::uint64_t) {
    if (++removed == kRemoved) throw Ended();
  };
  EXPECT_THROW((void)FsRoot(root_).evict({target, dead_before(), false}, end_early), Ended);
  const std::set<std::uint32_t> numbers = left();
  EXPECT_EQ(numbers.size(), kPrompts * kChunks - kRemoved);
  EXPECT_EQ(useless(numbers), 0u);
}

INSTANTIATE_TEST_SUITE_P(all, FsReclaimPrompts, ::testing::Bool(), [](const auto& info) {
  return info.param ? "of_a_dead_namespace" : "of_one_that_lives";
});

TEST_F(FsReclaimTest, a_dry_run_reports_the_same_and_removes_nothing) {
  const std::uint64_t before = du(root_);
  EXPECT_EQ(evict(before - 5 * kRecordBytes + 1, 0, true).records, 5u);
  EXPECT_EQ(evict(before - 5 * kRecordBytes, now_nanos(), true).records, 0u) << "dead namespaces are enough";
  EXPECT_EQ(du(root_), before);
}

TEST_F(FsReclaimTest, dead_namespaces_are_evicted_before_the_oldest_record) {
  TierUser serving(second_);  // keeps the other namespace alive
  const EvictReport report = evict(du(root_) - 2 * kRecordBytes, now_nanos());
  EXPECT_EQ(report.records, 0u);
  EXPECT_EQ(report.dead_namespaces, std::vector<std::string>{std::string(64, '1')});
  EXPECT_EQ(left('2').size(), 6u);
  EXPECT_EQ(left('1').size(), 4u);
  const EvictReport more = evict(du(root_) - 8 * kRecordBytes, now_nanos());
  EXPECT_GE(more.dead_bytes, 4 * kRecordBytes);
  EXPECT_FALSE(fs::exists(root_ + "/" + std::string(64, '1'))) << "an empty namespace is removed";
}

TEST_F(FsReclaimTest, a_recently_used_namespace_is_not_dead) {
  set_used('1', 5, now_nanos());
  (void)evict(du(root_) - 2 * kRecordBytes, now_nanos() - 3600 * kSecond);
  EXPECT_EQ(left('2').size(), 4u) << "dead for hours: it is evicted first, as far as needed";
  EXPECT_EQ(left('1').size(), 6u);
}

TEST_F(FsReclaimTest, records_from_before_a_reset_are_evicted_first) {
  fs::create_directory(root_ + "/" + std::string(64, '1') + "/g2");
  const EvictReport report = evict(du(root_) - kRecordBytes);
  EXPECT_GE(report.dead_bytes, 6 * kRecordBytes);
  EXPECT_EQ(left('1').size(), 0u);
  EXPECT_EQ(left('2').size(), 6u);
}

// Records that cannot be removed because the device fails.
class StuckRecords : public FaultyFileOps {
 public:
  int unlink(int directory, const std::string& path) override {
    return path.ends_with(".rec") ? -EIO : FaultyFileOps::unlink(directory, path);
  }
};

// No process has the namespace open, and another namespace needs the space.
TEST_F(FsReclaimTest, records_from_before_a_reset_are_not_found_when_only_the_newest_epoch_can_be_removed) {
  reset_by_one_of_two();
  StuckRecords ops;
  int error = 0;
  const Fd root = open_fd(ops, AT_FDCWD, root_, kOpenDirectory, 0, &error);
  (void)reclaim_namespace(ops, root.get(), std::string(64, '1'), std::numeric_limits<std::uint64_t>::max(),
                          false, std::atomic<bool>{false}, [](std::uint64_t) {});
  ASSERT_EQ(left('1').size(), 6u);
  EXPECT_FALSE(TierUser(first_).has(0));
}

TEST_F(FsReclaimTest, a_new_server_does_not_find_the_remaining_records_of_a_reset_server) {
  {
    TierUser changed(first_);
    ASSERT_TRUE(changed.tier().reset());
    changed.weights = 1;
    ASSERT_TRUE(changed.write(20));
    ASSERT_TRUE(changed.until([&] { return !fs::exists(root_ + "/" + std::string(64, '1') + "/g1"); }));
  }
  StuckRecords ops;
  int error = 0;
  const Fd root = open_fd(ops, AT_FDCWD, root_, kOpenDirectory, 0, &error);
  (void)reclaim_namespace(ops, root.get(), std::string(64, '1'), std::numeric_limits<std::uint64_t>::max(),
                          false, std::atomic<bool>{false}, [](std::uint64_t) {});
  ASSERT_FALSE(record('1', 20).empty());
  EXPECT_FALSE(TierUser(first_).has(20));
}

// The reclaiming process is stopped while it removes records from before a reset.
TEST_F(FsReclaimTest, a_stopped_reclaim_leaves_the_newest_epoch) {
  reset_by_one_of_two();
  int error = 0;
  const Fd root = open_fd(posix_file_ops(), AT_FDCWD, root_, kOpenDirectory, 0, &error);
  std::atomic<bool> stop{false};
  (void)reclaim_namespace(posix_file_ops(), root.get(), std::string(64, '1'),
                          std::numeric_limits<std::uint64_t>::max(), false, stop,
                          [&](std::uint64_t) { stop.store(true); });
  const Numbers stay = left('1');
  ASSERT_EQ(stay.size(), 5u);
  EXPECT_FALSE(TierUser(first_).has(stay[0]));
}

// One replica was reset and the other was not: both serve.
TEST_F(FsReclaimTest, an_older_epoch_in_use_is_listed_and_evicted_by_age) {
  TierUser old(first_), changed(first_);
  old.wait_for_scan();
  ASSERT_TRUE(changed.tier().reset());
  changed.weights = 1;
  ASSERT_TRUE(changed.write(20));
  FsRoot root(root_);
  std::set<std::uint64_t> epochs;
  std::size_t records = 0;
  FsRoot::Cursor cursor = root.records(std::string(64, '1'));
  while (const auto record = cursor.next()) {
    epochs.insert(record->epoch);
    ++records;
  }
  EXPECT_EQ(epochs, (std::set<std::uint64_t>{1, 2}));
  EXPECT_EQ(records, 7u);
  EXPECT_EQ(root.stat().records, 13u);
  const fs::path damaged = records_in(root_ + "/" + std::string(64, '1') + "/g1")[0];
  fs::resize_file(damaged, fs::file_size(damaged) - 1);
  ASSERT_EQ(root.verify(false, {}).size(), 1u);
  const EvictReport report = evict(du(root_) - 6 * kRecordBytes);
  EXPECT_EQ(report.dead_bytes, 0u);
  EXPECT_EQ(report.records, 6u);
  EXPECT_TRUE(changed.read(20)) << "the newest of all";
}

TEST_F(FsReclaimTest, a_serving_process_continues_and_uses_the_space) {
  TierUser user(first_);
  user.wait_for_scan();
  (void)evict(du(root_) - 6 * kRecordBytes);
  std::size_t hits = 0;
  for (std::uint32_t i = 0; i < 6; ++i) {
    const Status status = user.read(i);
    hits += status.is_ok();
    EXPECT_TRUE(status || status.kind() == StatusKind::kNotFound) << status.to_string();
  }
  EXPECT_EQ(hits, left('1').size());
  EXPECT_EQ(hits, 3u);
  EXPECT_TRUE(user.write(9));
  EXPECT_TRUE(user.read(9));
  EXPECT_TRUE(user.usage_becomes_exact(root_));
}

}  // namespace
}  // namespace kv_offload
