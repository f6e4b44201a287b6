// A real server for the tests, and a proxy before it that fails and hangs where it is told.
//
// The server is Debian's redis-server, a child process on a unix socket (or, for TLS, on a free loopback
// port) in a directory of its own, killed by its pid.
#pragma once

#include <gtest/gtest.h>
#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "storage/redis/connection.h"

namespace kv_offload::testing {

class RedisProcess {
 public:
  // Options as on its command line: {"--maxmemory", "64mb"}.
  explicit RedisProcess(std::vector<std::string> options = {});
  ~RedisProcess();
  RedisProcess(const RedisProcess&) = delete;
  RedisProcess& operator=(const RedisProcess&) = delete;

  redis::Server address() const;
  const std::string& directory() const { return directory_; }
  void kill();   // SIGKILL
  void start();  // again, and empty
  void stop_process();
  void continue_process();

  // A command on a connection of its own.
  redis::Reply call(const redis::Connection::Words& command) const;
  std::vector<std::string> keys() const;  // of records

 private:
  const std::string directory_;
  const std::vector<std::string> options_;
  pid_t pid_ = -1;
};

// What passes: one command after the other, each whole, and its reply.
class RedisProxy {
 public:
  enum class Verb { kRead, kWrite, kLocate, kEpoch, kInfo, kOther };

  explicit RedisProxy(const RedisProcess& server);
  ~RedisProxy();
  RedisProxy(const RedisProxy&) = delete;
  RedisProxy& operator=(const RedisProxy&) = delete;

  redis::Server address() const;
  // Commands of this verb end their connection.
  void fail(Verb verb, bool fails);
  // The reply to a command of this verb is cut after so many bytes, and the connection with it; 0: whole.
  void cut_replies(Verb verb, std::size_t after);
  // Replies of this verb come a byte at a time, a millisecond apart.
  void trickle(Verb verb, bool slow);
  // Commands of this verb wait until release().
  void block(Verb verb);
  void release();
  void wait_for_blocked(int connections);
  int connections() const { return connections_.load(); }
  std::size_t commands(Verb verb) const;  // that came

 private:
  void serve(int client);
  bool pass(int client, int server, std::string* from_client, std::string* from_server);
  static Verb verb_of(std::string_view command);

  const std::string socket_, server_socket_;
  int listener_ = -1;
  std::atomic<int> connections_{0};
  std::atomic<bool> closing_{false};
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::set<Verb> failing_, blocked_, slow_;
  std::map<Verb, std::size_t> cut_;
  std::map<Verb, std::size_t> seen_;
  int waiting_ = 0;
  std::vector<int> open_;
  std::vector<std::thread> threads_;
  std::thread accepting_;
};

// A server that says what it is told to, on a unix socket of its own or, for who wants TCP, a loopback port.
class RedisScript {
 public:
  enum class On { kSocket, kPort };
  // The bytes that answer each verb ("SET"); "" ends the connection, and so does a verb that is not there.
  using Answers = std::map<std::string, std::string>;

  explicit RedisScript(Answers answers, On on = On::kSocket);
  ~RedisScript();
  RedisScript(const RedisScript&) = delete;
  RedisScript& operator=(const RedisScript&) = delete;

  // What a store asks when it starts, answered; others are added, or take their place.
  static Answers usual(const Answers& others);
  redis::Server address() const;
  void trickle(
      std::string bytes);  // from now on who connects gets these, a millisecond apart, and no answers

 private:
  void serve(int client);

  const Answers answers_;
  const std::string directory_;
  std::uint16_t port_ = 0;
  int listener_ = -1;
  std::mutex mutex_;
  bool closing_ = false;
  std::string trickled_;
  std::set<int> open_;
  std::vector<std::thread> threads_;
  std::thread accepting_;
};

}  // namespace kv_offload::testing
