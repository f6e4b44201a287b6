// SPDX-License-Identifier: Apache-2.0
#include "worker/rank_worker.h"

#include <algorithm>
#include <cstdio>
#include <iterator>
#include <set>
#include <utility>

#include "base/refused_chunks.h"
#include "worker/neighbour_mapper.h"

namespace kv_offload {
namespace {

const char* word(CopyDirection direction) { return direction == CopyDirection::kStore ? "store" : "load"; }

void log_to_stderr(const std::string& line) { fmt::print(stderr, "kv_offload: {}\n", line); }

}  // namespace

struct RankWorker::Impl {
  std::shared_ptr<HostRegion> region;
  std::uint32_t rank;
  Metrics& metrics;
  Log log;
  std::set<Ticket> running{};          // submitted and not ended
  std::vector<CopyResult> polled{};    // from the copier, the first at the back; empty except in drain()
  std::vector<CopyResult> held{};      // ended; their reports would overtake a running job
  std::vector<CopyResult> finished{};  // reported but not returned yet
  std::string failed_load;             // error message of the first failed load
  bool device_failure_logged = false;
  std::unique_ptr<BlockCopier> copier;
  std::unique_ptr<NeighbourMapper> mapper{};  // last member: destroyed first

  void end(CopyResult& result);
  void report_ended();
  void drain();
  void count(const CopyResult& result);
  void log_failure(const CopyResult& result);
  void refuse_after_failed_load() const {
    if (!failed_load.empty()) throw ResourceError(failed_load);
  }
};

// Every job ends here. Throws bad_alloc without memory, and the result is unchanged then.
void RankWorker::Impl::end(CopyResult& result) {
  if (!result.status.is_ok()) {
    result.failed_groups = kDeviceFailed;
    log_failure(result);
  }
  held.push_back(std::move(result));
  running.erase(held.back().ticket);
}

// A report takes the slot of the ticket kTicketSlots before, which then counts as reported: the scheduler
// gives its rows to other chunks. No copy may still use them.
void RankWorker::Impl::report_ended() {
  const Ticket end = running.empty() ? ~Ticket{0} : *running.begin() + HostRegion::kTicketSlots;
  for (auto next = held.begin(); next != held.end();) {
    if (next->ticket >= end) {
      ++next;
      continue;
    }
    finished.push_back(std::move(*next));
    next = held.erase(next);
    const CopyResult& result = finished.back();
    if (result.ticket != kNoTicket) region->report(rank, result.ticket, result.failed_groups);
  }
}

// Continues where an earlier call failed for lack of memory.
void RankWorker::Impl::drain() {
  for (;;) {
    if (polled.empty()) {
      polled = copier->poll();
      std::reverse(polled.begin(), polled.end());
    }
    if (polled.empty()) break;
    end(polled.back());
    polled.pop_back();
    count(held.back());
  }
  report_ended();
}

void RankWorker::Impl::count(const CopyResult& result) {
  const char* direction = word(result.direction);
  if (!result.status.is_ok()) metrics.add("kv_offload_copy_failures_total", {direction});
  if (result.refused_batches != 0) {
    metrics.add("kv_offload_copy_refused_batches_total", {direction},
                static_cast<double>(result.refused_batches));
  }
  if (!result.status.is_ok()) return;
  metrics.add("kv_offload_copy_bytes_total", {direction}, static_cast<double>(result.bytes));
  metrics.add("kv_offload_copy_segments_total", {direction}, static_cast<double>(result.segments));
  metrics.observe("kv_offload_copy_seconds", {direction}, result.seconds);
}

// Incomplete chunks of a store are not a copy failure: the scheduler counts them. Only the first device
// failure of a store is logged, because every later job would repeat it.
void RankWorker::Impl::log_failure(const CopyResult& result) {
  if (result.direction == CopyDirection::kLoad) {
    if (!failed_load.empty()) return;
    failed_load = fmt::format(
        "load job {} failed on rank {} ({}); its blocks contain invalid data, so this worker must stop",
        result.job_id, rank, result.status.to_string());
    log(failed_load);
  } else if (!std::exchange(device_failure_logged, true)) {
    log(fmt::format(
        "store job {} failed on rank {} ({}); its chunks will not become hits; further failures are only "
        "counted in kv_offload_copy_failures_total",
        result.job_id, rank, result.status.to_string()));
  }
}

RankWorker::RankWorker(std::shared_ptr<HostRegion> region, std::uint32_t rank,
                       std::unique_ptr<BlockCopier> copier, Metrics& metrics, Log log)
    : impl_(new Impl{.region = std::move(region),
                     .rank = rank,
                     .metrics = metrics,
                     .log = log ? std::move(log) : Log(log_to_stderr),
                     .failed_load = {},
                     .copier = std::move(copier)}) {
  impl_->mapper = std::make_unique<NeighbourMapper>(*impl_->region, *impl_->copier, impl_->log);
}

RankWorker::~RankWorker() { close(); }

void RankWorker::submit(CopyJob job) {
  CopyResult refused;
  refused.job_id = job.id;
  refused.ticket = job.ticket;
  refused.direction = job.direction;
  try {
    if (job.ticket != kNoTicket) impl_->running.insert(job.ticket);
    impl_->copier->submit(std::move(job));
  } catch (const std::exception& error) {
    refused.status = Status::error(StatusKind::kDevice, fmt::format("submit: {}", error.what()));
    impl_->end(refused);
    impl_->count(impl_->held.back());
    impl_->report_ended();
  }
}

std::vector<CopyResult> RankWorker::poll() {
  impl_->drain();
  impl_->refuse_after_failed_load();
  return std::exchange(impl_->finished, {});
}

void RankWorker::wait(std::span<const std::uint64_t> job_ids) {
  impl_->copier->wait(job_ids);
  impl_->drain();
  impl_->refuse_after_failed_load();
}

std::string RankWorker::describe() const { return impl_->copier->describe(); }

void RankWorker::close() {
  impl_->mapper->stop();
  impl_->copier->close();
  impl_->drain();
}

}  // namespace kv_offload
