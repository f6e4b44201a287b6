// SPDX-License-Identifier: Apache-2.0
// DeviceCopier: BlockCopier on top of a CopyDevice. submit() plans the job, marks the compute stream and
// queues the job. A dedicated thread issues the copies and polls for their end, so the model runner's thread
// neither waits nor pays for descriptors.
//
// Jobs are split into sub-jobs. Lanes, most urgent first: expedited or awaited loads, loads, awaited stores,
// stores. In each direction only the most urgent lane that can proceed is fed. wait() moves the rest of the
// listed jobs to the urgent lane.
//
// The device shares its copy engines, SMs and driver locks with the model, so little is in flight: a few
// sub-jobs per lane (DeviceLimits). A job is not issued before the compute stream has reached its position at
// submit(): a copy that only waits would occupy a place in the driver's queues.
//
// A failed sub-job ends its job as kDevice with all groups failed, once nothing of the job runs any more.
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
  // Bytes of a DMA sub-job. vLLM's own copies in every step (token ids, block tables) may queue after what is
  // in flight: at 50 GB/s, two sub-jobs of 4 MiB take 160 us. An urgent load waits as long. Each sub-job
  // leaves a gap on the link: on an H100, sub-jobs of 2 MiB reached 52.0 GB/s, and vLLM's calls for whole
  // jobs 54.5 GB/s. A sub-job must also take longer than the thread's polling interval, about 50 us.
  std::uint64_t dma_bytes = 4 << 20;
  // Bytes of a kernel sub-job, which takes SMs from the model: on an H100, steps during stores were 67%
  // longer with 2 MiB at a time and 83% longer with 8 MiB.
  std::uint64_t kernel_bytes = 2 << 20;
  // Descriptors per call. During a call the driver may hold locks that the model's launches need. 512 pages
  // of 4 KiB are 2 MiB.
  std::uint32_t sub_job_segments = 512;
  // Sub-jobs of a lane in flight: one on the link and one queued after it. While a caller is in wait(), the
  // lanes use all their slots and the thread spins.
  std::uint32_t in_flight = 2;
  std::uint64_t staged_bytes = 0;  // staging bytes per slot; 0 = no staging
  std::uint64_t boundary = 0;      // no DMA crosses a multiple of this area offset
  // Background stores use the path that disturbs the model least, which is not always the fastest. The
  // exception: the stores in progress and this one would take longer than this by DMA. A block is only free
  // after it was copied.
  double max_background_seconds = 0.1;
};

// Returns how jobs of a path are split. REQUIRES: staged_bytes >= 128 for staged copies.
SplitLimits split_limits_for(CopyPath path, const DeviceLimits& limits);
// Returns limits that let each sub-job use either path.
SplitLimits split_limits_for(CopyPath one, CopyPath other, const DeviceLimits& limits);

class DeviceCopier final : public BlockCopier {
 public:
  // Throws InvalidArgument (layout).
  DeviceCopier(const CopierOptions& options, std::unique_ptr<CopyDevice> device, const CopyTable& table,
               const DeviceLimits& limits);
  ~DeviceCopier() override;  // calls close()

  std::string describe() const override;
  void submit(CopyJob job) override;
  std::vector<CopyResult> poll() override;
  void wait(std::span<const std::uint64_t> job_ids) override;
  // Refuses new jobs (they end as kUnavailable), finishes the queued ones and joins the thread.
  void close() override;

 private:
  struct Job {
    CopyResult result;
    CopyPath path = CopyPath::kDma;
    CopyPath urgent_path = CopyPath::kDma;  // used once a caller waits; the sub-jobs fit both paths
    CopyLane lane = CopyLane::kStores;
    double dma_seconds = 0;  // estimated DMA time of a store
    std::vector<CopySegment> segments;
    std::vector<SegmentRange> ranges;  // one per sub-job
    std::size_t next_range = 0;        // not issued yet
    std::uint32_t running = 0;
    DeviceEvent after = kNoEvent;  // event on the compute stream
    bool reached = false;          // the compute stream reached `after`: the job may be issued
    Nanos started{0};
    bool all_issued() const { return next_range == ranges.size(); }
  };
  struct Flight {
    Job* job = nullptr;  // null = the slot is free
    bool ended = false;
    Status status;
  };
  using LaneFlights = std::array<Flight, kLaneSlots>;

  void run_thread();
  bool query_flights();
  void query_compute_events(std::span<Job* const> jobs);
  std::vector<Job*> jobs_waiting_for_compute() const REQUIRES(mutex_);
  void wait_for_poll() REQUIRES(mutex_);
  void finish_flights() REQUIRES(mutex_);
  bool take_copy(DeviceCopy* copy) REQUIRES(mutex_);
  bool has_ready_job(std::uint32_t lane) const REQUIRES(mutex_);
  bool lane_may_issue(std::uint32_t lane) const REQUIRES(mutex_);
  bool has_flights() const;
  void issue(const DeviceCopy& copy, Job& job);
  void fail(Job& job, Status status) REQUIRES(mutex_);
  void finish_if_done(Job& job) REQUIRES(mutex_);
  void finish(std::uint64_t job_id) REQUIRES(mutex_);
  void raise_urgency(Job& job) REQUIRES(mutex_);
  CopyUrgency urgency(const Job& job) const EXCLUDES(mutex_);

  const CacheLayout layout_;
  const std::span<std::byte> area_;
  const bool order_after_compute_;
  const CopyTable table_;
  const DeviceLimits limits_;
  const SteadyClock clock_;
  const std::unique_ptr<CopyDevice> device_;

  // Used by the thread only:
  std::array<LaneFlights, kCopyLanes> flights_;
  std::vector<std::pair<Job*, Status>> event_failures_;  // querying their event failed

  mutable Mutex mutex_;
  CondVar work_;
  CondVar done_;
  bool closing_ GUARDED_BY(mutex_) = false;
  int waiting_ GUARDED_BY(mutex_) = 0;  // calls in wait(): poll more often
  std::unordered_map<std::uint64_t, std::unique_ptr<Job>> jobs_ GUARDED_BY(mutex_);
  std::array<std::deque<Job*>, kCopyLanes> queues_ GUARDED_BY(mutex_);
  std::vector<CopyResult> finished_ GUARDED_BY(mutex_);
  std::thread thread_;  // last member: stopped first
};

}  // namespace kv_offload
