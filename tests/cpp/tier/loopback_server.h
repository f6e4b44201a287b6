// SPDX-License-Identifier: Apache-2.0
// Shared base of the test servers and proxies. Each connection is served on its own thread. A test can make
// requests fail or wait, and have their answers cut, garbled or slowed down.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace kv_offload::testing {

int unix_socket(const std::string& path, bool listen_there);  // -1: failed
// Listens on *port of the loopback interface; 0: on a free port, which *port then returns.
int loopback_listener(std::uint16_t* port);
bool send_all(int fd, std::string_view text);
bool receive(int fd, std::string* buffer);  // appends received bytes; false: the connection ended
// Waits until the condition holds; false: it did not within two minutes.
bool holds_soon(const std::function<bool()>& condition);

// Accepts connections until it is stopped.
class Acceptor {
 public:
  using Serve = std::function<void(Acceptor&, int client)>;  // `client` is closed when it returns
  Acceptor(int listener, Serve serve);
  ~Acceptor() { stop(); }
  Acceptor(const Acceptor&) = delete;
  Acceptor& operator=(const Acceptor&) = delete;

  void stop();  // ends all connections and joins all threads; idempotent
  int connections() const;

  // A descriptor that stop() also shuts down while this object lives. The destructor closes it.
  class Held {
   public:
    Held(Acceptor& acceptor, int fd);
    ~Held();
    Held(const Held&) = delete;
    Held& operator=(const Held&) = delete;

   private:
    Acceptor& acceptor_;
    const int fd_;
  };

 private:
  void accept_all();
  void serve_one(std::uint64_t number, int client);
  void join_ended();

  const int listener_;
  const Serve serve_;
  mutable std::mutex mutex_;
  bool stopping_ = false;
  std::set<int> open_;
  std::map<std::uint64_t, std::thread> running_;
  std::vector<std::thread> ended_;
  std::thread accepting_;
};

// Random faults of a request and its answer.
enum class Mishap : std::uint8_t {
  kLost,        // the connection ends before the request is executed
  kUnanswered,  // the connection ends after the request was executed
  kCut,         // the connection ends in the middle of the answer
  kFlipped,     // one bit of the answer is flipped
  kRefused,     // an error replaces the answer
  kEndless,     // the answer trickles, and its last byte never arrives
};
inline constexpr std::size_t kMishaps = 6;

// The outcome of one request.
struct Fate {
  bool lost = false;         // not executed, and the connection ends
  bool unanswered = false;   // executed, and the connection ends
  std::size_t cut = 0;       // bytes of the answer that are sent; 0: all
  std::size_t permille = 0;  // or the sent part in thousandths
  bool slow = false;         // one byte per millisecond
  bool endless = false;      // as `slow`, and the last byte is never sent
  int flipped = -1;          // position of the flipped bit, in thousandths of the answer
  std::string instead;       // sent as the answer, and nothing is executed
};

// Sends an answer with the given faults. False: the connection ended.
bool send_answer(int client, std::string_view answer, const Fate& fate);

// Faults by request kind (the server's Verb). Thread-safe.
template <typename Verb>
class Faults {
 public:
  void fail(Verb verb, bool fails) {  // ends its connection
    const std::lock_guard lock(mutex_);
    put(&failing_, verb, fails);
  }
  void cut(Verb verb, std::size_t after) {  // ends answer and connection after so many bytes; 0: off
    const std::lock_guard lock(mutex_);
    cut_[verb] = after;
  }
  void trickle(Verb verb, bool slow) {  // sends the answer a byte at a time
    const std::lock_guard lock(mutex_);
    put(&slow_, verb, slow);
  }
  void block(Verb verb, std::size_t after = 0) {  // until release(); `after` requests pass first
    const std::lock_guard lock(mutex_);
    blocked_[verb] = after;
  }
  void release() {
    const std::lock_guard lock(mutex_);
    blocked_.clear();
    changed_.notify_all();
  }
  void wait_for_blocked(int requests) {
    std::unique_lock lock(mutex_);
    EXPECT_TRUE(changed_.wait_for(lock, std::chrono::seconds(120), [&] { return waiting_ >= requests; }))
        << waiting_ << " requests wait, expected " << requests;
  }
  // Injects a random fault into `permille` of 1,000 requests; 0: into none. `refusals`: error replies in the
  // server's protocol.
  void at_random(unsigned seed, unsigned permille, std::vector<std::string> refusals) {
    const std::lock_guard lock(mutex_);
    random_.seed(seed);
    permille_ = permille;
    refusals_ = std::move(refusals);
  }
  std::size_t happened(Mishap mishap) const {
    const std::lock_guard lock(mutex_);
    return happened_[static_cast<std::size_t>(mishap)];
  }
  std::size_t seen(Verb verb) const {
    const std::lock_guard lock(mutex_);
    const auto found = seen_.find(verb);
    return found == seen_.end() ? 0 : found->second;
  }

  // Registers an arrived request and returns its fate. Blocks while its verb is blocked.
  Fate meet(Verb verb) {
    std::unique_lock lock(mutex_);
    ++seen_[verb];
    Fate fate = random_() % 1000 < permille_ ? draw() : Fate{};
    fate.lost |= failing_.contains(verb);
    if (fate.lost) return fate;
    const auto blocked = blocked_.find(verb);
    if (blocked != blocked_.end() && blocked->second > 0) {
      --blocked->second;
    } else if (blocked != blocked_.end()) {
      ++waiting_;
      changed_.notify_all();
      changed_.wait(lock, [&] { return !blocked_.contains(verb); });
      --waiting_;
    }
    if (cut_[verb] > 0) fate.cut = cut_[verb];
    fate.slow |= slow_.contains(verb);
    return fate;
  }

 private:
  static void put(std::set<Verb>* verbs, Verb verb, bool in) {
    if (in) {
      verbs->insert(verb);
    } else {
      verbs->erase(verb);
    }
  }
  Fate draw() {
    // Draws each kind once, then at random. Endless answers cost their client a full deadline, so they are
    // rarer.
    std::size_t kind = drawn_++;
    if (kind >= kMishaps) kind = random_() % 24 == 0 ? kMishaps - 1 : random_() % (kMishaps - 1);
    ++happened_[kind];
    Fate fate;
    switch (static_cast<Mishap>(kind)) {
      case Mishap::kLost:
        fate.lost = true;
        break;
      case Mishap::kUnanswered:
        fate.unanswered = true;
        break;
      case Mishap::kCut:
        fate.permille = 1 + random_() % 999;
        break;
      case Mishap::kFlipped:
        fate.flipped = static_cast<int>(random_() % 1000);
        break;
      case Mishap::kRefused:
        fate.instead = refusals_[random_() % refusals_.size()];
        break;
      case Mishap::kEndless:
        fate.endless = true;
        break;
    }
    return fate;
  }

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::set<Verb> failing_, slow_;
  std::map<Verb, std::size_t> blocked_;  // requests that pass first
  std::map<Verb, std::size_t> cut_, seen_;
  int waiting_ = 0;
  std::mt19937 random_;
  unsigned permille_ = 0;
  std::size_t drawn_ = 0;
  std::vector<std::string> refusals_;
  std::size_t happened_[kMishaps] = {};
};

}  // namespace kv_offload::testing
