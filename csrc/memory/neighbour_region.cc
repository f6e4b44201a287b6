// SPDX-License-Identifier: Apache-2.0
#include "memory/neighbour_region.h"

#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <exception>

#include "base/status.h"
#include "memory/byte_lock.h"
#include "memory/control_page.h"
#include "memory/shared_file.h"

namespace kv_offload {
namespace {

std::span<std::byte> map_part(int fd, std::uint64_t offset, std::uint64_t bytes, int protection) {
  void* memory = ::mmap(nullptr, bytes, protection, MAP_SHARED, fd, static_cast<off_t>(offset));
  if (memory == MAP_FAILED) throw_resource("cannot map {}: {}", format_bytes(bytes), std::strerror(errno));
  return {static_cast<std::byte*>(memory), bytes};
}

// Returns where the table of rows is. Throws ResourceError or InvalidArgument if the region does not fit
// ours.
std::uint64_t offset_of_table(int fd, const HostRegion& own, const SharedRowsLayout& layout) {
  const ControlPage::Sizes sizes{.bytes = own.options().bytes,
                                 .area_bytes = own.area_bytes(),
                                 .num_areas = own.num_areas(),
                                 .num_workers = own.options().num_workers,
                                 .first_rank = own.first_rank(),
                                 .local_ranks = own.local_ranks()};
  const std::uint64_t size = file_size(fd);
  if (size < kPageBytes) throw_resource("it has {} bytes only", size);
  const std::span<std::byte> page = map_part(fd, 0, kPageBytes, PROT_READ);
  std::uint64_t offset = 0;
  try {
    offset = ControlPage(page.data(), sizes).shared_rows();
  } catch (const InvalidArgument&) {
    ::munmap(page.data(), page.size());
    throw_resource("its cpu_bytes_to_use or its number of ranks differs");
  } catch (...) {
    ::munmap(page.data(), page.size());
    throw;
  }
  ::munmap(page.data(), page.size());
  const std::uint64_t end_of_areas =
      ControlPage::padded_bytes(sizes.num_workers) + sizes.num_areas * sizes.area_bytes;
  if (offset != end_of_areas || size < offset || size - offset < layout.bytes) {
    throw_resource("its table of rows is not inside its {} bytes", size);
  }
  return offset;
}

}  // namespace

std::unique_ptr<NeighbourRegion> NeighbourRegion::attach(const HostRegion& own, unsigned number,
                                                         const SharedRowsLayout& layout,
                                                         std::string_view identity, std::string* problem) {
  std::unique_ptr<NeighbourRegion> region(new NeighbourRegion);
  const RegionOptions& options = own.options();
  region->path_ = SharedFile::shared_path_of(options.shm_directory, options.share_for, number);
  region->fd_ = open_shared_file(region->path_, problem);
  if (region->fd_ < 0 && problem->empty()) return nullptr;
  if (problem->empty()) {
    region->area_ = {inode_of(region->fd_), static_cast<std::uint8_t>(number), 0};
    if (region->area_.inode == own.inode()) return nullptr;
    try {
      region->map(layout, offset_of_table(region->fd_, own, layout), identity);
      if (!region->is_alive()) return nullptr;
      if (!region->take_number()) {
        *problem =
            fmt::format("{} engines read it already, or its file system has no file locks", kMostReaders);
      } else if (!region->begin_reading()) {
        return nullptr;
      }
    } catch (const std::exception& error) {
      *problem = error.what();
    }
  }
  if (problem->empty()) return region;
  *problem = fmt::format("{} is not used: {}", region->path_, *problem);
  return nullptr;
}

NeighbourRegion::~NeighbourRegion() {
  if (!table_.empty()) ::munmap(table_.data(), table_.size());
  if (!pins_.empty()) ::munmap(pins_.data(), pins_.size());
  if (fd_ >= 0) ::close(fd_);
}

void NeighbourRegion::map(const SharedRowsLayout& layout, std::uint64_t offset, std::string_view identity) {
  table_ = map_part(fd_, offset, layout.bytes, PROT_READ);
  pins_ = map_part(fd_, offset + kPageBytes, layout.buckets_offset - kPageBytes, PROT_READ | PROT_WRITE);
  rows_.emplace(table_, pins_, layout, identity);
}

bool NeighbourRegion::take_number() {
  for (unsigned reader = 0; reader < kMostReaders; ++reader) {
    if (!ByteLock::take(fd_, reader)) continue;
    area_.reader = static_cast<std::uint8_t>(reader);
    return true;
  }
  return false;
}

bool NeighbourRegion::begin_reading() {
  // Another engine may have taken the region over since it was mapped. While the number is locked, it does
  // not move the pins.
  if (!rows_->is_open() || !is_named()) return false;
  // The last engine with this number may have died, and the owner may not have cleared its pins yet.
  rows_->clear_pins(area_.reader);
  return ByteLock::share(fd_, area_.reader);
}

bool NeighbourRegion::is_named() const {
  struct stat opened {};
  struct stat named {};
  return ::fstat(fd_, &opened) == 0 && ::lstat(path_.c_str(), &named) == 0 && named.st_ino == opened.st_ino &&
         named.st_dev == opened.st_dev;
}

std::optional<unsigned> shared_number(const HostRegion& own) {
  const RegionOptions& options = own.options();
  if (options.share_for.empty()) return std::nullopt;
  const std::uint64_t inode = own.inode();
  for (unsigned number = 0; number < kMostShared; ++number) {
    struct stat named {};
    const std::string path = SharedFile::shared_path_of(options.shm_directory, options.share_for, number);
    if (::lstat(path.c_str(), &named) == 0 && named.st_ino == inode) return number;
  }
  return std::nullopt;
}

bool NeighbourRegion::is_alive() {
  if (!rows_->is_open()) return false;
  if (ByteLock::is_locked(fd_, kOwnerByte)) return true;
  remove_name();
  return false;
}

void NeighbourRegion::remove_name() const {
  struct stat opened {};
  // In this order: a start may remove the shared name of a kept region at any time and then locks the file.
  if (::fstat(fd_, &opened) != 0 || opened.st_nlink != 1 || !is_named()) return;
  if (::flock(fd_, LOCK_EX | LOCK_NB) != 0) return;
  if (is_named()) ::unlink(path_.c_str());
  (void)::flock(fd_, LOCK_UN);
}

}  // namespace kv_offload
