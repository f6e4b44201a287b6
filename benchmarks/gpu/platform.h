// SPDX-License-Identifier: Apache-2.0
// What the questions of copy_gpu.cc need of a GPU: memory, copiers, the link's
// own speed, and a step of a model that decodes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "copy/device_copier.h"

namespace kv_offload::bench {

// One step of a serving engine, as its stream saw it: seconds.
struct Step {
  double copies = 0;  // the small copies up before its kernels, and down after them
  double whole = 0;
};

class Platform {
 public:
  virtual ~Platform() = default;
  virtual std::string name() const = 0;
  // Memory that a cache, and an area, may lie in; as long as the platform lives.
  virtual std::span<std::byte> cache() = 0;
  virtual std::span<std::byte> area() = 0;
  virtual const DeviceLimits& limits() const = 0;
  // A copier that always takes `path`, or chooses by what it measured.
  virtual std::unique_ptr<DeviceCopier> copier(const CacheLayout& layout, std::optional<CopyPath> path,
                                               const DeviceLimits& limits) = 0;
  virtual std::string table() const = 0;
  // Seconds of the link: one copy of so many bytes, each way; both at once.
  virtual double link(CopyDirection direction, std::uint64_t bytes) = 0;
  virtual double link_both(std::uint64_t store_bytes, std::uint64_t load_bytes) = 0;
  // Small copies both ways, as an engine makes them in every step (token ids,
  // block tables, what was sampled), around kernels that fill every SM.
  virtual Step step() = 0;
  virtual std::uintptr_t compute_stream() const = 0;
};

inline constexpr std::uint64_t kCacheBytes = 3ull << 30;

// Null when there is no device.
std::unique_ptr<Platform> make_gpu(std::uint64_t bytes);

}  // namespace kv_offload::bench
