// SPDX-License-Identifier: Apache-2.0
// An allocation that fails, for tests of the state that remains when memory runs out.
#pragma once

namespace kv_offload::testing {

// While it lives, one call of operator new on this thread throws std::bad_alloc: the one after so many
// others.
class FailingAllocation {
 public:
  explicit FailingAllocation(unsigned after);
  ~FailingAllocation();
  FailingAllocation(const FailingAllocation&) = delete;
  FailingAllocation& operator=(const FailingAllocation&) = delete;
  bool came() const;  // so many calls were made, and one threw
};

}  // namespace kv_offload::testing
