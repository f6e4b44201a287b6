// SPDX-License-Identifier: Apache-2.0
#include "record/split_planes.h"

#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kv_offload {
namespace {

void split_plain(const std::byte* numbers, std::size_t count, std::byte* upper, std::byte* lower) {
  for (std::size_t i = 0; i < count; ++i) {
    const unsigned number =
        std::to_integer<unsigned>(numbers[2 * i]) | std::to_integer<unsigned>(numbers[2 * i + 1]) << 8;
    upper[i] = static_cast<std::byte>(number >> 7);
    lower[i] = static_cast<std::byte>(number << 1 | number >> 15);
  }
}

void join_plain(const std::byte* upper, const std::byte* lower, std::size_t count, std::byte* numbers) {
  for (std::size_t i = 0; i < count; ++i) {
    const unsigned turned = std::to_integer<unsigned>(upper[i]) << 8 | std::to_integer<unsigned>(lower[i]);
    const unsigned number = turned >> 1 | turned << 15;
    numbers[2 * i] = static_cast<std::byte>(number);
    numbers[2 * i + 1] = static_cast<std::byte>(number >> 8);
  }
}

#if defined(__x86_64__)
// Every x86-64 has SSE2. Written as intrinsics because -O2 does not vectorise the loops above.
void split_sse2(const std::byte* numbers, std::size_t count, std::byte* upper, std::byte* lower) {
  constexpr std::size_t kStep = 16;
  const __m128i low_byte = _mm_set1_epi16(0xFF);
  const std::size_t whole = count / kStep * kStep;
  for (std::size_t i = 0; i < whole; i += kStep) {
    const auto* from = reinterpret_cast<const __m128i*>(numbers + 2 * i);
    const __m128i a = _mm_loadu_si128(from);
    const __m128i b = _mm_loadu_si128(from + 1);
    const __m128i turned_a = _mm_or_si128(_mm_slli_epi16(a, 1), _mm_srli_epi16(a, 15));
    const __m128i turned_b = _mm_or_si128(_mm_slli_epi16(b, 1), _mm_srli_epi16(b, 15));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(upper + i),
                     _mm_packus_epi16(_mm_srli_epi16(turned_a, 8), _mm_srli_epi16(turned_b, 8)));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(lower + i),
                     _mm_packus_epi16(_mm_and_si128(turned_a, low_byte), _mm_and_si128(turned_b, low_byte)));
  }
  split_plain(numbers + 2 * whole, count - whole, upper + whole, lower + whole);
}

void join_sse2(const std::byte* upper, const std::byte* lower, std::size_t count, std::byte* numbers) {
  constexpr std::size_t kStep = 16;
  const std::size_t whole = count / kStep * kStep;
  for (std::size_t i = 0; i < whole; i += kStep) {
    const __m128i up = _mm_loadu_si128(reinterpret_cast<const __m128i*>(upper + i));
    const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(lower + i));
    const __m128i a = _mm_unpacklo_epi8(low, up);
    const __m128i b = _mm_unpackhi_epi8(low, up);
    auto* to = reinterpret_cast<__m128i*>(numbers + 2 * i);
    _mm_storeu_si128(to, _mm_or_si128(_mm_srli_epi16(a, 1), _mm_slli_epi16(a, 15)));
    _mm_storeu_si128(to + 1, _mm_or_si128(_mm_srli_epi16(b, 1), _mm_slli_epi16(b, 15)));
  }
  join_plain(upper + whole, lower + whole, count - whole, numbers + 2 * whole);
}

constexpr std::size_t kAvx2Step = 32;

__attribute__((target("avx2"))) void split_avx2(const std::byte* numbers, std::size_t count, std::byte* upper,
                                                std::byte* lower) {
  constexpr int kHalvesInOrder = 0xD8;  // undoes the interleaving of 128-bit lanes by the pack instruction
  const __m256i low_byte = _mm256_set1_epi16(0xFF);
  const std::size_t whole = count / kAvx2Step * kAvx2Step;
  for (std::size_t i = 0; i < whole; i += kAvx2Step) {
    const auto* from = reinterpret_cast<const __m256i*>(numbers + 2 * i);
    const __m256i a = _mm256_loadu_si256(from);
    const __m256i b = _mm256_loadu_si256(from + 1);
    const __m256i turned_a = _mm256_or_si256(_mm256_slli_epi16(a, 1), _mm256_srli_epi16(a, 15));
    const __m256i turned_b = _mm256_or_si256(_mm256_slli_epi16(b, 1), _mm256_srli_epi16(b, 15));
    const __m256i up = _mm256_packus_epi16(_mm256_srli_epi16(turned_a, 8), _mm256_srli_epi16(turned_b, 8));
    const __m256i low =
        _mm256_packus_epi16(_mm256_and_si256(turned_a, low_byte), _mm256_and_si256(turned_b, low_byte));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(upper + i), _mm256_permute4x64_epi64(up, kHalvesInOrder));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(lower + i), _mm256_permute4x64_epi64(low, kHalvesInOrder));
  }
  split_plain(numbers + 2 * whole, count - whole, upper + whole, lower + whole);
}

// Decoded rows are larger than the caches. Streaming stores bypass the caches, so the memory is not read
// before it is written.
template <bool kStream>
__attribute__((target("avx2"))) void store(std::byte* to, __m256i value) {
  if constexpr (kStream) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to), value);
  } else {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), value);
  }
}

template <bool kStream>
__attribute__((target("avx2"))) void join_steps(const std::byte* upper, const std::byte* lower,
                                                std::size_t whole, std::byte* numbers) {
  constexpr int kHalvesInOrder = 0xD8;
  for (std::size_t i = 0; i < whole; i += kAvx2Step) {
    const __m256i up = _mm256_permute4x64_epi64(
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(upper + i)), kHalvesInOrder);
    const __m256i low = _mm256_permute4x64_epi64(
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(lower + i)), kHalvesInOrder);
    const __m256i a = _mm256_unpacklo_epi8(low, up);
    const __m256i b = _mm256_unpackhi_epi8(low, up);
    store<kStream>(numbers + 2 * i, _mm256_or_si256(_mm256_srli_epi16(a, 1), _mm256_slli_epi16(a, 15)));
    store<kStream>(numbers + 2 * i + kAvx2Step,
                   _mm256_or_si256(_mm256_srli_epi16(b, 1), _mm256_slli_epi16(b, 15)));
  }
}

void join_avx2(const std::byte* upper, const std::byte* lower, std::size_t count, std::byte* numbers) {
  constexpr std::size_t kStreamed = std::size_t{16} << 10;  // smaller results may be used soon
  const std::size_t whole = count / kAvx2Step * kAvx2Step;
  if (whole >= kStreamed && reinterpret_cast<std::uintptr_t>(numbers) % kAvx2Step == 0) {
    join_steps<true>(upper, lower, whole, numbers);
    _mm_sfence();  // streamed stores are weakly ordered: must precede any flag
  } else {
    join_steps<false>(upper, lower, whole, numbers);
  }
  join_plain(upper + whole, lower + whole, count - whole, numbers + 2 * whole);
}
#endif

}  // namespace

std::size_t split_planes_known(SplitPlanes (&ways)[kMostSplitPlanes]) {
  std::size_t known = 0;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) ways[known++] = {split_avx2, join_avx2, "avx2"};
  ways[known++] = {split_sse2, join_sse2, "sse2"};
#endif
  ways[known++] = {split_plain, join_plain, "plain"};
  return known;
}

}  // namespace kv_offload
