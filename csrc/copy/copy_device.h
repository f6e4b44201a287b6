// CopyDevice: what DeviceCopier needs of an accelerator, and nothing else, so
// that everything about jobs, turns and failures is tested without one.
//
// Copies are issued into lanes; a lane has streams of its own and a few slots,
// one per copy in flight. Threads: mark() and release() any; the rest one thread,
// which calls enter_thread() first.
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
  // An event behind all that `compute_stream` was given so far. Never blocks.
  virtual Status mark(std::uintptr_t compute_stream, DeviceEvent* event) = 0;
  // Nobody asks about it any more.
  virtual void release(DeviceEvent event) = 0;

  virtual void enter_thread() {}
  // Whether the compute stream has come to the event.
  virtual Status reached(DeviceEvent event, bool* done) = 0;
  // Enqueues. On failure nothing of this copy runs any more (it may block to
  // make sure). REQUIRES: the slot is free, and what the copy comes behind was
  // reached: the device orders it behind nothing.
  virtual Status issue(const DeviceCopy& copy) = 0;
  // Whether the copy in this slot has ended; after a failure it has.
  virtual Status query(std::uint32_t lane, std::uint32_t slot, bool* done) = 0;
  // Batches that were refused, so far, and enqueued in another way.
  virtual std::uint64_t refused_batches() const { return 0; }
};

}  // namespace kv_offload
