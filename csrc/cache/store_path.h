// SPDX-License-Identifier: Apache-2.0
// StorePath: moves chunks from the ranks to host memory: allocates rows for offered chunks, and makes them
// resident or discards them when the ranks have reported.
//
// Invariant: a chunk becomes resident only if every rank reported its ticket and none refused it
// (base/refused_chunks.h). prepare() accepts a prefix of each group's new chunks: the first key without a row
// ends it, so that there are no holes. If prepare() throws, it has accepted nothing.
//
// Reports of ranks on another host may arrive after complete(). Their chunks stay filling until poll() finds
// the report.
//
// Threads: one (the scheduler's).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cache/chunk_groups.h"
#include "cache/cost_model.h"
#include "cache/host_chunks.h"
#include "cache/key_history.h"
#include "cache/request_table.h"
#include "cache/row_provider.h"
#include "cache/tickets.h"
#include "cache/write_back.h"
#include "metrics/metrics.h"

namespace kv_offload {

class StorePath {
 public:
  // Dependencies; all of them outlive this.
  struct Context {
    const ChunkGroups& groups;
    HostChunks& chunks;
    KeyHistory& key_history;
    Tickets& tickets;
    CostModel& costs;
    RowProvider& row_provider;
    WriteBack& write_back;
    RequestTable& requests;
    Metrics& metrics;
  };
  explicit StorePath(const Context& context) : context_(context) {}

  // See TieredCache::prepare_store. Throws InvalidArgument, before any change, if keys have an unknown group
  // or are out of order, or if depths are not one per key.
  StoreGrant prepare(RequestHandle request, std::span<const ChunkKey> keys,
                     std::span<const std::uint32_t> depths);
  // See TieredCache::complete_store. If it throws, each chunk is resident or absent.
  void complete(std::span<const ChunkKey> keys, bool success);
  // Ends the completed stores whose reports have arrived since.
  void poll();
  // True if reports of another host have to arrive before the chunks of a completed store can be written to
  // tiers. False while that host is lost.
  bool awaits_reports() const { return !late_.empty() && context_.tickets.hear_all_ranks(); }
  void close() { closed_ = true; }  // nothing is accepted after this

 private:
  void learn_prefill(RequestHandle request, std::span<const ChunkKey> keys,
                     std::span<const std::uint32_t> depths);
  StoreGrant take_rows(RequestHandle request, std::span<const ChunkKey> keys,
                       std::span<const std::uint32_t> depths);
  void finish(std::span<const ChunkKey> keys, bool success);
  void finish_later(Ticket ticket, const ChunkKey& key);
  // Records that the request uses this chunk.
  void hold(const RequestState& request, Offers& offers, Slot slot, bool is_new) {
    context_.chunks.claim(slot, request.options.family, is_new);
    if (request.options.family != 0) hold_for_session(request, offers, slot);
  }
  void hold_for_session(const RequestState& request, Offers& offers, Slot slot);
  void count_declined(const StoreGrant& grant, std::span<const std::uint64_t> new_chunks, bool hears_all);
  void fail(Slot slot);    // the device did not copy it
  void refuse(Slot slot);  // vLLM offered it without some of its blocks
  void drop(Slot slot, MissReason reason);

  // A completed store without the reports of all ranks.
  struct LateStore {
    Ticket ticket;
    std::vector<ChunkKey> keys;
  };

  const Context context_;
  std::vector<LateStore> late_;
  bool closed_ = false;
};

}  // namespace kv_offload
