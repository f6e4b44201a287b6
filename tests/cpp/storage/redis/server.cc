#include "storage/redis/server.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <optional>

extern char** environ;

namespace kv_offload::testing {
namespace {

using std::chrono::steady_clock;

std::string new_directory() {
  std::string path = "/tmp/kv-redis-XXXXXX";  // a socket's path is short
  if (mkdtemp(path.data()) == nullptr) std::abort();
  return path;
}

int unix_socket(const std::string& path, bool listen_there) {
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, path.c_str(), sizeof address.sun_path - 1);
  const auto* where = reinterpret_cast<const sockaddr*>(&address);
  const bool ok = listen_there ? bind(fd, where, sizeof address) == 0 && listen(fd, 64) == 0
                               : connect(fd, where, sizeof address) == 0;
  if (ok) return fd;
  close(fd);
  return -1;
}

// Of the first whole command in the buffer ("*2\r\n$3\r\nGET\r\n..."), or of the first whole reply that is no
// array; 0: it is not there yet.
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

bool send_all(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t sent = send(fd, text.data(), text.size(), MSG_NOSIGNAL);
    if (sent <= 0) return false;
    text.remove_prefix(static_cast<std::size_t>(sent));
  }
  return true;
}

// Reads until there is a whole one; it is taken off the buffer.
std::optional<std::string> next_whole(int fd, std::string* buffer) {
  for (;;) {
    const std::size_t length = buffer->empty() ? 0 : length_of(*buffer);
    if (length > 0) {
      std::string whole = buffer->substr(0, length);
      buffer->erase(0, length);
      return whole;
    }
    char bytes[65536];
    const ssize_t got = recv(fd, bytes, sizeof bytes, 0);
    if (got <= 0) return std::nullopt;
    buffer->append(bytes, static_cast<std::size_t>(got));
  }
}

}  // namespace

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
  std::vector<std::string> words{
      "redis-server", "--port",   "0",         "--unixsocket",     directory_ + "/server", "--save", "",
      "--dir",        directory_, "--logfile", directory_ + "/log"};
  words.insert(words.end(), options_.begin(), options_.end());
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  const int failed = posix_spawnp(&pid_, "redis-server", nullptr, nullptr, arguments.data(), environ);
  if (failed != 0) {
    pid_ = -1;
    FAIL() << "redis-server cannot be started (apt install redis-server): " << std::strerror(failed);
  }
  const auto give_up = steady_clock::now() + std::chrono::seconds(30);
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

redis::Reply RedisProcess::call(const redis::Connection::Words& command) const {
  const redis::Deadline until = steady_clock::now() + std::chrono::seconds(30);
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
  // Their names, one a line: a script of the server's, for the library's arrays are not ours to read.
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

RedisProxy::RedisProxy(const RedisProcess& server)
    : socket_(server.directory() + "/proxy"), server_socket_(server.directory() + "/server") {
  unlink(socket_.c_str());
  listener_ = unix_socket(socket_, true);
  accepting_ = std::thread([this] {
    for (;;) {
      const int client = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
      if (client < 0) return;
      const std::lock_guard lock(mutex_);
      if (closing_) {
        close(client);
        return;
      }
      ++connections_;
      open_.push_back(client);
      threads_.emplace_back([this, client] { serve(client); });
    }
  });
}

RedisProxy::~RedisProxy() {
  release();
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
    for (const int fd : open_) shutdown(fd, SHUT_RDWR);
  }
  shutdown(listener_, SHUT_RDWR);
  accepting_.join();
  for (std::thread& thread : threads_) thread.join();
  close(listener_);
}

redis::Server RedisProxy::address() const {
  redis::Server server;
  server.unix_socket = socket_;
  return server;
}

void RedisProxy::serve(int client) {
  const int server = unix_socket(server_socket_, false);
  {
    const std::lock_guard lock(mutex_);
    if (server >= 0) open_.push_back(server);
  }
  std::string from_client, from_server;
  while (server >= 0 && pass(client, server, &from_client, &from_server)) {
  }
  const std::lock_guard lock(mutex_);
  for (const int fd : {client, server}) {
    std::erase(open_, fd);
    if (fd >= 0) close(fd);
  }
  --connections_;
}

bool RedisProxy::pass(int client, int server, std::string* from_client, std::string* from_server) {
  const std::optional<std::string> command = next_whole(client, from_client);
  if (!command) return false;
  const Verb verb = verb_of(*command);
  std::size_t cut = 0;
  bool slow = false;
  {
    std::unique_lock lock(mutex_);
    ++seen_[verb];
    if (failing_.contains(verb)) return false;
    if (blocked_.contains(verb)) {
      ++waiting_;
      changed_.notify_all();
      changed_.wait(lock, [&] { return !blocked_.contains(verb); });
      --waiting_;
    }
    cut = cut_[verb];
    slow = slow_.contains(verb);
  }
  if (!send_all(server, *command)) return false;
  std::optional<std::string> reply = next_whole(server, from_server);
  if (!reply) return false;
  if (cut > 0 && reply->size() > cut) {
    send_all(client, std::string_view(*reply).substr(0, cut));
    return false;
  }
  if (!slow) return send_all(client, *reply);
  for (std::size_t i = 0; i < reply->size(); ++i) {
    if (!send_all(client, std::string_view(*reply).substr(i, 1))) return false;
    poll(nullptr, 0, 1);
  }
  return true;
}

RedisProxy::Verb RedisProxy::verb_of(std::string_view command) {
  const std::string_view head = command.substr(0, 400);
  if (head.find(":epoch\r\n") != head.npos) return Verb::kEpoch;
  if (head.find("\r\nGET\r\n") != head.npos) return Verb::kRead;
  if (head.find("\r\nSET\r\n") != head.npos) return Verb::kWrite;
  if (head.find("\r\nEXISTS\r\n") != head.npos) return Verb::kLocate;
  if (head.find("\r\nINFO\r\n") != head.npos) return Verb::kInfo;
  return Verb::kOther;
}

void RedisProxy::fail(Verb verb, bool fails) {
  const std::lock_guard lock(mutex_);
  if (fails) {
    failing_.insert(verb);
  } else {
    failing_.erase(verb);
  }
}
void RedisProxy::cut_replies(Verb verb, std::size_t after) {
  const std::lock_guard lock(mutex_);
  cut_[verb] = after;
}
void RedisProxy::trickle(Verb verb, bool slow) {
  const std::lock_guard lock(mutex_);
  if (slow) {
    slow_.insert(verb);
  } else {
    slow_.erase(verb);
  }
}
void RedisProxy::block(Verb verb) {
  const std::lock_guard lock(mutex_);
  blocked_.insert(verb);
}
void RedisProxy::release() {
  const std::lock_guard lock(mutex_);
  blocked_.clear();
  changed_.notify_all();
}
void RedisProxy::wait_for_blocked(int connections) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return waiting_ >= connections; });
}
std::size_t RedisProxy::commands(Verb verb) const {
  const std::lock_guard lock(mutex_);
  const auto found = seen_.find(verb);
  return found == seen_.end() ? 0 : found->second;
}

// ---- the script

RedisScript::RedisScript(Answers answers, On on) : answers_(std::move(answers)), directory_(new_directory()) {
  if (on == On::kSocket) {
    listener_ = unix_socket(directory_ + "/script", true);
  } else {
    listener_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof address;
    auto* where = reinterpret_cast<sockaddr*>(&address);
    EXPECT_TRUE(bind(listener_, where, length) == 0 && listen(listener_, 64) == 0);
    getsockname(listener_, where, &length);
    port_ = ntohs(address.sin_port);
  }
  accepting_ = std::thread([this] {
    for (;;) {
      const int client = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
      if (client < 0) return;
      const std::lock_guard lock(mutex_);
      open_.insert(client);
      if (closing_) shutdown(client, SHUT_RDWR);
      threads_.emplace_back([this, client] { serve(client); });
    }
  });
}

RedisScript::~RedisScript() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
    for (const int fd : open_) shutdown(fd, SHUT_RDWR);
  }
  shutdown(listener_, SHUT_RDWR);
  accepting_.join();
  for (std::thread& thread : threads_) thread.join();
  close(listener_);
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
    const auto answer = answers_.find(command->substr(from, command->find("\r\n", from) - from));
    if (answer == answers_.end() || answer->second.empty() || !send_all(client, answer->second)) break;
  }
  const std::lock_guard lock(mutex_);
  open_.erase(client);
  close(client);
}

}  // namespace kv_offload::testing
