// SPDX-License-Identifier: Apache-2.0
// Other programs change a root in use: they remove, truncate, replace, chmod. The tier detects that by
// itself, logs one line, and continues.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <functional>

#include "backends/fs/store.h"
#include "faulty_file_ops.h"
#include "fixture.h"

namespace kv_offload {
namespace {

using namespace testing;

constexpr std::uint64_t kOutsideBound = std::uint64_t{4} << 20;
constexpr std::uint64_t kOutsidePayload = 65536, kOutsideRecord = kOutsidePayload + 4096;
constexpr std::uint32_t kWorth = kOutsideBound / kOutsideRecord;  // records

class FsOutsideChanges : public ::testing::Test {
 protected:
  std::unique_ptr<FsStore> open() {
    FsTierOptions options = options_for(root_, kOutsideBound);
    options.warn = [this](const std::string& line) { lines_.push_back(line); };
    auto store = std::make_unique<FsStore>(options, ops_, clock_);
    store->start();
    store->maintain();
    return store;
  }
  Status run(FsStore& store, OpKind kind, std::uint32_t number) {
    if (kind == OpKind::kWrite) row_.fill(number);
    TierOp op;
    op.kind = kind;
    op.key = key_of(number);
    op.shards = row_.shards();
    std::uint64_t moved = 0;
    const auto epoch = store.epoch();
    if (!epoch) return Status::error(StatusKind::kIo, "no epoch");
    const Status status =
        kind == OpKind::kWrite ? store.write(op, epoch, &moved) : store.read(op, epoch, &moved);
    EXPECT_TRUE(!status || kind == OpKind::kWrite || row_.holds(number));
    return status;
  }
  Status write(FsStore& store, std::uint32_t number) { return run(store, OpKind::kWrite, number); }
  Status read(FsStore& store, std::uint32_t number) { return run(store, OpKind::kRead, number); }
  void fill(FsStore& store) {
    for (std::uint32_t i = 0; i < 2 * kWorth; ++i) ASSERT_TRUE(write(store, i));
    lines_.clear();
  }
  void ten_seconds(FsStore& store) {
    for (int i = 0; i < 10; ++i) {
      clock_.advance(std::chrono::seconds(1));
      store.maintain();
    }
  }
  static TierStats stats_of(const FsStore& store) {
    TierStats stats;
    store.figures(&stats);
    return stats;
  }
  // Checks the recovery of a tier after a change to its root.
  void recovers(FsStore& store) {
    for (std::uint32_t i = 1000; i < 1005; ++i) {
      const Status status = write(store, i);
      EXPECT_NE(status.kind(), StatusKind::kNoSpace) << status.to_string();
    }
    ten_seconds(store);
    EXPECT_LE(stats_of(store).bytes, du(root_) + kOutsideRecord);
    EXPECT_GE(stats_of(store).bytes + kOutsideRecord, du(root_));
    EXPECT_EQ(lines_.size(), 1u) << (lines_.empty() ? "nothing was logged" : lines_.back());
    for (std::uint32_t i = 2000; i < 2000 + kWorth; ++i) {
      const Status status = write(store, i);
      ASSERT_TRUE(status) << i << ": " << status.to_string();
      ASSERT_LE(du(root_), kOutsideBound);
    }
    EXPECT_GE(du(root_), kOutsideBound * 95 / 100);
    ten_seconds(store);
    EXPECT_EQ(lines_.size(), 1u) << (lines_.empty() ? "nothing was logged" : lines_.back());
    EXPECT_EQ(stats_of(store).chunks, records_in(root_).size());
    EXPECT_TRUE(read(store, 2000 + kWorth - 1));
    store.close();
    const auto second = open();
    EXPECT_TRUE(read(*second, 2000 + kWorth - 1)) << "a second start";
    second->close();
  }
  std::string space() const { return root_ + "/" + std::string(64, '1'); }

  TempDir dir_;
  std::string root_ = dir_.path() + "/root";
  FaultyFileOps ops_;
  FakeClock clock_;
  Row row_{{kOutsidePayload}};
  std::vector<std::string> lines_;
};

TEST_F(FsOutsideChanges, space_of_records_that_others_removed_is_usable_again) {
  const auto store = open();
  fill(*store);
  std::uint64_t removed = 0;
  std::vector<fs::path> records = records_in(root_);
  for (std::size_t i = 0; i < records.size(); i += 2) removed += fs::remove(records[i]) ? kOutsideRecord : 0;
  ASSERT_GT(removed, kOutsideBound / 3);
  // An eviction or a read detects the loss; here both do.
  for (std::uint32_t i = kWorth; i < 2 * kWorth; ++i) (void)read(*store, i);
  recovers(*store);
  EXPECT_GE(stats_of(*store).lost_bytes, removed / 2);
}

TEST_F(FsOutsideChanges, an_eviction_detects_removed_records_too) {
  const auto store = open();
  fill(*store);
  for (const fs::path& path : records_in(root_)) fs::remove(path);
  // Until the root is counted. This must not count as a device failure, or writes would pause.
  const Status status = write(*store, 999);
  EXPECT_EQ(status.kind(), StatusKind::kIo) << status.to_string();
  EXPECT_EQ(status.error_number(), ENOENT);
  recovers(*store);
}

TEST_F(FsOutsideChanges, space_of_truncated_records_is_usable_again) {
  for (const std::uint64_t left : {std::uint64_t{0}, std::uint64_t{8192}}) {
    fs::remove_all(root_);
    const auto store = open();
    fill(*store);
    for (const fs::path& path : records_in(root_)) fs::resize_file(path, left);
    std::uint32_t held = 2 * kWorth - 1;
    EXPECT_EQ(read(*store, held).kind(), StatusKind::kCorrupt);
    recovers(*store);
  }
}

struct Change {
  const char* name;
  std::function<void(const std::string& root, const std::string& space)> make;
};

class FsOutsideChange : public FsOutsideChanges, public ::testing::WithParamInterface<Change> {};

TEST_P(FsOutsideChange, an_outside_change_is_repaired_and_reported_once) {
  const auto store = open();
  fill(*store);
  GetParam().make(root_, space());
  recovers(*store);
  EXPECT_GE(stats_of(*store).rebuilds, 1u);
  ASSERT_FALSE(lines_.empty());
  const bool is_ledger = std::string(GetParam().name).starts_with("the_ledger");
  EXPECT_TRUE(!is_ledger || lines_.front().find("damaged ledger") != std::string::npos) << lines_.front();
}

void remove_all_in(const std::string& directory) {
  for (const auto& entry : fs::directory_iterator(directory)) fs::remove_all(entry.path());
}
// Restores a snapshot: other files under the same names.
void restore(const std::string& root) {
  const std::string copy = root + ".copy";
  fs::copy(root, copy, fs::copy_options::recursive);
  remove_all_in(root);
  for (const auto& entry : fs::directory_iterator(copy))
    fs::copy(entry.path(), root + "/" + entry.path().filename().string(), fs::copy_options::recursive);
  fs::remove_all(copy);
  ::chmod(root.c_str(), 0700);
  walk(root, [](const fs::path& path) { ::chmod(path.c_str(), fs::is_directory(path) ? 0700 : 0600); });
}

INSTANTIATE_TEST_SUITE_P(all, FsOutsideChange,
                         ::testing::Values(Change{"everything_in_it",
                                                  [](const std::string& root, const std::string&) {
                                                    remove_all_in(root);
                                                  }},
                                           Change{"the_root",
                                                  [](const std::string& root, const std::string&) {
                                                    fs::remove_all(root);
                                                  }},
                                           Change{"moved_away",
                                                  [](const std::string& root, const std::string&) {
                                                    fs::rename(root, root + ".old");
                                                  }},
                                           Change{"the_namespace",
                                                  [](const std::string&, const std::string& space) {
                                                    fs::remove_all(space);
                                                  }},
                                           Change{"the_epoch",
                                                  [](const std::string&, const std::string& space) {
                                                    fs::remove_all(space + "/g1");
                                                  }},
                                           Change{"the_ledger",
                                                  [](const std::string& root, const std::string&) {
                                                    fs::remove(root + "/ledger");
                                                  }},
                                           Change{"the_ledger_cut",
                                                  [](const std::string& root, const std::string&) {
                                                    fs::resize_file(root + "/ledger", 0);
                                                  }},
                                           Change{"the_format",
                                                  [](const std::string& root, const std::string&) {
                                                    fs::remove(root + "/kv_offload.json");
                                                  }},
                                           Change{"the_format_cut",
                                                  [](const std::string& root, const std::string&) {
                                                    fs::resize_file(root + "/kv_offload.json", 5);
                                                  }},
                                           Change{"the_description",
                                                  [](const std::string&, const std::string& space) {
                                                    fs::remove(space + "/namespace.json");
                                                  }},
                                           Change{"the_open_lock",
                                                  [](const std::string&, const std::string& space) {
                                                    fs::remove(space + "/open");
                                                  }},
                                           Change{"all_files_but_records",
                                                  [](const std::string& root, const std::string& space) {
                                                    for (const std::string& path :
                                                         {root + "/ledger", root + "/kv_offload.json",
                                                          space + "/open", space + "/namespace.json",
                                                          space + "/g1.open"})
                                                      fs::remove(path);
                                                  }},
                                           Change{"a_snapshot", [](const std::string& root,
                                                                   const std::string&) { restore(root); }}),
                         [](const auto& info) { return std::string(info.param.name); });

// A read-only root is an operator's decision: the tier reports it once, and writes again when it is undone.
TEST_F(FsOutsideChanges, a_changed_mode_is_reported_once_with_a_remedy) {
  const auto store = open();
  fill(*store);
  ASSERT_EQ(::chmod((space() + "/g1").c_str(), 0500), 0);
  ten_seconds(*store);
  ASSERT_EQ(lines_.size(), 1u);
  EXPECT_NE(lines_[0].find("chmod 700"), std::string::npos) << lines_[0];
  ASSERT_EQ(::chmod((space() + "/g1").c_str(), 0700), 0);
  ten_seconds(*store);
  EXPECT_EQ(lines_.size(), 1u);
  EXPECT_TRUE(write(*store, 5000));
  store->close();
}

TEST_F(FsOutsideChanges, the_mark_of_an_epoch_in_use_is_created_again) {
  const auto store = open();
  ASSERT_TRUE(write(*store, 1));
  fs::remove(space() + "/g1.open");
  ten_seconds(*store);
  ASSERT_TRUE(fs::exists(space() + "/g1.open"));
  int error = 0;
  const Fd directory = open_fd(posix_file_ops(), AT_FDCWD, space(), O_RDONLY | O_DIRECTORY, 0, &error);
  EXPECT_TRUE(epoch_is_open(posix_file_ops(), directory.get(), 1)) << "others would reclaim it";
  store->close();
}

// Two servers of one namespace continue with one directory of records.
TEST_F(FsOutsideChanges, servers_that_shared_records_share_them_again) {
  const auto one = open(), other = open();
  ASSERT_TRUE(write(*one, 1));
  remove_all_in(root_);
  for (int i = 0; i < 10; ++i) {
    clock_.advance(std::chrono::seconds(1));
    one->maintain();
    other->maintain();
  }
  ASSERT_TRUE(write(*one, 2));
  clock_.advance(std::chrono::seconds(1));
  other->maintain();
  EXPECT_TRUE(read(*other, 2));
  EXPECT_FALSE(stats_of(*one).diverged || stats_of(*other).diverged);
  for (FsStore* store : {one.get(), other.get()}) store->close();
}

// While a neighbour evicts, missing records are expected: they must not trigger repeated counts.
TEST_F(FsOutsideChanges, evictions_by_a_neighbour_are_not_reported) {
  const auto one = open(), other = open();
  fill(*one);
  for (int i = 0; i < 10; ++i) {
    for (std::uint32_t n = 0; n < 20; ++n) (void)write(*other, 3000 + 20 * static_cast<std::uint32_t>(i) + n);
    for (std::uint32_t n = kWorth; n < 2 * kWorth; ++n) (void)read(*one, n);
    clock_.advance(std::chrono::seconds(1));
    one->maintain();
    other->maintain();
  }
  EXPECT_TRUE(lines_.empty()) << lines_.back();
  EXPECT_EQ(stats_of(*one).lost_bytes + stats_of(*other).lost_bytes, 0u);
  for (FsStore* store : {one.get(), other.get()}) store->close();
}

}  // namespace
}  // namespace kv_offload
