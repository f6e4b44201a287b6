// HostCopier: BlockCopier for caches in host memory. A small pool of threads
// works through the jobs slice by slice, always on the most urgent one: waited
// for, expedited loads, loads, stores; within a class in order of submission.
// A job in slices is left between two of them, so that a short load passes a
// long store. Idle threads sleep; wait() lends the calling thread to the jobs.
//
// REQUIRES: whoever wrote the bytes has finished before submit() is called (on
// the CPU platform the forward pass is synchronous).
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
  // Copies one run; tests put a gate or a fault in its place. Any pool thread.
  using CopyFunction = std::function<void(std::byte* to, const std::byte* from, std::size_t bytes)>;
  static constexpr std::uint64_t kSliceBytes = 1 << 20;

  // Throws InvalidArgument (layout, no threads).
  explicit HostCopier(const CopierOptions& options, CopyFunction copy = {});
  ~HostCopier() override;  // close()

  std::string describe() const override;
  void submit(CopyJob job) override;
  std::vector<CopyResult> poll() override;
  void wait(std::span<const std::uint64_t> job_ids) override;
  // Refuses new jobs (they end as kUnavailable), finishes the queued ones,
  // joins. Results are still polled after it.
  void close() override;

 private:
  enum Urgency : std::uint8_t { kWaitedFor, kExpedited, kLoads, kStores };
  static constexpr std::size_t kUrgencies = 4;

  struct Job {
    CopyResult result;
    std::vector<CopySegment> segments;
    Urgency urgency = kStores;
    std::size_t next_segment = 0;  // first byte not handed out yet
    std::uint64_t next_byte = 0;   // inside it
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
  CondVar work_;  // a slice may be taken, or closing
  CondVar done_;  // a job finished
  bool closing_ GUARDED_BY(mutex_) = false;
  std::unordered_map<std::uint64_t, std::unique_ptr<Job>> jobs_ GUARDED_BY(mutex_);  // not finished
  std::array<std::deque<Job*>, kUrgencies> queues_ GUARDED_BY(mutex_);  // with slices to hand out
  std::vector<CopyResult> finished_ GUARDED_BY(mutex_);
  std::vector<std::thread> threads_;  // last: they die first
};

}  // namespace kv_offload
