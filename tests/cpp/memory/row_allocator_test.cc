// SPDX-License-Identifier: Apache-2.0
#include "memory/row_allocator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <stdexcept>

#include "base/status.h"
#include "out_of_memory.h"
#include "test_iterations.h"

namespace kv_offload {
namespace {

constexpr std::uint64_t kKiB = 1024;
constexpr std::uint64_t kMiB = 1024 * kKiB;
constexpr std::uint64_t kGiB = 1024 * kMiB;

const int kOperations = testing::rounds(1'000'000);

bool always(RowId) { return true; }

// An allocator and a map of the owner of every byte. The map detects at once a row that overlaps
// another, exceeds the area or is misaligned.
class CheckedRows {
 public:
  CheckedRows(std::uint64_t area_bytes, std::vector<std::uint64_t> row_bytes)
      : rows_(area_bytes, std::move(row_bytes)), area_bytes_(area_bytes) {}

  RowId allocate(std::uint32_t group) {
    const RowId row = rows_.allocate(group);
    if (row == kNoRow) return row;
    const std::uint64_t begin = std::uint64_t{row} * kPageBytes;
    const std::uint64_t end = begin + rows_.row_bytes(group);
    EXPECT_LE(end, area_bytes_);
    const auto next = owners_.lower_bound(begin);
    if (next != owners_.end()) {
      EXPECT_LE(end, next->first) << "overlaps the next row";
    }
    if (next != owners_.begin()) {
      const auto& [previous, owner] = *std::prev(next);
      EXPECT_LE(previous + rows_.row_bytes(owner), begin) << "overlaps the previous row";
    }
    owners_[begin] = group;
    places_[rows_.row_bytes(group)].insert(begin);
    bytes_ += rows_.row_bytes(group);
    return row;
  }

  void free(RowId row) {
    const auto found = owners_.find(std::uint64_t{row} * kPageBytes);
    ASSERT_NE(found, owners_.end());
    bytes_ -= rows_.row_bytes(found->second);
    places_[rows_.row_bytes(found->second)].erase(found->first);
    owners_.erase(found);
    rows_.free(row);
  }

  // Evicts like a cache: a row of the same group, or all rows of a slab of another size.
  RowId allocate_evicting(std::uint32_t group, std::mt19937& random) {
    RowId row = allocate(group);
    if (row != kNoRow) return row;
    const auto own = any_row_like(group, random);
    if (!own || random() % 16 == 0) {
      for (const RowId victim : rows_.slab_to_reclaim(group, always)) free(victim);
      row = allocate(group);
    }
    if (row != kNoRow || !own) return row;
    free(*own);
    return allocate(group);
  }

  void fill(const std::vector<std::uint32_t>& groups, std::mt19937& random) {
    std::vector<std::uint32_t> left = groups;
    while (!left.empty()) {
      const std::size_t i = random() % left.size();
      if (allocate(left[i]) == kNoRow) left.erase(left.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }

  std::optional<RowId> any_row(std::mt19937& random) const {
    if (owners_.empty()) return std::nullopt;
    auto found = owners_.lower_bound(random() % (area_bytes_ / kPageBytes) * kPageBytes);
    if (found == owners_.end()) found = owners_.begin();
    return page_of(found->first);
  }
  // Returns any row of the same size as the group's rows.
  std::optional<RowId> any_row_like(std::uint32_t group, std::mt19937& random) const {
    const auto places = places_.find(rows_.row_bytes(group));
    if (places == places_.end() || places->second.empty()) return std::nullopt;
    const auto found = places->second.lower_bound(random() % (area_bytes_ / kPageBytes) * kPageBytes);
    return page_of(found == places->second.end() ? *places->second.begin() : *found);
  }
  static RowId page_of(std::uint64_t byte) { return static_cast<RowId>(byte / kPageBytes); }

  double utilisation() const { return static_cast<double>(bytes_) / static_cast<double>(area_bytes_); }
  std::uint64_t bytes() const { return bytes_; }
  std::size_t count() const { return owners_.size(); }
  RowAllocator& rows() { return rows_; }

 private:
  RowAllocator rows_;
  std::uint64_t area_bytes_;
  std::map<std::uint64_t, std::uint32_t> owners_;            // first byte -> group
  std::map<std::uint64_t, std::set<std::uint64_t>> places_;  // row size -> first bytes
  std::uint64_t bytes_ = 0;
};

struct Model {
  const char* name;
  std::uint64_t area_bytes;
  std::vector<std::uint64_t> row_bytes;
};

void PrintTo(const Model& model, std::ostream* out) { *out << model.name; }

std::vector<std::uint32_t> groups_of(const Model& model) {
  std::vector<std::uint32_t> groups(model.row_bytes.size());
  for (std::uint32_t i = 0; i < groups.size(); ++i) groups[i] = i;
  return groups;
}

class RowAllocatorOfModel : public testing::TestWithParam<Model> {};

TEST_P(RowAllocatorOfModel, allocated_rows_never_overlap) {
  const Model& model = GetParam();
  CheckedRows rows(model.area_bytes, model.row_bytes);
  std::mt19937 random(7);
  for (int i = 0; i < 100'000 && !HasFailure(); ++i) {
    if (random() % 100 < 55) {
      rows.allocate(random() % model.row_bytes.size());
    } else if (const auto row = rows.any_row(random)) {
      rows.free(*row);
    }
    ASSERT_EQ(rows.rows().bytes_in_use(), rows.bytes());
    ASSERT_EQ(rows.rows().rows_in_use(), rows.count());
  }
}

TEST_P(RowAllocatorOfModel, rows_fill_97_percent_of_the_area) {
  const Model& model = GetParam();
  CheckedRows rows(model.area_bytes, model.row_bytes);
  std::mt19937 random(3);
  rows.fill(groups_of(model), random);
  EXPECT_GE(rows.utilisation(), 0.97);
  EXPECT_LE(static_cast<double>(rows.rows().wasted_bytes()), 0.03 * static_cast<double>(model.area_bytes));
}

TEST_P(RowAllocatorOfModel, one_group_can_fill_97_percent_of_the_area) {
  const Model& model = GetParam();
  for (const std::uint32_t group : groups_of(model)) {
    CheckedRows rows(model.area_bytes, model.row_bytes);
    std::mt19937 random(3);
    rows.fill({group}, random);
    EXPECT_GE(rows.utilisation(), 0.97) << "group " << group;
    EXPECT_EQ(rows.count(), rows.rows().capacity_rows(group));
  }
}

TEST_P(RowAllocatorOfModel, utilisation_stays_at_95_percent_under_changing_demand) {
  const Model& model = GetParam();
  CheckedRows rows(model.area_bytes, model.row_bytes);
  std::mt19937 random(11);
  double sum = 0;
  int samples = 0;
  for (int i = 0; i < kOperations; ++i) {
    // Moves the demand between the groups, so that slabs must move too.
    const std::uint32_t favoured =
        static_cast<std::uint32_t>(i / (kOperations / 10)) % model.row_bytes.size();
    const std::uint32_t group =
        random() % 4 != 0 ? favoured : static_cast<std::uint32_t>(random() % model.row_bytes.size());
    ASSERT_NE(rows.allocate_evicting(group, random), kNoRow);
    if (i > kOperations / 2 && i % 1000 == 0) {
      sum += rows.utilisation();
      ++samples;
    }
  }
  EXPECT_GE(sum / samples, 0.95);
}

INSTANTIATE_TEST_SUITE_P(
    Models, RowAllocatorOfModel,
    testing::Values(Model{"one_group", 256 * kMiB, {640 * kKiB}},
                    Model{"odd_size_of_one_group", 256 * kMiB, {147 * kKiB + 3}},
                    Model{"three_groups_of_equal_size", 256 * kMiB, {256 * kKiB, 256 * kKiB, 256 * kKiB}},
                    Model{"three_groups_one_half_as_large", 256 * kMiB, {256 * kKiB, 256 * kKiB, 128 * kKiB}},
                    Model{"mamba_16_times_larger", 512 * kMiB, {1040 * kKiB, 64 * kKiB}},
                    Model{"sizes_that_do_not_divide", 512 * kMiB, {72 * kKiB, 148 * kKiB, 444 * kKiB}}),
    [](const auto& instance) { return std::string(instance.param.name); });

TEST(RowAllocator, at_most_3_percent_is_wasted_for_any_row_size) {
  std::mt19937 random(5);
  for (int i = 0; i < 300; ++i) {
    std::vector<std::uint64_t> row_bytes(1 + random() % 4);
    for (auto& bytes : row_bytes) bytes = (4 * kKiB << random() % 15) - random() % 4000 - 1;
    const std::uint64_t largest = *std::max_element(row_bytes.begin(), row_bytes.end());
    const std::uint64_t area = largest * 256 + random() % kGiB;
    const RowAllocator rows(area, row_bytes);
    EXPECT_LE(static_cast<double>(rows.wasted_bytes()), 0.03 * static_cast<double>(area));
    for (std::uint32_t group = 0; group < row_bytes.size(); ++group) {
      const auto used = static_cast<double>(rows.capacity_rows(group) * rows.row_bytes(group));
      EXPECT_GE(used, 0.97 * static_cast<double>(area))
          << "row " << row_bytes[group] << ", largest " << largest << ", area " << area;
    }
  }
}

TEST(RowAllocator, each_group_gets_a_row_in_the_smallest_area) {
  for (const std::vector<std::uint64_t>& row_bytes :
       std::vector<std::vector<std::uint64_t>>{{4 * kKiB},
                                               {4 * kKiB, 64 * kMiB},
                                               {64 * kMiB, 48 * kMiB, 4 * kKiB},
                                               {4 * kKiB, 48 * kMiB, 64 * kMiB, 48 * kMiB},
                                               {12 * kKiB, 20 * kKiB, 28 * kKiB, 20 * kKiB}}) {
    std::uint64_t needed = 0;
    for (const std::uint64_t bytes : row_bytes) needed += bytes;
    for (const std::uint64_t extra : {std::uint64_t{0}, 4 * kKiB, 16 * kKiB, 60 * kMiB, 300 * kMiB}) {
      CheckedRows rows(needed + extra, row_bytes);
      for (std::uint32_t group = 0; group < row_bytes.size(); ++group) {
        EXPECT_NE(rows.allocate(group), kNoRow) << "group " << group << " of " << row_bytes.size();
      }
    }
    EXPECT_THROW(RowAllocator(needed - 1, row_bytes), InvalidArgument);
  }
}

TEST(RowAllocator, too_small_an_area_is_refused_with_both_sizes) {
  try {
    RowAllocator rows(8 * kMiB, {5 * kMiB, 4 * kMiB});
    FAIL() << "accepted";
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find("8.0 MiB"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("9.0 MiB"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("cpu_bytes_to_use"), std::string::npos) << error.what();
  }
  EXPECT_THROW(RowAllocator(kMiB, {}), InvalidArgument);
  EXPECT_THROW(RowAllocator(kMiB, {4096, 0}), InvalidArgument);
  EXPECT_THROW(RowAllocator(16384 * kGiB, {4096}), InvalidArgument);
}

TEST(RowAllocator, rows_of_a_group_are_adjacent_within_a_slab) {
  RowAllocator rows(512 * kMiB, {100 * kKiB, 300 * kKiB});
  const RowId pages[] = {25, 75};
  RowId last[] = {rows.allocate(0), rows.allocate(1)};
  int jumps = 0;
  for (int i = 0; i < 50; ++i) {
    for (const std::uint32_t group : {0u, 1u}) {
      const RowId row = rows.allocate(group);
      if (row != last[group] + pages[group]) ++jumps;
      last[group] = row;
    }
  }
  EXPECT_LE(jumps, 16) << "of 100 steps: a jump only at the end of a slab";
  const RowAllocator fine(64 * kMiB, {100 * kKiB});
  EXPECT_EQ(fine.capacity_rows(0), 655u) << "with one row size the area is one slab";
}

TEST(RowAllocator, freed_adjacent_rows_are_allocated_in_order_again) {
  RowAllocator rows(4 * kMiB, {64 * kKiB});
  std::vector<RowId> all;
  for (RowId row = rows.allocate(0); row != kNoRow; row = rows.allocate(0)) all.push_back(row);
  ASSERT_EQ(all.size(), 64u);
  for (int i = 20; i < 30; ++i) rows.free(all[i]);
  for (int i = 20; i < 30; ++i) EXPECT_EQ(rows.allocate(0), all[i]);
  EXPECT_EQ(rows.allocate(0), kNoRow);
}

TEST(RowAllocator, a_row_not_in_use_cannot_be_freed) {
  RowAllocator rows(256 * kMiB, {64 * kKiB, 128 * kKiB});
  const RowId row = rows.allocate(1);
  const RowId neighbour = rows.allocate(1);
  ASSERT_EQ(neighbour, row + 32) << "both rows are in one slab";
  EXPECT_THROW(rows.free(row + 1), std::logic_error);
  EXPECT_THROW(rows.free(row + 64), std::logic_error);
  EXPECT_THROW(rows.free(kNoRow), std::logic_error);
  rows.free(row);
  EXPECT_THROW(rows.free(row), std::logic_error) << "double free in a used slab";
  rows.free(neighbour);
  EXPECT_THROW(rows.free(row), std::logic_error) << "double free in a free slab";
}

TEST(RowAllocator, an_empty_slab_can_be_used_by_another_group) {
  RowAllocator rows(16 * kMiB, {64 * kKiB, 128 * kKiB});
  std::vector<RowId> taken;
  for (RowId row = rows.allocate(0); row != kNoRow; row = rows.allocate(0)) taken.push_back(row);
  EXPECT_EQ(rows.allocate(1), kNoRow);
  for (const RowId row : taken) rows.free(row);
  EXPECT_EQ(rows.bytes_in_use(), 0u);
  std::uint64_t count = 0;
  while (rows.allocate(1) != kNoRow) ++count;
  EXPECT_EQ(count, rows.capacity_rows(1));
}

// An allocator can claim the rows that another allocator with the same row sizes handed out, in any
// order.
TEST_P(RowAllocatorOfModel, claim_accepts_each_row_of_another_allocator_once) {
  std::mt19937 random(11);
  RowAllocator before(GetParam().area_bytes, GetParam().row_bytes),
      after(GetParam().area_bytes, GetParam().row_bytes);
  std::vector<std::pair<std::uint32_t, RowId>> taken;
  for (int i = 0; i < 300; ++i) {
    const auto group = static_cast<std::uint32_t>(random() % GetParam().row_bytes.size());
    if (const RowId row = before.allocate(group); row != kNoRow) taken.emplace_back(group, row);
  }
  std::shuffle(taken.begin(), taken.end(), random);
  for (const auto& [group, row] : taken) {
    EXPECT_TRUE(after.claim(group, row));
    EXPECT_FALSE(after.claim(group, row)) << "the row was claimed twice";
  }
  EXPECT_EQ(after.bytes_in_use(), before.bytes_in_use());
  for (const auto& [group, row] : taken) after.free(row);
  EXPECT_EQ(after.rows_in_use(), 0u);
}

TEST(RowAllocator, claim_accepts_only_free_rows_of_the_class) {
  RowAllocator rows(16 * kMiB, {64 * kKiB, 128 * kKiB});
  const RowId row = rows.allocate(0);
  EXPECT_FALSE(rows.claim(0, row));
  EXPECT_FALSE(rows.claim(1, row)) << "the slab belongs to the other class";
  EXPECT_FALSE(rows.claim(0, row + 1)) << "the id points inside a row";
  EXPECT_FALSE(rows.claim(0, 16 * kMiB / kPageBytes)) << "the id is outside the area";
  EXPECT_FALSE(rows.claim(0, kNoRow));
  EXPECT_TRUE(rows.claim(0, row + 16));
  EXPECT_EQ(rows.allocate(0), row + 32) << "the next row after the claimed one";
}

class Reclaiming : public testing::Test {
 protected:
  Reclaiming() {
    for (RowId row = rows_.allocate(0); row != kNoRow; row = rows_.allocate(0)) taken_.push_back(row);
  }
  RowAllocator rows_{16 * kMiB, {64 * kKiB, 1024 * kKiB}};
  std::vector<RowId> taken_;
};

TEST_F(Reclaiming, freeing_the_reclaimed_slab_makes_room_for_another_group) {
  EXPECT_EQ(rows_.allocate(1), kNoRow);
  for (const RowId row : rows_.slab_to_reclaim(1, always)) rows_.free(row);
  EXPECT_NE(rows_.allocate(1), kNoRow);
}

TEST_F(Reclaiming, the_slab_with_the_fewest_rows_is_reclaimed) {
  for (int i = 16; i < 31; ++i) rows_.free(taken_[i]);
  EXPECT_EQ(rows_.slab_to_reclaim(1, always), std::vector<RowId>{taken_[31]});
}

TEST_F(Reclaiming, a_slab_with_a_row_that_must_stay_is_not_reclaimed) {
  for (int i = 16; i < 28; ++i) rows_.free(taken_[i]);
  const std::vector<RowId> cheap(taken_.begin() + 28, taken_.begin() + 32);
  ASSERT_EQ(rows_.slab_to_reclaim(1, always), cheap);
  for (const RowId stays : cheap) {
    EXPECT_EQ(rows_.slab_to_reclaim(1, [&](RowId row) { return row != stays; }).size(), 16u) << stays;
  }
  EXPECT_TRUE(rows_.slab_to_reclaim(1, [](RowId) { return false; }).empty());
}

// More of the emptiest slabs than one search checks have a row that must stay.
TEST_F(Reclaiming, finds_a_fuller_slab_after_searches_of_emptier_ones) {
  RowAllocator rows(256 * kMiB, {4 * kKiB, 8 * kKiB});
  std::vector<RowId> taken;
  for (RowId row = rows.allocate(0); row != kNoRow; row = rows.allocate(0)) taken.push_back(row);
  const std::size_t per_slab = rows.slab_to_reclaim(1, always).size(), slabs = taken.size() / per_slab;
  ASSERT_GE(slabs, 2048u);
  const std::size_t fuller = (slabs - 2) * per_slab;  // the first row of the last slab but one
  const std::set<RowId> movable = {taken[fuller + 1], taken[fuller + 2]};
  for (std::size_t i = 0; i < taken.size(); ++i) {
    const bool stays = i % per_slab == 0 && i != fuller;
    if (!stays && !movable.contains(taken[i])) rows.free(taken[i]);
  }
  std::size_t most = 0;
  std::vector<RowId> found;
  for (std::size_t calls = 0; found.empty() && calls < slabs; ++calls) {
    std::size_t checked = 0;
    found = rows.slab_to_reclaim(1, [&](RowId row) {
      ++checked;
      return movable.contains(row);
    });
    most = std::max(most, checked);
  }
  EXPECT_EQ(std::set<RowId>(found.begin(), found.end()), movable);
  EXPECT_LT(most, slabs / 2) << "one call checked every second slab";
}

// A slab has hundreds of the smallest rows, but only one of the largest.
TEST_F(Reclaiming, a_slab_of_many_small_rows_can_be_reclaimed) {
  RowAllocator rows(16 * kMiB, {64 * kKiB, 1024 * kKiB, 4 * kKiB});
  const RowId largest = rows.allocate(1);
  std::size_t smallest = 0;
  while (rows.allocate(2) != kNoRow) ++smallest;
  ASSERT_GT(smallest, 1024u);
  EXPECT_EQ(rows.slab_to_reclaim(0, always), std::vector<RowId>{largest});
  const std::vector<RowId> others = rows.slab_to_reclaim(0, [&](RowId row) { return row != largest; });
  EXPECT_GT(others.size(), 64u);
  for (const RowId row : others) rows.free(row);
  EXPECT_NE(rows.allocate(0), kNoRow);
}

TEST_F(Reclaiming, slabs_of_the_requesting_group_are_not_reclaimed) {
  EXPECT_TRUE(rows_.slab_to_reclaim(0, always).empty());
}

TEST(RowAllocator, a_slab_whose_rows_need_memory_is_not_lost) {
  RowAllocator rows(4 * kMiB, {4 * kKiB, 64 * kKiB});
  std::vector<RowId> taken;
  taken.reserve(2048);
  const unsigned failures = testing::fail_each_allocation([&] { taken.push_back(rows.allocate(0)); }, [] {});
  EXPECT_GT(failures, 0u);
  while (taken.back() != kNoRow) taken.push_back(rows.allocate(0));
  EXPECT_EQ(taken.size() - 1, rows.capacity_rows(0));
}

}  // namespace
}  // namespace kv_offload
