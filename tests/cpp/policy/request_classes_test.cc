// SPDX-License-Identifier: Apache-2.0
#include "policy/request_classes.h"

#include <gtest/gtest.h>

#include "out_of_memory.h"

namespace kv_offload {
namespace {

TEST(RequestClasses, the_class_grows_with_the_logarithm_of_new_chunks) {
  RequestClasses classes;
  const auto record = classes.refer(9);
  const std::vector<unsigned> expected = {1, 1, 2, 2, 2, 2, 3};  // class after 1, 2, ... new entries
  for (const unsigned of_class : expected) {
    classes.on_stored(record, true, false);
    EXPECT_EQ(classes.class_of(record), of_class);
  }
  for (int i = 0; i < 10000; ++i) classes.on_stored(record, true, false);
  EXPECT_EQ(classes.class_of(record), RequestClasses::kFirstReturning - 1);
}

TEST(RequestClasses, a_request_that_finds_no_memory_is_not_known) {
  RequestClasses classes;
  unsigned failures = 0;
  for (std::uint32_t request = 1; request < 400; ++request) {
    failures += testing::fail_each_allocation([&] { classes.refer(request); },
                                              [&] { EXPECT_EQ(classes.size(), request - 1); });
    EXPECT_EQ(classes.size(), request);
  }
  EXPECT_GT(failures, 2u);
}

TEST(RequestClasses, a_request_with_reused_chunks_gets_another_class) {
  RequestClasses classes;
  const auto record = classes.refer(9);
  for (int i = 0; i < 3; ++i) classes.on_stored(record, true, false);
  EXPECT_EQ(classes.class_of(record), 2u);
  classes.on_return(record);
  EXPECT_EQ(classes.class_of(record), RequestClasses::kFirstReturning + 2);
  classes.on_stored(record, true, false);
  EXPECT_EQ(classes.class_of(record), RequestClasses::kFirstReturning + 2);
  classes.on_return(classes.refer(0));
  EXPECT_EQ(classes.class_of(0), RequestClasses::kUnknown);
}

TEST(RequestClasses, chunks_stored_before_do_not_count_as_new) {
  RequestClasses classes;
  const auto record = classes.refer(9);
  for (int i = 0; i < 50; ++i) classes.on_stored(record, true, true);
  EXPECT_EQ(classes.class_of(record), RequestClasses::kFirstReturning);
}

TEST(RequestClasses, unsampled_chunks_are_assumed_to_be_like_the_sample) {
  RequestClasses classes;
  const auto record = classes.refer(9);
  for (int i = 0; i < 800; ++i) classes.on_stored(record, i % 8 == 0, true);
  EXPECT_LE(classes.class_of(record), RequestClasses::kFirstReturning + 3);
  const auto other = classes.refer(10);
  for (int i = 0; i < 800; ++i) classes.on_stored(other, false, false);
  EXPECT_EQ(classes.class_of(other), RequestClasses::kFirstReturning - 1);
}

TEST(RequestClasses, a_record_lives_while_it_is_referenced) {
  RequestClasses classes;
  const auto record = classes.refer(9);
  EXPECT_EQ(classes.refer(9), record);
  EXPECT_TRUE(classes.is_of(record, 9));
  classes.release(record);
  EXPECT_EQ(classes.size(), 1u);
  classes.release(record);
  EXPECT_EQ(classes.size(), 0u);
  EXPECT_EQ(classes.class_of(classes.refer(9)), 0u);  // a new record
}

TEST(RequestClasses, request_number_zero_is_unknown) {
  RequestClasses classes;
  EXPECT_EQ(classes.class_of(classes.refer(0)), RequestClasses::kUnknown);
  EXPECT_EQ(classes.size(), 0u);
}

}  // namespace
}  // namespace kv_offload
