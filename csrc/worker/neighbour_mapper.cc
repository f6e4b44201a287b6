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

void NeighbourMapper::follow() {
  for (const std::string& problem : region_.map_neighbours([this](std::span<std::byte> area, bool mapped) {
         return mapped ? copier_.add_neighbour(area) : copier_.remove_neighbour(area);
       })) {
    log_(problem);
  }
  region_.fault_in_neighbours(kFaultInBytes);
}

}  // namespace kv_offload
