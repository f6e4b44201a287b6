// SPDX-License-Identifier: Apache-2.0
#include "tier/epoch_registry.h"

#include <sys/random.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <utility>

#include <fmt/format.h>

namespace kv_offload {
namespace {

constexpr std::size_t kMostNames = 64;

bool has(const std::deque<std::string>& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

void remember(const std::string& name, std::deque<std::string>* names) {
  if (name.empty() || has(*names, name)) return;
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

std::uint64_t EpochRegistry::new_id() { return id_of(new_name()); }

std::string EpochRegistry::name_of_id(std::uint64_t id) {
  return fmt::format("{:016x}{}", id, new_name().substr(kNameDigits / 2));
}

std::uint64_t EpochRegistry::id_of(std::string_view name) {
  std::uint64_t id = 0;
  std::from_chars(name.data(), name.data() + kNameDigits / 2, id, 16);
  return std::max<std::uint64_t>(id, 1);
}

std::string EpochRegistry::name_if_none(const EpochChoice& choice) {
  return choice.id == 0 || choice.is_new ? new_name() : name_of_id(choice.id);
}

std::string EpochRegistry::replacement_of(std::string_view stored, const EpochChoice& choice) {
  if (!choice.is_new || stored.empty() || id_of(stored) != choice.replaces) return {};
  return name_of_id(choice.id);
}

Status EpochRegistry::startup_problem(const EpochChoice& choice, const Status& fetched, bool read_only) {
  if (choice.id == 0) return Status::ok();
  if (fetched.kind() == StatusKind::kDeclined || fetched.kind() == StatusKind::kNoSpace) return fetched;
  if (!fetched && choice.is_new) {
    return Status::error(
        fetched.kind(),
        fmt::format("{}. The hosts have different epochs and must write a new one to each store. Fix the "
                    "cause, then restart this engine",
                    fetched.message()));
  }
  if (!fetched) return Status::ok();
  if (read_only && choice.is_new) {
    return Status::error(StatusKind::kUnavailable,
                         "write_policy is read_only on this host and not on the host of rank 0, which asks "
                         "for a new epoch. Use the same write_policy on all hosts");
  }
  return Status::ok();
}

const std::string& EpochRegistry::name_of(const EpochPtr& epoch) {
  return static_cast<const Named&>(*epoch).name;
}

void EpochRegistry::set_start(const std::string& name) {
  start_ = name;
  remember(name, &starts_);
}

void EpochRegistry::start_with(const std::string& stored, const std::string& replaced,
                               const Status& fetched) {
  const MutexLock lock(mutex_);
  if (!fetched) start_problem_ = fetched.message();
  remember(replaced, &starts_);
  set_start(stored);
  if (!stored.empty()) epoch_ = std::make_shared<Named>(stored);
}

std::string EpochRegistry::start_problem() const {
  const MutexLock lock(mutex_);
  return epoch_ == nullptr && resets_ == 0 ? start_problem_ : std::string();
}

std::string EpochRegistry::startup_epoch() const {
  const MutexLock lock(mutex_);
  return start_;
}

std::string EpochRegistry::name_if_missing(const EpochChoice& choice, std::string* known) {
  const MutexLock lock(mutex_);
  *known = start_;
  if (!start_.empty()) return start_;
  std::string name = epoch_ == nullptr && resets_ == 0 ? name_if_none(choice) : new_name();
  remember(name, &offers_);  // the store may get it after our next reset
  return name;
}

std::string EpochRegistry::unused_name() {
  std::string name = new_name();
  const MutexLock lock(mutex_);
  remember(name, &offers_);
  return name;
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
  std::string start;
  {
    const MutexLock lock(mutex_);
    if (epoch_ != nullptr) return Status::ok();
    resets = resets_;
    if (resets > 0) {
      // Even if this attempt fails, the store may get the name. So it uses the ID, and our next reset ends
      // it.
      const std::uint64_t id = std::exchange(startup_id_, 0);
      start = id != 0 ? name_of_id(id) : new_name();
      remember(start, &offers_);
    }
  }
  if (resets == 0) {  // the store did not answer when we started
    if (Status status = ask(&start); !status) return status;
    if (start.empty()) return Status::error(StatusKind::kUnavailable, "there is no epoch yet");
  } else {
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

void EpochRegistry::refresh() {
  const MutexLock lock(mutex_);
  epoch_.reset();
  start_problem_.clear();
  diverged_ = false;
}

void EpochRegistry::forget(std::uint64_t startup_id) {
  const MutexLock lock(mutex_);
  startup_id_ = startup_id;
  for (const std::string& name : starts_) remember(name, &ended_);
  for (const std::string& name : offers_) remember(name, &ended_offers_);
  starts_.clear();
  offers_.clear();
  epoch_.reset();
  start_.clear();  // must never be put back
  diverged_ = false;
  ++resets_;
}

bool EpochRegistry::has_ended(std::string_view name) const {
  const MutexLock lock(mutex_);
  return has(ended_, name) || has(ended_offers_, name);
}

bool EpochRegistry::diverged() const {
  const MutexLock lock(mutex_);
  return diverged_;
}

}  // namespace kv_offload
