// SPDX-License-Identifier: Apache-2.0
#include "memory/host_region.h"

#include <fcntl.h>
#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <limits>
#include <stdexcept>
#include <thread>
#include <utility>

#include "base/clock.h"
#include "memory/byte_lock.h"
#include "memory/control_page.h"
#include "memory/memory_headroom.h"
#include "memory/populate.h"
#include "memory/shared_file.h"
#include "memory/shared_row.h"

namespace kv_offload {
namespace {

constexpr std::uint64_t kLargeArea = std::uint64_t{64} << 20;
constexpr auto kPollAtMost = std::chrono::milliseconds(20);
constexpr auto kFirstRankDeadline = std::chrono::minutes(2);
constexpr auto kKilledEngineWait = std::chrono::seconds(2);  // an engine killed now has ended by then
constexpr auto kReadersWait = std::chrono::seconds(3);       // readers of an ended engine have left by then

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

// A worker's own area, followed by places for areas of neighbours. The address space is reserved at once.
class Window {
 public:
  Window() = default;
  Window(std::uint64_t slot_bytes, std::uint32_t slots)
      : slot_bytes_(slot_bytes), bytes_(slot_bytes * slots) {
    void* reserved = ::mmap(nullptr, bytes_ + kHugePageBytes, PROT_NONE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (reserved == MAP_FAILED) {
      throw_resource(
          "cannot reserve {} of address space for the host memory of neighbours: {}; raise ulimit -v or set "
          "share_host_memory to false",
          format_bytes(bytes_), std::strerror(errno));
    }
    reserved_ = static_cast<std::byte*>(reserved);
    start_ =
        reinterpret_cast<std::byte*>(round_up(reinterpret_cast<std::uintptr_t>(reserved_), kHugePageBytes));
  }
  ~Window() {
    if (reserved_ != nullptr) ::munmap(reserved_, bytes_ + kHugePageBytes);
  }
  Window(const Window&) = delete;
  Window& operator=(Window&& other) noexcept {
    std::swap(reserved_, other.reserved_);
    std::swap(start_, other.start_);
    std::swap(slot_bytes_, other.slot_bytes_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }

  // Both return 0 or errno. An unmapped place stays reserved.
  int map(std::uint32_t slot, std::uint64_t bytes, int protection, int fd, std::uint64_t offset) const {
    return ::mmap(at(slot), bytes, protection, MAP_SHARED | MAP_FIXED, fd, static_cast<off_t>(offset)) ==
                   MAP_FAILED
               ? errno
               : 0;
  }
  int unmap(std::uint32_t slot, std::uint64_t bytes) const {
    return ::mmap(at(slot), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1,
                  0) == MAP_FAILED
               ? errno
               : 0;
  }
  std::byte* at(std::uint32_t slot) const { return start_ + slot * slot_bytes_; }
  std::uint64_t slot_bytes() const { return slot_bytes_; }
  std::uint64_t bytes() const { return bytes_; }

 private:
  std::byte* reserved_ = nullptr;
  std::byte* start_ = nullptr;
  std::uint64_t slot_bytes_ = 0, bytes_ = 0;
};

// What a worker has mapped in a neighbour slot. The descriptor holds the lock of its reader number.
struct MappedNeighbour {
  int fd = -1;
  std::uint64_t generation = 0;  // of the request that is mapped or was refused
  std::uint64_t faulted_in = 0;  // bytes from the start of its area
  // ---- after a refusal
  std::uint32_t pause = 0, calls_left = 0;  // calls of map_neighbours between two tries, until the next try
  std::string problem;
};

ControlPage::Sizes sizes_of(const RegionOptions& options) {
  if (options.engine_id.empty())
    throw_invalid("engine_id is empty; all processes of one engine need the same one");
  if (options.num_workers < 1 || options.num_workers > kMostWorkers) {
    throw_invalid("{} workers were given; 1 to {} are possible", options.num_workers, kMostWorkers);
  }
  if (options.num_areas < 1 || options.num_workers % options.num_areas != 0) {
    throw_invalid("{} areas were given for {} workers; each area needs the same number of workers",
                  options.num_areas, options.num_workers);
  }
  std::uint64_t area_bytes = options.bytes / options.num_areas;
  // Large areas consist of whole huge pages, small ones of pages.
  area_bytes = round_down(area_bytes, area_bytes >= kLargeArea ? kHugePageBytes : kPageBytes);
  if (area_bytes == 0 || options.bytes > std::uint64_t{1} << 60) {
    throw_invalid(
        "cpu_bytes_to_use is {} bytes; at least {} per area ({} areas) and at most 1 EiB are possible",
        options.bytes, kPageBytes, options.num_areas);
  }
  ControlPage::Sizes sizes{.bytes = options.bytes,
                           .area_bytes = area_bytes,
                           .num_areas = options.num_areas,
                           .num_workers = options.num_workers,
                           .first_rank = 0,
                           .local_ranks = options.num_workers};
  if (options.local_ranks == 0) return sizes;  // all ranks are on this host
  if (options.first_rank >= options.num_workers ||
      options.local_ranks > options.num_workers - options.first_rank) {
    throw_invalid("{} ranks of this host from rank {} on were given; the engine has ranks 0 to {}",
                  options.local_ranks, options.first_rank, options.num_workers - 1);
  }
  sizes.first_rank = options.first_rank;
  sizes.local_ranks = options.local_ranks;
  if (options.local_ranks == options.num_workers) return sizes;
  // Other ranks are on other hosts, and so are their areas.
  if (sizes.first_rank % sizes.ranks_per_area() != 0 || sizes.local_ranks % sizes.ranks_per_area() != 0) {
    throw_invalid(
        "{} areas for {} ranks were given, and this host has {} ranks from rank {} on: ranks on "
        "several hosts cannot share an area",
        sizes.num_areas, sizes.num_workers, sizes.local_ranks, sizes.first_rank);
  }
  if (!options.share_for.empty()) throw_invalid("host memory of ranks on several hosts cannot be shared");
  return sizes;
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

// Frees kept regions that no process holds if their memory is needed. One that was shared has a second name
// if its engine was killed. With share_for, waits for readers of such regions.
void check_headroom(const RegionOptions& options, std::uint64_t needed, std::vector<std::string>* swept) {
  MemoryHeadroom headroom = memory_headroom(options.shm_directory);
  if (needed <= headroom.bytes) return;
  const auto free_unheld = [&] {
    for (const Unheld which : {Unheld::kKept, Unheld::kLeftovers})
      std::ranges::move(remove_unheld_files(options.shm_directory, which), std::back_inserter(*swept));
    headroom = memory_headroom(options.shm_directory);
  };
  free_unheld();
  // Readers keep the memory of a region without a name until they find that its engine has ended. A killed
  // engine holds its region until it has exited.
  const auto deadline = std::chrono::steady_clock::now() + kReadersWait;
  while (needed > headroom.bytes && !options.share_for.empty() &&
         std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(kPollAtMost);
    free_unheld();
  }
  if (needed <= headroom.bytes) return;
  const bool is_part = options.local_ranks != 0 && options.local_ranks < options.num_workers;
  const std::string here = is_part ? fmt::format(" for {} ranks, of which this host has {}",
                                                 options.num_workers, options.local_ranks)
                                   : "";
  throw_resource(
      "host memory: {} ({} bytes) requested by cpu_bytes_to_use{}, {} bytes{} with the control page; "
      "{} ({} bytes) available, limited by {}: {}",
      format_bytes(options.bytes), options.bytes, here, needed, is_part ? " here" : "",
      format_bytes(headroom.bytes), headroom.bytes, headroom.limited_by,
      remedy_for(headroom, options.shm_directory));
}

std::uint64_t memory_of(const ControlPage::Sizes& sizes) {
  return ControlPage::bytes(sizes.num_workers) + sizes.area_bytes * sizes.local_areas();
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
  const bool has_table = (!options.keep_for.empty() || !options.share_for.empty()) && size > bytes;
  if (size != bytes && !has_table) throw_resource("the region has {} bytes, not {}", size, bytes);
}

// Adopts an earlier engine's file: keeps the areas, clears what its processes exchanged. `geometry`: of the
// calling rank, the first one of the host.
bool take_over(int fd, std::uint64_t bytes, const RegionOptions& options, const ControlPage::Sizes& sizes,
               const RankGeometry& geometry) {
  try {
    check_agreement(fd, bytes, options, sizes);
  } catch (const std::exception&) {  // of other sizes or another version
    return false;
  }
  const Mapping page(fd, ControlPage::bytes(sizes.num_workers));
  ControlPage control(page.start(), sizes);
  if (!control.is_of_this_boot()) return false;
  // Readers of the last owner that still have its table mapped write their pins where it had them.
  if (!options.share_for.empty() && control.shared_layout() != ControlPage::layout_of(geometry) &&
      !ByteLock(fd, 0, kMostReaders).is_held())
    return false;
  control.forget();
  return true;
}

}  // namespace

struct HostRegion::Impl {
  RegionOptions options;
  ControlPage::Sizes sizes;
  std::vector<std::string> swept;
  RegionOrigin origin = RegionOrigin::kNew;  // set by open_file()
  SharedFile file;                           // must outlive the mapping
  Mapping mapping;
  std::vector<Mapping> behind;  // after the areas
  ControlPage control;
  std::atomic<bool> cut_off{false};
  // ---- with share_for
  std::uint32_t own_area = 0, rank = 0;  // of a worker
  Window window;                         // of a worker: the own area and those of neighbours
  std::array<MappedNeighbour, kMostNeighbours> neighbours;

  ~Impl() {
    for (const MappedNeighbour& neighbour : neighbours) {
      if (neighbour.fd >= 0) ::close(neighbour.fd);
    }
  }
  // `first`: the geometry of the first rank of this host, in its process only.
  Impl(const RegionOptions& given, const RankGeometry* first, bool is_scheduler);
  SharedFile open_file(const RankGeometry* first);
  // Kept files have one name per host: hosts may be containers with one /dev/shm. An engine that does not
  // share must not adopt a file that other engines may still read.
  std::string kept_name() const {
    std::string name = options.keep_for;
    if (sizes.first_rank != 0) name += fmt::format(" from rank {}", sizes.first_rank);
    if (!options.share_for.empty()) name += fmt::format(" shared for {}", options.share_for);
    return name;
  }
  std::uint64_t bytes() const { return area_offset(sizes.first_area() + sizes.local_areas()); }
  std::uint64_t area_offset(std::uint32_t index) const {
    return ControlPage::padded_bytes(sizes.num_workers) + (index - sizes.first_area()) * sizes.area_bytes;
  }
  // Distance of the places in the window. Areas > 1 GiB stay aligned with the pieces that CUDA registers. A
  // gap after each area keeps copies from being merged over two registrations.
  std::uint64_t slot_bytes() const {
    constexpr std::uint64_t kPiece = std::uint64_t{1} << 30;
    return round_up(sizes.area_bytes + kPageBytes, sizes.area_bytes > kPiece ? kPiece : kHugePageBytes);
  }
  bool is_private() const { return options.keep_for.empty() && options.share_for.empty(); }
  std::uint32_t neighbour_slots() const;
  void open_window(std::uint32_t worker);
  std::string map_neighbour(std::uint32_t slot, const NeighbourArea& area);
  void unmap_neighbour(std::uint32_t slot);
  void check_area(std::uint32_t index) const;
  void check_rank(std::uint32_t rank) const;
  std::vector<std::uint32_t> missing_ranks() const;
};

HostRegion::Impl::Impl(const RegionOptions& given, const RankGeometry* first, bool is_scheduler)
    : options(given), sizes(sizes_of(given)) {
  swept = remove_unheld_files(options.shm_directory, Unheld::kLeftovers);
  file = open_file(first);
  if (is_scheduler && options.local_ranks == 0 && file.size() >= kPageBytes) {
    const Mapping page(file.fd(), kPageBytes);
    const ControlPage::Sizes known = ControlPage::with_ranks_of(page.start(), sizes);
    options.local_ranks = known.local_ranks;
    options.num_areas = known.num_areas;
    sizes = sizes_of(options);
  }
  check_agreement(file.fd(), bytes(), options, sizes);
  mapping = Mapping(file.fd(), bytes());
  control = ControlPage(mapping.start(), sizes);
  if (first != nullptr && !options.keep_for.empty()) control.set_origin(origin);
  std::byte* const areas = mapping.start() + area_offset(sizes.first_area());
  const std::size_t areas_bytes = sizes.area_bytes * sizes.local_areas();
  ::madvise(areas, areas_bytes, MADV_DONTDUMP);
  if (options.huge_pages) ::madvise(areas, areas_bytes, MADV_HUGEPAGE);  // a hint: it may fail
}

SharedFile HostRegion::Impl::open_file(const RankGeometry* first) {
  const std::string path = SharedFile::path_of(options.shm_directory, options.engine_id);
  if (!options.keep_for.empty()) {
    if (first == nullptr) return SharedFile::wait_and_open(path, kFirstRankDeadline);
    bool is_held = false;
    const auto adopt = [&](int fd) {
      if (take_over(fd, bytes(), options, sizes, *first)) return true;
      origin = RegionOrigin::kReplaced;
      return false;
    };
    SharedFile kept =
        SharedFile::adopt(options.shm_directory, kept_name(), path, adopt, kKilledEngineWait, &is_held);
    if (is_held) origin = RegionOrigin::kInUse;
    // An engine that was killed early has allocated only a part of its memory.
    if (kept.fd() >= 0) {
      origin = RegionOrigin::kAdopted;
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
  if (index - sizes.first_area() >= sizes.local_areas())  // wraps around below the first one
    throw_invalid("area {} is on another host; this one has {} from {} on", index, sizes.local_areas(),
                  sizes.first_area());
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
  if (options.first_rank != 0) {
    throw_invalid("the scheduler was given a host whose first rank is {}; it runs on the host of rank 0",
                  options.first_rank);
  }
  std::unique_ptr<HostRegion> region(new HostRegion);
  region->impl_ = std::make_unique<Impl>(options, nullptr, true);
  const bool is_last = region->impl_->control.attach_scheduler();
  if (is_last && region->impl_->is_private()) region->impl_->file.unlink_name();
  return region;
}

std::unique_ptr<HostRegion> HostRegion::attach_worker(const RegionOptions& options, std::uint32_t rank,
                                                      const RankGeometry& geometry) {
  if (rank >= options.num_workers) {
    throw_invalid("rank {} was given; ranks 0 to num_workers - 1 = {} are possible", rank,
                  static_cast<std::int64_t>(options.num_workers) - 1);
  }
  if (options.local_ranks != 0 && rank - options.first_rank >= options.local_ranks) {
    throw_invalid("rank {} was given; this host has {} ranks from rank {} on", rank, options.local_ranks,
                  options.first_rank);
  }
  std::unique_ptr<HostRegion> region(new HostRegion);
  region->impl_ = std::make_unique<Impl>(options, rank == options.first_rank ? &geometry : nullptr, false);
  region->impl_->open_window(rank);
  const bool is_last = region->impl_->control.attach_worker(rank, geometry);
  if (is_last && region->impl_->is_private()) region->impl_->file.unlink_name();
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
std::uint32_t HostRegion::ranks_per_area() const { return impl_->sizes.ranks_per_area(); }
std::uint32_t HostRegion::first_area() const { return impl_->sizes.first_area(); }
std::uint32_t HostRegion::local_areas() const { return impl_->sizes.local_areas(); }
std::uint64_t HostRegion::area_bytes() const { return impl_->sizes.area_bytes; }

std::span<std::byte> HostRegion::area(std::uint32_t index) const {
  impl_->check_area(index);
  const bool in_window = impl_->window.bytes() > 0 && index == impl_->own_area;
  std::byte* const start =
      in_window ? impl_->window.at(0) : impl_->mapping.start() + impl_->area_offset(index);
  return {start, impl_->sizes.area_bytes};
}

Shard HostRegion::shard(std::uint32_t index, RowId row, std::uint64_t bytes) const {
  const std::uint64_t start = row * std::uint64_t{kPageBytes};
  const bool in_window = impl_->window.bytes() > 0 && index == impl_->own_area;
  const std::span<std::byte> all = in_window ? window() : area(index);
  if (start > all.size() || bytes > all.size() - start) {
    throw std::logic_error(
        fmt::format("row {} with {} bytes is not inside an area of {} bytes", row, bytes, all.size()));
  }
  return all.subspan(start, bytes);
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

// ---- ranks on several hosts

bool HostRegion::spans_hosts() const { return impl_->sizes.local_ranks < impl_->sizes.num_workers; }
std::uint32_t HostRegion::first_rank() const { return impl_->sizes.first_rank; }
std::uint32_t HostRegion::local_ranks() const { return impl_->sizes.local_ranks; }

bool HostRegion::is_published(std::uint32_t rank) const {
  impl_->check_rank(rank);
  return impl_->control.is_published(rank);
}

void HostRegion::publish_remote(std::uint32_t rank, const RankGeometry& geometry) {
  impl_->check_rank(rank);
  if (impl_->sizes.is_local(rank)) throw_invalid("rank {} runs on this host and publishes itself", rank);
  impl_->control.publish_remote(rank, geometry);
}

void HostRegion::set_endpoint(std::uint32_t rank, std::string_view endpoint) {
  impl_->check_rank(rank);
  impl_->control.set_endpoint(rank, endpoint);
}

std::string HostRegion::endpoint(std::uint32_t rank) const {
  impl_->check_rank(rank);
  return impl_->control.endpoint(rank);
}

void HostRegion::take_reports(ReportCursor* cursor, std::vector<RankReport>* reports) const {
  impl_->control.take_reports(cursor, reports);
}

std::uint32_t HostRegion::report_count() const { return impl_->control.report_count(); }

void HostRegion::wait_for_report(std::uint32_t seen, std::chrono::nanoseconds timeout) const {
  impl_->control.wait_for_report(seen, timeout);
}

void HostRegion::wake_report_waiters() const { impl_->control.wake_report_waiters(); }

void HostRegion::set_cut_off(bool cut_off) { impl_->cut_off.store(cut_off); }
bool HostRegion::is_cut_off() const { return impl_->cut_off.load(std::memory_order_relaxed); }

void HostRegion::set_fetching(bool fetching) { impl_->control.set_fetching(fetching); }

bool HostRegion::is_fetching() const { return impl_->control.is_fetching(); }

void HostRegion::report(std::uint32_t rank, Ticket ticket, std::uint64_t failed_groups) {
  impl_->check_rank(rank);
  if (ticket != kNoTicket) impl_->control.report(rank, ticket, failed_groups);
}

TicketResult HostRegion::result(Ticket ticket, std::uint64_t* failed_groups, TicketKind kind) const {
  if (ticket == kNoTicket) throw std::logic_error("result() was called without a ticket");
  const std::uint32_t step = kind == TicketKind::kStore ? impl_->sizes.ranks_per_area() : 1;
  std::uint64_t all_failed = 0;
  for (std::uint32_t rank = 0; rank < impl_->sizes.num_workers; rank += step) {
    std::uint64_t failed = 0;
    if (impl_->control.result(rank, ticket, &failed) == TicketResult::kPending) return TicketResult::kPending;
    all_failed |= failed;
  }
  *failed_groups = all_failed;
  return TicketResult::kDone;
}

std::span<std::byte> HostRegion::memory_after_areas(std::uint64_t bytes, std::uint64_t offset) {
  const int fd = impl_->file.fd();
  const std::uint64_t start = impl_->bytes() + offset;
  const auto end = static_cast<off_t>(start + bytes);
  // A process of another engine that has the rest mapped would die of a shorter file.
  const bool may_shorten = impl_->options.share_for.empty();
  int error = 0;
  if (may_shorten && ::ftruncate(fd, std::min(end, static_cast<off_t>(file_size(fd)))) != 0) error = errno;
  if (error == 0) error = ::posix_fallocate(fd, static_cast<off_t>(start), static_cast<off_t>(bytes));
  if (error != 0) {
    throw_resource("cannot allocate {} in {} for the table of host memory rows: {}; lower cpu_bytes_to_use",
                   format_bytes(bytes), impl_->options.shm_directory, std::strerror(error));
  }
  return {impl_->behind.emplace_back(fd, bytes, start).start(), bytes};
}

bool HostRegion::keep() {
  const bool is_shared = !impl_->options.share_for.empty();
  return impl_->file.keep(impl_->options.shm_directory, impl_->kept_name(), is_shared);
}

KeptRegion HostRegion::kept() const { return impl_->control.kept(); }

void HostRegion::set_region_set(const RegionSet& set) { impl_->control.set_region_set(set); }

// ---- with share_for

std::uint32_t HostRegion::Impl::neighbour_slots() const {
  if (options.share_for.empty()) return 0;
  constexpr std::uint64_t kMostPages = std::uint64_t{1} << 32;  // numbers of a RowId
  const std::uint64_t places = kMostPages / (slot_bytes() / kPageBytes);
  return static_cast<std::uint32_t>(
      std::min<std::uint64_t>(kMostNeighbours, places - std::min<std::uint64_t>(places, 2)));
}

void HostRegion::Impl::open_window(std::uint32_t worker) {
  rank = worker;
  own_area = sizes.area_of(worker);
  if (options.share_for.empty()) return;
  Window opened(slot_bytes(), 1 + neighbour_slots());
  if (const int error =
          opened.map(0, sizes.area_bytes, PROT_READ | PROT_WRITE, file.fd(), area_offset(own_area));
      error != 0) {
    throw_resource("cannot map the host memory region: {}", std::strerror(error));
  }
  window = std::move(opened);
  ::madvise(window.at(0), sizes.area_bytes, MADV_DONTDUMP);
  if (options.huge_pages) ::madvise(window.at(0), sizes.area_bytes, MADV_HUGEPAGE);
}

std::span<std::byte> HostRegion::memory_of_shared_rows(std::uint64_t bytes) {
  if (impl_->options.share_for.empty()) throw std::logic_error("the region has no share_for");
  const std::span<std::byte> memory = memory_after_areas(bytes);
  impl_->control.set_shared_rows(impl_->bytes());
  return memory;
}

void HostRegion::share() {
  if (!ByteLock::share(impl_->file.fd(), kOwnerByte)) {
    throw_resource("{} has no file locks: other engines cannot load from this one",
                   impl_->options.shm_directory);
  }
  if (impl_->file.share(impl_->options.shm_directory, impl_->options.share_for)) return;
  throw_resource(
      "{} engines of this model share host memory in {} already: this one loads from up to {} of them, and "
      "they cannot load from it. Run fewer engines of one model and user on this host",
      kMostShared, impl_->options.shm_directory, kMostNeighbours);
}

void HostRegion::stop_sharing() { impl_->file.unlink_name(); }

bool HostRegion::if_reader_is_dead(unsigned reader, const std::function<void()>& action) const {
  const ByteLock lock(impl_->file.fd(), reader);
  if (!lock.is_held()) return false;
  action();
  return true;
}

bool HostRegion::if_no_reader_lives(const std::function<void()>& action) const {
  const ByteLock lock(impl_->file.fd(), 0, kMostReaders);
  if (!lock.is_held()) return false;
  action();
  return true;
}

std::uint32_t HostRegion::neighbour_slots() const { return impl_->neighbour_slots(); }

RowId HostRegion::neighbour_row(std::uint32_t slot, RowId row) const {
  return static_cast<RowId>((slot + 1) * (impl_->slot_bytes() / kPageBytes) + row);
}

void HostRegion::request_neighbour(std::uint32_t slot, const NeighbourArea& area) {
  impl_->control.request_neighbour(slot, area);
}

void HostRegion::dismiss_neighbour(std::uint32_t slot) { impl_->control.dismiss_neighbour(slot); }

bool HostRegion::has_mapped(std::uint32_t slot) const { return impl_->control.has_mapped(slot); }

bool HostRegion::has_unmapped(std::uint32_t slot) const { return impl_->control.has_unmapped(slot); }

bool HostRegion::is_refused(std::uint32_t slot) const { return impl_->control.is_refused(slot); }

// Returns the problem, or nothing. The scheduler has validated the file; its inode says that it is the same.
std::string HostRegion::Impl::map_neighbour(std::uint32_t slot, const NeighbourArea& area) {
  const std::string path = SharedFile::shared_path_of(options.shm_directory, options.share_for, area.number);
  std::string problem;
  const int fd = open_shared_file(path, &problem);
  const auto refuse = [&](const std::string& why) {
    if (fd >= 0) ::close(fd);
    return fmt::format("{} cannot be read: {}", path, why);
  };
  if (fd < 0 || !problem.empty()) return refuse(fd < 0 ? "it does not exist any more" : problem);
  if (inode_of(fd) != area.inode) return refuse("it is another file now");
  if (file_size(fd) < bytes()) return refuse("it is too small");
  if (!ByteLock::share(fd, area.reader)) return refuse("its lock is held by another process");
  if (const int error = window.map(slot + 1, sizes.area_bytes, PROT_READ, fd, area_offset(own_area));
      error != 0)
    return refuse(std::strerror(error));
  ::madvise(window.at(slot + 1), sizes.area_bytes, MADV_DONTDUMP);
  neighbours[slot].fd = fd;
  return {};
}

std::vector<std::string> HostRegion::map_neighbours(const NeighbourChange& change,
                                                    const std::function<bool()>& is_stopped) {
  std::vector<std::string> problems;
  Impl& impl = *impl_;
  for (std::uint32_t slot = 0; slot < impl.neighbour_slots(); ++slot) {
    if (is_stopped && is_stopped()) break;
    MappedNeighbour& mapped = impl.neighbours[slot];
    const auto wanted = impl.control.neighbour(slot);
    if (!wanted) continue;
    const std::span<std::byte> memory(impl.window.at(slot + 1), impl.sizes.area_bytes);
    // The same file may be requested again, under another reader number.
    if (wanted->generation != mapped.generation) {
      if (mapped.fd >= 0) {
        if (change) (void)change(memory, false);
        impl.unmap_neighbour(slot);
      }
      mapped = {};
      mapped.generation = wanted->generation;
      if (wanted->area.inode == 0) impl.control.set_done(slot, impl.rank, wanted->generation);
    }
    if (wanted->area.inode == 0 || mapped.fd >= 0) continue;         // dismissed, or mapped already
    if (mapped.calls_left > 0 && --mapped.calls_left > 0) continue;  // pausing after a refusal
    std::string problem = impl.map_neighbour(slot, wanted->area);
    if (problem.empty() && change) {
      if (const Status status = change(memory, true); !status.is_ok()) {
        problem = fmt::format("host memory of a neighbour cannot be read: {}", status.to_string());
        impl.unmap_neighbour(slot);
      }
    }
    if (problem.empty()) {
      impl.control.set_done(slot, impl.rank, wanted->generation);
      continue;
    }
    impl.control.set_refused(slot, impl.rank, wanted->generation);
    mapped.pause = mapped.pause == 0 ? kFirstPause : std::min(2 * mapped.pause, kMostPause);
    mapped.calls_left = mapped.pause;
    // Reported when it changes, not in each try.
    if (problem != mapped.problem) problems.push_back(problem);
    mapped.problem = std::move(problem);
  }
  return problems;
}

std::uint64_t HostRegion::fault_in_neighbours(std::uint64_t bytes) {
  std::uint64_t done = 0;
  Impl& impl = *impl_;
  const auto start = static_cast<off_t>(impl.area_offset(impl.own_area));
  for (std::uint32_t slot = 0; slot < impl.neighbour_slots() && done < bytes; ++slot) {
    MappedNeighbour& mapped = impl.neighbours[slot];
    if (mapped.fd < 0 || mapped.faulted_in >= impl.sizes.area_bytes) continue;
    const auto from = static_cast<off_t>(mapped.faulted_in);
    // A page that its owner has not allocated would be allocated by a read.
    const off_t hole = ::lseek(mapped.fd, start + from, SEEK_HOLE) - start;
    const auto end = std::min<off_t>(hole, static_cast<off_t>(impl.sizes.area_bytes));
    if (end <= from) continue;
    const std::uint64_t piece = std::min(bytes - done, static_cast<std::uint64_t>(end - from));
    if (!enter_in_page_tables({impl.window.at(slot + 1) + from, piece})) {
      mapped.faulted_in = impl.sizes.area_bytes;  // this kernel cannot: each load faults
      continue;
    }
    mapped.faulted_in += piece;
    done += piece;
  }
  return done;
}

void HostRegion::Impl::unmap_neighbour(std::uint32_t slot) {
  (void)window.unmap(slot + 1, sizes.area_bytes);
  ::close(std::exchange(neighbours[slot].fd, -1));
}

std::span<std::byte> HostRegion::window() const {
  if (impl_->window.bytes() == 0) return area(impl_->own_area);
  return {impl_->window.at(0), impl_->window.bytes()};
}

const RegionOptions& HostRegion::options() const { return impl_->options; }

std::uint64_t HostRegion::inode() const { return inode_of(impl_->file.fd()); }

const std::vector<std::string>& HostRegion::swept() const { return impl_->swept; }

std::vector<std::string> sweep_leftovers(const std::string& shm_directory) {
  return remove_unheld_files(shm_directory, Unheld::kLeftovers);
}

}  // namespace kv_offload
