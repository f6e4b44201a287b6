// SPDX-License-Identifier: Apache-2.0
// Devices, contexts, captures: effects of the copier on a process with several GPUs and on a model
// that captures graphs.
#include <thread>

#include "copy/pack_pages.h"
#include "fake_cuda/world.h"

namespace kv_offload::fake_cuda_tests {
namespace {

using Devices = std::set<int>;

// A cache and a compute stream on device 1, created by a thread that has exited.
class Contexts : public World {
 protected:
  void SetUp() override {
    std::thread([this] { World::SetUp(); }).join();
    ASSERT_EQ(fake_cuda::contexts(), Devices{kDevice});
  }
  void TearDown() override {
    std::thread([this] {
      check(cudaSetDevice(kDevice));
      World::TearDown();
    }).join();
  }
  CopierOptions options() {
    CopierOptions options;
    options.layout = layout();
    options.area = area_.span();
    options.device = kDevice;
    return options;
  }
};

// Runs `body` on a new thread without a context and checks that it gets none on device 0.
template <typename Body>
void on_a_fresh_thread(Body body) {
  std::thread([&] {
    body();
    int device = -1;
    check(cudaGetDevice(&device));
    EXPECT_EQ(device, 0) << "the thread's current device has changed";
  }).join();
}

TEST_F(Contexts, a_copier_creates_no_context_on_another_device) {
  pinned_.reset();
  on_a_fresh_thread([&] {
    CopierOptions with = options();
    with.calibrate = false;
    const auto copier = make_copier(with);
    ASSERT_NE(copier, nullptr);
    copier->submit(job(1, kStore));
    copier->wait(Ids{1});
    copier->submit(job(2, kLoad));
    copier->wait(Ids{2});
    EXPECT_EQ(copier->poll().size(), 2u);
    copier->close();
  });
  EXPECT_EQ(fake_cuda::contexts(), Devices{kDevice});
}

TEST_F(Contexts, calibration_creates_no_context_on_another_device) {
  pinned_.reset();
  on_a_fresh_thread([&] { EXPECT_NE(make_copier(options()), nullptr); });
  EXPECT_EQ(fake_cuda::contexts(), Devices{kDevice});
}

// While the thread has no context, it asks the driver for nothing but contexts.
TEST_F(Contexts, opening_a_device_creates_no_context_on_another) {
  on_a_fresh_thread([&] {
    const CudaDevice device({.device = kDevice, .area = area_.span()});
    EXPECT_NE(device.name().find("batched DMA"), std::string::npos) << device.name();
  });
  EXPECT_EQ(fake_cuda::contexts(), Devices{kDevice});
}

TEST_F(Contexts, pinning_creates_no_context_on_another_device) {
  AlignedBuffer area(16 << 20);
  on_a_fresh_thread([&] { PinnedArea(area.span(), {.device = kDevice, .piece_bytes = 2 << 20}); });
  EXPECT_EQ(fake_cuda::contexts(), Devices{kDevice});
}

TEST_F(Contexts, the_torch_operator_creates_no_context_on_another_device) {
  on_a_fresh_thread([&] {
    const std::vector<PackPiece> pages = {{cache_, area_.data(), kBlock}};
    EXPECT_EQ(pack_pages_on_stream(pages, true, 4, kDevice, compute_), "");
    check(cudaStreamSynchronize(compute_));
  });
  EXPECT_EQ(fake_cuda::contexts(), Devices{kDevice});
}

TEST_F(Contexts, device_and_numa_queries_create_no_context) {
  on_a_fresh_thread([&] {
    std::array<char, kCudaMessageBytes> message{};
    kv_offload_cuda_unavailable_reason(message.data(), message.size());
    EXPECT_STREQ(message.data(), "");
    EXPECT_EQ(numa_node_of(0), -1);
  });
  EXPECT_EQ(fake_cuda::contexts(), Devices{kDevice});
}

class Capture : public World {
 protected:
  void begin_capture(cudaStream_t stream) {
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  }
  void expect_the_graph_is_whole(cudaStream_t stream) {
    cudaGraph_t graph = nullptr;
    EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    ASSERT_NE(graph, nullptr);
    check(cudaGraphDestroy(graph));
  }
};

TEST_F(Capture, a_copier_does_not_break_a_capture_on_another_stream) {
  cudaStream_t captured = nullptr;
  check(cudaStreamCreateWithFlags(&captured, cudaStreamNonBlocking));
  pinned_.reset();
  begin_capture(captured);
  {
    CopierOptions options;
    options.layout = layout();
    options.area = area_.span();
    options.device = kDevice;
    const auto copier = make_copier(options);
    ASSERT_NE(copier, nullptr);
    copier->submit(job(1, kStore));
    copier->wait(Ids{1});
    EXPECT_TRUE(area_holds(1));
  }
  expect_the_graph_is_whole(captured);
  check(cudaStreamDestroy(captured));
}

TEST_F(Capture, a_job_behind_a_captured_stream_fails_without_breaking_it) {
  start(CopyPath::kDma);
  begin_capture(compute_);
  submit(1, kStore);
  copier_->wait(Ids{1});
  const auto results = copier_->poll();
  ASSERT_EQ(results.size(), 1u);
  EXPECT_EQ(results[0].status.message(), "the compute stream is being captured into a graph");
  EXPECT_TRUE(area_is_untouched());
  expect_the_graph_is_whole(compute_);
  submit(2, kStore);
  copier_->wait(Ids{2});
  EXPECT_TRUE(copier_->poll()[0].status.is_ok());
}

TEST_F(Capture, the_torch_operator_refuses_a_capture) {
  const std::vector<PackPiece> pages = {{cache_, area_.data(), kBlock}};
  begin_capture(compute_);
  EXPECT_NE(pack_pages_on_stream(pages, true, 4, kDevice, compute_).find("graph capture"), std::string::npos);
  expect_the_graph_is_whole(compute_);
}

TEST_F(Capture, the_torch_operator_is_asynchronous_and_copies_its_page_list) {
  {
    const Hold kernels(Work::kKernel);
    std::vector<PackPiece> pages;
    for (std::uint64_t b = 0; b < kBlocks; ++b) {
      pages.push_back({cache_ + b * kBlock, area_.data() + rows_[b] * kPageBytes, kBlock});
    }
    EXPECT_EQ(pack_pages_on_stream(pages, true, 4, kDevice, compute_), "");
    kernels.until_standing(1);
    std::fill(pages.begin(), pages.end(), PackPiece{});
    EXPECT_TRUE(area_is_untouched());
  }
  check(cudaStreamSynchronize(compute_));
  EXPECT_TRUE(area_holds(1));
}

TEST_F(Capture, the_torch_operator_moves_many_pages_with_few_launches) {
  constexpr std::uint64_t kPage = 256;
  std::vector<PackPiece> pages;
  for (std::uint64_t at = 0; at < kBlock * kBlocks; at += kPage) {
    const std::uint64_t row = rows_[at / kBlock] * kPageBytes + at % kBlock;
    pages.push_back({cache_ + at, area_.data() + row, kPage});
  }
  EXPECT_EQ(pack_pages_on_stream(pages, true, 4, kDevice, compute_), "");
  check(cudaStreamSynchronize(compute_));
  EXPECT_TRUE(area_holds(1));
  EXPECT_EQ(fake_cuda::launches().size(), 2u) << pages.size();
}

TEST_F(Capture, the_torch_operator_refuses_pageable_host_memory) {
  std::vector<std::byte> pageable(kBlock);
  const std::vector<PackPiece> pages = {{cache_, pageable.data(), kBlock}};
  EXPECT_NE(pack_pages_on_stream(pages, true, 4, kDevice, compute_).find("pinned host memory"),
            std::string::npos);
}

// Tests both sides in both directions: no device has peer access to another device's memory.
TEST_F(Capture, the_torch_operator_refuses_memory_of_another_device) {
  std::byte* other = nullptr;
  std::thread([&] {
    check(cudaSetDevice(0));
    check(cudaMalloc(reinterpret_cast<void**>(&other), kBlock));
  }).join();
  for (const PackPiece& page : {PackPiece{cache_, other, kBlock}, PackPiece{other, area_.data(), kBlock}}) {
    for (const bool to_row : {true, false}) {
      EXPECT_EQ(pack_pages_on_stream(std::vector{page}, to_row, 4, kDevice, compute_),
                "both sides must be memory of CUDA device 1 or pinned host memory");
    }
  }
  check(cudaStreamSynchronize(compute_));
  EXPECT_TRUE(fake_cuda::launches().empty());
  check(cudaFree(other));
}

}  // namespace
}  // namespace kv_offload::fake_cuda_tests
