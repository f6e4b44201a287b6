#include "storage/ledger.h"

#include <fcntl.h>
#include <sys/file.h>
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>

#include "base/types.h"
#include "storage/fs_layout.h"

namespace kv_offload {

// As it lies in the file (little-endian machines only, as all of CUDA's).
struct Ledger::Page {
  char magic[8];
  std::uint64_t trusted;
  std::uint64_t total;
  std::int64_t since;  // net reservations since begin_recount
  std::uint64_t room_wanted;
  std::uint64_t epoch;  // odd: a recount runs, or its process died in it
  std::uint64_t recount_wanted;
  char boot_id[40];
  std::uint64_t checksum;

  std::uint64_t compute() const { return XXH3_64bits(this, offsetof(Page, checksum)); }
};

namespace {

constexpr char kMagic[] = "KVOLEDG2";

std::string boot_id(FileOps& ops) {
  std::string text;
  if (read_text(ops, AT_FDCWD, "/proc/sys/kernel/random/boot_id", &text) != 0) text = "unknown";
  text.resize(36, ' ');
  return text;
}

// What is in the file may be anything: no sum wraps.
std::uint64_t apply(std::uint64_t total, std::int64_t delta) {
  const std::uint64_t size =
      delta < 0 ? 0 - static_cast<std::uint64_t>(delta) : static_cast<std::uint64_t>(delta);
  if (delta < 0) return total < size ? 0 : total - size;
  return size > std::numeric_limits<std::uint64_t>::max() - total ? std::numeric_limits<std::uint64_t>::max()
                                                                  : total + size;
}
std::int64_t sum(std::int64_t a, std::int64_t b) {
  return static_cast<std::int64_t>(static_cast<std::uint64_t>(a) + static_cast<std::uint64_t>(b));
}

}  // namespace

Ledger::Ledger(FileOps& ops, int root, const std::string& root_path, std::uint64_t max_bytes)
    : ops_(ops), path_(root_path + "/" + std::string(layout::kLedgerFile)), max_bytes_(max_bytes) {
  int error = 0;
  fd_ = open_fd(ops, root, std::string(layout::kLedgerFile), O_RDWR | O_CREAT | O_NOFOLLOW, 0600, &error);
  if (!fd_)
    throw_resource("cannot open {}: {}; give a root_dir that this user can write", path_,
                   std::strerror(error));
  if (const Status status = refresh(); !status) {
    throw_resource("cannot use {}: {}; root_dir needs a little free space and a file system with locks",
                   path_, status.to_string());
  }
}

// Runs change(page) on the page as it is in the file, and writes it back.
template <typename Change>
Status Ledger::update(Change change) {
  const MutexLock lock(mutex_);
  if (const int rc = lock_file(ops_, fd_.get(), LOCK_EX); rc < 0)
    return Status::from_errno(-rc, "lock", path_);
  Page page{};
  const iovec part{&page, sizeof(page)};
  Status status;
  std::int64_t bytes;
  do {
    bytes = ops_.preadv(fd_.get(), &part, 1, 0);
  } while (bytes == -EINTR);
  if (bytes < 0) status = Status::from_errno(static_cast<int>(-bytes), "read", path_);
  if (status) {
    const bool valid = bytes == sizeof(page) && std::memcmp(page.magic, kMagic, sizeof(page.magic)) == 0 &&
                       page.checksum == page.compute();
    if (!valid) {
      page = {};
      std::memcpy(page.magic, kMagic, sizeof(page.magic));
    }
    const std::int64_t owed = owed_;
    page.total = apply(page.total, owed);
    page.since = sum(page.since, owed);
    if (recount_wanted_.load(std::memory_order_relaxed)) page.recount_wanted = 1;
    const std::uint64_t before = page.total;
    status = change(page);
    const std::int64_t ours = sum(owed, static_cast<std::int64_t>(page.total - before));
    page.checksum = page.compute();
    do {
      bytes = ops_.pwritev(fd_.get(), &part, 1, 0);
    } while (bytes == -EINTR);
    if (bytes == sizeof(page)) {
      owed_ -= owed;
      explained_ = sum(explained_, ours);
      seen_total_.store(page.total, std::memory_order_relaxed);
      seen_epoch_.store(page.epoch, std::memory_order_release);
      recount_wanted_.store(page.recount_wanted != 0, std::memory_order_relaxed);
    } else {
      status = Status::from_errno(bytes < 0 ? static_cast<int>(-bytes) : EIO, "write", path_);
    }
  }
  (void)lock_file(ops_, fd_.get(), LOCK_UN);
  return status;
}

Status Ledger::reserve(std::uint64_t bytes, std::uint64_t* missing) {
  *missing = 0;
  return update([&](Page& page) {
    if (page.trusted == 0) {
      return Status::error(StatusKind::kNoSpace, "the bytes under the root are still being counted", 0,
                           path_);
    }
    const std::uint64_t wanted = apply(page.total, static_cast<std::int64_t>(bytes));
    if (wanted > max_bytes_) {
      *missing = wanted - max_bytes_;
      return Status::error(StatusKind::kNoSpace,
                           fmt::format("{} in use, {} asked, max_bytes is {}", format_bytes(page.total),
                                       format_bytes(bytes), format_bytes(max_bytes_)),
                           0, path_);
    }
    page.total += bytes;
    page.since = sum(page.since, static_cast<std::int64_t>(bytes));
    return Status::ok();
  });
}

void Ledger::adjust(std::int64_t delta) {
  if (delta == 0) return;
  {
    const MutexLock lock(mutex_);
    owed_ += delta;
  }
  (void)refresh();  // a failure leaves it owed
}

void Ledger::give_back(std::uint64_t bytes, Epoch since, bool counted) {
  if (bytes == 0) return;
  const Status status = update([&](Page& page) {
    const bool ended = counted && since % 2 != 0 && page.epoch == since + 1;  // with them in its sum
    if (page.epoch != since && !ended) {
      page.recount_wanted = 1;
      return Status::ok();
    }
    page.total = apply(page.total, -static_cast<std::int64_t>(bytes));
    if (counted) {
      page.since = sum(page.since, -static_cast<std::int64_t>(bytes));
    } else if (page.epoch % 2 != 0) {
      page.recount_wanted = 1;
    }
    return Status::ok();
  });
  if (!status) recount_wanted_.store(true, std::memory_order_relaxed);
}

void Ledger::ask_room(std::uint64_t bytes) {
  (void)update([&](Page& page) {
    page.room_wanted += bytes;
    return Status::ok();
  });
}

std::uint64_t Ledger::take_room_requests() {
  std::uint64_t wanted = 0;
  (void)update([&](Page& page) {
    wanted = std::exchange(page.room_wanted, 0);
    return Status::ok();
  });
  return wanted;
}

Status Ledger::begin_recount(std::uint64_t in_flight) {
  return update([&](Page& page) {
    page.since = static_cast<std::int64_t>(in_flight);
    page.epoch += page.epoch % 2 == 0 ? 1 : 2;
    page.recount_wanted = 0;
    return Status::ok();
  });
}

Status Ledger::finish_recount(std::uint64_t counted) {
  const std::string boot = boot_id(ops_);
  const Status status = update([&](Page& page) {
    page.total = apply(counted, page.since);
    page.trusted = 1;
    page.epoch += page.epoch % 2;
    std::memcpy(page.boot_id, boot.data(), boot.size());
    return Status::ok();
  });
  const MutexLock lock(mutex_);
  if (status) explained_ = static_cast<std::int64_t>(total());
  return status;
}

std::int64_t Ledger::change_by_others() {
  const MutexLock lock(mutex_);
  return static_cast<std::int64_t>(total() - static_cast<std::uint64_t>(explained_));
}

std::uint64_t Ledger::added_by_others() {
  return static_cast<std::uint64_t>(std::max<std::int64_t>(change_by_others(), 0));
}

bool Ledger::trusted() {
  const std::string boot = boot_id(ops_);
  bool trusted = false;
  (void)update([&](Page& page) {
    // After a power failure the file may be older than the records beside it.
    if (std::memcmp(page.boot_id, boot.data(), boot.size()) != 0) page.trusted = 0;
    trusted = page.trusted != 0;
    return Status::ok();
  });
  return trusted;
}

Status Ledger::refresh() {
  return update([](Page&) { return Status::ok(); });
}

std::optional<std::uint64_t> recorded_usage(FileOps& ops, int root) {
  int error = 0;
  const Fd fd = open_fd(ops, root, std::string(layout::kLedgerFile), O_RDONLY | O_NOFOLLOW, 0, &error);
  if (!fd) return std::nullopt;
  // Without the lock a read may meet a write half-way; the checksum tells, and the next one hardly does.
  for (int attempt = 0; attempt < 3; ++attempt) {
    Ledger::Page page{};
    const iovec part{&page, sizeof(page)};
    std::int64_t bytes;
    do {
      bytes = ops.preadv(fd.get(), &part, 1, 0);
    } while (bytes == -EINTR);
    if (bytes != sizeof(page) || std::memcmp(page.magic, kMagic, sizeof(page.magic)) != 0) break;
    if (page.checksum == page.compute()) {
      return page.trusted != 0 ? std::optional(page.total) : std::nullopt;
    }
  }
  return std::nullopt;
}

Lease::Lease(FileOps& ops, int root, const std::string& root_path) : ops_(ops) {
  int error = 0;
  fd_ = open_fd(ops, root, std::string(layout::kLeaseFile), O_RDWR | O_CREAT | O_NOFOLLOW, 0600, &error);
  if (!fd_) {
    throw_resource("cannot open {}/{}: {}; give a root_dir that this user can write", root_path,
                   layout::kLeaseFile, std::strerror(error));
  }
}

bool Lease::try_take() {
  if (held()) return true;
  if (lock_file(ops_, fd_.get(), LOCK_EX | LOCK_NB) != 0) return false;
  held_.store(true, std::memory_order_release);
  return true;
}

void Lease::release() {
  if (held_.exchange(false)) (void)lock_file(ops_, fd_.get(), LOCK_UN);
}

}  // namespace kv_offload
