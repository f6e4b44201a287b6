// Ticker: calls a function on a thread of its own, about once a second of real time,
// until it is stopped. For what must go on while nobody asks for anything.
#pragma once

#include <functional>
#include <thread>

#include "base/clock.h"
#include "base/thread_annotations.h"

namespace kv_offload {

class Ticker {
 public:
  // `tick` must not block for long: stop() waits for it. One that throws is over; the next one comes in time.
  Ticker(Nanos every, std::function<void()> tick);
  ~Ticker();    // stop()
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
