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

constexpr std::size_t kKeyWords = sizeof(ChunkKey) / 8;
constexpr std::uint64_t kEntryBytes = 64;
constexpr std::uint64_t kLinkBytes = 16;
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

// The first page of a row within the rows' smallest size (24 bits), its group (8) and its depth (32).
std::uint64_t place_of(std::uint32_t page, std::uint8_t group, std::uint32_t depth) {
  return std::uint64_t{depth} << 32 | std::uint64_t{group} << 24 | page;
}
std::uint32_t page_of(std::uint64_t place) { return static_cast<std::uint32_t>(place) & 0xFFFFFFu; }
std::uint8_t group_of(std::uint64_t place) { return static_cast<std::uint8_t>(place >> 24); }
std::uint32_t depth_of(std::uint64_t place) { return static_cast<std::uint32_t>(place >> 32); }

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

struct SharedRows::Link {
  std::atomic<std::uint32_t> next;
  // The rest is read only by the owner. `previous`: of the chain, plus one; 0: the bucket links to this
  // entry. So the owner removes an entry without walking the chain.
  std::uint32_t previous;
  std::uint32_t bucket;
  std::uint32_t filter_bits;  // of the key, in the high half of a bucket
};

struct SharedRows::Entry {
  Word version;
  Word place;  // see place_of()
  std::array<Word, kKeyWords> key;
};

SharedRowsLayout SharedRowsLayout::of(std::uint64_t area_bytes, std::uint64_t row_bytes) {
  SharedRowsLayout layout;
  layout.area_bytes = area_bytes;
  layout.row_bytes = row_bytes;
  layout.capacity = static_cast<std::uint32_t>(area_bytes / row_bytes);
  layout.buckets = std::bit_ceil(std::max<std::uint32_t>(layout.capacity, 1));
  layout.buckets_offset = kPageBytes + round_up(layout.capacity * std::uint64_t{8}, kPageBytes);
  layout.links_offset = layout.buckets_offset + round_up(layout.buckets * kBucketBytes, kPageBytes);
  layout.entries_offset = layout.links_offset + round_up((layout.capacity + 1) * kLinkBytes, kPageBytes);
  layout.bytes = layout.entries_offset + round_up(layout.capacity * kEntryBytes, kPageBytes);
  return layout;
}

SharedRows::SharedRows(std::span<std::byte> memory, const SharedRowsLayout& layout, std::string_view identity)
    : layout_(layout),
      row_pages_(static_cast<std::uint32_t>(layout.row_bytes / kPageBytes)),
      divide_(row_pages_),
      memory_(memory.data()),
      pins_(std::launder(reinterpret_cast<Word*>(memory_ + kPageBytes))),
      buckets_(std::launder(reinterpret_cast<Word*>(memory_ + layout.buckets_offset))),
      links_(std::launder(reinterpret_cast<Link*>(memory_ + layout.links_offset))),
      entries_(std::launder(reinterpret_cast<Entry*>(memory_ + layout.entries_offset))) {
  static_assert(sizeof(Header) <= kPageBytes && sizeof(Link) == kLinkBytes && sizeof(Entry) == kEntryBytes);
  if (layout.row_bytes / kPageBytes > kMostRowPages)
    throw_resource("rows of {} bytes cannot be shared: the limit is 64 GiB", layout.row_bytes);
  if (memory.size() != layout.bytes) {
    throw_invalid("{} bytes were given for the shared rows; they need {}", memory.size(), layout.bytes);
  }
  auto* header = std::launder(reinterpret_cast<Header*>(memory_));
  last_version_ = header->last_version.load();
  // A kill between any two of these stores leaves a table that the next owner treats like this one.
  header->open.store(0, std::memory_order_seq_cst);
  if (header->magic.load() == kFormat && !has_other_layout(memory, layout_)) {
    // An earlier owner's entries: first no reader accepts any of them, then they are removed.
    std::memset(memory_ + layout_.buckets_offset, 0, layout_.links_offset - layout_.buckets_offset);
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
  header->magic.store(kFormat, std::memory_order_release);
  header->open.store(last_version_, std::memory_order_seq_cst);
}

std::uint64_t SharedRows::id() const { return std::launder(reinterpret_cast<const Header*>(memory_))->id; }

bool SharedRows::has_other_layout(std::span<const std::byte> memory, const SharedRowsLayout& layout) {
  const auto* header = std::launder(reinterpret_cast<const Header*>(memory.data()));
  const std::uint64_t magic = header->magic.load();
  if (magic == 0) return false;  // no reader has accepted what is there
  return magic != kFormat || header->row_bytes != layout.row_bytes || header->row_sizes != layout.row_sizes;
}

SharedRow<SharedRows::Word> SharedRows::at(std::uint32_t index) const {
  return {entries_[index].version, pins_[index]};
}

void SharedRows::publish(RowId row, const ChunkKey& key, std::uint32_t depth, std::uint8_t group) {
  const std::uint32_t index = index_of(row);
  Entry& entry = entries_[index];
  // A reader that sees one of the new words also sees that the old version was cleared: each word is stored
  // with release and loaded with acquire (ThreadSanitizer does not support fences).
#pragma GCC unroll 6
  for (std::size_t i = 0; i < kKeyWords; ++i) entry.key[i].store(word_of(key, i), std::memory_order_release);
  const std::uint32_t page = row - index * row_pages_;
  entry.place.store(place_of(page, group, depth), std::memory_order_release);
  const std::uint64_t hash = ChunkKey::Hash{}(key);
  Word& bucket = bucket_of(hash);
  const std::uint64_t before = bucket.load(std::memory_order_relaxed);
  const std::uint32_t next = checked(static_cast<std::uint32_t>(before));
  links_[next].previous = index + 1;
  const std::uint64_t bits = SharedRowsFilter::bits_of(hash);
  Link& link = links_[index + 1];
  link.next.store(next, std::memory_order_relaxed);
  link.previous = 0;
  link.bucket = static_cast<std::uint32_t>(hash) & (layout_.buckets - 1);
  link.filter_bits = static_cast<std::uint32_t>(bits >> SharedRowsFilter::kShift);
  auto* header = std::launder(reinterpret_cast<Header*>(memory_));
  header->last_version.store(++last_version_, std::memory_order_relaxed);
  at(index).publish(last_version_);
  std::uint64_t filter = before & kFilter;
  if (is_dense(filter)) filter = filter_of(next).value_or(filter);
  bucket.store(filter | bits | (index + 1), std::memory_order_release);
}

std::uint32_t SharedRows::checked(std::uint32_t link) const { return link <= layout_.capacity ? link : 0; }

std::optional<std::uint64_t> SharedRows::filter_of(std::uint32_t link) const {
  std::uint64_t filter = 0;
  for (unsigned step = 0; step < kMostSteps; ++step) {
    if (link == 0) return filter;
    filter |= std::uint64_t{links_[link].filter_bits} << SharedRowsFilter::kShift;
    link = checked(links_[link].next.load(std::memory_order_relaxed));
  }
  return std::nullopt;
}

bool SharedRows::withdraw(RowId row) {
  const std::uint32_t index = index_of(row);
  SharedRow<Word> shared = at(index);
  if (shared.version.load(std::memory_order_relaxed) == 0) return !shared.is_pinned();
  const bool is_free = shared.withdraw();
  unlink(index);
  // The rows of a prompt are mostly adjacent, in one direction or the other.
  const std::uint32_t next = index + (index - last_withdrawn_);
  last_withdrawn_ = index;
  if (next < layout_.capacity) prefetch_withdrawal(next);
  return is_free;
}

inline void SharedRows::prefetch_withdrawal(std::uint32_t index) const {
  const Link& link = links_[index + 1];
  __builtin_prefetch(&entries_[index], 1);
  __builtin_prefetch(&links_[checked(link.next.load(std::memory_order_relaxed))], 1);
  __builtin_prefetch(&links_[checked(link.previous)], 1);
  __builtin_prefetch(&bucket_of(link.bucket), 1);
}

// Whether an entry is the first or the last one of its chain is random, so this avoids branches on it: the
// first link of the table stands for none, and a bucket that does not change is written again.
inline void SharedRows::unlink(std::uint32_t index) {
  const Link& link = links_[index + 1];
  const std::uint32_t next = checked(link.next.load(std::memory_order_relaxed));
  const std::uint32_t previous = checked(link.previous);
  links_[next].previous = previous;
  links_[previous].next.store(next, std::memory_order_release);
  Word& bucket = bucket_of(link.bucket);
  const std::uint64_t before = bucket.load(std::memory_order_relaxed);
  const std::uint64_t rest = next == 0 ? 0 : (before & kFilter) | next;
  bucket.store(previous == 0 ? rest : before, std::memory_order_release);
}

void SharedRows::prefetch(RowId row, const ChunkKey& key) const {
  const std::uint32_t index = index_of(row);
  __builtin_prefetch(entries_ + index, 1);
  __builtin_prefetch(links_ + index + 1, 1);
  __builtin_prefetch(&bucket_of(ChunkKey::Hash{}(key)), 1);
}

bool SharedRows::is_pinned(RowId row) const { return at(index_of(row)).is_pinned(); }

void SharedRows::for_each_pinned(const std::function<void(RowId, std::uint32_t)>& visit) const {
  const auto* entries = std::launder(reinterpret_cast<const Entry*>(memory_ + layout_.entries_offset));
  for (std::uint32_t i = 0; i < layout_.capacity; ++i) {
    if (!at(i).is_pinned()) continue;
    const std::uint64_t place = entries[i].place.load(std::memory_order_relaxed);
    if (page_of(place) < row_pages_) visit(i * row_pages_ + page_of(place), group_of(place));
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
  if (magic != SharedRows::kFormat && magic >> 8 == SharedRows::kFormat >> 8)
    throw_resource("its table of rows has another format: it runs another version of vllm-kv-offload");
  if (magic != SharedRows::kFormat) throw_resource("it has no table of rows");
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

std::uint32_t SharedRowsView::next_of(std::uint32_t link) const {
  const auto* links = std::launder(reinterpret_cast<const SharedRows::Link*>(table_ + layout_.links_offset));
  return links[link].next.load(std::memory_order_acquire);
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
    link = next_of(link);  // before it is needed: the CPU loads it and the entry at the same time
    const SharedRows::Entry& found = entry(index);
    const std::uint64_t version = found.version.load(std::memory_order_acquire);
    if (version == 0) continue;  // withdrawn
    bool is_equal = true;
    for (std::size_t i = 0; i < kKeyWords && is_equal; ++i)
      is_equal = found.key[i].load(std::memory_order_acquire) == words[i];
    if (!is_equal) continue;
    const std::uint64_t place = found.place.load(std::memory_order_acquire);
    // The owner has changed the entry meanwhile, so its parts may not belong together.
    if (found.version.load(std::memory_order_relaxed) != version) continue;
    // Each entry has its own row: another page is damage, and may be outside of the rows.
    if (page_of(place) >= row_pages_) return std::nullopt;
    return Found{index * row_pages_ + page_of(place), depth_of(place), group_of(place), version};
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
