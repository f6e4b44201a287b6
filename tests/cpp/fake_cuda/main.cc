// SPDX-License-Identifier: Apache-2.0
// Gives each test a fresh machine; --gtest_repeat changes the seed.
#include <gtest/gtest.h>

#include <cstdlib>

#include "fake_cuda/controls.h"

namespace {

class EveryTest final : public ::testing::EmptyTestEventListener {
  void OnTestIterationStart(const ::testing::UnitTest&, int iteration) override {
    const char* wanted = std::getenv("KV_OFFLOAD_CUDA_SEED");
    seed_ = (wanted != nullptr ? std::strtoull(wanted, nullptr, 10) : 1) + static_cast<unsigned>(iteration);
  }
  void OnTestStart(const ::testing::TestInfo&) override { fake_cuda::begin(seed_); }
  void OnTestEnd(const ::testing::TestInfo& test) override {
    for (const std::string& wrong : fake_cuda::end()) {
      ADD_FAILURE() << test.test_suite_name() << "." << test.name() << ": " << wrong
                    << "; KV_OFFLOAD_CUDA_SEED=" << seed_;
    }
  }
  std::uint64_t seed_ = 1;
};

}  // namespace

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  ::testing::UnitTest::GetInstance()->listeners().Append(new EveryTest);
  return RUN_ALL_TESTS();
}
