// SPDX-License-Identifier: Apache-2.0
// Starts on a root whose own files are damaged.
#include "backends/fs/open.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>

#include <limits>
#include <set>

#include "backends/fs/root_files.h"
#include "backends/fs/store.h"
#include "faulty_file_ops.h"
#include "fixture.h"

namespace kv_offload {
namespace {

using namespace testing;

class FsOpenTest : public ::testing::Test {
 protected:
  FsOpenTest() {
    options_.warn = [this](const std::string& line) { warnings_.push_back(line); };
    TierUser user(options_);
    EXPECT_TRUE(user.write(1));
  }
  static std::string content(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  void put(const std::string& path, const std::string& text) {
    std::ofstream(path, std::ios::binary | std::ios::trunc) << text;
    warnings_.clear();
  }
  // Returns the error message, or "" if the tier opens and finds its record.
  std::string start() {
    try {
      TierUser user(options_);
      EXPECT_TRUE(user.has(1));
    } catch (const std::exception& error) {
      return error.what();
    }
    return "";
  }
  TempDir dir_;
  std::string root_ = dir_.path() + "/root", root_file_ = root_ + "/kv_offload.json";
  std::string namespace_file_ = root_ + "/" + std::string(64, '1') + "/namespace.json";
  FsTierOptions options_ = options_for(root_);
  std::vector<std::string> warnings_;
};

// Fails writes to empty files. files_too: also fails the creation of files.
class FullDevice : public FaultyFileOps {
 public:
  FullDevice(int error, bool files_too) : error_(error), files_too_(files_too) {}
  bool takes_direct = true;
  int open(int directory, const std::string& path, int flags, unsigned mode) override {
    if ((flags & O_DIRECT) != 0 && !takes_direct) return -EINVAL;
    return (flags & O_EXCL) != 0 && files_too_ ? -error_ : FaultyFileOps::open(directory, path, flags, mode);
  }
  std::int64_t pwritev(int fd, const iovec* parts, int count, std::int64_t offset) override {
    FileInfo info;
    const bool grows = posix_file_ops().fstat(fd, &info) == 0 && info.size == 0;
    return grows ? -error_ : FaultyFileOps::pwritev(fd, parts, count, offset);
  }

 private:
  const int error_;
  const bool files_too_;
};

TEST_F(FsOpenTest, a_start_on_a_full_disk_detects_o_direct) {
  options_.o_direct = DirectMode::kOn;
  if (start() != "") GTEST_SKIP() << "no O_DIRECT here";
  for (const int error : {ENOSPC, EDQUOT}) {
    for (const bool files_too : {false, true}) {
      FullDevice ops(error, files_too);
      options_.file_ops = &ops;
      EXPECT_EQ(start(), "") << error << files_too;
      ops.takes_direct = false;
      EXPECT_NE(start().find("refuses O_DIRECT"), std::string::npos) << error << files_too;
    }
  }
}

TEST_F(FsOpenTest, a_flipped_bit_in_the_roots_own_files_causes_one_warning_and_no_failure) {
  for (const std::string& path : {root_file_, namespace_file_}) {
    const std::string whole = content(path);
    for (std::size_t at = 0; at < whole.size(); ++at) {
      std::string damaged = whole;
      damaged[at] = static_cast<char>(damaged[at] ^ (1 << (at % 8)));
      put(path, damaged);
      EXPECT_EQ(start(), "") << path << " byte " << at;
      EXPECT_EQ(warnings_.size(), 1u) << path << " byte " << at;
      EXPECT_EQ(content(path), whole);
    }
  }
}

TEST_F(FsOpenTest, any_damage_of_the_description_causes_one_warning_and_no_failure) {
  const std::string whole = content(namespace_file_);
  std::string two_bits = whole, word = whole;
  two_bits[3] = static_cast<char>(two_bits[3] ^ 1);
  two_bits[20] = static_cast<char>(two_bits[20] ^ 64);
  word.replace(word.find("bf16"), 4, "fp16");
  for (const std::string& damaged :
       {two_bits, word, whole + "\n", std::string("{}\n"), std::string(2 << 20, 'x')}) {
    put(namespace_file_, damaged);
    EXPECT_EQ(start(), "") << damaged.substr(0, 80);
    EXPECT_EQ(warnings_.size(), 1u) << damaged.substr(0, 80);
    EXPECT_EQ(content(namespace_file_), whole);
  }
}

TEST_F(FsOpenTest, the_ledger_distinguishes_a_damaged_format_number_from_another_format) {
  std::string three = content(root_file_);
  three[three.find('2')] = '3';
  put(root_file_, three);
  EXPECT_EQ(start(), "");
  put(root_file_, three);
  fs::remove(root_ + "/ledger");
  EXPECT_NE(start().find("another format"), std::string::npos);
  EXPECT_EQ(content(root_file_), three);
}

TEST_F(FsOpenTest, torn_and_emptied_files_are_created_again) {
  for (const std::string& text : {std::string(), std::string(40, '\0'), std::string("\x7f\x45\x4c")}) {
    put(root_file_, text);
    EXPECT_EQ(start(), "");
    EXPECT_EQ(warnings_.size(), 1u);
  }
}

TEST_F(FsOpenTest, a_foreign_file_is_refused_and_left_unchanged) {
  for (const std::string& text : {std::string("{\"format\": 9}"), std::string("{\"kind\": \"other\"}\n")}) {
    put(root_file_, text);
    EXPECT_NE(start().find("another format"), std::string::npos);
    EXPECT_EQ(content(root_file_), text);
    EXPECT_TRUE(warnings_.empty());
  }
}

TEST_F(FsOpenTest, the_ledger_of_an_older_version_is_replaced_by_a_count) {
  put(root_ + "/ledger", "KVOLEDG2" + std::string(96, '\1'));
  TierUser user(options_);
  user.wait_for_scan();
  EXPECT_TRUE(user.usage_becomes_exact(root_));
  EXPECT_TRUE(user.write(2));
}

// A root that others have open is not counted, so a server adds its new files to the total itself.
TEST_F(FsOpenTest, files_created_at_start_alongside_other_servers_are_in_the_total) {
  FakeClock clock;
  options_.clock = &clock;
  FsStore one(options_, posix_file_ops(), clock);
  one.start();
  FsTierOptions other = options_;
  other.namespace_id.fill(0x22);
  FsStore two(other, posix_file_ops(), clock);
  FsStore same(other, posix_file_ops(), clock);  // adds nothing
  TierStats stats;
  same.figures(&stats);
  EXPECT_EQ(stats.bytes, du(root_));
  for (FsStore* store : {&same, &two, &one}) store->close();
}

TEST_F(FsOpenTest, files_created_by_a_reset_are_in_the_total) {
  FakeClock clock;
  FsStore store(options_, posix_file_ops(), clock);
  store.start();
  store.forget(0);
  ASSERT_TRUE(store.begin_epoch());
  TierStats stats;
  store.figures(&stats);
  EXPECT_EQ(stats.bytes, du(root_));
  store.close();
}

// Another process holds the lock of the namespace until it was asked for `refusals` times.
class NamespaceBeingRemoved : public FaultyFileOps {
 public:
  explicit NamespaceBeingRemoved(int refusals) : refusals_(refusals) {}
  int flock(int fd, int operation) override {
    if (operation == LOCK_SH) {
      ADD_FAILURE() << "waits without a limit";
      return -EIO;
    }
    if (operation == (LOCK_SH | LOCK_NB) && refusals_-- > 0) return -EWOULDBLOCK;
    return FaultyFileOps::flock(fd, operation);
  }

 private:
  int refusals_;
};

TEST_F(FsOpenTest, a_start_waits_for_a_process_that_removes_the_namespace) {
  NamespaceBeingRemoved ops(3);
  options_.file_ops = &ops;
  EXPECT_EQ(start(), "");
}

TEST_F(FsOpenTest, a_start_does_not_wait_forever_for_a_stopped_process_that_removes_the_namespace) {
  NamespaceBeingRemoved ops(std::numeric_limits<int>::max());
  OpenRoot open(ops);
  open.path = root_;
  open.namespace_name = std::string(64, '1');
  open.directory = open_root_directory(options_, ops);
  std::string message;
  try {
    (void)open_namespace(options_, ops, open, std::chrono::milliseconds(20));
  } catch (const ResourceError& error) {
    message = error.what();
  }
  EXPECT_NE(message.find("/open is locked: another process removes"), std::string::npos) << message;
}

class FullDisk final : public FaultyFileOps {
 public:
  int statvfs(int, SpaceInfo* info) override {
    *info = {};
    return 0;
  }
};

TEST_F(FsOpenTest, a_disk_without_space_for_one_record_is_reported_at_start) {
  {
    TierUser user(options_);
    for (std::uint32_t i = 2; i < 20; ++i) EXPECT_TRUE(user.write(i));
  }
  FullDisk full;
  options_.file_ops = &full;
  EXPECT_EQ(start(), "") << "existing records can be evicted";
  options_.root_dir = dir_.path() + "/other";
  EXPECT_NE(
      start().find("free; even a small record needs 68.0 KiB; free some space or set root_dir elsewhere"),
      std::string::npos);
}

}  // namespace
}  // namespace kv_offload
