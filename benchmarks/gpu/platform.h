// SPDX-License-Identifier: Apache-2.0
// The GPU as copy_gpu.cc uses it: memory, copiers, the speed of the link, and a
// step of a model that decodes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "copy/device_copier.h"

namespace kv_offload::bench {

// One step of a serving engine, measured in its stream, in seconds.
struct Step {
  double copies = 0;  // the small copies to the device before its kernels, and to the host after them
  double whole = 0;
};

class Platform {
 public:
  virtual ~Platform() = default;
  virtual std::string name() const = 0;
  // Memory for a cache and for an area. Valid as long as the platform exists.
  virtual std::span<std::byte> cache() = 0;
  virtual std::span<std::byte> area() = 0;
  virtual const DeviceLimits& limits() const = 0;
  // Returns a copier that always uses `path`, or chooses by its measurements.
  virtual std::unique_ptr<DeviceCopier> copier(const CacheLayout& layout, std::optional<CopyPath> path,
                                               const DeviceLimits& limits) = 0;
  virtual std::string table() const = 0;
  // Returns the seconds of one copy of this number of bytes over the link: in each direction, and in both at
  // once.
  virtual double link(CopyDirection direction, std::uint64_t bytes) = 0;
  virtual double link_both(std::uint64_t store_bytes, std::uint64_t load_bytes) = 0;
  // Runs the small copies that an engine makes in every step (token ids, block
  // tables, sampled tokens), around kernels that fill every SM.
  virtual Step step() = 0;
  virtual std::uintptr_t compute_stream() const = 0;
};

inline constexpr std::uint64_t kCacheBytes = 3ull << 30;

// Returns null without a device.
std::unique_ptr<Platform> make_gpu(std::uint64_t bytes);

}  // namespace kv_offload::bench
