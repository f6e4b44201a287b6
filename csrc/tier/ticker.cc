// SPDX-License-Identifier: Apache-2.0
#include "tier/ticker.h"

#include <exception>
#include <utility>

#include "base/thread.h"

namespace kv_offload {

Ticker::Ticker(Nanos every, std::function<void()> tick)
    : every_(every), tick_(std::move(tick)), thread_([this] { run(); }) {}

Ticker::~Ticker() { stop(); }

void Ticker::stop() {
  {
    const MutexLock lock(mutex_);
    stop_ = true;
    stopped_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

void Ticker::run() {
  begin_thread("kvo-upkeep", CpuShare::kBackground);
  for (;;) {
    {
      const MutexLock lock(mutex_);
      if (!stop_) stopped_.wait_for(mutex_, every_);
      if (stop_) return;
    }
    // An exception that leaves the thread would end the process. The next tick retries what this one could
    // not do (memory ran out).
    try {
      tick_();
    } catch (const std::exception&) {
    }
  }
}

}  // namespace kv_offload
