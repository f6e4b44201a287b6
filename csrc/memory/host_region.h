// HostRegion: the host memory of one engine, shared by its scheduler process
// and its workers (design: one mapping, one area per rank, one control page).
//
//   [ control | area 0 | area 1 | ... | area N-1 ]
//
// The control page comes on top of cpu_bytes_to_use: 4 KiB, and 264 KiB for each
// worker (< 2% where a worker's part of the region is >= 16 MiB).
//
// A row is the same place (RowId = 4 KiB page number) in every area, so a rank
// touches, pins and prefaults only its own area, and a record is gathered from
// all areas by one vectored call.
//
// Life: whichever process attaches first creates the shared memory object under
// a name derived from engine_id (mode 0600); every attached process holds a
// shared flock on it; when the scheduler and all ranks have mapped it the name
// is unlinked, so that no way of dying leaks it. Objects of ours whose lock
// nobody holds are leftovers of a crash before that point and are swept by the
// next attach. All sizes are checked against free shm and the cgroup limit
// BEFORE anything is allocated.
//
// With keep_for it may outlive its engine instead. Rank 0 alone makes the object, and
// takes one that an engine of the same keep_for and the same sizes has left, bytes and
// all; the others wait for it. Nobody writes to the areas before the scheduler has called
// keep(), which it does once a table behind the areas tells what their rows hold (RowTable):
// from then on the object has only a name that no sweep removes. It is removed by a start
// of the same keep_for with other sizes, and by any start that would not have the memory
// otherwise.
//
// Memory is taken by prefault(), which reports a tmpfs or cgroup that filled up
// in between as a Status. In an area that was not prefaulted a copy takes the
// pages itself, and dies by SIGBUS when none are left: prefault before copying.
// (System calls on such pages fail with EFAULT.) Areas are left out of core dumps.
//
// Threads: attach, wait_for_ranks, prefault: one thread. The rest: any thread.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "base/types.h"

namespace kv_offload {

struct RegionOptions {
  std::string engine_id;        // equal in all processes of one engine
  std::uint64_t bytes = 0;      // cpu_bytes_to_use: for the whole engine, exact
  std::uint32_t num_areas = 1;  // ranks; 1 for a replicated cache. <= 64
  // Processes that attach besides the scheduler (= world size; for a
  // replicated cache it is larger than num_areas). <= 64
  std::uint32_t num_workers = 1;
  std::string shm_directory = "/dev/shm";
  bool huge_pages = true;  // madvise(MADV_HUGEPAGE) where the system offers it
  // What has to be equal for a region to be taken over, e.g. the model: of all processes
  // of the engine. Empty: the region ends with its engine.
  std::string keep_for{};
};

// What one rank publishes when it attaches.
struct RankGeometry {
  std::vector<std::uint64_t> shard_bytes;  // per selected group: bytes of one chunk, unpadded
  std::string fingerprint;                 // layout facts that go into the namespace, <= 4095 bytes
};

enum class TicketResult : std::uint8_t {
  kPending,  // some rank that must has not reported
  kDone,     // every rank reported; see failed_groups
};

// Who gets a job and so reports its ticket: all workers, but of a replicated cache
// (num_areas 1, several workers) only rank 0 stores.
enum class TicketKind : std::uint8_t { kStore, kLoad };

class HostRegion {
 public:
  static constexpr std::size_t kTicketSlots = 16384;

  // Attach as the scheduler. Throws ResourceError (naming asked, available and
  // cpu_bytes_to_use) or InvalidArgument; then nothing is left behind.
  static std::unique_ptr<HostRegion> attach_scheduler(const RegionOptions& options);
  // Attach as worker `rank` (area = rank, or 0 when replicated) and publish its
  // geometry. Throws as above, also when the other processes disagree.
  static std::unique_ptr<HostRegion> attach_worker(const RegionOptions& options, std::uint32_t rank,
                                                   const RankGeometry& geometry);
  ~HostRegion();  // unmaps; unlinks the name when it is still there and ours was the last lock
  HostRegion(const HostRegion&) = delete;
  HostRegion& operator=(const HostRegion&) = delete;

  // Scheduler: true once all ranks attached and published, or kTimeout naming
  // the ranks that are missing. Polls; no thread is left behind.
  Status wait_for_ranks(std::chrono::nanoseconds timeout) const;
  // REQUIRES: wait_for_ranks succeeded (or this is that rank).
  RankGeometry geometry(std::uint32_t rank) const;

  std::uint32_t num_areas() const;
  std::uint64_t area_bytes() const;  // multiple of 4 KiB (2 MiB where large enough)
  std::span<std::byte> area(std::uint32_t index) const;
  // [row * 4 KiB, + bytes) in area `index`. REQUIRES: inside the area.
  Shard shard(std::uint32_t index, RowId row, std::uint64_t bytes) const;

  // Populate this process's own area (worker: its area; scheduler: none unless
  // asked) with MADV_POPULATE_WRITE on `threads` threads, `progress(done, total)`
  // called from the calling thread now and then. no_space, naming the limit and
  // the setting, when memory ran out; what was populated stays until the end.
  Status prefault(std::uint32_t index, unsigned threads,
                  const std::function<void(std::uint64_t, std::uint64_t)>& progress = {});

  // Pages of this area that are not there yet will come from this NUMA node, as far
  // as it has any (-1: the system decides): call it before prefault() and before
  // anything pins the area. Fails where the kernel refuses it, which costs speed
  // only, and where pages are there already, which stay where they are.
  Status prefer_node(std::uint32_t index, int node);

  // Control page: job results. Worker `rank` reports one ticket once, from one
  // thread at a time;
  // failed_groups: the chunks that must never become a hit (base/refused_chunks.h).
  void report(std::uint32_t rank, Ticket ticket, std::uint64_t failed_groups);
  // Scheduler: kDone when every worker that got the job has reported; then
  // *failed_groups is the union. A result overwritten by one kTicketSlots later
  // (ring wrapped) counts as done with kDeviceFailed. REQUIRES:
  // tickets are given out ascending, ticket != kNoTicket.
  TicketResult result(Ticket ticket, std::uint64_t* failed_groups,
                      TicketKind kind = TicketKind::kStore) const;

  // Scheduler: whether a request waits for records of a tier now. The ranks may ask, in
  // each turn of a loop: what waits for a message then should leave its core to the
  // threads that read.
  void set_fetching(bool fetching);
  bool is_fetching() const;

  // Scheduler, with keep_for, once: `bytes` behind the areas, mapped until the end. As an
  // earlier engine left them, zeros where it left none. Throws ResourceError.
  // REQUIRES: wait_for_ranks succeeded.
  std::span<std::byte> behind_areas(std::uint64_t bytes);
  // Scheduler: what lies behind the areas is true of them from now on, so the region may
  // outlive its engine. False when 64 of the same keep_for are kept here already: this
  // one then ends with its engine.
  bool keep();

  // Names of what the last attach removed: leftovers, and regions that were kept where it
  // needed their memory (for the log and for tests).
  const std::vector<std::string>& swept() const;

 private:
  HostRegion();
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Remove shared memory objects of ours that no process holds and that are not kept.
// Returns names.
std::vector<std::string> sweep_leftovers(const std::string& shm_directory);

// The regions that are kept (HostRegion::keep): their names, the memory they take, and
// whether a process has them mapped.
struct KeptRegion {
  std::string name;
  std::uint64_t bytes;
  bool is_held;
};
std::vector<KeptRegion> kept_regions(const std::string& shm_directory);

// Bytes that may still be allocated: min(cgroup limit - usage, MemAvailable,
// free bytes of shm_directory), with the name of the binding limit.
struct MemoryHeadroom {
  std::uint64_t bytes;
  std::string limited_by;  // "/dev/shm", "cgroup memory limit", "MemAvailable"
};
MemoryHeadroom memory_headroom(const std::string& shm_directory);

}  // namespace kv_offload
