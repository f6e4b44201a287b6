// SPDX-License-Identifier: Apache-2.0
// A failing allocation, for tests of the state after memory runs out; the size of allocations, for tests of
// what a thread does under a lock.
#pragma once

#include <cstddef>
#include <new>

namespace testing {}
namespace kv_offload::testing {
using namespace ::testing;  // so that testing::Test is gtest's inside kv_offload

// While an instance exists, one call of operator new on this thread throws std::bad_alloc: the
// first one after `after` successful calls.
class FailingAllocation {
 public:
  explicit FailingAllocation(unsigned after);
  ~FailingAllocation();
  FailingAllocation(const FailingAllocation&) = delete;
  FailingAllocation& operator=(const FailingAllocation&) = delete;
  bool came() const;  // true if the failing call happened
};

// Calls `call` with its first, then its second, ... allocation failing, until it completes. Calls `check`
// after each failure. Returns the number of failures.
template <typename Call, typename Check>
unsigned fail_each_allocation(Call call, Check check) {
  for (unsigned after = 0;; ++after) {
    try {
      const FailingAllocation one(after);
      call();
      return after;
    } catch (const std::bad_alloc&) {
      check();
    }
  }
}

// Returns the largest number of bytes that one call of operator new on this thread requested since the last
// call of this function.
std::size_t take_largest_allocation();

}  // namespace kv_offload::testing
