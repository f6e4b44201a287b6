// DeviceCopier: BlockCopier over a CopyDevice. submit() plans, marks the compute
// stream and queues; one thread of its own issues copies and sees them end, so
// that the model runner's thread neither waits nor pays for descriptors.
//
// Jobs are cut into sub-jobs. Lanes, most urgent first: loads that are expedited
// or waited for, loads, stores that are waited for, stores. A lane has a few
// sub-jobs in flight; of one direction only the most urgent lane is fed, so a
// short load is behind at most those few. wait() moves what is left of the listed
// jobs to the urgent lane. Each sub-job comes behind the compute stream as of
// submit.
//
// A failed sub-job ends its job as kDevice with every group failed, once nothing
// of the job runs any more.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "base/thread_annotations.h"
#include "copy/block_copier.h"
#include "copy/copy_device.h"
#include "copy/copy_path.h"
#include "copy/segment_split.h"

namespace kv_offload {

enum class CopyLane : std::uint8_t { kUrgentLoads, kLoads, kUrgentStores, kStores };
inline constexpr std::uint32_t kCopyLanes = 4;
inline constexpr std::uint32_t kLaneSlots = 4;

struct DeviceLimits {
  std::uint64_t sub_job_bytes = 8 << 20;  // of DMA and kernel copies
  std::uint64_t staged_bytes = 0;         // of staged copies: what a slot's staging holds; 0: no staging
  std::uint32_t sub_job_segments = 4096;
  std::uint64_t boundary = 0;  // area offsets that no DMA crosses
};

// How the jobs of a path are cut. REQUIRES: staged_bytes of 128 at least for staged copies.
SplitLimits split_limits_for(CopyPath path, const DeviceLimits& limits);

class DeviceCopier final : public BlockCopier {
 public:
  // Throws InvalidArgument (layout).
  DeviceCopier(const CopierOptions& options, std::unique_ptr<CopyDevice> device, const CopyTable& table,
               const DeviceLimits& limits);
  ~DeviceCopier() override;  // close()

  std::string describe() const override;
  void submit(CopyJob job) override;
  std::vector<CopyResult> poll() override;
  void wait(std::span<const std::uint64_t> job_ids) override;
  // Refuses new jobs (they end as kUnavailable), finishes the queued ones, joins.
  void close() override;

 private:
  struct Job {
    CopyResult result;
    CopyPath path = CopyPath::kDma;
    CopyLane lane = CopyLane::kStores;
    std::vector<CopySegment> segments;
    std::vector<SegmentRange> ranges;  // one per sub-job
    std::size_t next_range = 0;        // not issued yet
    std::uint32_t running = 0;
    DeviceEvent after = kNoEvent;
    Nanos started{0};
    bool all_issued() const { return next_range == ranges.size(); }
  };
  struct Flight {
    Job* job = nullptr;  // null: the slot is free
    bool ended = false;
    Status status;
  };
  using LaneFlights = std::array<Flight, kLaneSlots>;

  void run_thread();
  bool look_at_flights();
  void land_flights() REQUIRES(mutex_);
  bool take_copy(DeviceCopy* copy) REQUIRES(mutex_);
  bool lane_may_issue(std::uint32_t lane) const REQUIRES(mutex_);
  bool anything_in_flight() const;
  void issue(const DeviceCopy& copy);
  void fail(Job& job, Status status) REQUIRES(mutex_);
  void finish_if_done(Job& job) REQUIRES(mutex_);
  void finish(std::uint64_t job_id) REQUIRES(mutex_);
  void raise_urgency(Job& job) REQUIRES(mutex_);

  const CacheLayout layout_;
  const std::span<std::byte> area_;
  const bool order_after_compute_;
  const CopyTable table_;
  const DeviceLimits limits_;
  const SteadyClock clock_;
  const std::unique_ptr<CopyDevice> device_;

  std::array<LaneFlights, kCopyLanes> flights_;  // the thread's own

  mutable Mutex mutex_;
  CondVar work_;
  CondVar done_;
  bool closing_ GUARDED_BY(mutex_) = false;
  int waiting_ GUARDED_BY(mutex_) = 0;  // calls of wait() under way: look more often
  std::unordered_map<std::uint64_t, std::unique_ptr<Job>> jobs_ GUARDED_BY(mutex_);
  std::array<std::deque<Job*>, kCopyLanes> queues_ GUARDED_BY(mutex_);
  std::vector<CopyResult> finished_ GUARDED_BY(mutex_);
  std::thread thread_;  // last: it dies first
};

}  // namespace kv_offload
