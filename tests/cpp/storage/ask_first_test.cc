// When a store is asked for a record before it is written.
#include "storage/ask_first.h"

#include <gtest/gtest.h>

namespace kv_offload {
namespace {

// Of so many writes, each of which finds nothing when it asks.
unsigned asked_of(AskFirst& ask_first, unsigned writes) {
  unsigned asked = 0;
  for (unsigned i = 0; i < writes; ++i) {
    if (!ask_first.should_ask()) continue;
    ask_first.answered(false);
    ++asked;
  }
  return asked;
}

TEST(AskFirstTest, every_write_asks_until_a_run_of_answers_says_that_nobody_else_writes) {
  AskFirst ask_first;
  EXPECT_EQ(asked_of(ask_first, AskFirst::kRun), AskFirst::kRun);
  EXPECT_EQ(asked_of(ask_first, 10 * AskFirst::kEvery), 10u);
}

TEST(AskFirstTest, a_record_that_another_wrote_begins_the_run_anew) {
  AskFirst ask_first;
  asked_of(ask_first, AskFirst::kRun - 1);
  ask_first.answered(true);
  EXPECT_EQ(asked_of(ask_first, AskFirst::kRun), AskFirst::kRun);
  ask_first.answered(true);  // one of the few that still ask
  EXPECT_EQ(asked_of(ask_first, AskFirst::kRun), AskFirst::kRun);
}

}  // namespace
}  // namespace kv_offload
