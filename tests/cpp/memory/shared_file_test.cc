// SPDX-License-Identifier: Apache-2.0
#include "memory/shared_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <stdexcept>
#include <thread>

#include "memory/shm_fixture.h"
#include "with_threads.h"

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

TEST_F(SharedFileTest, is_filled_in_by_the_first_only) {
  int times = 0;
  const auto count = [&](int) { ++times; };
  const SharedFile first = open(count);
  const SharedFile second = open(count);
  EXPECT_EQ(times, 1);
  EXPECT_EQ(second.size(), 4096u);
}

TEST_F(SharedFileTest, leaves_nothing_when_filling_in_fails) {
  EXPECT_THROW(open([](int) { throw std::runtime_error("no memory"); }), std::runtime_error);
  EXPECT_TRUE(names().empty());
}

TEST_F(SharedFileTest, has_its_name_only_when_complete) {
  open([&](int) { EXPECT_FALSE(std::filesystem::exists(path_)); });
}

TEST_F(SharedFileTest, is_not_taken_when_swept_between_opening_and_locking) {
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

TEST_F(SharedFileTest, of_another_kind_is_refused_by_a_region) {
  const int other = hold(LOCK_SH);
  EXPECT_THROW(HostRegion::attach_scheduler(options(8 * kMiB, 1)), ResourceError) << "the file is empty";
  ASSERT_EQ(::ftruncate(other, 1 << 20), 0);
  EXPECT_THROW(HostRegion::attach_scheduler(options(8 * kMiB, 1)), ResourceError)
      << "the file contains zeros";
  ::close(other);
}

TEST_F(SharedFileTest, differs_by_engine) {
  EXPECT_EQ(path_, SharedFile::path_of(directory_, "engine"));
  EXPECT_NE(path_, SharedFile::path_of(directory_, "engine2"));
}

TEST_F(SharedFileTest, is_kept_under_as_many_names_as_there_are) {
  for (unsigned number = 0; number <= kMostKept; ++number) {
    SharedFile file = open();
    EXPECT_EQ(file.keep(directory_, "digest"), number < kMostKept);
    EXPECT_FALSE(std::filesystem::exists(path_));
  }
  EXPECT_EQ(names().size(), kMostKept) << "a file beyond the limit was kept";
  EXPECT_TRUE(remove_unheld_files(directory_, Unheld::kLeftovers).empty());
  EXPECT_EQ(remove_unheld_files(directory_, Unheld::kKept).size(), kMostKept);
}

TEST_F(SharedFileTest, of_another_user_is_neither_counted_nor_removed) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root";
  EXPECT_TRUE(open().keep(directory_, "digest"));
  const std::string path = directory_ + "/" + names().at(0);
  ASSERT_EQ(::chown(path.c_str(), 12345, 12345), 0);
  EXPECT_TRUE(kept_files(directory_).empty());
  EXPECT_TRUE(remove_unheld_files(directory_, Unheld::kKept).empty());
  const auto refuse = [](int) -> bool { throw std::logic_error("it is another's"); };
  EXPECT_LT(SharedFile::adopt(directory_, "digest", path_, refuse, std::chrono::seconds(0)).fd(), 0);
  EXPECT_TRUE(std::filesystem::exists(path));
}

TEST_F(SharedFileTest, that_is_not_taken_over_is_removed) {
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

TEST_F(SharedFileTest, that_is_held_is_not_taken_over) {
  SharedFile held = open();
  EXPECT_TRUE(held.keep(directory_, "digest"));
  const auto refuse = [](int) -> bool { throw std::logic_error("it is held"); };
  EXPECT_LT(SharedFile::adopt(directory_, "digest", path_, refuse, std::chrono::seconds(0)).fd(), 0);
  EXPECT_EQ(names().size(), 1u);
}

TEST_F(SharedFileTest, of_an_engine_that_is_dying_is_waited_for) {
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
TEST_F(SharedFileTest, that_has_an_engines_name_already_is_taken_over_once_that_is_swept) {
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

TEST_F(SharedFileTest, that_cannot_be_taken_over_now_stays) {
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
