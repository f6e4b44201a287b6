// SPDX-License-Identifier: Apache-2.0
// How long does a prompt of 8,192 tokens take from a directory: raw, encoded, and as `auto` decides?
//
//   codec_tier ROUNDS TOKEN_BYTES DIRECTORY FILE...      files of K/V in bf16 (payload_codec.py makes them)
//
// Three fs tiers with the default threads, each with its own root below DIRECTORY. Each first writes and
// reads another prompt several times, so that `auto` has measurements as after the first minutes of a server.
// Then the prompt is written, and read once per round by each of the three in turn. Uses O_DIRECT, because
// bytes in the page cache would not be read from the device. One JSON object per file.
#include <fmt/format.h>

#include <array>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "backends/fs/tier.h"
#include "base/aligned_buffer.h"
#include "base/clock.h"
#include "bench.h"
#include "kv_chunks.h"
#include "record/compression_choice.h"
#include "record/idle_cores.h"
#include "remote_bench.h"

namespace kv_offload {
namespace {

using bench::Bytes;
using bench::die;
using bench::kChunk;

constexpr std::size_t kPromptTokens = 8192;
constexpr int kTimesToLearn = 6;
constexpr std::array kWays{Compress::kNone, Compress::kZstd, Compress::kAuto};

class Way {
 public:
  Way(Compress compress, const std::string& directory, std::size_t chunks) : compress_(compress) {
    FsTierOptions options;
    options.root_dir = directory + "/" + to_string(compress);
    options.max_bytes =
        (2 + kTimesToLearn) * chunks * (kChunk + (std::size_t{64} << 10)) + (std::size_t{64} << 20);
    options.namespace_json = "{}";
    options.o_direct = DirectMode::kOn;
    options.op_timeout = std::chrono::minutes(5);
    CompressionOptions choice{.compress = compress, .elements = {Element::kBf16}};
    choice.idle_cores = [cores = std::make_shared<IdleCores>(clock_)] { return cores->now(); };
    options.form.compression = std::make_shared<CompressionChoice>(choice);
    tier_ = make_fs_tier(options);
  }

  Compress compress() const { return compress_; }
  std::string about() const { return tier_->codec_reason(); }
  std::uint64_t encoded_bytes() const { return tier_->stats().encoded_raw_bytes; }

  // Returns the seconds until all chunks are transferred. Their keys begin at `first`.
  double move(OpKind kind, std::vector<AlignedBuffer>& rows, std::size_t first) {
    const double start = bench::now();
    (void)bench::pass(*tier_, kind, rows, kChunk, rows.size(), first);
    return bench::now() - start;
  }

 private:
  const Compress compress_;
  const SteadyClock clock_;
  std::unique_ptr<Tier> tier_;
};

void run_file(int rounds, std::size_t token_bytes, const std::string& directory, const std::string& file) {
  const Bytes data = bench::whole_chunks(file);
  const std::size_t chunks = kPromptTokens * token_bytes / kChunk;
  std::vector<AlignedBuffer> written, read;
  for (std::size_t i = 0; i < chunks; ++i) {
    written.emplace_back(kChunk);
    std::memcpy(written.back().data(), data.data() + i * kChunk % data.size(), kChunk);
    read.emplace_back(kChunk);
    std::memset(read.back().data(), 0, kChunk);
  }
  std::vector<std::unique_ptr<Way>> ways;
  std::vector<std::vector<double>> seconds(kWays.size());
  std::vector<double> write_seconds, encoded_shares;
  for (const Compress compress : kWays) {
    ways.push_back(std::make_unique<Way>(compress, directory, chunks));
    for (int time = 0; time < kTimesToLearn; ++time) {
      const std::size_t other = (1 + static_cast<std::size_t>(time)) * chunks;
      (void)ways.back()->move(OpKind::kWrite, written, other);
      for (int again = 0; again < 2; ++again) (void)ways.back()->move(OpKind::kRead, read, other);
    }
    const std::uint64_t encoded_before = ways.back()->encoded_bytes();
    write_seconds.push_back(ways.back()->move(OpKind::kWrite, written, 0));
    const auto encoded = static_cast<double>(ways.back()->encoded_bytes() - encoded_before);
    encoded_shares.push_back(encoded / static_cast<double>(chunks * kChunk));
  }
  for (int round = 0; round < rounds; ++round) {
    for (std::size_t i = 0; i < ways.size(); ++i) {
      for (AlignedBuffer& row : read) std::memset(row.data(), 0, kChunk);
      seconds[i].push_back(ways[i]->move(OpKind::kRead, read, 0));
      for (std::size_t chunk = 0; chunk < chunks; ++chunk) {
        if (std::memcmp(read[chunk].data(), written[chunk].data(), kChunk) != 0) die("other bytes came back");
      }
    }
  }
  fmt::print(R"({{"file": "{}", "prompt_bytes": {}, "rounds": {})", file, chunks * kChunk, rounds);
  for (std::size_t i = 0; i < ways.size(); ++i) {
    std::vector<double> faster;  // than raw, round by round
    for (std::size_t round = 0; round < seconds[i].size(); ++round)
      faster.push_back(seconds[0][round] / seconds[i][round]);
    fmt::print(
        R"(, "{}": {{"seconds": {:.4f}, "times_as_fast": {:.3f}, "write_seconds": {:.4f}, "encoded": {:.3f}, "about": "{}"}})",
        to_string(ways[i]->compress()), bench::median(seconds[i]), bench::median(faster), write_seconds[i],
        encoded_shares[i], ways[i]->about());
  }
  fmt::print("}}\n");
  std::fflush(stdout);
}

}  // namespace
}  // namespace kv_offload

int main(int count, char** words) {
  if (count < 5) {
    fmt::print(stderr, "codec_tier ROUNDS TOKEN_BYTES DIRECTORY FILE...\n");
    return 2;
  }
  const std::string directory = words[3];
  for (int i = 4; i < count; ++i) {
    const std::string own = fmt::format("{}/{}", directory, i);
    std::filesystem::create_directories(own);
    kv_offload::run_file(std::atoi(words[1]), std::strtoull(words[2], nullptr, 10), own, words[i]);
    std::filesystem::remove_all(own);
  }
}
