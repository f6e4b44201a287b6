// SPDX-License-Identifier: Apache-2.0
#include "worker/neighbour_mapper.h"

#include <chrono>

#include "base/thread.h"

namespace kv_offload {
namespace {

constexpr auto kInterval = std::chrono::milliseconds(50);
// Per interval; takes about 5 ms of CPU time with pages of 4 KiB.
constexpr std::uint64_t kFaultInBytes = std::uint64_t{32} << 20;

}  // namespace

NeighbourMapper::NeighbourMapper(HostRegion& region, BlockCopier& copier, const Log& log)
    : region_(region), copier_(copier), log_(log) {
  if (region.neighbour_slots() > 0) thread_ = std::thread([this] { run(); });
}

void NeighbourMapper::stop() {
  {
    MutexLock lock(mutex_);
    closing_ = true;
    wake_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

void NeighbourMapper::run() {
  begin_thread("kvo-neighbours", CpuShare::kFull);
  MutexLock lock(mutex_);
  while (!closing_) {
    mutex_.unlock();
    follow();
    mutex_.lock();
    if (!closing_) wake_.wait_for(mutex_, kInterval);
  }
}

// stop() waits for the current area only: a copier may register each with CUDA.
void NeighbourMapper::follow() {
  const auto change = [this](std::span<std::byte> area, bool mapped) {
    return mapped ? copier_.add_neighbour(area) : copier_.remove_neighbour(area);
  };
  for (const std::string& problem : region_.map_neighbours(change, [this] { return is_closing(); })) {
    log_(problem);
  }
  if (!is_closing()) region_.fault_in_neighbours(kFaultInBytes);
}

bool NeighbourMapper::is_closing() {
  MutexLock lock(mutex_);
  return closing_;
}

}  // namespace kv_offload
