// SPDX-License-Identifier: Apache-2.0
#include "memory/memory_headroom.h"

#include <fmt/format.h>

#include <fstream>

#include "memory/shm_fixture.h"

namespace kv_offload {
namespace {

// A file system tree in a test directory, with its own /proc and cgroups.
class Headroom : public ShmTest {
 protected:
  void file(const std::string& path, const std::string& text) {
    const std::filesystem::path full = directory_ + path;
    std::filesystem::create_directories(full.parent_path());
    std::ofstream(full) << text;
  }
  void version2(const std::string& own_group, const std::string& top = "/") {
    file("/proc/self/mountinfo", "29 1 0:26 " + top + " /cg rw,nosuid shared:4 - cgroup2 cgroup2 rw\n");
    file("/proc/self/cgroup", "0::" + own_group + "\n");
  }
  MemoryHeadroom headroom() { return memory_headroom_under(directory_, "/dev/shm"); }
};

TEST_F(Headroom, without_limits_headroom_is_the_space_of_the_directory) {
  const MemoryHeadroom found = headroom();
  EXPECT_EQ(found.limited_by, "/dev/shm");
  EXPECT_GT(found.bytes, 0u);
}

TEST_F(Headroom, cgroup_headroom_is_its_limit_minus_its_usage) {
  version2("/a");
  file("/cg/a/memory.max", "4000000\n");
  file("/cg/a/memory.current", "1000000\n");
  EXPECT_EQ(headroom().bytes, 3000000u);
  EXPECT_EQ(headroom().limited_by, "cgroup memory limit");
}

TEST_F(Headroom, reclaimable_file_pages_count_as_free) {
  version2("/a");
  file("/cg/a/memory.max", "4000000\n");
  file("/cg/a/memory.current", "3900000\n");
  file("/cg/a/memory.stat", "anon 5\nactive_file 800000\ninactive_file 1000000\n");
  EXPECT_EQ(headroom().bytes, 1900000u);
}

TEST_F(Headroom, limits_of_parent_cgroups_apply) {
  version2("/a/b/c");
  file("/cg/a/b/c/memory.max", "max\n");
  file("/cg/a/b/c/memory.current", "1\n");
  file("/cg/a/memory.max", "5000000\n");
  file("/cg/a/memory.current", "4000000\n");
  EXPECT_EQ(headroom().bytes, 1000000u);
}

TEST_F(Headroom, usage_above_the_limit_leaves_no_headroom) {
  version2("/");
  file("/cg/memory.max", "1000\n");
  file("/cg/memory.current", "2000\n");
  EXPECT_EQ(headroom().bytes, 0u);
}

TEST_F(Headroom, the_cgroup_is_found_in_a_partial_container_mount) {
  version2("/docker/abc/inner", "/docker/abc");
  file("/cg/inner/memory.max", "9000\n");
  file("/cg/inner/memory.current", "1000\n");
  EXPECT_EQ(headroom().bytes, 8000u);
}

TEST_F(Headroom, cgroup_version_1_limits_apply) {
  file(
      "/proc/self/mountinfo",
      "30 1 0:27 / /cg/cpu rw - cgroup cgroup rw,cpu\n31 1 0:28 / /cg/memory rw - cgroup cgroup rw,memory\n");
  file("/proc/self/cgroup", "5:cpu:/x\n4:memory:/box\n0::/\n");
  file("/cg/memory/box/memory.limit_in_bytes", "7000000\n");
  file("/cg/memory/box/memory.usage_in_bytes", "2000000\n");
  file("/cg/memory/box/memory.stat", "inactive_file 1\ntotal_inactive_file 500000\n");
  EXPECT_EQ(headroom().bytes, 5500000u);
}

TEST_F(Headroom, headroom_is_at_most_mem_available) {
  file("/proc/meminfo", "MemTotal:  900 kB\nMemAvailable:     100 kB\n");
  EXPECT_EQ(headroom().bytes, 102400u);
  EXPECT_EQ(headroom().limited_by, "MemAvailable");
}

TEST_F(Headroom, headroom_of_this_machine_is_positive) {
  const MemoryHeadroom found = memory_headroom("/dev/shm");
  EXPECT_GT(found.bytes, 0u);
  EXPECT_THROW(memory_headroom("/no/such/directory"), ResourceError);
}

}  // namespace
}  // namespace kv_offload
