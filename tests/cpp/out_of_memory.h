// SPDX-License-Identifier: Apache-2.0
// A failing allocation, for tests of the state after memory runs out.
#pragma once

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

}  // namespace kv_offload::testing
