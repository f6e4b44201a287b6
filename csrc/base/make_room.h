// SPDX-License-Identifier: Apache-2.0
// make_room(): lets a list grow before a lock is taken. A list that grows under the lock copies all its
// elements while other threads wait, and may run out of memory there.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace kv_offload {

// After the call, `count` elements can be appended without an allocation. The capacity at least doubles when
// it grows, so any number of calls copies each element a constant number of times.
template <typename T>
void make_room(std::vector<T>& list, std::size_t count) {
  if (list.capacity() - list.size() < count) list.reserve(std::max(2 * list.capacity(), list.size() + count));
}

}  // namespace kv_offload
