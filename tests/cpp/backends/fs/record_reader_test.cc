// SPDX-License-Identifier: Apache-2.0
// A read that ends with an exception, and the removal of a damaged record.
#include <fcntl.h>
#include <gtest/gtest.h>

#include <iterator>
#include <new>

#include "backends/fs/store.h"
#include "faulty_file_ops.h"
#include "fixture.h"

namespace kv_offload {
namespace {

using namespace testing;

TEST(RecordReaderTest, a_read_that_throws_keeps_no_record_from_eviction) {
  const TempDir dir;
  const std::string root = dir.path() + "/root";
  FaultyFileOps ops;
  FakeClock clock;
  FsStore store(options_for(root, std::uint64_t{1} << 20), ops, clock);
  Row row({16384});
  std::uint64_t moved = 0;
  TierOp op;
  op.shards = row.shards();
  const auto write = [&](std::uint32_t number) {
    op.kind = OpKind::kWrite;
    op.key = key_of(number);
    return store.write(op, store.epoch(), &moved);
  };
  ASSERT_TRUE(write(1));
  ops.set_rule([](Call call) -> int {
    if (call == Call::kPreadv) throw std::bad_alloc();
    return 0;
  });
  op.kind = OpKind::kRead;
  EXPECT_THROW((void)store.read(op, store.epoch(), &moved), std::bad_alloc);
  ops.clear();
  for (std::uint32_t i = 2; i < 200; ++i) ASSERT_TRUE(write(i));
  EXPECT_TRUE(path_of(root, 1).empty()) << "the least recently used of all";
  store.close();
}

// As soon as the file of a damaged record is closed, another process has replaced it by `newer`, which gets
// the inode number of the old file. (ext4 reuses the numbers of removed files at once.)
class ReusedInode : public FaultyFileOps {
 public:
  ReusedInode(fs::path path, std::string newer) : path_(std::move(path)), newer_(std::move(newer)) {
    old_ = inode_of(path_);
  }
  void close(int fd) override {
    FileInfo info;
    const bool ends = posix_file_ops().fstat(fd, &info) == 0 && info.inode == old_ && new_ == 0;
    if (ends) {
      std::ofstream(path_.string() + "-new", std::ios::binary) << newer_;
      fs::rename(path_.string() + "-new", path_);
      new_ = inode_of(path_);
    }
    FaultyFileOps::close(fd);
  }
  int fstat(int fd, FileInfo* info) override { return shown(FaultyFileOps::fstat(fd, info), info); }
  int stat(int directory, const std::string& path, FileInfo* info) override {
    return shown(FaultyFileOps::stat(directory, path, info), info);
  }
  bool has_replaced() const { return new_ != 0; }

 private:
  static std::uint64_t inode_of(const fs::path& path) {
    FileInfo info;
    EXPECT_EQ(posix_file_ops().stat(AT_FDCWD, path.string(), &info), 0);
    return info.inode;
  }
  int shown(int rc, FileInfo* info) const {
    if (rc == 0 && new_ != 0 && info->inode == new_) info->inode = old_;
    return rc;
  }
  const fs::path path_;
  const std::string newer_;
  std::uint64_t old_ = 0, new_ = 0;
};

TEST(RecordReaderTest, the_removal_of_a_damaged_record_spares_a_newer_one_with_its_inode_number) {
  const TempDir dir;
  const std::string root = dir.path() + "/root";
  const FsTierOptions options = options_for(root);
  FakeClock clock;
  Row row({16384});
  TierOp op;
  op.key = key_of(1);
  op.shards = row.shards();
  std::uint64_t moved = 0;
  {
    FsStore writer(options, posix_file_ops(), clock);
    op.kind = OpKind::kWrite;
    ASSERT_TRUE(writer.write(op, writer.epoch(), &moved));
    writer.close();
  }
  const fs::path path = path_of(root, 1);
  std::ifstream whole(path, std::ios::binary);
  const std::string newer{std::istreambuf_iterator<char>(whole), {}};
  flip_a_bit(path);
  ReusedInode ops(path, newer);
  FsStore store(options, ops, clock);
  store.start();
  op.kind = OpKind::kRead;
  EXPECT_EQ(store.read(op, store.epoch(), &moved).kind(), StatusKind::kCorrupt);
  ASSERT_TRUE(ops.has_replaced());
  EXPECT_TRUE(fs::exists(path)) << "the newer record was removed";
  store.close();
}

}  // namespace
}  // namespace kv_offload
