// SPDX-License-Identifier: Apache-2.0
#include "backends/mooncake/fake.h"

#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <gtest/gtest.h>

#include <array>
#include <cstring>

#include "backends/mooncake/errors.h"

namespace kv_offload::testing {

using mooncake::Descriptor;
using Op = mooncake::Verb;
using std::chrono::milliseconds;
using std::chrono::seconds;

class FakeMooncake::Client final : public mooncake::Process {
 public:
  Client(FakeMooncake& store, Descriptor control) : store_(store), control_(std::move(control)) {
    const std::lock_guard lock(store_.mutex_);
    store_.clients_.insert(this);
    main_ = std::thread([this] { run(); });
  }
  ~Client() override {
    {
      const std::lock_guard lock(store_.mutex_);
      die();
    }
    main_.join();
    for (std::thread& thread : threads_) thread.join();
    const std::lock_guard lock(store_.mutex_);  // the last access of this client to the store
    store_.clients_.erase(this);
    store_.changed_.notify_all();
  }
  // Caller must hold the store's mutex.
  void die() {
    dead_ = true;
    ::shutdown(control_.get(), SHUT_RDWR);
    for (const int socket : sockets_) ::shutdown(socket, SHUT_RDWR);
    store_.changed_.notify_all();
  }
  void wait_until(mooncake::Deadline) override {}
  std::string end_reason() override { return dead_ ? "it was killed" : ""; }

 private:
  void say(const std::string& text) {
    (void)mooncake::send_message(control_.get(), std::as_bytes(std::span(text)));
  }
  void run() {
    std::array<std::byte, 4096> buffer{};
    std::size_t got = 0;
    if (!mooncake::receive_message(control_.get(), buffer, mooncake::Deadline::max(), &got)) return;
    std::string refusal;
    {
      std::unique_lock lock(store_.mutex_);
      store_.last_setup_.assign(reinterpret_cast<const char*>(buffer.data()), got);
      store_.changed_.wait(lock, [&] { return dead_ || !store_.hang_starts_; });
      refusal = store_.down_ ? "failed Mooncake's master does not answer" : store_.refusal_;
    }
    if (dead_) return;
    say(refusal.empty() ? "ready fake" : refusal);
    if (!refusal.empty()) return;
    std::uint64_t bytes = 0;
    std::array<int, 2> descriptors{-1, -1};
    while (receive_channel(&bytes, &descriptors)) {
      const std::lock_guard lock(store_.mutex_);
      sockets_.insert(descriptors[0]);
      if (dead_) ::shutdown(descriptors[0], SHUT_RDWR);
      threads_.emplace_back([this, descriptors, bytes] { serve(descriptors[0], descriptors[1], bytes); });
    }
  }
  bool receive_channel(std::uint64_t* bytes, std::array<int, 2>* descriptors) const {
    iovec piece{bytes, sizeof(*bytes)};
    alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(*descriptors))> control{};
    msghdr header{};
    header.msg_iov = &piece;
    header.msg_iovlen = 1;
    header.msg_control = control.data();
    header.msg_controllen = control.size();
    if (::recvmsg(control_.get(), &header, 0) <= 0 || dead_) return false;
    const cmsghdr* const rights = CMSG_FIRSTHDR(&header);
    if (rights == nullptr) return false;
    std::memcpy(descriptors->data(), CMSG_DATA(rights), sizeof(*descriptors));
    return true;
  }
  void serve(int socket, int memory_fd, std::uint64_t bytes) {
    ++store_.channels_;
    auto* const at =
        static_cast<std::byte*>(::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory_fd, 0));
    ::close(memory_fd);
    const std::span<std::byte> memory(at, bytes);
    mooncake::CallHeader question;
    const auto asked = std::as_writable_bytes(std::span(&question, 1));
    while (::recv(socket, asked.data(), asked.size(), 0) == static_cast<ssize_t>(asked.size()) && !dead_) {
      if (!answer(socket, memory, question)) break;
    }
    ::munmap(at, bytes);
    --store_.channels_;
    const std::lock_guard lock(store_.mutex_);
    sockets_.erase(socket);
    ::close(socket);
  }
  static Verb verb_of(const mooncake::CallHeader& question, const std::string& name) {
    if (name.ends_with(":epoch")) return Verb::kEpoch;
    switch (static_cast<Op>(question.verb)) {
      case Op::kGet:
        return Verb::kRead;
      case Op::kExist:
        return Verb::kLocate;
      case Op::kRemove:
        return Verb::kRemove;
      default:
        return Verb::kWrite;
    }
  }
  bool answer(int socket, std::span<std::byte> memory, const mooncake::CallHeader& question) {
    std::vector<std::string> names(1);
    for (const std::byte byte : memory.first(question.names_bytes)) {
      if (byte == std::byte{'\n'}) {
        names.emplace_back();
      } else {
        names.back().push_back(static_cast<char>(byte));
      }
    }
    names.pop_back();
    EXPECT_EQ(names.size(), question.names);
    const Fate fate = store_.faults.meet(verb_of(question, names.at(0)));
    if (fate.lost) return false;
    const auto object = memory.subspan(mooncake::kNamesBytes);
    std::int64_t result = fate.instead.empty() ? 0 : std::stoll(fate.instead);
    if (fate.instead.empty()) {
      if (!store_.wait_until_it_answers(dead_)) return false;
      result = store_.answer(question, names, object);
      store_.wait_for_release(question, names.at(0), dead_);
    }
    if (fate.endless) {
      std::unique_lock lock(store_.mutex_);
      store_.changed_.wait(lock, [&] { return dead_.load(); });
      return false;
    }
    if (fate.unanswered) {  // the process ends
      const std::lock_guard lock(store_.mutex_);
      die();
      return false;
    }
    // Applies the faults on the way to its memory.
    if (fate.permille > 0) std::memset(object.data() + object.size() * fate.permille / 1000, 0, 1);
    if (fate.permille > 0 && result > 0) result = result * static_cast<std::int64_t>(fate.permille) / 1000;
    if (fate.flipped >= 0 && static_cast<Op>(question.verb) == Op::kGet) {
      object[static_cast<std::size_t>(fate.flipped) * 8] ^= std::byte{4};
    }
    return ::send(socket, &result, sizeof(result), MSG_NOSIGNAL) > 0;
  }

  FakeMooncake& store_;
  const Descriptor control_;
  std::atomic<bool> dead_{false};
  std::set<int> sockets_;             // guarded by the store's mutex
  std::vector<std::thread> threads_;  // of main_, until it is joined
  std::thread main_;
};

FakeMooncake::~FakeMooncake() {
  std::unique_lock lock(mutex_);
  EXPECT_TRUE(changed_.wait_for(lock, seconds(240), [&] { return clients_.empty(); }));
}

mooncake::Launch FakeMooncake::launch() {
  return [this](Descriptor theirs, std::unique_ptr<mooncake::Process>* begun) {
    ++starts_;
    *begun = std::make_unique<Client>(*this, std::move(theirs));
    return Status::ok();
  };
}

bool FakeMooncake::wait_until_it_answers(const std::atomic<bool>& dead) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return dead || !still_; });
  return !dead;
}

void FakeMooncake::wait_for_release(const mooncake::CallHeader& question, const std::string& name,
                                    const std::atomic<bool>& dead) {
  std::unique_lock lock(mutex_);
  if (static_cast<Op>(question.verb) != Op::kGet || name != to_hold_) return;
  to_hold_.clear();
  held_ = true;
  changed_.wait(lock, [&] { return dead || !held_; });
}

std::int64_t FakeMooncake::answer(const mooncake::CallHeader& question, const std::vector<std::string>& names,
                                  std::span<std::byte> object) {
  const std::lock_guard lock(mutex_);
  if (down_) return -900;
  const std::string& name = names.at(0);
  const auto found = objects_.find(name);
  std::int64_t length = 0;
  switch (static_cast<Op>(question.verb)) {
    case Op::kPut:
      // With --root_fs_dir puts are plain, which do not report an existing object.
      if (found != objects_.end()) return no_removals_ ? static_cast<std::int64_t>(question.object_bytes) : 0;
      if (begun_.contains(name)) return mooncake::kNotComplete;
      [[fallthrough]];
    case Op::kSet:
      if (no_replacements_ && static_cast<Op>(question.verb) == Op::kSet) return mooncake::kNotComplete;
      if (full_) return mooncake::kNoSpaceLeft;
      begun_.erase(name);
      ++puts_[name];
      objects_[name].assign(reinterpret_cast<const char*>(object.data()), question.object_bytes);
      return static_cast<std::int64_t>(question.object_bytes);
    case Op::kGet:
      expected_[name] = question.object_bytes;
      if (begun_.contains(name)) return mooncake::kNotComplete;
      if (found == objects_.end()) return mooncake::kNoObject;
      if (found->second.size() <= object.size()) {
        std::memcpy(object.data(), found->second.data(), found->second.size());
      }
      length = static_cast<std::int64_t>(found->second.size());
      if (auto replaced = replacements_.extract(name)) found->second = replaced.mapped();
      return length;
    case Op::kExist:
      for (std::size_t i = 0; i < names.size(); ++i) {
        object[i] = objects_.contains(names[i]) ? std::byte{1} : std::byte{0};
      }
      return 0;
    case Op::kRemove:
      if (no_removals_) return mooncake::kNotComplete;
      return objects_.erase(name) > 0 ? 0 : mooncake::kNoObject;
  }
  return -1;
}

void FakeMooncake::kill() {
  const std::lock_guard lock(mutex_);
  down_ = true;
  objects_.clear();
  begun_.clear();
}
void FakeMooncake::start() {
  const std::lock_guard lock(mutex_);
  down_ = false;
}
void FakeMooncake::stand_still(bool still) {
  const std::lock_guard lock(mutex_);
  still_ = still;
  changed_.notify_all();
}
void FakeMooncake::set_full(bool full) {
  const std::lock_guard lock(mutex_);
  full_ = full;
}
void FakeMooncake::refuse_replacements(bool refuses) {
  const std::lock_guard lock(mutex_);
  no_replacements_ = refuses;
}
void FakeMooncake::refuse_removals(bool refuses) {
  const std::lock_guard lock(mutex_);
  no_removals_ = refuses;
}
void FakeMooncake::begin_and_leave(const std::string& name) {
  const std::lock_guard lock(mutex_);
  begun_.insert(name);
}
void FakeMooncake::hold_answer(const std::string& name) {
  const std::lock_guard lock(mutex_);
  to_hold_ = name;
}
bool FakeMooncake::is_answer_held() const {
  const std::lock_guard lock(mutex_);
  return held_;
}
void FakeMooncake::release_answer() {
  const std::lock_guard lock(mutex_);
  held_ = false;
  changed_.notify_all();
}
void FakeMooncake::refuse_starts(std::string said) {
  const std::lock_guard lock(mutex_);
  refusal_ = std::move(said);
}
void FakeMooncake::hang_starts(bool hang) {
  const std::lock_guard lock(mutex_);
  hang_starts_ = hang;
  changed_.notify_all();
}
void FakeMooncake::kill_clients() {
  const std::lock_guard lock(mutex_);
  for (Client* client : clients_) client->die();
}
std::vector<std::string> FakeMooncake::names() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::string> names;
  for (const auto& [name, value] : objects_) names.push_back(name);
  return names;
}
std::string FakeMooncake::value(const std::string& name) const {
  const std::lock_guard lock(mutex_);
  const auto found = objects_.find(name);
  return found == objects_.end() ? "" : found->second;
}
void FakeMooncake::set_value(const std::string& name, const std::string& value) {
  const std::lock_guard lock(mutex_);
  objects_[name] = value;
}
void FakeMooncake::remove(const std::string& name) {
  const std::lock_guard lock(mutex_);
  objects_.erase(name);
}
void FakeMooncake::replace_once_read(const std::string& name, const std::string& value) {
  const std::lock_guard lock(mutex_);
  replacements_[name] = value;
}
std::uint64_t FakeMooncake::expected(const std::string& name) const {
  const std::lock_guard lock(mutex_);
  return expected_.at(name);
}

std::size_t FakeMooncake::puts(const std::string& name) const {
  const std::lock_guard lock(mutex_);
  const auto found = puts_.find(name);
  return found == puts_.end() ? 0 : found->second;
}
std::string FakeMooncake::last_setup() const {
  const std::lock_guard lock(mutex_);
  return last_setup_;
}

}  // namespace kv_offload::testing
