#include <gtest/gtest.h>

#include "copy/block_copier.h"

namespace kv_offload {
namespace {

CopierOptions valid_options(std::vector<std::byte>* cache, std::vector<std::byte>* area) {
  CopierOptions options;
  options.layout = {.tensors = {{cache->data(), 1, 64}}, .groups = {{{0, 64}}}, .blocks_per_chunk = 1};
  options.area = *area;
  return options;
}

TEST(CopierLoader, says_in_one_line_why_there_is_no_cuda_and_says_the_same_when_asked_for_a_copier) {
  const std::string reason = cuda_unavailable_reason();
  if (reason.empty()) GTEST_SKIP() << "this machine has a CUDA device";
  EXPECT_EQ(reason.find('\n'), std::string::npos);
  std::vector<std::byte> cache(64);
  std::vector<std::byte> area(kPageBytes);
  try {
    (void)make_cuda_copier(valid_options(&cache, &area));
    FAIL() << "no copier was expected";
  } catch (const ResourceError& error) {
    EXPECT_NE(std::string(error.what()).find(reason), std::string::npos) << error.what();
  }
}

TEST(CopierLoader, asking_twice_gives_the_same_answer) {
  EXPECT_EQ(cuda_unavailable_reason(), cuda_unavailable_reason());
}

}  // namespace
}  // namespace kv_offload
