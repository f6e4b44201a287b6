// SPDX-License-Identifier: Apache-2.0
// CopyDevice: the minimal interface that DeviceCopier needs from an accelerator, so that jobs, scheduling and
// failures can be tested without one.
//
// Copies are issued into lanes. A lane has its own streams and a few slots, one per copy in flight.
//
// Threads: mark() and release() from any thread; all other calls from one thread, which calls enter_thread()
// first.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "base/status.h"
#include "copy/copy_path.h"
#include "copy/copy_plan.h"

namespace kv_offload {

using DeviceEvent = std::uint64_t;
inline constexpr DeviceEvent kNoEvent = 0;

struct DeviceCopy {
  CopyDirection direction = CopyDirection::kStore;
  CopyPath path = CopyPath::kDma;
  std::uint32_t lane = 0;
  std::uint32_t slot = 0;
  std::span<const CopySegment> segments;
};

class CopyDevice {
 public:
  virtual ~CopyDevice() = default;
  virtual std::string name() const = 0;
  // Records an event after all work submitted to `compute_stream` so far. Never blocks.
  virtual Status mark(std::uintptr_t compute_stream, DeviceEvent* event) = 0;
  // Releases the event: it will not be queried again.
  virtual void release(DeviceEvent event) = 0;

  virtual void enter_thread() {}
  // Sets `*done` to true if the compute stream has reached the event.
  virtual Status reached(DeviceEvent event, bool* done) = 0;
  // Enqueues a copy. On failure no part of the copy runs any more (it may block to ensure that). REQUIRES:
  // the slot is free, and the work that the copy depends on has ended (reached): the device does not order
  // the copy after anything.
  virtual Status issue(const DeviceCopy& copy) = 0;
  // Sets `*done` to true if the copy in this slot has ended. After a failure it has ended.
  virtual Status query(std::uint32_t lane, std::uint32_t slot, bool* done) = 0;
  // Returns the number of batches refused so far and enqueued another way.
  virtual std::uint64_t refused_batches() const { return 0; }
};

}  // namespace kv_offload
