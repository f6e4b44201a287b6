// SPDX-License-Identifier: Apache-2.0
// A full root writes into the files of evicted records. That must be invisible to a reader that has the file
// open, to the ledger, and to a process that has another name for the file.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <set>
#include <thread>

#include "backends/fs/root.h"
#include "backends/fs/space_ledger.h"
#include "backends/fs/walk.h"
#include "faulty_file_ops.h"
#include "fixture.h"

namespace kv_offload {
namespace {

using namespace testing;

constexpr std::uint64_t kReuseBound = std::uint64_t{2} << 20;
const ShardSizes kReuseShards = {65536};
const ShardSizes kOtherShards = {40000};
constexpr std::uint32_t kFirst = 1000000;

class FsTierReuse : public ::testing::Test {
 protected:
  FsTierReuse() {
    options_ = options_for(root_, kReuseBound);
    options_.file_ops = &ops_;
    options_.clock = &clock_;
  }
  void fill(TierUser& user, const ShardSizes& shards = kReuseShards) {
    user.wait_for_scan();
    next_ = kFirst;
    while (user.removed(TierRemoval::Reason::kEvicted) < 3) ASSERT_TRUE(user.write(next_++, shards));
  }
  void recount(TierUser& user) {
    const Fd root(posix_file_ops(), ::open(root_.c_str(), O_RDONLY | O_DIRECTORY));
    SpaceLedger space(posix_file_ops(), root.get(), root_);
    const SpaceLedger::Finished before = space.finished();
    space.remove(1, before + 1);  // of another count: the total is in doubt
    EXPECT_TRUE(user.until([&] {
      clock_.advance(std::chrono::seconds(1));
      user.poll();
      return SpaceLedger(posix_file_ops(), root.get(), root_).finished() > before;
    }));
  }
  std::set<std::uint64_t> inodes() const {
    std::set<std::uint64_t> all;
    for (const fs::path& path : records_in(root_)) all.insert(inode_of(path));
    return all;
  }
  static std::uint64_t inode_of(const fs::path& path) {
    struct ::stat info {};
    EXPECT_EQ(::lstat(path.c_str(), &info), 0) << path;
    return info.st_ino;
  }
  // True if the next record is written into an existing file. The existing files are held open, so that no
  // inode number is reused.
  bool next_is_in_a_file_of_before(TierUser& user, const ShardSizes& shards = kReuseShards) {
    std::vector<std::ifstream> held;
    for (const fs::path& path : records_in(root_)) held.emplace_back(path);
    const std::set<std::uint64_t> before = inodes();
    const std::size_t evicted = user.removed(TierRemoval::Reason::kEvicted);
    EXPECT_TRUE(user.write(next_, shards));
    EXPECT_GT(user.removed(TierRemoval::Reason::kEvicted), evicted);
    EXPECT_TRUE(user.read(next_, shards));
    return before.contains(inode_of(path_of(root_, next_++)));
  }

  TempDir dir_;
  std::string root_ = dir_.path() + "/root";
  FaultyFileOps ops_;
  FakeClock clock_;
  FsTierOptions options_;
  std::uint32_t next_ = 0;
};

TEST_F(FsTierReuse, a_full_root_writes_into_the_files_of_evicted_records) {
  TierUser user(options_);
  fill(user);
  for (int i = 0; i < 100; ++i) {
    EXPECT_TRUE(next_is_in_a_file_of_before(user)) << i;
    EXPECT_TRUE(temporaries_in(root_).empty());
    ASSERT_LE(du(root_), kReuseBound);
    ASSERT_EQ(user.tier().stats().bytes, du(root_));
  }
  // The known records are the stored ones, and all of them are right.
  std::size_t found = 0;
  for (std::uint32_t i = kFirst; i < next_; ++i) {
    if (!user.has(i)) continue;
    ++found;
    EXPECT_TRUE(user.read(i, kReuseShards)) << i;
  }
  EXPECT_EQ(found, records_in(root_).size());
  EXPECT_EQ(user.removed(TierRemoval::Reason::kVanished) + user.removed(TierRemoval::Reason::kCorrupt), 0u);
}

TEST_F(FsTierReuse, concurrent_writers_stay_below_the_bound) {
  options_.n_write_threads = 4;
  TierUser user(options_);
  fill(user);
  for (int round = 0; round < 60; ++round) {
    std::vector<OpId> writes;
    for (int i = 0; i < 20; ++i) {
      writes.push_back(
          user.start(OpKind::kWrite, next_++, (round + i) % 3 == 0 ? kOtherShards : kReuseShards));
    }
    for (const OpId write : writes) {
      const Status status = user.finish(write).status;
      EXPECT_TRUE(status) << status.to_string();
    }
    ASSERT_LE(du(root_), kReuseBound);
    ASSERT_EQ(user.tier().stats().bytes, du(root_));
  }
}

// Freed space belongs to the process that freed it: another process that asks at every moment gets none of
// it. (The other one scanned an empty root and its clock does not advance, so it never learns of records that
// it could evict.)
TEST_F(FsTierReuse, space_that_one_server_frees_is_not_taken_by_another) {
  FsTierOptions others = options_for(root_, kReuseBound);
  others.clock = &clock_;
  TierUser user(options_), other(others);
  other.wait_for_scan();
  fill(user, kOtherShards);
  std::uint32_t asked = 0;
  bool ledger_open = false, made = false;  // the ledger is locked and unlocked until there is space
  ops_.set_rule([&](Call call) {
    made = made || call == Call::kOpen;
    if (call != Call::kFlock || made) return 0;
    ledger_open = !ledger_open;
    if (!ledger_open) return 0;
    EXPECT_FALSE(other.write(kFirst / 2 + asked++, kOtherShards));
    return 0;
  });
  const Status status = user.write(next_, kReuseShards);
  ops_.clear();
  EXPECT_TRUE(status) << status.to_string();
  EXPECT_GT(asked, 0u);
}

// The process that created it may still have it open for writing.
TEST_F(FsTierReuse, a_file_of_another_user_is_not_reused) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can give files to another user";
  TierUser user(options_);
  fill(user);
  for (const fs::path& path : records_in(root_)) ASSERT_EQ(::chown(path.c_str(), 65534, 65534), 0);
  EXPECT_FALSE(next_is_in_a_file_of_before(user));
}

TEST_F(FsTierReuse, directories_in_place_of_records_stay) {
  TierUser user(options_);
  fill(user);
  std::vector<fs::path> paths = records_in(root_);
  const std::size_t all = paths.size();
  paths.resize(all / 2);
  for (const fs::path& path : paths) {
    fs::remove(path);
    fs::create_directory(path);
  }
  while (user.removed(TierRemoval::Reason::kEvicted) < all) ASSERT_TRUE(user.write(next_++, kReuseShards));
  for (const fs::path& path : paths) EXPECT_TRUE(fs::is_directory(path)) << path;
  EXPECT_TRUE(temporaries_in(root_).empty());
}

TEST_F(FsTierReuse, a_file_that_another_process_extended_is_not_reused) {
  TierUser user(options_);
  fill(user);
  const std::vector<fs::path> longer = records_in(root_);
  for (const fs::path& path : longer) fs::resize_file(path, fs::file_size(path) + 1);
  while (user.removed(TierRemoval::Reason::kEvicted) < longer.size()) {
    ASSERT_TRUE(user.write(next_, kReuseShards));
    EXPECT_TRUE(user.read(next_++, kReuseShards));
  }
}

TEST_F(FsTierReuse, only_a_file_of_the_same_size_is_reused) {
  TierUser user(options_);
  fill(user, kOtherShards);
  EXPECT_FALSE(next_is_in_a_file_of_before(user, kReuseShards));
  EXPECT_EQ(user.tier().stats().bytes, du(root_));
}

TEST_F(FsTierReuse, with_fsync_no_bytes_of_a_record_that_may_return_are_overwritten) {
  for (const FsyncMode mode : {FsyncMode::kData, FsyncMode::kFull}) {
    options_.fsync = mode;
    options_.root_dir = root_ = dir_.path() + "/root" + std::to_string(static_cast<int>(mode));
    TierUser user(options_);
    fill(user);
    EXPECT_FALSE(next_is_in_a_file_of_before(user));
  }
}

TEST_F(FsTierReuse, a_hard_link_copy_keeps_its_bytes) {
  TierUser user(options_);
  fill(user);
  const std::string copy = dir_.path() + "/copy";
  fs::create_directory(copy);
  std::map<std::string, std::string> bytes;
  const auto content = [](const fs::path& path) {
    std::ifstream file(path, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  for (const fs::path& path : records_in(root_)) {
    fs::create_hard_link(path, copy / path.filename());
    bytes[path.filename().string()] = content(path);
  }
  while (user.removed(TierRemoval::Reason::kEvicted) < bytes.size() / 2)
    ASSERT_TRUE(user.write(next_++, kReuseShards));
  for (const auto& [name, was] : bytes) EXPECT_EQ(content(copy + "/" + name), was) << name;
}

// Like a reader in another process that has the file open while another record is written into it.
TEST_F(FsTierReuse, a_reader_with_the_file_open_gets_a_miss_and_not_damage) {
  TierUser user(options_);
  fill(user);
  FaultyFileOps slow;
  FsTierOptions options = options_;
  options.file_ops = &slow;
  TierUser reader(options);
  reader.wait_for_scan();
  std::uint32_t oldest = kFirst;
  while (!user.has(oldest)) ++oldest;
  ASSERT_TRUE(reader.has(oldest));
  slow.block(Call::kPreadv, 2 * kPageBytes);
  const OpId read = reader.start(OpKind::kRead, oldest, kReuseShards);
  slow.wait_for_blocked_in(Call::kPreadv);
  EXPECT_TRUE(next_is_in_a_file_of_before(user));
  ASSERT_FALSE(user.has(oldest));
  slow.release();
  const Status status = reader.finish(read).status;
  EXPECT_EQ(status.kind(), StatusKind::kNotFound) << status.to_string();
  EXPECT_EQ(reader.removed(TierRemoval::Reason::kVanished), 1u);
  EXPECT_EQ(reader.removed(TierRemoval::Reason::kCorrupt), 0u);
  EXPECT_TRUE(user.read(next_ - 1, kReuseShards)) << "the new record was removed";
}

TEST_F(FsTierReuse, verify_alongside_a_server_finds_no_damage) {
  TierUser user(options_);
  fill(user);
  std::atomic<bool> done{false};
  std::vector<DamagedRecord> damaged;
  std::thread verifier([&] {
    while (!done) {
      for (const DamagedRecord& record : FsRoot(root_).verify(true, {})) damaged.push_back(record);
    }
  });
  for (int i = 0; i < 1000; ++i) EXPECT_TRUE(user.write(next_++, kReuseShards));
  done = true;
  verifier.join();
  EXPECT_TRUE(damaged.empty()) << damaged.front().path << ": " << damaged.front().message;
}

TEST_F(FsTierReuse, a_count_during_a_reuse_is_exact) {
  options_.op_timeout = std::chrono::hours(24 * 365);  // the clock moves while the write is blocked
  TierUser user(options_);
  fill(user);
  ops_.block(Call::kPwritev, 2 * kPageBytes);
  const OpId write = user.start(OpKind::kWrite, next_, kReuseShards);
  ops_.wait_for_blocked_in(Call::kPwritev);
  EXPECT_EQ(temporaries_in(root_).size(), 1u);
  recount(user);
  ASSERT_EQ(temporaries_in(root_).size(), 1u);
  EXPECT_FALSE(sweep_temporary(posix_file_ops(), AT_FDCWD, temporaries_in(root_)[0])) << "it is in use";
  ops_.release();
  EXPECT_TRUE(user.finish(write).status);
  EXPECT_TRUE(user.read(next_, kReuseShards));
  EXPECT_GE(user.tier().stats().bytes, du(root_)) << "a directory created for it may count twice";
  EXPECT_LE(user.tier().stats().bytes, du(root_) + kPageBytes);
  // The previous count lasted as long as the clock moved meanwhile, and is followed by a pause of twenty
  // times that duration.
  Nanos step{std::chrono::seconds(1)};
  EXPECT_TRUE(user.until([&] {
    clock_.advance(step);
    step = std::min<Nanos>(step + step / 8, std::chrono::minutes(10));
    user.poll();
    return user.tier().stats().bytes == du(root_);
  }));
}

// Fails the n-th call of a write into the file of an evicted record, for every n.
class FsTierReuseEveryStep : public FsTierReuse, public ::testing::WithParamInterface<int> {};

TEST_P(FsTierReuseEveryStep, a_write_that_fails_at_any_call_leaves_nothing) {
  TierUser user(options_);
  fill(user);
  // Writes until no directory is created any more: then each write reuses one file and evicts nothing else.
  const fs::path epoch = root_ + "/" + std::string(64, '1') + "/g1";
  while (std::distance(fs::directory_iterator(epoch), {}) < std::ptrdiff_t{layout::kLeaves})
    ASSERT_TRUE(user.write(next_++, kReuseShards));
  ASSERT_TRUE(user.write(next_++, kReuseShards));
  int steps = 0;
  {
    const OneFault none(ops_, OneFault::kNever);
    ASSERT_TRUE(user.write(next_++, kReuseShards));
    steps = none.calls();
  }
  ASSERT_GT(steps, 10);
  int failed = 0;
  for (int step = 0; step < steps; ++step) {
    const OneFault fault(ops_, step, GetParam());
    const std::uint32_t number = next_++;
    const Status status = user.write(number, kReuseShards);
    ops_.clear();
    const std::string where = "step " + std::to_string(step) + " " + fault.call() + ": " + status.to_string();
    failed += !status;
    EXPECT_TRUE(temporaries_in(root_).empty()) << where;
    EXPECT_EQ(user.has(number), status.is_ok()) << where;
    EXPECT_EQ(!path_of(root_, number).empty(), status.is_ok()) << where;
    EXPECT_TRUE(!status || user.read(number, kReuseShards)) << where;
    ASSERT_TRUE(user.write(next_++, kReuseShards)) << where;  // the next write settles open accounting
    EXPECT_EQ(user.tier().stats().bytes, du(root_)) << where;
    EXPECT_EQ(user.tier().stats().chunks, records_in(root_).size()) << where;
    EXPECT_LE(du(root_), kReuseBound) << where;
  }
  if (GetParam() == ENOSPC) {
    EXPECT_EQ(failed, 0) << "a record is evicted, and the write repeated";
  } else {
    EXPECT_GT(failed, 3);
  }
}

INSTANTIATE_TEST_SUITE_P(errors, FsTierReuseEveryStep, ::testing::ValuesIn(testing::write_errors()));

}  // namespace
}  // namespace kv_offload
