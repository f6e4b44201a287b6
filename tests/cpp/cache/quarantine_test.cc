// SPDX-License-Identifier: Apache-2.0
#include "cache/quarantine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

namespace kv_offload {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class QuarantineTest : public ::testing::Test {
 protected:
  std::vector<RowId> freed_;
  std::set<Ticket> reported_;
  Quarantine quarantine_{[this](RowId row) { freed_.push_back(row); }};
  void poll() {
    quarantine_.poll([this](Ticket ticket, TicketKind kind) {
      return reported_.contains(ticket) && kind == TicketKind::kStore;
    });
  }
};

TEST_F(QuarantineTest, ARowIsFreedWhenItsTicketIsReported) {
  quarantine_.hold(7, TicketKind::kStore, 1);
  quarantine_.hold(7, TicketKind::kStore, 2);
  quarantine_.hold(8, TicketKind::kStore, 3);
  poll();
  EXPECT_THAT(freed_, IsEmpty());
  reported_.insert(7);
  poll();
  EXPECT_THAT(freed_, ElementsAre(1, 2));
  EXPECT_EQ(quarantine_.rows(), 1u);
}

TEST_F(QuarantineTest, ARowHeldByTwoTicketsAndAnOpIsFreedOnceAfterTheLast) {
  quarantine_.hold(7, TicketKind::kStore, 1);
  quarantine_.hold(8, TicketKind::kStore, 1);
  quarantine_.hold(1);
  reported_ = {7, 8};
  poll();
  EXPECT_THAT(freed_, IsEmpty());
  EXPECT_TRUE(quarantine_.holds(1));
  quarantine_.release(1);
  EXPECT_THAT(freed_, ElementsAre(1));
  EXPECT_FALSE(quarantine_.holds(1));
  poll();
  EXPECT_THAT(freed_, ElementsAre(1));
}

TEST_F(QuarantineTest, ATicketIsCheckedAsItsKindOfJob) {
  quarantine_.hold(7, TicketKind::kLoad, 1);
  reported_ = {7};  // reported as a store
  poll();
  EXPECT_THAT(freed_, IsEmpty());
}

TEST_F(QuarantineTest, ReleasingAnUnheldRowFreesNothing) {
  quarantine_.release(9);
  EXPECT_THAT(freed_, IsEmpty());
}

}  // namespace
}  // namespace kv_offload
