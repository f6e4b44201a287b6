// SPDX-License-Identifier: Apache-2.0
#include "cache/quarantine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <vector>

#include "out_of_memory.h"

namespace kv_offload {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

class QuarantineTest : public ::testing::Test {
 protected:
  static constexpr std::uint64_t kRowPages = 3;
  QuarantineTest() { freed_.reserve(64); }
  void poll() {
    quarantine_.poll([this](Ticket ticket) { return reported_.contains(ticket); });
  }

  std::vector<RowId> freed_;
  std::set<Ticket> reported_;
  Quarantine quarantine_{64 * kRowPages, kRowPages, [this](RowId row) { freed_.push_back(row); }};
};

TEST_F(QuarantineTest, a_row_is_freed_when_its_store_is_reported) {
  quarantine_.hold(7, 3);
  quarantine_.hold(7, 6);
  quarantine_.hold(7, 9);
  quarantine_.hold(8, 12);
  poll();
  EXPECT_THAT(freed_, IsEmpty());
  EXPECT_EQ(quarantine_.rows(), 4u);
  reported_.insert(7);
  poll();
  EXPECT_THAT(freed_, UnorderedElementsAre(3, 6, 9));
  EXPECT_EQ(quarantine_.rows(), 1u);
}

TEST_F(QuarantineTest, stores_are_reported_in_any_order) {
  Quarantine other(64, 1, [this](RowId row) { freed_.push_back(row); });
  const auto poll_other = [&] { other.poll([this](Ticket ticket) { return reported_.contains(ticket); }); };
  other.hold(1, 10);
  other.hold(2, 20);
  other.hold(3, 30);
  other.hold(2, 21);
  reported_ = {2};
  poll_other();
  EXPECT_THAT(freed_, UnorderedElementsAre(20, 21));
  other.hold(4, 40);
  other.hold(3, 31);
  reported_ = {3, 4};
  poll_other();
  EXPECT_THAT(freed_, UnorderedElementsAre(20, 21, 30, 31, 40));
  reported_ = {1};
  poll_other();
  EXPECT_EQ(other.rows(), 0u);
  other.hold(5, 10);
  reported_ = {5};
  poll_other();
  EXPECT_EQ(freed_.back(), 10u);
}

TEST_F(QuarantineTest, a_row_with_two_holds_is_freed_after_the_last) {
  quarantine_.hold_owned(3);
  quarantine_.hold_owned(3);
  quarantine_.disown(3);
  quarantine_.release(3);
  EXPECT_THAT(freed_, IsEmpty());
  EXPECT_TRUE(quarantine_.holds(3));
  quarantine_.release(3);
  EXPECT_THAT(freed_, ElementsAre(3));
  EXPECT_FALSE(quarantine_.holds(3));
  poll();
  EXPECT_THAT(freed_, ElementsAre(3));
}

TEST_F(QuarantineTest, a_row_is_not_freed_while_a_chunk_owns_it) {
  quarantine_.hold_owned(3);
  quarantine_.release(3);
  EXPECT_THAT(freed_, IsEmpty());
  EXPECT_EQ(quarantine_.rows(), 0u);
  quarantine_.disown(3);
  EXPECT_THAT(freed_, ElementsAre(3));
}

TEST_F(QuarantineTest, a_row_without_a_hold_is_freed_by_its_owner) {
  quarantine_.disown(6);
  EXPECT_THAT(freed_, ElementsAre(6));
}

TEST_F(QuarantineTest, releasing_an_unheld_row_frees_nothing) {
  quarantine_.release(9);
  EXPECT_THAT(freed_, IsEmpty());
}

TEST_F(QuarantineTest, no_call_allocates_memory) {
  reported_ = {7, 8};
  const Quarantine::IsReported is_reported = [this](Ticket ticket) { return reported_.contains(ticket); };
  {
    const testing::FailingAllocation failing(0);
    quarantine_.hold(7, 3);
    quarantine_.hold(8, 6);
    quarantine_.hold(8, 9);
    quarantine_.hold_owned(12);
    quarantine_.hold_owned(12);
    quarantine_.disown(12);
    quarantine_.release(12);
    quarantine_.release(12);
    quarantine_.poll(is_reported);
    EXPECT_FALSE(failing.came());
  }
  EXPECT_EQ(quarantine_.rows(), 0u);
  EXPECT_THAT(freed_, UnorderedElementsAre(3, 6, 9, 12));
}

}  // namespace
}  // namespace kv_offload
