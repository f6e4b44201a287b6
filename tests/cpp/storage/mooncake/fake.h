// A Mooncake Store of these tests, and the process that speaks to it as threads of this one. The process
// follows the protocol of csrc/storage/mooncake/channel.h as kv_offload/mooncake_client.py does, and can be
// killed.
#pragma once

#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "storage/loopback_server.h"
#include "storage/mooncake/channel.h"
#include "storage/mooncake/process.h"

namespace kv_offload::testing {

// What its objects are is what all processes see. Any thread.
class FakeMooncake {
 public:
  FakeMooncake() = default;
  // Waits until its processes are gone: whoever keeps them may be let go before that.
  ~FakeMooncake();
  FakeMooncake(const FakeMooncake&) = delete;
  FakeMooncake& operator=(const FakeMooncake&) = delete;

  enum class Verb : std::uint8_t { kRead, kWrite, kLocate, kRemove, kEpoch };

  Faults<Verb> faults;

  // ---- what a test does
  void kill();   // the master, which forgets all
  void start();  // again
  void stand_still(bool still);
  void set_full(bool full);
  void begin_and_leave(const std::string& name);  // a writer that was killed meanwhile
  void refuse_starts(std::string said);           // what a process that starts says; empty: it is well
  void kill_clients();                            // all that run, as by SIGKILL
  void hang_starts(bool hang);

  std::vector<std::string> names() const;
  std::string value(const std::string& name) const;  // empty: none
  void set_value(const std::string& name, const std::string& value);
  void remove(const std::string& name);
  void replace_once_read(const std::string& name,
                         const std::string& value);       // by another, after the next read
  std::size_t puts(const std::string& name) const;        // how often it was written
  std::uint64_t expected(const std::string& name) const;  // bytes, as the last read of it said
  int channels() const { return channels_; }
  int starts() const { return starts_; }
  std::string last_setup() const;

  mooncake::Launch launch();

 private:
  class Client;

  // -900 while it is down; waits while it stands still, unless `dead` becomes true.
  bool wait_until_it_answers(const std::atomic<bool>& dead);
  std::int64_t answer(const mooncake::Question& question, const std::vector<std::string>& names,
                      std::span<std::byte> object);

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::string> objects_;
  std::map<std::string, std::string> replacements_;
  std::map<std::string, std::size_t> puts_;
  std::map<std::string, std::uint64_t> expected_;
  std::set<std::string> begun_;
  std::set<Client*> clients_;
  bool down_ = false, still_ = false, full_ = false, hang_starts_ = false;
  std::string refusal_, last_setup_;
  std::atomic<int> channels_{0}, starts_{0};
};

}  // namespace kv_offload::testing
