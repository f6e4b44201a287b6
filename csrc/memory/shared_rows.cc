// SPDX-License-Identifier: Apache-2.0
#include "memory/shared_rows.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <new>
#include <random>

#include "base/status.h"
#include "base/xxh3.h"

namespace kv_offload {
namespace {

constexpr std::uint64_t kRowsMagic = 0x6B765F7368617234;  // "kv_shar4": the last character is the version
constexpr std::size_t kKeyWords = sizeof(ChunkKey) / 8;
constexpr std::uint64_t kEntryBytes = 80;
constexpr std::uint64_t kBucketBytes = 8;
constexpr std::uint64_t kFilter = ~std::uint64_t{0} << SharedRowsFilter::kShift;  // of a bucket
constexpr unsigned kMostSteps = 256;   // of a chain; with a bucket per row, chains of more than 8 are rare
constexpr unsigned kDenseFilter = 12;  // bits; four keys have at most as many

static_assert(sizeof(ChunkKey) % 8 == 0);
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

XXH128_hash_t digest_of(const SharedRowsLayout& layout, std::string_view identity) {
  const std::string all = fmt::format("{} {} {}", layout.area_bytes, layout.row_bytes, identity);
  return XXH3_128bits(all.data(), all.size());
}

std::uint64_t word_of(const ChunkKey& key, std::size_t i) {
  std::uint64_t word;
  std::memcpy(&word, reinterpret_cast<const std::byte*>(&key) + 8 * i, sizeof(word));
  return word;
}

std::array<std::uint64_t, kKeyWords> words_of(const ChunkKey& key) {
  return std::bit_cast<std::array<std::uint64_t, kKeyWords>>(key);
}

// True if a filter has more than kDenseFilter bits. x86_64's baseline has no instruction that counts bits,
// and the compiler's function is slower.
bool is_dense(std::uint64_t filter) {
  auto bits = static_cast<std::uint32_t>(filter >> SharedRowsFilter::kShift);
  bits -= bits >> 1 & 0x55555555u;
  bits = (bits & 0x33333333u) + (bits >> 2 & 0x33333333u);
  bits = (bits + (bits >> 4)) & 0x0F0F0F0Fu;
  return bits * 0x01010101u >> 24 > kDenseFilter;
}

void clear_bit(std::atomic<std::uint64_t>& pins, unsigned reader) {
  const std::uint64_t bit = std::uint64_t{1} << reader;
  if ((pins.load(std::memory_order_relaxed) & bit) != 0) pins.fetch_and(~bit, std::memory_order_seq_cst);
}

}  // namespace

struct SharedRows::Header {
  std::atomic<std::uint64_t> magic;
  XXH128_hash_t identity;
  std::uint64_t row_bytes, row_sizes;  // of the layout
  std::uint64_t id;
  // The number of this opening; 0: readers may not pin rows.
  std::atomic<std::uint64_t> open;
  // Of rows and openings. Continued by the next owner of the region. In a cache line of its own: readers poll
  // `open`.
  alignas(64) std::atomic<std::uint64_t> last_version;
};

struct SharedRows::Entry {
  // A reader needs only these two to follow a chain past the entry. They share a cache line.
  Word version;
  std::atomic<std::uint32_t> next;
  // Previous entry of the chain plus one; 0: the bucket links to this entry. Read only by the owner, which
  // removes an entry without walking the chain: its entries are seldom in the CPU's cache.
  std::uint32_t previous;
  std::array<Word, kKeyWords> key;
  Word place;  // row, depth
  std::atomic<std::uint32_t> group;
  std::uint32_t bucket;  // read only by the owner
};

SharedRowsLayout SharedRowsLayout::of(std::uint64_t area_bytes, std::uint64_t row_bytes) {
  SharedRowsLayout layout;
  layout.area_bytes = area_bytes;
  layout.row_bytes = row_bytes;
  layout.capacity = static_cast<std::uint32_t>(area_bytes / row_bytes);
  layout.buckets = std::bit_ceil(std::max<std::uint32_t>(layout.capacity, 1));
  layout.buckets_offset = kPageBytes + round_up(layout.capacity * std::uint64_t{8}, kPageBytes);
  layout.entries_offset = layout.buckets_offset + round_up(layout.buckets * kBucketBytes, kPageBytes);
  layout.bytes = layout.entries_offset + round_up(layout.capacity * kEntryBytes, kPageBytes);
  return layout;
}

SharedRows::SharedRows(std::span<std::byte> memory, const SharedRowsLayout& layout, std::string_view identity)
    : layout_(layout),
      divide_(static_cast<std::uint32_t>(layout.row_bytes / kPageBytes)),
      memory_(memory.data()),
      pins_(std::launder(reinterpret_cast<Word*>(memory_ + kPageBytes))),
      buckets_(std::launder(reinterpret_cast<Word*>(memory_ + layout.buckets_offset))),
      entries_(std::launder(reinterpret_cast<Entry*>(memory_ + layout.entries_offset))) {
  static_assert(sizeof(Header) <= kPageBytes && sizeof(Entry) == kEntryBytes);
  if (memory.size() != layout.bytes) {
    throw_invalid("{} bytes were given for the shared rows; they need {}", memory.size(), layout.bytes);
  }
  auto* header = std::launder(reinterpret_cast<Header*>(memory_));
  last_version_ = header->last_version.load();
  // A kill between any two of these stores leaves a table that the next owner treats like this one.
  header->open.store(0, std::memory_order_seq_cst);
  if (header->magic.load() == kRowsMagic && !has_other_layout(memory, layout_)) {
    // An earlier owner's entries: first no reader accepts any of them, then they are removed.
    std::memset(memory_ + layout_.buckets_offset, 0, layout_.entries_offset - layout_.buckets_offset);
    for (std::uint32_t i = 0; i < layout_.capacity; ++i) (void)at(i).withdraw();
  } else {
    header->magic.store(0, std::memory_order_seq_cst);
    std::memset(memory_ + kPageBytes, 0, layout_.bytes - kPageBytes);
    std::random_device random;
    header->id = std::uint64_t{random()} << 32 | random();
  }
  header->identity = digest_of(layout_, identity);
  header->row_bytes = layout_.row_bytes;
  header->row_sizes = layout_.row_sizes;
  header->last_version.store(++last_version_, std::memory_order_seq_cst);
  header->magic.store(kRowsMagic, std::memory_order_release);
  header->open.store(last_version_, std::memory_order_seq_cst);
}

std::uint64_t SharedRows::id() const { return std::launder(reinterpret_cast<const Header*>(memory_))->id; }

bool SharedRows::has_other_layout(std::span<const std::byte> memory, const SharedRowsLayout& layout) {
  const auto* header = std::launder(reinterpret_cast<const Header*>(memory.data()));
  if (header->magic.load() == 0) return false;  // no reader has accepted what is there
  return header->magic.load() != kRowsMagic || header->row_bytes != layout.row_bytes ||
         header->row_sizes != layout.row_sizes;
}

SharedRow<SharedRows::Word> SharedRows::at(std::uint32_t index) const {
  return {entries_[index].version, pins_[index]};
}

void SharedRows::publish(const Row& row) {
  const std::uint32_t index = index_of(row.row);
  Entry& entry = entries_[index];
  // A reader that sees one of the new words also sees that the old version was cleared: each word is stored
  // with release and loaded with acquire (ThreadSanitizer does not support fences).
#pragma GCC unroll 6
  for (std::size_t i = 0; i < kKeyWords; ++i)
    entry.key[i].store(word_of(row.key, i), std::memory_order_release);
  entry.place.store(std::uint64_t{row.depth} << 32 | row.row, std::memory_order_release);
  entry.group.store(row.group, std::memory_order_release);
  const std::uint64_t hash = ChunkKey::Hash{}(row.key);
  Word& bucket = bucket_of(hash);
  const std::uint64_t before = bucket.load(std::memory_order_relaxed);
  auto next = static_cast<std::uint32_t>(before);
  if (Entry* following = linked(next)) {
    following->previous = index + 1;
  } else {
    next = 0;
  }
  entry.next.store(next, std::memory_order_relaxed);
  entry.previous = 0;
  entry.bucket = static_cast<std::uint32_t>(hash) & (layout_.buckets - 1);
  auto* header = std::launder(reinterpret_cast<Header*>(memory_));
  header->last_version.store(++last_version_, std::memory_order_relaxed);
  at(index).publish(last_version_);
  std::uint64_t filter = before & kFilter;
  if (next != 0 && is_dense(filter)) filter = filter_of(next).value_or(filter);
  bucket.store(filter | SharedRowsFilter::bits_of(hash) | (index + 1), std::memory_order_release);
}

// Another process of this user may have damaged the table.
SharedRows::Entry* SharedRows::linked(std::uint32_t link) const {
  if (link == 0 || link > layout_.capacity) return nullptr;
  return entries_ + (link - 1);
}

std::optional<std::uint64_t> SharedRows::filter_of(std::uint32_t link) const {
  std::uint64_t filter = 0;
  for (unsigned step = 0; step < kMostSteps; ++step) {
    const Entry* entry = linked(link);
    if (entry == nullptr) return filter;
    std::array<std::uint64_t, kKeyWords> words;
    for (std::size_t i = 0; i < kKeyWords; ++i) words[i] = entry->key[i].load(std::memory_order_relaxed);
    const auto key = std::bit_cast<ChunkKey>(words);
    if (!ChunkKey::fits(key.size())) return std::nullopt;  // damaged: its hash would read outside of the key
    filter |= SharedRowsFilter::bits_of(ChunkKey::Hash{}(key));
    link = entry->next.load(std::memory_order_relaxed);
  }
  return std::nullopt;
}

bool SharedRows::withdraw(RowId row) {
  const std::uint32_t index = index_of(row);
  SharedRow<Word> shared = at(index);
  if (shared.version.load(std::memory_order_relaxed) == 0) return !shared.is_pinned();
  const bool is_free = shared.withdraw();
  unlink(index);
  // A prompt is evicted from its end, so the row before this one is probably next.
  if (index > 0) prefetch_links(index - 1);
  return is_free;
}

inline void SharedRows::prefetch_links(std::uint32_t index) const {
  const Entry& entry = entries_[index];
  if (const Entry* next = linked(entry.next.load(std::memory_order_relaxed))) __builtin_prefetch(next, 1);
  if (const Entry* previous = linked(entry.previous)) {
    __builtin_prefetch(previous, 1);
  } else {
    __builtin_prefetch(&bucket_of(entry.bucket), 1);
  }
}

inline void SharedRows::unlink(std::uint32_t index) {
  const Entry& entry = entries_[index];
  auto next = entry.next.load(std::memory_order_relaxed);
  if (Entry* following = linked(next)) {
    following->previous = entry.previous;
  } else {
    next = 0;
  }
  if (Entry* previous = linked(entry.previous)) {
    previous->next.store(next, std::memory_order_release);
    return;
  }
  Word& bucket = bucket_of(entry.bucket);
  const std::uint64_t filter = bucket.load(std::memory_order_relaxed) & kFilter;
  bucket.store(next == 0 ? 0 : filter | next, std::memory_order_release);
}

void SharedRows::prefetch(RowId row, const ChunkKey& key) const {
  const auto* entry = reinterpret_cast<const std::byte*>(entries_ + index_of(row));
  __builtin_prefetch(entry, 1);
  __builtin_prefetch(entry + kEntryBytes - 1, 1);
  __builtin_prefetch(&bucket_of(ChunkKey::Hash{}(key)), 1);
}

bool SharedRows::is_pinned(RowId row) const { return at(index_of(row)).is_pinned(); }

void SharedRows::for_each_pinned(const std::function<void(RowId, std::uint32_t)>& visit) const {
  const auto* entries = std::launder(reinterpret_cast<const Entry*>(memory_ + layout_.entries_offset));
  for (std::uint32_t i = 0; i < layout_.capacity; ++i) {
    if (!at(i).is_pinned()) continue;
    const auto row = static_cast<RowId>(entries[i].place.load(std::memory_order_relaxed));
    if (index_of(row) == i) visit(row, entries[i].group.load(std::memory_order_relaxed));
  }
}

bool SharedRows::take_use(RowId row) { return at(index_of(row)).take_use(); }

void SharedRows::close() {
  std::launder(reinterpret_cast<Header*>(memory_))->open.store(0, std::memory_order_seq_cst);
}

std::uint64_t SharedRows::readers(std::uint32_t first, std::uint32_t count) const {
  std::uint64_t all = 0;
  for (std::uint32_t i = first; i < first + count; ++i) all |= at(i).pins.load(std::memory_order_relaxed);
  return all & kReaderBits;
}

void SharedRows::clear_pins(unsigned reader, std::uint32_t first, std::uint32_t count) {
  for (std::uint32_t i = first; i < first + count; ++i) clear_bit(at(i).pins, reader);
}

// ---- readers

SharedRowsView::SharedRowsView(std::span<const std::byte> table, std::span<std::byte> pins,
                               const SharedRowsLayout& layout, std::string_view identity)
    : layout_(layout),
      row_pages_(static_cast<std::uint32_t>(layout.row_bytes / kPageBytes)),
      table_(table.data()),
      pins_(pins.data()) {
  if (table.size() < layout.bytes || pins.size() < layout.capacity * std::uint64_t{8}) {
    throw_resource("its table of rows has {} bytes, not {}", table.size(), layout.bytes);
  }
  const auto* header = std::launder(reinterpret_cast<const SharedRows::Header*>(table_));
  // First: while this number is the current one, everything that is read below is of the same owner.
  opening_ = header->open.load(std::memory_order_seq_cst);
  const std::uint64_t magic = header->magic.load(std::memory_order_acquire);
  if (magic != kRowsMagic && magic >> 8 == kRowsMagic >> 8)
    throw_resource("its table of rows has another format: it runs another version of vllm-kv-offload");
  if (magic != kRowsMagic) throw_resource("it has no table of rows");
  if (!XXH128_isEqual(header->identity, digest_of(layout, identity))) {
    throw_resource("its rows have another size or belong to another namespace");
  }
}

SharedRowsView::Word& SharedRowsView::pins_of(std::uint32_t index) const {
  return std::launder(reinterpret_cast<Word*>(pins_))[index];
}

const SharedRows::Entry& SharedRowsView::entry(std::uint32_t index) const {
  return std::launder(reinterpret_cast<const SharedRows::Entry*>(table_ + layout_.entries_offset))[index];
}

bool SharedRowsView::is_open() const {
  const auto* header = std::launder(reinterpret_cast<const SharedRows::Header*>(table_));
  return opening_ != 0 && header->open.load(std::memory_order_seq_cst) == opening_;
}

const SharedRowsView::Word& SharedRowsView::bucket_of(std::uint64_t hash) const {
  const auto* buckets = std::launder(reinterpret_cast<const Word*>(table_ + layout_.buckets_offset));
  return buckets[hash & (layout_.buckets - 1)];
}

SharedRowsFilter SharedRowsView::filter() const { return {&bucket_of(0), layout_.buckets}; }

std::optional<SharedRowsView::Found> SharedRowsView::find(const ChunkKey& key) const {
  const std::uint64_t hash = ChunkKey::Hash{}(key);
  const std::uint64_t chain = bucket_of(hash).load(std::memory_order_acquire);
  const std::uint64_t bits = SharedRowsFilter::bits_of(hash);
  if ((chain & bits) != bits || !is_open()) return std::nullopt;  // the filter excludes the key
  const auto words = words_of(key);
  auto link = static_cast<std::uint32_t>(chain);
  for (unsigned step = 0; link != 0 && step < kMostSteps; ++step) {
    const std::uint32_t index = link - 1;
    if (index >= layout_.capacity) return std::nullopt;  // damaged
    const SharedRows::Entry& found = entry(index);
    link = found.next.load(std::memory_order_acquire);
    const std::uint64_t version = found.version.load(std::memory_order_acquire);
    if (version == 0) continue;  // withdrawn
    bool is_equal = true;
    for (std::size_t i = 0; i < kKeyWords && is_equal; ++i)
      is_equal = found.key[i].load(std::memory_order_acquire) == words[i];
    if (!is_equal) continue;
    const std::uint64_t place = found.place.load(std::memory_order_acquire);
    const std::uint32_t group = found.group.load(std::memory_order_acquire);
    // The owner has changed the entry meanwhile, so its parts may not belong together.
    if (found.version.load(std::memory_order_relaxed) != version) continue;
    // Each entry has its own row: another number is damage, and may be outside of the rows.
    const auto row = static_cast<RowId>(place);
    if (row / row_pages_ != index || group > 0xFF) return std::nullopt;
    return Found{row, static_cast<std::uint32_t>(place >> 32), static_cast<std::uint8_t>(group), version};
  }
  return std::nullopt;
}

bool SharedRowsView::pin(unsigned reader, const Found& found) {
  const std::uint32_t index = found.row / row_pages_;
  const SharedRows::Entry& there = entry(index);
  // SharedRow only reads the version here; the page may be mapped read-only.
  SharedRow<Word> shared{const_cast<Word&>(there.version), pins_of(index)};
  if (!shared.pin(reader, found.version)) return false;
  // The owner closes the table first and then reads the pins of a row before it reuses the row.
  if (is_open()) return true;
  shared.unpin(reader);
  return false;
}

void SharedRowsView::unpin(unsigned reader, RowId row) {
  Word& pins = pins_of(row / row_pages_);
  pins.fetch_or(kUsedByReader, std::memory_order_relaxed);
  pins.fetch_and(~(std::uint64_t{1} << reader), std::memory_order_seq_cst);
}

void SharedRowsView::mark_used(RowId row) {
  const std::uint32_t index = row / row_pages_;
  SharedRow<Word>{const_cast<Word&>(entry(index).version), pins_of(index)}.mark_used();
}

void SharedRowsView::clear_pins(unsigned reader) {
  for (std::uint32_t i = 0; i < layout_.capacity; ++i) clear_bit(pins_of(i), reader);
}

}  // namespace kv_offload
