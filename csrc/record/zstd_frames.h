// SPDX-License-Identifier: Apache-2.0
// ZstdFrames: entropy-codes bytes as zstd frames. The parameters suit bytes without repetitions but with an
// uneven distribution, such as exponents: literals are Huffman-coded, and sequences are hardly searched.
//
// One thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

namespace kv_offload {

class ZstdFrames {
 public:
  ZstdFrames();
  ~ZstdFrames();
  ZstdFrames(const ZstdFrames&) = delete;
  ZstdFrames& operator=(const ZstdFrames&) = delete;

  // Call before encode() or decode(). Return false if memory runs out or the library lacks a parameter.
  bool can_encode();
  bool can_decode();
  // Returns the bytes of the frame in `out`; content.size() if it needs more than out.size() bytes. nullopt:
  // the library failed.
  std::optional<std::size_t> encode(std::span<const std::byte> content, std::span<std::byte> out);
  // Returns null, or what is wrong: the bytes are not exactly one frame with out.size() bytes of content.
  const char* decode(std::span<const std::byte> frame, std::span<std::byte> out);

 private:
  struct Library;
  std::unique_ptr<Library> library_;
};

// Little-endian.
std::uint32_t load_u32(const std::byte* at);
void store_u32(std::byte* at, std::size_t value);

}  // namespace kv_offload
