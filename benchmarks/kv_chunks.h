// SPDX-License-Identifier: Apache-2.0
// Shared by the codec benchmarks: chunks of real K/V in bf16, from files that payload_codec.py makes.
#pragma once

#include <fmt/format.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace kv_offload::bench {

inline constexpr std::size_t kChunk = std::size_t{1800} << 10;  // 80 tokens of SmolLM2-135M
using Bytes = std::vector<std::byte>;

[[noreturn]] inline void die(const std::string& what) {
  fmt::print(stderr, "{}\n", what);
  std::exit(1);
}

// Returns all whole chunks of the file, one after the other.
inline Bytes whole_chunks(const std::string& path) {
  std::FILE* file = std::fopen(path.c_str(), "rb");
  if (file == nullptr) die(fmt::format("{} cannot be read", path));
  Bytes bytes;
  for (Bytes part(kChunk); std::fread(part.data(), 1, kChunk, file) == kChunk;) {
    bytes.insert(bytes.end(), part.begin(), part.end());
  }
  std::fclose(file);
  if (bytes.empty()) die(fmt::format("{} has less than a chunk of {} bytes", path, kChunk));
  return bytes;
}

}  // namespace kv_offload::bench
