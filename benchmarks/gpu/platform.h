// Where a copy benchmark runs: on a GPU, or on the host twin, which does the
// same with plain memory so that the benchmark itself can be tried anywhere.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "copy/device_copier.h"

namespace kv_offload::bench {

class Platform {
 public:
  virtual ~Platform() = default;
  virtual std::string name() const = 0;
  // Memory that a cache, and an area, may lie in; as long as the platform lives.
  virtual std::span<std::byte> cache() = 0;
  virtual std::span<std::byte> area() = 0;
  // A copier that always takes `path`, or chooses by what it measured.
  virtual std::unique_ptr<DeviceCopier> copier(const CacheLayout& layout, std::optional<CopyPath> path) = 0;
  virtual std::string table() const = 0;
  // Seconds of the link: one copy of so many bytes, each way; both at once.
  virtual double link(CopyDirection direction, std::uint64_t bytes) = 0;
  virtual double link_both(std::uint64_t store_bytes, std::uint64_t load_bytes) = 0;
  // Seconds of one decode-like step's loop.
  virtual double decode_steps(int steps) = 0;
};

inline constexpr std::uint64_t kCacheBytes = 3ull << 30;

// Null when there is no device.
std::unique_ptr<Platform> make_gpu(std::uint64_t bytes);
std::unique_ptr<Platform> make_host_twin(std::uint64_t bytes);

}  // namespace kv_offload::bench
