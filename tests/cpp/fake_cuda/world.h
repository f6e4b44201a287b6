// SPDX-License-Identifier: Apache-2.0
// A cache on device 1 of the fake CUDA runtime, an area, and a copier between them. The area orders
// the blocks differently from the cache, so that no segments merge. Every block has different
// bytes.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <future>
#include <memory>
#include <numeric>
#include <random>

#include "base/aligned_buffer.h"
#include "copy/cuda_device.h"
#include "copy/cuda_library.h"
#include "copy/cuda_pinning.h"
#include "copy/device_copier.h"
#include "fake_cuda/controls.h"

extern "C" kv_offload::BlockCopier* kv_offload_cuda_make_copier(const kv_offload::CopierOptions* options,
                                                                bool* callers_mistake, char* message,
                                                                std::size_t capacity);
extern "C" void kv_offload_cuda_unavailable_reason(char* message, std::size_t capacity);

namespace kv_offload::fake_cuda_tests {

using enum CopyDirection;
using fake_cuda::Hold;
using fake_cuda::Work;
using Ids = std::vector<std::uint64_t>;

inline constexpr int kDevice = 1;  // a new thread is on device 0

inline void check(cudaError_t error) { ASSERT_EQ(error, cudaSuccess) << cudaGetErrorString(error); }

class World : public ::testing::Test {
 protected:
  static constexpr std::uint64_t kBlock = 8 << 10;
  static constexpr std::uint64_t kBlocks = 64;

  World() : area_(kBlock * kBlocks), rows_(kBlocks) {
    std::iota(rows_.begin(), rows_.end(), RowId{0});
    std::mt19937_64 random(7);
    std::shuffle(rows_.begin(), rows_.end(), random);
    for (RowId& row : rows_) row *= kBlock / kPageBytes;
  }
  void SetUp() override {
    check(cudaSetDevice(kDevice));
    check(cudaMalloc(reinterpret_cast<void**>(&cache_), kBlock * kBlocks));
    check(cudaStreamCreateWithFlags(&compute_, cudaStreamNonBlocking));
    fill(cache(), 1);
    fill(area_.span(), 100);
    pinned_ =
        std::make_unique<PinnedArea>(area_.span(), PinOptions{.device = kDevice, .piece_bytes = 2 << 20});
  }
  void TearDown() override {
    let_go();
    (void)cudaStreamSynchronize(compute_);  // the host function queued by hold_compute() uses this object
    copier_.reset();
    pinned_.reset();
    (void)cudaStreamDestroy(compute_);
    (void)cudaFree(cache_);
  }

  void start(CopyPath path,
             DeviceLimits limits = {
                 .dma_bytes = 128 << 10, .kernel_bytes = 128 << 10, .staged_bytes = 160 << 10}) {
    CopierOptions options;
    options.layout = layout();
    options.area = area_.span();
    auto device = std::make_unique<CudaDevice>(CudaDeviceOptions{
        .device = kDevice, .area = area_.span(), .kernel_blocks = 3, .staging_bytes = limits.staged_bytes});
    copier_ = std::make_unique<DeviceCopier>(options, std::move(device), single_path_table(path), limits);
  }
  CacheLayout layout() const {
    return {.tensors = {{cache_, kBlocks, kBlock}}, .groups = {{{0, kBlock}}}, .blocks_per_chunk = 1};
  }
  CopyJob job(std::uint64_t id, CopyDirection direction) const {
    CopyJob job;
    job.id = id;
    job.direction = direction;
    job.compute_stream = reinterpret_cast<std::uintptr_t>(compute_);
    for (std::uint64_t b = 0; b < kBlocks; ++b) job.block_ids.push_back(static_cast<std::int64_t>(b));
    job.rows = rows_;
    job.group_sizes = {kBlocks};
    job.group_rows = {kBlocks};
    job.block_indices = {0};
    return job;
  }
  void submit(std::uint64_t id, CopyDirection direction) { copier_->submit(job(id, direction)); }

  // Blocks the compute stream until let_go().
  void hold_compute() {
    check(cudaLaunchHostFunc(
        compute_, [](void* self) { static_cast<World*>(self)->gate_.get_future().wait(); }, this));
  }
  void let_go() {
    if (!std::exchange(let_go_, true)) gate_.set_value();
  }
  // Returns after the copier's thread has polled several times and its issued copies have run as
  // far as they can.
  static void settle() {
    fake_cuda::until_called("cudaEventQuery", 6);
    fake_cuda::settle();
  }

  std::span<std::byte> cache() const { return {cache_, kBlock * kBlocks}; }
  // Returns the byte of block b in memory filled with `value`.
  static std::byte byte_of(int value, std::uint64_t b) { return static_cast<std::byte>(value + b); }
  static void fill(std::span<std::byte> memory, int value) {
    for (std::size_t i = 0; i < memory.size(); ++i) memory[i] = byte_of(value, i / kBlock);
  }
  bool area_is_untouched() const { return is_filled(area_.span(), 100); }
  bool cache_is_untouched() const { return is_filled(cache(), 1); }
  // True if the area holds the bytes of a cache filled with `value`.
  bool area_holds(int value) const { return holds(area_.span(), value, true); }
  bool cache_holds_the_area(int value = 100) const { return holds(cache(), value, false); }

  AlignedBuffer area_;
  std::vector<RowId> rows_;
  std::byte* cache_ = nullptr;
  cudaStream_t compute_ = nullptr;
  std::unique_ptr<PinnedArea> pinned_;
  std::unique_ptr<DeviceCopier> copier_;

 private:
  static bool is_filled(std::span<const std::byte> memory, int value) {
    for (std::size_t i = 0; i < memory.size(); ++i) {
      if (memory[i] != byte_of(value, i / kBlock)) return false;
    }
    return true;
  }
  bool holds(std::span<const std::byte> memory, int value, bool rows) const {
    for (std::uint64_t b = 0; b < kBlocks; ++b) {
      const std::uint64_t row = rows_[b] * kPageBytes / kBlock;
      const auto block = memory.subspan((rows ? row : b) * kBlock, kBlock);
      const std::byte wanted = byte_of(value, rows ? b : row);
      if (!std::all_of(block.begin(), block.end(), [&](std::byte byte) { return byte == wanted; }))
        return false;
    }
    return true;
  }

  std::promise<void> gate_;
  bool let_go_ = false;
};

inline std::unique_ptr<BlockCopier> make_copier(const CopierOptions& options, std::string* why = nullptr) {
  std::array<char, kCudaMessageBytes> message{};
  bool mistake = false;
  std::unique_ptr<BlockCopier> copier(
      kv_offload_cuda_make_copier(&options, &mistake, message.data(), message.size()));
  if (copier == nullptr && why != nullptr) *why = (mistake ? "mistake: " : "") + std::string(message.data());
  return copier;
}

}  // namespace kv_offload::fake_cuda_tests
