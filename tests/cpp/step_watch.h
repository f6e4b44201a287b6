// SPDX-License-Identifier: Apache-2.0
// StepWatch: the maximum number of steps (base/steps.h) for which any mutex was held during the
// watch. Another thread may have to wait that long. steps_of() counts the steps of one call.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/steps.h"
#include "base/thread_annotations.h"

namespace testing {}
namespace kv_offload::testing {
using namespace ::testing;  // so that testing::Test is gtest's inside kv_offload

template <typename Call>
std::uint64_t steps_of(Call&& call) {
  const std::uint64_t before = steps_done;
  call();
  return steps_done - before;
}

// Watches the thread that created it only.
class StepWatch final : public Mutex::Watcher {
 public:
  StepWatch() { Mutex::watch(this); }
  ~StepWatch() override { Mutex::watch(nullptr); }
  void locked(const Mutex& mutex) override { held_.emplace_back(&mutex, steps_done); }
  void unlocking(const Mutex& mutex) override {
    const auto held =
        std::find_if(held_.rbegin(), held_.rend(), [&](const auto& one) { return one.first == &mutex; });
    if (held == held_.rend()) return;  // locked before this watch began
    most_ = std::max(most_, steps_done - held->second);
    held_.erase(std::next(held).base());
    ++holds_;
  }
  std::uint64_t most() const { return most_; }
  std::uint64_t holds() const { return holds_; }

 private:
  std::vector<std::pair<const Mutex*, std::uint64_t>> held_;
  std::uint64_t most_ = 0, holds_ = 0;
};

}  // namespace kv_offload::testing
