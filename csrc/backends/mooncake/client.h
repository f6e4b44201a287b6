// SPDX-License-Identifier: Apache-2.0
// Client: keeps the Mooncake client process running and manages the channels to it.
//
// Mooncake has no library that a C++ program can load, only a Python package, and no core thread runs Python
// in the engine's process. Therefore the package runs in a separate process
// (kv_offload/tiers/mooncake/client.py). One thread, the supervisor, starts it, detects its end, and restarts
// it after a pause, which grows while starts keep failing. The process ends with this object, and with the
// engine, no matter how the engine ends.
//
// A call that misses its deadline is stuck inside Mooncake. Killing the process is the only way to end it;
// concurrent calls then fail, too. The process is also killed if calls still run one second after stop().
#pragma once

#include <atomic>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "backends/mooncake/channel.h"
#include "backends/mooncake/process.h"
#include "base/clock.h"
#include "base/thread_annotations.h"

namespace kv_offload::mooncake {

struct ClientOptions {
  Launch launch;
  std::string setup;  // JSON, the first message to the process
  // A start that takes longer has failed.
  Nanos start_deadline{std::chrono::seconds(30)};
  // The pause between two starts. It doubles after each failed start, and returns to the shortest after a
  // process that ran for a while.
  Nanos shortest_pause{std::chrono::seconds(1)}, longest_pause{std::chrono::seconds(30)};
};

class Client {
 public:
  explicit Client(ClientOptions options);
  ~Client();  // close()

  // Thread-safe. Waits until the process runs or failed to start, at most as long as a start may take.
  // *refused: a retry will not help, because something is missing on this host.
  Status wait_for_start(Deadline until, bool* refused) EXCLUDES(mutex_);
  // Returns a channel whose object() holds at least `object_bytes`. kIo, at once: the process is restarting.
  Status take(std::size_t object_bytes, std::unique_ptr<Channel>* channel) EXCLUDES(mutex_);
  // Only after a call that got a reply. Channels of other calls must be dropped.
  void give_back(std::unique_ptr<Channel> channel) EXCLUDES(mutex_);
  // Like Channel::call. A timeout kills the process, unless the call had only a small part of `op_timeout`
  // left (is_short()). `op_timeout` is the time that one op may take. After stop(), the call is cut short by
  // kStopGrace.
  Status call(const Channel& channel, Verb verb, std::span<const std::string> names,
              std::uint64_t object_bytes, Deadline until, Nanos op_timeout, Answer* answer) EXCLUDES(mutex_);
  // True if the time left is too short to conclude from a timeout that the call hangs.
  static bool is_short(Deadline until, Nanos op_timeout);
  // Never waits. From now on a process that ends is not restarted. If calls have not ended after
  // kStopGrace, the process is killed.
  void stop() EXCLUDES(mutex_);
  static constexpr std::chrono::seconds kStopGrace{1};
  void close();  // Idempotent. Running calls fail.

  std::string version() const EXCLUDES(mutex_);  // of Mooncake, as reported by the process
  std::uint64_t starts() const EXCLUDES(mutex_);

 private:
  enum class State { kStarting, kRunning, kFailed, kRefused };

  void supervise();
  void run_process(Descriptor* control, std::unique_ptr<Process>* process) EXCLUDES(mutex_);
  Status begin(Descriptor* control, std::unique_ptr<Process>* process) EXCLUDES(mutex_);
  void set_running(int control, const std::string& version) EXCLUDES(mutex_);
  void set_ended(const Status& status, bool refused) EXCLUDES(mutex_);
  bool wait_for_end(int control) EXCLUDES(mutex_);  // true: kill it, because a call hung
  int poll_timeout() EXCLUDES(mutex_);              // milliseconds; -1: no limit. Sets hung_
  bool pause(Nanos time) EXCLUDES(mutex_);          // false: closed or stopped
  void report_hung(const Channel& channel) EXCLUDES(mutex_);
  void wake() const;
  bool was_closed() EXCLUDES(mutex_);  // called by the supervisor when it wakes up

  const ClientOptions options_;
  Descriptor wake_;  // an eventfd that wakes the supervisor
  mutable Mutex mutex_;
  CondVar changed_;
  State state_ GUARDED_BY(mutex_) = State::kStarting;
  Status failure_ GUARDED_BY(mutex_);
  std::string version_ GUARDED_BY(mutex_);
  std::uint64_t client_ GUARDED_BY(mutex_) = 0;  // counts starts
  int control_ GUARDED_BY(mutex_) = -1;          // owned by the supervisor; valid while the process runs
  bool hung_ GUARDED_BY(mutex_) = false;
  bool closed_ GUARDED_BY(mutex_) = false;
  bool stopped_ GUARDED_BY(mutex_) = false;
  std::multiset<Deadline> calls_ GUARDED_BY(mutex_);  // start times of the running calls
  Deadline stopped_at_ GUARDED_BY(mutex_);
  std::vector<std::unique_ptr<Channel>> idle_ GUARDED_BY(mutex_);
  std::thread supervisor_;
};

}  // namespace kv_offload::mooncake
