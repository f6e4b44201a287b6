// SPDX-License-Identifier: Apache-2.0
#include "memory/control_page.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <new>
#include <utility>

#include "base/refused_chunks.h"
#include "base/xxh3.h"

namespace kv_offload {
namespace {

constexpr std::uint64_t kMagic = 0x6B765F6F66666C64;  // "kv_offld"
constexpr std::uint32_t kVersion = 3;
constexpr std::size_t kMostFingerprint = 4095;
constexpr std::size_t kWorkerBytes = 16384;
constexpr std::size_t kMostEndpoint = 255;
// Reports of a rank between two reads of its journal. A reader that is slower reads the whole ring instead.
constexpr std::size_t kJournal = 1024;

static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

void wake_all(std::atomic<std::uint32_t>* futex) {
  (void)::syscall(SYS_futex, futex, FUTEX_WAKE, std::numeric_limits<int>::max(), nullptr, nullptr, 0);
}

// Identifies this machine until it is restarted. 0: unknown.
std::uint64_t this_boot() {
  const int fd = ::open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
  if (fd < 0) return 0;
  std::array<char, 64> id{};
  const ::ssize_t bytes = ::read(fd, id.data(), id.size());
  ::close(fd);
  return bytes <= 0 ? 0 : XXH3_64bits(id.data(), static_cast<std::size_t>(bytes));
}

void check_equal(const char* what, std::uint64_t mine, std::uint64_t other) {
  if (mine == other) return;
  throw_invalid(
      "{} is {} in this process and {} in the process that made the host memory region: all ranks and the "
      "scheduler of one engine need the same configuration",
      what, mine, other);
}

}  // namespace

struct ControlPage::Header {
  std::atomic<std::uint64_t> magic;
  std::uint32_t version;
  Sizes sizes;
  std::atomic<std::uint32_t> scheduler;  // 1: attached
  std::atomic<std::uint32_t> attached;   // scheduler and workers
  std::atomic<std::uint32_t> fetching;   // 1: a request waits for a tier's records
  std::atomic<std::uint64_t> shared_rows;
  // A futex, which a process that forwards the reports of this host waits on.
  std::atomic<std::uint32_t> reports;
  std::atomic<std::uint32_t> report_waiters;
  struct Neighbour {                        // a sequence lock
    std::atomic<std::uint64_t> generation;  // odd: the scheduler is writing the other two
    std::atomic<std::uint64_t> inode;       // 0: dismissed
    std::atomic<std::uint64_t> numbers;     // of the name, and of the reader << 8
  };
  std::array<Neighbour, HostRegion::kMostNeighbours> neighbours;
  std::atomic<RegionOrigin> origin;
  std::array<std::atomic<std::uint64_t>, 2> region_set;  // outlives the engine
  std::uint64_t boot;                                    // this_boot() of the process that created the file
  std::atomic<std::uint64_t> shared_layout;              // outlives the engine
};

struct ControlPage::Worker {
  std::atomic<std::uint32_t> attached;
  std::atomic<std::uint32_t> published;  // set after all of the geometry
  std::uint32_t num_groups;
  std::uint32_t fingerprint_bytes;
  std::array<std::uint64_t, 64> shard_bytes;  // kMostGroups at most
  std::array<char, kMostFingerprint> fingerprint;
  // The last generation of each neighbour slot that this rank has carried out, and that it cannot carry out.
  std::array<std::atomic<std::uint64_t>, HostRegion::kMostNeighbours> done, refused;
  std::atomic<std::uint32_t> endpoint_bytes;  // set after the endpoint
  std::array<char, kMostEndpoint> endpoint;
  // The tickets of the last kJournal reports. An entry is written before `reports` counts it.
  std::atomic<std::uint64_t> reports;
  std::array<std::atomic<std::uint64_t>, kJournal> journal;
};

std::uint64_t ControlPage::bytes(std::uint32_t num_workers) {
  static_assert(sizeof(Header) <= kPageBytes && sizeof(Worker) <= kWorkerBytes && sizeof(Slot) == 16);
  return kPageBytes + num_workers * (kWorkerBytes + HostRegion::kTicketSlots * sizeof(Slot));
}

std::uint64_t ControlPage::padded_bytes(std::uint32_t num_workers) {
  return round_up(bytes(num_workers), kHugePageBytes);
}

ControlPage::Sizes ControlPage::with_ranks_of(std::byte* base, const Sizes& sizes) {
  const Header& header = *reinterpret_cast<Header*>(base);
  if (header.magic.load(std::memory_order_acquire) != kMagic || header.version != kVersion) return sizes;
  const Sizes& made = header.sizes;
  if (made.num_workers != sizes.num_workers || made.first_rank != 0) return sizes;
  Sizes taken = sizes;
  taken.local_ranks = made.local_ranks;
  if (made.local_ranks < made.num_workers) taken.num_areas = made.num_areas;
  return taken;
}

void ControlPage::initialise(std::byte* base, const Sizes& sizes) {
  auto* header = new (base) Header{};
  header->version = kVersion;
  header->sizes = sizes;
  header->boot = this_boot();
  header->magic.store(kMagic, std::memory_order_release);
}

void ControlPage::forget() {
  std::memset(base_ + kPageBytes, 0, bytes(num_workers_) - kPageBytes);
  header().scheduler.store(0);
  header().attached.store(0);
  header().fetching.store(0);
  header().shared_rows.store(0);
  header().reports.store(0);
  header().report_waiters.store(0);
  for (auto& neighbour : header().neighbours) {
    neighbour.generation.store(0);
    neighbour.inode.store(0);
    neighbour.numbers.store(0);
  }
}

bool ControlPage::is_of_this_boot() const {
  const std::uint64_t boot = this_boot();
  return boot != 0 && header().boot == boot;
}

ControlPage::ControlPage(std::byte* base, const Sizes& mine)
    : base_(base), num_workers_(mine.num_workers), sizes_(mine) {
  if (header().magic.load(std::memory_order_acquire) != kMagic) {
    throw_resource("the shared memory file of this engine id is not a region: serve under another engine id");
  }
  if (header().version != kVersion) {
    throw_resource(
        "the host memory region has format {}, this process supports {}: all processes of one engine need "
        "the "
        "same version of this package",
        header().version, kVersion);
  }
  const Sizes& other = header().sizes;
  check_equal("cpu_bytes_to_use", mine.bytes, other.bytes);
  check_equal("the number of workers", mine.num_workers, other.num_workers);
  if (mine.num_areas != other.num_areas) {
    throw_invalid(
        "this process reports {} areas of host memory for the engine's {} ranks, and the process that made "
        "the host memory region (of ranks {} to {}) reports {}, so the ranks disagree on which of them hold "
        "the same KV cache (MLA): start all ranks with the same model, settings and vLLM",
        mine.num_areas, mine.num_workers, other.first_rank, other.first_rank + other.local_ranks - 1,
        other.num_areas);
  }
  check_equal("the size of an area", mine.area_bytes, other.area_bytes);
  check_equal("the first rank of this host", mine.first_rank, other.first_rank);
  // A scheduler that starts before its ranks knows of no other host and creates a region for all ranks.
  if (other.local_ranks == other.num_workers && mine.local_ranks < other.local_ranks) {
    throw_invalid(
        "this host has {} of the {} ranks, but the host memory region was created for all ranks: the "
        "scheduler started before the ranks of its host; start the ranks first, as vLLM does",
        mine.local_ranks, mine.num_workers);
  }
  check_equal("the number of ranks of this host", mine.local_ranks, other.local_ranks);
}

ControlPage::Header& ControlPage::header() const { return *reinterpret_cast<Header*>(base_); }

ControlPage::Worker& ControlPage::worker(std::uint32_t rank) const {
  return *reinterpret_cast<Worker*>(base_ + kPageBytes + rank * kWorkerBytes);
}

ControlPage::Slot& ControlPage::slot(std::uint32_t rank, Ticket ticket) const {
  auto* rings = reinterpret_cast<Slot*>(base_ + kPageBytes + num_workers_ * kWorkerBytes);
  return rings[rank * HostRegion::kTicketSlots + ticket % HostRegion::kTicketSlots];
}

// The scheduler runs on the host of rank 0.
bool ControlPage::count_in() {
  const std::uint32_t schedulers = sizes_.first_rank == 0 ? 1 : 0;
  return header().attached.fetch_add(1) + 1 == sizes_.local_ranks + schedulers;
}

bool ControlPage::attach_scheduler() {
  if (header().scheduler.exchange(1) != 0) {
    throw_resource(
        "a scheduler is already attached to this region: does another engine use the same engine id?");
  }
  return count_in();
}

void ControlPage::check(const RankGeometry& geometry) {
  if (geometry.shard_bytes.size() > kMostGroups) {
    throw_invalid("{} KV cache groups were given; up to {} are possible", geometry.shard_bytes.size(),
                  kMostGroups);
  }
  if (geometry.fingerprint.size() > kMostFingerprint) {
    throw_invalid("a fingerprint of {} bytes was given; up to {} are possible", geometry.fingerprint.size(),
                  kMostFingerprint);
  }
}

void ControlPage::publish(std::uint32_t rank, const RankGeometry& geometry) {
  Worker& mine = worker(rank);
  mine.num_groups = static_cast<std::uint32_t>(geometry.shard_bytes.size());
  mine.fingerprint_bytes = static_cast<std::uint32_t>(geometry.fingerprint.size());
  std::copy(geometry.shard_bytes.begin(), geometry.shard_bytes.end(), mine.shard_bytes.begin());
  std::copy(geometry.fingerprint.begin(), geometry.fingerprint.end(), mine.fingerprint.begin());
  mine.published.store(1, std::memory_order_release);
}

bool ControlPage::attach_worker(std::uint32_t rank, const RankGeometry& geometry) {
  check(geometry);
  if (worker(rank).attached.exchange(1) != 0) {
    throw_resource("rank {} is already attached to this region: does another engine use the same engine id?",
                   rank);
  }
  publish(rank, geometry);
  return count_in();
}

void ControlPage::publish_remote(std::uint32_t rank, const RankGeometry& geometry) {
  check(geometry);
  if (!is_published(rank)) publish(rank, geometry);
}

void ControlPage::set_endpoint(std::uint32_t rank, std::string_view endpoint) {
  if (endpoint.empty() || endpoint.size() > kMostEndpoint)
    throw_invalid("an endpoint of {} bytes was given; 1 to {} are possible", endpoint.size(), kMostEndpoint);
  Worker& one = worker(rank);
  if (one.endpoint_bytes.load(std::memory_order_relaxed) != 0) return;
  std::copy(endpoint.begin(), endpoint.end(), one.endpoint.begin());
  one.endpoint_bytes.store(static_cast<std::uint32_t>(endpoint.size()), std::memory_order_release);
}

std::string ControlPage::endpoint(std::uint32_t rank) const {
  const Worker& one = worker(rank);
  return {one.endpoint.data(), one.endpoint_bytes.load(std::memory_order_acquire)};
}

bool ControlPage::is_published(std::uint32_t rank) const {
  return worker(rank).published.load(std::memory_order_acquire) != 0;
}

RankGeometry ControlPage::geometry(std::uint32_t rank) const {
  if (!is_published(rank)) throw_invalid("rank {} has not attached yet: call wait_for_ranks first", rank);
  const Worker& other = worker(rank);
  RankGeometry geometry;
  geometry.shard_bytes.assign(other.shard_bytes.begin(), other.shard_bytes.begin() + other.num_groups);
  geometry.fingerprint.assign(other.fingerprint.data(), other.fingerprint_bytes);
  return geometry;
}

void ControlPage::set_fetching(bool fetching) {
  header().fetching.store(fetching ? 1 : 0, std::memory_order_relaxed);
}

bool ControlPage::is_fetching() const { return header().fetching.load(std::memory_order_relaxed) != 0; }

KeptRegion ControlPage::kept() const {
  return {header().origin.load(), {header().region_set[0].load(), header().region_set[1].load()}};
}

void ControlPage::set_origin(RegionOrigin origin) { header().origin.store(origin); }

void ControlPage::set_region_set(const RegionSet& set) {
  if (kept().set == set) return;
  // A kill between two of these stores leaves no set, or half of two random ones.
  header().region_set[0].store(0);
  header().region_set[1].store(set[1]);
  header().region_set[0].store(set[0]);
}

std::uint64_t ControlPage::layout_of(const RankGeometry& geometry, std::uint64_t format) {
  const std::string all = fmt::format("{:x} {}", format, fmt::join(geometry.shard_bytes, " "));
  return XXH3_64bits(all.data(), all.size()) | 1;
}

std::uint64_t ControlPage::shared_layout() const { return header().shared_layout.load(); }

void ControlPage::set_shared_rows(std::uint64_t offset) {
  header().shared_layout.store(layout_of(geometry(sizes_.first_rank)));
  header().shared_rows.store(offset, std::memory_order_release);
}

std::uint64_t ControlPage::shared_rows() const {
  return header().shared_rows.load(std::memory_order_acquire);
}

void ControlPage::request_neighbour(std::uint32_t slot, const NeighbourArea& area) {
  change_neighbour(slot, area);
}

void ControlPage::dismiss_neighbour(std::uint32_t slot) { change_neighbour(slot, {}); }

void ControlPage::change_neighbour(std::uint32_t slot, const NeighbourArea& area) {
  auto& neighbour = header().neighbours[slot];
  const std::uint64_t generation = neighbour.generation.load(std::memory_order_relaxed);
  neighbour.generation.store(generation + 1, std::memory_order_relaxed);
  // A reader that sees a new value also sees the odd generation (ThreadSanitizer does not support fences).
  neighbour.inode.store(area.inode, std::memory_order_release);
  neighbour.numbers.store(area.number | std::uint64_t{area.reader} << 8, std::memory_order_release);
  neighbour.generation.store(generation + 2, std::memory_order_release);
}

bool ControlPage::is_carried_out(std::uint32_t slot) const {
  const std::uint64_t generation = header().neighbours[slot].generation.load(std::memory_order_relaxed);
  for (std::uint32_t rank = 0; rank < num_workers_; ++rank) {
    if (worker(rank).done[slot].load(std::memory_order_acquire) != generation) return false;
  }
  return true;
}

bool ControlPage::has_mapped(std::uint32_t slot) const {
  return header().neighbours[slot].inode.load(std::memory_order_relaxed) != 0 && is_carried_out(slot);
}

bool ControlPage::has_unmapped(std::uint32_t slot) const {
  return header().neighbours[slot].inode.load(std::memory_order_relaxed) == 0 && is_carried_out(slot);
}

bool ControlPage::is_refused(std::uint32_t slot) const {
  const std::uint64_t generation = header().neighbours[slot].generation.load(std::memory_order_relaxed);
  for (std::uint32_t rank = 0; rank < num_workers_; ++rank) {
    const Worker& one = worker(rank);
    if (generation != 0 && one.refused[slot].load(std::memory_order_relaxed) == generation &&
        one.done[slot].load(std::memory_order_relaxed) != generation)
      return true;
  }
  return false;
}

std::optional<ControlPage::NeighbourRequest> ControlPage::neighbour(std::uint32_t slot) const {
  const auto& neighbour = header().neighbours[slot];
  const std::uint64_t generation = neighbour.generation.load(std::memory_order_acquire);
  const std::uint64_t inode = neighbour.inode.load(std::memory_order_acquire);
  const std::uint64_t numbers = neighbour.numbers.load(std::memory_order_acquire);
  if (generation % 2 != 0 || neighbour.generation.load(std::memory_order_relaxed) != generation)
    return std::nullopt;
  return NeighbourRequest{
      {inode, static_cast<std::uint8_t>(numbers), static_cast<std::uint8_t>(numbers >> 8)}, generation};
}

void ControlPage::set_done(std::uint32_t slot, std::uint32_t rank, std::uint64_t generation) {
  worker(rank).done[slot].store(generation, std::memory_order_release);
}

void ControlPage::set_refused(std::uint32_t slot, std::uint32_t rank, std::uint64_t generation) {
  worker(rank).refused[slot].store(generation, std::memory_order_relaxed);
}

void ControlPage::report(std::uint32_t rank, Ticket ticket, std::uint64_t failed_groups) {
  slot(rank, ticket).report(ticket, failed_groups);
  Worker& mine = worker(rank);
  const std::uint64_t count = mine.reports.load(std::memory_order_relaxed);
  // A reader that sees this entry also sees that all earlier ones are counted.
  mine.journal[count % kJournal].store(ticket, std::memory_order_release);
  mine.reports.store(count + 1, std::memory_order_release);
  // seq_cst: either the waiter sees the new count or we see the waiter.
  header().reports.fetch_add(1);
  if (header().report_waiters.load() != 0) wake_all(&header().reports);
}

TicketResult ControlPage::result(std::uint32_t rank, Ticket ticket, std::uint64_t* failed_groups) const {
  return slot(rank, ticket).result(ticket, failed_groups);
}

void ControlPage::take_reports(ReportCursor* cursor, std::vector<RankReport>* reports) const {
  cursor->taken.resize(sizes_.local_ranks, ReportCursor::kNone);
  for (std::uint32_t i = 0; i < sizes_.local_ranks; ++i) {
    const std::uint32_t rank = sizes_.first_rank + i;
    const Worker& one = worker(rank);
    const std::uint64_t end = one.reports.load(std::memory_order_acquire);
    const std::uint64_t begin = std::exchange(cursor->taken[i], end);
    bool is_whole = begin != ReportCursor::kNone && end - begin < kJournal;
    const std::size_t known = reports->size();
    for (std::uint64_t at = begin; is_whole && at < end; ++at) {
      const Ticket ticket = one.journal[at % kJournal].load(std::memory_order_acquire);
      RankReport report{rank, ticket, 0};
      // A later ticket that took the slot makes this one fail; its own entry follows.
      if (result(rank, ticket, &report.failed_groups) == TicketResult::kDone) reports->push_back(report);
    }
    // The rank may have overwritten entries meanwhile: also the one that it counts next.
    is_whole = is_whole && one.reports.load(std::memory_order_acquire) - begin < kJournal;
    if (is_whole) continue;
    reports->resize(known);
    take_all_reports(rank, reports);
  }
}

// A report that is being written now is counted in the journal later.
void ControlPage::take_all_reports(std::uint32_t rank, std::vector<RankReport>* reports) const {
  for (Ticket place = 0; place < HostRegion::kTicketSlots; ++place) {
    const Ticket ticket = slot(rank, place).ticket.load(std::memory_order_acquire);
    RankReport report{rank, ticket, 0};
    if (ticket != kNoTicket && result(rank, ticket, &report.failed_groups) == TicketResult::kDone)
      reports->push_back(report);
  }
}

std::uint32_t ControlPage::report_count() const { return header().reports.load(); }

void ControlPage::wait_for_report(std::uint32_t seen, std::chrono::nanoseconds timeout) const {
  static_assert(sizeof(std::atomic<std::uint32_t>) == sizeof(std::uint32_t));
  header().report_waiters.fetch_add(1);
  if (header().reports.load() == seen) {
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(timeout);
    const ::timespec left{.tv_sec = seconds.count(), .tv_nsec = (timeout - seconds).count()};
    (void)::syscall(SYS_futex, &header().reports, FUTEX_WAIT, seen, &left, nullptr, 0);
  }
  header().report_waiters.fetch_sub(1);
}

void ControlPage::wake_report_waiters() const {
  header().reports.fetch_add(1);
  wake_all(&header().reports);
}

}  // namespace kv_offload
