// SPDX-License-Identifier: Apache-2.0
// HostCopier: BlockCopier for caches in host memory. A small thread pool processes the jobs in slices. It
// always takes the most urgent job: awaited jobs, expedited loads, loads, stores; by order of submission
// within a class. A more urgent job runs between two slices, so that a short load overtakes a long store.
// Idle threads sleep; wait() uses the calling thread for the awaited jobs.
//
// REQUIRES: the bytes are completely written before submit() is called (on the CPU platform the forward pass
// is synchronous).
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "base/thread_annotations.h"
#include "copy/block_copier.h"

namespace kv_offload {

class HostCopier final : public BlockCopier {
 public:
  // Copies one run, on any pool thread. Tests replace it to block or to fail.
  using CopyFunction = std::function<void(std::byte* to, const std::byte* from, std::size_t bytes)>;
  static constexpr std::uint64_t kSliceBytes = 1 << 20;

  // Throws InvalidArgument (layout, no threads).
  explicit HostCopier(const CopierOptions& options, CopyFunction copy = {});
  ~HostCopier() override;  // calls close()

  std::string describe() const override;
  void submit(CopyJob job) override;
  std::vector<CopyResult> poll() override;
  void wait(std::span<const std::uint64_t> job_ids) override;
  // Refuses new jobs (they end as kUnavailable), finishes the queued ones and joins the threads. Results can
  // still be polled afterwards.
  void close() override;

 private:
  enum Urgency : std::uint8_t { kWaitedFor, kExpedited, kLoads, kStores };
  static constexpr std::size_t kUrgencies = 4;

  struct Job {
    CopyResult result;
    std::vector<CopySegment> segments;
    Urgency urgency = kStores;
    std::size_t next_segment = 0;  // segment of the first byte not handed out yet
    std::uint64_t next_byte = 0;   // offset in that segment
    std::uint32_t slices_running = 0;
    Nanos started{0};
    bool handed_out() const { return next_segment == segments.size(); }
  };
  struct Slice {
    Job* job = nullptr;
    std::size_t first_segment = 0;
    std::uint64_t first_byte = 0;
    std::uint64_t bytes = 0;
  };

  void run_thread();
  Slice take_slice(Urgency least) REQUIRES(mutex_);
  void copy_slice(const Slice& slice) const EXCLUDES(mutex_);
  void finish_slice(const Slice& slice) REQUIRES(mutex_);
  void finish_job(std::uint64_t job_id) REQUIRES(mutex_);
  void raise_urgency(Job& job) REQUIRES(mutex_);

  const CacheLayout layout_;
  const std::span<std::byte> area_;
  const std::size_t non_temporal_from_;
  const CopyFunction copy_;
  const SteadyClock clock_;

  mutable Mutex mutex_;
  CondVar work_;  // a slice is available, or closing
  CondVar done_;  // a job finished
  bool closing_ GUARDED_BY(mutex_) = false;
  std::unordered_map<std::uint64_t, std::unique_ptr<Job>> jobs_ GUARDED_BY(mutex_);  // not finished
  std::array<std::deque<Job*>, kUrgencies> queues_ GUARDED_BY(mutex_);  // with slices to hand out
  std::vector<CopyResult> finished_ GUARDED_BY(mutex_);
  std::vector<std::thread> threads_;  // last member: stopped first
};

}  // namespace kv_offload
