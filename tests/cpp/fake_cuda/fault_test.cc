// SPDX-License-Identifier: Apache-2.0
// Fails every call once, loses the context, and tests drivers that lack features.
#include "copy/cuda_check.h"
#include "fake_cuda/world.h"

namespace kv_offload::fake_cuda_tests {
namespace {

class Faults : public World {
 protected:
  // Runs a store and a load through a new copier, and ignores which call fails.
  struct Outcome {
    bool opened = false;
    bool stored = false;
    bool loaded = false;
    std::string why;
  };
  Outcome run(CopyPath path) {
    Outcome outcome;
    fill(cache(), 1);
    fill(area_.span(), 100);
    try {
      const PinnedArea pinned(area_.span(), {.device = kDevice, .piece_bytes = 2 << 20});
      start(path);
      outcome.opened = true;
      submit(1, kStore);
      copier_->wait(Ids{1});
      outcome.stored = succeeded();
      if (outcome.stored) {
        EXPECT_TRUE(area_holds(1)) << "a failed store was reported as successful";
      }
      fill(area_.span(), 100);
      submit(2, kLoad);
      copier_->wait(Ids{2});
      outcome.loaded = succeeded();
      if (outcome.loaded) {
        EXPECT_TRUE(cache_holds_the_area()) << "a failed load was reported as successful";
      }
    } catch (const ResourceError& error) {
      outcome.why = error.what();
    }
    copier_.reset();
    EXPECT_EQ(cudaGetLastError(), cudaSuccess) << "an error was left for the next caller";
    return outcome;
  }
  // Returns true once the copier waits for a stream, false if it fails the job without waiting.
  bool waits_for_a_stream() {
    while (copier_->poll().empty()) {
      if (fake_cuda::calls()["cudaStreamSynchronize"] != 0) return true;
      std::this_thread::yield();
    }
    return false;
  }
  bool succeeded() {
    const auto results = copier_->poll();
    EXPECT_EQ(results.size(), 1u);
    if (results[0].status.is_ok()) return true;
    EXPECT_EQ(results[0].status.kind(), StatusKind::kDevice);
    EXPECT_EQ(results[0].failed_groups, ~std::uint64_t{0});
    return false;
  }
};

void leave_captures() {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  check(cudaThreadExchangeStreamCaptureMode(&mode));
}
// Returns this thread's capture mode and leaves it unchanged.
cudaStreamCaptureMode capture_mode() {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  check(cudaThreadExchangeStreamCaptureMode(&mode));
  cudaStreamCaptureMode found = mode;
  check(cudaThreadExchangeStreamCaptureMode(&mode));
  return found;
}

TEST_F(Faults, a_capture_mode_that_was_not_changed_is_not_restored) {
  ASSERT_EQ(capture_mode(), cudaStreamCaptureModeGlobal);
  {
    const CudaCaptureScope scope;
    EXPECT_EQ(capture_mode(), cudaStreamCaptureModeRelaxed);
  }
  EXPECT_EQ(capture_mode(), cudaStreamCaptureModeGlobal);
  fake_cuda::plant("cudaThreadExchangeStreamCaptureMode", 1, cudaErrorUnknown);
  { const CudaCaptureScope scope; }
  EXPECT_EQ(capture_mode(), cudaStreamCaptureModeGlobal);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess) << "an error was left for the next caller";
}

// errno values and CUDA codes overlap: 2 is ENOENT in errno and "out of memory" in CUDA.
TEST_F(Faults, a_cuda_error_code_is_not_reported_as_errno) {
  const Status status = cuda_status(cudaErrorMemoryAllocation, "cudaMalloc");
  EXPECT_EQ(status.error_number(), 0);
  EXPECT_NE(status.message().find(" 2)"), std::string::npos) << status.message();
  const CudaContext context(kDevice);
  fake_cuda::plant("cuCtxPushCurrent", 1, cudaErrorUnknown);
  const CudaContext::Scope scope(context);
  EXPECT_EQ(scope.status().kind(), StatusKind::kDevice);
  EXPECT_EQ(scope.status().error_number(), 0);
  EXPECT_EQ(scope.status().message(), "cuCtxPushCurrent: error 1");
}

TEST_F(Faults, only_fatal_cuda_errors_lose_the_context) {
  for (const int code : {214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911}) {
    EXPECT_TRUE(context_is_lost(static_cast<cudaError_t>(code))) << code;
  }
  for (const cudaError_t error :
       {cudaSuccess, cudaErrorMemoryAllocation, cudaErrorNotReady, cudaErrorNotSupported,
        cudaErrorCdpNotSupported, cudaErrorStreamCaptureUnsupported}) {
    EXPECT_FALSE(context_is_lost(error)) << error;
  }
}

// True for calls that may fail without harm: optional queries and calls that free resources.
bool may_be_ignored(const std::string& call, std::uint64_t number) {
  static const std::set<std::string> harmless = {
      "cudaMemcpyBatchAsync",  // copies are issued one by one instead
      "cudaHostGetDevicePointer",
      "cudaGetDriverEntryPointByVersion",
      "load_kernel",
      "cudaThreadExchangeStreamCaptureMode",
      "cudaEventDestroy",
      "cudaStreamDestroy",
      "cudaFree",
      "cudaHostUnregister"};
  // The first four calls belong to opening twice and marking twice; later ones belong to closing.
  return harmless.contains(call) || (call == "cuCtxPushCurrent" && number > 4);
}

TEST_F(Faults, every_failed_cuda_call_is_reported_and_corrupts_nothing) {
  pinned_.reset();
  for (const CopyPath path : {CopyPath::kDma, CopyPath::kKernel, CopyPath::kStaged}) {
    auto before = fake_cuda::calls();
    const Outcome whole = run(path);
    ASSERT_TRUE(whole.stored && whole.loaded) << whole.why;
    const auto after = fake_cuda::calls();
    for (const auto& [call, count] : after) {
      // Memory that stays allocated after a failed free is not a leak of the copier.
      if (call.ends_with("Destroy") || call == "cudaFree" || call == "cudaHostUnregister") continue;
      const std::uint64_t made = std::min<std::uint64_t>(count - before[call], 12);
      for (std::uint64_t n = 1; n <= made; ++n) {
        const std::uint64_t failures = fake_cuda::planted_failures();
        fake_cuda::plant(call, n, cudaErrorUnknown);
        const Outcome outcome = run(path);
        if (fake_cuda::planted_failures() == failures) break;                 // this run made fewer calls
        if (call == "cudaThreadExchangeStreamCaptureMode") leave_captures();  // restoring the mode failed
        const bool all_well = outcome.stored && outcome.loaded;
        EXPECT_TRUE(!all_well || may_be_ignored(call, n))
            << call << " number " << n << " failed, but no error was reported";
      }
      fake_cuda::plant(call, std::uint64_t{1} << 60, cudaErrorUnknown);
    }
  }
}

// Two faults at once: a batch is refused, then one of its single copies fails.
TEST_F(Faults, a_half_failed_staged_copy_ends_after_its_kernel) {
  start(CopyPath::kStaged);
  Hold kernels(Work::kKernel);
  fake_cuda::plant("cudaMemcpyBatchAsync", 1, cudaErrorUnknown);
  fake_cuda::plant("cudaMemcpyAsync", 1, cudaErrorUnknown);
  submit(1, kStore);
  ASSERT_TRUE(waits_for_a_stream()) << "its kernel still reads the cache";
  EXPECT_TRUE(copier_->poll().empty());
  kernels.release();
  copier_->wait(Ids{1});
  const auto results = copier_->poll();
  ASSERT_EQ(results.size(), 1u);
  EXPECT_EQ(results[0].status.kind(), StatusKind::kDevice);
}

TEST_F(Faults, a_copy_whose_query_fails_ends_after_its_stream) {
  start(CopyPath::kDma);
  Hold copies(Work::kCopy);
  submit(1, kStore);
  copies.until_standing(1);
  fake_cuda::plant("cudaEventQuery", 1, cudaErrorUnknown);
  ASSERT_TRUE(waits_for_a_stream()) << "the copy still reads the cache";
  EXPECT_TRUE(copier_->poll().empty());
  copies.release();
  copier_->wait(Ids{1});
  EXPECT_EQ(copier_->poll()[0].status.kind(), StatusKind::kDevice);
}

// The model uses the default stream: it may be blocked for a long time.
TEST_F(Faults, a_failed_copy_without_staging_waits_only_for_its_stream) {
  start(CopyPath::kDma, {});
  std::promise<void> gate;
  check(cudaLaunchHostFunc(
      nullptr, [](void* wait) { static_cast<std::promise<void>*>(wait)->get_future().wait(); }, &gate));
  const auto before = fake_cuda::calls()["cudaStreamSynchronize"];
  fake_cuda::plant("cudaMemcpyBatchAsync", 1, cudaErrorUnknown);
  fake_cuda::plant("cudaMemcpyAsync", 1, cudaErrorUnknown);
  submit(1, kStore);
  while (fake_cuda::calls()["cudaStreamSynchronize"] == before) std::this_thread::yield();
  gate.set_value();
  copier_->wait(Ids{1});
  EXPECT_FALSE(copier_->poll()[0].status.is_ok());
  EXPECT_EQ(fake_cuda::calls()["cudaStreamSynchronize"], before + 1);
  check(cudaStreamSynchronize(nullptr));  // its host function uses the gate
}

TEST_F(Faults, a_refused_batch_is_counted_and_copied_one_by_one) {
  start(CopyPath::kDma);
  fake_cuda::plant("cudaMemcpyBatchAsync", 1, cudaErrorUnknown);
  submit(1, kStore);
  copier_->wait(Ids{1});
  submit(2, kLoad);
  copier_->wait(Ids{2});
  std::uint64_t refused = 0;
  for (const CopyResult& result : copier_->poll()) {
    EXPECT_TRUE(result.status.is_ok());
    refused += result.refused_batches;
  }
  EXPECT_EQ(refused, 1u);
  EXPECT_GT(fake_cuda::single_copies(), 1u);
}

TEST_F(Faults, a_driver_without_batch_copies_gets_single_copies) {
  fake_cuda::set_batches_in_driver(false);
  start(CopyPath::kDma);
  submit(1, kStore);
  copier_->wait(Ids{1});
  EXPECT_TRUE(area_holds(1));
  EXPECT_TRUE(fake_cuda::batches().empty());
  EXPECT_NE(copier_->describe().find("DMA without batching"), std::string::npos);
}

TEST_F(Faults, a_lost_context_fails_running_and_later_jobs_with_its_reason) {
  start(CopyPath::kStaged);
  {
    const Hold copies(Work::kCopy);
    submit(1, kStore);
    copies.until_standing(1);
    fake_cuda::lose_context(cudaErrorIllegalAddress);
  }
  copier_->wait(Ids{1});
  submit(2, kLoad);
  copier_->wait(Ids{2});
  const auto results = copier_->poll();
  ASSERT_EQ(results.size(), 2u);
  for (const CopyResult& result : results) {
    EXPECT_EQ(result.failed_groups, ~std::uint64_t{0});
    EXPECT_NE(result.status.message().find("the CUDA context is lost"), std::string::npos)
        << result.status.message();
  }
  fake_cuda::find_context_again();
}

class Opening : public World {
 protected:
  CopierOptions options() {
    pinned_.reset();
    CopierOptions options;
    options.layout = layout();
    options.area = area_.span();
    options.device = kDevice;
    options.calibrate = false;
    return options;
  }
  std::string refusal(const CopierOptions& options) {
    std::string why;
    EXPECT_EQ(make_copier(options, &why), nullptr);
    return why;
  }
};

TEST_F(Opening, an_address_that_is_not_on_the_device_is_refused) {
  CopierOptions wrong = options();
  wrong.layout.tensors[0].base = area_.data();
  EXPECT_EQ(refusal(wrong), "mistake: cache tensor 0 is not memory of CUDA device 1");
  wrong = options();
  wrong.device = 0;
  EXPECT_EQ(refusal(wrong), "mistake: cache tensor 0 is not memory of CUDA device 0");
  EXPECT_EQ(fake_cuda::live_ranges(), 1u) << "only the cache may stay allocated";
}

TEST_F(Opening, zero_kernel_blocks_are_refused) {
  CopierOptions wrong = options();
  wrong.kernel_blocks = 0;
  EXPECT_NE(refusal(wrong).find("kernel_blocks=0"), std::string::npos);
}

TEST_F(Opening, without_loadable_kernels_dma_is_used) {
  fake_cuda::set_kernels_loadable(false);
  const auto copier = make_copier(options());
  ASSERT_NE(copier, nullptr);
  EXPECT_NE(copier->describe().find("loading the pack kernels"), std::string::npos) << copier->describe();
  copier->submit(job(1, kStore));
  copier->wait(Ids{1});
  EXPECT_TRUE(copier->poll()[0].status.is_ok());
  EXPECT_TRUE(area_holds(1));
  EXPECT_TRUE(fake_cuda::launches().empty());
}

// With the built-in rates, pages of 8 KiB are staged, and kernels copy if staging is impossible.
TEST_F(Opening, without_staging_and_mapped_memory_dma_is_used) {
  for (const std::uint64_t staging : {0u, 100u, 16u * 4095u}) {
    for (const bool calibrate : {false, true}) {
      CopierOptions none = options();
      none.staging_bytes = staging;
      none.calibrate = calibrate;
      fake_cuda::plant("cudaHostGetDevicePointer", 1, cudaErrorUnknown);
      const auto copier = make_copier(none);
      ASSERT_NE(copier, nullptr);
      EXPECT_EQ(copier->describe().find("staged"), std::string::npos) << copier->describe();
      const auto launched = fake_cuda::launches().size();
      fill(area_.span(), 100);
      copier->submit(job(1, kStore));
      copier->wait(Ids{1});
      EXPECT_TRUE(copier->poll()[0].status.is_ok());
      EXPECT_TRUE(area_holds(1));
      EXPECT_EQ(fake_cuda::launches().size(), launched);
    }
  }
}

// Calibration allocates device memory, which fails if the model has filled the device.
TEST_F(Opening, a_copier_that_cannot_calibrate_opens_with_the_built_in_rates) {
  auto before = fake_cuda::calls();
  (void)make_copier(options());
  auto opening = fake_cuda::calls();
  for (const char* call : {"cudaMalloc", "cudaMallocHost", "cudaStreamCreateWithPriority",
                           "cudaEventCreateWithFlags", "cuDevicePrimaryCtxRetain"}) {
    for (const std::uint64_t more : {1, 2}) {
      // Only one is certain: the budget may be spent before staging is allocated.
      if (more == 2 && std::string_view(call).starts_with("cudaMalloc")) continue;
      CopierOptions wanted = options();
      wanted.calibrate = true;
      const std::uint64_t failures = fake_cuda::planted_failures();
      std::unique_ptr<BlockCopier> copier;
      std::string said;
      do {  // repeats if the budget ran out before the planted call
        copier.reset();
        fake_cuda::plant(call, opening[call] - before[call] + more, cudaErrorMemoryAllocation);
        copier = make_copier(wanted);
        ASSERT_NE(copier, nullptr) << call << more;
        said = copier->describe();
      } while (fake_cuda::planted_failures() == failures);
      EXPECT_NE(said.find("built-in (not measured: "), std::string::npos) << call << more << ": " << said;
      EXPECT_EQ(said.find('\n'), std::string::npos);
      copier->submit(job(1, kStore));
      copier->wait(Ids{1});
      EXPECT_TRUE(copier->poll()[0].status.is_ok());
    }
  }
}

TEST_F(Opening, failed_copies_during_calibration_leave_the_built_in_rates) {
  CopierOptions wanted = options();
  wanted.calibrate = true;
  fake_cuda::plant("cudaMemcpyBatchAsync", 1, cudaErrorUnknown);
  fake_cuda::plant("cudaMemcpyAsync", 1, cudaErrorUnknown);
  const auto copier = make_copier(wanted);
  ASSERT_NE(copier, nullptr);
  EXPECT_NE(copier->describe().find("built-in (not measured: "), std::string::npos) << copier->describe();
}

TEST_F(Opening, calibration_allocates_staging_only_for_staged_copies) {
  auto before = fake_cuda::calls();
  (void)make_copier(options());
  auto opening = fake_cuda::calls();
  CopierOptions wanted = options();
  wanted.calibrate = true;
  (void)make_copier(wanted);
  const std::uint64_t plain = opening["cudaMalloc"] - before["cudaMalloc"];
  EXPECT_EQ(plain, kCopyLanes * kLaneSlots);
  // Fewer if the budget is spent before the staged path is measured.
  EXPECT_LE(fake_cuda::calls()["cudaMalloc"] - opening["cudaMalloc"], plain + 1 + kCopyLanes * kLaneSlots);
}

TEST_F(Opening, kernels_launch_with_the_configured_blocks) {
  CopierOptions five = options();
  five.kernel_blocks = 5;
  const auto copier = make_copier(five);
  copier->submit(job(1, kLoad));  // 8 KiB pages are copied by kernels
  copier->wait(Ids{1});
  ASSERT_FALSE(fake_cuda::launches().empty());
  for (const auto& launch : fake_cuda::launches()) EXPECT_EQ(launch.blocks, 5u);
}

TEST_F(Opening, a_missing_or_old_driver_is_refused_in_one_line) {
  CopierOptions wanted = options();
  fake_cuda::set_driver_version(0);
  EXPECT_EQ(refusal(wanted), "no CUDA driver (libcuda.so.1) on this machine");
  fake_cuda::set_driver_version(12090);
  const std::string why = refusal(wanted);
  EXPECT_NE(why.find("driver is for CUDA 12.9 and this build for CUDA 13.0"), std::string::npos) << why;
  EXPECT_EQ(why.find('\n'), std::string::npos);
  std::array<char, kCudaMessageBytes> message{};
  kv_offload_cuda_unavailable_reason(message.data(), message.size());
  EXPECT_EQ(why, message.data());
  fake_cuda::set_driver_version(13010);
  EXPECT_NE(make_copier(wanted), nullptr);
}

TEST_F(Opening, pinning_reports_progress_and_unregisters_after_an_exception) {
  pinned_.reset();
  AlignedBuffer area(32 << 20);
  std::vector<std::uint64_t> told;
  {
    const PinnedArea pinned(
        area.span(),
        {.device = kDevice, .piece_bytes = 2 << 20, .progress = [&](std::uint64_t done, std::uint64_t total) {
           EXPECT_EQ(total, area.size());
           told.push_back(done);
         }});
    EXPECT_EQ(told.back(), area.size());
    EXPECT_TRUE(std::is_sorted(told.begin(), told.end()));
  }
  const auto interrupted = [](std::uint64_t, std::uint64_t) { throw std::runtime_error("interrupted"); };
  EXPECT_THROW(PinnedArea(area.span(), {.device = kDevice, .piece_bytes = 2 << 20, .progress = interrupted}),
               std::runtime_error);
  EXPECT_EQ(fake_cuda::live_ranges(), 1u);
}

TEST_F(Opening, a_copier_that_fails_to_open_leaves_no_memory) {
  pinned_.reset();
  for (const char* call :
       {"cudaHostRegister", "cudaMalloc", "cudaStreamCreateWithPriority", "cudaEventCreateWithFlags"}) {
    for (const std::uint64_t nth : {1, 5}) {
      CopierOptions wanted = options();
      fake_cuda::plant(call, nth, cudaErrorMemoryAllocation);
      const auto copier = make_copier(wanted);
      if (std::string_view(call) == "cudaHostRegister" && nth == 5) {
        fake_cuda::plant(call, std::uint64_t{1} << 60, cudaErrorUnknown);
        continue;  // there is only one piece
      }
      EXPECT_EQ(copier, nullptr) << call << nth;
      EXPECT_EQ(fake_cuda::live_ranges(), 1u) << call << nth;
    }
  }
}

}  // namespace
}  // namespace kv_offload::fake_cuda_tests
