// SPDX-License-Identifier: Apache-2.0
#include "memory/host_region.h"

#include <fcntl.h>
#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <limits>
#include <stdexcept>
#include <thread>
#include <utility>

#include "base/clock.h"
#include "memory/control_page.h"
#include "memory/memory_headroom.h"
#include "memory/populate.h"
#include "memory/shared_file.h"

namespace kv_offload {
namespace {

constexpr std::uint64_t kLargeArea = std::uint64_t{64} << 20;
constexpr auto kPollAtMost = std::chrono::milliseconds(20);
constexpr auto kRankZeroDeadline = std::chrono::minutes(2);
constexpr auto kKilledEngineWait = std::chrono::seconds(2);  // an engine killed now has ended by then

// A mapping of a part of a file. Its start in memory is aligned for huge pages.
class Mapping {
 public:
  Mapping() = default;
  Mapping(int fd, std::uint64_t bytes, std::uint64_t offset = 0) : bytes_(bytes) {
    void* reserved = ::mmap(nullptr, bytes + kHugePageBytes, PROT_NONE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (reserved == MAP_FAILED) fail(errno);
    auto* const from = static_cast<std::byte*>(reserved);
    auto* const start =
        reinterpret_cast<std::byte*>(round_up(reinterpret_cast<std::uintptr_t>(from), kHugePageBytes));
    auto* const end = start + round_up(bytes, kPageBytes);
    if (start > from) ::munmap(from, static_cast<std::size_t>(start - from));
    if (from + bytes + kHugePageBytes > end) {
      ::munmap(end, static_cast<std::size_t>(from + bytes + kHugePageBytes - end));
    }
    if (::mmap(start, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd,
               static_cast<off_t>(offset)) == MAP_FAILED) {
      const int error = errno;
      ::munmap(start, bytes);
      fail(error);
    }
    start_ = start;
  }
  ~Mapping() {
    if (start_ != nullptr) ::munmap(start_, bytes_);
  }
  Mapping(Mapping&& other) noexcept : start_(std::exchange(other.start_, nullptr)), bytes_(other.bytes_) {}
  Mapping& operator=(Mapping&& other) noexcept {
    std::swap(start_, other.start_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }

  std::byte* start() const { return start_; }

 private:
  [[noreturn]] void fail(int error) const {
    throw_resource(
        "cannot reserve {} of address space for the host memory region: {}; raise ulimit -v or lower "
        "cpu_bytes_to_use",
        format_bytes(bytes_), std::strerror(error));
  }

  std::byte* start_ = nullptr;
  std::uint64_t bytes_ = 0;
};

ControlPage::Sizes sizes_of(const RegionOptions& options) {
  if (options.engine_id.empty())
    throw_invalid("engine_id is empty; all processes of one engine need the same one");
  if (options.num_workers < 1 || options.num_workers > kMostWorkers) {
    throw_invalid("{} workers were given; 1 to {} are possible", options.num_workers, kMostWorkers);
  }
  if (options.num_areas != 1 && options.num_areas != options.num_workers) {
    throw_invalid("{} areas were given for {} workers; use one for each worker or one for all",
                  options.num_areas, options.num_workers);
  }
  std::uint64_t area_bytes = options.bytes / options.num_areas;
  area_bytes = round_down(area_bytes, area_bytes >= kLargeArea ? kHugePageBytes : kPageBytes);
  if (area_bytes == 0 || options.bytes > std::uint64_t{1} << 60) {
    throw_invalid(
        "cpu_bytes_to_use is {} bytes; at least {} per rank ({} ranks) and at most 1 EiB are possible",
        options.bytes, kPageBytes, options.num_areas);
  }
  return {options.bytes, area_bytes, options.num_areas, options.num_workers};
}

std::string remedy_for(const MemoryHeadroom& headroom, const std::string& shm_directory) {
  if (headroom.limited_by == shm_directory) {
    return fmt::format(
        "lower cpu_bytes_to_use or enlarge {} (docker run --shm-size, Kubernetes emptyDir with "
        "medium Memory, mount -o remount,size=)",
        shm_directory);
  }
  if (headroom.limited_by == "MemAvailable") return "lower cpu_bytes_to_use or free memory on this machine";
  return "lower cpu_bytes_to_use or raise the memory limit of the container or service";
}

// Frees kept regions that no process holds if their memory is needed.
void check_headroom(const RegionOptions& options, std::uint64_t needed, std::vector<std::string>* swept) {
  MemoryHeadroom headroom = memory_headroom(options.shm_directory);
  if (needed <= headroom.bytes) return;
  std::ranges::move(remove_unheld_files(options.shm_directory, Unheld::kKept), std::back_inserter(*swept));
  headroom = memory_headroom(options.shm_directory);
  if (needed <= headroom.bytes) return;
  throw_resource(
      "host memory: {} ({} bytes) requested by cpu_bytes_to_use, {} bytes with the control page; "
      "{} ({} bytes) available, limited by {}: {}",
      format_bytes(options.bytes), options.bytes, needed, format_bytes(headroom.bytes), headroom.bytes,
      headroom.limited_by, remedy_for(headroom, options.shm_directory));
}

std::uint64_t memory_of(const ControlPage::Sizes& sizes) {
  return ControlPage::bytes(sizes.num_workers) + sizes.area_bytes * sizes.num_areas;
}

// An unknown headroom does not limit. For threads, which must not throw.
std::uint64_t headroom_bytes(const std::string& shm_directory) {
  try {
    return memory_headroom(shm_directory).bytes;
  } catch (const std::exception&) {
    return std::numeric_limits<std::uint64_t>::max();
  }
}

// Allocates the control page at once, so that no process dies writing to it.
void fill_in(int fd, const RegionOptions& options, const ControlPage::Sizes& sizes,
             std::vector<std::string>* swept) {
  const std::uint64_t control = ControlPage::bytes(sizes.num_workers);
  check_headroom(options, memory_of(sizes), swept);
  if (const int error = ::posix_fallocate(fd, 0, static_cast<off_t>(control)); error != 0) {
    throw_resource("cannot allocate {} for the control page in {}: {}; enlarge it", format_bytes(control),
                   options.shm_directory, std::strerror(error));
  }
  const Mapping page(fd, kPageBytes);
  ControlPage::initialise(page.start(), sizes);
}

// Call before mapping the whole file: a file of other sizes must not be touched beyond its end.
void check_agreement(int fd, std::uint64_t bytes, const RegionOptions& options,
                     const ControlPage::Sizes& sizes) {
  const std::uint64_t size = file_size(fd);
  if (size < kPageBytes) throw_resource("the shared memory file of this engine id is not a region");
  const Mapping page(fd, kPageBytes);
  const ControlPage control(page.start(), sizes);
  const bool has_table = !options.keep_for.empty() && size > bytes;
  if (size != bytes && !has_table) throw_resource("the region has {} bytes, not {}", size, bytes);
}

// Adopts an earlier engine's file: keeps the areas, clears what its processes exchanged.
bool take_over(int fd, std::uint64_t bytes, const RegionOptions& options, const ControlPage::Sizes& sizes) {
  try {
    check_agreement(fd, bytes, options, sizes);
  } catch (const std::exception&) {  // of other sizes or another version
    return false;
  }
  const Mapping page(fd, ControlPage::bytes(sizes.num_workers));
  ControlPage(page.start(), sizes).forget();
  return true;
}

}  // namespace

struct HostRegion::Impl {
  RegionOptions options;
  ControlPage::Sizes sizes;
  std::vector<std::string> swept;
  SharedFile file;  // must outlive the mapping
  Mapping mapping;
  Mapping behind;  // after the areas
  ControlPage control;

  Impl(const RegionOptions& given, bool is_rank_0);
  SharedFile open_file(bool is_rank_0);
  std::uint64_t bytes() const { return area_offset(sizes.num_areas); }
  std::uint64_t area_offset(std::uint32_t index) const {
    return ControlPage::padded_bytes(sizes.num_workers) + index * sizes.area_bytes;
  }
  void check_area(std::uint32_t index) const;
  void check_rank(std::uint32_t rank) const;
  std::vector<std::uint32_t> missing_ranks() const;
};

HostRegion::Impl::Impl(const RegionOptions& given, bool is_rank_0) : options(given), sizes(sizes_of(given)) {
  swept = remove_unheld_files(options.shm_directory, Unheld::kLeftovers);
  file = open_file(is_rank_0);
  check_agreement(file.fd(), bytes(), options, sizes);
  mapping = Mapping(file.fd(), bytes());
  control = ControlPage(mapping.start(), sizes);
  std::byte* const areas = mapping.start() + area_offset(0);
  const std::size_t areas_bytes = sizes.area_bytes * sizes.num_areas;
  ::madvise(areas, areas_bytes, MADV_DONTDUMP);
  if (options.huge_pages) ::madvise(areas, areas_bytes, MADV_HUGEPAGE);  // a hint: it may fail
}

SharedFile HostRegion::Impl::open_file(bool is_rank_0) {
  const std::string path = SharedFile::path_of(options.shm_directory, options.engine_id);
  if (!options.keep_for.empty()) {
    if (!is_rank_0) return SharedFile::wait_and_open(path, kRankZeroDeadline);
    SharedFile kept = SharedFile::adopt(
        options.shm_directory, options.keep_for, path,
        [this](int fd) { return take_over(fd, bytes(), options, sizes); }, kKilledEngineWait);
    // An engine that was killed early has allocated only a part of its memory.
    if (kept.fd() >= 0) {
      const std::uint64_t all = memory_of(sizes);
      check_headroom(options, all - std::min(all, memory_taken(kept.fd())), &swept);
      return kept;
    }
  }
  return SharedFile::open_or_create(path, bytes(), [&](int fd) { fill_in(fd, options, sizes, &swept); });
}

void HostRegion::Impl::check_area(std::uint32_t index) const {
  if (index >= sizes.num_areas)
    throw_invalid("area {} is out of range; there are {}", index, sizes.num_areas);
}

void HostRegion::Impl::check_rank(std::uint32_t rank) const {
  if (rank >= sizes.num_workers)
    throw_invalid("rank {} is out of range; there are {}", rank, sizes.num_workers);
}

std::vector<std::uint32_t> HostRegion::Impl::missing_ranks() const {
  std::vector<std::uint32_t> missing;
  for (std::uint32_t rank = 0; rank < sizes.num_workers; ++rank) {
    if (!control.is_published(rank)) missing.push_back(rank);
  }
  return missing;
}

HostRegion::HostRegion() = default;
HostRegion::~HostRegion() = default;

std::unique_ptr<HostRegion> HostRegion::attach_scheduler(const RegionOptions& options) {
  std::unique_ptr<HostRegion> region(new HostRegion);
  region->impl_ = std::make_unique<Impl>(options, false);
  const bool is_last = region->impl_->control.attach_scheduler();
  if (is_last && options.keep_for.empty()) region->impl_->file.unlink_name();
  return region;
}

std::unique_ptr<HostRegion> HostRegion::attach_worker(const RegionOptions& options, std::uint32_t rank,
                                                      const RankGeometry& geometry) {
  if (rank >= options.num_workers) {
    throw_invalid("rank {} was given; ranks 0 to num_workers - 1 = {} are possible", rank,
                  static_cast<std::int64_t>(options.num_workers) - 1);
  }
  std::unique_ptr<HostRegion> region(new HostRegion);
  region->impl_ = std::make_unique<Impl>(options, rank == 0);
  const bool is_last = region->impl_->control.attach_worker(rank, geometry);
  if (is_last && options.keep_for.empty()) region->impl_->file.unlink_name();
  return region;
}

Status HostRegion::wait_for_ranks(std::chrono::nanoseconds timeout) const {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  std::chrono::nanoseconds pause = std::chrono::milliseconds(1);
  while (true) {
    const std::vector<std::uint32_t> missing = impl_->missing_ranks();
    if (missing.empty()) return Status::ok();
    if (std::chrono::steady_clock::now() >= deadline) {
      return Status::error(StatusKind::kTimeout,
                           fmt::format("of {} ranks, these have not attached to the host memory region: {}",
                                       impl_->sizes.num_workers, fmt::join(missing, ", ")));
    }
    std::this_thread::sleep_for(pause);
    pause = std::min<std::chrono::nanoseconds>(pause * 2, kPollAtMost);
  }
}

RankGeometry HostRegion::geometry(std::uint32_t rank) const {
  impl_->check_rank(rank);
  return impl_->control.geometry(rank);
}

std::uint32_t HostRegion::num_areas() const { return impl_->sizes.num_areas; }
std::uint64_t HostRegion::area_bytes() const { return impl_->sizes.area_bytes; }

std::span<std::byte> HostRegion::area(std::uint32_t index) const {
  impl_->check_area(index);
  return {impl_->mapping.start() + impl_->area_offset(index), impl_->sizes.area_bytes};
}

Shard HostRegion::shard(std::uint32_t index, RowId row, std::uint64_t bytes) const {
  const std::uint64_t start = row * std::uint64_t{kPageBytes};
  if (start > impl_->sizes.area_bytes || bytes > impl_->sizes.area_bytes - start) {
    throw std::logic_error(fmt::format("row {} with {} bytes is not inside an area of {} bytes", row, bytes,
                                       impl_->sizes.area_bytes));
  }
  return area(index).subspan(start, bytes);
}

Status HostRegion::prefault(std::uint32_t index, unsigned threads,
                            const std::function<void(std::uint64_t, std::uint64_t)>& progress) {
  Population population;
  population.range = area(index);
  population.fd = impl_->file.fd();
  population.file_offset = impl_->area_offset(index);
  population.available = [this] { return headroom_bytes(impl_->options.shm_directory); };
  const Status status = populate(population, threads, progress);
  if (status.kind() != StatusKind::kNoSpace) return status;
  const MemoryHeadroom headroom = memory_headroom(impl_->options.shm_directory);
  return Status::error(
      status.kind(),
      fmt::format(
          "area {} of the host memory region (cpu_bytes_to_use {}): {}; now {} available, limited by {}: {}",
          index, format_bytes(impl_->options.bytes), status.message(), format_bytes(headroom.bytes),
          headroom.limited_by, remedy_for(headroom, impl_->options.shm_directory)),
      status.error_number(), impl_->options.shm_directory);
}

Status HostRegion::prefer_node(std::uint32_t index, int node) {
  const std::span<std::byte> memory = area(index);
  if (node < 0) return Status::ok();
  const auto start = static_cast<off_t>(impl_->area_offset(index));
  const off_t data = ::lseek(impl_->file.fd(), start, SEEK_DATA);
  const bool populated = data >= 0 && data < start + static_cast<off_t>(memory.size());
  constexpr int kBits = 1024;  // the kernel uses one bit less than maxnode
  constexpr int kWordBits = 8 * sizeof(unsigned long);
  std::array<unsigned long, kBits / kWordBits> mask{};
  if (node >= kBits) return Status::error(StatusKind::kIo, fmt::format("NUMA node {} is not known", node));
  mask[static_cast<std::size_t>(node / kWordBits)] |= 1ul << (node % kWordBits);
  if (::syscall(SYS_mbind, memory.data(), memory.size(), MPOL_PREFERRED, mask.data(), kBits + 1, 0) != 0) {
    return Status::error(StatusKind::kIo, fmt::format("mbind to NUMA node {}", node), errno);
  }
  if (!populated) return Status::ok();
  return Status::error(StatusKind::kIo,
                       fmt::format("area {} already has memory, which stays on its node", index));
}

void HostRegion::set_fetching(bool fetching) { impl_->control.set_fetching(fetching); }

bool HostRegion::is_fetching() const { return impl_->control.is_fetching(); }

void HostRegion::report(std::uint32_t rank, Ticket ticket, std::uint64_t failed_groups) {
  impl_->check_rank(rank);
  if (ticket != kNoTicket) impl_->control.report(rank, ticket, failed_groups);
}

TicketResult HostRegion::result(Ticket ticket, std::uint64_t* failed_groups, TicketKind kind) const {
  if (ticket == kNoTicket) throw std::logic_error("result() was called without a ticket");
  const bool only_rank_0 = kind == TicketKind::kStore && impl_->sizes.num_areas == 1;
  const std::uint32_t reporting = only_rank_0 ? 1 : impl_->sizes.num_workers;
  std::uint64_t all_failed = 0;
  for (std::uint32_t rank = 0; rank < reporting; ++rank) {
    std::uint64_t failed = 0;
    if (impl_->control.result(rank, ticket, &failed) == TicketResult::kPending) return TicketResult::kPending;
    all_failed |= failed;
  }
  *failed_groups = all_failed;
  return TicketResult::kDone;
}

std::span<std::byte> HostRegion::memory_after_areas(std::uint64_t bytes) {
  const int fd = impl_->file.fd();
  const std::uint64_t start = impl_->bytes();
  const auto end = static_cast<off_t>(start + bytes);
  int error = ::ftruncate(fd, std::min(end, static_cast<off_t>(file_size(fd)))) == 0 ? 0 : errno;
  if (error == 0) error = ::posix_fallocate(fd, static_cast<off_t>(start), static_cast<off_t>(bytes));
  if (error != 0) {
    throw_resource("cannot allocate {} in {} for the table of host memory rows: {}; lower cpu_bytes_to_use",
                   format_bytes(bytes), impl_->options.shm_directory, std::strerror(error));
  }
  impl_->behind = Mapping(fd, bytes, start);
  return {impl_->behind.start(), bytes};
}

bool HostRegion::keep() { return impl_->file.keep(impl_->options.shm_directory, impl_->options.keep_for); }

const std::vector<std::string>& HostRegion::swept() const { return impl_->swept; }

std::vector<std::string> sweep_leftovers(const std::string& shm_directory) {
  return remove_unheld_files(shm_directory, Unheld::kLeftovers);
}

std::vector<KeptRegion> kept_regions(const std::string& shm_directory) { return kept_files(shm_directory); }

}  // namespace kv_offload
