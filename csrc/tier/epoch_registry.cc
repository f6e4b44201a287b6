// SPDX-License-Identifier: Apache-2.0
#include "tier/epoch_registry.h"

#include <sys/random.h>

#include <algorithm>
#include <array>
#include <utility>

namespace kv_offload {
namespace {

constexpr std::size_t kMostNames = 64;

void remember(const std::string& name, std::deque<std::string>* names) {
  if (name.empty() || std::find(names->begin(), names->end(), name) != names->end()) return;
  names->push_back(name);
  if (names->size() > kMostNames) names->pop_front();
}

}  // namespace

struct EpochRegistry::Named final : RecordStore::Epoch {
  explicit Named(std::string given) : name(std::move(given)) {}
  std::string label() const override { return name; }
  const std::string name;
};

std::string EpochRegistry::new_name() {
  std::array<std::uint8_t, kNameDigits / 2> bytes{};
  if (getentropy(bytes.data(), bytes.size()) != 0)
    throw_resource("getentropy failed: the system has no random numbers");
  return hex_of(bytes);
}

bool EpochRegistry::is_name(std::string_view text) {
  return text.size() == kNameDigits && text.find_first_not_of("0123456789abcdef") == text.npos;
}

const std::string& EpochRegistry::name_of(const EpochPtr& epoch) {
  return static_cast<const Named&>(*epoch).name;
}

void EpochRegistry::set_start(const std::string& name) {
  start_ = name;
  remember(name, &starts_);
}

void EpochRegistry::start_with(const std::string& stored) {
  const MutexLock lock(mutex_);
  set_start(stored);
  if (!stored.empty()) epoch_ = std::make_shared<Named>(stored);
}

std::string EpochRegistry::startup_epoch() const {
  const MutexLock lock(mutex_);
  return start_;
}

void EpochRegistry::update_startup_epoch(const std::string& known, const std::string& stored,
                                         bool read_only) {
  const MutexLock lock(mutex_);
  if (stored.empty()) return;
  // Not if a reset happened in between: the name that it replaced must not be put back.
  if (start_ == known && epoch_ != nullptr) set_start(stored);
  if (resets_ > 0) return;  // our epoch is then ours alone, or there is none
  if (epoch_ == nullptr && read_only) epoch_ = std::make_shared<Named>(stored);
  if (epoch_ != nullptr && name_of(epoch_) != stored) diverged_ = true;
}

Status EpochRegistry::begin(const std::function<Status(std::string* stored)>& ask,
                            const std::function<Status(const std::string& name)>& put) {
  std::uint64_t resets = 0;
  {
    const MutexLock lock(mutex_);
    if (epoch_ != nullptr) return Status::ok();
    resets = resets_;
  }
  std::string start;
  if (resets == 0) {  // the store did not answer when we started
    if (Status status = ask(&start); !status) return status;
    if (start.empty()) return Status::error(StatusKind::kUnavailable, "there is no epoch yet");
  } else {
    start = new_name();
    if (Status status = put(start); !status) return status;
  }
  const MutexLock lock(mutex_);
  if (resets != resets_) {
    remember(start, &ended_);
    return Status::error(StatusKind::kUnavailable, "the tier was reset again meanwhile");
  }
  set_start(start);
  if (epoch_ == nullptr) epoch_ = std::make_shared<Named>(resets == 0 ? start : new_name());
  return Status::ok();
}

EpochRegistry::EpochPtr EpochRegistry::current() const {
  const MutexLock lock(mutex_);
  return epoch_;
}

void EpochRegistry::forget() {
  const MutexLock lock(mutex_);
  for (const std::string& name : starts_) remember(name, &ended_);
  starts_.clear();
  epoch_.reset();
  start_.clear();  // must never be put back
  diverged_ = false;
  ++resets_;
}

bool EpochRegistry::has_ended(std::string_view name) const {
  const MutexLock lock(mutex_);
  return std::find(ended_.begin(), ended_.end(), name) != ended_.end();
}

bool EpochRegistry::diverged() const {
  const MutexLock lock(mutex_);
  return diverged_;
}

}  // namespace kv_offload
