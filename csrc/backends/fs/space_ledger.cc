// SPDX-License-Identifier: Apache-2.0
#include "backends/fs/space_ledger.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>

#include "backends/fs/layout.h"
#include "backends/fs/temporary.h"
#include "base/types.h"
#include "base/xxh3.h"

namespace kv_offload {
namespace {

constexpr int kOpenPage = O_RDWR | O_NOFOLLOW;

std::uint64_t this_host(FileOps& ops) {
  std::string text;
  if (read_text(ops, AT_FDCWD, "/proc/sys/kernel/random/boot_id", &text) != 0) text = "unknown";
  return XXH3_64bits(text.data(), text.size()) | 1;
}

}  // namespace

std::uint64_t sharer(const std::string& namespace_name, std::uint64_t epoch) {
  constexpr std::size_t kDigits = 12;
  std::uint64_t tag = 0;
  for (std::size_t i = 0; i + 1 < kDigits && i + 1 < namespace_name.size(); i += 2) {
    tag = tag << 8 | layout::parse_hex_byte(namespace_name.substr(i, 2)).value_or(0);
  }
  return tag << 16 | (epoch & 0xffff);
}

bool is_of_namespace(std::uint64_t sharer, const std::string& namespace_name) {
  return sharer >> 16 == kv_offload::sharer(namespace_name, 0) >> 16;
}

SpaceLedger::SpaceLedger(FileOps& ops, int root, const std::string& root_path, std::uint64_t max_bytes,
                         std::uint64_t writer, std::uint64_t sharer)
    : ops_(ops),
      root_(root),
      path_(root_path + "/" + std::string(layout::kLedgerFile)),
      max_bytes_(max_bytes),
      writer_(writer | 1),
      sharer_(sharer),
      host_(this_host(ops)),
      bound_(max_bytes) {
  hold_presence();
  Status status;
  {
    const MutexLock lock(mutex_);
    status = open_page();
    if (!status) {
      throw_resource("cannot open {}: {}; give a root_dir that this user can write", path_,
                     std::strerror(status.error_number()));
    }
    status = update_locked([](LedgerPage&, LedgerSlot*) {});
  }
  // A full file system refuses the page until records are evicted, which needs an open tier.
  if (!status && !is_full(status)) {
    throw_resource("cannot use {}: {}; root_dir needs a little free space and a file system with locks",
                   path_, status.to_string());
  }
}

SpaceLedger::SpaceLedger(FileOps& ops, int root, const std::string& root_path)
    : ops_(ops),
      root_(root),
      path_(root_path + "/" + std::string(layout::kLedgerFile)),
      max_bytes_(0),
      writer_(0),
      sharer_(0),
      bound_(0) {
  const MutexLock lock(mutex_);
  int error = 0;
  fd_ = open_fd(ops_, root_, std::string(layout::kLedgerFile), kOpenPage, 0, &error);
  if (fd_) (void)update_locked([](LedgerPage&, LedgerSlot*) {});
}

SpaceLedger::~SpaceLedger() = default;

void SpaceLedger::close() {
  const Status status = update([&](LedgerPage& page, LedgerSlot* own) {
    if (own != nullptr) page.fold(*own, host_);
  });
  if (status && presence_) (void)ops_.unlink(root_, layout::presence_name(writer_));
  presence_.reset();
}

// ---- changes

void SpaceLedger::PendingChanges::add(Bytes bytes, Finished of) noexcept {
  if (of > before) {
    uncertain.appeared += certain.appeared;
    uncertain.removed += certain.removed;
    certain = {};
    before = of;
  }
  Bytes& sum = of == before ? certain : uncertain;
  sum.appeared += bytes.appeared;
  sum.removed += bytes.removed;
}

void SpaceLedger::add(std::uint64_t bytes) {
  {
    const MutexLock lock(mutex_);
    pending_.add({.appeared = bytes}, finished());
  }
  (void)update([](LedgerPage&, LedgerSlot*) {});  // if it fails, the bytes stay in pending_
}

void SpaceLedger::remove(std::uint64_t bytes, Finished before) {
  if (bytes == 0) return;
  const MutexLock lock(mutex_);
  if (writer_ == 0 && !fd_) return;
  pending_.add({.removed = bytes}, before);
  ++pending_.removals;
  (void)update_locked([](LedgerPage&, LedgerSlot*) {});
}

// Returns the reason why nothing can be granted now, whatever is requested.
Status SpaceLedger::refuse(const LedgerPage& page, const LedgerSlot* own) const {
  if (own == nullptr) {
    return Status::error(
        StatusKind::kUnavailable,
        fmt::format("{} processes have this root open, which is the maximum", LedgerPage::kSlots), 0, path_);
  }
  if (not_exclusive_) {
    return Status::error(StatusKind::kUnavailable,
                         "the locks of this file system do not keep other hosts out (mounted with nolock, "
                         "local_lock or localflock?): writes are disabled; give each host its own root_dir",
                         0, path_);
  }
  if (counted_this_boot_ && page.trusted == 0) {  // not at a start: the page was trusted before
    return Status::error(StatusKind::kIo, "the ledger was removed or damaged: the root is counted again",
                         ENOENT, path_);
  }
  if (page.trusted == 0 || !(counted_this_boot_ || page.host == host_))
    return Status::error(StatusKind::kNoSpace, "the bytes under the root are still being counted", 0, path_);
  return Status::ok();
}

Status SpaceLedger::reserve(Reservation* reservation, std::uint64_t bytes, std::uint64_t* missing) {
  *missing = 0;
  const MutexLock lock(mutex_);
  const std::uint64_t before = reservation->held_;
  std::uint64_t held = before, lacking = 0;
  Finished since = reservation->since_;
  Status answer;
  const Status written = update_locked([&](LedgerPage& page, LedgerSlot* own) REQUIRES(mutex_) {
    held = before;
    lacking = 0;
    if (before == 0) since = page.finished;
    answer = refuse(page, own);
    if (own == nullptr) return;
    for (const Reservation::Freed& freed : reservation->freed_) {
      if (page.subtract_used(freed.bytes, freed.before != page.finished)) held += freed.bytes;
    }
    page.removals += reservation->freed_.size();
    own->reserved += held - before;
    if (!answer) return;
    const std::uint64_t others = page.used + std::min(page.reserved() - held, ~page.used);
    const std::uint64_t wanted = others + std::min(bytes, ~others);
    const std::uint64_t bound = bound_.load();
    if (wanted <= bound) {
      own->reserved += bytes - held;
      held = bytes;
      return;
    }
    lacking = wanted - bound;
    const std::uint64_t credit = std::min(own->credit, lacking);  // evicted for us by other sharers
    own->credit -= credit;
    lacking -= credit;
    if (lacking == 0) {
      own->reserved += bytes - held;
      held = bytes;
      return;
    }
    own->reserved += credit;
    held += credit;
    own->evicting += reservation->evicting_ ? 0 : 1;
    answer = Status::error(
        StatusKind::kNoSpace,
        fmt::format("{} in use, {} requested, {} is {}", format_bytes(others), format_bytes(bytes),
                    bound < max_bytes_ ? "the space on the file system" : "max_bytes", format_bytes(bound)),
        0, path_);
  });
  if (!written) {  // nothing changed
    if (is_full(written)) *missing = bytes;
    return written;
  }
  reserved_ += held - before;
  reservation->held_ = held;
  reservation->since_ = since;
  reservation->freed_.clear();
  if (lacking > 0 && !std::exchange(reservation->evicting_, true)) ++evicting_;
  *missing = lacking;
  return answer;
}

// Runs in a destructor, even when memory has run out. Then the bytes stay in pending_, and the next change of
// the page applies them.
void SpaceLedger::settle(Reservation* reservation) noexcept {
  const Reservation& done = *reservation;
  if (done.held_ == 0 && done.used == 0 && done.freed_.empty() && !done.evicting_) return;
  const MutexLock lock(mutex_);
  reserved_ -= done.held_;
  evicting_ -= done.evicting_ ? 1 : 0;
  for (const Reservation::Freed& freed : done.freed_) pending_.add({.removed = freed.bytes}, freed.before);
  pending_.removals += done.freed_.size();
  if (done.used > 0) {
    pending_.add({.appeared = done.used}, done.since_);
    ++pending_.writes;
  }
  try {
    (void)update_locked([](LedgerPage&, LedgerSlot*) {});
  } catch (...) {  // no memory: the bytes stay in pending_
  }
}

Status Reservation::grow_to(std::uint64_t bytes, std::uint64_t* missing) {
  *missing = 0;
  if (held_ >= bytes && freed_.empty()) return Status::ok();
  return space_.reserve(this, bytes, missing);
}

// ---- a file system that is full below the bound

void SpaceLedger::lower_bound(const Reservation& refused) {
  const std::uint64_t in_use = total() - std::min(total(), refused.held_);
  std::uint64_t bound = bound_.load();
  while (in_use < bound && !bound_.compare_exchange_weak(bound, in_use)) {
  }
}

void SpaceLedger::raise_bound(std::uint64_t by) {
  std::uint64_t bound = bound_.load();
  while (bound < max_bytes_ &&
         !bound_.compare_exchange_weak(bound, bound + std::min(by, max_bytes_ - bound))) {
  }
}

// ---- counting

Status SpaceLedger::begin_count(std::uint64_t* number) {
  const MutexLock lock(mutex_);
  *number = ++counts_;
  Status answer;
  const Status written = update_locked([&](LedgerPage& page, LedgerSlot* own) REQUIRES(mutex_) {
    answer = own != nullptr ? Status::ok() : refuse(page, own);
    if (answer) page.begin_count(*own, *number);
  });
  return written ? answer : written;
}

Status SpaceLedger::finish_count(std::uint64_t number, std::uint64_t counted, std::uint64_t* surplus) {
  const MutexLock lock(mutex_);
  bool known = false;
  std::uint64_t too_high = 0;
  const Status written = update_locked([&](LedgerPage& page, LedgerSlot* own) {
    known = own != nullptr && own->counting == number;
    if (!known) return;
    const std::uint64_t used = page.used, explained = page.doubt + std::min(own->doubt, ~page.doubt);
    page.finish_count(*own, counted);
    too_high = used - std::min(used, page.used);
    too_high -= std::min(too_high, explained);
  });
  if (!written) return written;
  if (!known)
    return Status::error(StatusKind::kCancelled, "the ledger was replaced during the count", 0, path_);
  counted_this_boot_ = true;
  if (surplus != nullptr) *surplus = too_high;
  return Status::ok();
}

// Runs in destructors, too. A count that is not finished ends with the next count of this process.
void SpaceLedger::give_up_count() noexcept {
  try {
    (void)update([](LedgerPage&, LedgerSlot* own) {
      if (own != nullptr) own->counting = own->added = own->doubt = 0;
    });
  } catch (...) {  // no memory
  }
}

}  // namespace kv_offload
