// Counting the root: when, and how. Nobody waits for it, unless the sum is not known at all.
#include <fcntl.h>

#include <algorithm>

#include <fmt/format.h>

#include "storage/fs/layout.h"
#include "storage/fs/store.h"

namespace kv_offload {
namespace {
constexpr Nanos kCountEvery{std::chrono::seconds(1)};    // and twenty times as long as one takes
constexpr Nanos kCounterStuck{std::chrono::seconds(3)};  // then one counts beside it
constexpr std::uint64_t kMuchDoubt = 64;                 // a 64th of the bound
}  // namespace

void FsStore::look_at_space() {
  SpaceFigures figures;
  if (!open_.space->look(clock_.now(), &figures)) return;
  {
    const MutexLock lock(mutex_);
    sharers_ = figures.sharers;
  }
  if (figures.state == SpaceState::kNotExclusive && !std::exchange(told_not_exclusive_, true)) {
    options_.warn(fmt::format(
        "the file locks of {} do not keep other hosts out (mounted with nolock, local_lock or localflock?): "
        "this server reads from it and writes nothing more; give each host a root_dir of its own",
        open_.path));
  }
  look_for_foreign_records(figures);  // they have to be known before they can be evicted in their turn
  if (count_is_due(figures)) count_root(figures);
  writes_before_ = figures.writes;
}

bool FsStore::count_is_due(const SpaceFigures& figures) {
  if (figures.state == SpaceState::kNotExclusive || another_counts(figures)) return false;
  if (figures.state == SpaceState::kUncounted) return true;
  const bool quiet = figures.writes == writes_before_;
  const bool wanted = count_again_ || nothing_to_evict_.load() ||
                      figures.doubt > options_.max_bytes / kMuchDoubt || (figures.doubt > 0 && quiet);
  return wanted && clock_.now() >= next_count_;
}

// And goes on with it: one that does not move was stopped.
bool FsStore::another_counts(const SpaceFigures& figures) {
  const Nanos now = clock_.now();
  if (figures.counter == 0) return false;
  if (counter_[0] != figures.counter || counter_[1] != figures.counter_version) {
    counter_[0] = figures.counter;
    counter_[1] = figures.counter_version;
    counter_moved_ = now;
  }
  return now - counter_moved_ < kCounterStuck;
}

void FsStore::count_root(const SpaceFigures& figures) {
  nothing_to_evict_.store(false);
  const Nanos started = clock_.now();
  const CountFor count{open_.writer, figures.writers};
  std::uint64_t number = 0, counted = 0;
  const Status begun = open_.space->begin_count(&number);
  const std::shared_ptr<Generation> own = generation();
  if (!scan_own(&count, &counted)) return open_.space->give_up_count();
  if (own) known_.store(Known::kOrder);
  counted += count_others(own ? own->number : 0, count);
  // A reset meanwhile: a part was counted that is of no generation of ours. What made us count is still true.
  count_again_ = !begun || stop_.load() || own != generation() || !open_.space->finish_count(number, counted);
  if (count_again_) open_.space->give_up_count();
  const Nanos ended = clock_.now();
  next_count_ = ended + std::max(kCountEvery, (ended - started) * 20);
}

// All of the root but the records below our own generation.
std::uint64_t FsStore::count_others(std::uint64_t own_generation, const CountFor& count) {
  const LeafOptions options{.count = &count};
  std::uint64_t bytes = 0;
  FileInfo info;
  const auto each = [&](int directory, const std::string& but) {
    if (ops_.fstat(directory, &info) == 0) bytes += info.disk_bytes;
    std::vector<DirEntry> entries;
    int error = 0;
    const Fd self = open_fd(ops_, directory, ".", O_RDONLY | O_DIRECTORY, 0, &error);
    if (!self || ops_.list(self.get(), &entries) < 0) return;
    for (const DirEntry& entry : entries) {
      const auto process = directory == open_.root.get() ? layout::parse_presence(entry.name) : std::nullopt;
      if (process && std::find(count.writers.begin(), count.writers.end(), *process) == count.writers.end() &&
          sweep_temporary(ops_, directory, entry.name)) {
        continue;  // of one that is dead
      }
      if (entry.name != but) bytes += count_tree(ops_, directory, entry.name, options, stop_);
    }
  };
  each(open_.root.get(), open_.namespace_name);
  each(open_.namespace_directory.get(), layout::generation_name(own_generation));
  return bytes;
}

}  // namespace kv_offload
