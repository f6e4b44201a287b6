// SPDX-License-Identifier: Apache-2.0
#include "record/lossy_codec.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>
#include <zstd.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <new>
#include <numeric>
#include <random>

#include "base/xxh3.h"
#include "record/group_quantizer.h"
#include "record/numbers_for_tests.h"
#include "record/row_coder.h"

namespace kv_offload {
namespace {

using testing::bf16_of;
using testing::Bytes;
using testing::bytes_of_numbers;
using testing::fp16_of;
using testing::fp8_of;
using testing::fp8_value;
using testing::make_payload;
using testing::Payload;

constexpr std::size_t kGroupBytes = 128, kSection = 512 << 10;
constexpr Element kNumbers[] = {Element::kBf16, Element::kFp16, Element::kE4m3, Element::kE5m2};
constexpr Element kFp8Numbers[] = {Element::kE4m3, Element::kE5m2};

std::size_t size_of(Element element) {
  return element == Element::kBf16 || element == Element::kFp16 ? 2 : 1;
}
std::size_t group_of(Element element) { return 64 * size_of(element); }

double value_of(std::uint16_t bits, Element element) {
  if (size_of(element) == 1) return fp8_value(static_cast<std::uint8_t>(bits), element);
  if (element == Element::kBf16) return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
  const int exponent = bits >> 10 & 31, mantissa = bits & 0x3FF;
  const double sign = (bits & 0x8000) != 0 ? -1 : 1;
  if (exponent == 31) return mantissa != 0 ? std::nan("") : sign * std::numeric_limits<double>::infinity();
  return sign * (exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25));
}

// REQUIRES: an exact and finite number of the type.
std::uint16_t bits_of(double value, Element element) {
  if (size_of(element) == 1) return fp8_of(value, element);
  const auto sign = static_cast<std::uint16_t>(std::signbit(value) ? 0x8000 : 0);
  if (element == Element::kBf16)
    return static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(static_cast<float>(value)) >> 16);
  const double magnitude = std::fabs(value);
  if (magnitude < std::ldexp(1, -14)) return static_cast<std::uint16_t>(std::ldexp(magnitude, 24)) | sign;
  return static_cast<std::uint16_t>(fp16_of(static_cast<float>(magnitude)) | sign);
}

Bytes bytes_in(const std::vector<std::uint16_t>& numbers, Element element) {
  if (size_of(element) == 2) return bytes_of_numbers(numbers, 2 * numbers.size());
  Bytes bytes;
  for (const std::uint16_t number : numbers) bytes.push_back(static_cast<std::byte>(number));
  return bytes;
}

double value_at(const Bytes& bytes, std::size_t at, Element element) {
  if (size_of(element) == 1) return fp8_value(std::to_integer<std::uint8_t>(bytes[at]), element);
  const auto bits = static_cast<std::uint16_t>(std::to_integer<unsigned>(bytes[at]) |
                                               std::to_integer<unsigned>(bytes[at + 1]) << 8);
  return value_of(bits, element);
}

// Measures the loss independently of the codec: groups of 64 numbers from the start.
Loss loss_between(const Bytes& before, const Bytes& after, Element element) {
  double largest = 0, errors = 0, norms = 0;
  const std::size_t group_bytes = group_of(element);
  for (std::size_t group = 0; group + group_bytes <= before.size(); group += group_bytes) {
    double error = 0, norm = 0;
    for (std::size_t at = group; at < group + group_bytes; at += size_of(element)) {
      const double value = value_at(before, at, element);
      const double difference = value_at(after, at, element) - value;
      if (std::isfinite(value)) norm += value * value;
      if (std::isfinite(value) || !std::isnan(difference)) error += difference * difference;
    }
    if (error > 0) largest = std::max(largest, std::sqrt(error / norm));
    errors += error;
    norms += norm;
  }
  return {static_cast<float>(largest), static_cast<float>(norms > 0 ? std::sqrt(errors / norms) : 0)};
}

// K and V as vLLM stores them: tokens of `heads` heads, 64 channels of K and of V each; some channels of K
// are much larger than others in all tokens.
Bytes kv_of(std::size_t tokens, std::size_t heads, Element element, unsigned seed = 1) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<std::uint16_t> numbers;
  std::vector<float> scales(2 * heads * 64);
  for (float& scale : scales) scale = std::exp(1.5F * normal(random));
  for (std::size_t i = 0; i < tokens * scales.size(); ++i) {
    const float scale = scales[i % scales.size()];
    const float value = scale * (normal(random) + (scale > 4 ? 3.0F : 0.0F));
    const float large_enough = std::copysign(std::max(std::fabs(value), 1e-4F), value);
    if (size_of(element) == 1) {
      numbers.push_back(fp8_of(value, element));
    } else {
      numbers.push_back(element == Element::kBf16 ? bf16_of(value) : fp16_of(large_enough));
    }
  }
  return bytes_in(numbers, element);
}

// Memory that ends where a page begins that cannot be accessed.
class GuardedBytes {
 public:
  explicit GuardedBytes(std::span<const std::byte> bytes) : size_(bytes.size()) {
    const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
    used_ = (bytes.size() + page - 1) / page * page;
    mapped_ = used_ + page;
    void* const place = ::mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (place == MAP_FAILED) throw std::bad_alloc();
    place_ = static_cast<std::byte*>(place);
    if (::mprotect(place_ + used_, page, PROT_NONE) != 0) throw std::bad_alloc();
    std::copy(bytes.begin(), bytes.end(), place_ + used_ - size_);
  }
  ~GuardedBytes() { (void)::munmap(place_, mapped_); }
  GuardedBytes(const GuardedBytes&) = delete;
  GuardedBytes& operator=(const GuardedBytes&) = delete;
  std::span<const std::byte> bytes() const { return {place_ + used_ - size_, size_}; }

 private:
  std::size_t size_, used_ = 0, mapped_ = 0;
  std::byte* place_ = nullptr;
};

// Where a payload without weights has the period of its first section, the lengths of the section's parts,
// and the parts.
constexpr std::size_t kParts = 4, kPeriodAt = 8, kLengthsAt = kPeriodAt + 1,
                      kPartsAt = kLengthsAt + 4 * kParts;

struct LossyCodecTest : ::testing::Test {
  struct Encoded {
    Bytes bytes;  // empty: encode without loss
    Loss loss;
  };
  Encoded encoded(const std::vector<Bytes>& shards, Element element, double max_error) {
    return encoded(shards, element, {max_error, max_error}, {});
  }
  Encoded encoded(const std::vector<Bytes>& shards, Element element, const ErrorBounds& bounds,
                  const KvRuns& runs, const BoundFactors* factors = nullptr) {
    std::vector<Shard> spans;
    for (const Bytes& shard : shards) spans.emplace_back(const_cast<std::byte*>(shard.data()), shard.size());
    Bytes out(LossyCodec::encoded_bytes_at_most(spans));
    std::uint64_t used = 99;
    Encoded made;
    const Status status = codec.encode(spans, element, bounds, runs, factors, out, &used, &made.loss);
    EXPECT_TRUE(status) << status.to_string();
    EXPECT_LE(used, out.size());
    out.resize(used);
    made.bytes = std::move(out);
    return made;
  }
  // From memory that ends with these bytes, into shards of exactly these lengths.
  Status decode(const Bytes& in, Element element, const std::vector<std::size_t>& lengths, Bytes* joined) {
    const GuardedBytes guarded(in);
    std::vector<std::unique_ptr<std::byte[]>> memory;
    std::vector<Shard> shards;
    for (const std::size_t length : lengths) {
      memory.push_back(std::make_unique<std::byte[]>(length));
      shards.emplace_back(memory.back().get(), length);
    }
    const Status status = codec.decode(guarded.bytes(), element, shards);
    joined->clear();
    for (const Shard& shard : shards) joined->insert(joined->end(), shard.begin(), shard.end());
    return status;
  }
  Bytes decoded(const Bytes& in, Element element, std::size_t bytes) {
    Bytes joined;
    const Status status = decode(in, element, {bytes}, &joined);
    EXPECT_TRUE(status) << status.to_string();
    return joined;
  }
  StatusKind decoded_as(const Bytes& in, std::size_t bytes) {
    Bytes ignored;
    return decode(in, Element::kBf16, {bytes}, &ignored).kind();
  }

  LossyCodec codec;
};

TEST_F(LossyCodecTest, the_loss_of_every_group_is_within_the_bound_and_is_stated) {
  for (const Element element : kNumbers) {
    for (const double bound : {0.02, 0.05, 0.2, 0.5}) {
      const Bytes payload = kv_of(300, 3, element);
      const Encoded made = encoded({payload}, element, bound);
      ASSERT_FALSE(made.bytes.empty()) << bound;
      const Loss loss = loss_between(payload, decoded(made.bytes, element, payload.size()), element);
      EXPECT_LE(loss.keys, bound);
      EXPECT_GT(loss.keys, bound / 2) << "the bound is used";
      EXPECT_FLOAT_EQ(made.loss.keys, loss.keys);
      EXPECT_FLOAT_EQ(made.loss.rms, loss.rms);
      EXPECT_LE(made.loss.keys, LossyCodec::rounded_up(bound));
    }
  }
}

// Returns the largest loss of the groups of values and of all others. The runs are multiples of half a group.
ErrorBounds losses_of_parts(const Bytes& before, const Bytes& after, Element element, const KvRuns& runs) {
  ErrorBounds found;
  const std::size_t period = runs.key_bytes + runs.value_bytes;
  const std::size_t group_bytes = group_of(element);
  for (std::size_t at = 0; at + group_bytes <= before.size(); at += group_bytes) {
    std::size_t keys = 0;
    for (std::size_t part = at; part < at + group_bytes; part += group_bytes / 2)
      keys += part % period < runs.key_bytes;
    const auto from = static_cast<std::ptrdiff_t>(at), to = from + static_cast<std::ptrdiff_t>(group_bytes);
    const double loss = loss_between(Bytes(before.begin() + from, before.begin() + to),
                                     Bytes(after.begin() + from, after.begin() + to), element)
                            .keys;
    double& largest = keys == 0 ? found.values : found.keys;
    largest = std::max(largest, loss);
  }
  return found;
}

TEST_F(LossyCodecTest, keys_and_values_keep_their_own_bounds) {
  // Heads of one group, of two groups, of one group and a half, all tokens of a block together, runs that a
  // section does not begin with, and groups that begin with values and end with keys.
  for (std::size_t number = 0; number < 12; ++number) {
    constexpr KvRuns kRuns[] = {{128, 128}, {256, 256}, {192, 192}, {4096, 4096}, {640, 768}, {64, 128}};
    // All runs with one type of 16 bits and one of 8 bits.
    const Element element = kNumbers[number / 6 * 2 + number % 2];
    const auto divisor = static_cast<std::uint32_t>(2 / size_of(element));
    const KvRuns runs{kRuns[number % 6].key_bytes / divisor, kRuns[number % 6].value_bytes / divisor};
    const Bytes payload = kv_of(704, 3, element);  // two sections
    ASSERT_EQ(payload.size() % runs.period(), 0U);
    const ErrorBounds bounds{0.04, 0.1};
    const auto half = static_cast<std::ptrdiff_t>(payload.size() / 2);
    const Encoded made = encoded(
        {Bytes(payload.begin(), payload.begin() + half), {}, Bytes(payload.begin() + half, payload.end())},
        element, bounds, runs);
    ASSERT_FALSE(made.bytes.empty());
    const Bytes back = decoded(made.bytes, element, payload.size());
    const ErrorBounds found = losses_of_parts(payload, back, element, runs);
    EXPECT_LE(found.keys, bounds.keys) << runs.key_bytes;
    EXPECT_GT(found.keys, bounds.keys / 2) << runs.key_bytes;
    EXPECT_LE(found.values, bounds.values) << runs.key_bytes;
    EXPECT_GT(found.values, bounds.keys * 1.5) << "the bound of values is used, " << runs.key_bytes;
    EXPECT_FLOAT_EQ(made.loss.keys, static_cast<float>(found.keys)) << "stated";
    EXPECT_FLOAT_EQ(made.loss.values, static_cast<float>(found.values)) << "stated";
    EXPECT_TRUE(bounds.allow(made.loss));
    if (number % 6 == 0) {
      EXPECT_LT(made.bytes.size(), encoded({payload}, element, bounds.keys).bytes.size());
    }
  }
}

TEST_F(LossyCodecTest, an_unknown_layout_keeps_the_bound_of_keys) {
  const Bytes payload = kv_of(300, 2, Element::kBf16);
  const ErrorBounds bounds{0.04, 0.2};
  // No runs, runs that the payload does not consist of, and a shard that ends within a run.
  const auto cut = static_cast<std::ptrdiff_t>(3 * kGroupBytes);
  const Bytes first(payload.begin(), payload.begin() + cut), second(payload.begin() + cut, payload.end());
  const std::vector<Bytes> whole{payload}, cut_in_a_run{first, second};
  const std::vector<std::pair<const std::vector<Bytes>*, KvRuns>> unknown = {{&whole, {}},
                                                                             {&whole, {128, 0}},
                                                                             {&whole, {0, 128}},
                                                                             {&whole, {128, 768}},
                                                                             {&cut_in_a_run, {128, 128}}};
  for (const auto& [shards, runs] : unknown) {
    const Encoded made = encoded(*shards, Element::kBf16, bounds, runs);
    ASSERT_FALSE(made.bytes.empty());
    const Loss loss =
        loss_between(payload, decoded(made.bytes, Element::kBf16, payload.size()), Element::kBf16);
    EXPECT_LE(loss.keys, bounds.keys) << runs.key_bytes << " " << runs.value_bytes;
    EXPECT_FLOAT_EQ(made.loss.keys, loss.keys);
    EXPECT_EQ(made.loss.values, 0);
  }
}

// Returns the relative error of each group.
std::vector<double> losses_of_groups(const Bytes& before, const Bytes& after, Element element) {
  std::vector<double> losses;
  const auto bytes = static_cast<std::ptrdiff_t>(group_of(element));
  for (auto at = before.begin(); at != before.end(); at += bytes) {
    const auto same = after.begin() + (at - before.begin());
    losses.push_back(loss_between(Bytes(at, at + bytes), Bytes(same, same + bytes), element).keys);
  }
  return losses;
}

// Groups with these factors and without weights.
std::vector<BoundFactors::OfGroup> groups_of(const std::vector<float>& factors, std::size_t begin,
                                             std::size_t count) {
  std::vector<BoundFactors::OfGroup> groups;
  for (std::size_t i = begin; i < begin + count; ++i) groups.push_back({factors.at(i), 0});
  return groups;
}

TEST_F(LossyCodecTest, factors_lower_the_bounds_of_their_groups) {
  // Blocks of one token with six groups, in two shards with factors of their own. The last factor of the
  // first shard asks for less than the least bound.
  const std::vector<float> factors = {1, 0.5F, 0.25F, 0.75F, 0.3F, 0.001F, 0.2F, 1, 0.6F, 0.15F, 0.4F, 0.9F};
  const BoundFactors of_two({groups_of(factors, 0, 6), groups_of(factors, 6, 6)});
  const ErrorBounds bounds{0.2, 0.4};
  for (const Element element : kNumbers) {
    const Bytes first = kv_of(700, 3, element), second = kv_of(700, 3, element, 2);  // several sections
    Bytes payload = first;
    payload.insert(payload.end(), second.begin(), second.end());
    const auto run = static_cast<std::uint32_t>(group_of(element));
    const KvRuns runs = element == Element::kFp16 || element == Element::kE5m2 ? KvRuns{} : KvRuns{run, run};
    const Encoded made = encoded({first, second}, element, bounds, runs, &of_two);
    ASSERT_FALSE(made.bytes.empty());
    const std::vector<double> losses =
        losses_of_groups(payload, decoded(made.bytes, element, payload.size()), element);
    std::array<double, 12> largest{}, least;
    least.fill(1);
    for (std::size_t group = 0; group < losses.size(); ++group) {
      const std::size_t at = group / (losses.size() / 2) * 6 + group % 6;
      largest[at] = std::max(largest[at], losses[group]);
      least[at] = std::min(least[at], losses[group]);
    }
    for (std::size_t at = 0; at < largest.size(); ++at) {
      const double asked = (runs.known() && at % 2 == 1 ? bounds.values : bounds.keys) * double{factors[at]};
      const double bound = std::max(asked, LossyCodec::kLeastError);
      EXPECT_LE(largest[at], bound) << at;
      EXPECT_GT(largest[at], 0.7 * bound) << "the bound is used, " << at;
      if (size_of(element) == 2) {
        EXPECT_GT(least[at], 0.2 * bound) << "no group is exact, " << at;
      }
    }
    EXPECT_GT(made.bytes.size(), encoded({first, second}, element, bounds, runs).bytes.size());
  }
}

// Tokens with six groups of numbers, times the size of the token. In each group of a token, 20 other channels
// are larger than the rest, so that the period is found.
Bytes tokens_of(const std::vector<float>& sizes, Element element) {
  std::mt19937 random(7);
  std::uniform_real_distribution<float> uniform(-1, 1);
  std::vector<std::uint16_t> numbers;
  for (const float size : sizes) {
    for (std::size_t i = 0; i < std::size_t{6} * 64; ++i) {
      const bool is_large = i % 64 / 9 >= i / 64 && i % 64 < 9 * (i / 64) + 20;
      const float value = size * (is_large ? 4 : 1) * uniform(random);
      const float normal = std::copysign(std::max(std::fabs(value), 1e-4F), value);
      if (size == 0) {
        numbers.push_back(0);
      } else if (size_of(element) == 1) {
        numbers.push_back(fp8_of(value, element));
      } else {
        numbers.push_back(element == Element::kBf16 ? bf16_of(value) : fp16_of(normal));
      }
    }
  }
  return bytes_in(numbers, element);
}

TEST_F(LossyCodecTest, a_calibration_lowers_the_bounds_of_groups_that_are_small_in_their_tile) {
  constexpr double kBound = 0.3;
  constexpr std::size_t kTile = 16;
  std::vector<float> sizes(10 * kTile, 8);
  sizes[0] = 1;      // lowered to the least bound
  sizes[21] = 3;     // lowered
  sizes[40] = 6.8F;  // near the mean
  sizes[100] = 32;   // larger: lowered, but less
  sizes[48] = 3;     // lowered, among zeros
  std::fill_n(sizes.begin() + 49, 10, 0.0F);
  std::fill_n(sizes.begin() + 9 * kTile, kTile, 1.0F);  // all alike
  const BoundFactors all({std::vector<BoundFactors::OfGroup>(6)});
  for (const Element element : kNumbers) {
    const Bytes payload = tokens_of(sizes, element);
    const Encoded made = encoded({payload}, element, {kBound, kBound}, {}, &all);
    const Encoded plain = encoded({payload}, element, {kBound, kBound}, {});
    ASSERT_FALSE(made.bytes.empty() || plain.bytes.empty());
    ASSERT_EQ(made.bytes[kPeriodAt], std::byte{6}) << "the period";
    EXPECT_GT(made.bytes.size(), plain.bytes.size());
    const std::vector<double> losses =
        losses_of_groups(payload, decoded(made.bytes, element, payload.size()), element);
    const std::vector<double> plain_losses =
        losses_of_groups(payload, decoded(plain.bytes, element, payload.size()), element);
    for (std::size_t group = 0; group < losses.size(); ++group) {
      const std::size_t token = group / 6;
      double sum = 0, count = 0;
      for (std::size_t each = token / kTile * kTile; each < (token / kTile + 1) * kTile; ++each) {
        sum += sizes[each] == 0 ? 0 : std::log2(double{sizes[each]});
        count += sizes[each] == 0 ? 0 : 1;
      }
      const double above = sizes[token] == 0 ? 0 : std::log2(double{sizes[token]}) - sum / count;
      const double lower = above > 0 ? 0.75 * above : 3 * std::max(0.0, -above - 0.5);
      const double bound = std::max(kBound * std::exp2(-lower), LossyCodec::kLeastError);
      if (token != 0 && token != 21 && token != 48 && token != 100) {
        // Sizes are rounded to steps of 1/8 octave.
        EXPECT_LE(losses[group], kBound) << token;
        EXPECT_GE(losses[group], std::min(0.6 * bound, plain_losses[group])) << token;
        continue;
      }
      EXPECT_LE(losses[group], (token == 100 ? 1.2 : 2) * bound) << "sizes are rounded, " << token;
      if (size_of(element) == 2) {
        EXPECT_GT(losses[group], 0.45 * bound) << token;  // fp8 may be exact
      }
      EXPECT_GT(plain_losses[group], 0.6 * kBound) << "without a calibration, " << token;
      if (token == 0) {
        EXPECT_LE(losses[group], LossyCodec::kLeastError);
      }
    }
    for (std::size_t variant = 0; variant < LossyCodec::variants(); ++variant) {
      LossyCodec other(variant);
      const Shard shard(const_cast<std::byte*>(payload.data()), payload.size());
      Bytes out(LossyCodec::encoded_bytes_at_most({&shard, 1}));
      std::uint64_t used = 0;
      Loss loss;
      ASSERT_TRUE(other.encode({&shard, 1}, element, {kBound, kBound}, {}, &all, out, &used, &loss).is_ok());
      out.resize(used);
      EXPECT_TRUE(out == made.bytes) << other.instructions();
    }
  }
}

// The groups are alike where the encoder looks for the period, so it finds 1, and later tiles have groups of
// several heads.
TEST_F(LossyCodecTest, groups_with_other_bounds_in_their_tile_keep_their_own) {
  constexpr double kBound = 0.3;
  constexpr std::size_t kGroups = 4096, kAlike = kGroups / 2;
  std::mt19937 random(5);
  std::uniform_real_distribution<float> uniform(-1, 1);
  std::vector<std::uint16_t> numbers(kGroups * 64);
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    const bool is_small = i / 64 >= kAlike && i / 64 % 2 == 1;
    numbers[i] = bf16_of(uniform(random) * (is_small ? 0.125F : 1));
  }
  const Bytes payload = bytes_in(numbers, Element::kBf16);
  std::vector<float> factors(kGroups, 1);
  for (std::size_t group = kAlike; group < kGroups; group += 2) factors[group] = 0.25F;
  const BoundFactors halves({groups_of(factors, 0, factors.size())});
  const Encoded made = encoded({payload}, Element::kBf16, {kBound, kBound}, {}, &halves);
  ASSERT_FALSE(made.bytes.empty());
  ASSERT_EQ(made.bytes[kPeriodAt], std::byte{1}) << "the period";
  const std::vector<double> losses =
      losses_of_groups(payload, decoded(made.bytes, Element::kBf16, payload.size()), Element::kBf16);
  for (std::size_t group = kAlike; group < kGroups; ++group)
    EXPECT_GT(losses[group], 0.6 * kBound * double{factors[group]}) << group;
}

TEST_F(LossyCodecTest, a_payload_that_does_not_fit_the_factors_is_not_encoded) {
  const std::vector<BoundFactors::OfGroup> half(6, {0.5F, 0});
  const BoundFactors of_two({half, half});
  const Bytes shard = kv_of(80, 3, Element::kBf16);  // 480 groups
  const auto cut = [&shard](std::size_t groups) {
    return Bytes(shard.begin(), shard.begin() + static_cast<std::ptrdiff_t>(groups * kGroupBytes));
  };
  const ErrorBounds bounds{0.1, 0.1};
  EXPECT_FALSE(encoded({shard, shard}, Element::kBf16, bounds, {}, &of_two).bytes.empty());
  EXPECT_FALSE(encoded({cut(474), cut(474)}, Element::kBf16, bounds, {}, &of_two).bytes.empty());
  EXPECT_TRUE(encoded({cut(475), cut(475)}, Element::kBf16, bounds, {}, &of_two).bytes.empty());
  EXPECT_FALSE(encoded({cut(474), cut(480)}, Element::kBf16, bounds, {}, &of_two).bytes.empty());
  EXPECT_TRUE(encoded({cut(474), cut(475)}, Element::kBf16, bounds, {}, &of_two).bytes.empty());
  EXPECT_TRUE(encoded({shard}, Element::kBf16, bounds, {}, &of_two).bytes.empty());
  EXPECT_TRUE(encoded({shard, shard, shard}, Element::kBf16, bounds, {}, &of_two).bytes.empty());
  EXPECT_TRUE(encoded({{}, {}}, Element::kBf16, bounds, {}, &of_two).bytes.empty());
}

TEST(BoundFactors, impossible_factors_are_rejected) {
  using Groups = std::vector<BoundFactors::OfGroup>;
  const std::vector<std::uint8_t> row(64, 8);
  EXPECT_NO_THROW(BoundFactors({Groups{{1, 0}}, Groups{{0.5F, 1}}}, row));
  EXPECT_NO_THROW(BoundFactors({Groups{}, Groups{{0.5F, 0}}}));
  for (const float wrong : {0.0F, -0.5F, 1.001F, std::numeric_limits<float>::quiet_NaN()})
    EXPECT_THROW(BoundFactors({Groups{{1, 0}, {wrong, 0}}}), InvalidArgument) << wrong;
  EXPECT_THROW(BoundFactors({}), InvalidArgument);
  EXPECT_THROW(BoundFactors({Groups{{1, 1}}}), InvalidArgument) << "there is no row";
  EXPECT_THROW(BoundFactors({Groups{{1, 2}}}, row), InvalidArgument);
  EXPECT_THROW(BoundFactors({Groups{{1, 1}}}, std::vector<std::uint8_t>(65, 8)), InvalidArgument);
  EXPECT_THROW(BoundFactors({Groups{{1, 1}}}, std::vector<std::uint8_t>(64, 17)), InvalidArgument);
  EXPECT_THROW(BoundFactors({Groups{{1, 1}}}, std::vector<std::uint8_t>(64 * (kMostWeightRows + 1), 8)),
               InvalidArgument);
}

TEST_F(LossyCodecTest, the_error_of_the_payload_is_never_above_that_of_its_groups) {
  // All groups have the same relative error, so only rounding decides.
  for (int low = -17; low <= -9; ++low) {
    for (int high = 5; high <= 8; ++high) {
      std::vector<std::uint16_t> numbers;
      for (std::size_t i = 0; i < 64 * 40; ++i)
        numbers.push_back(bf16_of(std::ldexp(1.0F, i / 64 % 2 == 0 ? high : low)));
      const Encoded made = encoded({bytes_of_numbers(numbers, 2 * numbers.size())}, Element::kBf16, 0.026);
      ASSERT_FALSE(made.bytes.empty());
      ASSERT_LE(made.loss.rms, made.loss.keys) << low << " " << high;
    }
  }
}

#if defined(__x86_64__)
// Bits of MXCSR: rounding down, up and to zero, and DAZ and FTZ, as libraries that are built with -ffast-math
// set them.
constexpr unsigned kFloatModes[] = {0x2000, 0x4000, 0x6000, 0x8040};

TEST_F(LossyCodecTest, the_bytes_do_not_depend_on_the_floating_point_mode_of_the_thread) {
  for (const Element element : kNumbers) {
    Bytes payload = kv_of(300, 3, element);
    const Bytes tiny = make_payload(Payload::kDenormal, element, 100 * group_of(element));
    payload.insert(payload.end(), tiny.begin(), tiny.end());
    const Encoded expected = encoded({payload}, element, 0.05);
    ASSERT_FALSE(expected.bytes.empty());
    const Bytes restored = decoded(expected.bytes, element, payload.size());
    EXPECT_LE(loss_between(payload, restored, element).keys, 0.05F);
    const Shard shard(payload.data(), payload.size());
    for (std::size_t variant = 0; variant < LossyCodec::variants(); ++variant) {
      LossyCodec other(variant);
      for (const unsigned mode : kFloatModes) {
        Bytes out(LossyCodec::encoded_bytes_at_most({&shard, 1})), back(payload.size());
        const Shard to(back.data(), back.size());
        std::uint64_t used = 0;
        Loss loss;
        const unsigned before = _mm_getcsr();
        _mm_setcsr(before | mode);
        const Status encoding =
            other.encode({&shard, 1}, element, {0.05, 0.05}, {}, nullptr, out, &used, &loss);
        const unsigned after_encoding = _mm_getcsr();
        const Status decoding = other.decode(expected.bytes, element, {&to, 1});
        const unsigned after_decoding = _mm_getcsr();
        _mm_setcsr(before);
        ASSERT_TRUE(encoding) << encoding.to_string();
        ASSERT_TRUE(decoding) << decoding.to_string();
        constexpr unsigned kFlags = 0x3F;  // of exceptions
        EXPECT_EQ(after_encoding & ~kFlags, (before | mode) & ~kFlags);
        EXPECT_EQ(after_decoding & ~kFlags, (before | mode) & ~kFlags);
        out.resize(used);
        EXPECT_TRUE(out == expected.bytes) << other.instructions() << " " << std::hex << mode;
        EXPECT_EQ(loss, expected.loss);
        EXPECT_TRUE(back == restored) << other.instructions() << " " << std::hex << mode;
      }
    }
  }
}

TEST(GroupQuantizer, integers_have_at_most_127_in_any_rounding_mode) {
  GroupQuantizer ways[kMostGroupQuantizers];
  const std::size_t known = group_quantizers_known(ways);
  std::mt19937 random(11);
  std::size_t large = 0;
  for (int round = 0; round < 4000; ++round) {
    const Element element = kNumbers[round % 4];
    // Equal numbers, and a bound for which they become about 127 steps.
    const unsigned one = element == Element::kBf16 ? 0x3F80 : element == Element::kFp16 ? 0x3C00 : 0x38;
    const auto number = static_cast<std::uint16_t>(size_of(element) == 2 ? 0x8000 | (one + random() % 0x80)
                                                                         : 0x80 | (one + random() % 8));
    const float bound = 0.0018F + static_cast<float>(random() % 64) * 0.00001F;
    const std::vector<std::uint16_t> numbers(64, number);
    const Bytes group = bytes_in(numbers, element);
    for (std::size_t i = 0; i < known; ++i) {
      for (const unsigned mode : kFloatModes) {
        std::int8_t q[64];
        const unsigned before = _mm_getcsr();
        _mm_setcsr(before | mode);
        (void)ways[i].quantize(group.data(), element, bound, nullptr, q);
        _mm_setcsr(before);
        const int least = *std::min_element(q, q + 64);
        ASSERT_GE(least, -127) << ways[i].name << " " << std::hex << mode;
        large += least == -127 ? 1 : 0;
      }
    }
  }
  EXPECT_GT(large, 0U);
}

TEST(GroupQuantizer, subnormal_numbers_are_not_zeros_where_a_thread_flushes_them) {
  GroupQuantizer ways[kMostGroupQuantizers];
  const std::size_t known = group_quantizers_known(ways);
  for (const Element element : kNumbers) {
    const std::size_t group_bytes = group_of(element);
    const Bytes groups = make_payload(Payload::kDenormal, element, 100 * group_bytes);
    for (std::size_t i = 0; i < known; ++i) {
      for (std::size_t at = 0; at < groups.size(); at += group_bytes) {
        std::int8_t q[64], flushed_q[64];
        Bytes back(group_bytes), flushed(group_bytes);
        const std::uint8_t code = ways[i].quantize(groups.data() + at, element, 0.05F, nullptr, q);
        ways[i].restore(q, &code, 1, element, nullptr, back.data(), group_bytes);
        const unsigned before = _mm_getcsr();
        _mm_setcsr(before | 0x8040);
        const std::uint8_t flushed_code =
            ways[i].quantize(groups.data() + at, element, 0.05F, nullptr, flushed_q);
        ways[i].restore(q, &code, 1, element, nullptr, flushed.data(), group_bytes);
        _mm_setcsr(before);
        ASSERT_EQ(code == kExactGroup, element == Element::kBf16);
        ASSERT_EQ(flushed_code, code) << ways[i].name;
        ASSERT_TRUE(std::equal(q, q + 64, flushed_q)) << ways[i].name;
        ASSERT_EQ(flushed, back) << ways[i].name;
      }
    }
  }
}
#endif

TEST_F(LossyCodecTest, a_larger_bound_gives_a_higher_ratio) {
  const Bytes payload = kv_of(512, 3, Element::kBf16);
  double last = 1;
  for (const double bound : {0.02, 0.05, 0.1, 0.2}) {
    const double ratio = static_cast<double>(payload.size()) /
                         static_cast<double>(encoded({payload}, Element::kBf16, bound).bytes.size());
    EXPECT_GT(ratio, 1.1 * last) << bound;
    last = ratio;
  }
  EXPECT_GT(last, 5);
}

TEST_F(LossyCodecTest, the_period_of_the_cache_layout_is_found) {
  // With another period, channels of different magnitudes share a class.
  for (const Element element : {Element::kBf16, Element::kE4m3}) {
    for (const std::size_t heads : {3u, 8u, 1u}) {
      if (heads == 1 && element == Element::kE4m3) continue;  // 4 is as good by chance
      const Bytes payload = kv_of(16 * 48 / heads, heads, element);
      const Bytes stored = encoded({payload}, element, 0.05).bytes;
      ASSERT_FALSE(stored.empty());
      EXPECT_EQ(std::to_integer<std::size_t>(stored[kPeriodAt]), 2 * heads);
    }
  }
}

TEST_F(LossyCodecTest, shards_may_end_anywhere) {
  const std::vector<std::size_t> lengths = {1, 0, 63, 70'001, 128, 600'000, 5};
  const std::size_t total = std::accumulate(lengths.begin(), lengths.end(), std::size_t{0});
  Bytes payload = kv_of(total / 768 + 1, 3, Element::kBf16);
  payload.resize(total);
  std::vector<Bytes> shards;
  std::size_t at = 0;
  for (const std::size_t length : lengths) {
    const auto begin = payload.begin() + static_cast<std::ptrdiff_t>(at);
    shards.emplace_back(begin, begin + static_cast<std::ptrdiff_t>(length));
    at += length;
  }
  const Encoded made = encoded(shards, Element::kBf16, 0.05);
  ASSERT_FALSE(made.bytes.empty());
  EXPECT_EQ(made.bytes, encoded({payload}, Element::kBf16, 0.05).bytes);
  Bytes joined;
  ASSERT_TRUE(decode(made.bytes, Element::kBf16, lengths, &joined));
  EXPECT_EQ(joined, decoded(made.bytes, Element::kBf16, total));
  EXPECT_LE(loss_between(payload, joined, Element::kBf16).keys, 0.05F);
  const std::size_t tail = total % kGroupBytes;
  EXPECT_TRUE(std::equal(payload.end() - static_cast<std::ptrdiff_t>(tail), payload.end(),
                         joined.end() - static_cast<std::ptrdiff_t>(tail)))
      << "bytes after the last whole group are exact";
}

TEST_F(LossyCodecTest, payloads_of_every_length_are_within_the_bound) {
  for (const Element element : {Element::kBf16, Element::kE4m3}) {
    for (const std::size_t groups : {32u, 33u, 47u, 100u, 4095u, 4096u, 4097u, 9000u}) {
      const Bytes whole = kv_of(groups / 4 + 1, 2, element);
      const Bytes payload(whole.begin(),
                          whole.begin() + static_cast<std::ptrdiff_t>(groups * group_of(element)) + 63);
      const Encoded made = encoded({payload}, element, 0.1);
      ASSERT_FALSE(made.bytes.empty()) << groups;
      const Bytes back = decoded(made.bytes, element, payload.size());
      EXPECT_LE(loss_between(payload, back, element).keys, 0.1F) << groups;
      EXPECT_TRUE(std::equal(payload.end() - 63, payload.end(), back.end() - 63)) << groups;
    }
  }
}

TEST_F(LossyCodecTest, groups_without_a_possible_step_are_exact) {
  for (const Element element : kNumbers) {
    Bytes payload = kv_of(200, 2, element);
    const std::size_t size = size_of(element), group_bytes = group_of(element);
    const auto set = [&](std::size_t group, std::size_t i, unsigned bits) {
      for (std::size_t byte = 0; byte < size; ++byte)
        payload[group * group_bytes + size * i + byte] = static_cast<std::byte>(bits >> 8 * byte);
    };
    // NaN in e4m3, which has no infinity.
    const unsigned infinity = element == Element::kBf16   ? 0x7F80
                              : element == Element::kFp16 ? 0x7C00
                              : element == Element::kE5m2 ? 0x7C
                                                          : 0x7F;
    set(3, 5, infinity);
    set(4, 6, infinity | 1);  // NaN
    set(5, 63, infinity | (size == 2 ? 0x8000 : 0x80));
    for (std::size_t i = 0; i < 64; ++i) set(10, i, 1);  // the smallest number
    if (element == Element::kBf16) set(11, 0, 0x7F00);   // the square is not finite
    const Encoded made = encoded({payload}, element, 0.05);
    ASSERT_FALSE(made.bytes.empty());
    const Bytes back = decoded(made.bytes, element, payload.size());
    for (const std::size_t group : {3u, 4u, 5u}) {
      const auto begin = static_cast<std::ptrdiff_t>(group * group_bytes);
      const auto end = begin + static_cast<std::ptrdiff_t>(group_bytes);
      EXPECT_TRUE(std::equal(payload.begin() + begin, payload.begin() + end, back.begin() + begin)) << group;
    }
    EXPECT_LE(loss_between(payload, back, element).keys, 0.05F);
    EXPECT_TRUE(std::isfinite(made.loss.keys));
  }
}

TEST_F(LossyCodecTest, zeros_stay_zeros) {
  for (const Element element : kNumbers) {
    const Bytes payload = make_payload(Payload::kZeros, element, 300'000);
    const Encoded made = encoded({payload}, element, 0.05);
    ASSERT_FALSE(made.bytes.empty());
    EXPECT_LT(made.bytes.size(), payload.size() / 50);
    EXPECT_EQ(decoded(made.bytes, element, payload.size()), payload);
    EXPECT_EQ(made.loss, Loss{});
  }
}

TEST_F(LossyCodecTest, payloads_that_do_not_gain_are_not_encoded) {
  for (const Element element : kNumbers)
    EXPECT_TRUE(encoded({make_payload(Payload::kNan, element, 300'000)}, element, 0.05).bytes.empty());
  EXPECT_TRUE(encoded({Bytes(100)}, Element::kBf16, 0.05).bytes.empty());
  EXPECT_TRUE(encoded({Bytes()}, Element::kBf16, 0.05).bytes.empty());
}

TEST_F(LossyCodecTest, a_section_that_does_not_gain_is_stored_unchanged_among_others) {
  Bytes payload = kv_of(1366, 3, Element::kBf16);
  const Bytes noise = make_payload(Payload::kNan, Element::kBf16, kSection);
  payload.insert(payload.begin(), noise.begin(), noise.end());
  const Encoded made = encoded({payload}, Element::kBf16, 0.1);
  ASSERT_FALSE(made.bytes.empty());
  EXPECT_EQ(made.bytes[kPeriodAt], std::byte{0});
  const Bytes back = decoded(made.bytes, Element::kBf16, payload.size());
  EXPECT_TRUE(std::equal(noise.begin(), noise.end(), back.begin()));
  EXPECT_LE(loss_between(payload, back, Element::kBf16).keys, 0.1F);
}

// The distributions and the entropy coder of record-format.md, written without the codec's code.
int most_of_class(std::size_t row_class) {
  constexpr std::array<int, 12> kMost = {0, 1, 1, 2, 4, 8, 16, 32, 64, 127, 127, 127};
  return kMost.at(row_class);
}

// Returns the first remainder and the frequency of an integer.
std::pair<std::uint64_t, std::uint64_t> compute_share(std::size_t row_class, int integer) {
  const int most = most_of_class(row_class);
  const auto weight = [&](int m) {
    const std::uint64_t a = 512 + 11 * (std::uint64_t{1} << 2 * row_class);
    if (m == 0) return std::uint64_t{1} << 32;
    std::uint64_t w = (a << 32) / (a + 128 * static_cast<std::uint64_t>(m * m));
    for (int i = 0; i < 4; ++i) w = w * w >> 32;
    return w;
  };
  std::uint64_t all = 0;
  for (int m = -most; m <= most; ++m) all += weight(std::abs(m));
  const auto frequency = [&](int m) {
    return 1 + weight(std::abs(m)) * static_cast<std::uint64_t>(1023 - 2 * most) / all;
  };
  std::uint64_t others = 0, before = 0;
  for (int m = -most; m <= most; ++m) others += m == 0 ? 0 : frequency(m);
  for (int m = -most; m < integer; ++m) before += m == 0 ? 1024 - others : frequency(m);
  return {before, integer == 0 ? 1024 - others : frequency(integer)};
}

std::pair<std::uint64_t, std::uint64_t> share_of(std::size_t row_class, int integer) {
  static std::map<std::pair<std::size_t, int>, std::pair<std::uint64_t, std::uint64_t>> known;
  const auto found = known.find({row_class, integer});
  if (found != known.end()) return found->second;
  return known[{row_class, integer}] = compute_share(row_class, integer);
}

using RowIntegers = std::array<int, 64>;
using RowKinds = std::array<std::size_t, 64>;

// Rows in the order of the tiles, and the classes of each. Returns the states and the words.
Bytes integers_of(const std::vector<RowIntegers>& rows, const std::vector<RowKinds>& classes) {
  std::array<std::uint64_t, 64> states;
  states.fill(65536);
  std::vector<std::uint64_t> words;
  for (std::size_t row = rows.size(); row-- > 0;) {
    for (std::size_t channel = 64; channel-- > 0;) {
      std::uint64_t& state = states[channel];
      const auto [begin, frequency] = share_of(classes[row][channel], rows[row][channel]);
      if (state >= frequency << 22) {
        words.push_back(state % 65536);
        state /= 65536;
      }
      state = state / frequency * 1024 + begin + state % frequency;
    }
  }
  Bytes bytes;
  for (const std::uint64_t state : states) {
    for (unsigned i = 0; i < 4; ++i) bytes.push_back(static_cast<std::byte>(state >> 8 * i));
  }
  for (std::size_t i = words.size(); i-- > 0;) {
    bytes.push_back(static_cast<std::byte>(words[i]));
    bytes.push_back(static_cast<std::byte>(words[i] >> 8));
  }
  return bytes;
}

// One tile.
Bytes integers_of(const std::vector<RowIntegers>& rows, const RowKinds& classes) {
  return integers_of(rows, std::vector<RowKinds>(rows.size(), classes));
}

void append_u32(Bytes& bytes, std::size_t value) {
  for (unsigned i = 0; i < 4; ++i) bytes.push_back(static_cast<std::byte>(value >> 8 * i));
}

// The step codes as they are stored.
Bytes differences_of(const Bytes& codes, std::size_t period) {
  Bytes stored = codes;
  for (std::size_t i = period; i < codes.size(); ++i)
    stored[i] = static_cast<std::byte>(std::to_integer<unsigned>(codes[i]) -
                                       std::to_integer<unsigned>(codes[i - period]));
  return stored;
}

// A payload of one section with one tile by hand, from the description in record-format.md.
Bytes section_of(const Bytes& codes, const std::array<std::size_t, 64>& classes, const Bytes& integers,
                 std::size_t period = 1) {
  Bytes payload(kPeriodAt), kinds;  // no weights
  for (const std::size_t each : classes) kinds.push_back(static_cast<std::byte>(each));
  payload.push_back(static_cast<std::byte>(period));
  const Bytes parts[] = {differences_of(codes, period), {}, kinds, integers};
  for (const Bytes& part : parts) append_u32(payload, part.size());
  for (const Bytes& part : parts) payload.insert(payload.end(), part.begin(), part.end());
  return payload;
}

TEST_F(LossyCodecTest, a_payload_built_by_hand_is_read) {
  constexpr std::size_t kGroups = 16;
  Bytes codes(kGroups, std::byte{192});
  codes[1] = std::byte{200};  // one octave more
  codes[2] = std::byte{0};    // exact
  std::array<std::size_t, 64> classes{};
  for (std::size_t channel = 0; channel < 64; ++channel) classes[channel] = channel % 12;
  std::vector<std::array<int, 64>> rows(kGroups);
  std::mt19937 random(7);
  for (auto& row : rows) {
    for (std::size_t channel = 0; channel < 64; ++channel) {
      const int most = most_of_class(classes[channel]);
      row[channel] = static_cast<int>(random() % static_cast<unsigned>(2 * most + 1)) - most;
    }
  }
  Bytes payload = section_of(codes, classes, integers_of(rows, classes));
  payload.insert(payload.end(), kGroupBytes, std::byte{0x3F});
  for (std::size_t variant = 0; variant < LossyCodec::variants(); ++variant) {
    LossyCodec other(variant);
    Bytes back(kGroups * kGroupBytes);
    const Shard shard(back.data(), back.size());
    const Status status = other.decode(payload, Element::kBf16, {&shard, 1});
    ASSERT_TRUE(status) << other.instructions() << status.to_string();
    for (std::size_t group = 0; group < kGroups; ++group) {
      for (std::size_t channel = 0; channel < 64; ++channel) {
        const double value = value_at(back, group * kGroupBytes + 2 * channel, Element::kBf16);
        if (group == 2) {
          EXPECT_EQ(back[group * kGroupBytes + 2 * channel], std::byte{0x3F});
        } else {
          EXPECT_EQ(value, rows[group][channel] * (group == 1 ? 2 : 1)) << group << " " << channel;
        }
      }
    }
  }
}

// Returns an integer times a step as a number of the element type. weight: code of the step's weight.
double restored_number(int integer, std::size_t code, Element element, int weight = 8) {
  static constexpr std::array<float, 8> kMantissas = {0x1p0F,        0x1.172b84p0F, 0x1.306fep0F,
                                                      0x1.4bfdaep0F, 0x1.6a09e6p0F, 0x1.8ace54p0F,
                                                      0x1.ae89fap0F, 0x1.d5818ep0F};
  const double step = std::ldexp(kMantissas.at(code % 8), static_cast<int>(code / 8) - 24 + weight - 8);
  const double product = static_cast<float>(integer * step);
  int exponent = 0;
  (void)std::frexp(product, &exponent);
  struct Precision {
    int bits, least;  // of the mantissa with its first one; exponent of the smallest number
    double largest;
  };
  const Precision of = element == Element::kBf16   ? Precision{8, -133, HUGE_VAL}
                       : element == Element::kFp16 ? Precision{11, -24, HUGE_VAL}
                       : element == Element::kE4m3 ? Precision{4, -9, 448}
                                                   : Precision{3, -16, 57344};
  const double unit = std::ldexp(1, std::max(exponent - of.bits, of.least));
  const double units = product / unit;
  if (size_of(element) == 2 && weight == 8) {
    EXPECT_NE(std::fabs(units - std::trunc(units)), 0.5) << "no product is half way between two numbers";
  }
  return std::clamp(std::nearbyint(units) * unit, -of.largest, of.largest);
}

struct ByHand {
  Bytes encoded, restored;
};

// Writes a payload as record-format.md specifies, without the codec's code: random steps, classes and
// integers, a group in 50 unchanged, and rows of random weights.
ByHand written_by_hand(std::size_t bytes, std::size_t period, Element element, std::size_t weight_rows) {
  std::mt19937 random(static_cast<unsigned>(bytes + period));
  ByHand made;
  made.restored.resize(bytes);
  std::vector<std::array<int, 64>> weights(weight_rows + 1);
  weights[0].fill(8);
  append_u32(made.encoded, weight_rows);
  append_u32(made.encoded, 64 * weight_rows);
  for (std::size_t row = 1; row <= weight_rows; ++row) {
    for (int& code : weights[row]) {
      code = static_cast<int>(random() % 17);
      made.encoded.push_back(static_cast<std::byte>(code));
    }
  }
  std::vector<RowKinds> last_kinds(weight_rows + 1);
  const std::size_t element_size = size_of(element), group_bytes = group_of(element);
  const auto any_bytes = [&](std::size_t at, std::size_t count) {
    for (std::size_t i = at; i < at + count; ++i) {
      made.restored[i] = static_cast<std::byte>(random());
      made.encoded.push_back(made.restored[i]);
    }
  };
  for (std::size_t begin = 0; begin < bytes;) {
    const std::size_t left = bytes - begin;
    made.encoded.push_back(static_cast<std::byte>(period));
    std::size_t size = left;
    if (left > 4096 * group_bytes)
      size = period == 0 ? 4096 * group_bytes : 4096 / (16 * period) * 16 * period * group_bytes;
    if (period == 0) {
      any_bytes(begin, size);
      begin += size;
      continue;
    }
    const std::size_t groups = size / group_bytes;
    Bytes codes, kinds, low, high;
    std::size_t last_row = 0;
    for (std::size_t group = 0; group < groups; ++group)
      codes.push_back(static_cast<std::byte>(random() % 50 == 0 ? 0 : random()));
    std::vector<RowIntegers> rows;
    std::vector<RowKinds> classes;
    for (std::size_t block = 0; block < groups; block += 16 * period) {
      for (std::size_t first = block; first < std::min(block + period, groups); ++first) {
        RowKinds of_tile;
        const std::size_t weight_row = weight_rows == 0 ? 0 : random() % (weight_rows + 1);
        if (weight_rows > 0) {
          low.push_back(static_cast<std::byte>(weight_row - last_row));
          high.push_back(static_cast<std::byte>((weight_row - last_row) >> 8));
          last_row = weight_row;
        }
        for (std::size_t channel = 0; channel < 64; ++channel) {
          of_tile[channel] = random() % 12;
          kinds.push_back(static_cast<std::byte>(of_tile[channel] - last_kinds[weight_row][channel]));
        }
        if (weight_row > 0) last_kinds[weight_row] = of_tile;
        for (std::size_t group = first; group < std::min(block + 16 * period, groups); group += period) {
          RowIntegers row;
          for (std::size_t channel = 0; channel < 64; ++channel) {
            const int most = most_of_class(of_tile[channel]);
            row[channel] = static_cast<int>(random() % static_cast<unsigned>(2 * most + 1)) - most;
            const double value = restored_number(row[channel], std::to_integer<std::size_t>(codes[group]),
                                                 element, weights[weight_row][channel]);
            std::uint16_t bits = bits_of(value, element);
            if (element == Element::kFp16 && std::fabs(value) > 65504) bits = value < 0 ? 0xFC00 : 0x7C00;
            for (std::size_t byte = 0; byte < element_size; ++byte)
              made.restored[begin + group_bytes * group + element_size * channel + byte] =
                  static_cast<std::byte>(bits >> 8 * byte);
          }
          rows.push_back(row);
          classes.push_back(of_tile);
        }
      }
    }
    const Bytes integers = integers_of(rows, classes);
    low.insert(low.end(), high.begin(), high.end());
    const Bytes stored_codes = differences_of(codes, period);
    const Bytes* const parts[] = {&stored_codes, &low, &kinds, &integers};
    for (const Bytes* part : parts) append_u32(made.encoded, part->size());
    for (const Bytes* part : parts) made.encoded.insert(made.encoded.end(), part->begin(), part->end());
    for (std::size_t group = 0; group < groups; ++group) {
      if (codes[group] == std::byte{0}) any_bytes(begin + group_bytes * group, group_bytes);
    }
    any_bytes(begin + group_bytes * groups, size % group_bytes);
    begin += size;
  }
  return made;
}

TEST_F(LossyCodecTest, payloads_of_many_tiles_and_sections_built_by_hand_are_read) {
  struct Case {
    std::size_t of_16_bits, period;  // bytes, with numbers of 16 bits
    std::size_t weight_rows = 0;     // of numbers of 16 bits
  };
  constexpr Case kCases[] = {
      {128 * 203 + 9, 6},         {524'288, 6},          {524'288 + 5, 6, 3},
      {524'288 + 128 * 100, 2},   {128 * 100, 128},      {524'288 + 127, 0, 1},
      {2 * 524'288 + 3, 96, 300}, {128 * 203 + 9, 6, 1}, {2 * 524'288 + 128 * 77, 3, 4096}};
  for (std::size_t number = 0; number < std::size(kCases); ++number) {
    for (std::size_t type = number % 2; type < std::size(kNumbers); type += 2) {  // 16 bits and 8 bits
      const Element element = kNumbers[type];
      const auto& [of_16_bits, period, weight_rows] = kCases[number];
      const std::size_t bytes = of_16_bits / 2 * size_of(element) + of_16_bits % 2;
      const ByHand made = written_by_hand(bytes, period, element, size_of(element) == 2 ? weight_rows : 0);
      for (std::size_t variant = 0; variant < LossyCodec::variants(); ++variant) {
        LossyCodec other(variant);
        const GuardedBytes guarded(made.encoded);
        Bytes back(bytes);
        const Shard shard(back.data(), back.size());
        const Status status = other.decode(guarded.bytes(), element, {&shard, 1});
        ASSERT_TRUE(status) << bytes << " " << period << " " << status.to_string();
        ASSERT_TRUE(back == made.restored) << bytes << " " << period << " " << other.instructions();
      }
    }
  }
}

// Numbers that every compiler and library generates alike.
Bytes fixed_payload(std::size_t bytes, std::size_t period, Element element) {
  std::mt19937 random(42);
  std::vector<float> scales(64 * period);
  for (float& scale : scales) {  // compilers evaluate the arguments of a call in different orders
    const auto exponent = static_cast<int>(random() % 7);
    scale = std::ldexp(1 + static_cast<float>(random() % 256) / 256, exponent);
  }
  std::vector<std::uint16_t> numbers;
  const std::size_t count = (bytes + size_of(element) - 1) / size_of(element);
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t group = i / 64;
    const float uniform = static_cast<float>(1 + random() % 65535) / 65536;
    float value = uniform * scales[i % scales.size()];
    if (size_of(element) == 1) {
      value = std::ldexp(value, static_cast<int>(group % 9) - 7);  // from subnormal to large numbers
      numbers.push_back(static_cast<std::uint16_t>(fp8_of(value, element) | (random() & 0x80)));
      continue;
    }
    if (element == Element::kBf16) {
      value = std::ldexp(value, static_cast<int>(group % 34) - 25);  // all steps
    } else {
      value = std::ldexp(value + 0.25F, -static_cast<int>(group % 12));
    }
    std::uint16_t bits = element == Element::kBf16 ? bf16_of(value) : fp16_of(value);
    if (element == Element::kFp16 && group % 5 == 1) bits = static_cast<std::uint16_t>(random() & 0x3FF);
    numbers.push_back(static_cast<std::uint16_t>(bits | (random() & 0x8000)));
  }
  Bytes made = bytes_in(numbers, element);
  made.resize(bytes);
  return made;
}

// Hashes of what this version restores. Another hash means that the format or the choice of steps changed.
TEST_F(LossyCodecTest, the_restored_bytes_are_those_of_this_version) {
  struct Case {
    std::size_t bytes, period;
    Element element;
    std::uint64_t hash;      // XXH3-64 of the restored bytes
    std::uint64_t integers;  // of the encoded bytes after the classes; one section only. Not of zstd.
  };
  for (const Case& each : {Case{128 * 1203 + 9, 6, Element::kBf16, 0xC68B3F71A64C87D5, 0xF7A91857A1574862},
                           Case{128 * 1203 + 9, 6, Element::kFp16, 0x741F547E8BE758D5, 0x723B243134D95E12},
                           Case{524'288, 6, Element::kBf16, 0x73A3C8B32FCDA6DB, 0x487C8B2F665FCA48},
                           Case{524'288 + 5, 6, Element::kFp16, 0x5DEC74AFE57B6AA6, 0},
                           Case{900'001, 2, Element::kBf16, 0xF3FF4AAA6D827FE5, 0},
                           Case{64 * 1203 + 9, 6, Element::kE4m3, 0xF1248FD12FE0BFA1, 0xCDF06B2B851D2339},
                           Case{64 * 1203 + 9, 6, Element::kE5m2, 0x72BD976AA2EC7484, 0x41E3F0EB0259DA95},
                           Case{600'001, 2, Element::kE4m3, 0xD4825E454F16D99D, 0}}) {
    const Bytes payload = fixed_payload(each.bytes, each.period, each.element);
    const auto run = static_cast<std::uint32_t>(group_of(each.element));
    const Bytes made = encoded({payload}, each.element, {0.03, 0.11}, {run, run}).bytes;
    ASSERT_FALSE(made.empty());
    const Bytes back = decoded(made, each.element, payload.size());
    EXPECT_EQ(XXH3_64bits(back.data(), back.size()), each.hash) << each.bytes;
    if (each.bytes > kSection) continue;
    std::size_t at = kPartsAt;
    for (std::size_t part = 0; part < kParts - 1; ++part) {
      for (unsigned i = 0; i < 4; ++i)
        at += std::to_integer<std::size_t>(made[kLengthsAt + 4 * part + i]) << 8 * i;
    }
    ASSERT_LT(at, made.size());
    EXPECT_EQ(XXH3_64bits(made.data() + at, made.size() - at), each.integers) << each.bytes;
  }
}

TEST_F(LossyCodecTest, all_variants_encode_and_decode_the_same_bytes) {
  for (const Element element : kNumbers) {
    Bytes payload = kv_of(900, 3, element);
    payload.resize(payload.size() - 77);
    // NaN: exact groups.
    std::fill_n(payload.begin() + 5 * kGroupBytes, kGroupBytes, std::byte{0x7F});
    const auto run = static_cast<std::uint32_t>(group_of(element));
    const Shard shard(payload.data(), payload.size());
    Bytes first, restored;
    Loss first_loss;
    for (std::size_t variant = 0; variant < LossyCodec::variants(); ++variant) {
      LossyCodec other(variant);
      Bytes out(LossyCodec::encoded_bytes_at_most({&shard, 1})), back(payload.size());
      std::uint64_t used = 0;
      Loss loss;
      ASSERT_TRUE(other.encode({&shard, 1}, element, {0.05, 0.1}, {run, run}, nullptr, out, &used, &loss));
      out.resize(used);
      if (variant == 0) {
        first = out;
        first_loss = loss;
      }
      ASSERT_FALSE(first.empty());
      EXPECT_EQ(out, first) << other.instructions();
      EXPECT_EQ(loss, first_loss) << other.instructions();
      const Shard to(back.data(), back.size());
      ASSERT_TRUE(other.decode(first, element, {&to, 1}));
      if (variant == 0) restored = back;
      EXPECT_EQ(back, restored) << other.instructions();
    }
  }
}

TEST_F(LossyCodecTest, the_period_is_found_after_sections_without_one) {
  constexpr std::size_t kHeads = 3;
  const Bytes numbers = kv_of(1366, kHeads, Element::kBf16);
  for (const Payload kind : {Payload::kZeros, Payload::kNan}) {
    Bytes payload = make_payload(kind, Element::kBf16, kSection);
    payload.insert(payload.end(), numbers.begin(), numbers.end());
    const Bytes stored = encoded({payload}, Element::kBf16, 0.1).bytes;
    ASSERT_FALSE(stored.empty());
    std::size_t at = kPeriodAt + 1 + kSection;  // an unchanged section
    if (kind == Payload::kZeros) {
      at = kPartsAt;
      for (std::size_t number = 0; number < kParts; ++number) {
        for (unsigned byte = 0; byte < 4; ++byte)
          at += std::to_integer<std::size_t>(stored[kLengthsAt + 4 * number + byte]) << 8 * byte;
      }
    }
    EXPECT_EQ(std::to_integer<std::size_t>(stored.at(at)), 2 * kHeads);
  }
}

TEST_F(LossyCodecTest, an_invalid_payload_is_corrupt) {
  const Bytes payload = kv_of(64, 2, Element::kBf16);
  const Bytes good = encoded({payload}, Element::kBf16, 0.05).bytes;
  ASSERT_FALSE(good.empty());
  ASSERT_EQ(decoded_as(good, payload.size()), StatusKind::kOk);
  EXPECT_EQ(decoded_as(good, payload.size() + kGroupBytes), StatusKind::kCorrupt);
  EXPECT_EQ(decoded_as(good, payload.size() - kGroupBytes), StatusKind::kCorrupt);
  EXPECT_EQ(decoded_as({}, payload.size()), StatusKind::kCorrupt);
  Bytes wrong = good;
  wrong.push_back(std::byte{0});
  EXPECT_EQ(decoded_as(wrong, payload.size()), StatusKind::kCorrupt) << "a byte more";
  wrong = good;
  wrong[kPeriodAt] = std::byte{129};
  EXPECT_EQ(decoded_as(wrong, payload.size()), StatusKind::kCorrupt) << "the period is too large";
  for (std::size_t part = 0; part < kParts; ++part) {
    for (const int change : {1, 0x80}) {
      for (const std::size_t byte : {0u, 3u}) {
        wrong = good;
        wrong[kLengthsAt + 4 * part + byte] ^= static_cast<std::byte>(change);
        EXPECT_EQ(decoded_as(wrong, payload.size()), StatusKind::kCorrupt) << part << " " << change;
      }
    }
  }
}

TEST_F(LossyCodecTest, impossible_parts_are_corrupt) {
  // 16 groups of zeros with this period.
  const auto zeros = [](std::size_t period) {
    const std::size_t kinds = 64 * std::min<std::size_t>(period, 16);
    Bytes payload = section_of(Bytes(16, std::byte{192}), {}, integers_of({}, RowKinds{}), period);
    payload[kLengthsAt + 8] = static_cast<std::byte>(kinds);
    payload[kLengthsAt + 9] = static_cast<std::byte>(kinds >> 8);
    payload.insert(payload.begin() + kPartsAt + 16, kinds - 64, std::byte{0});
    return payload;
  };
  constexpr std::size_t kBytes = 16 * kGroupBytes, kClasses = kPartsAt + 16, kStates = kClasses + 64;
  constexpr std::size_t kLengthOfIntegers = kLengthsAt + 12;
  EXPECT_EQ(decoded_as(zeros(1), kBytes), StatusKind::kOk);
  EXPECT_EQ(decoded_as(zeros(128), kBytes), StatusKind::kOk);
  EXPECT_EQ(decoded_as(zeros(129), kBytes), StatusKind::kCorrupt) << "the period";
  Bytes wrong = zeros(1);
  wrong.erase(wrong.begin() + kClasses, wrong.begin() + kStates);
  wrong[kLengthsAt + 8] = std::byte{0};
  EXPECT_EQ(decoded_as(wrong, kBytes), StatusKind::kCorrupt) << "a part is missing";
  for (const int row_class : {12, 15, 255}) {
    wrong = zeros(1);
    wrong[kStates - 1] = static_cast<std::byte>(row_class);
    Bytes ignored;
    const Status status = decode(wrong, Element::kBf16, {kBytes}, &ignored);
    EXPECT_NE(status.to_string().find("an unknown class"), std::string::npos) << status.to_string();
  }
  wrong = zeros(1);
  wrong.resize(kStates + 255);
  wrong[kLengthOfIntegers] = std::byte{255};
  wrong[kLengthOfIntegers + 1] = std::byte{0};
  EXPECT_EQ(decoded_as(wrong, kBytes), StatusKind::kCorrupt) << "a state is missing";
  wrong = zeros(1);
  wrong[kStates] = std::byte{1};
  EXPECT_EQ(decoded_as(wrong, kBytes), StatusKind::kCorrupt) << "a last state";
  for (const std::size_t more : {std::size_t{1}, std::size_t{2}, std::size_t{600'000}}) {
    wrong = zeros(1);
    wrong.resize(wrong.size() + more);
    const std::size_t length = 256 + more;
    for (unsigned i = 0; i < 3; ++i) wrong[kLengthOfIntegers + i] = static_cast<std::byte>(length >> 8 * i);
    EXPECT_EQ(decoded_as(wrong, kBytes), StatusKind::kCorrupt) << "words that are not read";
  }
}

TEST_F(LossyCodecTest, impossible_weights_are_corrupt) {
  // A section of one tile after weights of two rows.
  const auto with = [](std::size_t rows, std::size_t stored, std::size_t code, std::size_t tile_row) {
    Bytes payload;
    append_u32(payload, rows);
    append_u32(payload, stored);
    payload.resize(payload.size() + 128, static_cast<std::byte>(code));
    payload.push_back(std::byte{1});
    Bytes codes(16, std::byte{0});
    codes[0] = std::byte{192};
    const Bytes parts[] = {codes,
                           {static_cast<std::byte>(tile_row), static_cast<std::byte>(tile_row >> 8)},
                           Bytes(64),
                           integers_of({}, RowKinds{})};
    for (const Bytes& part : parts) append_u32(payload, part.size());
    for (const Bytes& part : parts) payload.insert(payload.end(), part.begin(), part.end());
    return payload;
  };
  constexpr std::size_t kBytes = 16 * kGroupBytes;
  EXPECT_EQ(decoded_as(with(2, 128, 16, 2), kBytes), StatusKind::kOk);
  EXPECT_EQ(decoded_as(with(2, 128, 17, 2), kBytes), StatusKind::kCorrupt) << "a weight";
  EXPECT_EQ(decoded_as(with(2, 128, 8, 3), kBytes), StatusKind::kCorrupt) << "the row of a tile";
  EXPECT_EQ(decoded_as(with(2, 128, 8, 0xFFFF), kBytes), StatusKind::kCorrupt) << "the row of a tile";
  for (const std::size_t rows : {0u, 1u, 3u, 4097u, 0xFFFFFFFFu})
    EXPECT_EQ(decoded_as(with(rows, 128, 8, 0), kBytes), StatusKind::kCorrupt) << rows;
  for (const std::size_t stored : {0u, 127u, 129u, 0xFFFFFFFFu})
    EXPECT_EQ(decoded_as(with(2, stored, 8, 0), kBytes), StatusKind::kCorrupt) << stored;
  Bytes many, frame(1000);
  append_u32(many, kMostWeightRows + 1);
  const Bytes ones((kMostWeightRows + 1) * 64, std::byte{8});
  frame.resize(ZSTD_compress(frame.data(), frame.size(), ones.data(), ones.size(), 1));
  append_u32(many, frame.size());
  many.insert(many.end(), frame.begin(), frame.end());
  const Bytes section = with(2, 128, 8, 0);
  many.insert(many.end(), section.begin() + 8 + 128, section.end());
  EXPECT_EQ(decoded_as(many, kBytes), StatusKind::kCorrupt) << "too many rows";
  Bytes ignored;
  const Status of_fp8 = decode(with(2, 128, 8, 0), Element::kE4m3, {kBytes / 2}, &ignored);
  EXPECT_NE(of_fp8.to_string().find("fp8 has no weights"), std::string::npos) << of_fp8.to_string();
}

// Six groups of a token, in blocks of 16 tokens and two layers; each group of a layer has weights of its own.
struct Weighted {
  static constexpr std::size_t kGroups = 6, kTokens = 16, kLayers = 2;
  std::vector<BoundFactors::OfGroup> block;
  std::vector<std::uint8_t> weights;

  Weighted() {
    std::mt19937 random(11);
    for (std::size_t i = 0; i < kLayers * kGroups * 64; ++i)
      weights.push_back(static_cast<std::uint8_t>(7 + random() % 3));
    for (std::size_t layer = 0; layer < kLayers; ++layer) {
      for (std::size_t i = 0; i < kTokens * kGroups; ++i)
        block.push_back({i % kGroups % 2 == 0 ? 0.4F : 0.8F,
                         static_cast<std::uint16_t>(1 + layer * kGroups + i % kGroups)});
    }
  }
  BoundFactors factors() const { return BoundFactors({block}, weights); }
};

// Returns the mean square of the errors of channels by the code of their weights, 7 to 9.
std::array<double, 3> errors_by_weight(const Weighted& weighted, const Bytes& before, const Bytes& after,
                                       Element element) {
  std::array<double, 3> errors{}, counts{};
  const std::size_t size = size_of(element);
  for (std::size_t i = 0; i < before.size() / size; ++i) {
    const std::size_t row = weighted.block[i / 64 % weighted.block.size()].row;
    const double error = value_at(after, size * i, element) - value_at(before, size * i, element);
    const std::size_t code = weighted.weights[64 * (row - 1) + i % 64] - 7U;
    errors.at(code) += error * error;
    counts.at(code) += 1;
  }
  for (std::size_t code = 0; code < errors.size(); ++code) errors.at(code) /= counts.at(code);
  return errors;
}

TEST_F(LossyCodecTest, weights_distribute_the_error_of_a_group_over_its_channels) {
  const Weighted weighted;
  const BoundFactors factors = weighted.factors();
  constexpr double kBound = 0.2;
  for (const Element element : {Element::kBf16, Element::kFp16}) {
    const Bytes payload = tokens_of(std::vector<float>(120 * 2 * 16, 2), element);  // several sections
    const Encoded made = encoded({payload}, element, {kBound, kBound}, {}, &factors);
    ASSERT_FALSE(made.bytes.empty());
    const Bytes back = decoded(made.bytes, element, payload.size());
    const auto [small, middle, large] = errors_by_weight(weighted, payload, back, element);
    EXPECT_NEAR(middle / small, 4, 0.6);
    EXPECT_NEAR(large / middle, 4, 0.6);
    const std::vector<double> losses = losses_of_groups(payload, back, element);
    std::array<double, 2> largest{};
    for (std::size_t group = 0; group < losses.size(); ++group) {
      const double bound = kBound * double{weighted.block[group % weighted.block.size()].factor};
      EXPECT_LE(losses[group], bound) << group;
      largest.at(group % 2) = std::max(largest.at(group % 2), losses[group] / bound);
    }
    EXPECT_GT(largest[0], 0.9) << "the bound is used";
    EXPECT_GT(largest[1], 0.9);
    for (std::size_t variant = 0; variant < LossyCodec::variants(); ++variant) {
      LossyCodec other(variant);
      const Shard shard(const_cast<std::byte*>(payload.data()), payload.size());
      Bytes out(LossyCodec::encoded_bytes_at_most({&shard, 1})), restored(payload.size());
      std::uint64_t used = 0;
      Loss loss;
      ASSERT_TRUE(
          other.encode({&shard, 1}, element, {kBound, kBound}, {}, &factors, out, &used, &loss).is_ok());
      out.resize(used);
      EXPECT_TRUE(out == made.bytes) << other.instructions();
      const Shard to(restored.data(), restored.size());
      ASSERT_TRUE(other.decode(out, element, {&to, 1}).is_ok());
      EXPECT_TRUE(restored == back) << other.instructions();
    }
  }
}

TEST_F(LossyCodecTest, fp8_with_weights_is_not_encoded) {
  const Weighted weighted;
  const BoundFactors factors = weighted.factors();
  const BoundFactors plain({std::vector<BoundFactors::OfGroup>(weighted.block.size(), {0.5F, 0})});
  const Bytes payload = tokens_of(std::vector<float>(64, 2), Element::kE4m3);
  EXPECT_FALSE(encoded({payload}, Element::kE4m3, {0.2, 0.2}, {}, &plain).bytes.empty());
  EXPECT_TRUE(encoded({payload}, Element::kE4m3, {0.2, 0.2}, {}, &factors).bytes.empty());
}

TEST_F(LossyCodecTest, a_period_is_found_for_which_tiles_keep_their_weights) {
  // The integers of all groups have the same magnitudes, so that all periods are as good.
  const Weighted weighted;
  std::mt19937 random(5);
  std::uniform_real_distribution<float> uniform(-1, 1);
  std::vector<std::uint16_t> numbers(weighted.block.size() * 64 * 40);
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    const std::size_t row = weighted.block[i / 64 % weighted.block.size()].row;
    numbers[i] = bf16_of(std::ldexp(uniform(random), weighted.weights[64 * (row - 1) + i % 64] - 8));
  }
  const Bytes payload = bytes_in(numbers, Element::kBf16);
  const BoundFactors factors = weighted.factors();
  const Encoded made = encoded({payload}, Element::kBf16, {0.2, 0.2}, {}, &factors);
  ASSERT_FALSE(made.bytes.empty());
  const Bytes back = decoded(made.bytes, Element::kBf16, payload.size());
  const std::array<double, 3> errors = errors_by_weight(weighted, payload, back, Element::kBf16);
  EXPECT_NEAR(errors[2] / errors[0], 16, 4);
}

TEST_F(LossyCodecTest, a_tile_with_a_group_that_needs_larger_integers_has_no_weights) {
  const Weighted weighted;
  const BoundFactors factors = weighted.factors();
  std::vector<float> sizes(40 * 2 * 16, 2);
  Bytes payload = tokens_of(sizes, Element::kBf16);
  // Token 5: one channel of its first group is so large that its integer fits without weights only.
  std::size_t channel = 0;
  while (weighted.weights[channel] != 7) ++channel;
  const std::uint16_t large = bf16_of(1000);
  std::memcpy(payload.data() + 5 * 6 * kGroupBytes + 2 * channel, &large, 2);
  const Encoded made = encoded({payload}, Element::kBf16, {0.1, 0.1}, {}, &factors);
  ASSERT_FALSE(made.bytes.empty());
  const Bytes back = decoded(made.bytes, Element::kBf16, payload.size());
  const auto errors_of_tile = [&](std::size_t block) {
    std::array<double, 3> errors{};
    for (std::size_t token = 0; token < 16; ++token) {
      for (std::size_t i = 0; i < 64; ++i) {
        const std::size_t at = ((block * 2 * 16 + token) * 6) * kGroupBytes + 2 * i;
        const double error = value_at(back, at, Element::kBf16) - value_at(payload, at, Element::kBf16);
        if (token != 5) errors.at(weighted.weights[i] - 7U) += error * error;
      }
    }
    return errors;
  };
  const auto dropped = errors_of_tile(0), kept = errors_of_tile(1);
  const auto count = [&](std::uint8_t code) {
    return static_cast<double>(std::count(weighted.weights.begin(), weighted.weights.begin() + 64, code));
  };
  EXPECT_NEAR(dropped[2] / count(9) * count(7) / dropped[0], 1, 0.6);
  EXPECT_GT(kept[2] / count(9) * count(7) / kept[0], 8);
  const std::ptrdiff_t at = static_cast<std::ptrdiff_t>(5 * 6 * kGroupBytes);
  EXPECT_FALSE(std::equal(payload.begin() + at,
                          payload.begin() + at + static_cast<std::ptrdiff_t>(kGroupBytes), back.begin() + at))
      << "the group is not exact";
}

TEST_F(LossyCodecTest, shards_may_have_blocks_of_different_sizes_or_no_bytes) {
  using Groups = std::vector<BoundFactors::OfGroup>;
  const BoundFactors factors({Groups(6, {0.25F, 0}), Groups{}, Groups(12, {1, 0})});
  const Bytes payload = tokens_of(std::vector<float>(600, 2), Element::kBf16);
  const std::ptrdiff_t cut = static_cast<std::ptrdiff_t>(200 * 6 * kGroupBytes);
  const Bytes first(payload.begin(), payload.begin() + cut), rest(payload.begin() + cut, payload.end());
  const Encoded made = encoded({first, {}, rest}, Element::kBf16, {0.2, 0.2}, {}, &factors);
  ASSERT_FALSE(made.bytes.empty());
  const std::vector<double> losses =
      losses_of_groups(payload, decoded(made.bytes, Element::kBf16, payload.size()), Element::kBf16);
  for (std::size_t group = 0; group < losses.size(); ++group) {
    EXPECT_LE(losses[group], group < 1200 ? 0.05 : 0.2) << group;
    EXPECT_GT(losses[group], group < 1200 ? 0.03 : 0.12) << group;
  }
  EXPECT_TRUE(encoded({first, rest, {}}, Element::kBf16, {0.2, 0.2}, {}, &factors).bytes.empty());
  EXPECT_TRUE(encoded({first, first, rest}, Element::kBf16, {0.2, 0.2}, {}, &factors).bytes.empty());
}

TEST_F(LossyCodecTest, each_payload_begins_without_the_classes_of_another) {
  const Weighted weighted;
  const BoundFactors factors = weighted.factors();
  const Bytes payload = tokens_of(std::vector<float>(100 * 2 * 16, 2), Element::kBf16);
  const Encoded first = encoded({payload}, Element::kBf16, {0.2, 0.2}, {}, &factors);
  ASSERT_FALSE(first.bytes.empty());
  const Bytes back = decoded(first.bytes, Element::kBf16, payload.size());
  EXPECT_TRUE(encoded({payload}, Element::kBf16, {0.2, 0.2}, {}, &factors).bytes == first.bytes);
  EXPECT_TRUE(decoded(first.bytes, Element::kBf16, payload.size()) == back);
}

TEST_F(LossyCodecTest, integers_without_enough_words_are_corrupt) {
  // 16 groups of large integers: each reads most of its words.
  std::vector<std::array<int, 64>> rows(16);
  std::array<std::size_t, 64> classes;
  classes.fill(11);
  for (auto& row : rows) row.fill(127);
  const Bytes codes(16, std::byte{192}), integers = integers_of(rows, classes);
  constexpr std::size_t kBytes = 16 * kGroupBytes;
  ASSERT_EQ(decoded_as(section_of(codes, classes, integers), kBytes), StatusKind::kOk);
  for (std::size_t bytes = 0; bytes < integers.size(); ++bytes) {
    const Bytes cut(integers.begin(), integers.begin() + static_cast<std::ptrdiff_t>(bytes));
    // At the end of the payload, and before bytes that could be read as words.
    for (const std::size_t behind : {0u, 100'000u}) {
      Bytes wrong = section_of(codes, classes, cut);
      wrong.insert(wrong.end(), integers.begin() + static_cast<std::ptrdiff_t>(bytes), integers.end());
      wrong.resize(wrong.size() + behind - (behind == 0 ? integers.size() - bytes : 0));
      Bytes ignored;
      const Status status = decode(wrong, Element::kBf16, {kBytes}, &ignored);
      ASSERT_EQ(status.kind(), StatusKind::kCorrupt) << bytes;
      if (bytes >= 256) {
        ASSERT_NE(status.to_string().find("truncated in its integers"), std::string::npos)
            << status.to_string();
      }
    }
  }
}

TEST_F(LossyCodecTest, every_truncation_is_corrupt) {
  for (const Element element : {Element::kBf16, Element::kE4m3}) {
    const Bytes payload = kv_of(48, 2, element);
    const Bytes good = encoded({payload}, element, 0.1).bytes;
    ASSERT_FALSE(good.empty());
    for (std::size_t bytes = 0; bytes < good.size(); ++bytes) {
      const Bytes cut(good.begin(), good.begin() + static_cast<std::ptrdiff_t>(bytes));
      Bytes ignored;
      EXPECT_EQ(decode(cut, element, {payload.size()}, &ignored).kind(), StatusKind::kCorrupt) << bytes;
    }
  }
}

TEST_F(LossyCodecTest, random_damage_ends_in_numbers_or_is_corrupt) {
  std::mt19937 random(5);
  for (const Element element : {Element::kFp16, Element::kE4m3, Element::kE5m2}) {
    const Bytes payload = kv_of(64, 2, element);
    const Bytes good = encoded({payload}, element, 0.1).bytes;
    ASSERT_FALSE(good.empty());
    for (int round = 0; round < 2000; ++round) {
      Bytes wrong = good;
      for (int change = 0; change < 3; ++change)
        wrong[random() % wrong.size()] = static_cast<std::byte>(random());
      Bytes ignored;
      const Status status = decode(wrong, element, {payload.size()}, &ignored);
      EXPECT_TRUE(status || status.kind() == StatusKind::kCorrupt) << status.to_string();
    }
  }
}

TEST_F(LossyCodecTest, all_finite_numbers_of_fp8_are_within_the_bound) {
  for (const Element element : kFp8Numbers) {
    const unsigned largest = element == Element::kE4m3 ? 0x7E : 0x7B;
    std::mt19937 random(17);
    Bytes payload(400'000);
    for (std::size_t at = 0; at < payload.size(); ++at) {
      // Parts with the largest numbers, with subnormal numbers, and with numbers of any size.
      const std::size_t group = at / 65'536 % 4;
      const unsigned any = static_cast<unsigned>(random()) % (largest + 1);
      const unsigned magnitude = group == 0 ? largest - any % 4 : group == 1 ? any % 8 : any;
      payload[at] = static_cast<std::byte>(magnitude | (random() & 0x80));
    }
    for (const double bound : {0.05, 0.1, 0.5}) {
      const Encoded made = encoded({payload}, element, bound);
      ASSERT_FALSE(made.bytes.empty()) << bound;
      const Bytes back = decoded(made.bytes, element, payload.size());
      const Loss loss = loss_between(payload, back, element);
      EXPECT_LE(loss.keys, bound);
      EXPECT_FLOAT_EQ(made.loss.keys, loss.keys);
      EXPECT_FLOAT_EQ(made.loss.rms, loss.rms);
      for (std::size_t at = 0; at < back.size(); ++at)
        ASSERT_TRUE(std::isfinite(value_at(back, at, element))) << at << " saturates";
    }
  }
}

TEST(GroupQuantizer, all_bits_of_fp8_have_their_value_and_keep_their_bits) {
  GroupQuantizer ways[kMostGroupQuantizers];
  const std::size_t known = group_quantizers_known(ways);
  for (const Element element : kFp8Numbers) {
    for (unsigned bits = 0; bits < 256; ++bits) {
      // At each place of a vector, among zeros.
      for (std::size_t place = 0; place < 64; place += 7) {
        Bytes group(64, std::byte{0});
        group[place] = static_cast<std::byte>(bits);
        const double value = fp8_value(static_cast<std::uint8_t>(bits), element);
        for (std::size_t way = 0; way < known; ++way) {
          const double norm = ways[way].compare(group.data(), group.data(), element).squared_norm;
          if (std::isnan(value)) {
            ASSERT_TRUE(std::isnan(norm)) << ways[way].name << " " << bits;
          } else {
            ASSERT_EQ(norm, value * value) << ways[way].name << " " << bits;
          }
          std::int8_t q[64];
          const std::uint8_t code = ways[way].quantize(group.data(), element, 0.05F, nullptr, q);
          // The largest numbers of e5m2 need a larger step than there is.
          ASSERT_EQ(code == kExactGroup, !(std::fabs(value) < 10900)) << ways[way].name << " " << bits;
          if (code == kExactGroup || value == 0) continue;
          Bytes back(64);
          ways[way].restore(q, &code, 1, element, nullptr, back.data(), 64);
          EXPECT_NEAR(value_at(back, place, element), value, 0.05 * std::fabs(value)) << bits;
          ASSERT_EQ(std::signbit(value_at(back, place, element)), std::signbit(value)) << bits;
        }
      }
    }
  }
}

TEST(GroupQuantizer, all_variants_restore_the_same_bits_within_the_bound) {
  GroupQuantizer ways[kMostGroupQuantizers];
  const std::size_t known = group_quantizers_known(ways);
  for (const Element element : kNumbers) {
    const Bytes payload = kv_of(100, 1, element, 3);
    const std::size_t group_bytes = group_of(element);
    double sum = 0;
    for (std::size_t at = 0; at + group_bytes <= payload.size(); at += group_bytes) {
      const std::byte* const numbers = payload.data() + at;
      std::int8_t q[64];
      const std::uint8_t code = ways[0].quantize(numbers, element, 0.05F, nullptr, q);
      ASSERT_NE(code, kExactGroup);
      Bytes first(group_bytes);
      ways[0].restore(q, &code, 1, element, nullptr, first.data(), group_bytes);
      const GroupError error = ways[0].compare(numbers, first.data(), element);
      GroupLosses losses;
      losses.add(numbers, first.data(), element, error);
      EXPECT_LE(losses.largest, 0.05);
      sum += losses.largest;
      for (std::size_t i = 1; i < known; ++i) {
        std::int8_t other_q[64];
        EXPECT_EQ(ways[i].quantize(numbers, element, 0.05F, nullptr, other_q), code) << ways[i].name;
        EXPECT_TRUE(std::equal(q, q + 64, other_q)) << ways[i].name;
        Bytes other(group_bytes);
        ways[i].restore(q, &code, 1, element, nullptr, other.data(), group_bytes);
        EXPECT_EQ(other, first) << ways[i].name;
        const GroupError same = ways[i].compare(numbers, first.data(), element);
        EXPECT_EQ(same.squared_error, error.squared_error) << ways[i].name;
        EXPECT_EQ(same.squared_norm, error.squared_norm) << ways[i].name;
      }
    }
    EXPECT_GT(sum / static_cast<double>(payload.size() / group_bytes), 0.05 * (is_fp8(element) ? 0.85 : 0.9))
        << "the bound is used";
  }
}

TEST(GroupQuantizer, all_variants_agree_on_groups_of_any_bits) {
  GroupQuantizer ways[kMostGroupQuantizers];
  const std::size_t known = group_quantizers_known(ways);
  std::mt19937 random(11);
  std::size_t exact = 0;
  for (int round = 0; round < 40'000; ++round) {
    const Element element = kNumbers[round % 4];
    const std::size_t group_bytes = group_of(element);
    // A range of exponents from a single one to all.
    const unsigned base = random() & 0x7FFF, bits = random() % 16;
    std::vector<std::uint16_t> numbers(64);
    for (std::uint16_t& number : numbers)
      number = static_cast<std::uint16_t>((base ^ (random() & ((1U << bits) - 1))) | (random() & 0x8000));
    const Bytes group = bytes_in(numbers, element);    // of fp8: the lower bits
    for (const float bound : {0.004F, 0.02F, 0.5F}) {  // the first one needs integers beyond 127
      std::int8_t q[64];
      const std::uint8_t code = ways[0].quantize(group.data(), element, bound, nullptr, q);
      exact += code == kExactGroup ? 1 : 0;
      ASSERT_TRUE(code != kExactGroup || std::count(q, q + 64, 0) == 64) << round;
      Bytes back(group_bytes);
      ways[0].restore(q, &code, 1, element, nullptr, back.data(), group_bytes);
      if (code != kExactGroup) {
        GroupLosses losses;
        losses.add(group.data(), back.data(), element, ways[0].compare(group.data(), back.data(), element));
        ASSERT_LE(losses.largest, bound) << round;
      }
      for (std::size_t i = 1; i < known; ++i) {
        std::int8_t other_q[64];
        ASSERT_EQ(ways[i].quantize(group.data(), element, bound, nullptr, other_q), code)
            << ways[i].name << round;
        ASSERT_TRUE(std::equal(q, q + 64, other_q)) << ways[i].name << round;
        Bytes other(group_bytes);
        ways[i].restore(q, &code, 1, element, nullptr, other.data(), group_bytes);
        ASSERT_EQ(other, back) << ways[i].name << round;
      }
    }
  }
  EXPECT_GT(exact, 1000U);
  EXPECT_LT(exact, 90'000U);
}

TEST(GroupQuantizer, every_step_and_integer_is_restored_to_the_nearest_number) {
  GroupQuantizer ways[kMostGroupQuantizers];
  const std::size_t known = group_quantizers_known(ways);
  // All integers, then groups of small ones, in which fp8 is looked up in fewer entries: alone, and with a
  // larger one at the first or the last place.
  std::vector<std::int8_t> q(7 * 64);
  for (int i = 0; i < 256; ++i)
    q[static_cast<std::size_t>(i)] = static_cast<std::int8_t>(std::max(i - 128, -127));
  for (std::size_t i = 256; i < q.size(); ++i) q[i] = static_cast<std::int8_t>(static_cast<int>(i % 64) - 31);
  for (std::size_t i = 256 + 63; i < q.size(); i += 64) q[i] = -31;
  q[256 + 64] = 32;
  q.back() = -64;
  for (const Element element : kNumbers) {
    for (unsigned code = 1; code < 256; ++code) {
      const std::vector<std::uint8_t> codes(q.size() / 64, static_cast<std::uint8_t>(code));
      std::vector<std::uint16_t> numbers;
      for (const std::int8_t each : q)
        numbers.push_back(bits_of(restored_number(each, code, element), element));
      const Bytes expected = bytes_in(numbers, element);
      for (std::size_t way = 0; way < known; ++way) {
        Bytes back(expected.size());
        ways[way].restore(q.data(), codes.data(), codes.size(), element, nullptr, back.data(),
                          group_of(element));
        ASSERT_EQ(back, expected) << ways[way].name << " " << code;
      }
    }
  }
}

TEST(GroupQuantizer, the_loss_of_a_changed_group_is_never_missed) {
  GroupQuantizer ways[kMostGroupQuantizers];
  const std::size_t known = group_quantizers_known(ways);
  constexpr double kInfinite = std::numeric_limits<double>::infinity();
  const auto loss = [&](std::size_t way, std::uint16_t before, std::uint16_t after,
                        Element element = Element::kBf16) {
    const std::uint16_t one = element == Element::kBf16 ? 0x3F80 : 0x38;
    std::vector<std::uint16_t> old(64, one), now(64, one);
    if (before == 0) std::fill(old.begin(), old.end(), 0);
    if (before == 0) std::fill(now.begin(), now.end(), 0);
    old[63] = before;
    now[63] = after;
    const Bytes group = bytes_in(old, element), back = bytes_in(now, element);
    GroupLosses losses;
    losses.add(group.data(), back.data(), element, ways[way].compare(group.data(), back.data(), element));
    return losses.largest;
  };
  for (std::size_t way = 0; way < known; ++way) {
    EXPECT_EQ(loss(way, 0x3F80, 0x3F80), 0);
    EXPECT_EQ(loss(way, 0x7FC0, 0x7FC0), 0) << "NaN that stays";
    EXPECT_EQ(loss(way, 0x7FC0, 0x3F80), kInfinite) << "NaN that changed";
    EXPECT_EQ(loss(way, 0x3F80, 0x7FC0), kInfinite) << "a number that became NaN";
    EXPECT_EQ(loss(way, 0x7F80, 0x3F80), kInfinite) << "infinity that changed";
    EXPECT_EQ(loss(way, 0, 0x3F80), kInfinite) << "a zero that changed among zeros";
    EXPECT_EQ(loss(way, 0, 0x8000), 0) << "the sign of a zero";
    EXPECT_NEAR(loss(way, 0x3F80, 0x4000), 0.125, 1e-12);
    EXPECT_EQ(loss(way, 0x7F, 0x7F, Element::kE4m3), 0) << "NaN that stays";
    EXPECT_EQ(loss(way, 0x7F, 0x7E, Element::kE4m3), kInfinite) << "NaN that changed";
    EXPECT_EQ(loss(way, 0x38, 0xFF, Element::kE4m3), kInfinite) << "a number that became NaN";
    EXPECT_EQ(loss(way, 0, 1, Element::kE4m3), kInfinite) << "a zero that changed among zeros";
    EXPECT_EQ(loss(way, 0, 0x80, Element::kE4m3), 0) << "the sign of a zero";
    EXPECT_NEAR(loss(way, 0x38, 0x40, Element::kE4m3), 0.125, 1e-12);
  }
}

TEST(RowCoder, a_class_has_the_integers_that_belong_to_it) {
  for (std::size_t row_class = 0; row_class < kRowClasses; ++row_class)
    EXPECT_EQ(largest_of_class(row_class), most_of_class(row_class));
  for (unsigned largest = 0; largest <= 127; ++largest) {
    for (std::size_t sum = largest; sum <= 16 * largest; ++sum) {
      const std::uint8_t row_class = class_of(sum, static_cast<std::uint8_t>(largest));
      ASSERT_LT(row_class, kRowClasses);
      ASSERT_LE(largest, largest_of_class(row_class)) << sum;
      // The next class would cost bits.
      ASSERT_TRUE(row_class == 0 || sum >= std::size_t{1} << (row_class - 1) ||
                  largest > largest_of_class(row_class - 1U))
          << sum << " " << largest;
    }
  }
}

TEST(RowCoder, all_variants_code_the_same_words) {
  RowCoder ways[kMostRowCoders];
  const std::size_t known = row_coders_known(ways);
  std::mt19937 random(3);
  for (int round = 0; round < 300; ++round) {
    const std::size_t rows = 1 + random() % 16, stride = 64 * (1 + random() % 3);
    std::array<std::uint8_t, 64> classes;
    for (std::uint8_t& each : classes) each = static_cast<std::uint8_t>(random() % kRowClasses);
    std::vector<std::int8_t> q(rows * stride), expected;
    for (std::size_t row = 0; row < rows; ++row) {
      for (std::size_t channel = 0; channel < 64; ++channel) {
        const int most = largest_of_class(classes[channel]);
        q[row * stride + channel] =
            static_cast<std::int8_t>(static_cast<int>(random() % static_cast<unsigned>(2 * most + 1)) - most);
        expected.push_back(q[row * stride + channel]);
      }
    }
    // Any state of an encoder, the largest too.
    RowStates before;
    for (std::uint32_t& state : before) {
      state = std::max(static_cast<std::uint32_t>(random()) >> random() % 16, kFirstRowState);
      if (random() % 8 == 0) state = 0xFFFFFFFF;
    }
    Bytes first;
    RowStates first_states{};
    for (std::size_t i = 0; i < known; ++i) {
      Bytes room(RowCoder::kMostBelow + 128 * rows);
      RowStates states = before;
      std::byte* const end = room.data() + room.size();
      const std::byte* const begin = ways[i].encode(states, classes.data(), q.data(), rows, stride, end);
      const Bytes words(begin, static_cast<const std::byte*>(end));
      if (i == 0) {
        first = words;
        first_states = states;
      }
      ASSERT_EQ(words, first) << ways[i].name;
      ASSERT_EQ(states, first_states) << ways[i].name;
      // A buffer of exactly the bytes that may be read.
      const auto exact = std::make_unique<std::byte[]>(RowCoder::most_read(rows));
      std::copy(words.begin(), words.end(), exact.get());
      std::vector<std::int8_t> back(64 * rows);
      EXPECT_EQ(ways[i].decode(states, classes.data(), exact.get(), rows, back.data()),
                exact.get() + words.size());
      ASSERT_EQ(back, expected) << ways[i].name;
      ASSERT_EQ(states, before) << ways[i].name;
    }
  }
}

TEST(RowCoder, all_variants_decode_any_words_to_the_same_integers) {
  RowCoder ways[kMostRowCoders];
  const std::size_t known = row_coders_known(ways);
  std::mt19937 random(4);
  for (int round = 0; round < 300; ++round) {
    const std::size_t rows = 1 + random() % 16, bytes = RowCoder::most_read(rows);
    const auto words = std::make_unique<std::byte[]>(bytes);
    for (std::size_t i = 0; i < bytes; ++i) words[i] = static_cast<std::byte>(round == 0 ? 0 : random());
    std::array<std::uint8_t, 64> classes;
    for (std::uint8_t& each : classes) each = static_cast<std::uint8_t>(random() % kRowClasses);
    RowStates before;
    for (std::uint32_t& state : before)
      state = round == 0 ? 0 : static_cast<std::uint32_t>(random()) >> random() % 32;
    std::vector<std::int8_t> first(64 * rows), q(64 * rows);
    RowStates first_states = before;
    const std::byte* const end =
        ways[0].decode(first_states, classes.data(), words.get(), rows, first.data());
    EXPECT_LE(end, words.get() + 128 * rows);
    for (std::size_t i = 1; i < known; ++i) {
      RowStates states = before;
      EXPECT_EQ(ways[i].decode(states, classes.data(), words.get(), rows, q.data()), end) << ways[i].name;
      EXPECT_EQ(q, first) << ways[i].name;
      EXPECT_EQ(states, first_states) << ways[i].name;
    }
  }
}

TEST(GroupQuantizer, steps_are_powers_of_the_eighth_root_of_two) {
  constexpr float kMantissas[] = {0x1p0F,        0x1.172b84p0F, 0x1.306fep0F,  0x1.4bfdaep0F,
                                  0x1.6a09e6p0F, 0x1.8ace54p0F, 0x1.ae89fap0F, 0x1.d5818ep0F};
  for (int code = 1; code < 256; ++code) {
    const float step = step_of(static_cast<std::uint8_t>(code));
    EXPECT_EQ(step, std::ldexp(kMantissas[code % 8], code / 8 - 24)) << code;
    EXPECT_FLOAT_EQ(step, std::exp2(static_cast<float>(code - 192) / 8));
  }
  EXPECT_EQ(step_of(192), 1);
  EXPECT_EQ(step_of(184), 0.5);
}

TEST(GroupQuantizer, every_number_of_fp16_is_restored_to_itself_or_rounded_to_even) {
  GroupQuantizer ways[kMostGroupQuantizers];
  (void)group_quantizers_known(ways);
  // Integers times a power of two are exact down to the subnormal numbers.
  for (const int code : {192, 192 - 8 * 10, 192 - 8 * 20, 192 - 8 * 23}) {
    std::int8_t q[64];
    for (int i = 0; i < 64; ++i) q[i] = static_cast<std::int8_t>(i - 32);
    const auto step = static_cast<std::uint8_t>(code);
    Bytes back(kGroupBytes);
    ways[0].restore(q, &step, 1, Element::kFp16, nullptr, back.data(), kGroupBytes);
    for (std::size_t i = 0; i < 64; ++i)
      EXPECT_EQ(value_at(back, 2 * i, Element::kFp16), q[i] * double{step_of(step)}) << code << " " << i;
  }
}

TEST(LossyCodecRounding, a_loss_is_never_rounded_down) {
  for (const double error : {0.05, 0.1, 0.35, 0.7, 1.0 / 3, 0.0, 0.5}) {
    EXPECT_GE(static_cast<double>(LossyCodec::rounded_up(error)), error);
    EXPECT_NEAR(LossyCodec::rounded_up(error), error, 1e-7);
  }
}

}  // namespace
}  // namespace kv_offload
