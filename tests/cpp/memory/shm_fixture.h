// SPDX-License-Identifier: Apache-2.0
// A temporary shared memory directory; the test removes it at its end.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <string>
#include <vector>

#include "memory/host_region.h"

namespace kv_offload {

inline constexpr std::uint64_t kMiB = 1024 * 1024;

class ShmTest : public ::testing::Test {
 protected:
  ShmTest() {
    std::string pattern = "/dev/shm/region-test-XXXXXX";
    directory_ = ::mkdtemp(pattern.data());
  }
  ~ShmTest() override { std::filesystem::remove_all(directory_); }

  RegionOptions options(std::uint64_t bytes, std::uint32_t workers,
                        const std::string& engine = "engine") const {
    RegionOptions options;
    options.engine_id = engine;
    options.bytes = bytes;
    options.num_areas = workers;
    options.num_workers = workers;
    options.shm_directory = directory_;
    return options;
  }
  std::vector<std::string> names() const {
    std::vector<std::string> found;
    for (const auto& entry : std::filesystem::directory_iterator(directory_)) {
      found.push_back(entry.path().filename());
    }
    return found;
  }

  std::string directory_;
};

// Runs an action that must throw `Error` and returns the message.
template <typename Error, typename Action>
std::string message_of(Action action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return {};
}

inline bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

inline RankGeometry some_geometry(std::uint32_t rank = 0) {
  return {{4096 + rank, 100}, "rank " + std::to_string(rank)};
}

}  // namespace kv_offload
