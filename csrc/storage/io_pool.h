// IoPool: threads that run ops in two lanes. Reads go first; writes never
// starve (one write is started for every kReadsPerWrite reads while both wait,
// and write threads are their own). An op is a function that ends in a Status;
// the pool knows nothing of files. Each op has a tag and a deadline: one that
// has not started by then ends kTimeout without running. cancel() ends a queued
// op kCancelled. Every submitted op ends exactly once in `done`.
//
// `done` runs on the pool's thread (or the caller's, for cancel and close) and
// must not throw or block.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "base/clock.h"
#include "base/status.h"

namespace kv_offload {

enum class Lane : std::uint8_t { kRead, kWrite };

struct IoPoolOptions {
  unsigned read_threads = 2;
  unsigned write_threads = 1;
  const Clock* clock = nullptr;  // required; outlives the pool
};

class IoPool {
 public:
  struct Op {
    std::uint64_t tag = 0;
    Lane lane = Lane::kRead;
    Nanos deadline{0};  // absolute; 0 = none
    std::function<Status()> run;
    // status, seconds running, seconds queued
    std::function<void(const Status&, double, double)> done;
  };
  explicit IoPool(const IoPoolOptions& options);  // throws when a thread cannot start
  ~IoPool();                                      // close()

  void submit(std::vector<Op> ops);
  bool cancel(std::uint64_t tag);
  // Refuse new (kUnavailable), cancel what is queued, wait for what runs, join.
  void close();

  struct Depth {
    std::uint32_t queued = 0, running = 0;
    double oldest_seconds = 0;  // since submit, of ops queued or running
  };
  Depth depth(Lane lane) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kv_offload
