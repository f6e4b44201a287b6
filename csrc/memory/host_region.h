// SPDX-License-Identifier: Apache-2.0
// HostRegion: the host memory of one engine, shared by its scheduler process and its workers (design: one
// mapping, one area per rank, one control page). Ranks of one host that hold the same bytes (a replicated
// cache) share an area: the first of them stores, and all of them load.
//
//   [ control | area 0 | area 1 | ... | area N-1 ]
//
// The control page adds to cpu_bytes_to_use: 4 KiB, and 272 KiB for each worker (< 2% where a worker's part
// of the region is >= 16 MiB).
//
// If an engine's ranks span several hosts, each host has a region with the areas of its own ranks, and a
// control page for all ranks. Ranks of different hosts never share an area. A row is at the same place on
// every host. The scheduler, on the host of rank 0, is the only process that chooses rows. It learns what the
// ranks of the other hosts publish and report from HostLinks, which enters it in the control page of the
// scheduler's host.
//
// A row is at the same place (RowId = 4 KiB page number) in every area. So a rank touches, pins and prefaults
// only its own area, and one vectored call gathers a record from all areas.
//
// Lifetime: the first process to attach creates the shared memory object under a name derived from engine_id
// (mode 0600). Every attached process holds a shared flock on it. The name is unlinked once the scheduler and
// all ranks have mapped it, so no crash after that leaks it. Our objects whose lock no process holds are
// leftovers of an earlier crash; the next attach sweeps them. All sizes are checked against free shm and the
// cgroup limit BEFORE anything is allocated.
//
// With keep_for the region may outlive its engine. Only the first rank of each host creates the object; the
// other processes wait for it. It adopts a region that an engine with the same keep_for and the same sizes
// left on this host, contents included. No process writes to the areas before the scheduler has called
// keep(). The scheduler calls it once a table after the areas describes their rows (RowTable). From then on
// the object has only a name that no sweep removes. Two kinds of start remove it: one with the same keep_for
// and other sizes, and any start that would otherwise lack the memory.
//
// On several hosts only the scheduler's region has that table. It describes the rows of all hosts: a row is
// in it only after the ranks of all hosts that store have reported their copies, and is removed from it
// before any rank is told to write the row. So the table is right about the memory of another host, whatever
// process was killed when, if that memory is the one that the table was written for. A region set says that:
// one random id in the regions of all hosts (see HostLinks::keep_memory). A region gets another id before
// other rows are written.
//
// With share_for, other engines of the host read rows of this region (NeighbourRegion), and this engine's
// workers map areas of neighbours read-only after their own:
//
//   [ own area | neighbour slot 0 | neighbour slot 1 | ... ]   as far apart as neighbour_row() says
//
// So a RowId also names a neighbour's row, and copies need no other address. The scheduler requests and
// dismisses neighbours, and each worker follows with map_neighbours(). The region has a name from share()
// until stop_sharing() or the end of its processes. No process of a neighbour holds our lock.
//
// With both, processes of neighbours may still read a region that an engine adopts. So it is not adopted if
// such processes live and the rank that adopts it has other shard sizes than the last owner's, and it never
// becomes shorter. SharedRows decides which rows the new owner may write.
//
// prefault() allocates the memory and reports a tmpfs or cgroup that filled up meanwhile as a Status. In an
// area without prefault a copy allocates the pages itself and dies by SIGBUS when none are left: prefault
// before copying. (System calls on such pages fail with EFAULT.) Areas are excluded from core dumps.
//
// Threads: attach, wait_for_ranks, prefault: one thread. map_neighbours, fault_in_neighbours: one thread. The
// rest: any thread.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "base/types.h"

namespace kv_offload {

struct RegionOptions {
  std::string engine_id;    // equal in all processes of one engine
  std::uint64_t bytes = 0;  // cpu_bytes_to_use: for the whole engine, exact
  // Of the whole engine. Divides num_workers: as many consecutive ranks share each area. <= 64
  std::uint32_t num_areas = 1;
  // Processes that attach in addition to the scheduler (= world size). <= 64
  std::uint32_t num_workers = 1;
  std::string shm_directory = "/dev/shm";
  bool huge_pages = true;  // madvise(MADV_HUGEPAGE) where available
  // What must be equal for a region to be adopted, e.g. the model. The same in all processes of the engine.
  // Empty: the region ends with its engine.
  std::string keep_for{};
  // What must be equal for engines to find each other, e.g. the model. The same in all processes of the
  // engine. Empty: the region is not shared. A region with both is adopted only by an engine with both.
  std::string share_for{};
  // If the ranks span several hosts: those of this host are [first_rank, first_rank + local_ranks).
  // local_ranks 0: all ranks are on this host. REQUIRES otherwise: the ranks of an area are on one host, and
  // share_for is empty.
  std::uint32_t first_rank = 0;
  std::uint32_t local_ranks = 0;
};

// A neighbour's area that the workers map: its file, and the number under which this engine reads there.
struct NeighbourArea {
  std::uint64_t inode = 0;  // 0: none
  std::uint8_t number = 0;  // of its name
  std::uint8_t reader = 0;
};

// Names the regions of all hosts that one table of rows describes. The first number is 0: none.
using RegionSet = std::array<std::uint64_t, 2>;
inline bool is_set(const RegionSet& set) { return set[0] != 0; }

// Where the memory of a region with keep_for is from.
enum class RegionOrigin : std::uint8_t {
  kNew,       // this host has no region of an earlier engine
  kAdopted,   // of an earlier engine
  kReplaced,  // new; one of an earlier engine had other sizes or another version and was removed
  kInUse,     // new; other processes use those of earlier engines
};
inline constexpr RegionOrigin kLastOrigin = RegionOrigin::kInUse;
struct KeptRegion {
  RegionOrigin origin = RegionOrigin::kNew;
  RegionSet set{};
  bool operator==(const KeptRegion&) const = default;
};

// What one rank publishes when it attaches.
struct RankGeometry {
  std::vector<std::uint64_t> shard_bytes;  // per selected group: bytes of one chunk, unpadded
  std::string fingerprint;                 // layout facts that enter the namespace, <= 4095 bytes
};

// One result of a rank, as report() was given it.
struct RankReport {
  std::uint32_t rank = 0;
  Ticket ticket = kNoTicket;
  std::uint64_t failed_groups = 0;
};

// Which reports of this host's ranks a reader has taken (HostRegion::take_reports). A new one has taken none.
struct ReportCursor {
  static constexpr std::uint64_t kNone = ~std::uint64_t{0};
  std::vector<std::uint64_t> taken{};  // number of reports, by local rank
};

enum class TicketResult : std::uint8_t {
  kPending,  // at least one required rank has not reported
  kDone,     // every rank reported; see failed_groups
};

// Which workers get a job and report its ticket: all of them load, and the first rank of each area stores.
enum class TicketKind : std::uint8_t { kStore, kLoad };

class HostRegion {
 public:
  static constexpr std::size_t kTicketSlots = 16384;

  // Attaches as the scheduler. If options.local_ranks is 0 and a worker of this host was first, takes over
  // its local_ranks and, if there are other hosts, its num_areas: vLLM does not tell its scheduler how many
  // hosts there are. Throws ResourceError (stating the requested and available bytes and cpu_bytes_to_use) or
  // InvalidArgument; nothing remains then.
  static std::unique_ptr<HostRegion> attach_scheduler(const RegionOptions& options);
  // Attaches as worker `rank`, whose area is rank / ranks_per_area(), and publishes its geometry. Throws as
  // above, even if the processes' sizes disagree.
  static std::unique_ptr<HostRegion> attach_worker(const RegionOptions& options, std::uint32_t rank,
                                                   const RankGeometry& geometry);
  ~HostRegion();  // unmaps; unlinks the name if it still exists and we held the last lock
  HostRegion(const HostRegion&) = delete;
  HostRegion& operator=(const HostRegion&) = delete;

  // Scheduler: waits until all ranks have attached and published. kTimeout names the missing ranks. Polls;
  // leaves no thread running.
  Status wait_for_ranks(std::chrono::nanoseconds timeout) const;
  // REQUIRES: wait_for_ranks succeeded (or the caller is that rank).
  RankGeometry geometry(std::uint32_t rank) const;

  std::uint32_t num_areas() const;       // of the engine
  std::uint32_t ranks_per_area() const;  // the first of them stores
  // The areas of this host: [first_area(), first_area() + local_areas()).
  std::uint32_t first_area() const;
  std::uint32_t local_areas() const;
  std::uint64_t area_bytes() const;  // multiple of 4 KiB (2 MiB where large enough)
  // REQUIRES: an area of this host.
  std::span<std::byte> area(std::uint32_t index) const;
  // Returns [row * 4 KiB, + bytes) in area `index`, or in a neighbour's if this is a worker's own area.
  // REQUIRES: inside the area.
  Shard shard(std::uint32_t index, RowId row, std::uint64_t bytes) const;

  // Populates this process's own area (worker: its area; scheduler: none by default) with MADV_POPULATE_WRITE
  // on `threads` threads. Calls `progress(done, total)` on the calling thread from time to time. kNoSpace,
  // naming the limit and the setting, if memory ran out; populated pages stay allocated.
  Status prefault(std::uint32_t index, unsigned threads,
                  const std::function<void(std::uint64_t, std::uint64_t)>& progress = {});

  // Makes pages of this area that are not allocated yet come from this NUMA node while it has free memory
  // (-1: the system decides). Call it before prefault() and before anything pins the area. Fails if the
  // kernel refuses, which only costs speed, and if pages are allocated already; those stay where they are.
  Status prefer_node(std::uint32_t index, int node);

  // Control page: reports a job's result. Worker `rank` reports each ticket once, from one thread at a time.
  // failed_groups: groups whose chunks must never become a hit (base/refused_chunks.h).
  void report(std::uint32_t rank, Ticket ticket, std::uint64_t failed_groups);
  // Scheduler: returns kDone once every worker that got the job has reported; *failed_groups is then the
  // union. A result that was overwritten by a ticket kTicketSlots later (the ring wrapped) counts as done
  // with kDeviceFailed. REQUIRES: tickets are issued in ascending order, ticket != kNoTicket.
  TicketResult result(Ticket ticket, std::uint64_t* failed_groups,
                      TicketKind kind = TicketKind::kStore) const;

  // ---- ranks on several hosts
  bool spans_hosts() const;          // some ranks are on another host
  std::uint32_t first_rank() const;  // of this host
  std::uint32_t local_ranks() const;
  bool is_published(std::uint32_t rank) const;
  // Scheduler: enters the geometry of a rank that runs on another host. A second call for a rank changes
  // nothing. Throws InvalidArgument if the geometry is too large.
  void publish_remote(std::uint32_t rank, const RankGeometry& geometry);
  // Where the process of another host's first rank listens (HostAgent::endpoint). Rank 0 sets it once; until
  // then it is empty. Throws InvalidArgument for an empty or too long one.
  void set_endpoint(std::uint32_t rank, std::string_view endpoint);
  std::string endpoint(std::uint32_t rank) const;
  // Appends the reports of this host's ranks since the last call with this cursor, in no particular order. If
  // there were too many since, or with a new cursor: all results that the rings hold. One thread per cursor.
  void take_reports(ReportCursor* cursor, std::vector<RankReport>* reports) const;
  // Blocks until report_count() differs from `seen`, another process calls wake_report_waiters(), or the
  // timeout. Spurious returns happen.
  std::uint32_t report_count() const;
  void wait_for_report(std::uint32_t seen, std::chrono::nanoseconds timeout) const;
  void wake_report_waiters() const;
  // Scheduler, in this process only: set while reports of another host cannot arrive. No chunk may then be
  // loaded or stored.
  void set_cut_off(bool cut_off);
  bool is_cut_off() const;

  // Scheduler: sets whether a request is waiting for a tier's records now. Ranks may poll it in every turn of
  // a loop: while it is set, a thread that waits for a message should leave its core to the reader threads.
  void set_fetching(bool fetching);
  bool is_fetching() const;

  // Scheduler, with keep_for, once: maps `bytes` at `offset` after the areas until the end. They hold what an
  // earlier engine left, or zeros. `offset`: with share_for, the bytes of memory_of_shared_rows(). Throws
  // ResourceError. REQUIRES: wait_for_ranks succeeded.
  std::span<std::byte> memory_after_areas(std::uint64_t bytes, std::uint64_t offset = 0);
  // Scheduler: from now on the table after the areas describes them, so the region may outlive its engine.
  // False if 64 regions of this keep_for are kept here already: this one then ends with its engine. Call it
  // once. On a host without the scheduler: the process of its first rank, at the scheduler's order.
  bool keep();
  // On several hosts: what this host has of an earlier engine, and the set that its region belongs to.
  KeptRegion kept() const;
  // The region belongs to this set from now on. REQUIRES: no row was written under the earlier one by this
  // engine. A kill during the call leaves the region without a set, or with one that no other host has.
  void set_region_set(const RegionSet& set);

  // ---- with share_for
  static constexpr std::uint32_t kMostNeighbours = 31;
  // Scheduler, once: maps `bytes` after the areas for the table of rows (SharedRows), and lets other engines
  // find the region. Throws ResourceError (no memory, 64 engines are shared already). REQUIRES:
  // wait_for_ranks succeeded.
  std::span<std::byte> memory_of_shared_rows(std::uint64_t bytes);
  void share();
  void stop_sharing();  // removes the name; readers keep what they have mapped
  // Owner: true if no process reads rows under this number. Then runs `action`; no process takes the number
  // meanwhile.
  bool if_reader_is_dead(unsigned reader, const std::function<void()>& action) const;
  // Owner: the same for all numbers.
  bool if_no_reader_lives(const std::function<void()>& action) const;

  // The number of neighbours that can be mapped at once.
  std::uint32_t neighbour_slots() const;
  // Returns the RowId, in this engine, of a row of the neighbour in `slot`.
  RowId neighbour_row(std::uint32_t slot, RowId row) const;
  // Scheduler: lets every worker map or unmap the areas of a neighbour. REQUIRES: request: has_unmapped();
  // dismiss: no copy uses the slot.
  void request_neighbour(std::uint32_t slot, const NeighbourArea& area);
  void dismiss_neighbour(std::uint32_t slot);
  bool has_mapped(std::uint32_t slot) const;    // every worker has
  bool has_unmapped(std::uint32_t slot) const;  // every worker has
  // A worker could not map it so far. It tries again until the request is dismissed.
  bool is_refused(std::uint32_t slot) const;
  // Worker: follows the scheduler's requests. `change(area, mapped)` is called after an area was mapped,
  // before rows in it are used, and before it is unmapped. An area whose change fails is unmapped again, and
  // tried again after kFirstPause calls, then after twice as many each time, up to kMostPause. Returns the
  // problems of areas that cannot be mapped (equal ones of a request are reported once).
  static constexpr std::uint32_t kFirstPause = 16, kMostPause = 1024;
  using NeighbourChange = std::function<Status(std::span<std::byte> area, bool mapped)>;
  // `is_stopped` is called before each neighbour: from the first true on, nothing more is mapped or unmapped.
  std::vector<std::string> map_neighbours(const NeighbourChange& change = {},
                                          const std::function<bool()>& is_stopped = {});
  // Worker: enters up to `bytes` of the mapped neighbours' memory into this process's page tables, so that a
  // load does not fault on each page. Stops at memory that the neighbour has not allocated yet, and allocates
  // none. Returns the bytes entered. A kernel before 5.14 cannot do this: 0.
  std::uint64_t fault_in_neighbours(std::uint64_t bytes);
  // Worker: the own area and all neighbour slots, mapped or not. Without share_for: the own area.
  std::span<std::byte> window() const;

  const RegionOptions& options() const;
  std::uint64_t inode() const;  // of the region's file

  // Names of the objects that the last attach removed: leftovers, and kept regions whose memory it needed
  // (for the log and for tests).
  const std::vector<std::string>& swept() const;

 private:
  HostRegion();
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Removes our shared memory objects that no process holds and that are not kept. Returns their names.
std::vector<std::string> sweep_leftovers(const std::string& shm_directory);

// The shared memory objects of this user: their names, the memory they take, and whether a process has them
// mapped. A region with two names is listed once: by its kept name if no process has it mapped, otherwise by
// the other one. Those that no process has are kept regions (HostRegion::keep) or leftovers of engines that
// were killed.
struct RegionFile {
  std::string name;
  std::uint64_t bytes;
  bool is_held;
};
std::vector<RegionFile> region_files(const std::string& shm_directory);

// Bytes that may still be allocated: min(cgroup limit - usage, MemAvailable, free bytes of shm_directory),
// and the name of the binding limit.
struct MemoryHeadroom {
  std::uint64_t bytes;
  std::string limited_by;  // "/dev/shm", "cgroup memory limit", "MemAvailable"
};
MemoryHeadroom memory_headroom(const std::string& shm_directory);

}  // namespace kv_offload
