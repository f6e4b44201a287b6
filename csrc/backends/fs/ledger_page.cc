// SPDX-License-Identifier: Apache-2.0
#include "backends/fs/ledger_page.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>

#include "base/xxh3.h"

namespace kv_offload {
namespace {

constexpr char kMagic[] = "KVOSPAC2";
// Earlier pages of the same root format; their figures are not read.
constexpr std::array<const char*, 2> kOlderMagic = {"KVOSPAC1", "KVOLEDG2"};

void add(std::uint64_t& sum, std::uint64_t bytes) {
  sum = bytes > std::numeric_limits<std::uint64_t>::max() - sum ? std::numeric_limits<std::uint64_t>::max()
                                                                : sum + bytes;
}

std::uint64_t checksum_of(const LedgerPage& page) {
  return XXH3_64bits(&page, offsetof(LedgerPage, checksum));
}

}  // namespace

LedgerPage LedgerPage::fresh() {
  LedgerPage page{};
  page.set_checksum();
  return page;
}

bool LedgerPage::valid() const {
  return std::memcmp(magic, kMagic, sizeof(magic)) == 0 && checksum == checksum_of(*this);
}

void LedgerPage::set_checksum() {
  std::memcpy(magic, kMagic, sizeof(magic));
  total = used;
  add(total, reserved());
  checksum = checksum_of(*this);
}

bool LedgerPage::is_of_this_format(const void* bytes, std::size_t size) {
  if (size < sizeof(magic)) return false;
  return std::memcmp(bytes, kMagic, sizeof(magic)) == 0 ||
         std::any_of(kOlderMagic.begin(), kOlderMagic.end(),
                     [&](const char* older) { return std::memcmp(bytes, older, sizeof(magic)) == 0; });
}

std::uint64_t LedgerPage::reserved() const {
  std::uint64_t sum = 0;
  for (const LedgerSlot& slot : slots) {
    if (slot.writer == 0) continue;
    add(sum, slot.reserved);
    add(sum, slot.credit);
  }
  return sum;
}

std::uint64_t LedgerPage::sharers() const {
  std::uint64_t count = 0;
  for (const LedgerSlot* slot = slots; slot != slots + kSlots; ++slot) {
    const bool again = std::any_of(slots, slot, [&](const LedgerSlot& before) {
      return before.writer != 0 && before.sharer == slot->sharer;
    });
    count += slot->writer != 0 && !again;
  }
  return count;
}

LedgerSlot* LedgerPage::find(std::uint64_t writer) {
  for (LedgerSlot& slot : slots) {
    if (slot.writer == writer && writer != 0) return &slot;
  }
  return nullptr;
}

LedgerSlot* LedgerPage::claim(const LedgerSlot& wanted) {
  for (LedgerSlot& slot : slots) {
    if (slot.writer != 0) continue;
    slot = wanted;
    return &slot;
  }
  return nullptr;
}

void LedgerPage::appeared(std::uint64_t bytes, bool twice) {
  add(used, bytes);
  if (twice) add(doubt, bytes);
  for (LedgerSlot& slot : slots) {
    if (slot.counting == 0) continue;
    add(slot.added, bytes);
    add(slot.doubt, bytes);
  }
}

bool LedgerPage::subtract_used(std::uint64_t bytes, bool uncertain) {
  if (uncertain) {
    add(doubt, bytes);
  } else {
    used -= std::min(used, bytes);
  }
  for (LedgerSlot& slot : slots) {
    if (slot.counting != 0) add(slot.doubt, bytes);
  }
  return !uncertain;
}

void LedgerPage::fold(LedgerSlot& slot, std::uint64_t folder) {
  const std::uint64_t bytes = slot.reserved;
  const bool uncertain = bytes > 0 || slot.evicting > 0 || slot.host != folder;
  slot = {};
  appeared(bytes, true);
  if (!uncertain) return;
  add(doubt, 1);
  for (LedgerSlot& other : slots) {
    if (other.counting != 0) add(other.doubt, 1);
  }
}

std::optional<LedgerRequest> LedgerPage::claim(const LedgerSlot& own, std::uint64_t max_bytes) {
  const std::uint64_t share = max_bytes / std::max<std::uint64_t>(sharers(), 1);
  std::uint64_t most = 0;
  for (const LedgerSlot& slot : slots) most = slot.writer != 0 ? std::max(most, slot.held) : most;
  for (LedgerSlot& slot : slots) {
    // Processes of our own sharer already share our records.
    if (slot.writer == 0 || slot.sharer == own.sharer || slot.wanted == 0) continue;
    std::uint64_t surplus = own.held > share ? own.held - share : 0;
    const std::uint64_t more = own.held - std::min(own.held, slot.held);
    // No sharer is above its share: half of the difference makes both equal.
    if (most <= share && more > slot.wanted) surplus = more / 2;
    const LedgerRequest request{slot.writer, std::min(slot.wanted, surplus)};
    // We have nothing to give to this requester.
    if (request.bytes == 0) continue;
    slot.wanted -= request.bytes;
    return request;
  }
  return std::nullopt;
}

void LedgerPage::grant(std::uint64_t requester, std::uint64_t bytes, bool uncertain) {
  ++removals;
  if (!subtract_used(bytes, uncertain)) return;
  if (LedgerSlot* slot = find(requester); slot != nullptr) add(slot->credit, bytes);
}

void LedgerPage::begin_count(LedgerSlot& slot, std::uint64_t number) {
  slot.counting = number;
  slot.added = slot.doubt = 0;
}

void LedgerPage::finish_count(LedgerSlot& slot, std::uint64_t counted) {
  used = counted;
  add(used, slot.added);
  doubt = slot.doubt;
  trusted = 1;
  host = slot.host;
  ++finished;
  slot.counting = slot.added = slot.doubt = 0;
}

}  // namespace kv_offload
