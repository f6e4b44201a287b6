// SPDX-License-Identifier: Apache-2.0
// A real server for the tests, and a proxy in front of it that fails and hangs as configured.
//
// The server is Debian's redis-server: a child process with its own directory, on a unix socket or, for TLS,
// on a free loopback port. It is killed by its pid.
#pragma once

#include <gtest/gtest.h>
#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "backends/redis/connection.h"
#include "tier/loopback_server.h"

namespace kv_offload::testing {

// Returns an unused loopback port below the range that the system assigns to clients.
std::uint16_t unused_port();

class RedisProcess {
 public:
  // Options as on the command line: {"--maxmemory", "64mb"}.
  explicit RedisProcess(std::vector<std::string> options = {});
  ~RedisProcess();
  RedisProcess(const RedisProcess&) = delete;
  RedisProcess& operator=(const RedisProcess&) = delete;

  redis::Server address() const;
  const std::string& directory() const { return directory_; }
  void kill();   // SIGKILL
  void start();  // starts again, empty
  void stop_process();
  void continue_process();

  // Runs a command on a separate connection.
  redis::Reply call(const redis::Connection::Command& command) const;
  std::vector<std::string> keys() const;  // names of records

 private:
  const std::string directory_;
  const std::vector<std::string> options_;
  pid_t pid_ = -1;
};

// Forwards one complete command after another, and its reply.
class RedisProxy {
 public:
  enum class Verb { kRead, kWrite, kLocate, kEpoch, kInfo, kMulti, kOther };

  explicit RedisProxy(const RedisProcess& server);
  ~RedisProxy() { faults.release(); }
  RedisProxy(const RedisProxy&) = delete;
  RedisProxy& operator=(const RedisProxy&) = delete;

  redis::Server address() const;
  int connections() const { return acceptor_.connections(); }

  Faults<Verb> faults;

 private:
  void serve(Acceptor& acceptor, int client);
  bool pass(int client, int server, std::string* from_client, std::string* from_server);
  static Verb verb_of(std::string_view command);

  const std::string socket_, server_socket_;
  Acceptor acceptor_;  // last: its threads use the other members
};

// A server with scripted answers, on its own unix socket or, for tests of TCP, on a loopback port.
class RedisScript {
 public:
  enum class On { kSocket, kPort };
  // The bytes that answer each verb ("SET"); "" and missing verbs end the connection. @PORT@ stands for the
  // script's own port, and "@SILENCE@" for no answer at all.
  using Answers = std::map<std::string, std::string>;

  explicit RedisScript(Answers answers, On on = On::kSocket);
  ~RedisScript();
  RedisScript(const RedisScript&) = delete;
  RedisScript& operator=(const RedisScript&) = delete;

  // Answers all requests of a store's start; `others` are added, or replace them.
  static Answers usual(const Answers& others);
  redis::Server address() const;
  std::size_t commands(const std::string& verb);                   // number of received commands
  void answer(const std::string& verb, const std::string& bytes);  // from now on
  void trickle(std::string bytes);  // new connections receive this, a byte per millisecond, and no answers

 private:
  void serve(int client);

  Answers answers_;
  const std::string directory_;
  std::uint16_t port_ = 0;
  std::mutex mutex_;
  std::string trickled_;
  std::map<std::string, std::size_t> came_;
  Acceptor acceptor_;  // last: its threads use the other members
};

}  // namespace kv_offload::testing
