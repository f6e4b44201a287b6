// SPDX-License-Identifier: Apache-2.0
// Memory population of a region, and its errors when memory is short.
#include <fcntl.h>
#include <fmt/format.h>
#include <linux/mempolicy.h>
#include <sys/mount.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <stdexcept>

#include "memory/host_region.h"
#include "memory/shm_fixture.h"

namespace kv_offload {
namespace {

class HostRegionMemory : public ShmTest {};

std::uint64_t shared_memory_resident() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("RssShmem:")) return std::stoull(line.substr(9)) * 1024;
  }
  return 0;
}

TEST_F(HostRegionMemory, prefault_populates_exactly_its_area) {
  const auto region = HostRegion::attach_scheduler(options(200 * kMiB, 2));
  const std::uint64_t before = shared_memory_resident();
  std::uint64_t last = 0;
  const Status status = region->prefault(1, 3, [&](std::uint64_t done, std::uint64_t total) {
    EXPECT_GE(done, last);
    EXPECT_EQ(total, 100 * kMiB);
    last = done;
  });
  ASSERT_TRUE(status.is_ok()) << status.to_string();
  EXPECT_EQ(last, 100 * kMiB);
  EXPECT_NEAR(static_cast<double>(shared_memory_resident() - before), 100.0 * kMiB, 2.0 * kMiB);
}

TEST_F(HostRegionMemory, prefault_keeps_written_bytes) {
  const auto region = HostRegion::attach_scheduler(options(8 * kMiB, 1));
  region->area(0)[5000] = std::byte{9};
  ASSERT_TRUE(region->prefault(0, 1).is_ok());
  EXPECT_EQ(region->area(0)[5000], std::byte{9});
  EXPECT_THROW((void)region->prefault(1, 1), InvalidArgument);
}

TEST_F(HostRegionMemory, an_exception_of_the_progress_callback_ends_prefault) {
  const auto region = HostRegion::attach_scheduler(options(128 * kMiB, 1));
  const auto throwing = [](std::uint64_t, std::uint64_t) { throw std::runtime_error("interrupted"); };
  EXPECT_THROW((void)region->prefault(0, 2, throwing), std::runtime_error);
}

// Returns the preferred node in the memory policy of an address; -1: no preference, -2: the policy
// cannot be read here.
int preferred_node(const std::byte* address) {
  int mode = 0;
  std::array<unsigned long, 16> mask{};
  if (::syscall(SYS_get_mempolicy, &mode, mask.data(), 1024, address, MPOL_F_ADDR) != 0) return -2;
  if (mode != MPOL_PREFERRED) return -1;
  for (int node = 0; node < 1024; ++node) {
    if ((mask[static_cast<std::size_t>(node) / 64] >> (node % 64) & 1) != 0) return node;
  }
  return -1;
}

TEST_F(HostRegionMemory, prefer_node_sets_the_numa_node_of_one_area) {
  const auto region = HostRegion::attach_scheduler(options(8 * kMiB, 2));
  if (preferred_node(region->area(0).data()) == -2) GTEST_SKIP() << "memory policies are not allowed here";
  EXPECT_TRUE(region->prefer_node(0, -1).is_ok());
  EXPECT_EQ(preferred_node(region->area(0).data()), -1);
  const Status placed = region->prefer_node(0, 0);
  ASSERT_TRUE(placed.is_ok()) << placed.to_string();
  EXPECT_EQ(preferred_node(region->area(0).data()), 0);
  EXPECT_EQ(preferred_node(region->area(1).data()), -1) << "area 1 belongs to another rank";
  ASSERT_TRUE(region->prefault(0, 1).is_ok());
  EXPECT_FALSE(region->prefer_node(1, 1023).is_ok()) << "no such node";
}

TEST_F(HostRegionMemory, prefer_node_fails_for_a_populated_area) {
  const auto region = HostRegion::attach_scheduler(options(8 * kMiB, 2));
  if (preferred_node(region->area(0).data()) == -2) GTEST_SKIP() << "memory policies are not allowed here";
  ASSERT_TRUE(region->prefault(0, 1).is_ok());
  EXPECT_FALSE(region->prefer_node(0, 0).is_ok());
  EXPECT_TRUE(region->prefer_node(1, 0).is_ok()) << "area 1 is not populated";
}

class HostRegionOnSmallTmpfs : public HostRegionMemory {
 protected:
  // Returns false if mounting is not permitted.
  bool mount_tmpfs(std::uint64_t bytes) {
    mounted_ = ::mount("tmpfs", directory_.c_str(), "tmpfs", 0, fmt::format("size={}", bytes).c_str()) == 0;
    return mounted_;
  }
  void TearDown() override {
    if (mounted_) ::umount2(directory_.c_str(), MNT_DETACH);
  }
  bool mounted_ = false;
};

#define MOUNT_OR_SKIP(bytes) \
  if (!mount_tmpfs(bytes)) GTEST_SKIP() << "mounting a tmpfs needs root"

TEST_F(HostRegionOnSmallTmpfs, a_region_that_fits_is_usable_completely) {
  MOUNT_OR_SKIP(77 * kMiB);
  const auto region = HostRegion::attach_scheduler(options(64 * kMiB, 1));
  ASSERT_TRUE(region->prefault(0, 2).is_ok());
  std::fill(region->area(0).begin(), region->area(0).end(), std::byte{1});
}

TEST_F(HostRegionOnSmallTmpfs, a_region_that_does_not_fit_is_refused_without_a_file) {
  MOUNT_OR_SKIP(51 * kMiB);
  const std::string text =
      message_of<ResourceError>([&] { HostRegion::attach_scheduler(options(64 * kMiB, 1)); });
  for (const char* part : {"64.0 MiB", "51.0 MiB", "cpu_bytes_to_use", "--shm-size", directory_.c_str()}) {
    EXPECT_TRUE(has(text, part)) << part << " in: " << text;
  }
  EXPECT_TRUE(names().empty());
}

TEST_F(HostRegionOnSmallTmpfs, a_tmpfs_that_fills_up_fails_only_the_prefault) {
  MOUNT_OR_SKIP(80 * kMiB);
  const auto region = HostRegion::attach_scheduler(options(64 * kMiB, 1));
  const std::string hog = directory_ + "/hog";
  const int fd = ::open(hog.c_str(), O_CREAT | O_WRONLY, 0600);
  ASSERT_EQ(::posix_fallocate(fd, 0, 60 * kMiB), 0);
  const Status status = region->prefault(0, 2);
  EXPECT_EQ(status.kind(), StatusKind::kNoSpace);
  EXPECT_TRUE(has(status.message(), "cpu_bytes_to_use") && has(status.message(), directory_))
      << status.to_string();
  ::close(fd);
  std::filesystem::remove(hog);
  EXPECT_TRUE(region->prefault(0, 2).is_ok()) << "there is room again";
}

TEST_F(HostRegionOnSmallTmpfs, a_tmpfs_without_room_for_the_control_page_is_refused) {
  MOUNT_OR_SKIP(kMiB / 8);
  EXPECT_THROW(HostRegion::attach_scheduler(options(4096, 1)), ResourceError);
  EXPECT_TRUE(names().empty());
}

}  // namespace
}  // namespace kv_offload
