// The byte account of a root, with several who have it open.
#include "storage/ledger.h"

#include <fcntl.h>
#include <gtest/gtest.h>

#include "faulty_file_ops.h"
#include "fs_fixture.h"

namespace kv_offload {
namespace {

using namespace testing;

class LedgerTest : public ::testing::Test {
 protected:
  // What is on disk, by the last count and what was reserved and given back since.
  std::uint64_t total() {
    EXPECT_TRUE(server_.refresh());
    return server_.total();
  }
  void count(std::uint64_t found) {
    ASSERT_TRUE(server_.begin_recount(0));
    ASSERT_TRUE(server_.finish_recount(found));
  }
  TempDir dir_;
  FaultyFileOps ops_;
  int error_ = 0;
  Fd root_ = open_fd(posix_file_ops(), AT_FDCWD, dir_.path(), O_RDONLY | O_DIRECTORY, 0, &error_);
  Ledger server_{posix_file_ops(), root_.get(), dir_.path(), 1 << 20};
  Ledger other_{ops_, root_.get(), dir_.path(), 1 << 20};
};

TEST_F(LedgerTest, refuses_until_it_was_counted_and_above_the_bound) {
  std::uint64_t missing = 1;
  EXPECT_EQ(server_.reserve(1, &missing).kind(), StatusKind::kNoSpace);
  EXPECT_EQ(missing, 0u);
  count((1 << 20) - 100);
  EXPECT_TRUE(other_.reserve(60, &missing));
  EXPECT_EQ(server_.reserve(50, &missing).kind(), StatusKind::kNoSpace);
  EXPECT_EQ(missing, 10u);
}

TEST_F(LedgerTest, what_goes_between_two_counts_comes_off) {
  count(1000);
  ASSERT_TRUE(other_.refresh());
  other_.give_back(300, other_.epoch());
  EXPECT_EQ(total(), 700u);
  EXPECT_FALSE(server_.recount_wanted());
}

TEST_F(LedgerTest, what_a_count_missed_does_not_come_off_again) {
  count(1000);
  ASSERT_TRUE(other_.refresh());
  const Ledger::Epoch since = other_.epoch();
  // Here the file goes, and then it is counted.
  count(700);
  other_.give_back(300, since);
  EXPECT_EQ(total(), 700u);
  EXPECT_TRUE(server_.recount_wanted()) << "it may have been counted: the server looks again";
  count(700);
  EXPECT_EQ(total(), 700u);
  EXPECT_FALSE(server_.recount_wanted());
}

TEST_F(LedgerTest, what_goes_during_a_count_never_makes_it_too_low) {
  count(1000);
  ASSERT_TRUE(server_.begin_recount(0));
  ASSERT_TRUE(other_.refresh());
  other_.give_back(300, other_.epoch());
  ASSERT_TRUE(server_.finish_recount(1000));  // had been counted
  EXPECT_EQ(total(), 1000u);
  EXPECT_TRUE(server_.recount_wanted());
}

TEST_F(LedgerTest, what_the_counter_removes_after_it_counted_it_comes_off) {
  count(1000);
  ASSERT_TRUE(server_.begin_recount(0));
  server_.give_back(300, server_.epoch(), true);
  ASSERT_TRUE(server_.finish_recount(1000));
  EXPECT_EQ(total(), 700u);
  EXPECT_FALSE(server_.recount_wanted());
}

TEST_F(LedgerTest, what_the_counter_removes_while_its_count_ends_comes_off) {
  count(1000);
  ASSERT_TRUE(server_.begin_recount(0));
  const Ledger::Epoch since = server_.epoch();
  ASSERT_TRUE(server_.finish_recount(1000));
  server_.give_back(300, since, true);
  EXPECT_EQ(total(), 700u);
  EXPECT_FALSE(server_.recount_wanted());
}

TEST_F(LedgerTest, a_count_that_died_is_another_epoch) {
  count(1000);
  ASSERT_TRUE(server_.begin_recount(0));
  ASSERT_TRUE(other_.refresh());
  const Ledger::Epoch since = other_.epoch();
  count(700);  // by who took the lease over
  other_.give_back(300, since);
  EXPECT_EQ(total(), 700u);
}

TEST_F(LedgerTest, what_cannot_be_written_stays_on_the_account_and_is_counted_later) {
  count(1000);
  ASSERT_TRUE(other_.refresh());
  ops_.fail_all(Call::kPwritev, EIO);
  other_.give_back(300, other_.epoch());
  ops_.clear();
  EXPECT_EQ(total(), 1000u);
  EXPECT_FALSE(server_.recount_wanted());
  ASSERT_TRUE(other_.refresh());
  EXPECT_EQ(total(), 1000u);
  EXPECT_TRUE(server_.recount_wanted());
}

}  // namespace
}  // namespace kv_offload
