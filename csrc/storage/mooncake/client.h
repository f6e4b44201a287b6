// Client: the process that speaks to Mooncake Store, kept running, and the channels to it.
//
// Mooncake has no library that a program in C++ could load, only a Python package, and no thread of the core
// calls Python in the engine's process. So the package is in a process of its own
// (kv_offload/mooncake_client.py). One thread here, the keeper, begins it, notices its end, and begins it
// anew after a pause, which grows while it keeps failing. It ends with this object, and with the engine,
// however that ends.
//
// A call that does not end in time is one that Mooncake does not come back from: its process is killed, which
// is the only way to get rid of it. The calls beside it end, too, and fail. So do those that still run a
// second after stop().
#pragma once

#include <atomic>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/thread_annotations.h"
#include "storage/mooncake/channel.h"
#include "storage/mooncake/process.h"

namespace kv_offload::mooncake {

struct ClientOptions {
  Launch launch;
  std::string setup;  // JSON, the first message that it gets
  // A start that takes longer is a failed one.
  Nanos start_deadline{std::chrono::seconds(30)};
  // Between two starts; twice as long after each that failed, and again the shortest after one that has run
  // for a while.
  Nanos shortest_pause{std::chrono::seconds(1)}, longest_pause{std::chrono::seconds(30)};
};

class Client {
 public:
  explicit Client(ClientOptions options);
  ~Client();  // close()

  // Any thread. Waits until it runs or was found to be unable to, no longer than a start may take. *refused:
  // another try will not help, as something is missing on this side.
  Status wait_for_start(Deadline until, bool* refused) EXCLUDES(mutex_);
  // A channel whose object() has room for so many bytes. kIo, at once: the process is being begun anew.
  Status take(std::size_t object_bytes, std::unique_ptr<Channel>* channel) EXCLUDES(mutex_);
  // After a call that was answered. Others are dropped.
  void give_back(std::unique_ptr<Channel> channel) EXCLUDES(mutex_);
  // As Channel::call. One that does not end in time ends its process, unless it had little: what another
  // call left of `whole`, which is all that one may take. stop() does not wait for it for long.
  Status call(const Channel& channel, Verb verb, std::span<const std::string> names,
              std::uint64_t object_bytes, Deadline until, Nanos whole, Answer* answer) EXCLUDES(mutex_);
  // Is what is left until then too little to say of a call that it hangs.
  static bool is_little(Deadline until, Nanos whole);
  // Never waits. From now on a process that ends is not started again; where calls have not ended after
  // kCallsMayTake, it is killed.
  void stop() EXCLUDES(mutex_);
  static constexpr std::chrono::seconds kCallsMayTake{1};
  void close();  // Idempotent. Calls that run fail.

  std::string version() const EXCLUDES(mutex_);  // of Mooncake, as the process says
  std::uint64_t starts() const EXCLUDES(mutex_);

 private:
  enum class State { kStarting, kRunning, kFailed, kRefused };

  void keep();
  Status begin(Descriptor* control, std::unique_ptr<Process>* process) EXCLUDES(mutex_);
  void note_running(int control, const std::string& version) EXCLUDES(mutex_);
  void note_end(const Status& status, bool refused) EXCLUDES(mutex_);
  bool wait_for_end(int control) EXCLUDES(mutex_);  // true: it is to be killed for a call that hung
  int until_calls_end() EXCLUDES(mutex_);           // milliseconds; -1: any time. Sets hung_
  bool pause(Nanos time) EXCLUDES(mutex_);          // false: closed or stopped
  void end_of(const Channel& channel) EXCLUDES(mutex_);
  void wake() const;
  bool was_closed() EXCLUDES(mutex_);  // the keeper, woken

  const ClientOptions options_;
  Descriptor wake_;  // an eventfd that the keeper looks at
  mutable Mutex mutex_;
  CondVar changed_;
  State state_ GUARDED_BY(mutex_) = State::kStarting;
  Status why_ GUARDED_BY(mutex_);
  std::string version_ GUARDED_BY(mutex_);
  std::uint64_t client_ GUARDED_BY(mutex_) = 0;  // counts starts
  int control_ GUARDED_BY(mutex_) = -1;          // the keeper's; valid while it runs
  bool hung_ GUARDED_BY(mutex_) = false;
  bool closed_ GUARDED_BY(mutex_) = false;
  bool stopped_ GUARDED_BY(mutex_) = false;
  std::multiset<Deadline> calls_ GUARDED_BY(mutex_);  // when those that run now began
  Deadline stopped_at_ GUARDED_BY(mutex_);
  std::vector<std::unique_ptr<Channel>> idle_ GUARDED_BY(mutex_);
  std::thread keeper_;
};

}  // namespace kv_offload::mooncake
