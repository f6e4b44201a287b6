// RootCounter: looks at the root as others change it, about once a second: who shares it, what they wrote,
// whether the sum of its bytes is in doubt; and then counts it. It tells an operator what another program did
// to the root, and follows how much room the file system has.
//
// Invariant: nobody waits for a count, unless the sum is not known at all. A count that was overtaken (by a
// reset, or a new page) changes nothing, and what made it necessary is still true. One that another process
// makes is waited for, while that one goes on.
//
// Threads: upkeep's alone. No lock.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "base/clock.h"
#include "storage/fs/evictor.h"
#include "storage/fs/foreign_records.h"
#include "storage/fs/known_records.h"
#include "storage/fs/open_root.h"
#include "storage/fs/scanner.h"
#include "storage/fs/space.h"

namespace kv_offload {

class RootCounter {
 public:
  // What it works with; all of it outlives this.
  struct Context {
    const FsTierOptions& options;
    const OpenRoot& root;
    KnownRecords& records;
    Evictor& evictor;
    Scanner& scanner;
    const Clock& clock;
    const std::atomic<bool>& stop;  // calls give up soon
  };
  explicit RootCounter(const Context& context);

  // Once, first: finds what is there.
  void start();
  // lost: what another program removed and was made again since the last look.
  void look(std::vector<std::string> lost = {});

 private:
  void note_sharers(const SpaceFigures& figures);
  void note_lost(std::vector<std::string> lost, const SpaceFigures& figures);
  void follow_full_disk();
  bool is_due(const SpaceFigures& figures);
  bool is_suspicious(const SpaceFigures& figures) const;
  bool is_unsettled(const SpaceFigures& figures);
  bool another_counts(const SpaceFigures& figures);
  void count(const SpaceFigures& figures);
  void explain(const SpaceFigures& figures, std::uint64_t missing, std::uint64_t surplus,
               std::uint64_t forgotten);
  bool is_whole(const Unseen& unseen);
  std::uint64_t count_others(std::uint64_t own_generation, const CountFor& count, Unseen* unseen);

  static constexpr Nanos kFirstSuspicion{std::chrono::minutes(1)};

  const FsTierOptions& options_;
  const OpenRoot& root_;
  FileOps& ops_;
  KnownRecords& records_;
  Evictor& evictor_;
  Scanner& scanner_;
  const Clock& clock_;
  const std::atomic<bool>& stop_;
  ForeignRecords foreign_;
  Nanos next_count_{0};
  bool count_again_ = false;         // the last one came to nothing
  unsigned failed_counts_ = 0;       // in a row, because errors hid a part of the root
  std::uint64_t writes_before_ = 0;  // when it looked last
  // Another that counts, and when it was seen to go on.
  struct {
    std::uint64_t writer = 0, version = 0;
    Nanos moved{0};
  } counter_;
  bool told_not_exclusive_ = false;
  bool was_counted_ = false;  // as of the last look
  // Known records that were missing. While others evict, most were evicted by them: then the root is counted
  // less and less often, unless a count finds that something else removed them.
  struct {
    Nanos wait{kFirstSuspicion}, next{0}, next_line{0};
    std::uint64_t writes_by_others = 0;    // when it was counted last
    std::uint64_t bytes = 0, records = 0;  // found and not told yet
  } suspicion_;
  // Records whose blocks differed from their size when they were written (Charges::unsettled()).
  struct {
    std::uint64_t seen = 0, counted = 0, settled = 0;
    Nanos grew{0};
  } unsettled_;
  // A file system that is full below max_bytes.
  struct {
    std::uint64_t times = 0;
    Nanos lowered{0};
    bool told = false;
  } full_;
};

}  // namespace kv_offload
