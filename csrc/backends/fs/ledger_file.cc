// SPDX-License-Identifier: Apache-2.0
// SpaceLedger: the file that holds the page, and its locking.
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>
#include <utility>

#include "backends/fs/layout.h"
#include "backends/fs/space_ledger.h"
#include "backends/fs/temporary.h"

namespace kv_offload {
namespace {
constexpr unsigned kMaxOverwritten = 2;  // one loss may be a file server that forgot its locks

// Unlocks the page, even when memory runs out while it is held: all servers of the root wait for this lock.
struct PageLock {
  FileOps& ops;
  int fd;
  ~PageLock() {
    if (lock_file(ops, fd, LOCK_UN) < 0) (void)lock_file(ops, fd, LOCK_UN);
  }
};
}  // namespace

Status SpaceLedger::open_page() {
  int error = 0;
  fd_ = open_fd(ops_, root_, std::string(layout::kLedgerFile), O_RDWR | O_NOFOLLOW | O_CREAT, 0600, &error);
  return fd_ ? Status::ok() : Status::error(StatusKind::kIo, std::strerror(error), error, path_);
}

// Locks the page. Live processes hold the lock for a few microseconds. A process that is SIGSTOPped while
// holding it keeps it until killed.
Status SpaceLedger::lock_page() {
  if (!fd_) {
    if (Status status = open_page(); !status) return status;
  }
  const auto give_up = std::chrono::steady_clock::now() + kLockWait;
  auto pause = std::chrono::microseconds(20);
  for (bool replaced = false, reopened = false;;) {
    const int rc = lock_file(ops_, fd_.get(), LOCK_EX | LOCK_NB);
    if (rc == 0) return Status::ok();
    if (rc == -ESTALE && !std::exchange(reopened, true)) {  // replaced by another host, on NFS
      if (Status status = open_page(); !status) return status;
      continue;
    }
    if (rc != -EWOULDBLOCK) return Status::from_errno(-rc, "lock", path_);
    if (std::chrono::steady_clock::now() > give_up) {
      if (std::exchange(replaced, true) || writer_ == 0)
        return Status::error(StatusKind::kTimeout, "another process keeps it locked", EBUSY, path_);
      replace_page();
      if (Status status = open_page(); !status) return status;
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, std::chrono::microseconds(1000));
  }
}

// Replaces the ledger file. The process that holds the old lock writes into a file without a name, detects
// that, and retries on the new file.
void SpaceLedger::replace_page() {
  FileInfo mine, named;
  const std::string name(layout::kLedgerFile);
  if (ops_.fstat(fd_.get(), &mine) != 0 || ops_.stat(root_, name, &named) != 0) return;
  if (mine.inode != named.inode || mine.device != named.device) return;  // another process replaced it
  Fd fd;
  std::string temporary;
  if (create_temporary(ops_, root_, "", O_RDWR, writer_, &fd, &temporary) < 0) return;
  LedgerPage page = LedgerPage::fresh();
  const iovec part{&page, sizeof(page)};
  const bool written = ops_.pwritev(fd.get(), &part, 1, 0) == static_cast<std::int64_t>(sizeof(page));
  if (!written || ops_.rename(root_, temporary, name, false) < 0) (void)ops_.unlink(root_, temporary);
}

bool SpaceLedger::was_replaced() {
  return is_unlinked(ops_, fd_.get(), root_, std::string(layout::kLedgerFile));
}

Status SpaceLedger::read_page(LedgerPage* page) {
  const iovec part{page, sizeof(*page)};
  std::int64_t bytes;
  do {
    bytes = ops_.preadv(fd_.get(), &part, 1, 0);
  } while (bytes == -EINTR);
  if (bytes < 0) return Status::from_errno(static_cast<int>(-bytes), "read", path_);
  if (bytes != static_cast<std::int64_t>(sizeof(*page)) || !page->valid()) *page = LedgerPage::fresh();
  return Status::ok();
}

Status SpaceLedger::write_page(LedgerPage* page) {
  page->set_checksum();
  const iovec part{page, sizeof(*page)};
  std::int64_t bytes;
  do {
    bytes = ops_.pwritev(fd_.get(), &part, 1, 0);
  } while (bytes == -EINTR);
  if (bytes == static_cast<std::int64_t>(sizeof(*page))) return Status::ok();
  return Status::from_errno(bytes < 0 ? static_cast<int>(-bytes) : EIO, "write", path_);
}

// Finds or creates our slot and fills in our values. If the slot is not as we left it, a lock did not exclude
// another process.
LedgerSlot* SpaceLedger::claim_slot(LedgerPage* page) {
  if (writer_ == 0) return nullptr;
  LedgerSlot* own = page->find(writer_);
  if (own != nullptr && own->version != version_) {
    page->trusted = 0;
    if (own->version < version_) {
      ++overwritten_;
      not_exclusive_ = not_exclusive_ || overwritten_ >= kMaxOverwritten;
    }
  }
  if (own == nullptr) {  // new, or folded by a process that took us for dead
    LedgerSlot slot{};
    slot.writer = writer_;
    slot.host = host_;
    slot.pid = static_cast<std::uint32_t>(::getpid());
    own = page->claim(slot);
    if (own == nullptr) return nullptr;
    if (reserved_ > 0) page->doubt += std::min(reserved_, ~page->doubt);
  }
  own->version = version_ + 1;
  own->sharer = sharer_.load(std::memory_order_relaxed);
  own->held = held_.load(std::memory_order_relaxed);
  own->reserved = reserved_;
  own->evicting = static_cast<std::uint32_t>(evicting_);
  return own;
}

void SpaceLedger::apply_pending(LedgerPage* page) {
  const auto apply_bytes = [page](const PendingChanges::Bytes& bytes, bool uncertain) {
    if (bytes.appeared > 0) page->appeared(bytes.appeared, uncertain);
    if (bytes.removed > 0) (void)page->subtract_used(bytes.removed, uncertain);
  };
  apply_bytes(pending_.certain, pending_.before != page->finished);
  apply_bytes(pending_.uncertain, true);
  page->writes += pending_.writes;
  page->removals += pending_.removals;
}

Status SpaceLedger::update(const Change& change) {
  const MutexLock lock(mutex_);
  return update_locked(change);
}

Status SpaceLedger::update_locked(const Change& change) {
  constexpr int kAttempts = 3;  // each retry means that the file was replaced meanwhile
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    if (Status locked = lock_page(); !locked) return locked;
    LedgerPage page;
    Status status;
    bool replaced = false;
    OwnChanges before;
    {
      const PageLock held{ops_, fd_.get()};
      status = read_page(&page);
      if (status) {
        // Known even if the file system has no room for the change: a start needs it.
        total_.store(page.total, std::memory_order_relaxed);
        before = {page.writes, page.removals};
        LedgerSlot* own = claim_slot(&page);
        apply_pending(&page);
        change(page, own);
        status = write_page(&page);
      }
      replaced = was_replaced();
    }
    if (replaced) {
      fd_.reset();
      continue;
    }
    if (!status) return status;
    ++version_;
    pending_ = {};
    own_.writes += page.writes - before.writes;
    own_.removals += page.removals - before.removals;
    counted_this_boot_ = counted_this_boot_ || (page.trusted != 0 && page.host == host_);
    total_.store(page.total, std::memory_order_relaxed);
    finished_.store(page.finished, std::memory_order_release);
    return Status::ok();
  }
  return Status::error(StatusKind::kTimeout, "it is replaced repeatedly", EBUSY, path_);
}

std::optional<std::uint64_t> SpaceLedger::peek_changes_by_others() {
  const MutexLock lock(mutex_);  // the page and our own changes match
  if (!fd_) return std::nullopt;
  LedgerPage page{};
  const iovec part{&page, sizeof(page)};
  const bool read = ops_.preadv(fd_.get(), &part, 1, 0) == static_cast<std::int64_t>(sizeof(page));
  if (!read || !page.valid()) return std::nullopt;
  return page.writes - own_.writes + (page.removals - own_.removals);
}

std::optional<std::uint64_t> recorded_usage(FileOps& ops, int root) {
  int error = 0;
  const Fd fd = open_fd(ops, root, std::string(layout::kLedgerFile), O_RDONLY | O_NOFOLLOW, 0, &error);
  if (!fd) return std::nullopt;
  // Without the lock a read may see a half-finished write. The checksum detects this, and the next read
  // hardly ever hits one again.
  for (int attempt = 0; attempt < 3; ++attempt) {
    LedgerPage page{};
    const iovec part{&page, sizeof(page)};
    std::int64_t bytes;
    do {
      bytes = ops.preadv(fd.get(), &part, 1, 0);
    } while (bytes == -EINTR);
    if (bytes != static_cast<std::int64_t>(sizeof(page))) break;
    if (page.valid()) return page.trusted != 0 ? std::optional(page.total) : std::nullopt;
  }
  return std::nullopt;
}

}  // namespace kv_offload
