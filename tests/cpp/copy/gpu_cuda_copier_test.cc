// SPDX-License-Identifier: Apache-2.0
// Tests on a GPU: the CUDA copier moves the same bytes as the plain reference, in the order that
// the compute stream requires. On a machine without a GPU every test is skipped with a message. The
// fake CUDA runtime (tests/cpp/fake_cuda) runs the same tests.
//
// KV_OFFLOAD_GPU_SECONDS (default 5) is the duration of the random test; KV_OFFLOAD_GPU_CASES
// (default 300) is the number of cases per path.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <future>
#include <numeric>
#include <thread>

#include "copy/block_copier.h"
#include "copy/copy_cases.h"
#include "copy/cuda_device.h"
#include "copy/cuda_library.h"
#include "copy/cuda_pinning.h"
#include "copy/device_copier.h"

extern "C" kv_offload::BlockCopier* kv_offload_cuda_make_copier(const kv_offload::CopierOptions* options,
                                                                bool* callers_mistake, char* message,
                                                                std::size_t capacity);

namespace kv_offload {
namespace {

using testing::CopyCase;
using testing::draw_case;
using testing::Expected;
using testing::expected_after;
using testing::snapshot;
using enum CopyDirection;
using Ids = std::vector<std::uint64_t>;

void check(cudaError_t error) { ASSERT_EQ(error, cudaSuccess) << cudaGetErrorString(error); }

int from_environment(const char* name, int otherwise) {
  const char* wanted = std::getenv(name);
  return wanted != nullptr ? std::atoi(wanted) : otherwise;
}

std::unique_ptr<BlockCopier> make(const CopierOptions& options) {
  std::array<char, kCudaMessageBytes> message{};
  bool mistake = false;
  std::unique_ptr<BlockCopier> copier(
      kv_offload_cuda_make_copier(&options, &mistake, message.data(), message.size()));
  if (copier == nullptr) throw std::runtime_error(message.data());
  return copier;
}

// A case whose caches are on the device. The case's host memory is a copy: it is uploaded before a
// job and downloaded after it.
class OnDevice {
 public:
  explicit OnDevice(CopyCase* c) : case_(*c) {
    layout_ = c->layout;
    for (std::size_t t = 0; t < c->caches.size(); ++t) {
      void* memory = nullptr;
      check(cudaMalloc(&memory, c->caches[t].size()));
      memory_.push_back(static_cast<std::byte*>(memory));
      layout_.tensors[t].base = memory_[t] + (c->layout.tensors[t].base - c->caches[t].data());
    }
    up();
  }
  ~OnDevice() {
    for (std::byte* memory : memory_) (void)cudaFree(memory);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

  void up() {
    for (std::size_t t = 0; t < memory_.size(); ++t) {
      check(cudaMemcpy(memory_[t], case_.caches[t].data(), case_.caches[t].size(), cudaMemcpyHostToDevice));
    }
    check(cudaDeviceSynchronize());  // small copies return before they complete; our streams do not wait for
                                     // them
  }
  void down() {
    for (std::size_t t = 0; t < memory_.size(); ++t) {
      check(cudaMemcpy(case_.caches[t].data(), memory_[t], case_.caches[t].size(), cudaMemcpyDeviceToHost));
    }
  }
  const CacheLayout& layout() const { return layout_; }
  std::byte* memory(std::size_t t) { return memory_[t]; }

 private:
  CopyCase& case_;
  CacheLayout layout_;
  std::vector<std::byte*> memory_;
};

class Gpu : public ::testing::Test {
 protected:
  void SetUp() override {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0)
      GTEST_SKIP() << "no CUDA device on this machine";
    check(cudaSetDevice(0));
    check(cudaStreamCreateWithFlags(&compute_, cudaStreamNonBlocking));
  }
  void TearDown() override {
    if (compute_ != nullptr) (void)cudaStreamDestroy(compute_);
  }
  std::uintptr_t compute_handle() const { return reinterpret_cast<std::uintptr_t>(compute_); }
  cudaStream_t compute_ = nullptr;
};

class GpuPaths : public Gpu, public ::testing::WithParamInterface<CopyPath> {};
INSTANTIATE_TEST_SUITE_P(Every, GpuPaths,
                         ::testing::Values(CopyPath::kDma, CopyPath::kKernel, CopyPath::kStaged),
                         [](const auto& path) { return std::string(to_string(path.param)); });

TEST_P(GpuPaths, random_jobs_match_the_reference_copy_on_each_path) {
  std::mt19937_64 random(31);
  for (int i = 0, cases = from_environment("KV_OFFLOAD_GPU_CASES", 300); i < cases; ++i) {
    CopyCase c = draw_case(random, i % 2 == 0 ? kStore : kLoad,
                           {.max_page = i % 8 == 0 ? 60'000u : 700u, .page_multiple = i % 3 == 0 ? 16u : 1u});
    const Expected expected = expected_after(c);
    OnDevice on_device(&c);
    {
      PinnedArea pinned(c.area, {.piece_bytes = 2 << 20});
      CopierOptions options;
      options.layout = on_device.layout();
      options.area = c.area;
      const DeviceLimits limits{.dma_bytes = 1 + random() % 100'000,
                                .kernel_bytes = 1 + random() % 100'000,
                                .staged_bytes = 40'000,
                                .boundary = pinned.piece_bytes()};
      auto device = std::make_unique<CudaDevice>(
          CudaDeviceOptions{.area = c.area, .boundary = limits.boundary, .staging_bytes = 40'000});
      DeviceCopier copier(options, std::move(device), single_path_table(GetParam()), limits);
      CopyJob job = c.job;
      job.compute_stream = compute_handle();
      copier.submit(std::move(job));
      copier.wait(Ids{c.job.id});
      const auto results = copier.poll();
      ASSERT_EQ(results.size(), 1u);
      ASSERT_TRUE(results[0].status.is_ok()) << results[0].status.to_string();
    }
    on_device.down();
    ASSERT_TRUE(snapshot(c) == expected) << "case " << i;
  }
}

TEST_F(Gpu, random_jobs_of_the_default_copier_match_the_reference_copy) {
  const auto end =
      std::chrono::steady_clock::now() + std::chrono::seconds(from_environment("KV_OFFLOAD_GPU_SECONDS", 5));
  std::mt19937_64 random(32);
  for (int i = 0; std::chrono::steady_clock::now() < end; ++i) {
    CopyCase c = draw_case(random, i % 2 == 0 ? kStore : kLoad, {.max_blocks = 48, .max_page = 40'000});
    const Expected expected = expected_after(c);
    OnDevice on_device(&c);
    CopierOptions options;
    options.layout = on_device.layout();
    options.area = c.area;
    options.calibrate = false;
    auto copier = make(options);
    CopyJob job = c.job;
    job.compute_stream = compute_handle();
    copier->submit(std::move(job));
    if (i % 3 == 0) copier->wait(Ids{c.job.id});
    copier->close();
    const auto results = copier->poll();
    ASSERT_EQ(results.size(), 1u);
    ASSERT_TRUE(results[0].status.is_ok()) << results[0].status.to_string();
    copier.reset();
    on_device.down();
    ASSERT_TRUE(snapshot(c) == expected) << "case " << i;
  }
}

// The compute stream is blocked until the test releases it: the slowest possible writer or reader.
class GpuOrder : public Gpu, public ::testing::WithParamInterface<CopyPath> {
 protected:
  static constexpr std::uint64_t kBlock = 64 << 10;
  static constexpr std::uint64_t kBlocks = 16;
  static constexpr std::uint64_t kAllBlocks = kBlocks + 1;  // the last block is for other jobs

  void SetUp() override {
    Gpu::SetUp();
    if (IsSkipped()) return;
    check(cudaStreamCreateWithFlags(&other_, cudaStreamNonBlocking));
    std::iota(rows_.begin(), rows_.end(), RowId{0});  // shuffled, so that nothing merges
    std::shuffle(rows_.begin(), rows_.end(), std::mt19937_64(33));
    check(cudaMalloc(reinterpret_cast<void**>(&cache_), kBlock * kAllBlocks));
    check(cudaMalloc(reinterpret_cast<void**>(&seen_), kBlock * kBlocks));
    check(cudaMemset(cache_, 1, kBlock * kAllBlocks));
    check(cudaDeviceSynchronize());
    area_.assign(kBlock * kAllBlocks, std::byte{2});
    pinned_ = std::make_unique<PinnedArea>(area_, PinOptions{.piece_bytes = 2 << 20});
  }
  void TearDown() override {
    let_go();
    copier_.reset();
    if (!IsSkipped()) (void)cudaDeviceSynchronize();  // waits for the operations that the test queued itself
    pinned_.reset();
    if (cache_ != nullptr) (void)cudaFree(cache_);
    if (seen_ != nullptr) (void)cudaFree(seen_);
    if (other_ != nullptr) (void)cudaStreamDestroy(other_);
    Gpu::TearDown();
  }
  void start(bool ordered) {
    CopierOptions options;
    options.layout = {
        .tensors = {{cache_, kAllBlocks, kBlock}}, .groups = {{{0, kBlock}}}, .blocks_per_chunk = 1};
    options.area = area_;
    options.order_after_compute = ordered;
    const DeviceLimits limits{.dma_bytes = 256 << 10, .kernel_bytes = 256 << 10, .staged_bytes = 300 << 10};
    auto device = std::make_unique<CudaDevice>(CudaDeviceOptions{.area = area_, .staging_bytes = 300 << 10});
    copier_ =
        std::make_unique<DeviceCopier>(options, std::move(device), single_path_table(GetParam()), limits);
  }
  void hold_compute() {
    check(cudaLaunchHostFunc(
        compute_, [](void* self) { static_cast<GpuOrder*>(self)->gate_.get_future().wait(); }, this));
  }
  void let_go() {
    if (!let_go_) gate_.set_value();
    let_go_ = true;
  }
  void submit(CopyDirection direction) {
    CopyJob job = job_of(1, direction, compute_);
    for (std::uint64_t b = 0; b < kBlocks; ++b) {
      job.block_ids.push_back(static_cast<std::int64_t>(b));
      job.rows.push_back(rows_[b] * static_cast<RowId>(kBlock / kPageBytes));
    }
    submit(std::move(job));
  }
  // Passes jobs without an event through the copier in both directions, one after the other. This
  // gives the copier every chance to issue and complete a copy that must wait.
  void let_other_jobs_pass() {
    for (std::uint64_t id = 100; id < 140; ++id) {
      CopyJob job = job_of(id, id % 2 == 0 ? kStore : kLoad, other_);
      job.block_ids = {kBlocks};
      job.rows = {static_cast<RowId>(kBlocks * (kBlock / kPageBytes))};
      submit(std::move(job));
      copier_->wait(Ids{id});
    }
    for (const CopyResult& result : copier_->poll())
      EXPECT_NE(result.job_id, 1u) << "the job ended before its event was reached";
  }
  static CopyJob job_of(std::uint64_t id, CopyDirection direction, cudaStream_t behind) {
    CopyJob job;
    job.id = id;
    job.direction = direction;
    job.compute_stream = reinterpret_cast<std::uintptr_t>(behind);
    return job;
  }
  void submit(CopyJob job) {
    job.group_sizes = {static_cast<std::uint32_t>(job.block_ids.size())};
    job.group_rows = job.group_sizes;
    job.block_indices = {0};
    copier_->submit(std::move(job));
  }
  std::vector<std::byte> area() const { return {area_.begin(), area_.begin() + kBlock * kBlocks}; }
  std::vector<std::byte> device_bytes(const std::byte* memory) {
    std::vector<std::byte> bytes(kBlock * kBlocks);
    check(cudaMemcpy(bytes.data(), memory, bytes.size(), cudaMemcpyDeviceToHost));
    return bytes;
  }
  static std::vector<std::byte> all(int value) {
    return std::vector<std::byte>(kBlock * kBlocks, static_cast<std::byte>(value));
  }

  std::byte* cache_ = nullptr;
  std::byte* seen_ = nullptr;
  cudaStream_t other_ = nullptr;
  std::array<RowId, kBlocks> rows_{};
  std::vector<std::byte> area_;
  std::unique_ptr<PinnedArea> pinned_;
  std::unique_ptr<DeviceCopier> copier_;
  std::promise<void> gate_;
  bool let_go_ = false;
};
INSTANTIATE_TEST_SUITE_P(Every, GpuOrder,
                         ::testing::Values(CopyPath::kDma, CopyPath::kKernel, CopyPath::kStaged),
                         [](const auto& path) { return std::string(to_string(path.param)); });

TEST_P(GpuOrder, a_store_waits_for_earlier_writes_of_the_compute_stream) {
  start(true);
  hold_compute();
  check(cudaMemsetAsync(cache_, 9, kBlock * kBlocks, compute_));
  submit(kStore);
  let_other_jobs_pass();
  EXPECT_EQ(area(), all(2));
  let_go();
  copier_->wait(Ids{1});
  EXPECT_EQ(area(), all(9));
}

// The control: without the event the corruption must be visible.
TEST_P(GpuOrder, control_a_store_without_the_event_reads_old_bytes) {
  start(false);
  hold_compute();
  check(cudaMemsetAsync(cache_, 9, kBlock * kBlocks, compute_));
  submit(kStore);
  copier_->wait(Ids{1});
  EXPECT_EQ(area(), all(1));
}

TEST_P(GpuOrder, a_load_waits_for_earlier_reads_of_the_compute_stream) {
  start(true);
  hold_compute();
  check(cudaMemcpyAsync(seen_, cache_, kBlock * kBlocks, cudaMemcpyDeviceToDevice, compute_));
  submit(kLoad);
  let_other_jobs_pass();
  let_go();
  copier_->wait(Ids{1});
  check(cudaStreamSynchronize(compute_));
  EXPECT_EQ(device_bytes(seen_), all(1));
  EXPECT_EQ(device_bytes(cache_), all(2));
}

TEST_P(GpuOrder, control_a_load_without_the_event_overwrites_too_early) {
  start(false);
  hold_compute();
  check(cudaMemcpyAsync(seen_, cache_, kBlock * kBlocks, cudaMemcpyDeviceToDevice, compute_));
  submit(kLoad);
  copier_->wait(Ids{1});
  let_go();
  check(cudaStreamSynchronize(compute_));
  EXPECT_EQ(device_bytes(seen_), all(2));
}

TEST_P(GpuOrder, a_store_does_not_break_a_capture_on_another_stream) {
  start(true);
  cudaStream_t captured = nullptr;
  check(cudaStreamCreateWithFlags(&captured, cudaStreamNonBlocking));
  check(cudaStreamBeginCapture(captured, cudaStreamCaptureModeGlobal));
  check(cudaMemsetAsync(seen_, 7, kBlock, captured));
  submit(kStore);
  copier_->wait(Ids{1});
  cudaGraph_t graph = nullptr;
  check(cudaStreamEndCapture(captured, &graph));
  EXPECT_NE(graph, nullptr);
  EXPECT_EQ(area(), all(1));
  check(cudaGraphDestroy(graph));
  check(cudaStreamDestroy(captured));
}

TEST_F(Gpu, a_refused_launch_fails_its_copy_and_clears_the_error) {
  std::vector<std::byte> area(1 << 20);
  PinnedArea pinned(area, {.piece_bytes = 2 << 20});
  void* cache = nullptr;
  check(cudaMalloc(&cache, 4096));
  // Uses a new thread, as the copier does: enter_thread() changes the capture mode and does not
  // restore it.
  std::thread([&] {
    CudaDevice device({.area = area, .kernel_blocks = 0});
    device.enter_thread();
    const std::vector<CopySegment> segments = {{static_cast<std::byte*>(cache), 0, 4096}};
    const Status status =
        device.issue({.direction = kStore, .path = CopyPath::kKernel, .segments = segments});
    EXPECT_EQ(status.kind(), StatusKind::kDevice) << status.to_string();
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  }).join();
  check(cudaFree(cache));
}

TEST_F(Gpu, a_cache_address_outside_device_memory_is_refused) {
  std::vector<std::byte> area(1 << 20);
  CopierOptions options;
  options.layout = {.tensors = {{area.data(), 1, 4096}}, .groups = {{{0, 4096}}}, .blocks_per_chunk = 1};
  options.area = area;
  options.calibrate = false;
  EXPECT_THROW((void)make(options), std::runtime_error);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

TEST_F(Gpu, pinning_reports_progress_and_leaves_nothing_registered) {
  std::vector<std::byte> area(64 << 20);
  std::uint64_t last = 0;
  {
    PinnedArea pinned(area,
                      {.piece_bytes = 4 << 20, .progress = [&](std::uint64_t done, std::uint64_t total) {
                         EXPECT_EQ(total, area.size());
                         EXPECT_GE(done, last);
                         last = done;
                       }});
    EXPECT_EQ(last, area.size());
    EXPECT_TRUE(pinned.reachable_by_kernels());
  }
  PinnedArea again(area, {.piece_bytes = 4 << 20});
}

TEST_F(Gpu, the_description_shows_that_rates_were_measured) {
  std::vector<std::byte> area(1 << 20);
  void* cache = nullptr;
  check(cudaMalloc(&cache, 1 << 20));
  CopierOptions options;
  options.layout = {.tensors = {{static_cast<std::byte*>(cache), 256, 4096}},
                    .groups = {{{0, 4096}}},
                    .blocks_per_chunk = 1};
  options.area = area;
  std::unique_ptr<BlockCopier> copier;
  for (int i = 0; i < 20; ++i) {  // a stalled machine measures nothing
    copier.reset();
    copier = make(options);
    if (copier->describe().find("the time budget ended") == std::string::npos) break;
  }
  EXPECT_EQ(copier->describe().find("not measured"), std::string::npos) << copier->describe();
  EXPECT_NE(copier->describe().find("rates measured"), std::string::npos) << copier->describe();
  std::puts(copier->describe().c_str());
  copier->close();
  (void)cudaFree(cache);
}

TEST_F(Gpu, opening_and_closing_copiers_leaks_no_device_memory) {
  std::vector<std::byte> area(1 << 20);
  void* cache = nullptr;
  check(cudaMalloc(&cache, 1 << 20));
  CopierOptions options;
  options.layout = {.tensors = {{static_cast<std::byte*>(cache), 256, 4096}},
                    .groups = {{{0, 4096}}},
                    .blocks_per_chunk = 1};
  options.area = area;
  options.calibrate = false;
  std::size_t free_before = 0;
  std::size_t total = 0;
  (void)make(options);
  check(cudaMemGetInfo(&free_before, &total));
  for (int i = 0; i < 20; ++i) (void)make(options);
  std::size_t free_after = 0;
  check(cudaMemGetInfo(&free_after, &total));
  EXPECT_EQ(free_before, free_after);
  (void)cudaFree(cache);
}

}  // namespace
}  // namespace kv_offload
