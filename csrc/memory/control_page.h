// SPDX-License-Identifier: Apache-2.0
// ControlPage: the head of the shared mapping, before the areas. The processes exchange data here, only with
// lock-free atomics and with bytes that are written before a flag.
//
//   header     4 KiB   sizes that all processes must agree on, attached processes
//   workers    16 KiB each: geometry, fingerprint, a journal of the last reports, the endpoint of its host
//   tickets    256 KiB each worker: a ring of kTicketSlots results
//   (the header also lists the neighbours whose areas the workers shall map: see HostRegion)
//   padding    to 2 MiB, so that the areas may have huge pages; takes no memory
//
// Private to memory/. Methods: any thread, any process, unless stated otherwise.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "memory/host_region.h"
#include "memory/shared_rows.h"
#include "memory/ticket_slot.h"

namespace kv_offload {

inline constexpr std::uint32_t kMostWorkers = 64;
inline constexpr std::size_t kHugePageBytes = std::size_t{2} << 20;

class ControlPage {
 public:
  struct Sizes {
    std::uint64_t bytes = 0;  // cpu_bytes_to_use
    std::uint64_t area_bytes = 0;
    std::uint32_t num_areas = 0;
    std::uint32_t num_workers = 0;
    // The ranks of this host. The control page has a part for each rank of the engine, wherever it runs.
    std::uint32_t first_rank = 0;
    std::uint32_t local_ranks = 0;
    bool is_local(std::uint32_t rank) const { return rank >= first_rank && rank - first_rank < local_ranks; }
    // Consecutive ranks of one host that share an area. REQUIRES: num_areas divides num_workers.
    std::uint32_t ranks_per_area() const { return num_workers / num_areas; }
    std::uint32_t area_of(std::uint32_t rank) const { return rank / ranks_per_area(); }
    std::uint32_t first_area() const { return area_of(first_rank); }  // of this host
    std::uint32_t local_areas() const { return local_ranks / ranks_per_area(); }
  };

  static std::uint64_t bytes(std::uint32_t num_workers);         // without the padding
  static std::uint64_t padded_bytes(std::uint32_t num_workers);  // area 0 starts here
  // Returns `sizes` with local_ranks and, if there are other hosts, num_areas of the region at `base`.
  // Returns them unchanged if it is no region, or one of another host or number of ranks.
  static Sizes with_ranks_of(std::byte* base, const Sizes& sizes);
  // Called once by the process that creates the file, before other processes can see it. `base` is zeroed.
  static void initialise(std::byte* base, const Sizes& sizes);
  // Resets the page to its initial state, except for the region set and shared_layout(). For a process that
  // adopts a region of the same sizes that no other process holds. May be interrupted and repeated.
  void forget();
  // True if the file was created on this machine since its last start. Otherwise pages may be older than
  // others: a directory on a disk (a Kubernetes emptyDir without `medium: Memory`) outlives a power failure.
  bool is_of_this_boot() const;

  ControlPage() = default;
  // REQUIRES: initialised. Throws ResourceError if it is not or if it has another version, InvalidArgument
  // naming both values if the sizes differ.
  ControlPage(std::byte* base, const Sizes& mine);

  // Return true if the caller was the last process to attach. Throw ResourceError if that part is taken (two
  // processes of one rank), InvalidArgument if the geometry is too large; nothing has changed then.
  bool attach_scheduler();
  bool attach_worker(std::uint32_t rank, const RankGeometry& geometry);
  // Publishes the geometry of a rank that runs on another host. Throws InvalidArgument as attach_worker does.
  void publish_remote(std::uint32_t rank, const RankGeometry& geometry);

  bool is_published(std::uint32_t rank) const;
  RankGeometry geometry(std::uint32_t rank) const;

  // True while a request waits for a tier's records (HostRegion::set_fetching).
  void set_fetching(bool fetching);
  bool is_fetching() const;

  // The table of shared rows after the areas: its offset in the file; 0 = none.
  void set_shared_rows(std::uint64_t offset);
  std::uint64_t shared_rows() const;
  // Identifies the shard sizes of this host's first rank and the table's format when a table of shared rows
  // was last made here, by this engine or an earlier one; 0: never.
  std::uint64_t shared_layout() const;
  static std::uint64_t layout_of(const RankGeometry& geometry,
                                 std::uint64_t format = SharedRows::kFormat);  // not 0
  // Neighbour slots, see HostRegion::request_neighbour. Each request and each dismissal increases the
  // generation of its slot, and a worker reports the generation that it has carried out. So a worker that was
  // slow never counts for a later request. Scheduler, one thread at a time:
  void request_neighbour(std::uint32_t slot, const NeighbourArea& area);
  void dismiss_neighbour(std::uint32_t slot);
  bool has_mapped(std::uint32_t slot) const;    // every worker has carried out the request
  bool has_unmapped(std::uint32_t slot) const;  // every worker has carried out the dismissal
  bool is_refused(std::uint32_t slot) const;    // a worker cannot map the requested area
  // Worker:
  struct NeighbourRequest {
    NeighbourArea area;  // inode 0: dismissed
    std::uint64_t generation = 0;
  };
  // Nothing while the scheduler writes it: ask again later.
  std::optional<NeighbourRequest> neighbour(std::uint32_t slot) const;
  void set_done(std::uint32_t slot, std::uint32_t rank, std::uint64_t generation);
  void set_refused(std::uint32_t slot, std::uint32_t rank, std::uint64_t generation);

  // See HostRegion::kept. The first rank of the host sets the origin before it publishes its geometry.
  KeptRegion kept() const;
  void set_origin(RegionOrigin origin);
  void set_region_set(const RegionSet& set);

  // Where the first rank of another host listens (HostLinks). Rank 0 sets it once; empty until then. Throws
  // InvalidArgument if it is too long.
  void set_endpoint(std::uint32_t rank, std::string_view endpoint);
  std::string endpoint(std::uint32_t rank) const;

  // One thread per rank.
  void report(std::uint32_t rank, Ticket ticket, std::uint64_t failed_groups);
  // Returns one rank's result; kPending while it has not reported.
  TicketResult result(std::uint32_t rank, Ticket ticket, std::uint64_t* failed_groups) const;

  // The reports of this host's ranks, for HostAgent. See HostRegion.
  void take_reports(ReportCursor* cursor, std::vector<RankReport>* reports) const;
  std::uint32_t report_count() const;
  void wait_for_report(std::uint32_t seen, std::chrono::nanoseconds timeout) const;
  void wake_report_waiters() const;

 private:
  struct Header;
  struct Worker;
  using Slot = TicketSlot<std::atomic<std::uint64_t>>;
  Header& header() const;
  Worker& worker(std::uint32_t rank) const;
  Slot& slot(std::uint32_t rank, Ticket ticket) const;
  bool count_in();
  static void check(const RankGeometry& geometry);
  void publish(std::uint32_t rank, const RankGeometry& geometry);
  void take_all_reports(std::uint32_t rank, std::vector<RankReport>* reports) const;
  void change_neighbour(std::uint32_t slot, const NeighbourArea& area);
  bool is_carried_out(std::uint32_t slot) const;

  std::byte* base_ = nullptr;
  std::uint32_t num_workers_ = 0;
  Sizes sizes_;
};

}  // namespace kv_offload
