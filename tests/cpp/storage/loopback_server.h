// What the servers and proxies of these tests have in common: each connection is served on a thread of its
// own, and requests fail, wait, and have their answers cut, garbled or slowed down where the test says so.
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

int unix_socket(const std::string& path, bool listen_there);  // -1: not possible
// On this port of the loopback interface, or on a free one, which is then told.
int loopback_listener(std::uint16_t* port);
bool send_all(int fd, std::string_view text);
bool receive(int fd, std::string* buffer);  // appends what is there; false: nothing more will come
// Until the condition holds; false: not within two minutes.
bool holds_soon(const std::function<bool()>& condition);

// Takes connections until it is stopped.
class Acceptor {
 public:
  using Serve = std::function<void(Acceptor&, int client)>;  // `client` is closed when it returns
  Acceptor(int listener, Serve serve);
  ~Acceptor() { stop(); }
  Acceptor(const Acceptor&) = delete;
  Acceptor& operator=(const Acceptor&) = delete;

  void stop();  // ends all connections and joins all threads; idempotent
  int connections() const;

  // A descriptor that stop() ends, too, for as long as this lives; closed with it.
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

// What can happen to a request and its answer, at random.
enum class Mishap : std::uint8_t {
  kLost,        // the connection ends before anything is done
  kUnanswered,  // the connection ends when it is done
  kCut,         // the connection ends in the middle of the answer
  kFlipped,     // a bit of the answer is another
  kRefused,     // an error in place of the answer
  kEndless,     // a byte now and then, and never the last one
};
inline constexpr std::size_t kMishaps = 6;

// What becomes of one request.
struct Fate {
  bool lost = false;         // nothing is done
  bool unanswered = false;   // it is done
  std::size_t cut = 0;       // bytes of the answer that are sent; 0: all
  std::size_t permille = 0;  // or this part of it
  bool slow = false;         // a byte at a time, a millisecond apart
  bool endless = false;      // so, too, and the last one never
  int flipped = -1;          // which part of a thousand of the answer is wrong
  std::string instead;       // is the answer, and nothing is done
};

// Sends an answer as its fate has it; false: the connection is over.
bool send_answer(int client, std::string_view answer, const Fate& fate);

// What happens to requests, by the kind that a server knows them by. Any thread.
template <typename Verb>
class Faults {
 public:
  void fail(Verb verb, bool fails) {  // ends their connection
    const std::lock_guard lock(mutex_);
    put(&failing_, verb, fails);
  }
  void cut(Verb verb, std::size_t after) {  // answers, and their connection, after so many bytes; 0: whole
    const std::lock_guard lock(mutex_);
    cut_[verb] = after;
  }
  void trickle(Verb verb, bool slow) {  // answers come a byte at a time
    const std::lock_guard lock(mutex_);
    put(&slow_, verb, slow);
  }
  void block(Verb verb) {  // until release()
    const std::lock_guard lock(mutex_);
    blocked_.insert(verb);
  }
  void release() {
    const std::lock_guard lock(mutex_);
    blocked_.clear();
    changed_.notify_all();
  }
  void wait_for_blocked(int requests) {
    std::unique_lock lock(mutex_);
    EXPECT_TRUE(changed_.wait_for(lock, std::chrono::seconds(120), [&] { return waiting_ >= requests; }))
        << waiting_ << " requests wait, not " << requests;
  }
  // To so many of a thousand requests something happens; 0: to none. `refusals`: errors that the server
  // knows.
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

  // A request has come. Waits while its verb is blocked.
  Fate meet(Verb verb) {
    std::unique_lock lock(mutex_);
    ++seen_[verb];
    Fate fate = random_() % 1000 < permille_ ? draw() : Fate{};
    fate.lost |= failing_.contains(verb);
    if (fate.lost) return fate;
    if (blocked_.contains(verb)) {
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
    // Each kind once, and then at random. Who meets one without an end waits for a deadline: they are rarer.
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
  std::set<Verb> failing_, blocked_, slow_;
  std::map<Verb, std::size_t> cut_, seen_;
  int waiting_ = 0;
  std::mt19937 random_;
  unsigned permille_ = 0;
  std::size_t drawn_ = 0;
  std::vector<std::string> refusals_;
  std::size_t happened_[kMishaps] = {};
};

}  // namespace kv_offload::testing
