// SPDX-License-Identifier: Apache-2.0
// Ticker: calls a function on its own thread, about once a second of real time, until it is stopped. For
// work that must continue while the engine is idle.
#pragma once

#include <functional>
#include <thread>

#include "base/clock.h"
#include "base/thread_annotations.h"

namespace kv_offload {

class Ticker {
 public:
  // `tick` must not block for long: stop() waits for it. If it throws, that tick is abandoned and the next
  // one runs on time.
  Ticker(Nanos every, std::function<void()> tick);
  ~Ticker();    // calls stop()
  void stop();  // joins; idempotent; one caller

 private:
  void run();

  const Nanos every_;
  const std::function<void()> tick_;
  Mutex mutex_;
  CondVar stopped_;
  bool stop_ GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace kv_offload
