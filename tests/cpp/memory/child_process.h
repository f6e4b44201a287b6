// SPDX-License-Identifier: Apache-2.0
// Child processes for tests of state that several processes share.
#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <functional>
#include <stdexcept>

namespace kv_offload {

// A counter across processes: each raise() lets one wait() return. Create it before the fork.
class Signal {
 public:
  Signal() {
    if (::pipe(ends_) != 0) throw std::runtime_error("pipe");
  }
  ~Signal() {
    ::close(ends_[0]);
    ::close(ends_[1]);
  }
  Signal(const Signal&) = delete;
  Signal& operator=(const Signal&) = delete;
  void raise(int times = 1) {
    for (; times > 0; --times) {
      if (::write(ends_[1], "x", 1) != 1) ::abort();
    }
  }
  void wait(int times = 1) {
    for (char c; times > 0; --times) {
      if (::read(ends_[0], &c, 1) != 1) ::abort();
    }
  }

 private:
  int ends_[2];
};

// A forked process that runs `body`. It exits with 0, or with 1 after a failed expectation or an
// exception.
class Child {
 public:
  explicit Child(const std::function<void()>& body) {
    ::fflush(nullptr);  // or both processes would print the buffered output
    pid_ = ::fork();
    if (pid_ != 0) return;
    ::alarm(60);  // a hung child must not hang the test
    try {
      body();
    } catch (const std::exception& error) {
      ADD_FAILURE() << "exception in the child: " << error.what();
    }
    ::fflush(nullptr);
    ::_exit(::testing::Test::HasFailure() ? 1 : 0);
  }
  ~Child() {
    if (pid_ > 0) wait();
  }
  Child(Child&& other) noexcept : pid_(other.pid_) { other.pid_ = -1; }
  Child(const Child&) = delete;
  // Returns the status of waitpid; 0 means success.
  int wait() {
    int status = -1;
    ::waitpid(pid_, &status, 0);
    pid_ = -1;
    return status;
  }
  void kill() { ::kill(pid_, SIGKILL); }
  // Stops the process; kill() ends a stopped one too.
  void stop() { ::kill(pid_, SIGSTOP); }
  void resume() { ::kill(pid_, SIGCONT); }

 private:
  pid_t pid_ = -1;
};

}  // namespace kv_offload
