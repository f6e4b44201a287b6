// SPDX-License-Identifier: Apache-2.0
// Shares: how the servers that have a full root open divide it. Servers that share records (one epoch of one
// namespace) are one sharer, and each sharer may hold an equal part of max_bytes.
//
// A server below its share requests space from the others in the ledger, ahead of its writes, and they evict
// for it by their own policy. A server that does not answer (stopped, stuck, cut off) loses records by their
// age instead.
//
// Threads: update_figures() and ask() on upkeep threads, all other calls on any thread. mutex_ is innermost;
// ask() takes SpaceLedger's lock without holding it.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "backends/fs/open_root.h"
#include "backends/fs/record_index.h"
#include "backends/fs/space_ledger.h"
#include "base/clock.h"
#include "base/thread_annotations.h"

namespace kv_offload {

class Shares {
 public:
  // How long a request may stay unanswered: three ticks.
  static constexpr Nanos kRequestTimeout{std::chrono::seconds(3)};
  // Size of one request: 1/kParts of the root, but at least kLeastWrites writes and at most 1 GiB, which a
  // server can evict in about a second.
  static constexpr std::uint64_t kParts = 256;
  static constexpr std::uint64_t kLeastWrites = 4;
  static constexpr std::uint64_t kMaxRequestBytes = std::uint64_t{1} << 30;

  // All arguments must outlive this object.
  Shares(std::uint64_t max_bytes, const OpenRoot& root, RecordIndex& records, const Clock& clock)
      : max_bytes_(max_bytes), root_(root), records_(records), clock_(clock) {}

  // Returns the disk space of our records. (Their names show the size of raw records.)
  std::uint64_t held() const { return root_.charges->of_named(records_.bytes()); }
  // Reports the ledger figures that upkeep read.
  void update_figures(const SpaceFigures& figures) EXCLUDES(mutex_);
  // Requests as much as the next second's writes may take, or withdraws the request.
  void ask() EXCLUDES(mutex_);
  // Records a write of this size.
  void on_write(std::uint64_t bytes);

  bool is_below() const EXCLUDES(mutex_);
  // True if the root holds more than this, even without the bytes in doubt.
  bool is_root_above(std::uint64_t bytes) const EXCLUDES(mutex_);
  bool has_request() const EXCLUDES(mutex_);  // another sharer requests space
  bool is_overdue() const EXCLUDES(mutex_);   // for longer than kRequestTimeout
  // True while other sharers can still evict for us: we hold less than our share, they hold more than theirs,
  // and our request is not overdue.
  bool may_be_granted() const EXCLUDES(mutex_);
  bool is_open(const std::string& namespace_name) const EXCLUDES(mutex_);
  // Returns the other sharers above their share. While none is, those that hold clearly more than we do.
  std::vector<std::uint64_t> sharers_above() const EXCLUDES(mutex_);

 private:
  std::uint64_t share() const REQUIRES(mutex_);
  std::uint64_t quantum() const;

  const std::uint64_t max_bytes_;
  const OpenRoot& root_;
  RecordIndex& records_;
  const Clock& clock_;
  std::atomic<std::uint64_t> largest_write_{0};
  mutable Mutex mutex_;
  SpaceFigures figures_ GUARDED_BY(mutex_);
  std::uint64_t requested_ GUARDED_BY(mutex_) = 0;  // the request in the ledger; 0: none
  Nanos answered_ GUARDED_BY(mutex_){0};            // time of the last answer, or of the request
};

}  // namespace kv_offload
