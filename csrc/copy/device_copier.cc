// SPDX-License-Identifier: Apache-2.0
#include "copy/device_copier.h"

#include <sys/prctl.h>

#include <algorithm>

#include "base/refused_chunks.h"
#include "base/thread.h"

namespace kv_offload {
namespace {

// Sleep between two polls. For copies in flight: short compared to a sub-job. For a compute stream: short
// compared to a step of the model.
constexpr auto kFlightPollInterval = std::chrono::microseconds(20);
constexpr auto kComputePollInterval = std::chrono::microseconds(100);
// By default the kernel may extend a sleep by 50 us. Measured median of a 20 us sleep: 108 us by default, 51
// us with this.
constexpr unsigned long kTimerSlackNs = 1000;

constexpr std::uint32_t index(CopyLane lane) { return static_cast<std::uint32_t>(lane); }

CopyLane urgent(CopyLane lane) {
  return lane <= CopyLane::kLoads ? CopyLane::kUrgentLoads : CopyLane::kUrgentStores;
}

CopyLane lane_of(const CopyJob& job) {
  if (job.direction == CopyDirection::kStore)
    return job.expedited ? CopyLane::kUrgentStores : CopyLane::kStores;
  return job.expedited ? CopyLane::kUrgentLoads : CopyLane::kLoads;
}

// Without staging memory the staged path is not available, whatever was measured or is built in.
CopyTable available_paths(CopyTable table, const DeviceLimits& limits) {
  if (limits.staged_bytes != 0) return table;
  for (auto& paths : table.rates) paths[static_cast<std::size_t>(CopyPath::kStaged)].fill(0);
  return table;
}

// Infinite without DMA.
double dma_seconds(const CopyTable& table, const CopyPlan& plan) {
  if (plan.segments.empty()) return 0;
  return static_cast<double>(plan.bytes) /
         table.rate(CopyDirection::kStore, CopyPath::kDma, plan.bytes / plan.segments.size());
}

}  // namespace

SplitLimits split_limits_for(CopyPath path, const DeviceLimits& limits) {
  const std::uint64_t bytes = path == CopyPath::kDma ? limits.dma_bytes : limits.kernel_bytes;
  SplitLimits split{bytes, limits.sub_job_segments, limits.boundary};
  if (path != CopyPath::kStaged) return split;
  // Every run of the area may be padded in staging, and a segment may be a run.
  constexpr std::uint64_t kPadding = 32;
  const std::uint64_t most = std::max<std::uint64_t>(limits.staged_bytes / (4 * kPadding), 1);
  split.max_segments = static_cast<std::uint32_t>(std::min<std::uint64_t>(split.max_segments, most));
  split.max_bytes = limits.staged_bytes - split.max_segments * kPadding;
  return split;
}

SplitLimits split_limits_for(CopyPath one, CopyPath other, const DeviceLimits& limits) {
  SplitLimits split = split_limits_for(one, limits);
  const SplitLimits also = split_limits_for(other, limits);
  split.max_bytes = std::min(split.max_bytes, also.max_bytes);
  split.max_segments = std::min(split.max_segments, also.max_segments);
  return split;
}

DeviceCopier::DeviceCopier(const CopierOptions& options, std::unique_ptr<CopyDevice> device,
                           const CopyTable& table, const DeviceLimits& limits)
    : layout_(options.layout),
      area_(options.window.empty() ? options.area : options.window),
      order_after_compute_(options.order_after_compute),
      table_(available_paths(table, limits)),
      limits_(limits),
      device_(std::move(device)) {
  layout_.validate();
  thread_ = std::thread([this] { run_thread(); });
}

DeviceCopier::~DeviceCopier() { close(); }

std::string DeviceCopier::describe() const {
  return fmt::format("cuda: {}; rates {}", device_->name(), table_.describe());
}

void DeviceCopier::submit(CopyJob job) {
  CopyPlan plan = make_copy_plan(layout_, area_.size(), job);
  auto queued = std::make_unique<Job>();
  queued->result = {.job_id = job.id,
                    .ticket = job.ticket,
                    .direction = job.direction,
                    .status = Status::ok(),
                    .failed_groups = plan.failed_groups,
                    .bytes = plan.bytes,
                    .segments = plan.segments.size()};
  queued->lane = lane_of(job);
  const auto path_for = [&](CopyUrgency urgency) {
    return choose_path(table_, job.direction, plan.bytes, plan.segments.size(), urgency);
  };
  queued->urgent_path = path_for(CopyUrgency::kUrgent);
  if (job.direction == CopyDirection::kStore) queued->dma_seconds = dma_seconds(table_, plan);
  // An empty job needs no choice.
  const CopyUrgency wanted = plan.segments.empty() ? CopyUrgency::kUrgent : urgency(*queued);
  queued->path = wanted == CopyUrgency::kUrgent ? queued->urgent_path : path_for(wanted);
  queued->segments = std::move(plan.segments);
  // wait() may switch the job to the urgent path, so the sub-jobs fit both paths.
  queued->ranges = split(&queued->segments, split_limits_for(queued->path, queued->urgent_path, limits_));
  // A job without copies does not depend on the compute stream.
  Status marked = Status::ok();
  if (order_after_compute_ && !queued->ranges.empty())
    marked = device_->mark(job.compute_stream, &queued->after);
  queued->reached = queued->after == kNoEvent;

  MutexLock lock(mutex_);
  // The event was recorded before this check: release it.
  if (jobs_.contains(job.id)) {
    if (queued->after != kNoEvent) device_->release(queued->after);
    throw_invalid("job {} was submitted twice", job.id);
  }
  Job& added = *jobs_.emplace(job.id, std::move(queued)).first->second;
  // Only a job with copies is queued; every other job ends here.
  if (closing_) {
    fail(added, Status::error(StatusKind::kUnavailable, "submit: the copier is closed"));
  } else if (!marked.is_ok()) {
    fail(added, std::move(marked));
  } else if (!added.all_issued()) {
    queues_[index(added.lane)].push_back(&added);
    work_.notify_one();
    return;
  }
  finish_if_done(added);
}

std::vector<CopyResult> DeviceCopier::poll() {
  MutexLock lock(mutex_);
  return std::exchange(finished_, {});
}

void DeviceCopier::wait(std::span<const std::uint64_t> job_ids) {
  MutexLock lock(mutex_);
  for (const std::uint64_t id : job_ids) {
    if (const auto found = jobs_.find(id); found != jobs_.end()) raise_urgency(*found->second);
  }
  ++waiting_;
  work_.notify_one();
  for (const std::uint64_t id : job_ids) {
    while (jobs_.contains(id)) done_.wait(mutex_);
  }
  --waiting_;
}

void DeviceCopier::close() {
  {
    MutexLock lock(mutex_);
    closing_ = true;
    work_.notify_one();
  }
  if (thread_.joinable()) thread_.join();
}

void DeviceCopier::run_thread() {
  begin_thread("kvo-copy", CpuShare::kFull);
  (void)prctl(PR_SET_TIMERSLACK, kTimerSlackNs);
  device_->enter_thread();
  MutexLock lock(mutex_);
  while (true) {
    const std::vector<Job*> waiting_jobs = jobs_waiting_for_compute();
    mutex_.unlock();
    query_compute_events(waiting_jobs);
    const bool ended = query_flights();
    mutex_.lock();
    for (auto& [job, status] : std::exchange(event_failures_, {})) {
      fail(*job, std::move(status));
      finish_if_done(*job);
    }
    if (ended) finish_flights();
    DeviceCopy copy;
    if (take_copy(&copy)) {
      Job& job = *flights_[copy.lane][copy.slot].job;
      mutex_.unlock();
      issue(copy, job);
      mutex_.lock();
    } else if (!jobs_.empty()) {
      wait_for_poll();
    } else {
      if (closing_) return;
      work_.wait(mutex_);
    }
  }
}

// Waits until the next poll.
void DeviceCopier::wait_for_poll() {
  if (waiting_ == 0) {
    work_.wait_for(mutex_, has_flights() ? kFlightPollInterval : kComputePollInterval);
  } else {  // a caller blocks the forward pass in wait()
    mutex_.unlock();
    std::this_thread::yield();
    mutex_.lock();
  }
}

// Returns the next job of each lane that may not be issued yet. Later jobs of a lane were submitted later, or
// became urgent later.
std::vector<DeviceCopier::Job*> DeviceCopier::jobs_waiting_for_compute() const {
  std::vector<Job*> jobs;
  for (const auto& queue : queues_) {
    if (!queue.empty() && !queue.front()->reached) jobs.push_back(queue.front());
  }
  return jobs;
}

void DeviceCopier::query_compute_events(std::span<Job* const> jobs) {
  for (Job* job : jobs) {
    Status status = device_->reached(job->after, &job->reached);
    if (!status.is_ok()) event_failures_.emplace_back(job, std::move(status));
  }
}

// Queries every copy in flight. True if one has ended.
bool DeviceCopier::query_flights() {
  bool any = false;
  for (std::uint32_t lane = 0; lane < kCopyLanes; ++lane) {
    for (std::uint32_t slot = 0; slot < kLaneSlots; ++slot) {
      Flight& flight = flights_[lane][slot];
      if (flight.job == nullptr) continue;
      if (!flight.ended) {
        bool done = false;
        flight.status = device_->query(lane, slot, &done);
        flight.ended = done || !flight.status.is_ok();
      }
      any = any || flight.ended;
    }
  }
  return any;
}

void DeviceCopier::finish_flights() {
  for (LaneFlights& lane : flights_) {
    for (Flight& flight : lane) {
      if (flight.job == nullptr || !flight.ended) continue;
      const Flight ended = std::exchange(flight, Flight{});
      Job& job = *ended.job;
      --job.running;
      if (!ended.status.is_ok()) fail(job, ended.status);
      finish_if_done(job);
    }
  }
}

bool DeviceCopier::has_flights() const {
  for (const LaneFlights& lane : flights_) {
    for (const Flight& flight : lane) {
      if (flight.job != nullptr) return true;
    }
  }
  return false;
}

bool DeviceCopier::has_ready_job(std::uint32_t lane) const {
  return !queues_[lane].empty() && queues_[lane].front()->reached;
}

// In each direction, a lane waits while a more urgent lane has work to issue.
bool DeviceCopier::lane_may_issue(std::uint32_t lane) const {
  const bool less_urgent = lane == index(CopyLane::kLoads) || lane == index(CopyLane::kStores);
  return has_ready_job(lane) && !(less_urgent && has_ready_job(lane - 1));
}

// Takes the next sub-job with a free slot. It counts as in flight when this returns.
bool DeviceCopier::take_copy(DeviceCopy* copy) {
  for (std::uint32_t lane = 0; lane < kCopyLanes; ++lane) {
    if (!lane_may_issue(lane)) continue;
    auto& slots = flights_[lane];
    const auto is_free = [](const Flight& flight) { return flight.job == nullptr; };
    const auto free = std::count_if(slots.begin(), slots.end(), is_free);
    if (kLaneSlots - free >= (waiting_ != 0 ? kLaneSlots : limits_.in_flight)) continue;
    const auto slot = std::find_if(slots.begin(), slots.end(), is_free);
    Job& job = *queues_[lane].front();
    if (job.next_range == 0) job.started = clock_.now();
    const SegmentRange range = job.ranges[job.next_range++];
    if (job.all_issued()) queues_[lane].pop_front();
    ++job.running;
    slot->job = &job;
    *copy = {.direction = job.result.direction,
             .path = job.path,
             .lane = lane,
             .slot = static_cast<std::uint32_t>(slot - slots.begin()),
             .segments = std::span(job.segments).subspan(range.first, range.count)};
    return true;
  }
  return false;
}

void DeviceCopier::issue(const DeviceCopy& copy, Job& job) {
  const std::uint64_t refused = device_->refused_batches();
  Status status = device_->issue(copy);
  job.result.refused_batches += device_->refused_batches() - refused;
  if (status.is_ok()) return;
  Flight& flight = flights_[copy.lane][copy.slot];  // the next poll ends the flight
  flight.ended = true;
  flight.status = std::move(status);
}

// No further sub-job of the job is issued.
void DeviceCopier::fail(Job& job, Status status) {
  if (!job.all_issued()) {
    auto& queue = queues_[index(job.lane)];
    queue.erase(std::remove(queue.begin(), queue.end(), &job), queue.end());
    job.next_range = job.ranges.size();
  }
  if (job.result.status.is_ok()) job.result.status = std::move(status);
  job.result.failed_groups = kDeviceFailed;
}

void DeviceCopier::finish_if_done(Job& job) {
  if (job.running != 0 || !job.all_issued()) return;
  if (job.started != Nanos{0}) job.result.seconds = to_seconds(clock_.now() - job.started);
  finish(job.result.job_id);
}

void DeviceCopier::finish(std::uint64_t job_id) {
  const auto found = jobs_.find(job_id);
  if (found->second->after != kNoEvent) device_->release(found->second->after);
  finished_.push_back(std::move(found->second->result));
  jobs_.erase(found);
  done_.notify_all();
}

void DeviceCopier::raise_urgency(Job& job) {
  const CopyLane lane = urgent(job.lane);
  if (lane == job.lane) return;
  auto& queue = queues_[index(job.lane)];
  job.lane = lane;
  if (job.all_issued()) return;
  queue.erase(std::find(queue.begin(), queue.end(), &job));
  queues_[index(lane)].push_back(&job);
  job.path = job.urgent_path;
}

CopyUrgency DeviceCopier::urgency(const Job& job) const {
  if (job.lane != CopyLane::kStores) return CopyUrgency::kUrgent;
  double seconds = job.dma_seconds;
  MutexLock lock(mutex_);
  for (const auto& [id, other] : jobs_) seconds += other->dma_seconds;
  return seconds <= limits_.max_background_seconds ? CopyUrgency::kBackground : CopyUrgency::kUrgent;
}

}  // namespace kv_offload
