// SPDX-License-Identifier: Apache-2.0
#include "memory/ticket_slot.h"

#include <gtest/gtest.h>

#include <functional>
#include <thread>

namespace kv_offload {
namespace {

constexpr std::uint64_t kEveryGroup = ~std::uint64_t{0};
constexpr Ticket kOld = 5;
constexpr Ticket kNew = 5 + HostRegion::kTicketSlots;
constexpr std::uint64_t kOldFailed = 0b01;
constexpr std::uint64_t kNewFailed = 0b10;

// A word that lets the other side act between any two steps of this side.
struct SteppedWord {
  static inline std::function<void()> before_step;
  std::uint64_t value = 0;

  void store(std::uint64_t next, std::memory_order) {
    step();
    value = next;
  }
  std::uint64_t load(std::memory_order) const {
    step();
    return value;
  }
  static void step() {
    if (!before_step) return;
    const auto act = std::exchange(before_step, nullptr);  // the action itself is not interrupted
    act();
    if (!before_step) before_step = act;
  }
};

using Slot = TicketSlot<SteppedWord>;

void expect_own_or_failed(const Slot& slot) {
  std::uint64_t failed = 0;
  if (slot.result(kOld, &failed) == TicketResult::kDone) {
    EXPECT_TRUE(failed == kOldFailed || failed == kEveryGroup)
        << failed << " is the result of another ticket";
  }
  if (slot.result(kNew, &failed) == TicketResult::kDone) {
    EXPECT_EQ(failed, kNewFailed);
  }
}

class TicketSlotTest : public testing::Test {
 protected:
  ~TicketSlotTest() override { SteppedWord::before_step = nullptr; }
};

// If a reader took one ticket's result for another's, bytes that never arrived would become a hit.
TEST_F(TicketSlotTest, a_read_during_a_report_never_returns_another_tickets_result) {
  Slot slot;
  slot.report(kOld, kOldFailed);
  SteppedWord::before_step = [&] { expect_own_or_failed(slot); };
  slot.report(kNew, kNewFailed);
  SteppedWord::before_step = nullptr;
  std::uint64_t failed = 0;
  EXPECT_EQ(slot.result(kNew, &failed), TicketResult::kDone);
  EXPECT_EQ(failed, kNewFailed);
}

TEST_F(TicketSlotTest, a_report_during_a_read_never_mixes_two_tickets_results) {
  for (int step = 0; step < 4; ++step) {
    Slot slot;
    slot.report(kOld, kOldFailed);
    int left = step;
    SteppedWord::before_step = [&] {
      if (left-- == 0) slot.report(kNew, kNewFailed);
    };
    std::uint64_t failed = 0;
    ASSERT_EQ(slot.result(kOld, &failed), TicketResult::kDone);
    SteppedWord::before_step = nullptr;
    EXPECT_TRUE(failed == kOldFailed || failed == kEveryGroup) << failed << " after step " << step;
  }
}

TEST(TicketSlot, concurrent_reads_and_reports_never_mix_results) {
  TicketSlot<std::atomic<std::uint64_t>> slot{};
  std::atomic<Ticket> newest{1};
  std::jthread writer([&] {
    for (Ticket ticket = 1; ticket <= 200'000; ++ticket) {
      slot.report(ticket, ticket);
      newest = ticket;
    }
  });
  for (Ticket ticket = 1; ticket < 200'000; ticket = newest) {
    std::uint64_t failed = 0;
    if (slot.result(ticket, &failed) == TicketResult::kPending) continue;
    ASSERT_TRUE(failed == ticket || failed == kEveryGroup);
  }
  writer.join();
}

}  // namespace
}  // namespace kv_offload
