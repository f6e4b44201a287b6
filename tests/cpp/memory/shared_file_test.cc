// SPDX-License-Identifier: Apache-2.0
#include "memory/shared_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <stdexcept>
#include <thread>

#include "memory/shm_fixture.h"

namespace kv_offload {
namespace {

class SharedFileTest : public ShmTest {
 protected:
  SharedFile open(const std::function<void(int)>& fill_in = [](int) {}) {
    return SharedFile::open_or_create(path_, 4096, fill_in);
  }
  // Returns the number of descriptors of this process that have the file at path_ open.
  int times_open() const {
    int times = 0;
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
      std::error_code ignored;
      if (std::filesystem::read_symlink(entry.path(), ignored) == path_) ++times;
    }
    return times;
  }
  // Opens or creates the file at path_, as another process would, and locks it.
  int hold(int lock) {
    const int fd = ::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    EXPECT_EQ(::flock(fd, lock), 0);
    return fd;
  }

  std::string path_ = SharedFile::path_of(directory_, "engine");
};

TEST_F(SharedFileTest, only_the_first_open_fills_the_file) {
  int times = 0;
  const auto count = [&](int) { ++times; };
  const SharedFile first = open(count);
  const SharedFile second = open(count);
  EXPECT_EQ(times, 1);
  EXPECT_EQ(second.size(), 4096u);
}

TEST_F(SharedFileTest, no_file_remains_when_filling_fails) {
  EXPECT_THROW(open([](int) { throw std::runtime_error("no memory"); }), std::runtime_error);
  EXPECT_TRUE(names().empty());
}

TEST_F(SharedFileTest, the_file_gets_its_name_after_it_is_filled) {
  open([&](int) { EXPECT_FALSE(std::filesystem::exists(path_)); });
}

TEST_F(SharedFileTest, a_file_swept_before_its_lock_is_created_again) {
  const int sweeper = hold(LOCK_EX);
  SharedFile file;
  std::thread opener([&] { file = open(); });
  while (times_open() < 2) std::this_thread::yield();
  std::filesystem::remove(path_);
  ::close(sweeper);
  opener.join();
  EXPECT_TRUE(std::filesystem::exists(path_)) << "the opener holds a file without a name";
  EXPECT_EQ(file.size(), 4096u);
}

TEST_F(SharedFileTest, a_region_refuses_a_file_of_another_kind) {
  const int other = hold(LOCK_SH);
  EXPECT_THROW(HostRegion::attach_scheduler(options(8 * kMiB, 1)), ResourceError) << "the file is empty";
  ASSERT_EQ(::ftruncate(other, 1 << 20), 0);
  EXPECT_THROW(HostRegion::attach_scheduler(options(8 * kMiB, 1)), ResourceError)
      << "the file contains zeros";
  ::close(other);
}

TEST_F(SharedFileTest, each_engine_has_its_own_path) {
  EXPECT_EQ(path_, SharedFile::path_of(directory_, "engine"));
  EXPECT_NE(path_, SharedFile::path_of(directory_, "engine2"));
}

TEST_F(SharedFileTest, at_most_the_maximum_number_of_files_is_kept) {
  for (unsigned number = 0; number <= kMostKept; ++number) {
    SharedFile file = open();
    EXPECT_EQ(file.keep(directory_, "digest"), number < kMostKept);
    EXPECT_FALSE(std::filesystem::exists(path_));
  }
  EXPECT_EQ(names().size(), kMostKept) << "a file beyond the limit was kept";
  EXPECT_TRUE(remove_unheld_files(directory_, Unheld::kLeftovers).empty());
  EXPECT_EQ(remove_unheld_files(directory_, Unheld::kKept).size(), kMostKept);
}

TEST_F(SharedFileTest, a_kept_file_of_another_user_is_not_counted_or_removed) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root";
  EXPECT_TRUE(open().keep(directory_, "digest"));
  const std::string path = directory_ + "/" + names().at(0);
  ASSERT_EQ(::chown(path.c_str(), 12345, 12345), 0);
  EXPECT_TRUE(region_files(directory_).empty());
  EXPECT_TRUE(remove_unheld_files(directory_, Unheld::kKept).empty());
  const auto refuse = [](int) -> bool { throw std::logic_error("it is another's"); };
  EXPECT_LT(SharedFile::adopt(directory_, "digest", path_, refuse, std::chrono::seconds(0)).fd(), 0);
  EXPECT_TRUE(std::filesystem::exists(path));
}

TEST_F(SharedFileTest, a_kept_file_that_does_not_fit_is_removed) {
  EXPECT_TRUE(open().keep(directory_, "digest"));
  const auto adopt = [&](bool fits) {
    return SharedFile::adopt(
               directory_, "digest", path_, [&](int) { return fits; }, std::chrono::seconds(0))
        .fd();
  };
  EXPECT_LT(adopt(false), 0);
  EXPECT_TRUE(names().empty());
  EXPECT_LT(adopt(true), 0) << "there is no kept file";
}

TEST_F(SharedFileTest, a_kept_file_in_use_is_not_adopted) {
  SharedFile held = open();
  EXPECT_TRUE(held.keep(directory_, "digest"));
  const auto refuse = [](int) -> bool { throw std::logic_error("it is held"); };
  EXPECT_LT(SharedFile::adopt(directory_, "digest", path_, refuse, std::chrono::seconds(0)).fd(), 0);
  EXPECT_EQ(names().size(), 1u);
}

TEST_F(SharedFileTest, adopt_waits_for_an_engine_that_is_ending) {
  SharedFile held = open();
  EXPECT_TRUE(held.keep(directory_, "digest"));
  SharedFile adopted;
  std::thread next([&] {
    adopted = SharedFile::adopt(
        directory_, "digest", path_, [](int) { return true; }, std::chrono::hours(1));
  });
  held = {};
  next.join();
  EXPECT_GE(adopted.fd(), 0);
  EXPECT_TRUE(std::filesystem::exists(path_));
}

// Happens for a moment while another engine takes the file over, and after that engine died before
// keep().
TEST_F(SharedFileTest, adopt_sweeps_a_stale_engine_name_of_the_file) {
  EXPECT_TRUE(open().keep(directory_, "digest"));
  const std::string other = SharedFile::path_of(directory_, "other");
  std::filesystem::create_hard_link(directory_ + "/" + names().at(0), other);
  const auto adopt = [&](std::chrono::nanoseconds timeout) {
    return SharedFile::adopt(
        directory_, "digest", path_, [](int) { return true; }, timeout);
  };
  EXPECT_LT(adopt(std::chrono::seconds(0)).fd(), 0);
  EXPECT_EQ(names().size(), 2u);
  const SharedFile adopted = adopt(std::chrono::hours(1));
  EXPECT_GE(adopted.fd(), 0);
  EXPECT_FALSE(std::filesystem::exists(other));
}

TEST_F(SharedFileTest, a_kept_file_that_cannot_be_adopted_now_stays) {
  EXPECT_TRUE(open().keep(directory_, "digest"));
  const auto adopt = [&](const std::function<bool(int)>& take_over) {
    return SharedFile::adopt(directory_, "digest", path_, take_over, std::chrono::hours(1));
  };
  EXPECT_THROW(adopt([](int) -> bool { throw std::runtime_error("no address space"); }), std::runtime_error);
  EXPECT_EQ(names().size(), 1u);
  const SharedFile same_engine = open();
  EXPECT_LT(adopt([](int) { return true; }).fd(), 0);
  EXPECT_EQ(names().size(), 2u) << "the kept file is lost";
}

}  // namespace
}  // namespace kv_offload
