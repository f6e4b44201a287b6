// SPDX-License-Identifier: Apache-2.0
// A full root writes into the files of a namespace that no server has open. That must be invisible to a
// server of that namespace that starts meanwhile, to the ledger, and to a process that has another name for
// the file.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <set>
#include <thread>

#include "backends/fs/layout.h"
#include "backends/fs/store.h"
#include "faulty_file_ops.h"
#include "fixture.h"

namespace kv_offload {
namespace {

using namespace testing;

constexpr std::uint64_t kDeadBound = std::uint64_t{2} << 20;
constexpr std::uint64_t kDeadPayload = 4096;
constexpr std::uint8_t kDeadNamespace = 0x22;

// A store without threads.
class HandStore {
 public:
  HandStore(const FsTierOptions& options, FileOps& ops, const Clock& clock) : store_(options, ops, clock) {
    store_.start();
    store_.maintain();
  }
  ~HandStore() { store_.close(); }
  FsStore& store() { return store_; }
  Status write(std::uint32_t number, std::uint64_t payload = kDeadPayload) {
    return run(OpKind::kWrite, number, payload);
  }
  // A returned ok also means that the bytes are right.
  Status read(std::uint32_t number) { return run(OpKind::kRead, number, kDeadPayload); }
  TierStats stats() const {
    TierStats stats;
    store_.figures(&stats);
    return stats;
  }

 private:
  Status run(OpKind kind, std::uint32_t number, std::uint64_t payload) {
    Row row({payload});
    TierOp op;
    op.kind = kind;
    op.key = key_of(number);
    op.shards = row.shards();
    if (kind == OpKind::kWrite) row.fill(number);
    std::uint64_t moved = 0;
    const Status status = kind == OpKind::kWrite ? store_.write(op, store_.epoch(), &moved)
                                                 : store_.read(op, store_.epoch(), &moved);
    EXPECT_TRUE(!status || row.holds(number)) << "wrong bytes for record " << number;
    return status;
  }
  FsStore store_;
};

class FsDeadReuse : public ::testing::Test {
 protected:
  // Keys of few leaf directories, so that these exist after a few writes.
  std::uint32_t next_number() {
    while (layout::leaf_of(key_of(next_)) >= 4) ++next_;
    return next_++;
  }
  FsTierOptions options_of(std::uint8_t namespace_byte) const {
    FsTierOptions options = options_for(root_, kDeadBound);
    options.namespace_id.fill(namespace_byte);
    return options;
  }
  // Fills the root with records of a server that then ends, the least recently used one first.
  void SetUp() override {
    HandStore dead(options_of(kDeadNamespace), posix_file_ops(), clock_);
    while (dead.stats().evicted_bytes == 0) {
      dead_.push_back(next_number());
      ASSERT_TRUE(dead.write(dead_.back()));
    }
    const std::map<std::string, fs::path> present = paths_by_key();
    std::erase_if(dead_, [&](std::uint32_t number) { return !present.contains(key_of(number).hex()); });
    std::int64_t nanos = 1'000'000'000;
    for (const std::uint32_t number : dead_)
      ASSERT_EQ(posix_file_ops().set_mtime(AT_FDCWD, present.at(key_of(number).hex()), ++nanos), 0);
    ASSERT_GT(dead_.size(), 128u) << "a pass has several records";
  }
  // Starts a server of another namespace and writes until its leaf directories exist.
  std::unique_ptr<HandStore> start(FsTierOptions options) {
    auto server = std::make_unique<HandStore>(options, ops_, clock_);
    for (int i = 0; i < 40; ++i) EXPECT_TRUE(server->write(next_number()));
    return server;
  }
  std::unique_ptr<HandStore> start() { return start(options_of(0x11)); }
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
  bool exists(std::uint32_t number) const { return !path_of(root_, number).empty(); }
  std::map<std::string, fs::path> paths_by_key() const {
    std::map<std::string, fs::path> paths;
    for (const fs::path& path : records_in(root_))
      paths[layout::parse_record(path.filename().string())->key.hex()] = path;
    return paths;
  }
  std::size_t dead_records() const {
    const auto present = paths_by_key();
    return static_cast<std::size_t>(std::count_if(dead_.begin(), dead_.end(), [&](std::uint32_t number) {
      return present.contains(key_of(number).hex());
    }));
  }
  // True if a dead record is missing although an older one exists.
  bool is_in_a_pass() const {
    const auto present = paths_by_key();
    const auto is_present = [&](std::uint32_t number) { return present.contains(key_of(number).hex()); };
    return !std::all_of(std::find_if(dead_.begin(), dead_.end(), is_present), dead_.end(), is_present);
  }
  // Counts the writes into existing files. The existing files are held open, so that no inode number is
  // reused.
  int writes_into_files_of_before(HandStore& server, int writes, std::uint64_t payload = kDeadPayload) {
    std::vector<std::ifstream> held;
    for (const fs::path& path : records_in(root_)) held.emplace_back(path);
    const std::set<std::uint64_t> before = inodes();
    int count = 0;
    for (int i = 0; i < writes; ++i) {
      const std::uint32_t number = next_number();
      EXPECT_TRUE(server.write(number, payload));
      count += before.contains(inode_of(path_of(root_, number)));
    }
    return count;
  }

  TempDir dir_;
  std::string root_ = dir_.path() + "/root";
  FaultyFileOps ops_;
  FakeClock clock_;
  std::vector<std::uint32_t> dead_;
  std::uint32_t next_ = 0;
};

TEST_F(FsDeadReuse, a_full_root_writes_into_the_files_of_dead_records) {
  const auto server = start();
  const std::uint32_t first = next_;
  EXPECT_EQ(writes_into_files_of_before(*server, 50), 50);
  EXPECT_TRUE(temporaries_in(root_).empty());
  EXPECT_LE(du(root_), kDeadBound);
  EXPECT_EQ(server->stats().bytes, du(root_));
  for (std::uint32_t number = first; number < next_; ++number) {
    if (layout::leaf_of(key_of(number)) >= 4) continue;
    EXPECT_TRUE(server->read(number)) << number;
  }
}

TEST_F(FsDeadReuse, only_a_file_of_the_same_size_is_reused) {
  const auto server = start();
  EXPECT_EQ(writes_into_files_of_before(*server, 10, 2 * kDeadPayload), 0);
  EXPECT_TRUE(temporaries_in(root_).empty());
  EXPECT_EQ(server->stats().bytes, du(root_));
}

TEST_F(FsDeadReuse, with_fsync_no_file_is_reused) {
  for (const FsyncMode mode : {FsyncMode::kData, FsyncMode::kFull}) {
    FsTierOptions options = options_of(mode == FsyncMode::kData ? 0x11 : 0x33);
    options.fsync = mode;
    const auto server = start(options);
    EXPECT_EQ(writes_into_files_of_before(*server, 5), 0);
  }
}

// After a power failure, a file may have its previous bytes under its new name. A record of another namespace
// is then detected, but one of an earlier epoch looks like a record of today.
TEST_F(FsDeadReuse, the_files_of_an_earlier_epoch_are_not_reused) {
  const auto changed = std::make_unique<HandStore>(options_of(kDeadNamespace), ops_, clock_);
  changed->store().forget(0);
  ASSERT_TRUE(changed->store().begin_epoch());
  for (int i = 0; i < 40; ++i) ASSERT_TRUE(changed->write(next_number()));
  const std::size_t before = dead_records();
  EXPECT_EQ(writes_into_files_of_before(*changed, 20), 0);
  EXPECT_LT(dead_records(), before) << "the control";
}

TEST_F(FsDeadReuse, a_hard_link_copy_keeps_its_bytes) {
  const std::string copy = dir_.path() + "/copy";
  fs::create_directory(copy);
  std::map<std::string, std::string> bytes;
  const auto content = [](const fs::path& path) {
    std::ifstream file(path, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  for (const fs::path& path : records_in(root_)) {
    fs::create_hard_link(path, copy + "/" + path.filename().string());
    bytes[path.filename().string()] = content(path);
  }
  const auto server = start();
  EXPECT_EQ(writes_into_files_of_before(*server, 20), 0);
  EXPECT_TRUE(temporaries_in(root_).empty());
  for (const auto& [name, was] : bytes) EXPECT_EQ(content(copy + "/" + name), was) << name;
}

TEST_F(FsDeadReuse, a_file_of_another_user_is_not_reused) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can give files to another user";
  const auto server = start();
  for (const std::uint32_t number : dead_) {
    const fs::path path = path_of(root_, number);
    if (path.empty()) continue;
    ASSERT_EQ(::chown(path.c_str(), 65534, 65534), 0);
  }
  EXPECT_EQ(writes_into_files_of_before(*server, 10), 0);
}

// An unsuitable file that cannot be removed either.
TEST_F(FsDeadReuse, an_unremovable_file_gets_its_name_back) {
  const auto server = start();
  for (const fs::path& path : records_in(root_))
    fs::create_hard_link(path, dir_.path() + "/" + path.filename().string());
  const std::size_t before = dead_records();
  ops_.fail_all(Call::kUnlink, EACCES);
  EXPECT_FALSE(server->write(next_number()));
  ops_.clear();
  EXPECT_EQ(dead_records(), before);
  EXPECT_TRUE(temporaries_in(root_).empty());
  EXPECT_TRUE(server->write(next_number()));
  EXPECT_EQ(server->stats().bytes, du(root_));
}

// The server of the namespace starts again while its records are removed, and has one of them open.
TEST_F(FsDeadReuse, a_server_that_starts_meanwhile_gets_a_miss_and_not_damage) {
  const auto server = start();
  // A pass removes its oldest record last. Until then, newer ones are missing.
  while (!is_in_a_pass()) ASSERT_TRUE(server->write(next_number()));
  FaultyFileOps slow;
  HandStore reader(options_of(kDeadNamespace), slow, clock_);
  const std::uint32_t oldest =
      *std::find_if(dead_.begin(), dead_.end(), [&](auto number) { return exists(number); });
  const std::uint64_t inode = inode_of(path_of(root_, oldest));
  slow.block(Call::kPreadv, 2 * kPageBytes);
  Status status;
  std::thread read([&] { status = reader.read(oldest); });
  slow.wait_for_blocked_in(Call::kPreadv);
  std::uint32_t last = 0;
  for (int i = 0; i < 100 && exists(oldest); ++i) EXPECT_TRUE(server->write(last = next_number()));
  EXPECT_EQ(inode_of(path_of(root_, last)), inode) << "the control: it was written into the open file";
  slow.release();
  read.join();
  EXPECT_EQ(status.kind(), StatusKind::kNotFound) << status.to_string();
  std::vector<TierRemoval> removals;
  reader.store().catalog()->take_removals(&removals);
  ASSERT_EQ(removals.size(), 1u);
  EXPECT_EQ(removals[0].reason, TierRemoval::Reason::kVanished);
  EXPECT_TRUE(server->read(last)) << "the new record was removed";
}

// Fails the n-th call of a write into a file of a dead record, for every n.
class FsDeadReuseEveryStep : public FsDeadReuse, public ::testing::WithParamInterface<int> {};

TEST_P(FsDeadReuseEveryStep, a_write_that_fails_at_any_call_leaves_nothing) {
  const auto server = start();
  int steps = 0;
  {
    const OneFault none(ops_, OneFault::kNever);
    ASSERT_TRUE(server->write(next_number()));
    steps = none.calls();
  }
  ASSERT_GT(steps, 10);
  int failed = 0;
  // Writes on a full disk evict more, so only every fourth call fails: dead records last until the end.
  const int stride = GetParam() == ENOSPC ? 4 : 1;
  for (int step = 0; step < steps; step += stride) {
    const OneFault fault(ops_, step, GetParam());
    const std::uint32_t number = next_number();
    const Status status = server->write(number);
    ops_.clear();
    const std::string where = "step " + std::to_string(step) + " " + fault.call() + ": " + status.to_string();
    failed += !status;
    EXPECT_TRUE(temporaries_in(root_).empty()) << where;
    EXPECT_EQ(exists(number), status.is_ok()) << where;
    EXPECT_TRUE(!status || server->read(number)) << where;
    ASSERT_TRUE(server->write(next_number())) << where;  // the next write settles open accounting
    EXPECT_EQ(server->stats().bytes, du(root_)) << where;
    EXPECT_LE(du(root_), kDeadBound) << where;
  }
  if (GetParam() == ENOSPC) {
    EXPECT_EQ(failed, 0) << "a record is evicted, and the write repeated";
  } else {
    EXPECT_GT(failed, 3);
  }
  EXPECT_GT(dead_records(), 0u) << "the control";
}

INSTANTIATE_TEST_SUITE_P(errors, FsDeadReuseEveryStep, ::testing::ValuesIn(testing::write_errors()));

}  // namespace
}  // namespace kv_offload
