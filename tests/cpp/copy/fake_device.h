// SPDX-License-Identifier: Apache-2.0
// A device whose copies end when the test ends them, or at once. It moves the bytes at that moment.
// It uses the same pieces and runs as the CUDA device, and the host twin of the kernels.
#pragma once

#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <span>
#include <vector>

#include "copy/copy_device.h"
#include "copy/segment_split.h"

namespace kv_offload::testing {

// Runs a kernel launch on the host, one thread after the other.
inline void run_pack_twin(std::span<const PackPiece> pieces, bool to_row, unsigned blocks, unsigned threads) {
  for (unsigned block = 0; block < blocks; ++block) {
    for (unsigned thread = 0; thread < threads; ++thread) {
      pack::move_pieces(pieces.data(), pieces.size(), to_row, block, blocks, thread, threads);
    }
  }
}

inline void run_copy(const DeviceCopy& copy, std::span<std::byte> area, std::uint64_t staging_capacity) {
  const bool store = copy.direction == CopyDirection::kStore;
  std::vector<PackPiece> pieces(copy.segments.size() * 8 + (16 << 20) / kPieceBytes);
  if (copy.path == CopyPath::kDma) {
    for (const CopySegment& s : copy.segments) {
      std::byte* row = area.data() + s.area_offset;
      std::memcpy(store ? row : s.cache, store ? s.cache : row, s.bytes);
    }
  } else if (copy.path == CopyPath::kKernel) {
    pieces.resize(cut_for_area(copy.segments, area.data(), pieces.data(), pieces.size()));
    run_pack_twin(pieces, store, 3, 64);
  } else {
    const std::vector<RowRun> runs = row_runs(copy.segments, 0);
    if (staging_bytes(runs) > staging_capacity) throw std::logic_error("staging overflows");
    std::vector<std::byte> staging(staging_capacity);
    pieces.resize(cut_for_staging(copy.segments, runs, staging.data(), pieces.data(), pieces.size()));
    const auto move_runs = [&] {
      for (const RowRun& run : runs) {
        std::byte* row = area.data() + run.area_offset;
        std::byte* place = staging.data() + run.staging_offset;
        std::memcpy(store ? row : place, store ? place : row, run.bytes);
      }
    };
    if (!store) move_runs();
    run_pack_twin(pieces, store, 3, 64);
    if (store) move_runs();
  }
}

// State that the test keeps; the copier owns the device itself.
struct FakeDeviceState {
  std::mutex mutex;
  std::condition_variable changed;
  std::span<std::byte> area;
  std::uint64_t staging_capacity = 0;
  bool automatic = true;           // copies end when queried
  std::vector<DeviceCopy> issued;  // in order
  std::vector<std::uint64_t>
      offsets;  // of each copy's first segment: the segments themselves die with their job
  std::map<std::pair<std::uint32_t, std::uint32_t>, std::size_t>
      in_flight;                 // (lane, slot) -> index in issued
  std::set<std::size_t> ended;   // by the test's order
  std::set<std::size_t> landed;  // the copier has seen their end
  DeviceEvent last_event = kNoEvent;
  std::set<DeviceEvent> live_events;
  std::set<DeviceEvent> reached;   // reached by the compute stream
  bool compute_runs_ahead = true;  // events are reached when marked
  int asked = 0;                   // calls of reached()
  int queried = 0;                 // calls of query()
  std::uint64_t refused_batches = 0;
  bool refuse_batches = false;  // each copy counts as one refused batch
  Status reached_status;        // result of the next reached() calls
  Status issue_status;          // result of the next issues
  Status query_status;
  Status mark_status;

  void until_issued(std::size_t count) {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return issued.size() >= count; });
  }
  // Waits for the n-th copy (from 0) whose offset is at least `offset`; returns its index in
  // `issued`.
  std::size_t nth_issued_from(std::uint64_t offset, std::size_t n) {
    std::unique_lock lock(mutex);
    std::size_t index = 0;
    changed.wait(lock, [&] {
      std::size_t found = 0;
      for (index = 0; index < offsets.size(); ++index) {
        if (offsets[index] >= offset && found++ == n) return true;
      }
      return false;
    });
    return index;
  }
  // Returns after `more` further queries of the compute stream by the copier.
  void until_asked(int more) {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&, goal = asked + more] { return asked >= goal; });
  }
  // Returns after `more` further queries of copies in flight by the copier.
  void until_queried(int more) {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&, goal = queried + more] { return queried >= goal; });
  }
  std::size_t count_issued() {
    std::lock_guard lock(mutex);
    return issued.size();
  }
  void stop_compute() {
    std::lock_guard lock(mutex);
    compute_runs_ahead = false;
  }
  // Events marked earlier remain unreached.
  void run_compute_for_later_marks() {
    std::lock_guard lock(mutex);
    compute_runs_ahead = true;
  }
  void end(std::size_t index) {
    std::unique_lock lock(mutex);
    ended.insert(index);
    changed.wait(lock, [&] { return landed.contains(index); });
  }
  void end_everything() {
    std::lock_guard lock(mutex);
    automatic = true;
  }
  void reach_events() {
    std::lock_guard lock(mutex);
    compute_runs_ahead = true;
    reached.insert(live_events.begin(), live_events.end());
  }
  std::vector<std::uint32_t> lanes() {
    std::lock_guard lock(mutex);
    std::vector<std::uint32_t> lanes;
    for (const DeviceCopy& copy : issued) lanes.push_back(copy.lane);
    return lanes;
  }
};

class FakeDevice final : public CopyDevice {
 public:
  explicit FakeDevice(FakeDeviceState* state) : state_(*state) {}
  std::string name() const override { return "fake"; }
  Status mark(std::uintptr_t, DeviceEvent* event) override {
    std::lock_guard lock(state_.mutex);
    if (!state_.mark_status.is_ok()) return state_.mark_status;
    *event = ++state_.last_event;
    state_.live_events.insert(*event);
    if (state_.compute_runs_ahead) state_.reached.insert(*event);
    return Status::ok();
  }
  void release(DeviceEvent event) override {
    std::lock_guard lock(state_.mutex);
    if (state_.live_events.erase(event) != 1) throw std::logic_error("released twice");
  }
  Status reached(DeviceEvent event, bool* done) override {
    std::lock_guard lock(state_.mutex);
    if (!state_.live_events.contains(event)) throw std::logic_error("unknown event");
    ++state_.asked;
    state_.changed.notify_all();
    *done = state_.reached.contains(event);
    return state_.reached_status;
  }
  std::uint64_t refused_batches() const override {
    std::lock_guard lock(state_.mutex);
    return state_.refused_batches;
  }
  Status issue(const DeviceCopy& copy) override {
    std::lock_guard lock(state_.mutex);
    if (!state_.issue_status.is_ok()) return state_.issue_status;
    if (!state_.in_flight.emplace(std::pair(copy.lane, copy.slot), state_.issued.size()).second) {
      throw std::logic_error("the slot is taken");
    }
    state_.refused_batches += state_.refuse_batches ? 1 : 0;
    state_.issued.push_back(copy);
    state_.offsets.push_back(copy.segments.front().area_offset);
    state_.changed.notify_all();
    return Status::ok();
  }
  Status query(std::uint32_t lane, std::uint32_t slot, bool* done) override {
    std::lock_guard lock(state_.mutex);
    ++state_.queried;
    state_.changed.notify_all();
    const auto found = state_.in_flight.find({lane, slot});
    const DeviceCopy copy = state_.issued[found->second];
    *done = state_.automatic || state_.ended.contains(found->second);
    if (!state_.query_status.is_ok()) {
      state_.in_flight.erase(found);
      return state_.query_status;
    }
    if (!*done) return Status::ok();
    run_copy(copy, state_.area, state_.staging_capacity);
    state_.landed.insert(found->second);
    state_.in_flight.erase(found);
    state_.changed.notify_all();
    return Status::ok();
  }

 private:
  FakeDeviceState& state_;
};

}  // namespace kv_offload::testing
