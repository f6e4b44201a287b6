// SPDX-License-Identifier: Apache-2.0
#include "record/row_coder.h"

#include <algorithm>
#include <bit>
#include <cstring>

#if defined(__x86_64__)
#if !defined(__clang__)
// immintrin.h raises false warnings for AVX-512 (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#endif

namespace kv_offload {
namespace {

constexpr unsigned kBits = 10;  // of a probability: part of the format
constexpr std::uint32_t kOne = 1U << kBits;
constexpr std::size_t kSymbols = 256;

constexpr int largest_of(std::size_t row_class) {
  if (row_class == 0) return 0;
  return row_class < 2 ? 1 : std::min(127, 1 << (row_class - 2));
}

// Returns 2^32 times the weight of a magnitude relative to zero: (a / (a + magnitude^2))^16 with
// a = 4 + 11/128 * 4^row_class, which is nearly a normal distribution. Integers only, so that all compilers
// get the same.
constexpr std::uint64_t weight_of(std::size_t row_class, std::uint64_t magnitude) {
  const std::uint64_t a = 512 + (std::uint64_t{11} << 2 * row_class);
  std::uint64_t weight = (a << 32) / (a + 128 * magnitude * magnitude);
  for (int i = 0; i < 4; ++i) weight = magnitude == 0 ? weight : weight * weight >> 32;
  return weight;
}

// Frequencies of the magnitudes 0..127 of a class; those of an integer and of its negative are equal. They
// sum to kOne. 0: the class does not have the magnitude.
constexpr std::array<std::uint32_t, 128> frequencies_of(std::size_t row_class) {
  const auto largest = static_cast<std::uint64_t>(largest_of(row_class));
  std::uint64_t all = weight_of(row_class, 0);
  for (std::uint64_t m = 1; m <= largest; ++m) all += 2 * weight_of(row_class, m);
  std::array<std::uint32_t, 128> found{};
  found[0] = kOne;
  for (std::uint64_t m = 1; m <= largest; ++m) {
    found[m] = static_cast<std::uint32_t>(1 + weight_of(row_class, m) * (kOne - 2 * largest - 1) / all);
    found[0] -= 2 * found[m];
  }
  return found;
}

// One entry for each remainder of a state: the integer in bits 0..7, the remainder's distance from the first
// one of the integer in 8..19, and the integer's frequency in 20..31.
using DecodeTable = std::array<std::uint32_t, kOne>;

// One entry for each integer, as a byte without sign: its frequency in bits 0..15, and the first remainder of
// a state in 16..31.
using EncodeTable = std::array<std::uint32_t, kSymbols>;

struct Tables {
  std::array<DecodeTable, kRowClasses> decode{};
  std::array<EncodeTable, kRowClasses> encode{};
};

constexpr Tables kTables = [] {
  Tables tables;
  for (std::size_t row_class = 0; row_class < kRowClasses; ++row_class) {
    const std::array<std::uint32_t, 128> frequencies = frequencies_of(row_class);
    const int largest = largest_of(row_class);
    std::uint32_t begin = 0;
    for (int integer = -largest; integer <= largest; ++integer) {
      const std::uint32_t frequency = frequencies[static_cast<std::size_t>(integer < 0 ? -integer : integer)];
      const auto byte = static_cast<std::uint8_t>(integer);
      tables.encode[row_class][byte] = frequency | begin << 16;
      for (std::uint32_t i = 0; i < frequency; ++i)
        tables.decode[row_class][begin + i] = byte | i << 8 | frequency << 20;
      begin += frequency;
    }
  }
  return tables;
}();

const std::byte* decode_plain(RowStates& states, const std::uint8_t* classes, const std::byte* words,
                              std::size_t rows, std::int8_t* q) {
  for (std::size_t row = 0; row < rows; ++row) {
    for (std::size_t channel = 0; channel < kRowChannels; ++channel) {
      std::uint32_t state = states[channel];
      const std::uint32_t entry = kTables.decode[classes[channel]][state % kOne];
      state = (entry >> 20) * (state >> kBits) + (entry >> 8 & 0xFFF);
      std::uint16_t word;
      std::memcpy(&word, words, 2);
      const auto is_small = static_cast<std::uint32_t>(state < kFirstRowState);  // a branch is mispredicted
      states[channel] = state << 16 * is_small | (word & (0 - is_small));
      words += 2 * is_small;
      q[row * kRowChannels + channel] = static_cast<std::int8_t>(entry);
    }
  }
  return words;
}

std::byte* encode_plain(RowStates& states, const std::uint8_t* classes, const std::int8_t* q,
                        std::size_t rows, std::size_t stride, std::byte* end) {
  for (std::size_t row = rows; row-- > 0;) {
    for (std::size_t channel = kRowChannels; channel-- > 0;) {
      const auto byte = static_cast<std::uint8_t>(q[row * stride + channel]);
      const std::uint32_t entry = kTables.encode[classes[channel]][byte];
      const std::uint32_t frequency = entry & 0xFFFF;
      std::uint32_t state = states[channel];
      const auto word = static_cast<std::uint16_t>(state);
      std::memcpy(end - 2, &word, 2);
      // The largest state that stays below 2^32 after this integer; for a frequency of kOne it wraps.
      const auto is_large = static_cast<std::uint32_t>(state > (frequency << (32 - kBits)) - 1);
      end -= 2 * is_large;
      state >>= 16 * is_large;
      states[channel] = (state / frequency << kBits) + state % frequency + (entry >> 16);
    }
  }
  return end;
}

#if defined(__x86_64__)

#define KV_OFFLOAD_AVX2 __attribute__((target("avx2,popcnt")))
#define KV_OFFLOAD_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,popcnt")))

// For each set of lanes that read a word, the lane's position among them.
using Positions = std::array<std::array<std::uint8_t, 8>, 256>;
constexpr Positions kPositions = [] {
  Positions all{};
  for (std::size_t lanes = 0; lanes < all.size(); ++lanes) {
    std::uint8_t next = 0;
    for (std::size_t lane = 0; lane < 8; ++lane) {
      if ((lanes >> lane & 1) != 0) all[lanes][lane] = next++;
    }
  }
  return all;
}();

// For each set of lanes that write a word: moves the words of these lanes to the end of a vector.
constexpr std::array<std::array<std::uint8_t, 16>, 256> kToEnd = [] {
  std::array<std::array<std::uint8_t, 16>, 256> all{};
  for (std::size_t lanes = 0; lanes < all.size(); ++lanes) {
    std::size_t place = 8;
    for (std::size_t lane = 8; lane-- > 0;) {
      if ((lanes >> lane & 1) == 0) continue;
      --place;
      all[lanes][2 * place] = static_cast<std::uint8_t>(2 * lane);
      all[lanes][2 * place + 1] = static_cast<std::uint8_t>(2 * lane + 1);
    }
  }
  return all;
}();

// Decodes the integers of 8 channels. Returns them in 32 bits each.
KV_OFFLOAD_AVX2 inline __m256i decode_8_channels(std::uint32_t* states, const std::uint32_t* begins,
                                                 const std::byte** words) {
  const auto* const all = reinterpret_cast<const int*>(kTables.decode.data());
  auto* const place = reinterpret_cast<__m256i*>(states);
  __m256i state = _mm256_loadu_si256(place);
  const __m256i at = _mm256_add_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(begins)),
                                      _mm256_and_si256(state, _mm256_set1_epi32(kOne - 1)));
  const __m256i entry = _mm256_i32gather_epi32(all, at, 4);
  const __m256i distance = _mm256_and_si256(_mm256_srli_epi32(entry, 8), _mm256_set1_epi32(0xFFF));
  state = _mm256_add_epi32(_mm256_mullo_epi32(_mm256_srli_epi32(entry, 20), _mm256_srli_epi32(state, kBits)),
                           distance);
  const __m256i is_small = _mm256_cmpeq_epi32(_mm256_srli_epi32(state, 16), _mm256_setzero_si256());
  const auto lanes = static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(is_small)));
  const __m256i next = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(*words)));
  const __m256i positions =
      _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(kPositions[lanes].data())));
  const __m256i longer =
      _mm256_or_si256(_mm256_slli_epi32(state, 16), _mm256_permutevar8x32_epi32(next, positions));
  _mm256_storeu_si256(place, _mm256_blendv_epi8(state, longer, is_small));
  *words += 2 * _mm_popcnt_u32(lanes);
  return _mm256_srai_epi32(_mm256_slli_epi32(entry, 24), 24);
}

KV_OFFLOAD_AVX2 const std::byte* decode_avx2(RowStates& states, const std::uint8_t* classes,
                                             const std::byte* words, std::size_t rows, std::int8_t* q) {
  std::array<std::uint32_t, kRowChannels> begins;
  for (std::size_t channel = 0; channel < kRowChannels; ++channel)
    begins[channel] = std::uint32_t{classes[channel]} << kBits;
  for (std::size_t row = 0; row < rows; ++row) {
    for (std::size_t from = 0; from < kRowChannels; from += 32) {
      __m256i parts[4];
      for (std::size_t i = 0; i < 4; ++i)
        parts[i] = decode_8_channels(states.data() + from + 8 * i, begins.data() + from + 8 * i, &words);
      const __m256i bytes =
          _mm256_packs_epi16(_mm256_packs_epi32(parts[0], parts[1]), _mm256_packs_epi32(parts[2], parts[3]));
      const __m256i in_order = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(q + row * kRowChannels + from), in_order);
    }
  }
  return words;
}

// Encodes the integers of 8 channels.
KV_OFFLOAD_AVX2 inline std::byte* encode_8_channels(std::uint32_t* states, const std::uint32_t* begins,
                                                    const std::int8_t* q, std::byte* end) {
  const auto* const all = reinterpret_cast<const int*>(kTables.encode.data());
  auto* const place = reinterpret_cast<__m256i*>(states);
  __m256i state = _mm256_loadu_si256(place);
  const __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(q)));
  const __m256i at = _mm256_add_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(begins)), bytes);
  const __m256i entry = _mm256_i32gather_epi32(all, at, 4);
  const __m256i low_half = _mm256_set1_epi32(0xFFFF), frequency = _mm256_and_si256(entry, low_half);
  const __m256i most = _mm256_sub_epi32(_mm256_slli_epi32(frequency, 32 - kBits), _mm256_set1_epi32(1));
  const __m256i is_small = _mm256_cmpeq_epi32(_mm256_max_epu32(state, most), most);
  const auto lanes = static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(is_small))) ^ 0xFF;
  const __m256i low = _mm256_and_si256(state, low_half);
  const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
  const __m128i to_end = _mm_loadu_si128(reinterpret_cast<const __m128i*>(kToEnd[lanes].data()));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(end - 16), _mm_shuffle_epi8(words, to_end));
  state = _mm256_blendv_epi8(_mm256_srli_epi32(state, 16), state, is_small);
  // The quotient in float32 is at most one too small or too large.
  const __m256 number =
      _mm256_add_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_srli_epi32(state, 16)), _mm256_set1_ps(65536)),
                    _mm256_cvtepi32_ps(_mm256_and_si256(state, low_half)));
  __m256i quotient = _mm256_cvttps_epi32(_mm256_div_ps(number, _mm256_cvtepi32_ps(frequency)));
  __m256i rest = _mm256_sub_epi32(state, _mm256_mullo_epi32(quotient, frequency));
  const __m256i too_large = _mm256_srai_epi32(rest, 31);
  quotient = _mm256_add_epi32(quotient, too_large);
  rest = _mm256_add_epi32(rest, _mm256_and_si256(too_large, frequency));
  const __m256i exact = _mm256_cmpgt_epi32(frequency, rest);
  quotient = _mm256_add_epi32(quotient, _mm256_andnot_si256(exact, _mm256_set1_epi32(1)));
  rest = _mm256_sub_epi32(rest, _mm256_andnot_si256(exact, frequency));
  state = _mm256_add_epi32(_mm256_add_epi32(_mm256_slli_epi32(quotient, kBits), rest),
                           _mm256_srli_epi32(entry, 16));
  _mm256_storeu_si256(place, state);
  return end - 2 * _mm_popcnt_u32(lanes);
}

KV_OFFLOAD_AVX2 std::byte* encode_avx2(RowStates& states, const std::uint8_t* classes, const std::int8_t* q,
                                       std::size_t rows, std::size_t stride, std::byte* end) {
  std::array<std::uint32_t, kRowChannels> begins;
  for (std::size_t channel = 0; channel < kRowChannels; ++channel)
    begins[channel] = std::uint32_t{classes[channel]} * kSymbols;
  for (std::size_t row = rows; row-- > 0;) {
    for (std::size_t from = kRowChannels; from > 0; from -= 8)
      end = encode_8_channels(states.data() + from - 8, begins.data() + from - 8, q + row * stride + from - 8,
                              end);
  }
  return end;
}

// Returns the entries of a table at these places. The source is zeros: _mm512_i32gather_epi32() leaves it
// undefined, and g++ then uses a register for which the instruction waits.
KV_OFFLOAD_AVX512 inline __m512i gathered_16(__m512i at, const void* table) {
  __mmask16 all = 0xFFFF;
  asm("" : "+Yk"(all));
  return _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), all, at, table, 4);
}

// Decodes the integers of 16 channels into q.
KV_OFFLOAD_AVX512 inline __m512i decode_16_channels(__m512i state, __m512i begins, const std::byte** words,
                                                    std::int8_t* q) {
  constexpr int kFirstOrSecondAndThird = 0xF8;
  const __m512i at =
      _mm512_ternarylogic_epi32(begins, state, _mm512_set1_epi32(kOne - 1), kFirstOrSecondAndThird);
  const __m512i entry = gathered_16(at, kTables.decode.data());
  const __m512i distance = _mm512_and_si512(_mm512_srli_epi32(entry, 8), _mm512_set1_epi32(0xFFF));
  state = _mm512_add_epi32(_mm512_mullo_epi32(_mm512_srli_epi32(entry, 20), _mm512_srli_epi32(state, kBits)),
                           distance);
  const __mmask16 is_small = _mm512_cmplt_epu32_mask(state, _mm512_set1_epi32(kFirstRowState));
  const __m512i next = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(*words)));
  *words += 2 * std::size_t{static_cast<unsigned>(_mm_popcnt_u32(is_small))};
  _mm_storeu_si128(reinterpret_cast<__m128i*>(q), _mm512_cvtepi32_epi8(entry));
  return _mm512_mask_or_epi32(state, is_small, _mm512_slli_epi32(state, 16),
                              _mm512_maskz_expand_epi32(is_small, next));
}

// Returns where the tables of 16 channels begin. bits: of the entries of a table.
KV_OFFLOAD_AVX512 inline __m512i begins_of_16(const std::uint8_t* classes, unsigned bits) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(classes));
  return _mm512_slli_epi32(_mm512_cvtepu8_epi32(bytes), bits);
}

KV_OFFLOAD_AVX512 const std::byte* decode_avx512(RowStates& states, const std::uint8_t* classes,
                                                 const std::byte* words, std::size_t rows, std::int8_t* q) {
  const __m512i begins0 = begins_of_16(classes, kBits), begins1 = begins_of_16(classes + 16, kBits),
                begins2 = begins_of_16(classes + 32, kBits), begins3 = begins_of_16(classes + 48, kBits);
  __m512i state0 = _mm512_loadu_si512(states.data()), state1 = _mm512_loadu_si512(states.data() + 16),
          state2 = _mm512_loadu_si512(states.data() + 32), state3 = _mm512_loadu_si512(states.data() + 48);
  for (std::size_t row = 0; row < rows; ++row, q += kRowChannels) {
    state0 = decode_16_channels(state0, begins0, &words, q);
    state1 = decode_16_channels(state1, begins1, &words, q + 16);
    state2 = decode_16_channels(state2, begins2, &words, q + 32);
    state3 = decode_16_channels(state3, begins3, &words, q + 48);
  }
  _mm512_storeu_si512(states.data(), state0);
  _mm512_storeu_si512(states.data() + 16, state1);
  _mm512_storeu_si512(states.data() + 32, state2);
  _mm512_storeu_si512(states.data() + 48, state3);
  return words;
}

// Encodes the integers of 16 channels.
KV_OFFLOAD_AVX512 inline __m512i encode_16_channels(__m512i state, __m512i begins, const std::int8_t* q,
                                                    std::byte** end) {
  const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(q)));
  const __m512i entry = gathered_16(_mm512_add_epi32(begins, bytes), kTables.encode.data());
  const __m512i frequency = _mm512_and_si512(entry, _mm512_set1_epi32(0xFFFF));
  const __m512i most = _mm512_sub_epi32(_mm512_slli_epi32(frequency, 32 - kBits), _mm512_set1_epi32(1));
  const __mmask16 is_large = _mm512_cmpgt_epu32_mask(state, most);
  const unsigned written = _mm_popcnt_u32(is_large);
  *end -= 2 * written;
  const __m256i words = _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(is_large, state));
  _mm256_mask_storeu_epi16(*end, static_cast<__mmask16>((1U << written) - 1), words);
  state = _mm512_mask_srli_epi32(state, is_large, state, 16);
  // The quotient in float32 is at most one too small or too large.
  __m512i quotient =
      _mm512_cvttps_epi32(_mm512_div_ps(_mm512_cvtepu32_ps(state), _mm512_cvtepi32_ps(frequency)));
  __m512i rest = _mm512_sub_epi32(state, _mm512_mullo_epi32(quotient, frequency));
  const __m512i one = _mm512_set1_epi32(1);
  const __mmask16 too_large = _mm512_movepi32_mask(rest);
  quotient = _mm512_mask_sub_epi32(quotient, too_large, quotient, one);
  rest = _mm512_mask_add_epi32(rest, too_large, rest, frequency);
  const __mmask16 too_small = _mm512_cmpge_epi32_mask(rest, frequency);
  quotient = _mm512_mask_add_epi32(quotient, too_small, quotient, one);
  rest = _mm512_mask_sub_epi32(rest, too_small, rest, frequency);
  return _mm512_add_epi32(_mm512_add_epi32(_mm512_slli_epi32(quotient, kBits), rest),
                          _mm512_srli_epi32(entry, 16));
}

KV_OFFLOAD_AVX512 std::byte* encode_avx512(RowStates& states, const std::uint8_t* classes,
                                           const std::int8_t* q, std::size_t rows, std::size_t stride,
                                           std::byte* end) {
  const __m512i begins0 = begins_of_16(classes, 8), begins1 = begins_of_16(classes + 16, 8),
                begins2 = begins_of_16(classes + 32, 8), begins3 = begins_of_16(classes + 48, 8);
  __m512i state0 = _mm512_loadu_si512(states.data()), state1 = _mm512_loadu_si512(states.data() + 16),
          state2 = _mm512_loadu_si512(states.data() + 32), state3 = _mm512_loadu_si512(states.data() + 48);
  for (std::size_t row = rows; row-- > 0;) {
    const std::int8_t* const from = q + row * stride;
    state3 = encode_16_channels(state3, begins3, from + 48, &end);
    state2 = encode_16_channels(state2, begins2, from + 32, &end);
    state1 = encode_16_channels(state1, begins1, from + 16, &end);
    state0 = encode_16_channels(state0, begins0, from, &end);
  }
  _mm512_storeu_si512(states.data(), state0);
  _mm512_storeu_si512(states.data() + 16, state1);
  _mm512_storeu_si512(states.data() + 32, state2);
  _mm512_storeu_si512(states.data() + 48, state3);
  return end;
}

#undef KV_OFFLOAD_AVX2
#undef KV_OFFLOAD_AVX512

#endif

}  // namespace

std::uint8_t largest_of_class(std::size_t row_class) {
  return static_cast<std::uint8_t>(largest_of(row_class));
}

std::uint8_t class_of(std::size_t sum, std::uint8_t largest) {
  const int by_sum = std::bit_width(sum);
  const int by_largest = largest > 1 ? std::bit_width(largest - 1U) + 2 : 0;
  return static_cast<std::uint8_t>(std::min(std::max(by_sum, by_largest), int{kRowClasses} - 1));
}

std::size_t row_coders_known(RowCoder (&ways)[kMostRowCoders]) {
  std::size_t known = 0;
#if defined(__x86_64__)
  if (has_avx512()) ways[known++] = {decode_avx512, encode_avx512, "avx512"};
  if (has_avx2()) ways[known++] = {decode_avx2, encode_avx2, "avx2"};
#endif
  ways[known++] = {decode_plain, encode_plain, "plain"};
  return known;
}

}  // namespace kv_offload
