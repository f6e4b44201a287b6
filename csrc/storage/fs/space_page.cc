#include "storage/fs/space_page.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "base/xxh3.h"

namespace kv_offload {
namespace {

constexpr char kMagic[] = "KVOSPAC1";
constexpr char kOlderMagic[] = "KVOLEDG2";  // the same format of the root; its figures are not read

void add(std::uint64_t& sum, std::uint64_t bytes) {
  sum = bytes > std::numeric_limits<std::uint64_t>::max() - sum ? std::numeric_limits<std::uint64_t>::max()
                                                                : sum + bytes;
}

std::uint64_t checksum_of(const SpacePage& page) { return XXH3_64bits(&page, offsetof(SpacePage, checksum)); }

}  // namespace

SpacePage SpacePage::fresh() {
  SpacePage page{};
  page.seal();
  return page;
}

bool SpacePage::valid() const {
  return std::memcmp(magic, kMagic, sizeof(magic)) == 0 && checksum == checksum_of(*this);
}

void SpacePage::seal() {
  std::memcpy(magic, kMagic, sizeof(magic));
  total = used;
  add(total, reserved());
  checksum = checksum_of(*this);
}

bool SpacePage::is_of_this_format(const void* bytes, std::size_t size) {
  if (size < sizeof(magic)) return false;
  return std::memcmp(bytes, kMagic, sizeof(magic)) == 0 ||
         std::memcmp(bytes, kOlderMagic, sizeof(magic)) == 0;
}

std::uint64_t SpacePage::reserved() const {
  std::uint64_t sum = 0;
  for (const SpaceSlot& slot : slots) {
    if (slot.writer != 0) add(sum, slot.reserved);
  }
  return sum;
}

SpaceSlot* SpacePage::find(std::uint64_t writer) {
  for (SpaceSlot& slot : slots) {
    if (slot.writer == writer && writer != 0) return &slot;
  }
  return nullptr;
}

SpaceSlot* SpacePage::claim(const SpaceSlot& wanted) {
  for (SpaceSlot& slot : slots) {
    if (slot.writer != 0) continue;
    slot = wanted;
    return &slot;
  }
  return nullptr;
}

void SpacePage::appeared(std::uint64_t bytes, bool twice) {
  add(used, bytes);
  if (twice) add(doubt, bytes);
  for (SpaceSlot& slot : slots) {
    if (slot.counting == 0) continue;
    add(slot.added, bytes);
    add(slot.doubt, bytes);
  }
}

bool SpacePage::went(std::uint64_t bytes, bool unsure) {
  if (unsure) {
    add(doubt, bytes);
  } else {
    used -= std::min(used, bytes);
  }
  for (SpaceSlot& slot : slots) {
    if (slot.counting != 0) add(slot.doubt, bytes);
  }
  return !unsure;
}

void SpacePage::fold(SpaceSlot& slot, std::uint64_t folder) {
  const std::uint64_t bytes = slot.reserved;
  const bool unsure = bytes > 0 || slot.evicting > 0 || slot.host != folder;
  slot = {};
  appeared(bytes, true);
  if (!unsure) return;
  add(doubt, 1);
  for (SpaceSlot& other : slots) {
    if (other.counting != 0) add(other.doubt, 1);
  }
}

void SpacePage::begin_count(SpaceSlot& slot, std::uint64_t number) {
  slot.counting = number;
  slot.added = slot.doubt = 0;
}

void SpacePage::finish_count(SpaceSlot& slot, std::uint64_t counted) {
  used = counted;
  add(used, slot.added);
  doubt = slot.doubt;
  trusted = 1;
  host = slot.host;
  ++finished;
  slot.counting = slot.added = slot.doubt = 0;
}

}  // namespace kv_offload
