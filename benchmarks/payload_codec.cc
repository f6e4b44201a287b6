// SPDX-License-Identifier: Apache-2.0
// How fast is the payload codec compared with the lower bound of its parts, and what does it gain?
//
//   payload_codec ROUNDS FILE...       files of K/V in bf16 (payload_codec.py makes them)
//   payload_codec restore KEYS VALUES RUN FILE OUT [ELEMENT [FACTORS]]
//
// The second form encodes a file with these bounds for keys and values, which alternate in runs of RUN bytes,
// and writes the decoded bytes to OUT. ELEMENT is bf16 (the default), e4m3 or e5m2. FACTORS is a file of
// float32 numbers that lower the bounds, one for each 64 elements of a block; chunks then have whole blocks,
// and the end of FILE may be left out.
//
// The lower bound: zstd alone on the separated exponents, in cache and in blocks of the codec's size, plus
// one memcpy of the other bytes that the codec reads and writes. All are measured in the same round, one
// after the other. Seconds are CPU time of the thread, so figures are per core. One JSON object per line.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#define ZSTD_STATIC_LINKING_ONLY
#include <zstd.h>
#if defined(KV_OFFLOAD_LZ4)
#include <lz4.h>
#endif

#include "bench.h"
#include "kv_chunks.h"
#include "record/group_quantizer.h"
#include "record/lossy_codec.h"
#include "record/payload_codec.h"
#include "record/split_planes.h"

namespace kv_offload {
namespace {

using bench::Bytes;
using bench::die;
using bench::kChunk;
using bench::median;

constexpr std::size_t kPlane = 64 << 10;  // of a block of the codec

double cpu_now() {
  timespec time{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

double seconds_of(const std::function<void()>& work) {
  const double begin = cpu_now();
  work();
  return cpu_now() - begin;
}

// A compression method: encode returns the number of bytes, or 0 if the chunk stays raw.
struct Way {
  std::string name;
  std::function<std::size_t(std::byte* chunk, Bytes& out)> encode;
  std::function<bool(const Bytes& in, std::size_t bytes, std::byte* chunk)> decode;
  bool is_lossy = false;
};

struct Result {
  std::vector<double> in, out;  // seconds per round
  double ratio = 1;
};

class Bench {
 public:
  explicit Bench(Bytes data) : data_(std::move(data)), chunks_(data_.size() / kChunk) {
    back_.resize(data_.size());
    for (std::size_t i = 0; i < chunks_; ++i) encoded_.emplace_back(3 * kChunk);
    SplitPlanes ways[kMostSplitPlanes];
    (void)split_planes_known(ways);
    upper_.resize(data_.size() / 2);
    lower_.resize(data_.size() / 2);
    ways[0].split(data_.data(), data_.size() / 2, upper_.data(), lower_.data());
    split_ = ways[0];
  }

  void round(const std::vector<Way>& ways) {
    add_memcpy();
    for (const Way& way : ways) add(way);
    add_bound();
  }
  std::map<std::string, Result> results;
  std::size_t bytes() const { return data_.size(); }
  const char* lossless_instructions() const { return split_.name; }

 private:
  void add_memcpy() {
    const double seconds = seconds_of([&] { std::memcpy(back_.data(), data_.data(), data_.size()); });
    results["memcpy"].in.push_back(seconds);
    results["memcpy"].out.push_back(seconds);
  }
  void add(const Way& way) {
    Result& result = results[way.name];
    std::vector<std::size_t> sizes(chunks_);
    std::size_t stored = 0;
    result.in.push_back(seconds_of([&] {
      for (std::size_t i = 0; i < chunks_; ++i) sizes[i] = way.encode(data_.data() + i * kChunk, encoded_[i]);
    }));
    result.out.push_back(seconds_of([&] {
      for (std::size_t i = 0; i < chunks_; ++i) {
        std::byte* to = back_.data() + i * kChunk;
        if (sizes[i] == 0) {
          std::memcpy(to, data_.data() + i * kChunk, kChunk);
        } else if (!way.decode(encoded_[i], sizes[i], to)) {
          die("it does not decode");
        }
      }
    }));
    if (!way.is_lossy && back_ != data_) die("other bytes came back");
    for (const std::size_t size : sizes) stored += size == 0 ? kChunk : size;
    result.ratio = static_cast<double>(data_.size()) / static_cast<double>(stored);
  }
  // The frames stay where decoding finds them; the plane that comes out is always the same memory.
  void add_bound() {
    Bytes frames(upper_.size() + upper_.size() / 8), plane(kPlane);
    std::vector<std::size_t> sizes;
    std::size_t coded = 0;
    double in = 0;
    for (std::size_t at = 0; at + kPlane <= upper_.size(); at += kPlane) {
      std::memcpy(plane.data(), upper_.data() + at, kPlane);  // into the CPU cache, as in the codec
      in += seconds_of([&] {
        sizes.push_back(
            ZSTD_compress2(to_, frames.data() + coded, frames.size() - coded, plane.data(), kPlane));
      });
      coded += sizes.back();
    }
    const double out = seconds_of([&] {
      std::size_t at = 0;
      for (const std::size_t size : sizes) {
        (void)ZSTD_decompressDCtx(from_, plane.data(), kPlane, frames.data() + at, size);
        at += size;
      }
    });
    // It reads the raw bytes and writes the stored ones, or the reverse.
    const std::size_t moved = (data_.size() + lower_.size() + coded) / 2;
    const double copied = seconds_of([&] { std::memcpy(back_.data(), data_.data(), moved); });
    Result& bound = results["bound"];
    bound.in.push_back(in + copied);
    bound.out.push_back(out + copied);
    bound.ratio = static_cast<double>(data_.size()) / static_cast<double>(lower_.size() + coded);
  }

 public:
  ZSTD_CCtx* to_ = nullptr;
  ZSTD_DCtx* from_ = nullptr;

 private:
  Bytes data_;
  std::size_t chunks_;
  Bytes back_, upper_, lower_;
  std::vector<Bytes> encoded_;
  SplitPlanes split_{};
};

ZSTD_CCtx* context(int level, bool codes) {
  ZSTD_CCtx* made = ZSTD_createCCtx();
  ZSTD_CCtx_setParameter(made, ZSTD_c_compressionLevel, level);
  if (codes) {
    ZSTD_CCtx_setParameter(made, ZSTD_c_hashLog, ZSTD_HASHLOG_MIN);
    ZSTD_CCtx_setParameter(made, ZSTD_c_literalCompressionMode, ZSTD_ps_enable);
  }
  return made;
}

// The bounds of lossy methods. Their encoder measures the loss and stops if a chunk exceeds the bound.
constexpr ErrorBounds kBounds[] = {{0.02, 0.02}, {0.05, 0.05}, {0.1, 0.1}, {0.2, 0.2}};

// factors: null, or must outlive the method.
Way lossy_way(LossyCodec& codec, const ErrorBounds& bounds, const KvRuns& runs,
              Element element = Element::kBf16, const BoundFactors* factors = nullptr,
              std::size_t chunk_bytes = kChunk) {
  return {fmt::format("lossy:{} {}", bounds.keys, codec.instructions()),
          [&codec, bounds, runs, element, factors, chunk_bytes](std::byte* chunk, Bytes& out) {
            const Shard shard(chunk, chunk_bytes);
            std::uint64_t used = 0;
            Loss loss;
            if (LossyCodec::encoded_bytes_at_most({&shard, 1}) > out.size() ||
                !codec.encode({&shard, 1}, element, bounds, runs, factors, out, &used, &loss) || used == 0)
              die("it does not encode with loss");
            return static_cast<std::size_t>(used);
          },
          [&codec, element, chunk_bytes](const Bytes& in, std::size_t bytes, std::byte* chunk) {
            const Shard shard(chunk, chunk_bytes);
            return codec.decode({in.data(), bytes}, element, {&shard, 1}).is_ok();
          },
          true};
}

std::vector<Way> ways_of(PayloadCodec& codec, std::deque<LossyCodec>& lossy, ZSTD_DCtx* from) {
  const auto encode = [&codec](Element element) {
    return [&codec, element](std::byte* chunk, Bytes& out) {
      const Shard shard(chunk, kChunk);
      std::uint64_t used = 0;
      if (!codec.encode({&shard, 1}, element, out, &used)) die("it does not encode");
      return static_cast<std::size_t>(used);
    };
  };
  const auto decode = [&codec](Element element) {
    return [&codec, element](const Bytes& in, std::size_t bytes, std::byte* chunk) {
      const Shard shard(chunk, kChunk);
      return codec.decode({in.data(), bytes}, element, {&shard, 1}).is_ok();
    };
  };
  std::vector<Way> ways{{"codec", encode(Element::kBf16), decode(Element::kBf16)}};
  for (LossyCodec& variant : lossy) {
    for (const ErrorBounds& bounds : kBounds) ways.push_back(lossy_way(variant, bounds, {}));
  }
  ways.push_back({"zstd-1 as it is",
                  [to = context(1, false)](std::byte* chunk, Bytes& out) {
                    return ZSTD_compress2(to, out.data(), out.size(), chunk, kChunk);
                  },
                  [from](const Bytes& in, std::size_t bytes, std::byte* chunk) {
                    return ZSTD_decompressDCtx(from, chunk, kChunk, in.data(), bytes) == kChunk;
                  }});
#if defined(KV_OFFLOAD_LZ4)
  ways.push_back({"lz4 as it is",
                  [](std::byte* chunk, Bytes& out) {
                    return static_cast<std::size_t>(LZ4_compress_default(
                        reinterpret_cast<const char*>(chunk), reinterpret_cast<char*>(out.data()),
                        static_cast<int>(kChunk), static_cast<int>(out.size())));
                  },
                  [](const Bytes& in, std::size_t bytes, std::byte* chunk) {
                    return LZ4_decompress_safe(reinterpret_cast<const char*>(in.data()),
                                               reinterpret_cast<char*>(chunk), static_cast<int>(bytes),
                                               static_cast<int>(kChunk)) == static_cast<int>(kChunk);
                  }});
#endif
  return ways;
}

int run(int rounds, const std::vector<std::string>& files) {
  PayloadCodec codec;
  std::deque<LossyCodec> lossy;  // for each instruction set of this CPU
  for (std::size_t variant = 0; variant < LossyCodec::variants(); ++variant) lossy.emplace_back(variant);
  for (const std::string& file : files) {
    Bench bench(bench::whole_chunks(file));
    bench.to_ = context(ZSTD_minCLevel(), true);
    bench.from_ = ZSTD_createDCtx();
    const std::vector<Way> ways = ways_of(codec, lossy, bench.from_);
    for (int i = 0; i <= rounds; ++i) {
      bench.round(ways);
      if (i == 0) bench.results.clear();  // the first warms up
    }
    const Result& bound = bench.results["bound"];
    for (const auto& [name, result] : bench.results) {
      std::vector<double> in, out;  // of the bound, round by round
      for (std::size_t i = 0; i < result.in.size(); ++i) {
        in.push_back(bound.in[i] / result.in[i]);
        out.push_back(bound.out[i] / result.out[i]);
      }
      const double bytes = static_cast<double>(bench.bytes());
      fmt::print(
          R"({{"file": "{}", "way": "{}", "bytes": {}, "rounds": {}, "lossless_instructions": "{}", "ratio": {:.4f}, )"
          R"("in": {:.4g}, "out": {:.4g}, "in_of_bound": {:.3f}, "out_of_bound": {:.3f}}})"
          "\n",
          file, name, bench.bytes(), rounds, bench.lossless_instructions(), result.ratio,
          bytes / median(result.in), bytes / median(result.out), median(in), median(out));
      std::fflush(stdout);
    }
  }
  return 0;
}

// Returns the factors of a block for one shard. weights: codes of the channels of each group, or empty.
BoundFactors of_block(const std::vector<float>& factors, const std::vector<std::uint8_t>& weights) {
  std::vector<BoundFactors::OfGroup> groups;
  std::map<std::vector<std::uint8_t>, std::uint16_t> rows;
  std::vector<std::uint8_t> table;
  for (std::size_t i = 0; i < factors.size(); ++i) {
    std::uint16_t row = 0;
    if (!weights.empty()) {
      const auto* const begin = weights.data() + i * kQuantizedGroup;
      const std::vector<std::uint8_t> codes(begin, begin + kQuantizedGroup);
      const auto [found, is_new] = rows.emplace(codes, static_cast<std::uint16_t>(rows.size() + 1));
      if (is_new) table.insert(table.end(), codes.begin(), codes.end());
      row = found->second;
    }
    groups.push_back({factors[i], row});
  }
  return BoundFactors({std::move(groups)}, std::move(table));
}

// Encodes a file in chunks and writes the decoded bytes. Prints the ratio, that of the lossless codec, and
// the speeds: each chunk is coded three times, and the fastest counts.
int restore(const ErrorBounds& bounds, const KvRuns& runs, Element element, const std::vector<float>& factors,
            const std::vector<std::uint8_t>& weights, const char* file, const char* out) {
  LossyCodec codec;
  PayloadCodec lossless;
  std::optional<BoundFactors> lowered;
  if (!factors.empty()) lowered.emplace(of_block(factors, weights));
  const std::size_t block = std::max<std::size_t>(factors.size(), 1) * group_bytes_of(element);
  const std::size_t chunk = kChunk / block * block;
  const Way way = lossy_way(codec, bounds, runs, element, lowered ? &*lowered : nullptr, chunk);
  Bytes data = bench::whole_chunks(file), back(data.size()), encoded(3 * kChunk);
  std::size_t stored = 0, stored_lossless = 0;
  double in = 0, decoding = 0;
  std::size_t at = 0;
  for (; at + chunk <= data.size(); at += chunk) {
    std::size_t used = 0;
    double encode_seconds = HUGE_VAL, decode_seconds = HUGE_VAL;
    for (int round = 0; round < 3; ++round) {
      encode_seconds =
          std::min(encode_seconds, seconds_of([&] { used = way.encode(data.data() + at, encoded); }));
      decode_seconds = std::min(decode_seconds, seconds_of([&] {
                                  if (!way.decode(encoded, used, back.data() + at)) die("it does not decode");
                                }));
    }
    in += encode_seconds;
    decoding += decode_seconds;
    stored += used;
    const Shard shard(data.data() + at, chunk);
    std::uint64_t bytes = 0;
    if (!lossless.encode({&shard, 1}, element, encoded, &bytes)) die("it does not encode");
    stored_lossless += bytes == 0 ? chunk : bytes;
  }
  std::FILE* const to = std::fopen(out, "wb");
  if (to == nullptr || std::fwrite(back.data(), 1, back.size(), to) != back.size() || std::fclose(to) != 0)
    die(fmt::format("{} cannot be written", out));
  const auto bytes = static_cast<double>(at);
  fmt::print(R"({{"bytes": {}, "ratio": {:.4f}, "lossless_ratio": {:.4f}, "in": {:.4g}, "out": {:.4g}}})"
             "\n",
             at, bytes / static_cast<double>(stored), bytes / static_cast<double>(stored_lossless),
             bytes / in, bytes / decoding);
  return 0;
}

// Returns the numbers in a file.
template <typename Number>
std::vector<Number> numbers_in(const char* path) {
  std::vector<Number> numbers;
  std::FILE* const file = std::fopen(path, "rb");
  if (file == nullptr) bench::die(fmt::format("{} cannot be read", path));
  for (Number number{}; std::fread(&number, sizeof(number), 1, file) == 1;) numbers.push_back(number);
  std::fclose(file);
  return numbers;
}

// Returns nullopt unless the whole word is a number.
template <typename Number>
std::optional<Number> number_of(std::string_view word) {
  Number number{};
  const auto [end, failed] = std::from_chars(word.data(), word.data() + word.size(), number);
  return failed == std::errc() && end == word.data() + word.size() ? std::optional(number) : std::nullopt;
}

}  // namespace
}  // namespace kv_offload

int main(int count, char** words) {
  using namespace kv_offload;
  if (count < 3) {
    fmt::print(stderr,
               "payload_codec ROUNDS FILE... | payload_codec restore KEYS VALUES RUN FILE OUT [ELEMENT "
               "[FACTORS [WEIGHTS]]]\n");
    return 2;
  }
  if (count >= 7 && count <= 10 && std::string_view(words[1]) == "restore") {
    const auto keys = number_of<double>(words[2]), values = number_of<double>(words[3]);
    const auto run = number_of<std::uint32_t>(words[4]);
    const auto is_bound = [](const std::optional<double>& error) {
      return error && *error >= LossyCodec::kLeastError && *error <= LossyCodec::kMostError;
    };
    if (!is_bound(keys) || !is_bound(values) || !run || *run == 0)
      bench::die(fmt::format("restore {} {} {}: expected bounds from {} to {} and a number of bytes above 0",
                             words[2], words[3], words[4], double{LossyCodec::kLeastError},
                             double{LossyCodec::kMostError}));
    const std::string_view name = count >= 8 ? words[7] : "bf16";
    const Element element = name == "e4m3"   ? Element::kE4m3
                            : name == "e5m2" ? Element::kE5m2
                            : name == "bf16" ? Element::kBf16
                                             : Element::kBytes;
    if (element == Element::kBytes) bench::die(fmt::format("{}: expected bf16, e4m3 or e5m2", name));
    const auto factors = count >= 9 ? numbers_in<float>(words[8]) : std::vector<float>();
    const auto weights = count == 10 ? numbers_in<std::uint8_t>(words[9]) : std::vector<std::uint8_t>();
    if (!weights.empty() && weights.size() != factors.size() * kQuantizedGroup)
      bench::die(fmt::format("{}: expected {} weights for each factor", words[9], kQuantizedGroup));
    return restore({*keys, *values}, {*run, *run}, element, factors, weights, words[5], words[6]);
  }
  return run(std::atoi(words[1]), {words + 2, words + count});
}
