// SPDX-License-Identifier: Apache-2.0
#include "backends/redis/server.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <optional>
#include <random>
#include <set>

extern char** environ;

namespace kv_offload::testing {
namespace {

using std::chrono::steady_clock;

std::string new_directory() {
  std::string path =
      "/dev/shm/kv-redis-XXXXXX";  // a socket's path must be short; a cluster node syncs its file
  if (mkdtemp(path.data()) == nullptr) std::abort();
  return path;
}

// Returns the length of the first complete command in the buffer ("*2\r
// $3\r
// GET\r
// ..."), or of the first complete reply that is not an array; 0: incomplete.
std::size_t length_of(std::string_view text) {
  const std::size_t line = text.find("\r\n");
  if (line == text.npos) return 0;
  const long long number = std::atoll(std::string(text.substr(1, line - 1)).c_str());
  std::size_t at = line + 2;
  if (text[0] == '$') {
    if (number < 0) return at;
    at += static_cast<std::size_t>(number) + 2;
    return at <= text.size() ? at : 0;
  }
  if (text[0] != '*') return at;
  for (long long i = 0; i < number; ++i) {
    const std::size_t part = at < text.size() ? length_of(text.substr(at)) : 0;
    if (part == 0) return 0;
    at += part;
  }
  return at;
}

// Reads until the buffer contains a complete one, and removes it from the buffer.
std::optional<std::string> next_whole(int fd, std::string* buffer) {
  for (;;) {
    const std::size_t length = buffer->empty() ? 0 : length_of(*buffer);
    if (length > 0) {
      std::string whole = buffer->substr(0, length);
      buffer->erase(0, length);
      return whole;
    }
    if (!receive(fd, buffer)) return std::nullopt;
  }
}

}  // namespace

std::uint16_t unused_port() {
  static std::mt19937 random{std::random_device{}()};
  static std::set<std::uint16_t> given;  // their owners may not listen yet
  // A concurrent process of these tests mostly draws other ports.
  const auto parity = static_cast<unsigned>(getpid()) % 2;
  for (;;) {
    const auto port = static_cast<std::uint16_t>(12000 + 2 * (random() % 4000) + parity);
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(port);
    const int bound = bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address);
    close(fd);
    if (bound == 0 && given.insert(port).second) return port;
  }
}

// ---- the server

RedisProcess::RedisProcess(std::vector<std::string> options)
    : directory_(new_directory()), options_(std::move(options)) {
  start();
}

RedisProcess::~RedisProcess() {
  kill();
  std::filesystem::remove_all(directory_);
}

redis::Server RedisProcess::address() const {
  redis::Server server;
  server.unix_socket = directory_ + "/server";
  return server;
}

void RedisProcess::start() {
  // The server ends with the thread that starts it, the main thread, even if a test crashes.
  std::vector<std::string> words{"setpriv",      "--pdeathsig",
                                 "KILL",         "redis-server",
                                 "--port",       "0",
                                 "--unixsocket", directory_ + "/server",
                                 "--save",       "",
                                 "--dir",        directory_,
                                 "--logfile",    directory_ + "/log"};
  words.insert(words.end(), options_.begin(), options_.end());
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  const int failed = posix_spawnp(&pid_, "setpriv", nullptr, nullptr, arguments.data(), environ);
  if (failed != 0) {
    pid_ = -1;
    FAIL() << "setpriv and redis-server cannot be started: " << std::strerror(failed);
  }
  const auto give_up = steady_clock::now() + std::chrono::seconds(120);
  for (;;) {
    const int fd = unix_socket(directory_ + "/server", false);
    if (fd >= 0) {
      close(fd);
      return;
    }
    if (waitpid(pid_, nullptr, WNOHANG) == pid_) pid_ = -1;
    ASSERT_NE(pid_, -1) << "redis-server ended; see its log";
    ASSERT_LT(steady_clock::now(), give_up) << "redis-server does not answer";
    poll(nullptr, 0, 1);
  }
}

void RedisProcess::kill() {
  if (pid_ < 0) return;
  ::kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
  pid_ = -1;
  unlink((directory_ + "/server").c_str());
}
void RedisProcess::stop_process() {
  ::kill(pid_, SIGSTOP);
  int status = 0;
  waitpid(pid_, &status, WUNTRACED);
}
void RedisProcess::continue_process() { ::kill(pid_, SIGCONT); }

redis::Reply RedisProcess::call(const redis::Connection::Command& command) const {
  const redis::Deadline until = steady_clock::now() + std::chrono::seconds(120);
  std::unique_ptr<redis::Connection> connection;
  redis::Reply reply;
  bool refused = false;
  const Status opened = redis::Connection::open(address(), nullptr, until, &connection, &refused);
  EXPECT_TRUE(opened) << opened.to_string();
  if (opened) {
    EXPECT_TRUE(connection->call(command, until, &reply));
  }
  return reply;
}

std::vector<std::string> RedisProcess::keys() const {
  // A server-side script returns the names in one string: the library does not parse arrays of names here.
  const redis::Reply reply = call({"EVAL", "return table.concat(redis.call('keys', '*'), ' ')", "0"});
  std::vector<std::string> names;
  for (std::size_t at = 0; at < reply.text.size();) {
    const std::size_t end = std::min(reply.text.find(' ', at), reply.text.size());
    const std::string name = reply.text.substr(at, end - at);
    if (!name.ends_with(":epoch")) names.push_back(name);
    at = end + 1;
  }
  return names;
}

// ---- the proxy

namespace {

std::string fresh(std::string path) {
  unlink(path.c_str());
  return path;
}

}  // namespace

RedisProxy::RedisProxy(const RedisProcess& server)
    : socket_(fresh(server.directory() + "/proxy")),
      server_socket_(server.directory() + "/server"),
      acceptor_(unix_socket(socket_, true), [this](Acceptor& by, int client) { serve(by, client); }) {}

redis::Server RedisProxy::address() const {
  redis::Server server;
  server.unix_socket = socket_;
  return server;
}

void RedisProxy::serve(Acceptor& acceptor, int client) {
  const int server = unix_socket(server_socket_, false);
  if (server < 0) return;
  const Acceptor::Held held(acceptor, server);
  std::string from_client, from_server;
  while (pass(client, server, &from_client, &from_server)) {
  }
}

bool RedisProxy::pass(int client, int server, std::string* from_client, std::string* from_server) {
  const std::optional<std::string> command = next_whole(client, from_client);
  if (!command) return false;
  const Fate fate = faults.meet(verb_of(*command));
  if (fate.lost) return false;
  if (!fate.instead.empty()) return send_all(client, fate.instead);
  if (!send_all(server, *command)) return false;
  const std::optional<std::string> reply = next_whole(server, from_server);
  return reply && send_answer(client, *reply, fate);
}

RedisProxy::Verb RedisProxy::verb_of(std::string_view command) {
  const std::string_view head = command.substr(0, 400);
  if (head.find(":epoch\r\n") != head.npos) return Verb::kEpoch;
  if (head.find("\r\nGET\r\n") != head.npos) return Verb::kRead;
  if (head.find("\r\nSET\r\n") != head.npos) return Verb::kWrite;
  if (head.find("\r\nEXISTS\r\n") != head.npos) return Verb::kLocate;
  if (head.find("\r\nINFO\r\n") != head.npos) return Verb::kInfo;
  if (head.find("\r\nMULTI\r\n") != head.npos) return Verb::kMulti;
  return Verb::kOther;
}

// ---- the script

RedisScript::RedisScript(Answers answers, On on)
    : answers_(std::move(answers)),
      directory_(new_directory()),
      acceptor_(on == On::kSocket ? unix_socket(directory_ + "/script", true) : loopback_listener(&port_),
                [this](Acceptor&, int client) { serve(client); }) {}

RedisScript::~RedisScript() {
  acceptor_.stop();
  std::filesystem::remove_all(directory_);
}

RedisScript::Answers RedisScript::usual(const Answers& others) {
  Answers answers = others;
  answers.insert({{"PING", "+PONG\r\n"},
                  {"GET", "$32\r\n0123456789abcdef0123456789abcdef\r\n"},
                  {"INFO", "$0\r\n\r\n"},
                  {"EXISTS", ":0\r\n"},
                  {"SET", "+OK\r\n"}});
  return answers;
}

redis::Server RedisScript::address() const {
  redis::Server server;
  if (port_ == 0) {
    server.unix_socket = directory_ + "/script";
  } else {
    server.host = "127.0.0.1";
    server.port = port_;
  }
  return server;
}

std::size_t RedisScript::commands(const std::string& verb) {
  const std::lock_guard lock(mutex_);
  return came_[verb];
}

void RedisScript::answer(const std::string& verb, const std::string& bytes) {
  const std::lock_guard lock(mutex_);
  answers_[verb] = bytes;
}

void RedisScript::trickle(std::string bytes) {
  const std::lock_guard lock(mutex_);
  trickled_ = std::move(bytes);
}

void RedisScript::serve(int client) {
  std::string buffer, trickled;
  {
    const std::lock_guard lock(mutex_);
    trickled = trickled_;
  }
  for (std::size_t i = 0; i < trickled.size(); ++i) {
    if (!send_all(client, std::string_view(trickled).substr(i, 1))) break;
    poll(nullptr, 0, 1);
  }
  while (trickled.empty()) {
    const std::optional<std::string> command = next_whole(client, &buffer);
    if (!command) break;
    const std::size_t from = command->find("\r\n", command->find('$')) + 2;  // "*1\r\n$4\r\nPING\r\n"
    const std::string verb = command->substr(from, command->find("\r\n", from) - from);
    std::string answer;
    {
      const std::lock_guard lock(mutex_);
      ++came_[verb];
      if (const auto found = answers_.find(verb); found != answers_.end()) answer = found->second;
    }
    if (answer == "@SILENCE@") continue;
    for (std::size_t at; (at = answer.find("@PORT@")) != answer.npos;)
      answer.replace(at, 6, std::to_string(port_));
    if (answer.empty() || !send_all(client, answer)) break;
  }
}

}  // namespace kv_offload::testing
