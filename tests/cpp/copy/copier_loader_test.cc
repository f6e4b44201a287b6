// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <set>

#include "copy/block_copier.h"
#include "copy/cuda_library.h"

namespace kv_offload {
namespace {

CopierOptions valid_options(std::vector<std::byte>* cache, std::vector<std::byte>* area) {
  CopierOptions options;
  options.layout = {.tensors = {{cache->data(), 1, 64}}, .groups = {{{0, 64}}}, .blocks_per_chunk = 1};
  options.area = *area;
  return options;
}

TEST(CopierLoader, without_cuda_the_copier_error_contains_the_reason) {
  const std::string reason = cuda_unavailable_reason();
  if (reason.empty()) GTEST_SKIP() << "this machine has a CUDA device";
  EXPECT_EQ(reason.find('\n'), std::string::npos);
  std::vector<std::byte> cache(64);
  std::vector<std::byte> area(kPageBytes);
  try {
    (void)make_cuda_copier(valid_options(&cache, &area));
    FAIL() << "make_copier returned without an error";
  } catch (const ResourceError& error) {
    EXPECT_NE(std::string(error.what()).find(reason), std::string::npos) << error.what();
  }
}

struct Small {
  bool first;
  std::uint64_t last;
};
struct Padded {  // the same size as Small
  bool first, second;
  std::uint64_t last;
};

// The interface number of the core and the CUDA library depends on the members of every shared
// struct.
TEST(CopierLoader, changed_struct_members_change_the_interface_number) {
  using cuda_interface::list;
  const Small small{};
  const Padded padded{};
  static_assert(sizeof(Small) == sizeof(Padded));
  const auto number = [](const auto& members) { return members.mixed_into(1); };
  const std::set<std::uint64_t> numbers = {
      number(list(small, small.first, small.last)), number(list(small, small.last, small.first)),
      number(list(padded, padded.first, padded.second, padded.last)), number(list(padded, padded.first)),
      number(list(padded, padded.first, padded.second, std::int64_t{}))};
  EXPECT_EQ(numbers.size(), 5u);
  EXPECT_EQ(number(list(small, small.first, small.last)), number(list(small, small.first, small.last)));
  EXPECT_GT(kCudaInterface, std::uint64_t{1} << 32) << "the interface number looks like a manual version";
}

TEST(CopierLoader, the_reason_is_the_same_at_each_call) {
  EXPECT_EQ(cuda_unavailable_reason(), cuda_unavailable_reason());
}

}  // namespace
}  // namespace kv_offload
