// SPDX-License-Identifier: Apache-2.0
// RequestReport: when a request began and ended, and when its loads did.
#include "cache/cache_fixture.h"

namespace kv_offload {
namespace {

using std::chrono::milliseconds;

class ReportTimesTest : public CacheTest {
 protected:
  Nanos now() { return world().clock.now(); }
  RequestReport report(RequestHandle request) { return cache().report(request); }
};

TEST_F(ReportTimesTest, a_request_has_the_times_of_its_begin_and_end) {
  pass_time(milliseconds(3));
  const Nanos began = now();
  const RequestHandle request = begin();
  pass_time(milliseconds(5));
  end(request);
  pass_time(milliseconds(7));
  EXPECT_EQ(report(request).begun, began);
  EXPECT_EQ(report(request).ended, began + milliseconds(5));
}

TEST_F(ReportTimesTest, a_load_has_the_times_of_its_begin_and_end) {
  store({"a", "b"});
  const RequestHandle request = begin();
  scan(request, {"a", "b"});
  pass_time(milliseconds(3));
  const Nanos began = now();
  const Job load = begin_load(request, {"a", "b"});
  EXPECT_EQ(report(request).loads[0].end, Nanos(0));
  pass_time(milliseconds(5));
  end_load(load);
  const RequestReport found = report(request);
  EXPECT_EQ(found.load_count, 1u);
  EXPECT_EQ(found.loads[0].begin, began);
  EXPECT_EQ(found.loads[0].end, began + milliseconds(5));
}

TEST_F(ReportTimesTest, only_the_first_loads_have_times) {
  store({"a"});
  const RequestHandle request = begin();
  Nanos last_end{0};
  for (std::size_t i = 0; i < RequestReport::kLoads + 2; ++i) {
    scan(request, {"a"});
    pass_time(milliseconds(1));
    load(request, {"a"});
    if (i + 1 == RequestReport::kLoads) last_end = now();
    step();
  }
  const RequestReport found = report(request);
  EXPECT_EQ(found.load_count, RequestReport::kLoads + 2);
  EXPECT_EQ(found.loads.back().end, last_end);
  EXPECT_EQ(found.unfinished_reads, 0u);
}

TEST_F(ReportTimesTest, a_load_that_outlives_its_request_does_not_end_one_of_the_next_request) {
  store({"a", "b"});
  const RequestHandle request = begin();
  scan(request, {"a"});
  const Job first = begin_load(request, {"a"});
  end(request);
  EXPECT_EQ(report(request).loads[0].end, Nanos(0));
  const RequestHandle next = begin();
  ASSERT_EQ(next, request) << "the handle is reused";
  scan(next, {"b"});
  const Job second = begin_load(next, {"b"});
  end_load(first);
  EXPECT_EQ(report(next).loads[0].end, Nanos(0));
  end_load(second);
  EXPECT_EQ(report(next).loads[0].end, now());
}

TEST_F(ReportTimesTest, loads_of_the_same_keys_end_by_request) {
  store({"a"});
  const RequestHandle first = begin(), second = begin();
  scan(first, {"a"});
  scan(second, {"a"});
  const Job one = begin_load(first, {"a"}), other = begin_load(second, {"a"});
  pass_time(milliseconds(3));
  world().report(other.transfer.ticket);
  cache().complete_load(other.keys, second);
  EXPECT_EQ(report(first).loads[0].end, Nanos(0));
  EXPECT_EQ(report(second).loads[0].end, now());
  world().report(one.transfer.ticket);
  cache().complete_load(one.keys, first);
  EXPECT_EQ(report(first).loads[0].end, now());
}

}  // namespace
}  // namespace kv_offload
