// SPDX-License-Identifier: Apache-2.0
#include "backends/fs/usage_scanner.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "backends/fs/layout.h"
#include "backends/fs/walk.h"

namespace kv_offload {
namespace {
constexpr Nanos kCountInterval{std::chrono::seconds(1)};  // and 20 times the duration of the last count
constexpr Nanos kCounterStuck{std::chrono::seconds(3)};   // then this process counts too
constexpr std::uint64_t kDoubtDivisor = 64;               // 1/64 of the bound
constexpr Nanos kLongestSuspicion{std::chrono::hours(1)};
constexpr Nanos kWarningInterval{std::chrono::minutes(10)};
// ZFS reports the blocks of a file after its next transaction group: 5 s by default.
constexpr Nanos kSettleTime{std::chrono::seconds(15)};
// After a full file system lowered the bound, it rises again after this time, by 1/64 of max_bytes per
// second.
constexpr Nanos kLoweredBoundTime{std::chrono::seconds(30)};
// Consecutive counts with errors; the last one is accepted although incomplete.
constexpr unsigned kMostFailedCounts = 3;

// Gives up a count that ends early, also by an exception: other processes wait for a count in progress.
struct CountGuard {
  SpaceLedger& space;
  bool finished = false;
  ~CountGuard() {
    if (!finished) space.give_up_count();
  }
};
}  // namespace

UsageScanner::UsageScanner(const Context& context)
    : options_(context.options),
      root_(context.root),
      ops_(context.root.ops),
      records_(context.records),
      evictor_(context.evictor),
      scanner_(context.scanner),
      clock_(context.clock),
      stop_(context.stop),
      peer_records_(context.root, context.records, context.options.watch_removals, context.clock,
                    context.stop) {}

void UsageScanner::start() {
  SpaceFigures figures;
  (void)root_.space->poll(clock_.now(), &figures);
  update_sharers(figures);
  // If this process is alone, no other process waits for the count: it finds and removes what dead processes
  // left.
  if (figures.alone || figures.state == SpaceState::kUncounted) return count(figures);
  std::uint64_t ignored = 0;
  Unseen unseen;
  const std::shared_ptr<FsEpoch> own = records_.epoch();
  recount_needed_ = true;  // the scan may throw or be incomplete; a count scans again
  if (own) (void)scanner_.scan(own, nullptr, &ignored, &unseen);
  recount_needed_ = unseen.any();
}

void UsageScanner::poll(std::vector<std::string> lost) {
  SpaceFigures figures;
  const bool polled = root_.space->poll(clock_.now(), &figures).is_ok();
  report_lost_files(std::move(lost), figures);
  update_bound();  // also while the file system has no room for the ledger
  if (!polled) return;
  was_counted_ = figures.state == SpaceState::kCounted;
  update_sharers(figures);
  if (figures.state == SpaceState::kNotExclusive && !std::exchange(warned_not_exclusive_, true)) {
    options_.warn(fmt::format(
        "the file locks of {} do not keep other hosts out (mounted with nolock, local_lock or localflock?): "
        "this server still reads from it but no longer writes; give each host its own root_dir",
        root_.path));
  }
  peer_records_.poll(figures);  // first: records must be known before they can be evicted
  if (is_due(figures)) count(figures);
  writes_before_ = figures.writes;
}

void UsageScanner::watch() {
  if (const auto changes = root_.space->peek_changes_by_others()) peer_records_.watch(*changes);
}

// Logs one line for everything that was removed together.
void UsageScanner::report_lost_files(std::vector<std::string> lost, const SpaceFigures& figures) {
  const bool ledger = was_counted_ && figures.state == SpaceState::kUncounted && !figures.writers.empty();
  if (lost.empty() && !ledger) return;
  if (ledger) {
    was_counted_ = false;
    lost.emplace_back(layout::kLedgerFile);
  }
  recount_needed_ = true;
  next_count_ = Nanos{0};
  root_.changes->add_rebuild();
  root_.changes->explain(root_.changes->missing());  // no second line for the records
  options_.warn(fmt::format(
      "{}: another program removed, replaced or damaged {} while this server used it: created again. "
      "Chunks whose records are missing are recomputed; `kv-offload purge` clears a root that is in use",
      root_.path, fmt::join(lost, ", ")));
}

// Warns once each time max_bytes turns out to be too much.
void UsageScanner::update_bound() {
  const Nanos now = clock_.now();
  SpaceLedger& space = *root_.space;
  if (std::exchange(full_.times, root_.full_disk->times()) != root_.full_disk->times()) {
    full_.lowered = now;
  } else if (now - full_.lowered >= kLoweredBoundTime) {
    root_.full_disk->try_again();
    space.raise_bound(std::max<std::uint64_t>(options_.max_bytes / 64, 1));
  }
  if (!space.bound_is_lowered()) {
    full_.warned = false;
  } else if (!std::exchange(full_.warned, true)) {
    options_.warn(fmt::format(
        "the file system of {} is full although the tier has {} of max_bytes {}: records are "
        "evicted down to {} until there is free space again; free space on it, or lower max_bytes",
        root_.path, format_bytes(space.total()), format_bytes(options_.max_bytes),
        format_bytes(space.bound())));
  }
}

void UsageScanner::update_sharers(const SpaceFigures& figures) {
  evictor_.update_figures(figures);
  records_.set_shared(figures.shared);
}

bool UsageScanner::is_due(const SpaceFigures& figures) {
  // No count helps without exclusive locks, and one count at a time is enough.
  if (figures.state == SpaceState::kNotExclusive || peer_is_counting(figures)) return false;
  // Writes wait for this count, so no interval applies.
  if (figures.state == SpaceState::kUncounted) return true;
  const bool quiet = figures.writes == writes_before_;
  const bool unsettled = is_unsettled(figures);
  const bool wanted = recount_needed_ || evictor_.exhausted() ||
                      figures.doubt > options_.max_bytes / kDoubtDivisor || (figures.doubt > 0 && quiet) ||
                      unsettled || is_suspicious(figures);
  return wanted && clock_.now() >= next_count_;
}

// Others evict for their writes, about as many records as they write. More missing records are suspicious.
bool UsageScanner::is_suspicious(const SpaceFigures& figures) const {
  const std::uint64_t missing = root_.changes->missing() - root_.changes->explained();
  if (missing == 0) return false;
  const std::uint64_t written = figures.writes_by_others - suspicion_.writes_by_others;
  return missing > 2 * written || clock_.now() >= suspicion_.next;
}

// Some records are charged by size because their blocks are not reported yet. True while many of them are
// written, and once after all of them must have settled.
bool UsageScanner::is_unsettled(const SpaceFigures&) {
  const std::uint64_t now = root_.charges->unsettled();
  if (std::exchange(unsettled_.seen, now) != now) unsettled_.grew = clock_.now();
  if (now == unsettled_.settled) return false;
  return now - unsettled_.counted > options_.max_bytes / kDoubtDivisor ||
         clock_.now() - unsettled_.grew >= kSettleTime;
}

// True if another process counts and makes progress. One without progress was stopped.
bool UsageScanner::peer_is_counting(const SpaceFigures& figures) {
  const Nanos now = clock_.now();
  if (figures.counter == 0) return false;
  if (counting_peer_.writer != figures.counter || counting_peer_.version != figures.counter_version)
    counting_peer_ = {figures.counter, figures.counter_version, now};
  return now - counting_peer_.moved < kCounterStuck;
}

void UsageScanner::count(const SpaceFigures& figures) {
  evictor_.clear_exhausted();
  const Nanos started = clock_.now();
  const CountFor count_for{root_.writer, figures.writers, root_.charges.get()};
  std::uint64_t number = 0, counted = 0, surplus = 0, dropped = 0;
  const std::uint64_t missing = root_.changes->missing(), unsettled = root_.charges->unsettled();
  const bool has_settled = started - unsettled_.grew >= kSettleTime && unsettled == unsettled_.seen;
  const bool suspected = missing != root_.changes->explained();
  recount_needed_ = true;
  CountGuard attempt{*root_.space};
  const Status begun = root_.space->begin_count(&number);
  const std::shared_ptr<FsEpoch> own = records_.epoch();
  Unseen unseen;
  if (own && !scanner_.scan(own, &count_for, &counted, &unseen, suspected ? &dropped : nullptr)) return;
  counted += count_others(own ? own->number : 0, count_for, &unseen);
  const bool whole = is_accepted(unseen);
  // After a reset meanwhile, the scanned part belongs to no epoch of ours. The cause of the count stays
  // pending.
  attempt.finished = begun && whole && !stop_.load() && own == records_.epoch() &&
                     root_.space->finish_count(number, counted, &surplus);
  recount_needed_ = !attempt.finished;
  const Nanos ended = clock_.now();
  next_count_ = ended + std::max(kCountInterval, (ended - started) * 20);
  if (!attempt.finished) return;
  unsettled_.counted = unsettled;
  if (has_settled) unsettled_.settled = unsettled;
  // Each server that shares our epoch reports the growth of a directory. That is not a change by others.
  const std::uint64_t shared_growth =
      own && figures.shared ? own->leaves.growth() * figures.writers.size() : 0;
  surplus -= std::min(surplus, shared_growth);
  if (suspected) explain(figures, missing, surplus, dropped);
}

// An incomplete count would let the root grow past its bound. But a directory that stays unreadable must not
// block writes forever, so its bytes are left out in the end.
bool UsageScanner::is_accepted(const Unseen& unseen) {
  if (!unseen.any()) {
    failed_counts_ = 0;
    return true;
  }
  if (unseen.shortage.load()) return false;
  failed_counts_ = std::min(failed_counts_ + 1, kMostFailedCounts);
  return failed_counts_ == kMostFailedCounts;
}

// Records were missing or incomplete. If the sum is too high, a program that does not update the ledger
// removed them.
void UsageScanner::explain(const SpaceFigures& figures, std::uint64_t missing, std::uint64_t surplus,
                           std::uint64_t dropped) {
  const Nanos now = clock_.now();
  root_.changes->explain(missing);
  suspicion_.writes_by_others = figures.writes_by_others;
  suspicion_.wait = surplus > 0 ? kFirstSuspicion : std::min(suspicion_.wait * 2, kLongestSuspicion);
  suspicion_.next = now + suspicion_.wait;
  if (surplus > 0) {
    root_.changes->add_lost_bytes(surplus);
    suspicion_.bytes += surplus;
    suspicion_.records += dropped;
  }
  if (suspicion_.bytes == 0 || now < suspicion_.next_line) return;
  options_.warn(fmt::format(
      "{}: another program removed or truncated files of this server: {} are lost, {} records are "
      "missing. The space is reused; `kv-offload evict` frees space in a root that is in use",
      root_.path, format_bytes(suspicion_.bytes), suspicion_.records));
  suspicion_.bytes = suspicion_.records = 0;
  suspicion_.next_line = now + kWarningInterval;
}

// Counts all of the root except the records below our own epoch.
std::uint64_t UsageScanner::count_others(std::uint64_t own_epoch, const CountFor& count, Unseen* unseen) {
  const LeafOptions options{.count = &count, .unseen = unseen};
  std::uint64_t bytes = 0;
  FileInfo info;
  const auto each = [&](int directory, const std::string& but) {
    if (ops_.fstat(directory, &info) == 0) bytes += info.disk_bytes;
    std::vector<DirEntry> entries;
    if (const Status listed = list_directory(ops_, directory, &entries); !listed)
      return unseen->add(listed.error_number());
    for (const DirEntry& entry : entries) {
      const auto process =
          directory == root_.directory.get() ? layout::parse_presence(entry.name) : std::nullopt;
      if (process && std::find(count.writers.begin(), count.writers.end(), *process) == count.writers.end() &&
          sweep_temporary(ops_, directory, entry.name)) {
        continue;  // left by a dead process
      }
      if (entry.name != but) bytes += count_tree(ops_, directory, entry.name, options, stop_);
    }
  };
  each(root_.directory.get(), root_.namespace_name);
  each(root_.namespace_directory.get(), layout::epoch_directory_name(own_epoch));
  return bytes;
}

}  // namespace kv_offload
