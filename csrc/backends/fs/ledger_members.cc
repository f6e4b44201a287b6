// SPDX-License-Identifier: Apache-2.0
// SpaceLedger: the processes that have the root open, and which of them are dead.
#include <fcntl.h>
#include <sys/file.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "backends/fs/layout.h"
#include "backends/fs/space_ledger.h"

namespace kv_offload {
namespace {
constexpr unsigned kMostReturns = 3;
constexpr Nanos kSeenLifetime{std::chrono::minutes(1)};
}  // namespace

// Takes the presence lock. A file server may have lost the lock, so it is taken again each time.
void SpaceLedger::hold_presence() {
  const std::string name = layout::presence_name(writer_);
  const auto holds = [&] {
    return presence_ && lock_file(ops_, presence_.get(), LOCK_EX | LOCK_NB) == 0 &&
           !is_unlinked(ops_, presence_.get(), root_, name);
  };
  if (holds()) return;
  for (int attempt = 0; attempt < 3; ++attempt) {
    int error = 0;
    presence_ = open_fd(ops_, root_, name, O_RDWR | O_CREAT | O_NOFOLLOW, 0600, &error);
    if (holds()) return;
  }
  presence_.reset();  // others take us for dead: the sum is too high until a count
}

// True if no process holds the slot's presence lock. If a process of another host repeatedly turns out to be
// alive, its locks do not reach us.
bool SpaceLedger::is_dead(const LedgerSlot& slot, Nanos now, Fd* presence) {
  const auto [at, first] = seen_.try_emplace(slot.writer, Seen{slot.version, now, false, 0});
  Seen& seen = at->second;
  if (seen.version != slot.version) {
    seen.version = slot.version;
    seen.moved = now;
  }
  if (std::exchange(seen.folded, false) && slot.host != host_ && ++seen.returns >= kMostReturns) {
    const MutexLock lock(mutex_);
    not_exclusive_ = true;
  }
  int error = 0;
  Fd fd = open_fd(ops_, root_, layout::presence_name(slot.writer), O_RDWR | O_NOFOLLOW, 0, &error);
  // The file was lost in a power failure, or never created because the disk was full.
  if (!fd) return error == ENOENT && now - seen.moved >= kDeadAfter;
  if (lock_file(ops_, fd.get(), LOCK_EX | LOCK_NB) != 0) return false;
  *presence = std::move(fd);
  seen.folded = true;
  return true;
}

Status SpaceLedger::poll(Nanos now, SpaceFigures* figures) {
  hold_presence();
  LedgerPage page;
  OwnChanges own;  // matching the page: more may be applied before it is read
  const auto change_and_read = [&](const Change& change) {
    const MutexLock lock(mutex_);
    Status status = update_locked(change);
    own = own_;
    return status;
  };
  if (Status status = change_and_read([&](LedgerPage& current, LedgerSlot*) { page = current; }); !status)
    return status;
  std::vector<std::pair<LedgerSlot, Fd>> dead;
  for (const LedgerSlot& slot : page.slots) {
    Fd presence;
    if (slot.writer != 0 && slot.writer != writer_ && is_dead(slot, now, &presence))
      dead.emplace_back(slot, std::move(presence));
  }
  std::erase_if(seen_, [&](const auto& seen) {
    return page.find(seen.first) == nullptr &&
           (!seen.second.folded || now - seen.second.moved > kSeenLifetime);
  });
  if (!dead.empty()) {
    Status status = change_and_read([&](LedgerPage& current, LedgerSlot*) {
      // A slot that changed since the check belongs to a live process, or was folded by another one.
      for (const auto& [slot, presence] : dead) {
        LedgerSlot* current_slot = current.find(slot.writer);
        if (current_slot != nullptr && current_slot->version == slot.version)
          current.fold(*current_slot, host_);
      }
      page = current;
    });
    if (!status) return status;
    for (const auto& [slot, presence] : dead) {
      if (page.find(slot.writer) == nullptr && presence)
        (void)ops_.unlink(root_, layout::presence_name(slot.writer));
    }
  }
  const MutexLock lock(mutex_);
  fill_figures(page, own, figures);
  return Status::ok();
}

// ---- requests between sharers

void SpaceLedger::ask(std::uint64_t bytes) {
  (void)update([&](LedgerPage&, LedgerSlot* own) {
    if (own == nullptr) return;
    own->credit = std::min(own->credit, bytes);
    own->wanted = bytes - own->credit;
  });
}

std::optional<LedgerRequest> SpaceLedger::claim() {
  const MutexLock lock(mutex_);
  std::optional<LedgerRequest> request;
  const Status written = update_locked([&](LedgerPage& page, LedgerSlot* own) REQUIRES(mutex_) {
    request.reset();
    if (own == nullptr || !refuse(page, own)) return;
    request = page.claim(*own, max_bytes_);
    // If this process dies before grant(), removed files may still be in the sum.
    if (request) ++own->evicting;
  });
  if (!written || !request) return std::nullopt;
  ++evicting_;
  return request;
}

void SpaceLedger::grant(const LedgerRequest& request, std::uint64_t missing, Reservation* reservation) {
  const MutexLock lock(mutex_);
  --evicting_;
  const Status written = update_locked([&](LedgerPage& page, LedgerSlot*) {
    for (const Reservation::Freed& freed : reservation->freed_)
      page.grant(request.requester, freed.bytes, freed.before != page.finished);
    // A request that was withdrawn meanwhile reappears for one tick.
    if (LedgerSlot* requester = page.find(request.requester); requester != nullptr && missing > 0)
      requester->wanted += std::min(missing, ~requester->wanted);
  });
  // On failure the destructor reports them, as free space for any process.
  if (written) reservation->freed_.clear();
}

void SpaceLedger::fill_figures(const LedgerPage& page, const OwnChanges& own, SpaceFigures* figures) const {
  *figures = {};
  const bool counted = page.trusted != 0 && (counted_this_boot_ || page.host == host_);
  figures->state = not_exclusive_ ? SpaceState::kNotExclusive
                   : counted      ? SpaceState::kCounted
                                  : SpaceState::kUncounted;
  figures->used = page.used;
  figures->reserved = page.reserved();
  figures->doubt = page.doubt;
  figures->writes = page.writes;
  figures->writes_by_others = page.writes - own.writes;
  figures->removals_by_others = page.removals - own.removals;
  for (const LedgerSlot& slot : page.slots) {
    if (slot.writer == 0) continue;
    figures->writers.push_back(slot.writer);
    const auto known =
        std::find_if(figures->sharers.begin(), figures->sharers.end(),
                     [&](const SpaceFigures::Sharer& sharer) { return sharer.id == slot.sharer; });
    // Processes of one sharer report the same records: one entry, with the largest figure.
    SpaceFigures::Sharer& sharer = known == figures->sharers.end()
                                       ? figures->sharers.emplace_back(SpaceFigures::Sharer{slot.sharer, 0})
                                       : *known;
    sharer.held = std::max(sharer.held, slot.held);
    // The flags below describe only other processes.
    if (slot.writer == writer_) {
      figures->wanted = slot.wanted;
      figures->credit = slot.credit;
      continue;
    }
    figures->shared |= slot.sharer == sharer_.load(std::memory_order_relaxed);
    figures->space_requested |= slot.wanted > 0;
    if (slot.counting == 0) continue;
    figures->counter = slot.writer;
    figures->counter_version = slot.version;
  }
  figures->alone = figures->writers.size() == 1 && figures->writers[0] == writer_;
}

}  // namespace kv_offload
