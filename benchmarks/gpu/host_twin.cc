#include <chrono>
#include <cstring>
#include <vector>

#include "base/aligned_buffer.h"
#include "bench.h"
#include "platform.h"

namespace kv_offload::bench {
namespace {

// Copies at once, in the issuing thread.
class TwinDevice final : public CopyDevice {
 public:
  explicit TwinDevice(std::span<std::byte> area) : area_(area), pieces_(64 << 10), staging_(1 << 20) {}
  std::string name() const override { return "host twin"; }
  Status mark(std::uintptr_t, DeviceEvent* event) override {
    *event = 1;
    return Status::ok();
  }
  void release(DeviceEvent) override {}
  Status reached(DeviceEvent, bool* done) override {
    *done = true;
    return Status::ok();
  }
  Status issue(const DeviceCopy& copy) override {
    const bool store = copy.direction == CopyDirection::kStore;
    if (copy.path == CopyPath::kDma) {
      for (const CopySegment& s : copy.segments) move(area_.data() + s.area_offset, s.cache, s.bytes, store);
    } else if (copy.path == CopyPath::kKernel) {
      launch(cut_for_area(copy.segments, area_.data(), pieces_.data(), pieces_.size()), store);
    } else {
      const std::vector<RowRun> runs = row_runs(copy.segments, 0);
      const std::size_t count =
          cut_for_staging(copy.segments, runs, staging_.data(), pieces_.data(), pieces_.size());
      if (store) launch(count, store);
      for (const RowRun& run : runs) {
        move(area_.data() + run.area_offset, staging_.data() + run.staging_offset, run.bytes, store);
      }
      if (!store) launch(count, store);
    }
    return Status::ok();
  }
  Status query(std::uint32_t, std::uint32_t, bool* done) override {
    *done = true;
    return Status::ok();
  }

 private:
  static void move(std::byte* row, std::byte* cache, std::uint64_t bytes, bool store) {
    std::memcpy(store ? row : cache, store ? cache : row, bytes);
  }
  void launch(std::size_t count, bool store) {
    for (unsigned thread = 0; thread < 4; ++thread) {
      pack::move_pieces(pieces_.data(), count, store, 0, 1, thread, 4);
    }
  }
  std::span<std::byte> area_;
  std::vector<PackPiece> pieces_;
  std::vector<std::byte> staging_;
};

class HostTwin final : public Platform {
 public:
  explicit HostTwin(std::uint64_t bytes) : cache_(bytes), area_(bytes) {}
  std::string name() const override { return "host twin (no GPU: these figures say nothing about one)"; }
  std::span<std::byte> cache() override { return cache_.span(); }
  std::span<std::byte> area() override { return area_.span(); }
  std::string table() const override { return default_copy_table().describe(); }
  std::unique_ptr<DeviceCopier> copier(const CacheLayout& layout, std::optional<CopyPath> path) override {
    CopierOptions options;
    options.layout = layout;
    options.area = area_.span();
    return std::make_unique<DeviceCopier>(options, std::make_unique<TwinDevice>(area_.span()),
                                          path ? single_path_table(*path) : default_copy_table(),
                                          DeviceLimits{.staged_bytes = 1 << 20});
  }
  double link(CopyDirection direction, std::uint64_t bytes) override {
    const double begun = now();
    const bool store = direction == CopyDirection::kStore;
    std::memcpy(store ? area_.data() : cache_.data(), store ? cache_.data() : area_.data(), bytes);
    return now() - begun;
  }
  double link_both(std::uint64_t store_bytes, std::uint64_t load_bytes) override {
    return link(CopyDirection::kStore, store_bytes) + link(CopyDirection::kLoad, load_bytes);
  }
  double decode_steps(int steps) override {
    const double begun = now();
    unsigned sum = 0;
    for (int i = 0; i < steps; ++i) {
      for (std::size_t at = 0; at < cache_.size(); at += 4096)
        sum += static_cast<unsigned>(cache_.data()[at]);
    }
    return now() - begun + (sum == 1 ? 1e-12 : 0);
  }

 private:
  AlignedBuffer cache_;
  AlignedBuffer area_;
};

}  // namespace

std::unique_ptr<Platform> make_host_twin(std::uint64_t bytes) { return std::make_unique<HostTwin>(bytes); }

}  // namespace kv_offload::bench
