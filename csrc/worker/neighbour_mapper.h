// SPDX-License-Identifier: Apache-2.0
// NeighbourMapper: a thread of a worker that maps the areas of neighbours that the scheduler requests, and
// prepares them for copies. It also enters their memory into the page tables, a little at a time. The
// scheduler uses a neighbour only once every worker has done so. The model runner's thread neither waits nor
// polls.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "base/thread_annotations.h"
#include "copy/block_copier.h"
#include "memory/host_region.h"

namespace kv_offload {

class NeighbourMapper {
 public:
  using Log = std::function<void(const std::string& line)>;
  // Starts no thread if the region has no share_for. All of them must outlive this.
  NeighbourMapper(HostRegion& region, BlockCopier& copier, const Log& log);
  ~NeighbourMapper() { stop(); }
  NeighbourMapper(const NeighbourMapper&) = delete;
  NeighbourMapper& operator=(const NeighbourMapper&) = delete;
  // Ends the thread. Mapped regions stay mapped. Idempotent.
  void stop();

 private:
  void run();
  void follow();
  bool is_closing() EXCLUDES(mutex_);

  HostRegion& region_;
  BlockCopier& copier_;
  const Log& log_;
  Mutex mutex_;
  CondVar wake_;
  bool closing_ GUARDED_BY(mutex_) = false;
  std::thread thread_;  // last member
};

}  // namespace kv_offload
