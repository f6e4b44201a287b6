#include "storage/fs/store.h"

#include <fmt/core.h>

#include <cstdio>

#include "storage/fs/layout.h"

namespace kv_offload {
namespace {

FsTierOptions with_defaults(FsTierOptions options) {
  if (!options.warn)
    options.warn = [](const std::string& line) { fmt::print(stderr, "kv_offload: {}\n", line); };
  return options;
}

}  // namespace

FsStore::FsStore(const FsTierOptions& options, FileOps& ops, const Clock& clock)
    : options_(with_defaults(options)),
      ops_(ops),
      clock_(clock),
      open_(open_root(options_, ops)),
      staging_(clock),
      catalogue_(options.eviction_policy),
      generation_(std::move(open_.generation)),
      leaf_states_(layout::kLeaves, LeafState::kUnknown),
      leaf_bytes_(layout::kLeaves, 0),
      last_write_back_(clock.now()),
      known_(open_.fresh ? Known::kOrder : Known::kSome) {}

FsStore::~FsStore() = default;

void FsStore::close() {
  open_.space->close();
  open_.open_mark.reset();
  const MutexLock lock(mutex_);
  generation_.reset();  // and its lock
}

std::shared_ptr<Generation> FsStore::generation() const {
  const MutexLock lock(mutex_);
  return generation_;
}

Presence FsStore::contains(const ChunkKey& key) const {
  const Nanos now = clock_.now();
  const MutexLock lock(mutex_);
  if (catalogue_.offers(key, now)) return Presence::kPresent;
  if (known_.load(std::memory_order_relaxed) != Known::kSome || catalogue_.holds(key))
    return Presence::kAbsent;
  return leaf_states_[layout::leaf_of(key)] == LeafState::kKnown ? Presence::kAbsent : Presence::kUnknown;
}

void FsStore::begin_asking(std::vector<ChunkKey>* keys) {
  std::vector<ChunkKey> asked;  // one of each directory
  const MutexLock lock(mutex_);
  for (const ChunkKey& key : *keys) {
    LeafState& state = leaf_states_[layout::leaf_of(key)];
    if (known_.load(std::memory_order_relaxed) != Known::kSome || state != LeafState::kUnknown) continue;
    state = LeafState::kAsking;
    asked.push_back(key);
  }
  keys->swap(asked);
}

void FsStore::give_up_asking(std::span<const ChunkKey> keys) {
  const MutexLock lock(mutex_);
  for (const ChunkKey& key : keys) leaf_states_[layout::leaf_of(key)] = LeafState::kKnown;
}

void FsStore::touch(const ChunkKey& key) {
  const Nanos now = clock_.now();
  const MutexLock lock(mutex_);
  catalogue_.touch(key, now);
}

void FsStore::forget() {
  was_reset_.store(true);
  apart_.store(false);
  drop_generation();
}

void FsStore::drop_generation() {
  const MutexLock lock(mutex_);
  for (const ChunkKey& key : catalogue_.clear()) removals_.push_back({key, TierRemoval::Reason::kReset});
  if (generation_) least_generation_ = generation_->number + 1;
  generation_.reset();
  leaf_states_.assign(layout::kLeaves, LeafState::kKnown);  // nothing to be found until there is one
}

bool FsStore::set_generation(std::shared_ptr<Generation> generation, bool by_reset) {
  const MutexLock lock(mutex_);
  if (was_reset_.load() != by_reset) return false;
  open_.space->share_as(sharer(open_.namespace_name, generation->number));
  generation_ = std::move(generation);
  leaf_bytes_.assign(layout::kLeaves, 0);
  durable_leaves_.clear();
  leaf_states_.assign(layout::kLeaves, LeafState::kKnown);
  known_.store(Known::kOrder);
  return true;
}

void FsStore::take_removals(std::vector<TierRemoval>* removals) {
  const MutexLock lock(mutex_);
  removals->insert(removals->end(), removals_.begin(), removals_.end());
  removals_.clear();
}

void FsStore::figures(TierStats* stats) const {
  stats->bytes = open_.space->total();
  stats->capacity_bytes = options_.max_bytes;
  stats->evicted_bytes = evicted_bytes_.load();
  stats->direct_ops = direct_ops_.load();
  stats->buffered_ops = buffered_ops_.load();
  stats->names_complete = known_.load() != Known::kSome;
  stats->scan_complete = known_.load() == Known::kOrder;
  stats->apart = apart_.load();
  const MutexLock lock(mutex_);
  stats->chunks = catalogue_.size();
}

}  // namespace kv_offload
