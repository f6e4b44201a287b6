#include "storage/fs/root_counter.h"

#include <fcntl.h>
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "storage/fs/layout.h"
#include "storage/fs/walk.h"

namespace kv_offload {
namespace {
constexpr Nanos kCountEvery{std::chrono::seconds(1)};    // and twenty times as long as one takes
constexpr Nanos kCounterStuck{std::chrono::seconds(3)};  // then one counts beside it
constexpr std::uint64_t kMuchDoubt = 64;                 // a 64th of the bound

// Others wait for a count that goes on: one that ends early, be it by something that throws, is given up.
struct UnlessFinished {
  Space& space;
  bool finished = false;
  ~UnlessFinished() {
    if (!finished) space.give_up_count();
  }
};
}  // namespace

RootCounter::RootCounter(const Context& context)
    : options_(context.options),
      root_(context.root),
      ops_(context.root.ops),
      records_(context.records),
      evictor_(context.evictor),
      scanner_(context.scanner),
      clock_(context.clock),
      stop_(context.stop),
      foreign_(context.root, context.records, context.clock, context.stop) {}

void RootCounter::start() {
  SpaceFigures figures;
  (void)root_.space->look(clock_.now(), &figures);
  note_sharers(figures);
  // Alone, nobody waits for it: what the dead left is found and swept.
  if (figures.alone || figures.state == SpaceState::kUncounted) return count(figures);
  std::uint64_t ignored = 0;
  const std::shared_ptr<Generation> own = records_.generation();
  count_again_ = true;  // in case it throws: that scans as well
  if (own && scanner_.scan(own, nullptr, &ignored)) records_.note_extent(own, KnownRecords::Extent::kOrder);
  count_again_ = false;
}

void RootCounter::look() {
  SpaceFigures figures;
  if (!root_.space->look(clock_.now(), &figures)) return;
  note_sharers(figures);
  if (figures.state == SpaceState::kNotExclusive && !std::exchange(told_not_exclusive_, true)) {
    options_.warn(fmt::format(
        "the file locks of {} do not keep other hosts out (mounted with nolock, local_lock or localflock?): "
        "this server reads from it and writes nothing more; give each host a root_dir of its own",
        root_.path));
  }
  foreign_.look(figures.writes_by_others);  // they have to be known before they can be evicted in their turn
  if (is_due(figures)) count(figures);
  writes_before_ = figures.writes;
}

void RootCounter::note_sharers(const SpaceFigures& figures) {
  evictor_.note(figures);
  records_.note_shared(figures.shared);
}

bool RootCounter::is_due(const SpaceFigures& figures) {
  if (figures.state == SpaceState::kNotExclusive || another_counts(figures)) return false;
  if (figures.state == SpaceState::kUncounted) return true;
  const bool quiet = figures.writes == writes_before_;
  const bool wanted = count_again_ || evictor_.ran_dry() || figures.doubt > options_.max_bytes / kMuchDoubt ||
                      (figures.doubt > 0 && quiet);
  return wanted && clock_.now() >= next_count_;
}

// And goes on with it: one that does not move was stopped.
bool RootCounter::another_counts(const SpaceFigures& figures) {
  const Nanos now = clock_.now();
  if (figures.counter == 0) return false;
  if (counter_.writer != figures.counter || counter_.version != figures.counter_version)
    counter_ = {figures.counter, figures.counter_version, now};
  return now - counter_.moved < kCounterStuck;
}

void RootCounter::count(const SpaceFigures& figures) {
  evictor_.forget_that_it_ran_dry();
  const Nanos started = clock_.now();
  const CountFor for_us{root_.writer, figures.writers};
  std::uint64_t number = 0, counted = 0;
  count_again_ = true;
  UnlessFinished attempt{*root_.space};
  const Status begun = root_.space->begin_count(&number);
  const std::shared_ptr<Generation> own = records_.generation();
  if (own && !scanner_.scan(own, &for_us, &counted)) return;
  records_.note_extent(own, KnownRecords::Extent::kOrder);
  counted += count_others(own ? own->number : 0, for_us);
  // A reset meanwhile: a part was counted that is of no generation of ours. What made us count is still true.
  attempt.finished =
      begun && !stop_.load() && own == records_.generation() && root_.space->finish_count(number, counted);
  count_again_ = !attempt.finished;
  const Nanos ended = clock_.now();
  next_count_ = ended + std::max(kCountEvery, (ended - started) * 20);
}

// All of the root but the records below our own generation.
std::uint64_t RootCounter::count_others(std::uint64_t own_generation, const CountFor& count) {
  const LeafOptions options{.count = &count};
  std::uint64_t bytes = 0;
  FileInfo info;
  const auto each = [&](int directory, const std::string& but) {
    if (ops_.fstat(directory, &info) == 0) bytes += info.disk_bytes;
    std::vector<DirEntry> entries;
    if (!list_directory(ops_, directory, &entries)) return;
    for (const DirEntry& entry : entries) {
      const auto process =
          directory == root_.directory.get() ? layout::parse_presence(entry.name) : std::nullopt;
      if (process && std::find(count.writers.begin(), count.writers.end(), *process) == count.writers.end() &&
          sweep_temporary(ops_, directory, entry.name)) {
        continue;  // of one that is dead
      }
      if (entry.name != but) bytes += count_tree(ops_, directory, entry.name, options, stop_);
    }
  };
  each(root_.directory.get(), root_.namespace_name);
  each(root_.namespace_directory.get(), layout::generation_name(own_generation));
  return bytes;
}

}  // namespace kv_offload
