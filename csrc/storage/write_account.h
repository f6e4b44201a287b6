// WriteAccount: this process's writes against the shared ledger, kept so that a
// recount of the root comes out exact while they go on. What a write in flight
// has reserved, and what was reserved since the count began, is in the ledger's
// sum already; the files and directories it makes are marked, and the count
// leaves them out.
//
// Any thread. Its lock is held across calls of the ledger (short, on one file).
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/thread_annotations.h"
#include "storage/ledger.h"

namespace kv_offload {

class WriteAccount {
 public:
  explicit WriteAccount(Ledger& ledger) : ledger_(ledger) {}

  // As Ledger::reserve.
  Status reserve(std::uint64_t bytes, std::uint64_t* missing) EXCLUDES(mutex_);
  // Bytes that are on the account as a record's become part of a reservation. REQUIRES: they were counted
  // by the count that runs, if one does, or it has yet to begin.
  void adopt(std::uint64_t bytes) EXCLUDES(mutex_);
  // This path below the generation is about to appear on behalf of a reservation.
  void mark(const std::string& path) EXCLUDES(mutex_);
  // Ends a reservation: `used` of it stays; its marks go when no count needs them.
  void settle(std::uint64_t reserved, std::uint64_t used, const std::vector<std::string>& marks)
      EXCLUDES(mutex_);

  Status begin_count() EXCLUDES(mutex_);
  bool is_marked(const std::string& path) const EXCLUDES(mutex_);
  bool has_marks() const EXCLUDES(mutex_);
  // counted: all that was found but what is marked.
  Status finish_count(std::uint64_t counted) EXCLUDES(mutex_);
  void give_up_count() EXCLUDES(mutex_);

 private:
  void end_count() REQUIRES(mutex_);

  Ledger& ledger_;
  mutable Mutex mutex_;
  std::uint64_t in_flight_ GUARDED_BY(mutex_) = 0;  // reserved, not settled
  bool counting_ GUARDED_BY(mutex_) = false;
  std::unordered_map<std::string, bool> marks_ GUARDED_BY(mutex_);  // true: in flight
};

// What one write holds. Settles when it dies.
struct Reservation {
  explicit Reservation(WriteAccount& to) : account(to) {}
  ~Reservation() { account.settle(reserved, used, marks); }
  Reservation(const Reservation&) = delete;
  Reservation& operator=(const Reservation&) = delete;
  // Asks for what is missing to `bytes` in all.
  Status grow_to(std::uint64_t bytes, std::uint64_t* missing) {
    *missing = 0;
    if (reserved >= bytes) return Status::ok();
    const Status status = account.reserve(bytes - reserved, missing);
    if (status) reserved = bytes;
    return status;
  }
  void adopt(std::uint64_t bytes) {
    account.adopt(bytes);
    reserved += bytes;
  }
  void mark(const std::string& path) {
    account.mark(path);
    marks.push_back(path);
  }

  WriteAccount& account;
  std::uint64_t reserved = 0;
  std::uint64_t used = 0;
  std::vector<std::string> marks;
};

}  // namespace kv_offload
