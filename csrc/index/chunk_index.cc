// SPDX-License-Identifier: Apache-2.0
#include "index/chunk_index.h"

#include <algorithm>
#include <bit>
#include <cassert>
#include <deque>
#include <limits>
#include <utility>

#include "base/steps.h"
#include "base/table_vector.h"
#include "base/zeroed_memory.h"

namespace kv_offload {
namespace {

constexpr Slot kNoSlot = 0xFFFFFFFFu;
constexpr std::size_t kMinCells = 64;
constexpr std::size_t kRespareShare = 16;
constexpr std::int8_t kRetained = 2;  // added to a priority of -1 or 0: above 0

// The tag avoids loading the entry's cache line on a collision, and when cells move: a cell's home follows
// from its tag.
struct Cell {
  std::uint32_t tag;
  Slot slot;
};

int sign_of(std::int8_t priority) { return (priority > 0) - (priority < 0); }

}  // namespace

struct ChunkIndex::Impl {
  std::unique_ptr<EvictionPolicy> policy;
  TableVector<ChunkEntry> entries;
  Slot first_free = kNoSlot;  // a queue, linked by ChunkEntry::row
  Slot last_free = kNoSlot;
  ZeroedTable<Cell> cells;  // linear probing, at most half full
  // One byte per cell: 0 if empty, else a few bits of the hash. A missing key is detected from these alone,
  // which stay in the CPU cache with a million chunks.
  ZeroedTable<std::uint8_t> marks;
  std::size_t mask = 0;
  std::size_t size = 0;  // includes forgotten entries
  std::size_t forgotten = 0;
  std::size_t resident = 0;
  std::size_t pinned = 0;
  Slot last_found = 0;
  std::int8_t lowest_priority = std::numeric_limits<std::int8_t>::max();  // lowest of all entries so far
  std::uint32_t spared_holder = 0;  // argument of the last victim() call
  std::deque<Slot> spared;          // slots with entries[slot].spared
  std::size_t spared_taken = 0;     // spared entries that others took since the last release of all
  std::uint8_t epoch = 0;           // of the entries that are not forgotten
  unsigned forgotten_epochs = 0;    // epochs that forgotten entries may be of
  Slot next_checked = 0;            // by next_forgotten()
  std::vector<std::pair<Slot, std::int8_t>> raised;  // by raise_parents(): slots and their priorities before

  static std::uint64_t hash(const ChunkKey& key) { return ChunkKey::Hash{}(key); }
  static std::uint32_t tag(std::uint64_t hash) { return static_cast<std::uint32_t>(hash); }
  static std::uint8_t mark(std::uint64_t hash) { return static_cast<std::uint8_t>(hash >> 56) | 1; }
  std::size_t home(std::uint32_t tag) const { return tag & mask; }

  bool is_live(Slot slot) const {
    return entries[slot].state != ChunkState::kAbsent && entries[slot].epoch == epoch;
  }
  bool is_forgotten(Slot slot) const {
    return entries[slot].state != ChunkState::kAbsent && entries[slot].epoch != epoch;
  }
  bool is_at(Slot slot, const ChunkKey& key) const {
    return slot < entries.size() && entries[slot].key == key && is_live(slot);
  }
  // Returns the cell of a key, or the empty cell where it would be inserted.
  std::size_t locate(const ChunkKey& key, std::uint64_t hash) const {
    std::size_t at = home(tag(hash));
    for (; marks[at] != 0; at = (at + 1) & mask) {
      if (marks[at] != mark(hash) || cells[at].tag != tag(hash)) continue;
      if (entries[cells[at].slot].key == key) break;
    }
    return at;
  }
  void prefetch(std::uint64_t hash) const {
    const std::size_t at = home(tag(hash));
    __builtin_prefetch(&marks[at]);
    __builtin_prefetch(&cells[at]);
  }
  void fill_cell(std::size_t at, std::uint64_t hash, Slot slot) {
    cells[at] = Cell{tag(hash), slot};
    marks[at] = mark(hash);
  }
  void resize_table(std::size_t cell_count) {
    ZeroedTable<Cell> more_cells(cell_count);
    ZeroedTable<std::uint8_t> more_marks(cell_count);
    cells.swap(more_cells);
    marks.swap(more_marks);
    mask = cell_count - 1;
    for (Slot slot = 0; slot < entries.size(); ++slot) {
      if (entries[slot].state != ChunkState::kAbsent) place(slot);
    }
    count_steps(entries.size());
  }
  void place(Slot slot) {
    const std::uint64_t h = hash(entries[slot].key);
    fill_cell(locate(entries[slot].key, h), h, slot);
  }
  // Moves later cells of the run back into the hole: no tombstones.
  void remove_cell(std::size_t hole) {
    for (std::size_t at = (hole + 1) & mask; marks[at] != 0; at = (at + 1) & mask) {
      const std::size_t ideal = home(cells[at].tag);
      if (((at - ideal) & mask) >= ((at - hole) & mask)) {
        cells[hole] = cells[at];
        marks[hole] = marks[at];
        hole = at;
      }
    }
    marks[hole] = 0;
  }
  Slot take_slot() {
    if (first_free == kNoSlot) {
      entries.emplace_back();
      return static_cast<Slot>(entries.size() - 1);
    }
    const Slot slot = first_free;
    first_free = entries[slot].row;
    if (first_free == kNoSlot) last_free = kNoSlot;
    return slot;
  }
  void give_slot(Slot slot) {
    entries[slot].row = kNoSlot;
    (last_free == kNoSlot ? first_free : entries[last_free].row) = slot;
    last_free = slot;
  }
  // Returns the entry with this id, or kNoSlot. (An id is the hash except for its lowest bit.)
  Slot slot_of(ChunkId id) const {
    for (const std::uint64_t hash : {id, id & ~ChunkId{1}}) {
      for (std::size_t at = home(tag(hash)); marks[at] != 0; at = (at + 1) & mask) {
        if (cells[at].tag == tag(hash) && chunk_id(entries[cells[at].slot].key) == id) return cells[at].slot;
      }
    }
    return kNoSlot;
  }
  // Returns the entry before this one in its prefix, or kNoSlot. It is usually in a neighbouring slot.
  Slot parent_of(Slot slot) const {
    const ChunkId id = entries[slot].parent;
    if (id == 0) return kNoSlot;
    for (const Slot guess : {slot - 1, slot + 1}) {
      if (guess >= entries.size() || !is_live(guess)) continue;
      if (chunk_id(entries[guess].key) == id) return guess;
    }
    const Slot slot_of_id = slot_of(id);
    return slot_of_id != kNoSlot && is_live(slot_of_id) ? slot_of_id : kNoSlot;
  }
  // Raises the entries before this one to at least this priority. If all priorities are equal, no lookup
  // happens. If memory runs out, throws, and no priority has changed.
  void raise_parents(Slot slot, std::int8_t priority) {
    if (priority <= lowest_priority) return;
    raised.clear();
    try {
      for (slot = parent_of(slot); slot != kNoSlot && entries[slot].priority < priority;
           slot = parent_of(slot)) {
        raised.emplace_back(slot, entries[slot].priority);
        entries[slot].priority = priority;
      }
      // Not a hit: the policy only moves the entry up to that level.
      for (const auto& [at, before] : raised) {
        if (sign_of(priority) > sign_of(before) && entries[at].state == ChunkState::kResident)
          policy->access(at, entry_info(entries[at]));
      }
    } catch (...) {
      // Also those that the policy has moved: so the next call finds them again.
      for (const auto& [at, before] : raised) entries[at].priority = before;
      throw;
    }
  }
  // Spares the entry and all entries before it in its prefix. REQUIRES: the entry is the policy's victim.
  void spare(Slot slot) {
    for (; slot != kNoSlot && !entries[slot].spared; slot = parent_of(slot)) {
      count_steps(1);
      spared.push_back(slot);  // first, because it may throw
      entries[slot].spared = true;
      if (entries[slot].pins == 0) policy->pin(slot);
    }
  }
  void release(Slot slot) {
    count_steps(1);
    entries[slot].spared = false;
    if (entries[slot].pins == 0) policy->unpin(slot);
  }
  // From last to first, so that the entries of one prompt keep their order.
  void release_spared() {
    for (; !spared.empty(); spared.pop_back()) release(spared.back());
    spared_taken = 0;
  }
  // False right after all were spared. With a restricted policy a holder may find no victim in each of many
  // calls, while others take its spared entries one by one. Then all are spared again only after several were
  // taken, so that each call costs O(1) on average.
  bool may_respare() const {
    return spared_taken > 0 && (!policy->is_restricted() || kRespareShare * spared_taken >= spared.size());
  }
  // Returns the first spared entries without pins, at most `most`. Looks at a few times as many.
  std::vector<Slot> first_spared(std::size_t most) const {
    std::vector<Slot> first;
    const std::size_t end = std::min(spared.size(), 4 * most);
    for (std::size_t i = 0; i < end && first.size() < most; ++i) {
      count_steps(1);
      if (entries[spared[i]].pins == 0) first.push_back(spared[i]);
    }
    return first;
  }
  // Returns the next victim for a request other than the holder that entries are spared for: the first spared
  // entry, which was the next victim when it was spared.
  std::optional<Slot> victim_excluding_spared() {
    while (!spared.empty()) {
      const Slot slot = spared.front();
      spared.pop_front();
      release(slot);
      ++spared_taken;
      if (entries[slot].pins > 0) continue;
      if (const std::optional<Slot> victim = policy->victim()) return victim;
    }
    return std::nullopt;
  }
};

ChunkIndex::ChunkIndex(std::unique_ptr<EvictionPolicy> policy, std::size_t capacity)
    : impl_(std::make_unique<Impl>()), entries_(&impl_->entries), forgotten_(&impl_->forgotten) {
  impl_->policy = std::move(policy);
  impl_->entries.reserve(capacity);
  impl_->resize_table(std::bit_ceil(std::max(kMinCells, 2 * capacity)));
}

ChunkIndex::~ChunkIndex() = default;

ChunkEntry* ChunkIndex::find(const ChunkKey& key) {
  Impl& impl = *impl_;
  for (const Slot guess : {impl.last_found + 1, impl.last_found - 1}) {
    if (impl.is_at(guess, key)) {
      impl.last_found = guess;
      return &impl.entries[guess];
    }
  }
  const std::size_t at = impl.locate(key, Impl::hash(key));
  if (impl.marks[at] == 0) return nullptr;
  const Slot slot = impl.cells[at].slot;
  if (!impl.is_live(slot)) return nullptr;
  impl.last_found = slot;
  return &impl.entries[slot];
}

void ChunkIndex::prefetch(const ChunkKey& key) const { impl_->prefetch(Impl::hash(key)); }

void ChunkIndex::prefetch(Slot slot) const { impl_->policy->prefetch(chunk_id(impl_->entries[slot].key)); }

void ChunkIndex::prefetch_erase(Slot slot) const {
  const ChunkEntry& entry = impl_->entries[slot];
  // An id is the hash except for its lowest bit, so the cells are adjacent.
  for (const ChunkId id : {chunk_id(entry.key), entry.parent}) {
    impl_->prefetch(id);
    impl_->policy->prefetch(id);
  }
}

Slot ChunkIndex::insert(const ChunkKey& key, std::uint32_t group, RowId row, const EntryInfo& entry_info,
                        ChunkState state) {
  Impl& impl = *impl_;
  assert(state == ChunkState::kFilling || state == ChunkState::kFetching);
  if (2 * (impl.size + 1) > impl.cells.size()) impl.resize_table(2 * impl.cells.size());
  const std::uint64_t hash = Impl::hash(key);
  const std::size_t at = impl.locate(key, hash);
  assert(impl.marks[at] == 0);
  const Slot slot = impl.take_slot();
  ChunkEntry& entry = impl.entries[slot];
  entry = ChunkEntry{};
  entry.key = key;
  entry.row = row;
  entry.pins = 1;
  entry.parent = entry_info.parent;
  entry.depth = entry_info.depth;
  entry.holder = entry_info.request;
  entry.group = static_cast<std::uint8_t>(group);
  entry.priority = entry_info.priority;
  entry.tenant = entry_info.tenant;
  entry.state = state;
  entry.epoch = impl.epoch;
  try {
    impl.raise_parents(slot, entry_info.priority);
  } catch (...) {
    entry = ChunkEntry{};
    impl.give_slot(slot);
    throw;
  }
  impl.fill_cell(at, hash, slot);
  ++impl.size;
  ++impl.pinned;
  impl.lowest_priority = std::min(impl.lowest_priority, entry_info.priority);
  return slot;
}

void ChunkIndex::make_resident(Slot slot, ChunkOrigin origin) {
  ChunkEntry& entry = impl_->entries[slot];
  assert(entry.state == ChunkState::kFilling || entry.state == ChunkState::kFetching);
  assert(entry.pins > 0);
  impl_->policy->insert(slot, entry_info(entry));  // first, because it may throw
  entry.state = ChunkState::kResident;
  entry.origin = origin;
  ++impl_->resident;
  if (--entry.pins == 0) --impl_->pinned;
  if (entry.pins > 0 || entry.spared) impl_->policy->pin(slot);
}

void ChunkIndex::erase(Slot slot) {
  Impl& impl = *impl_;
  ChunkEntry& entry = impl.entries[slot];
  assert(entry.state != ChunkState::kAbsent);
  const bool live = impl.is_live(slot);
  assert(!live || entry.pins == (entry.state == ChunkState::kResident ? 0u : 1u));
  if (live && entry.spared) impl.release_spared();
  if (entry.state == ChunkState::kResident) impl.policy->erase(slot);
  impl.resident -= live && entry.state == ChunkState::kResident;
  impl.pinned -= live && entry.pins > 0;
  impl.forgotten -= !live;
  impl.remove_cell(impl.locate(entry.key, Impl::hash(entry.key)));
  entry = ChunkEntry{};
  impl.give_slot(slot);
  --impl.size;
}

void ChunkIndex::forget() {
  Impl& impl = *impl_;
  assert(may_forget());
  if (impl.forgotten == 0) impl.forgotten_epochs = 0;
  if (impl.size == impl.forgotten) return;
  impl.epoch = (impl.epoch + 1) % (kMostEpochs + 1);
  ++impl.forgotten_epochs;
  impl.forgotten = impl.size;
  impl.resident = impl.pinned = 0;
  // The policy need not know: spared entries stay pinned in it until they are erased.
  impl.spared.clear();
  impl.spared_taken = 0;
}

bool ChunkIndex::may_forget() const { return impl_->forgotten == 0 || impl_->forgotten_epochs < kMostEpochs; }

bool ChunkIndex::is_forgotten(Slot slot) const { return impl_->is_forgotten(slot); }

std::optional<Slot> ChunkIndex::find_forgotten(const ChunkKey& key) const {
  const std::size_t at = impl_->locate(key, Impl::hash(key));
  if (impl_->marks[at] == 0 || !impl_->is_forgotten(impl_->cells[at].slot)) return std::nullopt;
  return impl_->cells[at].slot;
}

std::optional<Slot> ChunkIndex::next_forgotten() {
  Slot& next = impl_->next_checked;
  if (next >= impl_->entries.size()) next = 0;
  if (impl_->is_forgotten(next)) return next;
  ++next;
  return std::nullopt;
}

void ChunkIndex::set_recorded(Slot slot, bool recorded) {
  ChunkEntry& entry = impl_->entries[slot];
  assert(entry.state == ChunkState::kResident);
  if (entry.recorded == recorded) return;
  entry.recorded = recorded;
  impl_->policy->set_recorded(slot, recorded);
}

void ChunkIndex::pin(Slot slot) {
  ChunkEntry& entry = impl_->entries[slot];
  assert(entry.state != ChunkState::kAbsent);
  if (entry.pins++ > 0) return;
  ++impl_->pinned;
  if (!entry.spared) impl_->policy->pin(slot);
}

void ChunkIndex::unpin(Slot slot) {
  ChunkEntry& entry = impl_->entries[slot];
  assert(entry.pins > (entry.state == ChunkState::kResident ? 0u : 1u));
  if (--entry.pins > 0) return;
  --impl_->pinned;
  if (!entry.spared) impl_->policy->unpin(slot);
}

void ChunkIndex::access(Slot slot, std::uint32_t request, std::int8_t priority, TenantId tenant) {
  ChunkEntry& entry = impl_->entries[slot];
  if (entry.spared && request != impl_->spared_holder) impl_->release_spared();
  if (entry.retained) end_retention(slot, priority);
  EntryInfo info = entry_info(entry);
  info.request = request;
  info.priority = std::max(entry.priority, priority);
  info.returns_at = 0;
  info.tenant = tenant;
  // Calls that may throw come first: then the entry is unchanged.
  if (entry.state == ChunkState::kResident) impl_->policy->access(slot, info);
  entry.tenant = tenant;
  impl_->raise_parents(slot, info.priority);
  entry.holder = request;
  entry.priority = info.priority;
  entry.returns_at = 0;
}

void ChunkIndex::refresh(Slot slot) {
  const ChunkEntry& entry = impl_->entries[slot];
  assert(entry.state == ChunkState::kResident);
  impl_->policy->refresh(slot, entry_info(entry));
}

void ChunkIndex::retain(Slot slot) {
  ChunkEntry& entry = impl_->entries[slot];
  assert(entry.state == ChunkState::kResident);
  if (entry.priority > 0) return;
  EntryInfo info = entry_info(entry);
  info.priority = static_cast<std::int8_t>(entry.priority + kRetained);
  // Not a hit: moves the entry up to that level. First, because it may throw.
  impl_->policy->access(slot, info);
  entry.retained = true;
  entry.priority = info.priority;
}

void ChunkIndex::end_retention(Slot slot, std::int8_t priority) {
  ChunkEntry& entry = impl_->entries[slot];
  assert(entry.state == ChunkState::kResident);
  if (!entry.retained) return;
  EntryInfo info = entry_info(entry);
  // Not below the priority from before, which other requests may have given it.
  info.priority = std::max(priority, static_cast<std::int8_t>(entry.priority - kRetained));
  if (info.priority <= 0) impl_->policy->set_priority(slot, info);  // first, because it may throw
  entry.retained = false;
  entry.priority = info.priority;
  impl_->lowest_priority = std::min(impl_->lowest_priority, entry.priority);
}

void ChunkIndex::set_return(Slot slot, double returns_at) {
  ChunkEntry& entry = impl_->entries[slot];
  assert(entry.state != ChunkState::kAbsent);
  const auto rounded = static_cast<float>(returns_at);
  if (std::exchange(entry.returns_at, rounded) == rounded) return;
  if (entry.state == ChunkState::kResident) impl_->policy->set_return(slot, returns_at, chunk_id(entry.key));
}

void ChunkIndex::set_now(double seconds) { impl_->policy->set_now(seconds); }

std::optional<Slot> ChunkIndex::find(ChunkId id) const {
  const Slot slot = impl_->slot_of(id);
  return slot == kNoSlot || !impl_->is_live(slot) ? std::nullopt : std::optional(slot);
}

std::optional<Slot> ChunkIndex::parent_of(Slot slot) const {
  const Slot parent = impl_->parent_of(slot);
  return parent == kNoSlot ? std::nullopt : std::optional(parent);
}

std::optional<Slot> ChunkIndex::victim(std::uint32_t spared_holder) {
  Impl& impl = *impl_;
  const auto may_evict = [&](Slot slot) {
    return spared_holder == 0 || impl.entries[slot].holder != spared_holder || impl.is_forgotten(slot);
  };
  if (spared_holder != impl.spared_holder) {
    const std::optional<Slot> victim = impl.victim_excluding_spared();
    if (victim && may_evict(*victim)) return victim;
    impl.release_spared();
    impl.spared_holder = spared_holder;
  }
  for (;;) {
    const std::optional<Slot> victim = impl.policy->victim();
    if (!victim && impl.may_respare()) {
      impl.release_spared();  // some may no longer precede an entry of this holder
      continue;
    }
    if (!victim || may_evict(*victim)) return victim;
    impl.spare(*victim);
  }
}

std::vector<Slot> ChunkIndex::next_victims(std::size_t most) {
  EvictionPolicy& policy = *impl_->policy;
  std::vector<Slot> next;
  if (impl_->forgotten > 0) return next;
  next.reserve(std::min(most, impl_->resident));
  // The first spared entries were the next victims when they were spared. They stay spared, but until the end
  // of this call the policy considers them again. (From last to first, as in release_spared().)
  const std::vector<Slot> considered = impl_->first_spared(most);
  for (std::size_t i = considered.size(); i-- > 0;) policy.unpin(considered[i]);
  while (next.size() < most) {
    const std::optional<Slot> victim = policy.victim();
    if (!victim) break;
    policy.set_aside(*victim);
    next.push_back(*victim);
  }
  for (std::size_t i = next.size(); i-- > 0;) policy.put_back(next[i]);
  for (const Slot slot : considered) policy.pin(slot);
  return next;
}

std::size_t ChunkIndex::size() const { return impl_->size - impl_->forgotten; }
std::size_t ChunkIndex::resident() const { return impl_->resident; }
std::size_t ChunkIndex::pinned() const { return impl_->pinned; }

void ChunkIndex::for_each(const std::function<void(Slot, ChunkEntry&)>& visit) {
  for (Slot slot = 0; slot < impl_->entries.size(); ++slot) {
    if (impl_->is_live(slot)) visit(slot, impl_->entries[slot]);
  }
}

}  // namespace kv_offload
