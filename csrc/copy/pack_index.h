// SPDX-License-Identifier: Apache-2.0
// The index arithmetic of the pack kernels, shared by device and host: the tests run the same code on the
// host, thread by thread.
//
// A launch copies pieces; block b copies pieces b, b + blocks, ..., and its threads share the bytes of a
// piece. Vectors are as wide as both addresses allow. If the addresses agree modulo 16: a scalar head up to
// the boundary, 16-byte vectors, a scalar tail; otherwise narrower vectors. Any alignment is correct.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#define KVO_HOST_DEVICE __host__ __device__
#else
#define KVO_HOST_DEVICE
#endif

namespace kv_offload {

// Bytes that a block copies at a time. 16 KiB = 256 threads with four 16-byte vectors in flight each.
inline constexpr std::uint64_t kPieceBytes = 16 << 10;

struct PackPiece {
  std::byte* cache = nullptr;  // device memory
  std::byte* row = nullptr;    // pinned host memory or staging
  std::uint64_t bytes = 0;
};

namespace pack {

// Access units for memory of any type: they may alias the actual type of the bytes.
struct __attribute__((__may_alias__)) Vector16 {
  alignas(16) std::uint64_t low;
  std::uint64_t high;
};
struct __attribute__((__may_alias__)) Vector8 {
  std::uint64_t bits;
};
struct __attribute__((__may_alias__)) Vector4 {
  std::uint32_t bits;
};
struct __attribute__((__may_alias__)) Vector1 {
  std::uint8_t bits;
};
static_assert(sizeof(Vector16) == 16 && sizeof(Vector8) == 8 && sizeof(Vector4) == 4 && sizeof(Vector1) == 1);

template <typename Unit>
KVO_HOST_DEVICE inline void move_units(std::byte* to, const std::byte* from, std::uint64_t units,
                                       unsigned thread, unsigned threads) {
  auto* target = reinterpret_cast<Unit*>(to);
  const auto* source = reinterpret_cast<const Unit*>(from);
  std::uint64_t i = thread;
  // Four loads before the first store: the link's latency is paid once for all four.
  for (; i + 3ull * threads < units; i += 4ull * threads) {
    const Unit a = source[i];
    const Unit b = source[i + threads];
    const Unit c = source[i + 2ull * threads];
    const Unit d = source[i + 3ull * threads];
    target[i] = a;
    target[i + threads] = b;
    target[i + 2ull * threads] = c;
    target[i + 3ull * threads] = d;
  }
  for (; i < units; i += threads) target[i] = source[i];
}

// Copies head, body and tail with `Unit` vectors. REQUIRES: `to` and `from` agree modulo sizeof(Unit).
template <typename Unit>
KVO_HOST_DEVICE inline void move_aligned(std::byte* to, const std::byte* from, std::uint64_t bytes,
                                         unsigned thread, unsigned threads) {
  std::uint64_t head = (sizeof(Unit) - reinterpret_cast<std::uintptr_t>(to) % sizeof(Unit)) % sizeof(Unit);
  if (head > bytes) head = bytes;
  const std::uint64_t units = (bytes - head) / sizeof(Unit);
  const std::uint64_t tail = head + units * sizeof(Unit);
  move_units<Vector1>(to, from, head, thread, threads);
  move_units<Unit>(to + head, from + head, units, thread, threads);
  move_units<Vector1>(to + tail, from + tail, bytes - tail, thread, threads);
}

// Copies this thread's share of one piece.
KVO_HOST_DEVICE inline void move_piece(std::byte* to, const std::byte* from, std::uint64_t bytes,
                                       unsigned thread, unsigned threads) {
  const std::uintptr_t apart = reinterpret_cast<std::uintptr_t>(to) ^ reinterpret_cast<std::uintptr_t>(from);
  if (apart % 16 == 0) {
    move_aligned<Vector16>(to, from, bytes, thread, threads);
  } else if (apart % 8 == 0) {
    move_aligned<Vector8>(to, from, bytes, thread, threads);
  } else if (apart % 4 == 0) {
    move_aligned<Vector4>(to, from, bytes, thread, threads);
  } else {
    move_units<Vector1>(to, from, bytes, thread, threads);
  }
}

// Copies this thread's share of a launch.
KVO_HOST_DEVICE inline void move_pieces(const PackPiece* pieces, std::uint64_t count, bool to_row,
                                        unsigned block, unsigned blocks, unsigned thread, unsigned threads) {
  for (std::uint64_t i = block; i < count; i += blocks) {
    const PackPiece piece = pieces[i];
    if (to_row) {
      move_piece(piece.row, piece.cache, piece.bytes, thread, threads);
    } else {
      move_piece(piece.cache, piece.row, piece.bytes, thread, threads);
    }
  }
}

}  // namespace pack
}  // namespace kv_offload
