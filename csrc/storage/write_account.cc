#include "storage/write_account.h"

namespace kv_offload {

Status WriteAccount::reserve(std::uint64_t bytes, std::uint64_t* missing) {
  const MutexLock lock(mutex_);
  Status status = ledger_.reserve(bytes, missing);
  if (status) in_flight_ += bytes;
  return status;
}

void WriteAccount::adopt(std::uint64_t bytes) {
  const MutexLock lock(mutex_);
  in_flight_ += bytes;
}

void WriteAccount::mark(const std::string& path) {
  const MutexLock lock(mutex_);
  marks_[path] = true;
}

void WriteAccount::settle(std::uint64_t reserved, std::uint64_t used, const std::vector<std::string>& marks) {
  const MutexLock lock(mutex_);
  ledger_.adjust(static_cast<std::int64_t>(used) - static_cast<std::int64_t>(reserved));
  in_flight_ -= reserved;
  for (const std::string& path : marks) {
    if (counting_) {
      marks_[path] = false;
    } else {
      marks_.erase(path);
    }
  }
}

Status WriteAccount::begin_count() {
  const MutexLock lock(mutex_);
  counting_ = true;
  return ledger_.begin_recount(in_flight_);
}

bool WriteAccount::is_marked(const std::string& path) const {
  const MutexLock lock(mutex_);
  return marks_.contains(path);
}

bool WriteAccount::has_marks() const {
  const MutexLock lock(mutex_);
  return !marks_.empty();
}

Status WriteAccount::finish_count(std::uint64_t counted) {
  const MutexLock lock(mutex_);
  end_count();
  return ledger_.finish_recount(counted);
}

void WriteAccount::give_up_count() {
  const MutexLock lock(mutex_);
  end_count();
}

void WriteAccount::end_count() {
  counting_ = false;
  std::erase_if(marks_, [](const auto& mark) { return !mark.second; });
}

}  // namespace kv_offload
