// SPDX-License-Identifier: Apache-2.0
#include "copy/host_memcpy.h"

#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace kv_offload {

#if defined(__SSE2__)
namespace {

constexpr std::size_t kLine = 64;

// REQUIRES: `to` is 16-byte aligned, and `bytes` is a multiple of a cache line. 16-byte streaming stores fill
// the write-combining buffers as fast as wider ones here.
void stream_lines(std::byte* to, const std::byte* from, std::size_t bytes) {
  for (std::size_t at = 0; at < bytes; at += kLine) {
    const auto* source = reinterpret_cast<const __m128i*>(from + at);
    auto* target = reinterpret_cast<__m128i*>(to + at);
    const __m128i a = _mm_loadu_si128(source);
    const __m128i b = _mm_loadu_si128(source + 1);
    const __m128i c = _mm_loadu_si128(source + 2);
    const __m128i d = _mm_loadu_si128(source + 3);
    _mm_stream_si128(target, a);
    _mm_stream_si128(target + 1, b);
    _mm_stream_si128(target + 2, c);
    _mm_stream_si128(target + 3, d);
  }
  _mm_sfence();  // streaming stores are weakly ordered: publish before any flag is set
}

}  // namespace

void copy_bytes(std::byte* to, const std::byte* from, std::size_t bytes, std::size_t non_temporal_from) {
  if (bytes < non_temporal_from) {
    std::memcpy(to, from, bytes);
    return;
  }
  const std::size_t head = (kLine - reinterpret_cast<std::uintptr_t>(to) % kLine) % kLine;
  const std::size_t body = (bytes - head) / kLine * kLine;
  std::memcpy(to, from, head);
  stream_lines(to + head, from + head, body);
  std::memcpy(to + head + body, from + head + body, bytes - head - body);
}
#else
void copy_bytes(std::byte* to, const std::byte* from, std::size_t bytes, std::size_t) {
  std::memcpy(to, from, bytes);
}
#endif

}  // namespace kv_offload
