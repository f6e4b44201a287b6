// SPDX-License-Identifier: Apache-2.0
#include "tier/io_pool.h"

#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

#include <array>
#include <latch>
#include <mutex>
#include <numeric>
#include <set>
#include <string>

#include "base/thread.h"
#include "out_of_memory.h"
#include "step_watch.h"

namespace kv_offload {
namespace {

struct Log {
  std::mutex mutex;
  std::vector<std::uint64_t> order;
  std::vector<std::pair<std::uint64_t, StatusKind>> ended;
  std::vector<std::pair<std::uint64_t, StatusKind>> endings() {
    const std::lock_guard lock(mutex);
    return ended;
  }
};

IoPool::Op op(Log& log, std::uint64_t tag, Lane lane, std::latch* all, std::function<void()> body = {}) {
  IoPool::Op made;
  made.tag = tag;
  made.lane = lane;
  made.run = [&log, tag, body = std::move(body)] {
    {
      const std::lock_guard lock(log.mutex);
      log.order.push_back(tag);
    }
    if (body) body();
    return Status::ok();
  };
  made.done = [&log, tag, all](const Status& status, double, double) {
    {
      const std::lock_guard lock(log.mutex);
      log.ended.emplace_back(tag, status.kind());
    }
    if (all != nullptr) all->count_down();
  };
  return made;
}

std::vector<IoPool::Op> one(IoPool::Op made) {
  std::vector<IoPool::Op> ops;
  ops.push_back(std::move(made));
  return ops;
}

TEST(IoPool, ops_of_a_lane_run_in_order) {
  FakeClock clock;
  Log log;
  IoPool pool({1, 0, &clock});  // an idle write thread would take reads too
  std::latch all(20);
  std::vector<IoPool::Op> ops;
  for (std::uint64_t i = 0; i < 20; ++i) ops.push_back(op(log, i, Lane::kRead, &all));
  pool.submit(std::move(ops));
  all.wait();
  pool.close();
  for (std::uint64_t i = 0; i < 20; ++i) EXPECT_EQ(log.order[i], i);
}

TEST(IoPool, a_running_op_can_submit_more_ops) {
  FakeClock clock;
  Log log;
  std::latch all(3);
  IoPool pool({1, 0, &clock});
  pool.submit(one(op(log, 1, Lane::kRead, &all, [&, submit = pool.submitter()] {
    submit(one(op(log, 2, Lane::kRead, &all)));
    submit(one(op(log, 3, Lane::kRead, &all)));
  })));
  all.wait();
  pool.close();
  EXPECT_EQ(log.order, (std::vector<std::uint64_t>{1, 2, 3}));
}

// One write thread, held while the queues fill: it then takes ops in the returned order.
std::vector<std::uint64_t> order_after_hold(int reads, int writes) {
  FakeClock clock;
  Log log;
  std::latch running(1), go(1), all(reads + writes);
  IoPool pool({0, 1, &clock});
  pool.submit(one(op(log, 0, Lane::kWrite, nullptr, [&] {
    running.count_down();
    go.wait();
  })));
  running.wait();
  std::vector<IoPool::Op> ops;
  for (int i = 0; i < writes; ++i)
    ops.push_back(op(log, 1000 + static_cast<unsigned>(i), Lane::kWrite, &all));
  for (int i = 0; i < reads; ++i) ops.push_back(op(log, 1 + static_cast<unsigned>(i), Lane::kRead, &all));
  pool.submit(std::move(ops));
  go.count_down();
  all.wait();
  pool.close();
  return log.order;
}

TEST(IoPool, reads_run_before_writes_that_were_queued_earlier) {
  const auto order = order_after_hold(3, 2);
  EXPECT_EQ(order, (std::vector<std::uint64_t>{0, 1, 2, 3, 1000, 1001}));
}

TEST(IoPool, writes_do_not_starve_under_reads) {
  const auto order = order_after_hold(20, 2);
  EXPECT_EQ(order[IoPool::kReadsPerWrite + 1], 1000u);
  EXPECT_EQ(order[2 * IoPool::kReadsPerWrite + 2], 1001u);
}

TEST(IoPool, read_threads_take_no_writes) {
  FakeClock clock;
  Log log;
  std::latch running(1), go(1), all(3);
  IoPool pool({2, 1, &clock});
  pool.submit(one(op(log, 0, Lane::kWrite, &all, [&] {
    running.count_down();
    go.wait();
  })));
  running.wait();
  pool.submit(one(op(log, 1, Lane::kWrite, &all)));
  IoPool::Op reading = op(log, 2, Lane::kRead, &all);
  pool.submit(one(std::move(reading)));
  while (log.endings().empty()) std::this_thread::yield();
  EXPECT_EQ(log.endings()[0].first, 2u);
  EXPECT_EQ(pool.depth(Lane::kWrite).queued, 1u);
  go.count_down();
  all.wait();
}

std::string thread_name() {
  char name[16] = {};
  ::pthread_getname_np(::pthread_self(), name, sizeof name);
  return name;
}

TEST(IoPool, write_threads_take_only_reads_for_which_no_read_thread_is_free) {
  FakeClock clock;
  Log log;
  for (int i = 0; i < 20; ++i) {
    const bool beside_a_write = i % 2 == 1;  // the write thread then wakes up too, and may be the first
    std::latch running(1), go(1), all(beside_a_write ? 3 : 2);
    std::array<std::string, 2> by;
    IoPool pool({1, 1, &clock});
    std::vector<IoPool::Op> ops;
    if (beside_a_write) ops.push_back(op(log, 2, Lane::kWrite, &all));
    ops.push_back(op(log, 0, Lane::kRead, &all, [&] {
      by[0] = thread_name();
      running.count_down();
      go.wait();
    }));
    pool.submit(std::move(ops));
    running.wait();
    pool.submit(one(op(log, 1, Lane::kRead, &all, [&] {
      by[1] = thread_name();
      go.count_down();
    })));
    all.wait();
    EXPECT_EQ(by, (std::array<std::string, 2>{"kvo-read", "kvo-write"}));
  }
}

TEST(IoPool, write_threads_run_with_background_cpu_priority) {
  FakeClock clock;
  Log log;
  std::latch all(2);
  IoPool pool({1, 1, &clock});
  std::array<int, 2> nice{};
  for (const Lane lane : {Lane::kRead, Lane::kWrite}) {
    pool.submit(one(op(log, 0, lane, &all, [&nice, lane] {
      nice[static_cast<std::size_t>(lane)] = ::getpriority(PRIO_PROCESS, static_cast<id_t>(::gettid()));
    })));
  }
  all.wait();
  const int own = ::getpriority(PRIO_PROCESS, static_cast<id_t>(::gettid()));
  EXPECT_EQ(nice, (std::array<int, 2>{own, std::max(own, kBackgroundNice)}));
}

TEST(IoPool, an_op_past_its_deadline_does_not_run) {
  FakeClock clock;
  Log log;
  std::latch running(1), go(1), all(3);
  IoPool pool({1, 0, &clock});
  pool.submit(one(op(log, 0, Lane::kRead, &all, [&] {
    running.count_down();
    go.wait();
  })));
  running.wait();
  IoPool::Op late = op(log, 1, Lane::kRead, &all), never = op(log, 2, Lane::kRead, &all);
  late.deadline = clock.now() + std::chrono::seconds(1);
  pool.submit(one(std::move(late)));
  pool.submit(one(std::move(never)));
  clock.advance(std::chrono::seconds(2));
  go.count_down();
  all.wait();
  EXPECT_EQ(log.order, (std::vector<std::uint64_t>{0, 2}));
  EXPECT_EQ(log.endings()[1], std::make_pair(std::uint64_t{1}, StatusKind::kExpired));
}

TEST(IoPool, a_lane_is_stuck_when_every_thread_that_serves_it_is_stuck) {
  FakeClock clock;
  Log log;
  std::latch reading(1), writing(1), go(1);
  IoPool pool({1, 1, &clock});
  const auto hang = [&](Lane lane, std::latch& running) {
    pool.submit(one(op(log, 0, lane, nullptr, [&] {
      running.count_down();
      go.wait();
    })));
    running.wait();
  };
  hang(Lane::kRead, reading);
  clock.advance(std::chrono::seconds(1));
  EXPECT_FALSE(pool.is_stalled(Lane::kRead, clock.now())) << "the write thread also takes reads";
  EXPECT_FALSE(pool.is_stalled(Lane::kWrite, clock.now()));
  hang(Lane::kWrite, writing);
  clock.advance(std::chrono::seconds(1));
  EXPECT_TRUE(pool.is_stalled(Lane::kRead, clock.now()));
  EXPECT_TRUE(pool.is_stalled(Lane::kWrite, clock.now()));
  go.count_down();
}

TEST(IoPool, deadlines_expire_even_when_every_thread_is_stuck) {
  FakeClock clock;
  Log log;
  std::latch running(1), go(1);
  IoPool pool({1, 0, &clock});
  pool.submit(one(op(log, 0, Lane::kRead, nullptr, [&] {
    running.count_down();
    go.wait();
  })));
  running.wait();
  IoPool::Op late = op(log, 1, Lane::kRead, nullptr);
  late.deadline = clock.now() + std::chrono::seconds(1);
  pool.submit(one(std::move(late)));
  pool.expire();
  EXPECT_TRUE(log.endings().empty());
  clock.advance(std::chrono::seconds(1));
  pool.expire();
  ASSERT_EQ(log.endings().size(), 1u);
  EXPECT_EQ(log.endings()[0].second, StatusKind::kExpired);
  EXPECT_EQ(pool.depth(Lane::kRead).oldest_seconds, 1.0);
  const Nanos started = clock.now() - std::chrono::seconds(1);
  EXPECT_EQ(pool.running_since(Lane::kRead, Nanos{0}, clock.now()), 1u);
  EXPECT_TRUE(pool.is_stalled(Lane::kRead, clock.now()));
  EXPECT_FALSE(pool.is_stalled(Lane::kRead, started)) << "it has been stuck for no longer than that";
  EXPECT_FALSE(pool.is_stalled(Lane::kWrite, clock.now())) << "the lane has no thread";
  EXPECT_EQ(pool.running_since(Lane::kWrite, Nanos{0}, clock.now()), 0u);
  EXPECT_EQ(pool.running_since(Lane::kRead, Nanos{0}, started), 0u);
  EXPECT_EQ(pool.running_since(Lane::kRead, started, clock.now()), 0u);
  go.count_down();
}

TEST(IoPool, cancel_ends_queued_ops_and_leaves_running_ones) {
  FakeClock clock;
  Log log;
  std::latch running(1), go(1), all(2);
  IoPool pool({1, 0, &clock});
  pool.submit(one(op(log, 7, Lane::kRead, &all, [&] {
    running.count_down();
    go.wait();
  })));
  running.wait();
  pool.submit(one(op(log, 8, Lane::kRead, &all)));
  EXPECT_FALSE(pool.cancel(7));
  EXPECT_TRUE(pool.cancel(8));
  EXPECT_FALSE(pool.cancel(8));
  EXPECT_FALSE(pool.cancel(9));
  EXPECT_EQ(log.endings()[0], std::make_pair(std::uint64_t{8}, StatusKind::kCancelled));
  go.count_down();
  all.wait();
  EXPECT_EQ(log.order, (std::vector<std::uint64_t>{7}));
}

TEST(IoPool, urgent_ops_start_before_older_ones) {
  FakeClock clock;
  Log log;
  IoPool pool({0, 0, &clock});
  const auto submit = [&](std::uint64_t tag, bool urgent, Nanos deadline = Nanos{0}) {
    IoPool::Op made = op(log, tag, Lane::kRead, nullptr);
    made.urgent = urgent;
    made.deadline = deadline;
    pool.submit(one(std::move(made)));
    clock.advance(std::chrono::seconds(1));
  };
  submit(1, false);
  submit(2, true);
  submit(3, false);
  submit(4, true);
  submit(5, true);
  submit(6, true, clock.now() + std::chrono::seconds(1));
  EXPECT_EQ(pool.depth(Lane::kRead).queued, 6u);
  EXPECT_EQ(pool.depth(Lane::kRead).oldest_seconds, 6) << "the oldest of all queued ops";
  EXPECT_TRUE(pool.cancel(4));
  pool.expire();
  EXPECT_EQ(log.endings().back(), std::make_pair(std::uint64_t{6}, StatusKind::kExpired));
  for (int i = 0; i < 3; ++i) pool.begin_next(Lane::kRead)();
  EXPECT_EQ(log.order, (std::vector<std::uint64_t>{2, 5, 1}));
  for (std::uint64_t tag = 100; tag < 120; ++tag) submit(tag, true);
  for (int i = 0; i < 9; ++i) pool.begin_next(Lane::kRead)();
  EXPECT_EQ(log.order.back(), 3u) << "it got its turn";
  EXPECT_EQ(log.order.size(), 3u + 9u);
  submit(7, true);
  pool.fail_queued(Lane::kRead, Status::error(StatusKind::kUnavailable, "off"));
  EXPECT_EQ(pool.depth(Lane::kRead).queued, 0u);
  EXPECT_EQ(log.endings().size(), 7u + 20u);
}

TEST(IoPool, a_batch_that_runs_out_of_memory_submits_nothing) {
  FakeClock clock;
  Log log;
  IoPool pool({0, 0, &clock});
  unsigned submitted = 0, failures = 0;
  for (bool failed = true; failed; failures += failed) {
    std::vector<IoPool::Op> ops;
    for (std::uint64_t i = 0; i < 20; ++i)
      ops.push_back(op(log, i, i % 3 == 0 ? Lane::kWrite : Lane::kRead, nullptr));
    for (std::uint64_t i = 0; i < 20; i += 2) ops[i].urgent = true;
    {
      const testing::FailingAllocation one(failures);
      try {
        pool.submit(std::move(ops));
      } catch (const std::bad_alloc&) {
      }
      failed = one.came();
    }
    submitted += failed ? 0 : 20;
    EXPECT_EQ(pool.depth(Lane::kRead).queued + pool.depth(Lane::kWrite).queued, submitted) << failures;
  }
  EXPECT_GT(failures, 0u);
  EXPECT_TRUE(log.endings().empty());
  pool.close();
  EXPECT_EQ(log.endings().size(), 20u);
}

// A long batch must not make another thread wait longer for the lock than a short one.
TEST(IoPool, a_long_batch_is_queued_and_expired_under_several_holds_of_the_lock) {
  std::uint64_t holds[2][2] = {};
  for (const std::size_t scale : {1, 10}) {
    FakeClock clock;
    Log log;
    IoPool pool({0, 0, &clock});
    std::vector<IoPool::Op> ops;
    for (std::uint64_t i = 0; i < 1000 * scale; ++i) {
      ops.push_back(op(log, i, i % 3 == 0 ? Lane::kWrite : Lane::kRead, nullptr));
      ops.back().deadline = Nanos{1};
    }
    const testing::StepWatch watch;
    pool.submit(std::move(ops));
    holds[scale == 10][0] = watch.holds();
    clock.advance(Nanos{2'000'000'000});
    pool.expire();
    holds[scale == 10][1] = watch.holds() - holds[scale == 10][0];
    EXPECT_EQ(log.endings().size(), 1000 * scale);
  }
  EXPECT_GE(holds[1][0], 5 * holds[0][0]) << "submit()";
  EXPECT_GE(holds[1][1], 5 * holds[0][1]) << "expire()";
}

TEST(IoPool, an_op_that_ends_without_memory_is_not_lost) {
  FakeClock clock;
  IoPool pool({0, 0, &clock});
  constexpr unsigned kOps = 12;
  unsigned ended = 0;
  std::vector<IoPool::Op> ops(kOps);
  for (unsigned i = 0; i < kOps; ++i) {
    ops[i].lane = i % 2 == 0 ? Lane::kRead : Lane::kWrite;
    ops[i].tag = i;
    if (i < 4) ops[i].deadline = clock.now() + std::chrono::seconds(1);
    ops[i].done = [&](const Status&, double, double) { ++ended; };
  }
  pool.submit(std::move(ops));
  clock.advance(std::chrono::seconds(2));
  const std::function<void()> ends[] = {
      [&] { pool.expire(); }, [&] { pool.cancel(5); },
      [&] {
        pool.fail_queued(Lane::kRead, Status::error(StatusKind::kUnavailable, "this tier is switched off"));
      },
      [&] { pool.close(); }};
  unsigned failures = 0, left = kOps;
  for (const auto& end : ends) {
    bool failed = true;
    for (unsigned nth = 0; failed; ++nth) {
      const testing::FailingAllocation one(nth);
      try {
        end();
      } catch (const std::bad_alloc&) {
      }
      failed = one.came();
      failures += failed;
      left = pool.depth(Lane::kRead).queued + pool.depth(Lane::kWrite).queued;
      EXPECT_EQ(left + ended, kOps) << nth;
    }
  }
  EXPECT_EQ(left, 0u);
  EXPECT_GT(failures, 0u);
}

TEST(IoPool, a_pool_without_threads_is_driven_by_hand) {
  FakeClock clock;
  Log log;
  IoPool pool({0, 0, &clock});
  EXPECT_FALSE(pool.begin_next(Lane::kRead));
  std::vector<IoPool::Op> ops;
  for (std::uint64_t i = 0; i < 3; ++i) ops.push_back(op(log, i, Lane::kRead, nullptr));
  ops[1].deadline = clock.now() + std::chrono::seconds(1);
  ops.push_back(op(log, 9, Lane::kWrite, nullptr));
  pool.submit(std::move(ops));
  const auto first = pool.begin_next(Lane::kRead);
  EXPECT_FALSE(pool.cancel(0)) << "it runs";
  EXPECT_TRUE(log.endings().empty());
  EXPECT_EQ(pool.depth(Lane::kRead).running, 1u);
  clock.advance(std::chrono::seconds(1));
  pool.begin_next(Lane::kRead)();
  EXPECT_EQ(log.endings().back(), std::make_pair(std::uint64_t{1}, StatusKind::kExpired));
  pool.begin_next(Lane::kWrite)();
  first();
  EXPECT_EQ(log.order, (std::vector<std::uint64_t>{9, 0}));
  EXPECT_EQ(log.endings().back(), std::make_pair(std::uint64_t{0}, StatusKind::kOk));
  EXPECT_EQ(pool.depth(Lane::kRead).running, 0u);
  EXPECT_TRUE(pool.close());
  EXPECT_EQ(log.endings().back(), std::make_pair(std::uint64_t{2}, StatusKind::kCancelled));
}

TEST(IoPool, close_cancels_queued_ops_waits_for_running_ones_and_refuses_new_ones) {
  FakeClock clock;
  Log log;
  std::latch running(1), go(1);
  IoPool pool({1, 1, &clock});
  pool.submit(one(op(log, 0, Lane::kRead, nullptr, [&] {
    running.count_down();
    go.wait();
  })));
  running.wait();
  std::vector<IoPool::Op> ops;
  for (std::uint64_t i = 1; i < 5; ++i) ops.push_back(op(log, i, Lane::kRead, nullptr));
  pool.submit(std::move(ops));
  std::thread helper([&] {
    while (log.endings().size() < 4) std::this_thread::yield();
    go.count_down();
  });
  EXPECT_TRUE(pool.close());
  helper.join();
  EXPECT_EQ(log.endings().back(), std::make_pair(std::uint64_t{0}, StatusKind::kOk));
  pool.submit(one(op(log, 9, Lane::kWrite, nullptr)));
  EXPECT_EQ(log.endings().back(), std::make_pair(std::uint64_t{9}, StatusKind::kUnavailable));
}

TEST(IoPool, close_abandons_a_stuck_thread_which_ends_its_op_later) {
  FakeClock clock;
  struct Stuck {
    Log log;
    std::latch running{1}, go{1}, ended{1};
    IoPool::Submitter submit;
  };
  auto stuck = std::make_shared<Stuck>();
  IoPool::Op hanging;
  hanging.lane = Lane::kRead;
  hanging.run = [stuck] {
    stuck->running.count_down();
    stuck->go.wait();
    stuck->submit(one(op(stuck->log, 7, Lane::kRead, nullptr)));
    return Status::ok();
  };
  hanging.done = [stuck](const Status&, double, double) { stuck->ended.count_down(); };
  {
    IoPool pool({1, 1, &clock, std::chrono::milliseconds(1)});
    stuck->submit = pool.submitter();
    pool.submit(one(std::move(hanging)));
    stuck->running.wait();
    EXPECT_FALSE(pool.close());
    EXPECT_FALSE(stuck->ended.try_wait());
  }
  stuck->go.count_down();
  stuck->ended.wait();
  EXPECT_EQ(stuck->log.endings().back(), std::make_pair(std::uint64_t{7}, StatusKind::kUnavailable));
}

// A pool without threads, whose ops start one by one.
class TenantTurns : public testing::Test {
 protected:
  void queue(TenantId tenant, std::uint64_t first, int count, double cost = 1, bool urgent = false,
             Nanos time = Nanos{0}, float weight = 1) {
    std::vector<IoPool::Op> ops;
    for (int i = 0; i < count; ++i) {
      ops.push_back(op(log_, first + static_cast<std::uint64_t>(i), Lane::kRead, nullptr,
                       [this, time] { clock_.advance(time); }));
      ops.back().tenant = tenant;
      ops.back().cost = cost;
      ops.back().urgent = urgent;
      ops.back().weight = weight;
    }
    pool_.submit(std::move(ops));
  }
  // Starts this many ops and returns their tags.
  std::vector<std::uint64_t> run(int count) {
    log_.order.clear();
    for (int i = 0; i < count; ++i) {
      if (const auto next = pool_.begin_next(Lane::kRead)) next();
    }
    return log_.order;
  }
  // A read of as much as the first urgent op counts, and its time.
  static constexpr double kRead = IoPool::kFirstUrgentSeconds / IoPool::kFirstSeconds;
  static constexpr Nanos kReadTime{std::chrono::milliseconds(1)};
  static std::ptrdiff_t below(const std::vector<std::uint64_t>& tags, std::uint64_t end) {
    return std::count_if(tags.begin(), tags.end(), [end](std::uint64_t tag) { return tag < end; });
  }

  FakeClock clock_;
  Log log_;
  IoPool pool_{{0, 0, &clock_}};
};

TEST_F(TenantTurns, a_long_queue_delays_another_tenant_by_one_op) {
  queue(2, 1000, 500);
  run(10);
  queue(1, 0, 3);
  EXPECT_LE(below(run(6), 1000), 3);
  queue(1, 3, 3);
  EXPECT_EQ(below(run(6), 1000), 3);
}

TEST_F(TenantTurns, tenants_start_costs_in_proportion_to_their_weights) {
  queue(1, 0, 200, 1, false, Nanos{0}, 0.75F);
  queue(2, 1000, 200, 1, false, Nanos{0}, 0.25F);
  EXPECT_NEAR(static_cast<double>(below(run(200), 1000)), 150, 1);
}

TEST_F(TenantTurns, ops_of_a_tenant_start_in_order) {
  queue(2, 1000, 3);
  queue(1, 0, 3);
  const auto tags = run(6);
  std::vector<std::uint64_t> first, second;
  for (const std::uint64_t tag : tags) (tag < 1000 ? first : second).push_back(tag);
  EXPECT_EQ(first, (std::vector<std::uint64_t>{0, 1, 2}));
  EXPECT_EQ(second, (std::vector<std::uint64_t>{1000, 1001, 1002}));
}

TEST_F(TenantTurns, an_idle_tenant_gains_nothing_by_waiting) {
  queue(0, 2000, 1);
  queue(1, 0, 1);
  queue(2, 1000, 300);
  run(152);
  queue(1, 1, 100);
  EXPECT_NEAR(static_cast<double>(below(run(40), 1000)), 20, 1);
}

TEST_F(TenantTurns, a_tenant_that_ran_alone_is_not_made_to_wait_for_it) {
  queue(1, 0, 300);
  run(200);
  queue(2, 1000, 300);
  EXPECT_NEAR(static_cast<double>(below(run(40), 1000)), 20, 1);
  queue(0, 2000, 300);
  run(500);
  queue(1, 300, 20);
  EXPECT_GT(below(run(20), 1000), 4);
}

TEST_F(TenantTurns, urgent_ops_start_first_in_the_turns_of_their_tenant) {
  queue(1, 0, 2, kRead);
  queue(1, 10, 2, 1, true);
  queue(2, 1000, 500, 1, true);
  const auto tags = run(8);
  std::vector<std::uint64_t> first;
  std::copy_if(tags.begin(), tags.end(), std::back_inserter(first),
               [](std::uint64_t tag) { return tag < 1000; });
  EXPECT_EQ(first, (std::vector<std::uint64_t>{10, 11, 0, 1}))
      << "each in turn with an op of the other tenant";
}

TEST_F(TenantTurns, another_op_starts_among_the_urgent_ops_of_its_tenant) {
  queue(1, 0, 1, kRead);
  queue(1, 10, 20, 1, true);
  queue(2, 1000, 1, kRead);
  queue(2, 1010, 20, 1, true);
  const auto tags = run(2 * (IoPool::kUrgentPerNormal + 1));
  EXPECT_EQ(std::set<std::uint64_t>(tags.end() - 2, tags.end()), (std::set<std::uint64_t>{0, 1000}));
}

TEST_F(TenantTurns, a_long_queue_of_urgent_ops_delays_another_tenants_reads_by_one_op) {
  queue(2, 1000, 500, 1, true);
  run(10);
  queue(1, 0, 5, kRead);
  EXPECT_EQ(below(run(10), 1000), 5);
}

TEST_F(TenantTurns, urgent_ops_count_by_their_time) {
  for (const int times : {4, 1}) {
    queue(1, 0, 300, kRead, false, kReadTime);
    queue(2, 1000, 300, 1, true, times * kReadTime);
    run(100);
    EXPECT_NEAR(static_cast<double>(below(run(100), 1000)), 100.0 * times / (times + 1), 2) << times;
    run(400);
  }
}

TEST_F(TenantTurns, long_urgent_ops_of_a_tenant_start_less_often_than_short_ones_of_another) {
  queue(1, 0, 200, 1, true, kReadTime);
  queue(2, 1000, 200, 1, true, 3 * kReadTime);
  EXPECT_NEAR(static_cast<double>(below(run(100), 1000)), 75, 2);
}

TEST_F(TenantTurns, ops_that_fail_at_once_do_not_make_urgent_ops_expensive) {
  std::vector<IoPool::Op> failing;
  for (std::uint64_t tag = 0; tag < 20; ++tag) {
    failing.push_back(op(log_, tag, Lane::kRead, nullptr));
    failing.back().cost = kRead;
    failing.back().run = [this] {
      clock_.advance(std::chrono::microseconds(1));
      return Status::error(StatusKind::kNotFound, "no record");
    };
  }
  pool_.submit(std::move(failing));
  run(20);
  queue(1, 100, 300, kRead, false, kReadTime);
  queue(2, 1000, 300, 1, true, kReadTime);
  EXPECT_NEAR(static_cast<double>(below(run(20), 1000)), 10, 1);
}

// The pool does not know the speed of reads before the first one has ended.
TEST_F(TenantTurns, urgent_ops_before_the_first_slow_read_do_not_delay_their_tenant) {
  constexpr Nanos kSlow = std::chrono::milliseconds(100);
  queue(2, 1000, 20, 1, true, kSlow);
  run(16);
  queue(1, 0, 200, 4096, false, kSlow);
  EXPECT_EQ(below(run(10), 1000), 6);
}

TEST_F(TenantTurns, a_stuck_urgent_op_does_not_delay_its_tenant_for_as_long) {
  queue(2, 1000, 1, 1, true, std::chrono::seconds(100));
  queue(2, 1001, 1, 1, true, kReadTime);
  run(1);
  queue(1, 10'000, 3000, kRead, false, kReadTime);
  EXPECT_EQ(below(run(900), 2000), 0) << "it took the time of 1000 reads";
  EXPECT_EQ(below(run(200), 2000), 1);
}

TEST_F(TenantTurns, a_long_queue_of_urgent_ops_delays_another_tenant_by_one_op) {
  queue(2, 1000, 500, 1, true);
  run(10);
  queue(1, 0, 3, 1, true);
  EXPECT_EQ(below(run(6), 1000), 3);
  EXPECT_EQ(run(2), (std::vector<std::uint64_t>{1013, 1014})) << "the other's ops stay in order";
}

TEST_F(TenantTurns, tenants_start_urgent_ops_in_proportion_to_their_weights) {
  queue(1, 0, 200, 1, true, Nanos{0}, 0.75F);
  queue(2, 1000, 200, 1, true, Nanos{0}, 0.25F);
  EXPECT_NEAR(static_cast<double>(below(run(200), 1000)), 150, 1);
}

TEST_F(TenantTurns, an_idle_tenant_gains_no_urgent_ops_by_waiting) {
  queue(1, 0, 1, 1, true);
  queue(2, 1000, 300, 1, true);
  run(152);
  queue(1, 1, 100, 1, true);
  EXPECT_NEAR(static_cast<double>(below(run(40), 1000)), 20, 1);
}

TEST_F(TenantTurns, urgent_ops_of_one_tenant_start_in_order) {
  queue(3, 0, 20, 1, true, Nanos{0}, 0.3F);
  queue(3, 20, 20, 1, true, Nanos{0}, 0.7F);
  std::vector<std::uint64_t> all(40);
  std::iota(all.begin(), all.end(), 0);
  EXPECT_EQ(run(40), all);
}

TEST_F(TenantTurns, a_cancelled_urgent_op_leaves_its_turn_to_the_next_one) {
  queue(1, 0, 3, 1, true);
  queue(2, 1000, 3, 1, true);
  EXPECT_TRUE(pool_.cancel(0));
  EXPECT_TRUE(pool_.cancel(1000));
  EXPECT_FALSE(pool_.cancel(1000));
  EXPECT_EQ(run(4), (std::vector<std::uint64_t>{1, 1001, 2, 1002}));
  queue(1, 3, 2, 1, true);
  queue(2, 1003, 2, 1, true);
  pool_.fail_queued(Lane::kRead, Status::error(StatusKind::kUnavailable, "off"));
  EXPECT_EQ(pool_.depth(Lane::kRead).queued, 0u);
  EXPECT_EQ(log_.endings().size(), 10u);
}

TEST_F(TenantTurns, a_queued_op_of_a_tenant_is_cancelled_and_counts_as_the_oldest) {
  for (const bool urgent : {false, true}) {
    const std::uint64_t tag = urgent ? 1001 : 1000;
    queue(2, tag, 1, 1, urgent);
    clock_.advance(std::chrono::seconds(5));
    queue(0, urgent, 1, 1, urgent);
    EXPECT_EQ(pool_.depth(Lane::kRead).oldest_seconds, 5);
    EXPECT_TRUE(pool_.cancel(tag));
    EXPECT_EQ(pool_.depth(Lane::kRead).oldest_seconds, 0);
    run(1);
    EXPECT_EQ(log_.endings().at(urgent ? 2 : 0), std::pair(tag, StatusKind::kCancelled));
  }
}

TEST_F(TenantTurns, steps_of_a_start_do_not_grow_with_the_queues) {
  for (const bool urgent : {false, true}) {
    std::uint64_t most[2] = {0, 0};
    for (const bool large : {false, true}) {
      for (const TenantId tenant : {0, 1, 2}) queue(tenant, 10'000u * tenant, large ? 5000 : 50, 1, urgent);
      for (int i = 0; i < 50; ++i) most[large] = std::max(most[large], testing::steps_of([&] { run(1); }));
    }
    EXPECT_EQ(most[true], most[false]);
  }
}

}  // namespace
}  // namespace kv_offload
