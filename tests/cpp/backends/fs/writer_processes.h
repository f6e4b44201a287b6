// SPDX-License-Identifier: Apache-2.0
// Processes that write to a root until they are stopped or killed.
#pragma once

#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <string>
#include <vector>

#include "fixture.h"

namespace kv_offload::testing {

class WriterProcesses {
 public:
  explicit WriterProcesses(ShardSizes shards) : shards_(std::move(shards)) {}
  ~WriterProcesses() {
    for (std::size_t i = 0; i < children_.size(); ++i) kill(i);
    ::munmap(written_, kPage);
  }
  WriterProcesses(const WriterProcesses&) = delete;
  WriterProcesses& operator=(const WriterProcesses&) = delete;

  enum class Time { kReal, kFast };  // kFast: its own clock, one second per write
  void start(FsTierOptions options, Time time) {
    const std::size_t index = children_.size();
    const pid_t child = ::fork();
    if (child != 0) return children_.push_back(child);
    ::alarm(200);  // a child must not hang the test
    FakeClock clock;
    if (time == Time::kFast) {
      options.clock = &clock;
      options.op_timeout = std::chrono::hours(24 * 365);
    }
    TierUser user(options);
    if (time == Time::kReal) user.wait_for_scan();
    for (std::uint32_t i = static_cast<std::uint32_t>(index) * 1000000;; ++i) {
      written_[index] += user.write(i, shards_).is_ok();
      if (time == Time::kReal) continue;
      clock.advance(std::chrono::seconds(1));
      user.poll();
    }
  }
  std::size_t size() const { return children_.size(); }
  std::uint64_t written(std::size_t index) const { return written_[index].load(); }
  void signal(std::size_t index, int number) { ::kill(children_[index], number); }
  void kill(std::size_t index) {
    if (children_[index] <= 0) return;
    ::kill(children_[index], SIGKILL);
    ::waitpid(children_[index], nullptr, 0);
    children_[index] = -1;
  }
  // True once every process except `but` wrote this many more records.
  bool go_on(std::size_t but, std::uint64_t more) {
    std::vector<std::uint64_t> goals;
    for (std::size_t i = 0; i < size(); ++i) goals.push_back(written(i) + more);
    const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(240);
    const auto done = [&] {
      for (std::size_t i = 0; i < size(); ++i) {
        if (i != but && written(i) < goals[i]) return false;
      }
      return true;
    };
    while (!done() && std::chrono::steady_clock::now() < give_up) std::this_thread::yield();
    return done();
  }
  // Bytes below `root`, measured while all processes are stopped: a walk of a busy tree may count one record
  // twice.
  std::uint64_t held(const std::string& root) {
    for (const pid_t child : children_) {
      if (child < 0) continue;
      ::kill(child, SIGSTOP);
      ::waitpid(child, nullptr, WUNTRACED);
    }
    const std::uint64_t bytes = du(root);
    for (const pid_t child : children_) {
      if (child >= 0) ::kill(child, SIGCONT);
    }
    return bytes;
  }

 private:
  static constexpr std::size_t kPage = 4096;
  const ShardSizes shards_;
  std::atomic<std::uint64_t>* const written_ = static_cast<std::atomic<std::uint64_t>*>(
      ::mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  std::vector<pid_t> children_;
};

}  // namespace kv_offload::testing
