// DeviceCopier: BlockCopier over a CopyDevice. submit() plans, marks the compute
// stream and queues; one thread of its own issues copies and sees them end, so
// that the model runner's thread neither waits nor pays for descriptors.
//
// Jobs are cut into sub-jobs. Lanes, most urgent first: loads that are expedited
// or waited for, loads, stores that are waited for, stores. Of one direction only
// the most urgent lane that can go on is fed. wait() moves what is left of the
// listed jobs to the urgent lane.
//
// The device shares its copy engines, its SMs and its driver's locks with the
// model, so little is in flight: a few sub-jobs a lane (DeviceLimits), and nothing
// of a job before the compute stream has come to where it stood at submit: a copy
// that only waits would hold a place in the driver's queues.
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
  // Of a DMA copy. What vLLM copies itself in every step (token ids, block tables)
  // may stand behind what is in flight: at 50 GB/s, two of 4 MiB are 160 us, and so
  // is what an urgent load finds before it. After each the link rests: on an H100,
  // 2 MiB at a time came to 52.0 GB/s, and vLLM's calls for whole jobs to 54.5. And
  // they must not be over before the thread looks again, every 50 us or so.
  std::uint64_t dma_bytes = 4 << 20;
  // Of a kernel's copy, which keeps SMs from the model: on an H100, steps beside
  // stores were 67% longer with 2 MiB at a time and 83% with 8 MiB.
  std::uint64_t kernel_bytes = 2 << 20;
  // Descriptors of one call, during which the driver may hold locks that the
  // model's launches need. 2 MiB of 4 KiB pages.
  std::uint32_t sub_job_segments = 512;
  // Sub-jobs of a lane in flight: one on the link, one behind it. While somebody
  // waits the lane takes all its slots, and the thread spins.
  std::uint32_t in_flight = 2;
  std::uint64_t staged_bytes = 0;  // of staged copies: what a slot's staging holds; 0: no staging
  std::uint64_t boundary = 0;      // area offsets that no DMA crosses
  // Stores that nobody waits for are copied as the model notices least, which is not
  // always the fastest way, unless that takes longer than this for the stores under
  // way and this one, by DMA: a block is free when it was copied.
  double patient_seconds = 0.1;
};

// How the jobs of a path are cut. REQUIRES: staged_bytes of 128 at least for staged copies.
SplitLimits split_limits_for(CopyPath path, const DeviceLimits& limits);
// So that each sub-job can go either way.
SplitLimits split_limits_for(CopyPath one, CopyPath other, const DeviceLimits& limits);

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
    CopyPath hasty_path = CopyPath::kDma;  // once somebody waits; the sub-jobs fit both
    CopyLane lane = CopyLane::kStores;
    double dma_seconds = 0;  // of a store: what it takes by DMA
    std::vector<CopySegment> segments;
    std::vector<SegmentRange> ranges;  // one per sub-job
    std::size_t next_range = 0;        // not issued yet
    std::uint32_t running = 0;
    DeviceEvent after = kNoEvent;  // of the compute stream
    bool reached = false;          // it has come there: the job may be issued
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
  void look_at_compute(std::span<Job* const> jobs);
  std::vector<Job*> behind_compute() const REQUIRES(mutex_);
  void rest() REQUIRES(mutex_);
  void land_flights() REQUIRES(mutex_);
  bool take_copy(DeviceCopy* copy) REQUIRES(mutex_);
  bool can_go_on(std::uint32_t lane) const REQUIRES(mutex_);
  bool lane_may_issue(std::uint32_t lane) const REQUIRES(mutex_);
  bool anything_in_flight() const;
  void issue(const DeviceCopy& copy, Job& job);
  void fail(Job& job, Status status) REQUIRES(mutex_);
  void finish_if_done(Job& job) REQUIRES(mutex_);
  void finish(std::uint64_t job_id) REQUIRES(mutex_);
  void raise_urgency(Job& job) REQUIRES(mutex_);
  CopyHaste haste(const Job& job) const EXCLUDES(mutex_);

  const CacheLayout layout_;
  const std::span<std::byte> area_;
  const bool order_after_compute_;
  const CopyTable table_;
  const DeviceLimits limits_;
  const SteadyClock clock_;
  const std::unique_ptr<CopyDevice> device_;

  // The thread's own:
  std::array<LaneFlights, kCopyLanes> flights_;
  std::vector<std::pair<Job*, Status>> not_reachable_;  // their event cannot be asked about

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
