// SPDX-License-Identifier: Apache-2.0
// The cost of an I/O pool call does not grow with the number of queued ops.
#include <gtest/gtest.h>

#include <vector>

#include "steps/steps.h"
#include "tier/io_pool.h"

namespace kv_offload::testing {
namespace {

constexpr std::size_t kFew = 2'000, kMany = 40'000;
// With 20 times as many ops, a linear search costs 20 times as much; the depth of a tree grows by
// half.
constexpr double kMostPoolGrowth = 2;

class PoolSteps : public ::testing::Test {
 protected:
  struct Pool {
    explicit Pool(std::size_t ops) {
      std::vector<IoPool::Op> all;
      for (std::size_t i = 0; i < ops; ++i) all.push_back(op(i));
      pool.submit(std::move(all));
    }
    IoPool::Op op(std::uint64_t tag) {
      IoPool::Op made;
      made.tag = tag;
      made.lane = tag % 4 == 3 ? Lane::kWrite : Lane::kRead;
      made.deadline = Nanos(2'000'000'000 + tag);
      made.run = [] { return Status::ok(); };
      made.done = [this](const Status&, double, double) { ++ended; };
      return made;
    }
    FakeClock clock;
    std::size_t ended = 0;
    IoPool pool{{0, 0, &clock}};
  };
  // Compares the steps of 200 calls in a small and in a large pool.
  template <typename Call>
  static void expect_no_growth(Call call) {
    double took[2];
    for (const bool many : {false, true}) {
      const std::size_t ops = many ? kMany : kFew;
      Pool pool(ops);
      took[many] = static_cast<double>(steps_of([&] {
        for (std::size_t i = 0; i < 200; ++i) call(pool, ops, i);
      }));
    }
    ASSERT_GT(took[0], 0);
    EXPECT_LE(took[1] / took[0], kMostPoolGrowth) << took[0] << " steps became " << took[1];
  }
};

TEST_F(PoolSteps, cancelling_an_op_costs_the_same_behind_many_others) {
  expect_no_growth([](Pool& pool, std::size_t ops, std::size_t i) {
    EXPECT_TRUE(pool.pool.cancel(ops - 1 - i));
    EXPECT_EQ(pool.ended, i + 1);
  });
}

TEST_F(PoolSteps, cancelling_an_unknown_op_costs_the_same) {
  expect_no_growth(
      [](Pool& pool, std::size_t ops, std::size_t i) { EXPECT_FALSE(pool.pool.cancel(ops + 10 + i)); });
}

TEST_F(PoolSteps, submitting_an_op_costs_the_same_behind_many_others) {
  expect_no_growth([](Pool& pool, std::size_t ops, std::size_t i) {
    std::vector<IoPool::Op> one;
    one.push_back(pool.op(ops + i));
    pool.pool.submit(std::move(one));
  });
}

TEST_F(PoolSteps, running_the_next_op_costs_the_same_before_many_others) {
  expect_no_growth([](Pool& pool, std::size_t, std::size_t i) {
    pool.pool.begin_next(Lane::kRead)();
    EXPECT_EQ(pool.ended, i + 1);
  });
}

TEST_F(PoolSteps, expiring_an_op_costs_the_same_among_many_others) {
  expect_no_growth([](Pool& pool, std::size_t, std::size_t i) {
    pool.clock.advance(Nanos(2'000'000'000 + i) - pool.clock.now());
    pool.pool.expire();
    EXPECT_EQ(pool.ended, i + 1);
  });
}

TEST_F(PoolSteps, depth_and_expire_cost_the_same_for_many_ops) {
  expect_no_growth([](Pool& pool, std::size_t ops, std::size_t) {
    EXPECT_GE(pool.pool.depth(Lane::kRead).queued, ops / 2);
    pool.pool.expire();
  });
}

}  // namespace
}  // namespace kv_offload::testing
