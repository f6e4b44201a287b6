// SPDX-License-Identifier: Apache-2.0
// A hostile root: links, foreign files, files of absurd size. Nothing outside the root is touched, nothing is
// trusted, no resource is exhausted.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cerrno>

#include "backends/fs/root.h"
#include "faulty_file_ops.h"
#include "fixture.h"

namespace kv_offload {
namespace {

using namespace testing;

class FsTierHostile : public ::testing::Test {
 protected:
  FsTierHostile() { fs::create_directory(outside_); }
  std::string refusal(const FsTierOptions& options) {
    try {
      make_fs_tier(options);
    } catch (const std::exception& error) {
      return error.what();
    }
    return "";
  }
  void make_root() { TierUser user(options_for(root_)); }
  bool outside_is_empty() const { return fs::is_empty(outside_); }

  TempDir dir_;
  std::string root_ = dir_.path() + "/root", outside_ = dir_.path() + "/outside";
  std::string space_ = root_ + "/" + std::string(64, '1');
};

// ---- links

TEST_F(FsTierHostile, a_namespace_that_is_a_link_is_refused) {
  make_root();
  fs::remove_all(space_);
  fs::create_directory_symlink(outside_, space_);
  EXPECT_NE(refusal(options_for(root_)), "");
  EXPECT_TRUE(outside_is_empty());
}

TEST_F(FsTierHostile, an_epoch_directory_that_is_a_link_is_not_followed) {
  make_root();
  fs::remove_all(space_ + "/g1");
  fs::create_directory_symlink(outside_, space_ + "/g1");
  if (refusal(options_for(root_)).empty()) {
    TierUser user(options_for(root_));
    (void)user.write(1);
  }
  EXPECT_TRUE(outside_is_empty());
}

TEST_F(FsTierHostile, a_leaf_that_is_a_link_is_neither_scanned_nor_emptied) {
  {
    TierUser user(options_for(root_));
    ASSERT_TRUE(user.write(1));
  }
  const fs::path record = path_of(root_, 1);
  const fs::path leaf = record.parent_path();
  fs::rename(record, outside_ + "/" + record.filename().string());
  fs::remove(leaf);
  fs::create_directory_symlink(outside_, leaf);
  TierUser user(options_for(root_));
  user.wait_for_scan();
  EXPECT_EQ(user.tier().stats().chunks, 0u);
  EXPECT_TRUE(user.tier().reset());
  EXPECT_TRUE(user.write(2));
  EXPECT_TRUE(user.usage_becomes_exact(root_));
  EXPECT_TRUE(fs::exists(outside_ + "/" + record.filename().string()));
}

TEST_F(FsTierHostile, links_in_place_of_the_roots_own_files_are_refused) {
  for (const char* name : {"ledger", "kv_offload.json"}) {
    fs::remove_all(root_);
    make_root();
    std::ofstream(outside_ + "/precious") << "precious";
    fs::remove(root_ + "/" + name);
    fs::create_symlink(outside_ + "/precious", root_ + "/" + name);
    EXPECT_NE(refusal(options_for(root_)), "") << name;
    EXPECT_EQ(fs::file_size(outside_ + "/precious"), 8u) << name;
  }
}

// ---- other users

TEST_F(FsTierHostile, a_root_or_namespace_of_another_user_is_refused) {
  if (::geteuid() != 0) GTEST_SKIP() << "giving files away needs root";
  make_root();
  ASSERT_EQ(::chown(root_.c_str(), 12345, 12345), 0);
  EXPECT_NE(refusal(options_for(root_)).find("belongs to uid 12345"), std::string::npos);
  ASSERT_EQ(::chown(root_.c_str(), 0, 0), 0);
  ASSERT_EQ(::chown(space_.c_str(), 12345, 12345), 0);
  EXPECT_NE(refusal(options_for(root_)).find("belongs to uid 12345"), std::string::npos);
}

TEST_F(FsTierHostile, a_root_that_others_may_write_is_refused) {
  make_root();
  for (const fs::perms others : {fs::perms::group_write, fs::perms::others_write}) {
    fs::permissions(root_, fs::perms::owner_all | others);
    EXPECT_NE(refusal(options_for(root_)).find("chmod 700"), std::string::npos);
  }
  fs::permissions(root_, fs::perms::owner_all);
  EXPECT_EQ(refusal(options_for(root_)), "");
}

// ---- absurd files

TEST_F(FsTierHostile, a_record_of_a_terabyte_is_damage_and_takes_no_memory) {
  make_root();
  const std::uint64_t huge = std::uint64_t{1} << 40;
  const ChunkKey key = key_of(5);
  const fs::path path = fs::path(space_) / "g1" / layout::record_path(key, huge);
  fs::create_directories(path.parent_path());
  std::ofstream(path).put('x');
  std::error_code too_large;
  fs::resize_file(path, huge, too_large);
  if (too_large) GTEST_SKIP() << "no file of that size can be made here";
  FsRoot root(root_);
  const auto damaged = root.verify(true, {});
  ASSERT_EQ(damaged.size(), 1u);
  EXPECT_EQ(damaged[0].kind, StatusKind::kCorrupt);
  EXPECT_TRUE(damaged[0].removed);
}

TEST_F(FsTierHostile, a_description_file_of_a_gigabyte_is_not_read_completely) {
  make_root();
  fs::resize_file(space_ + "/namespace.json", std::uint64_t{1} << 30);
  EXPECT_EQ(FsRoot(root_).stat().namespaces.size(), 1u);
  EXPECT_EQ(refusal(options_for(root_)), "") << "it is written again";
}

TEST_F(FsTierHostile, a_tree_of_a_thousand_levels_does_not_hold_a_thousand_descriptors) {
  make_root();
  int error = 0;
  FileOps& real = posix_file_ops();
  Fd at = open_fd(real, AT_FDCWD, root_, O_RDONLY | O_DIRECTORY, 0, &error);
  for (int level = 0; level < 1000; ++level) {
    ASSERT_EQ(real.mkdir(at.get(), "d", 0700), 0);
    at = open_fd(real, at.get(), "d", O_RDONLY | O_DIRECTORY, 0, &error);
  }
  FaultyFileOps ops;
  FsTierOptions options = options_for(root_);
  options.file_ops = &ops;
  {
    TierUser user(options);
    user.wait_for_scan();
    EXPECT_TRUE(user.write(1));
  }
  EXPECT_LT(ops.most_open(), 100);
}

TEST_F(FsTierHostile, foreign_files_that_look_like_temporary_files_stay) {
  make_root();
  for (const char* name : {".tmp-notes", ".tmp-1", ".tmp-1-2", ".tmp-x-00000000000000aa-1", ".tmp-1-zz-1"}) {
    std::ofstream(root_ + "/" + name) << "mine";
  }
  TierUser user(options_for(root_));
  user.wait_for_scan();
  EXPECT_TRUE(user.usage_becomes_exact(root_));
  for (const char* name : {".tmp-notes", ".tmp-1", ".tmp-1-2", ".tmp-x-00000000000000aa-1", ".tmp-1-zz-1"}) {
    EXPECT_TRUE(fs::exists(root_ + "/" + name)) << name;
  }
}

TEST_F(FsTierHostile, a_write_to_an_occupied_path_is_no_success) {
  TierUser user(options_for(root_));
  user.wait_for_scan();
  const std::string epoch = space_ + "/g1/";
  const fs::path taken = epoch + layout::record_path(key_of(1), 4096 + 8192);
  fs::create_directories(taken);
  EXPECT_EQ(user.write(1).kind(), StatusKind::kIo);
  EXPECT_FALSE(user.has(1));
  const fs::path incomplete = epoch + layout::record_path(key_of(2), 4096 + 8192);
  fs::create_directories(incomplete.parent_path());
  std::ofstream(incomplete) << "short";
  EXPECT_TRUE(user.write(2));
  EXPECT_TRUE(user.read(2));
  EXPECT_TRUE(temporaries_in(root_).empty());
}

// ---- the whole file system

TEST_F(FsTierHostile, a_root_that_is_removed_while_in_use_causes_no_crash) {
  // Upkeep runs only at the start. Otherwise it would run during the removal of the root.
  FakeClock clock;
  FsTierOptions options = options_for(root_);
  options.clock = &clock;
  TierUser user(options);
  user.wait_for_scan();
  for (std::uint32_t i = 0; i < 3; ++i) ASSERT_TRUE(user.write(i));
  fs::remove_all(root_);
  EXPECT_EQ(user.read(0).kind(), StatusKind::kNotFound);
  EXPECT_EQ(user.write(9).kind(), StatusKind::kIo);
  EXPECT_FALSE(user.has(9));
  user.tier().close();
  TierUser next(options);
  EXPECT_TRUE(next.write(1));
  EXPECT_TRUE(next.read(1));
}

TEST_F(FsTierHostile, a_file_system_that_turns_read_only_stays_readable) {
  FaultyFileOps ops;
  FsTierOptions options = options_for(root_);
  options.file_ops = &ops;
  TierUser user(options);
  user.wait_for_scan();
  ASSERT_TRUE(user.write(1));
  ops.set_rule([](Call call) {
    const bool changes = call == Call::kPwritev || call == Call::kRename || call == Call::kUnlink ||
                         call == Call::kMkdir || call == Call::kSetMtime || call == Call::kFsync;
    return changes ? -EROFS : 0;
  });
  const Status status = user.write(2);
  EXPECT_EQ(status.kind(), StatusKind::kIo);
  EXPECT_EQ(status.error_number(), EROFS) << status.to_string();
  EXPECT_TRUE(user.read(1));
  ops.clear();
  EXPECT_TRUE(user.write(2));
  EXPECT_TRUE(user.read(2));
  EXPECT_TRUE(temporaries_in(root_).empty());
}

}  // namespace
}  // namespace kv_offload
