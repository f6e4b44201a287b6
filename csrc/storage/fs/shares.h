// Shares: how the servers that have a full root open divide it. Servers that share records (a namespace and a
// generation) are one sharer; each sharer may have an equal part of max_bytes.
//
// A server below its share asks the others in the ledger, ahead of its writes, and they evict for it by their
// own policy. A server that does not answer (stopped, stuck, cut off) loses records by their age instead.
//
// Threads: note() and ask() on upkeep's; the rest on any. mutex_ is innermost, except that ask() takes
// Space's lock without it.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/thread_annotations.h"
#include "storage/fs/known_records.h"
#include "storage/fs/open_root.h"
#include "storage/fs/space.h"

namespace kv_offload {

class Shares {
 public:
  // How long a request may stay unanswered: three ticks.
  static constexpr Nanos kAnswerWithin{std::chrono::seconds(3)};
  // What is asked for at once: a 256th of the root, but at least some writes and at most 1 GiB, which a
  // server can evict in about a second.
  static constexpr std::uint64_t kParts = 256;
  static constexpr std::uint64_t kLeastWrites = 4;
  static constexpr std::uint64_t kMostAsked = std::uint64_t{1} << 30;

  // All of it outlives this.
  Shares(std::uint64_t max_bytes, const OpenRoot& root, KnownRecords& records, const Clock& clock)
      : max_bytes_(max_bytes), root_(root), records_(records), clock_(clock) {}

  // What our records take on disk. (Their names say what they would take raw.)
  std::uint64_t held() const { return root_.charges->of_named(records_.bytes()); }
  // What upkeep found in the ledger.
  void note(const SpaceFigures& figures) EXCLUDES(mutex_);
  // Asks for as much as the next second's writes may take, or withdraws the request.
  void ask() EXCLUDES(mutex_);
  // A write of so many bytes.
  void note_write(std::uint64_t bytes);

  bool is_below() const EXCLUDES(mutex_);
  bool is_asked() const EXCLUDES(mutex_);       // another sharer wants space
  bool is_unanswered() const EXCLUDES(mutex_);  // for longer than kAnswerWithin
  // True while other sharers can still evict for us: we hold less than our share, they hold more than theirs,
  // and our request is not overdue.
  bool may_be_granted() const EXCLUDES(mutex_);
  bool is_open(const std::string& namespace_name) const EXCLUDES(mutex_);
  // The others that have more than their share; while none has, those that have clearly more than we have.
  std::vector<std::uint64_t> others_above() const EXCLUDES(mutex_);

 private:
  std::uint64_t share() const REQUIRES(mutex_);
  std::uint64_t quantum() const;

  const std::uint64_t max_bytes_;
  const OpenRoot& root_;
  KnownRecords& records_;
  const Clock& clock_;
  std::atomic<std::uint64_t> largest_write_{0};
  mutable Mutex mutex_;
  SpaceFigures figures_ GUARDED_BY(mutex_);
  std::uint64_t requested_ GUARDED_BY(mutex_) = 0;  // what ask() left in the ledger; 0: no request
  Nanos answered_ GUARDED_BY(mutex_){0};            // the last time, or when the request was made
};

}  // namespace kv_offload
