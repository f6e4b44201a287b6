// When a store checks for a record before it writes one.
#include "tier/ask_first.h"

#include <gtest/gtest.h>

namespace kv_offload {
namespace {

// Returns how many of `writes` writes check first; no check finds a record.
unsigned asked_of(AskFirst& ask_first, unsigned writes) {
  unsigned asked = 0;
  for (unsigned i = 0; i < writes; ++i) {
    if (!ask_first.should_ask()) continue;
    ask_first.answered(false);
    ++asked;
  }
  return asked;
}

TEST(AskFirstTest, every_write_checks_until_a_run_of_misses_shows_a_single_writer) {
  AskFirst ask_first;
  EXPECT_EQ(asked_of(ask_first, AskFirst::kRun), AskFirst::kRun);
  EXPECT_EQ(asked_of(ask_first, 10 * AskFirst::kEvery), 10u);
}

TEST(AskFirstTest, a_record_written_by_another_restarts_the_run) {
  AskFirst ask_first;
  asked_of(ask_first, AskFirst::kRun - 1);
  ask_first.answered(true);
  EXPECT_EQ(asked_of(ask_first, AskFirst::kRun), AskFirst::kRun);
  ask_first.answered(true);  // one of the few writes that still check
  EXPECT_EQ(asked_of(ask_first, AskFirst::kRun), AskFirst::kRun);
}

}  // namespace
}  // namespace kv_offload
