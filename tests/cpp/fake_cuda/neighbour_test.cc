// SPDX-License-Identifier: Apache-2.0
// Loads from the area of a neighbour, which is mapped read-only after the own area.
#include <sys/mman.h>

#include <cstring>

#include "fake_cuda/world.h"

namespace kv_offload::on_threads {
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

}  // namespace
}  // namespace kv_offload::on_threads
