// SPDX-License-Identifier: Apache-2.0
// Shared by the tests of the fs tier: temporary roots, and access to their content.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include <sys/stat.h>

#include "backends/fs/layout.h"
#include "backends/fs/tier.h"
#include "tier/tier_driver.h"

namespace kv_offload::testing {

namespace fs = std::filesystem;

class TempDir {
 public:
  TempDir() {
    std::string pattern = fs::temp_directory_path() / "kv_offload_test_XXXXXX";
    path_ = ::mkdtemp(pattern.data());
  }
  ~TempDir() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  std::string path() const { return path_; }

 private:
  std::string path_;
};

// Flips a bit in a record's payload, which starts after 4 KiB.
inline void flip_a_bit(const fs::path& record) {
  constexpr std::streamoff kAt = 5000;
  std::fstream file(record, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(kAt);
  const char flipped = static_cast<char>(file.get() ^ 1);
  file.seekp(kAt);
  file.put(flipped);
}

// Returns the size in bytes as `du` computes it. Files that vanish meanwhile count as 0.
inline std::uint64_t du(const std::string& path) {
  struct ::stat info;
  if (::lstat(path.c_str(), &info) != 0) return 0;
  std::uint64_t bytes = static_cast<std::uint64_t>(info.st_blocks) * 512;
  if (!S_ISDIR(info.st_mode)) return bytes;
  std::error_code error;
  for (fs::directory_iterator it(path, error), end; !error && it != end; it.increment(error)) {
    bytes += du(it->path().string());
  }
  return bytes;
}

class TierUser : public TierDriver {
 public:
  explicit TierUser(const FsTierOptions& options) : TierDriver(make_fs_tier(options)) {}
  // Succeeds once the usage equals the disk usage: at once, or with the next count.
  ::testing::AssertionResult usage_becomes_exact(const std::string& root) {
    const bool exact = until([&] {
      poll();
      return tier().stats().bytes == du(root);
    });
    if (exact) return ::testing::AssertionSuccess();
    return ::testing::AssertionFailure() << tier().stats().bytes << " is not " << du(root);
  }
};

inline FsTierOptions options_for(const std::string& root, std::uint64_t max_bytes = std::uint64_t{64} << 20) {
  FsTierOptions options;
  options.root_dir = root;
  options.max_bytes = max_bytes;
  options.namespace_id.fill(0x11);
  options.namespace_json = "{\n  \"model\": \"tiny\",\n  \"dtype\": \"bf16\"\n}\n";
  return options;
}

// Visits all paths below a root, and skips those that vanish meanwhile.
inline void walk(const std::string& path, const std::function<void(const fs::path&)>& visit) {
  std::error_code error;
  for (fs::directory_iterator it(path, error), end; !error && it != end; it.increment(error)) {
    visit(it->path());
    struct ::stat info;
    if (::lstat(it->path().c_str(), &info) == 0 && S_ISDIR(info.st_mode)) walk(it->path().string(), visit);
  }
}
inline std::vector<fs::path> records_in(const std::string& root) {
  std::vector<fs::path> paths;
  walk(root, [&](const fs::path& path) {
    if (layout::parse_record(path.filename().string())) paths.push_back(path);
  });
  return paths;
}
inline std::vector<fs::path> temporaries_in(const std::string& root) {
  std::vector<fs::path> paths;
  walk(root, [&](const fs::path& path) {
    if (layout::is_temporary(path.filename().string())) paths.push_back(path);
  });
  return paths;
}
inline fs::path path_of(const std::string& root, std::uint32_t number) {
  for (const fs::path& path : records_in(root)) {
    if (path.filename().string().starts_with(key_of(number).hex())) return path;
  }
  return {};
}

}  // namespace kv_offload::testing
