// SPDX-License-Identifier: Apache-2.0
#include "copy/host_copier.h"

#include <algorithm>

#include "base/refused_chunks.h"
#include "base/thread.h"
#include "copy/host_memcpy.h"

namespace kv_offload {

HostCopier::HostCopier(const CopierOptions& options, CopyFunction copy)
    : layout_(options.layout),
      area_(options.window.empty() ? options.area : options.window),
      non_temporal_from_(layout_.shards_per_area > 1 ? kNonTemporalShardBytes : kNonTemporalBytes),
      copy_(copy ? std::move(copy)
                 : [from = non_temporal_from_](std::byte* to, const std::byte* what, std::size_t bytes) {
                     copy_bytes(to, what, bytes, from);
                   }) {
  layout_.validate();
  if (options.threads == 0) throw_invalid("the host copier was given 0 threads; it needs at least 1");
  threads_.reserve(options.threads);
  try {
    for (unsigned i = 0; i < options.threads; ++i) threads_.emplace_back([this] { run_thread(); });
  } catch (...) {
    close();
    throw;
  }
}

HostCopier::~HostCopier() { close(); }

std::string HostCopier::describe() const {
  return fmt::format("host: memcpy, {} threads, runs of {} KiB or more bypass the caches", threads_.size(),
                     non_temporal_from_ >> 10);
}

void HostCopier::submit(CopyJob job) {
  // Order by the side that is read: reads wait for memory, and writes that bypass the caches do not.
  const CopyOrder order = job.direction == CopyDirection::kStore ? CopyOrder::kPages : CopyOrder::kArea;
  CopyPlan plan = make_copy_plan(layout_, area_.size(), job, order);
  auto queued = std::make_unique<Job>();
  queued->result = {.job_id = job.id,
                    .ticket = job.ticket,
                    .direction = job.direction,
                    .status = Status::ok(),
                    .failed_groups = plan.failed_groups,
                    .bytes = plan.bytes,
                    .segments = plan.segments.size()};
  queued->segments = std::move(plan.segments);
  queued->urgency = job.direction == CopyDirection::kStore ? kStores : job.expedited ? kExpedited : kLoads;

  MutexLock lock(mutex_);
  if (jobs_.contains(job.id)) throw_invalid("job {} was submitted twice", job.id);
  Job& added = *jobs_.emplace(job.id, std::move(queued)).first->second;
  if (closing_) {
    added.result.status = Status::error(StatusKind::kUnavailable, "submit: the copier is closed");
    added.result.failed_groups = kDeviceFailed;
    finish_job(job.id);
  } else if (added.segments.empty()) {
    finish_job(job.id);
  } else {
    queues_[added.urgency].push_back(&added);
    if (added.result.bytes > kSliceBytes) {
      work_.notify_all();
    } else {
      work_.notify_one();
    }
  }
}

std::vector<CopyResult> HostCopier::poll() {
  MutexLock lock(mutex_);
  return std::exchange(finished_, {});
}

void HostCopier::wait(std::span<const std::uint64_t> job_ids) {
  MutexLock lock(mutex_);
  for (const std::uint64_t id : job_ids) {
    if (const auto found = jobs_.find(id); found != jobs_.end()) raise_urgency(*found->second);
  }
  const auto running = [this](std::uint64_t id) REQUIRES(mutex_) { return jobs_.contains(id); };
  while (std::any_of(job_ids.begin(), job_ids.end(), running)) {
    const Slice slice = take_slice(kWaitedFor);
    if (slice.job == nullptr) {
      done_.wait(mutex_);
      continue;
    }
    mutex_.unlock();
    copy_slice(slice);
    mutex_.lock();
    finish_slice(slice);
  }
}

void HostCopier::close() {
  {
    MutexLock lock(mutex_);
    closing_ = true;
    work_.notify_all();
  }
  for (std::thread& thread : threads_) {
    if (thread.joinable()) thread.join();
  }
}

void HostCopier::run_thread() {
  begin_thread("kvo-copy", CpuShare::kFull);
  MutexLock lock(mutex_);
  while (true) {
    const Slice slice = take_slice(kStores);
    if (slice.job == nullptr) {
      if (closing_) return;
      work_.wait(mutex_);
      continue;
    }
    mutex_.unlock();
    copy_slice(slice);
    mutex_.lock();
    finish_slice(slice);
  }
}

// Returns the next slice of the most urgent job that is at least as urgent as `least`.
HostCopier::Slice HostCopier::take_slice(Urgency least) {
  for (std::size_t urgency = 0; urgency <= least; ++urgency) {
    auto& queue = queues_[urgency];
    if (queue.empty()) continue;
    Job& job = *queue.front();
    if (job.slices_running == 0 && job.next_segment == 0 && job.next_byte == 0) job.started = clock_.now();
    const Slice slice{&job, job.next_segment, job.next_byte, 0};
    std::uint64_t taken = 0;
    while (!job.handed_out() && taken < kSliceBytes) {
      const std::uint64_t left = job.segments[job.next_segment].bytes - job.next_byte;
      const std::uint64_t now = std::min(left, kSliceBytes - taken);
      taken += now;
      job.next_byte += now;
      if (now == left) {
        ++job.next_segment;
        job.next_byte = 0;
      }
    }
    if (job.handed_out()) queue.pop_front();
    ++job.slices_running;
    return {slice.job, slice.first_segment, slice.first_byte, taken};
  }
  return {};
}

void HostCopier::copy_slice(const Slice& slice) const {
  const bool store = slice.job->result.direction == CopyDirection::kStore;
  std::uint64_t skip = slice.first_byte;
  std::uint64_t left = slice.bytes;
  for (std::size_t i = slice.first_segment; left != 0; ++i) {
    const CopySegment& segment = slice.job->segments[i];
    const std::uint64_t bytes = std::min(left, segment.bytes - skip);
    std::byte* cache = segment.cache + skip;
    std::byte* row = area_.data() + segment.area_offset + skip;
    if (store) {
      copy_(row, cache, bytes);
    } else {
      copy_(cache, row, bytes);
    }
    left -= bytes;
    skip = 0;
  }
}

void HostCopier::finish_slice(const Slice& slice) {
  Job& job = *slice.job;
  if (--job.slices_running != 0 || !job.handed_out()) return;
  job.result.seconds = to_seconds(clock_.now() - job.started);
  finish_job(job.result.job_id);
}

void HostCopier::finish_job(std::uint64_t job_id) {
  const auto found = jobs_.find(job_id);
  finished_.push_back(std::move(found->second->result));
  jobs_.erase(found);
  done_.notify_all();
}

void HostCopier::raise_urgency(Job& job) {
  if (job.urgency == kWaitedFor) return;
  auto& queue = queues_[job.urgency];
  job.urgency = kWaitedFor;
  if (job.handed_out()) return;
  queue.erase(std::find(queue.begin(), queue.end(), &job));
  queues_[kWaitedFor].push_back(&job);
  work_.notify_all();
}

std::unique_ptr<BlockCopier> make_host_copier(const CopierOptions& options) {
  return std::make_unique<HostCopier>(options);
}

}  // namespace kv_offload
