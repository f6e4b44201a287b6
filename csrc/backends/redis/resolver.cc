// SPDX-License-Identifier: Apache-2.0
#include "backends/redis/resolver.h"

#include <netdb.h>

#include <cstring>
#include <map>
#include <system_error>
#include <thread>
#include <utility>

#include "base/thread.h"
#include "base/thread_annotations.h"

namespace kv_offload::redis {
namespace {

int ask_system(const std::string& host, std::uint16_t port, int flags,
               std::vector<SocketAddress>* addresses) {
  addrinfo hints{}, *first = nullptr;
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags;
  const std::string service = std::to_string(port);
  if (const int error = getaddrinfo(host.c_str(), service.c_str(), &hints, &first); error != 0) return error;
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> freed(first, &freeaddrinfo);
  for (const addrinfo* one = first; one != nullptr; one = one->ai_next) {
    SocketAddress& address = addresses->emplace_back();
    address.length = one->ai_addrlen;
    std::memcpy(&address.storage, one->ai_addr, one->ai_addrlen);
  }
  return 0;
}

Status no_address(const char* why) {
  return Status::error(StatusKind::kIo, fmt::format("the server's name cannot be looked up: {}", why));
}

}  // namespace

struct Resolver::State {
  struct Answer {
    bool done = false;
    int error = 0;
    std::vector<SocketAddress> addresses;
  };
  using Name = std::pair<std::string, std::uint16_t>;

  explicit State(Lookup with) : lookup(std::move(with)) {}

  void run(const Name& name, const std::shared_ptr<Answer>& answer) EXCLUDES(mutex) {
    begin_thread("kvo-resolve", CpuShare::kFull);
    std::vector<SocketAddress> addresses;
    int error = EAI_MEMORY;
    try {
      error = lookup(name.first, name.second, &addresses);
    } catch (const std::exception&) {  // out of memory
    }
    const MutexLock lock(mutex);
    answer->done = true;
    answer->error = error;
    answer->addresses = std::move(addresses);
    running.erase(name);
    changed.notify_all();
  }

  const Lookup lookup;
  Mutex mutex;
  CondVar changed;
  std::map<Name, std::shared_ptr<Answer>> running GUARDED_BY(mutex);
};

Resolver::Resolver()
    : Resolver([](const std::string& host, std::uint16_t port, std::vector<SocketAddress>* addresses) {
        return ask_system(host, port, 0, addresses);
      }) {}

Resolver::Resolver(Lookup lookup) : state_(std::make_shared<State>(std::move(lookup))) {}

Status Resolver::resolve(const std::string& host, std::uint16_t port, Deadline deadline,
                         std::vector<SocketAddress>* addresses) {
  addresses->clear();
  if (ask_system(host, port, AI_NUMERICHOST | AI_NUMERICSERV, addresses) == 0) return Status::ok();
  const State::Name name(host, port);
  const MutexLock lock(state_->mutex);
  auto found = state_->running.find(name);
  if (found == state_->running.end()) {
    if (state_->running.size() >= kMostLookups) return no_address("too many other lookups are pending");
    found = state_->running.emplace(name, std::make_shared<State::Answer>()).first;
    try {
      std::thread([state = state_, name, answer = found->second] { state->run(name, answer); }).detach();
    } catch (const std::exception&) {
      state_->running.erase(found);
      return no_address("no thread could be started");
    }
  }
  const std::shared_ptr<State::Answer> answer = found->second;
  while (!answer->done) {
    const auto left = deadline - std::chrono::steady_clock::now();
    if (left <= left.zero()) {
      return Status::error(StatusKind::kTimeout, "the lookup of the server's name timed out");
    }
    state_->changed.wait_for(state_->mutex, left);
  }
  if (answer->error != 0) return no_address(gai_strerror(answer->error));
  *addresses = answer->addresses;
  return addresses->empty() ? no_address("it has no address") : Status::ok();
}

}  // namespace kv_offload::redis
