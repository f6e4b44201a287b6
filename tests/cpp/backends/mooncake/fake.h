// SPDX-License-Identifier: Apache-2.0
// A Mooncake Store for these tests, and its client process as threads of this process. The client follows the
// protocol of csrc/backends/mooncake/channel.h like kv_offload/tiers/mooncake/client.py, and can be killed.
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

#include "backends/mooncake/channel.h"
#include "backends/mooncake/process.h"
#include "tier/loopback_server.h"

namespace kv_offload::testing {

// All processes see the same objects. Thread-safe.
class FakeMooncake {
 public:
  FakeMooncake() = default;
  // Waits until its client processes ended: their owners may be abandoned before that.
  ~FakeMooncake();
  FakeMooncake(const FakeMooncake&) = delete;
  FakeMooncake& operator=(const FakeMooncake&) = delete;

  enum class Verb : std::uint8_t { kRead, kWrite, kLocate, kRemove, kEpoch };

  Faults<Verb> faults;

  // ---- test controls
  void kill();   // kills the master, which loses everything
  void start();  // starts the master again
  void stand_still(bool still);
  void set_full(bool full);
  void refuse_replacements(bool refuses);         // as while another client writes the object
  void refuse_removals(bool refuses);             // as with --root_fs_dir
  void begin_and_leave(const std::string& name);  // leaves an incomplete write, as by a killed writer
  // Holds the answer to the next read of this object back, which the store has already made.
  void hold_answer(const std::string& name);
  bool is_answer_held() const;
  void release_answer();
  void refuse_starts(std::string said);  // a starting process reports this; empty: it starts normally
  void kill_clients();                   // kills all running processes, as by SIGKILL
  void hang_starts(bool hang);

  std::vector<std::string> names() const;
  std::string value(const std::string& name) const;  // empty: none
  void set_value(const std::string& name, const std::string& value);
  void remove(const std::string& name);
  void replace_once_read(const std::string& name,
                         const std::string& value);       // by another writer, after the next read
  std::size_t puts(const std::string& name) const;        // number of writes
  std::uint64_t expected(const std::string& name) const;  // bytes that its last read announced
  int channels() const { return channels_; }
  int starts() const { return starts_; }
  std::string last_setup() const;

  mooncake::Launch launch();

 private:
  class Client;

  // Returns -900 while it is down. Waits while stand_still() is in effect, unless `dead` becomes true.
  bool wait_until_it_answers(const std::atomic<bool>& dead);
  void wait_for_release(const mooncake::CallHeader& question, const std::string& name,
                        const std::atomic<bool>& dead);
  std::int64_t answer(const mooncake::CallHeader& question, const std::vector<std::string>& names,
                      std::span<std::byte> object);

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::string> objects_;
  std::map<std::string, std::string> replacements_;
  std::map<std::string, std::size_t> puts_;
  std::map<std::string, std::uint64_t> expected_;
  std::set<std::string> begun_;
  std::set<Client*> clients_;
  bool down_ = false, still_ = false, full_ = false, hang_starts_ = false, no_replacements_ = false,
       no_removals_ = false;
  std::string refusal_, last_setup_, to_hold_;
  bool held_ = false;
  std::atomic<int> channels_{0}, starts_{0};
};

}  // namespace kv_offload::testing
