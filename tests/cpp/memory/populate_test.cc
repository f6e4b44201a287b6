// SPDX-License-Identifier: Apache-2.0
#include "memory/populate.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>

#include "base/types.h"

namespace kv_offload {
namespace {

constexpr std::size_t kBytes = std::size_t{80} << 20;  // several pieces

// 80 MiB of shared memory with a byte written in its third page.
class Populating : public testing::Test {
 protected:
  Populating() : fd_(::memfd_create("populate-test", MFD_CLOEXEC)) {
    EXPECT_EQ(::ftruncate(fd_, kBytes), 0);
    start_ = static_cast<std::byte*>(::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0));
    start_[2 * kPageBytes + 1] = std::byte{7};
  }
  ~Populating() override {
    ::munmap(start_, kBytes);
    ::close(fd_);
  }

  Status run(Advise advise, unsigned threads = 2) {
    Population population{{start_, kBytes}, fd_, 0, available_, std::move(advise)};
    return populate(population, threads, {});
  }
  std::size_t resident_pages() {
    std::vector<unsigned char> pages(kBytes / kPageBytes);
    EXPECT_EQ(::mincore(start_, kBytes, pages.data()), 0);
    return static_cast<std::size_t>(
        std::count_if(pages.begin(), pages.end(), [](unsigned char page) { return (page & 1) != 0; }));
  }

  static Advise failing_with(int error) {
    return [error](void*, std::size_t, int) {
      errno = error;
      return -1;
    };
  }

  int fd_;
  std::byte* start_;
  std::function<std::uint64_t()> available_;
};

TEST_F(Populating, populate_makes_every_page_resident_and_keeps_bytes) {
  ASSERT_TRUE(run(system_advise()).is_ok());
  EXPECT_EQ(resident_pages(), kBytes / kPageBytes);
  EXPECT_EQ(start_[2 * kPageBytes + 1], std::byte{7});
}

TEST_F(Populating, populate_works_where_the_kernel_rejects_the_advice) {
  ASSERT_TRUE(run(failing_with(EINVAL)).is_ok());
  EXPECT_EQ(resident_pages(), kBytes / kPageBytes);
  EXPECT_EQ(start_[2 * kPageBytes + 1], std::byte{7});
}

TEST_F(Populating, efault_and_enomem_map_to_no_space) {
  for (const int error : {EFAULT, ENOMEM}) {
    const Status status = run(failing_with(error));
    EXPECT_EQ(status.kind(), StatusKind::kNoSpace);
    EXPECT_EQ(status.error_number(), error);
  }
  EXPECT_EQ(run(failing_with(EHWPOISON)).kind(), StatusKind::kIo);
}

TEST_F(Populating, an_interrupted_call_is_repeated) {
  std::atomic<int> calls{0};
  const Status status = run(
      [&](void* address, std::size_t bytes, int advice) {
        if (calls.fetch_add(1) % 2 == 0) {
          errno = EINTR;
          return -1;
        }
        return system_advise()(address, bytes, advice);
      },
      1);
  ASSERT_TRUE(status.is_ok());
  EXPECT_EQ(resident_pages(), kBytes / kPageBytes);
}

TEST_F(Populating, populate_stops_before_memory_runs_out) {
  std::atomic<int> pieces_left{1};
  available_ = [&]() -> std::uint64_t { return pieces_left.fetch_sub(1) > 0 ? kBytes : kPageBytes; };
  EXPECT_EQ(run(system_advise(), 1).kind(), StatusKind::kNoSpace);
  EXPECT_LT(resident_pages(), kBytes / kPageBytes);
}

TEST_F(Populating, populated_pages_need_no_available_memory) {
  ASSERT_TRUE(run(system_advise()).is_ok());
  available_ = []() -> std::uint64_t { return 0; };
  EXPECT_TRUE(run(system_advise()).is_ok());
}

}  // namespace
}  // namespace kv_offload
