// Client: the process that speaks to Mooncake Store, kept running, and the channels to it.
//
// Mooncake has no library that a program in C++ could load, only a Python package, and no thread of the core
// calls Python in the engine's process. So the package is in a process of its own
// (kv_offload/mooncake_client.py). One thread here, the keeper, begins it, notices its end, and begins it
// anew after a pause, which grows while it keeps failing. It ends with this object, and with the engine,
// however that ends.
//
// A call that does not end in time is one that Mooncake does not come back from: end_of() kills the process,
// which is the only way to get rid of it. The calls beside it end, too, and fail.
#pragma once

#include <atomic>
#include <memory>
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

  // Any thread. Waits until it runs or was found to be unable to. *refused: another try will not help, as
  // something is missing on this side.
  Status wait_for_start(Deadline until, bool* refused) EXCLUDES(mutex_);
  // A channel whose object() has room for so many bytes. kIo, at once: the process is being begun anew.
  Status take(std::size_t object_bytes, std::unique_ptr<Channel>* channel) EXCLUDES(mutex_);
  // After a call that was answered. Others are dropped.
  void give_back(std::unique_ptr<Channel> channel) EXCLUDES(mutex_);
  // A call on this channel did not end in time: its process is killed, if it still runs.
  void end_of(const Channel& channel) EXCLUDES(mutex_);
  void close();  // Idempotent. Calls that run fail.

  std::string version() const EXCLUDES(mutex_);  // of Mooncake, as the process says
  std::uint64_t starts() const EXCLUDES(mutex_);

 private:
  enum class State { kStarting, kRunning, kFailed, kRefused };

  void keep();
  Status begin(Descriptor* control, std::unique_ptr<Process>* process) EXCLUDES(mutex_);
  void note_running(int control, const std::string& version) EXCLUDES(mutex_);
  void note_end(const Status& status, bool refused) EXCLUDES(mutex_);
  bool wait_for_end(int control) EXCLUDES(mutex_);  // true: it was killed for a call that hung
  bool pause(Nanos time) EXCLUDES(mutex_);          // false: closed
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
  std::vector<std::unique_ptr<Channel>> idle_ GUARDED_BY(mutex_);
  std::thread keeper_;
};

}  // namespace kv_offload::mooncake
