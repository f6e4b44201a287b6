// SPDX-License-Identifier: Apache-2.0
// The order of operations on the device, and the attributes of copies.
#include "fake_cuda/world.h"

namespace kv_offload::fake_cuda_tests {
namespace {

class Order : public World, public ::testing::WithParamInterface<CopyPath> {
 protected:
  static std::size_t issued() { return fake_cuda::batches().size() + fake_cuda::launches().size(); }
};
INSTANTIATE_TEST_SUITE_P(Every, Order,
                         ::testing::Values(CopyPath::kDma, CopyPath::kKernel, CopyPath::kStaged),
                         [](const auto& path) { return std::string(to_string(path.param)); });

TEST_P(Order, a_store_is_not_issued_before_the_compute_stream_wrote_its_blocks) {
  start(GetParam());
  hold_compute();
  check(cudaMemsetAsync(cache_, 9, kBlock * kBlocks, compute_));
  submit(1, kStore);
  settle();
  EXPECT_EQ(issued(), 0u);
  EXPECT_TRUE(area_is_untouched());
  let_go();
  copier_->wait(Ids{1});
  EXPECT_TRUE(std::all_of(area_.data(), area_.data() + area_.size(),
                          [](std::byte byte) { return byte == std::byte{9}; }));
}

TEST_P(Order, a_load_is_not_issued_before_the_compute_stream_read_its_blocks) {
  start(GetParam());
  hold_compute();
  submit(1, kLoad);
  settle();
  EXPECT_EQ(issued(), 0u);
  EXPECT_TRUE(cache_is_untouched());
  let_go();
  copier_->wait(Ids{1});
  EXPECT_TRUE(cache_holds_the_area());
}

// Control for the two tests above.
TEST_P(Order, control_without_the_event_copies_are_issued_at_once) {
  CopierOptions options;
  options.layout = layout();
  options.area = area_.span();
  options.order_after_compute = false;
  copier_ = std::make_unique<DeviceCopier>(
      options,
      std::make_unique<CudaDevice>(
          CudaDeviceOptions{.device = kDevice, .area = area_.span(), .staging_bytes = 160 << 10}),
      single_path_table(GetParam()), DeviceLimits{.staged_bytes = 160 << 10});
  hold_compute();
  submit(1, kStore);
  copier_->wait(Ids{1});
  EXPECT_TRUE(area_holds(1));
  fill(area_.span(), 100);
  submit(2, kLoad);
  copier_->wait(Ids{2});
  EXPECT_TRUE(cache_holds_the_area());
}

TEST_P(Order, a_store_is_not_done_while_a_part_is_held) {
  for (const Work work : {Work::kCopy, Work::kKernel}) {
    if ((work == Work::kCopy && GetParam() == CopyPath::kKernel) ||
        (work == Work::kKernel && GetParam() == CopyPath::kDma)) {
      continue;
    }
    fill(area_.span(), 100);
    start(GetParam());
    Hold hold(work);
    submit(1, kStore);
    hold.until_standing(1);
    settle();
    EXPECT_TRUE(copier_->poll().empty());
    EXPECT_TRUE(area_is_untouched()) << "kernels are held, but the DMA after them copied bytes";
    hold.release();
    copier_->wait(Ids{1});
    EXPECT_EQ(copier_->poll().size(), 1u);
    EXPECT_TRUE(area_holds(1));
  }
}

TEST_P(Order, a_load_is_not_done_while_a_part_is_held) {
  for (const Work work : {Work::kCopy, Work::kKernel}) {
    if ((work == Work::kCopy && GetParam() == CopyPath::kKernel) ||
        (work == Work::kKernel && GetParam() == CopyPath::kDma)) {
      continue;
    }
    fill(cache(), 1);
    start(GetParam());
    Hold hold(work);
    submit(1, kLoad);
    hold.until_standing(1);
    settle();
    EXPECT_TRUE(copier_->poll().empty());
    EXPECT_TRUE(cache_is_untouched()) << "DMA is held, but the kernel after it copied bytes";
    hold.release();
    copier_->wait(Ids{1});
    EXPECT_TRUE(cache_holds_the_area());
  }
}

// The seed decides delays and orders. A slot's staging must not be filled again before it is
// emptied.
TEST_P(Order, alternating_stores_and_loads_each_move_the_right_bytes) {
  start(GetParam(), {.dma_bytes = 32 << 10, .kernel_bytes = 32 << 10, .staged_bytes = 40 << 10});
  for (std::uint64_t id = 1; id <= 20; ++id) {
    const int value = static_cast<int>(id * 3);
    fill(cache(), value);
    submit(id, kStore);
    copier_->wait(Ids{id});
    ASSERT_TRUE(area_holds(value)) << "job " << id;
    fill(area_.span(), value + 100);
    submit(id + 100, kLoad);
    copier_->wait(Ids{id + 100});
    ASSERT_TRUE(cache_holds_the_area(value + 100)) << "job " << id + 100;
  }
}

TEST_P(Order, submit_returns_although_the_queues_are_full) {
  fake_cuda::set_queue_limit(2);
  start(GetParam(), {.dma_bytes = 32 << 10, .kernel_bytes = 32 << 10, .staged_bytes = 40 << 10});
  Hold copies(Work::kCopy);
  Hold kernels(Work::kKernel);
  for (std::uint64_t id = 1; id <= 8; ++id) submit(id, kStore);
  EXPECT_TRUE(copier_->poll().empty());
  copies.release();
  kernels.release();
  // Not wait(): it moves jobs to another lane, which would write the same rows concurrently.
  for (std::size_t over = 0; over < 8; over += copier_->poll().size()) std::this_thread::yield();
}

TEST_F(World, the_kernel_path_issues_no_other_copies) {
  start(CopyPath::kKernel);
  submit(1, kStore);
  copier_->wait(Ids{1});
  submit(2, kLoad);
  copier_->wait(Ids{2});
  EXPECT_FALSE(fake_cuda::launches().empty());
  EXPECT_TRUE(fake_cuda::batches().empty());
  EXPECT_EQ(fake_cuda::single_copies(), 0u);
}

TEST_P(Order, batches_avoid_the_SMs_and_only_rows_are_read_ahead) {
  start(GetParam());
  submit(1, kStore);
  copier_->wait(Ids{1});
  submit(2, kLoad);
  copier_->wait(Ids{2});
  for (const auto& batch : fake_cuda::batches()) {
    EXPECT_EQ(batch.flags, cudaMemcpyFlagPreferOverlapWithCompute);
    EXPECT_EQ(batch.order, batch.from_device ? cudaMemcpySrcAccessOrderStream : cudaMemcpySrcAccessOrderAny);
  }
}

TEST_F(World, every_stream_of_the_copier_has_the_lowest_priority) {
  start(CopyPath::kStaged);
  for (const auto& stream : fake_cuda::made_streams()) {
    EXPECT_EQ(stream.device, kDevice);
    EXPECT_EQ(stream.priority, 0) << "0 is the lowest priority";
    EXPECT_TRUE(stream.non_blocking);
  }
}

// A process has few connections to a device: streams that share one wait for each other.
TEST_F(World, a_lane_has_a_second_stream_only_with_staging) {
  const auto before = fake_cuda::made_streams().size();
  start(CopyPath::kDma, {});
  EXPECT_EQ(fake_cuda::made_streams().size(), before + kCopyLanes);
  start(CopyPath::kStaged);
  EXPECT_EQ(fake_cuda::made_streams().size(), before + 3 * kCopyLanes);
}

// Uses the production limits and separate memory.
class Limits : public World {
 protected:
  void hold_a_load(std::uint64_t page, std::uint64_t count, const std::function<void()>& look) {
    fake_cuda::set_queue_limit(1 << 20);
    std::byte* large = nullptr;
    check(cudaMalloc(reinterpret_cast<void**>(&large), 2 * page * count));
    AlignedBuffer area(round_up(page, kPageBytes) * count);
    {
      const PinnedArea pinned(area.span(), {.device = kDevice, .piece_bytes = 64 << 20});
      CopierOptions options;
      options.layout = {
          .tensors = {{large, count, 2 * page}}, .groups = {{{0, page}}}, .blocks_per_chunk = 1};
      options.area = area.span();
      DeviceCopier copier(
          options, std::make_unique<CudaDevice>(CudaDeviceOptions{.device = kDevice, .area = area.span()}),
          single_path_table(CopyPath::kDma), {});
      Hold copies(Work::kCopy);
      CopyJob job = World::job(1, kLoad);
      job.block_ids.resize(count);
      job.rows.resize(count);
      for (std::uint64_t b = 0; b < count; ++b) {
        job.block_ids[b] = static_cast<std::int64_t>(b);
        job.rows[b] = static_cast<RowId>(b * round_up(page, kPageBytes) / kPageBytes);
      }
      job.group_sizes = {static_cast<std::uint32_t>(count)};
      job.group_rows = job.group_sizes;
      copier.submit(std::move(job));
      copies.until_standing(1);
      settle();
      look();
      copies.release();
      copier.close();
    }
    check(cudaFree(large));
  }
};

TEST_F(Limits, a_load_keeps_two_batches_of_at_most_512_copies) {
  hold_a_load(2 << 10, 8 << 10, [] {
    const auto batches = fake_cuda::batches();
    EXPECT_EQ(batches.size(), 2u);
    for (const auto& batch : batches) EXPECT_LE(batch.copies, 512u);
  });
}

TEST_F(Limits, a_sub_job_moves_at_most_4_mib) {
  hold_a_load(64 << 10, 160, [] {
    const auto batches = fake_cuda::batches();
    EXPECT_EQ(batches.size(), 2u);
    for (const auto& batch : batches) EXPECT_LE(batch.bytes, 4u << 20);
  });
}

}  // namespace
}  // namespace kv_offload::fake_cuda_tests
