// SPDX-License-Identifier: Apache-2.0
// OpTable: the ops of a tier that are in flight, by their ids. Slots in flat memory that are used again: a
// map with a node for each op costs the scheduler's thread an allocation and several cache misses when an op
// begins, and when it ends on each host. Ids from messages may name no op; find() compares the whole id.
//
// Memory: that of the most ops in flight at once. Slots of more than kMostKept ops are freed when no op is in
// flight.
//
// Threads: one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "base/make_room.h"
#include "base/split_table.h"
#include "tier/tier.h"

namespace kv_offload {

template <typename Op>
class OpTable {
 public:
  static constexpr std::size_t kMostKept = 4096;

  std::size_t size() const { return places_.size(); }
  bool empty() const { return size() == 0; }
  std::size_t slots() const { return slots_.size(); }  // that take up memory
  // Returns null if no op has this id. The address is valid until the op is erased.
  Op* find(OpId id) {
    const std::uint32_t place = places_.find(tag_of(id), is(id));
    return place == SplitTable::kNone ? nullptr : &slots_[place].op;
  }
  // Returns the op with this id, which is new and as Op() makes it if there was none. If memory runs out,
  // throws and changes nothing.
  Op& add(OpId id) {
    make_room(free_, slots_.size() + 1 - free_.size());  // erase() allocates nothing
    const std::uint32_t place = places_.find_or_add(tag_of(id), is(id), [&] {
      if (free_.empty()) {
        slots_.push_back({id, Op()});
        return static_cast<std::uint32_t>(slots_.size() - 1);
      }
      const std::uint32_t unused = free_.back();
      slots_[unused] = {id, Op()};
      free_.pop_back();
      return unused;
    });
    return slots_[place].op;
  }
  // REQUIRES: an op has this id.
  void erase(OpId id) {
    free_.push_back(places_.find(tag_of(id), is(id)));
    places_.erase(tag_of(id), is(id));
    slots_[free_.back()].is_used = false;
    if (!empty() || slots_.size() <= kMostKept) return;
    slots_.clear();
    free_.clear();
  }
  // Calls visit(id, op) for all ops. It must not add or erase one.
  template <typename Visit>
  void for_each(Visit visit) const {
    for (const Slot& slot : slots_) {
      if (slot.is_used) visit(slot.id, slot.op);
    }
  }
  std::vector<OpId> ids() const {
    std::vector<OpId> all;
    all.reserve(size());
    for_each([&](OpId id, const Op&) { all.push_back(id); });
    return all;
  }

 private:
  struct Slot {
    OpId id = 0;
    Op op;
    bool is_used = true;
  };
  static std::uint32_t tag_of(OpId id) {
    return static_cast<std::uint32_t>(id * 0x9E3779B97F4A7C15ull >> 32);
  }
  auto is(OpId id) const {
    return [this, id](std::uint32_t place) { return slots_[place].id == id; };
  }

  std::deque<Slot> slots_;           // do not move
  std::vector<std::uint32_t> free_;  // of slots_
  SplitTable places_;                // of ops in slots_
};

}  // namespace kv_offload
