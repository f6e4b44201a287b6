// SPDX-License-Identifier: Apache-2.0
// An engine with one worker, in one process, that shares its rows and reads those of its neighbours. It has
// no cache: the test says what is stored in which row. With `keep` its memory outlives it, and the next such
// engine takes it over.
#pragma once

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "memory/host_region.h"
#include "memory/neighbour_region.h"
#include "memory/row_table.h"
#include "memory/shared_file.h"
#include "memory/shared_rows.h"

namespace kv_offload::testing {

class SharingEngine {
 public:
  static constexpr std::uint32_t kRows = 64;

  SharingEngine(const std::string& directory, const std::string& id, const std::string& identity = "weights",
                std::uint64_t rows = kRows, bool keep = false, std::uint64_t shard_bytes = kPageBytes)
      : identity_(identity), layout_(SharedRowsLayout::of(rows * kPageBytes, kPageBytes)) {
    RegionOptions options;
    options.engine_id = id;
    options.bytes = rows * kPageBytes;
    options.shm_directory = directory;
    options.share_for = "model";
    if (keep) options.keep_for = "model";
    worker = HostRegion::attach_worker(options, 0, {{shard_bytes}, "test"});
    scheduler = HostRegion::attach_scheduler(options);
    rows_.emplace(scheduler->memory_of_shared_rows(layout_.bytes), layout_, identity);
    if (keep) keep_rows(rows * kPageBytes);
    scheduler->share();
  }

  static ChunkKey key(std::uint32_t number) {
    return ChunkKey("key-" + std::to_string(100000 + number) + std::string(4, '\0'));
  }
  SharedRows& rows() { return *rows_; }

  // ---- owner. The bytes of a row are its key's number, repeated.
  void write(RowId row, std::uint32_t number) const {
    const std::span<std::byte> bytes = worker->shard(0, row, kPageBytes);
    for (std::size_t at = 0; at < kPageBytes; at += 4) std::memcpy(bytes.data() + at, &number, 4);
  }
  // Stores a key in a row. False if a reader still reads the row.
  bool store(RowId row, std::uint32_t number) {
    if (table_) table_->erase(row);
    if (!rows_->withdraw(row)) return false;
    write(row, number);
    if (table_) table_->put({row, key(number), 0, number, 0, 0, 0});
    rows_->publish(row, key(number), number, 0);
    return true;
  }
  // True if the own bytes of this row are those of the key.
  bool has_bytes(RowId row, std::uint32_t number) const {
    return all_are(worker->shard(0, row, kPageBytes), number);
  }
  // The rows that were taken over, with the numbers of their keys.
  std::map<RowId, std::uint32_t> taken_over;
  void clear_dead_readers() {
    const std::uint64_t readers = rows_->readers(0, rows_->capacity());
    for (unsigned reader = 0; reader < kMostReaders; ++reader) {
      if ((readers >> reader & 1) != 0)
        scheduler->if_reader_is_dead(reader, [&] { rows_->clear_pins(reader, 0, rows_->capacity()); });
    }
  }

  // ---- reader
  // Attaches to all neighbours that it finds, maps them, and leaves those that have ended. Returns problems.
  std::vector<std::string> look_around() {
    std::vector<std::string> problems;
    std::erase_if(neighbours, [&](auto& one) {
      if (one.second->is_alive() || is_held(one.first)) return false;
      scheduler->dismiss_neighbour(one.first);
      return true;
    });
    worker->map_neighbours();
    for (std::string& problem : attach_to_neighbours()) problems.push_back(std::move(problem));
    for (const std::string& problem : worker->map_neighbours()) problems.push_back(problem);
    return problems;
  }
  // Attaches to all neighbours that it finds; the worker has not mapped them yet.
  std::vector<std::string> attach_to_neighbours() {
    std::vector<std::string> problems;
    for (unsigned number = 0; number < kMostShared; ++number) {
      const auto known = std::find_if(neighbours.begin(), neighbours.end(),
                                      [&](const auto& one) { return one.second->number() == number; });
      if (known != neighbours.end()) continue;
      std::string problem;
      auto region = NeighbourRegion::attach(*scheduler, number, layout_, identity_, &problem);
      if (!problem.empty()) problems.push_back(problem);
      if (!region) continue;
      const std::uint32_t slot = free_slot();
      scheduler->request_neighbour(slot, region->area());
      neighbours.emplace(slot, std::move(region));
    }
    return problems;
  }
  struct Held {
    std::uint32_t slot;
    RowId row;
    std::uint32_t number;
  };
  // Pins a neighbour's row that holds the key.
  std::optional<Held> pin(std::uint32_t number) {
    for (auto& [slot, neighbour] : neighbours) {
      if (!scheduler->has_mapped(slot)) continue;
      const auto found = neighbour->find(key(number));
      if (!found) continue;
      const auto held = held_.find({slot, found->row});
      if (held == held_.end() && !neighbour->pin(*found)) continue;
      ++held_[{slot, found->row}];
      return Held{slot, found->row, number};
    }
    return std::nullopt;
  }
  // True if all bytes of a pinned row are those of its key.
  bool is_right(const Held& held) const {
    return all_are(worker->shard(0, worker->neighbour_row(held.slot, held.row), kPageBytes), held.number);
  }
  void unpin(const Held& held) {
    const auto found = held_.find({held.slot, held.row});
    if (--found->second > 0) return;
    held_.erase(found);
    neighbours.at(held.slot)->unpin(held.row);
  }

  std::unique_ptr<HostRegion> worker, scheduler;
  std::map<std::uint32_t, std::unique_ptr<NeighbourRegion>> neighbours;  // by slot

 private:
  static bool all_are(std::span<const std::byte> bytes, std::uint32_t number) {
    for (std::size_t at = 0; at < kPageBytes; at += 4) {
      if (std::memcmp(bytes.data() + at, &number, 4) != 0) return false;
    }
    return true;
  }
  void keep_rows(std::uint64_t area_bytes) {
    const std::uint64_t bytes = RowTable::bytes(area_bytes, kPageBytes);
    table_.emplace(scheduler->memory_after_areas(bytes, layout_.bytes), area_bytes, kPageBytes,
                   identity_ + std::to_string(rows_->id()));
    for (const RowTable::Row& row : table_->rows()) {
      rows_->publish(row.row, row.key, row.depth, row.group);
      taken_over[row.row] = row.depth;
    }
    if (!scheduler->keep()) throw std::runtime_error("the region is not kept");
  }
  std::uint32_t free_slot() const {
    for (std::uint32_t slot = 0;; ++slot) {
      if (!neighbours.contains(slot) && scheduler->has_unmapped(slot)) return slot;
    }
  }

  const std::string identity_;
  const SharedRowsLayout layout_;
  std::optional<SharedRows> rows_;
  std::optional<RowTable> table_;
  bool is_held(std::uint32_t slot) const {
    return std::any_of(held_.begin(), held_.end(), [&](const auto& one) { return one.first.first == slot; });
  }

  std::map<std::pair<std::uint32_t, RowId>, int> held_;  // pins, by slot and row
};

}  // namespace kv_offload::testing
