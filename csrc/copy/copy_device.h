// CopyDevice: what DeviceCopier needs of an accelerator, and nothing else, so
// that everything about jobs, turns and failures is tested without one.
//
// Copies are issued into lanes; a lane has its own stream (lane 0 is the most
// urgent) and a few slots, one per copy in flight. Threads: mark() and release()
// any; the rest one thread, which calls enter_thread() first.
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
  DeviceEvent after = kNoEvent;  // nothing is read or written before it
};

class CopyDevice {
 public:
  virtual ~CopyDevice() = default;
  virtual std::string name() const = 0;
  // An event behind all that `compute_stream` was given so far. Never blocks.
  virtual Status mark(std::uintptr_t compute_stream, DeviceEvent* event) = 0;
  // Only when no copy waits for it any more.
  virtual void release(DeviceEvent event) = 0;

  virtual void enter_thread() {}
  // Enqueues. On failure nothing of this copy runs any more (it may block to
  // make sure). REQUIRES: the slot is free.
  virtual Status issue(const DeviceCopy& copy) = 0;
  // Whether the copy in this slot has ended; a failure means it has.
  virtual Status query(std::uint32_t lane, std::uint32_t slot, bool* done) = 0;
};

}  // namespace kv_offload
