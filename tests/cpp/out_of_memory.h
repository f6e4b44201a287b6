// SPDX-License-Identifier: Apache-2.0
// A failing allocation, for tests of the state after memory runs out; the size of allocations, for tests of
// what a thread does under a lock.
#pragma once

#include <cstddef>

namespace kv_offload::testing {

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

// Returns the largest number of bytes that one call of operator new on this thread requested since the last
// call of this function.
std::size_t take_largest_allocation();

}  // namespace kv_offload::testing
