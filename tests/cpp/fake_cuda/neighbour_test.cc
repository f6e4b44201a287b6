// SPDX-License-Identifier: Apache-2.0
// Loads from the area of a neighbour, which is mapped read-only after the own area.
#include <stdlib.h>
#include <sys/mman.h>

#include <cstring>
#include <filesystem>

#include "fake_cuda/world.h"
#include "memory/sharing_engine.h"

namespace kv_offload::fake_cuda_tests {
namespace {

constexpr std::uint64_t kSlot = 2 << 20;

class Neighbour : public World {
 protected:
  void SetUp() override {
    World::SetUp();
    pinned_.reset();
    file_ = ::memfd_create("neighbour", 0);
    ASSERT_EQ(::ftruncate(file_, 2 * kSlot), 0);
    window_ = static_cast<std::byte*>(
        ::mmap(nullptr, 2 * kSlot, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    owner_ =
        static_cast<std::byte*>(::mmap(nullptr, kArea, PROT_READ | PROT_WRITE, MAP_SHARED, file_, kSlot));
    ASSERT_NE(::mmap(window_, kArea, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file_, 0), MAP_FAILED);
    ASSERT_NE(::mmap(window_ + kSlot, kArea, PROT_READ, MAP_SHARED | MAP_FIXED, file_, kSlot), MAP_FAILED);
    for (std::uint64_t i = 0; i < kArea; ++i) owner_[i] = static_cast<std::byte>(i / 4096 * 37 + i % 251);
    options_.layout = layout();
    options_.area = {window_, kArea};
    options_.window = {window_, 2 * kSlot};
    options_.device = kDevice;
    made_ = make_copier(options_);
    ASSERT_NE(made_, nullptr);
  }
  void TearDown() override {
    made_.reset();
    ::munmap(window_, 2 * kSlot);
    ::munmap(owner_, kArea);
    ::close(file_);
    World::TearDown();
  }
  std::span<std::byte> neighbour() const { return {window_ + kSlot, kArea}; }
  // Loads all rows of the neighbour.
  bool load(std::uint64_t id) {
    CopyJob load = job(id, kLoad);
    for (RowId& row : load.rows) row += kSlot / kPageBytes;
    made_->submit(std::move(load));
    made_->wait(Ids{id});
    const auto ended = made_->poll();
    return ended.size() == 1 && ended[0].status.is_ok();
  }
  bool cache_is_the_neighbours() const {
    for (std::uint64_t i = 0; i < kBlocks; ++i) {
      if (std::memcmp(cache_ + i * kBlock, owner_ + rows_[i] * kPageBytes, kBlock) != 0) return false;
    }
    return true;
  }

  static constexpr std::uint64_t kArea = kBlock * kBlocks;
  int file_ = -1;
  std::byte *window_ = nullptr, *owner_ = nullptr;
  CopierOptions options_;
  std::unique_ptr<BlockCopier> made_;
};

TEST_F(Neighbour, its_rows_are_loaded_from_memory_that_this_process_cannot_write) {
  ASSERT_TRUE(made_->add_neighbour(neighbour()).is_ok());
  EXPECT_TRUE(load(1));
  EXPECT_TRUE(cache_is_the_neighbours());
}

TEST_F(Neighbour, it_can_be_removed_and_another_one_takes_its_place) {
  ASSERT_TRUE(made_->add_neighbour(neighbour()).is_ok());
  ASSERT_TRUE(load(1));
  ASSERT_TRUE(made_->remove_neighbour(neighbour()).is_ok());
  for (std::uint64_t i = 0; i < kArea; ++i) owner_[i] = static_cast<std::byte>(i / 4096 * 41 + i % 249);
  ASSERT_TRUE(made_->add_neighbour(neighbour()).is_ok()) << "its memory was still registered";
  EXPECT_TRUE(load(2));
  EXPECT_TRUE(cache_is_the_neighbours());
}

TEST_F(Neighbour, memory_that_cannot_be_registered_is_reported_and_not_fatal) {
  ASSERT_TRUE(made_->add_neighbour(neighbour()).is_ok());
  EXPECT_FALSE(made_->add_neighbour(neighbour()).is_ok()) << "it is registered already";
  EXPECT_TRUE(load(1));
  EXPECT_TRUE(cache_is_the_neighbours());
}

TEST_F(Neighbour, a_device_that_cannot_register_read_only_memory_refuses_with_that_reason) {
  fake_cuda::set_read_only_registrable(false);
  const auto before = fake_cuda::calls()["cudaHostRegister"];
  const Status refused = made_->add_neighbour(neighbour());
  EXPECT_FALSE(refused.is_ok());
  EXPECT_NE(refused.message().find("mapped read-only"), std::string::npos) << refused.message();
  EXPECT_EQ(fake_cuda::calls()["cudaHostRegister"], before) << "tried although it cannot succeed";
  fake_cuda::set_read_only_registrable(true);
  EXPECT_TRUE(made_->add_neighbour(neighbour()).is_ok());
}

TEST_F(Neighbour, a_device_that_cannot_be_queried_refuses) {
  fake_cuda::plant("cudaDeviceGetAttribute", 1, cudaErrorInvalidValue);
  EXPECT_FALSE(made_->add_neighbour(neighbour()).is_ok());
  EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess) << "the error stayed pending";
  EXPECT_TRUE(made_->add_neighbour(neighbour()).is_ok());
}

// Two engines with their regions, of which one reads the other's rows through a CUDA copier.
class NeighbourEngine : public World {
 protected:
  using Engine = kv_offload::testing::SharingEngine;
  static constexpr std::uint32_t kKey = 42;
  static constexpr RowId kRow = 3;

  void SetUp() override {
    World::SetUp();
    owner_ = std::make_unique<Engine>(directory_, "owner");
    ASSERT_TRUE(owner_->store(kRow, kKey));
    reader_ = std::make_unique<Engine>(directory_, "reader");
    CopierOptions options;
    options.layout = {
        .tensors = {{cache_, kBlocks, kPageBytes}}, .groups = {{{0, kPageBytes}}}, .blocks_per_chunk = 1};
    options.area = reader_->worker->area(0);
    options.window = reader_->worker->window();
    options.device = kDevice;
    made_ = make_copier(options);
    ASSERT_NE(made_, nullptr);
  }
  void TearDown() override {
    made_.reset();
    reader_.reset();
    owner_.reset();
    std::filesystem::remove_all(directory_);
    World::TearDown();
  }
  // The thread of a worker calls this again and again. `registered` runs after each registration.
  void follow(const std::function<void()>& registered = {}) {
    for (std::string& problem :
         reader_->worker->map_neighbours([&](std::span<std::byte> area, bool is_mapped) {
           Status status = is_mapped ? made_->add_neighbour(area) : made_->remove_neighbour(area);
           if (is_mapped && registered) registered();
           return status;
         }))
      problems_.push_back(std::move(problem));
  }
  bool is_used() const { return reader_->pin(kKey).has_value(); }
  // Loads the row of the key into the first block, and compares it.
  bool loads_right_bytes() {
    const auto held = reader_->pin(kKey);
    if (!held) return false;
    CopyJob load;
    load.id = 1;
    load.direction = kLoad;
    load.compute_stream = reinterpret_cast<std::uintptr_t>(compute_);
    load.block_ids = {0};
    load.rows = {reader_->worker->neighbour_row(held->slot, held->row)};
    load.group_sizes = load.group_rows = {1};
    load.block_indices = {0};
    made_->submit(std::move(load));
    made_->wait(Ids{1});
    const auto ended = made_->poll();
    reader_->unpin(*held);
    const std::span<std::byte> row = owner_->worker->shard(0, kRow, kPageBytes);
    return ended.size() == 1 && ended[0].status.is_ok() && std::memcmp(cache_, row.data(), row.size()) == 0;
  }

  std::string directory_ = [] {
    std::string pattern = "/dev/shm/neighbour-test-XXXXXX";
    return std::string(::mkdtemp(pattern.data()));
  }();
  std::unique_ptr<Engine> owner_, reader_;
  std::unique_ptr<BlockCopier> made_;
  std::vector<std::string> problems_;
};

TEST_F(NeighbourEngine, its_chunks_are_misses_until_its_memory_is_registered) {
  reader_->attach_to_neighbours();
  EXPECT_FALSE(is_used());
  int registrations = 0;
  follow([&] {
    ++registrations;
    EXPECT_FALSE(is_used()) << "a load may begin before the call that registers it has ended";
  });
  EXPECT_EQ(registrations, 1);
  EXPECT_TRUE(loads_right_bytes());
}

TEST_F(NeighbourEngine, its_chunks_stay_misses_while_its_memory_cannot_be_registered) {
  reader_->attach_to_neighbours();
  fake_cuda::plant("cudaHostRegister", 1, cudaErrorMemoryAllocation);
  follow();
  EXPECT_EQ(problems_.size(), 1u);
  EXPECT_FALSE(is_used());
  for (std::uint32_t call = 0; call < HostRegion::kFirstPause; ++call) follow();
  EXPECT_TRUE(loads_right_bytes());
}

TEST_F(NeighbourEngine, its_memory_is_unregistered_before_it_is_unmapped) {
  reader_->attach_to_neighbours();
  const std::size_t before = fake_cuda::live_ranges();
  follow();
  EXPECT_EQ(fake_cuda::live_ranges(), before + 1);
  reader_->scheduler->dismiss_neighbour(reader_->neighbours.begin()->first);
  follow();
  EXPECT_EQ(fake_cuda::live_ranges(), before);
  EXPECT_FALSE(is_used());
}

}  // namespace
}  // namespace kv_offload::fake_cuda_tests
