// SPDX-License-Identifier: Apache-2.0
#include "record/payload_codec.h"

#include <gtest/gtest.h>
#include <zstd.h>

#include <algorithm>
#include <latch>
#include <memory>
#include <numeric>
#include <thread>

#include "record/numbers_for_tests.h"

namespace kv_offload {
namespace {

using testing::Bytes;
using testing::make_payload;
using testing::Payload;

constexpr std::size_t kBlock = 128 << 10;  // block size of the format
constexpr Element kElements[] = {Element::kBytes, Element::kBf16, Element::kFp16};

// Shards in separate buffers of exactly their lengths, so that a sanitizer sees accesses beyond them.
class Shards {
 public:
  explicit Shards(const std::vector<std::size_t>& lengths) {
    for (const std::size_t length : lengths) {
      memory_.push_back(std::make_unique<std::byte[]>(length));
      shards_.emplace_back(memory_.back().get(), length);
    }
  }
  Shards(const std::vector<std::size_t>& lengths, const Bytes& payload) : Shards(lengths) {
    std::size_t at = 0;
    for (const Shard& shard : shards_) {
      std::copy_n(payload.begin() + static_cast<std::ptrdiff_t>(at), shard.size(), shard.begin());
      at += shard.size();
    }
  }
  std::span<const Shard> all() const { return shards_; }
  Bytes joined() const {
    Bytes bytes;
    for (const Shard& shard : shards_) bytes.insert(bytes.end(), shard.begin(), shard.end());
    return bytes;
  }

 private:
  std::vector<std::unique_ptr<std::byte[]>> memory_;
  std::vector<Shard> shards_;
};

struct PayloadCodecTest : ::testing::Test {
  // Returns the output of encode(). Empty: the payload is to be stored raw.
  Bytes encoded(const Shards& shards, Element element) {
    const std::uint64_t room = PayloadCodec::encoded_bytes_at_most(shards.all());
    const auto out = std::make_unique<std::byte[]>(room);
    std::uint64_t used = 99;
    const Status status = codec.encode(shards.all(), element, {out.get(), room}, &used);
    EXPECT_TRUE(status) << status.to_string();
    EXPECT_LE(used, room);
    return {out.get(), out.get() + used};
  }
  Bytes encoded(const Bytes& payload, Element element) {
    return encoded(Shards({payload.size()}, payload), element);
  }

  // Decodes from a buffer of exactly these bytes.
  Status decode(const Bytes& in, Element element, const Shards& shards) {
    const auto exact = std::make_unique<std::byte[]>(in.size());
    std::copy(in.begin(), in.end(), exact.get());
    return codec.decode({exact.get(), in.size()}, element, shards.all());
  }
  StatusKind decoded_as(const Bytes& in, Element element, std::size_t bytes) {
    return decode(in, element, Shards({bytes})).kind();
  }

  // Encodes these shards and decodes into shards of other lengths. Returns the ratio; 1: stored raw.
  double round_trip(const std::vector<std::size_t>& lengths, const std::vector<std::size_t>& others,
                    Payload kind, Element element) {
    const std::size_t bytes = std::accumulate(lengths.begin(), lengths.end(), std::size_t{0});
    const Bytes payload = make_payload(kind, element, bytes);
    const Bytes stored = encoded(Shards(lengths, payload), element);
    if (stored.empty()) return 1;
    const Shards back(others);
    const Status status = decode(stored, element, back);
    EXPECT_TRUE(status) << status.to_string();
    EXPECT_TRUE(back.joined() == payload) << bytes << " bytes";
    return static_cast<double>(bytes) / static_cast<double>(stored.size());
  }
  double round_trip(std::size_t bytes, Payload kind, Element element) {
    return round_trip({bytes}, {bytes}, kind, element);
  }

  PayloadCodec codec;
};

// Builds a block by hand, as specified in record-format.md.
Bytes block_of(const Bytes& kept, const Bytes& frame) {
  Bytes block(4);
  for (std::size_t i = 0; i < 4; ++i) block[i] = static_cast<std::byte>(frame.size() >> 8 * i);
  block.insert(block.end(), kept.begin(), kept.end());
  block.insert(block.end(), frame.begin(), frame.end());
  return block;
}

Bytes frame_of(const Bytes& content, bool says_its_size = true) {
  Bytes frame(ZSTD_compressBound(content.size()));
  const std::unique_ptr<ZSTD_CCtx, std::size_t (*)(ZSTD_CCtx*)> context(ZSTD_createCCtx(), ZSTD_freeCCtx);
  ZSTD_CCtx_setParameter(context.get(), ZSTD_c_contentSizeFlag, says_its_size ? 1 : 0);
  frame.resize(ZSTD_compress2(context.get(), frame.data(), frame.size(), content.data(), content.size()));
  return frame;
}

Bytes operator+(Bytes left, const Bytes& right) {
  left.insert(left.end(), right.begin(), right.end());
  return left;
}

TEST_F(PayloadCodecTest, every_kind_of_payload_decodes_to_the_same_bytes) {
  for (const Element element : kElements) {
    for (const Payload kind : testing::kPayloads) {
      SCOPED_TRACE(static_cast<int>(kind));
      round_trip(3 * kBlock + 777, kind, element);
    }
  }
}

TEST_F(PayloadCodecTest, lengths_around_a_vector_and_a_block_work) {
  for (const std::size_t base : {std::size_t{0}, 2 * kBlock - 70}) {
    for (std::size_t bytes = base; bytes < base + 140; base == 0 ? bytes += 1 : bytes += 7) {
      for (const Element element : kElements) round_trip(bytes, Payload::kConstant, element);
    }
  }
  for (std::size_t bytes = 4096; bytes < 4096 + 130; ++bytes) {
    EXPECT_GT(round_trip(bytes, Payload::kKv, Element::kBf16), 1.1) << bytes;
  }
}

TEST_F(PayloadCodecTest, shards_may_end_anywhere) {
  // Encodes from one set of shards and decodes into another: the stored bytes do not depend on the shard
  // layout.
  const std::vector<std::size_t> many{1, kBlock - 1, 0, 3, kBlock, 5000, 0, 2 * kBlock + 9, 77, 0};
  const std::size_t bytes = std::accumulate(many.begin(), many.end(), std::size_t{0});
  std::vector<std::size_t> small(64, bytes / 64);
  small.back() += bytes % 64;
  for (const Element element : kElements) {
    round_trip(many, {bytes}, Payload::kKv, element);
    round_trip({bytes}, many, Payload::kConstant, element);
    round_trip(small, many, Payload::kKv, element);
  }
}

TEST_F(PayloadCodecTest, reaches_the_expected_ratios) {
  EXPECT_GT(round_trip(4 * kBlock, Payload::kKv, Element::kBf16), 1.4);
  EXPECT_GT(round_trip(4 * kBlock, Payload::kKv, Element::kFp16), 1.1);
  EXPECT_GT(round_trip(4 * kBlock, Payload::kConstant, Element::kBf16), 1.9);
  EXPECT_GT(round_trip(4 * kBlock, Payload::kZeros, Element::kBytes), 100);
}

TEST_F(PayloadCodecTest, payloads_that_do_not_gain_are_stored_raw) {
  for (const Element element : kElements) {
    EXPECT_EQ(round_trip(4 * kBlock, Payload::kNoise, element), 1);
    EXPECT_TRUE(encoded(Bytes{}, element).empty());
    EXPECT_TRUE(encoded(Bytes(10), element).empty());
  }
  // A quarter of one block in eight gains: 1.07 overall.
  Bytes little = make_payload(Payload::kNoise, Element::kBytes, 8 * kBlock);
  std::fill_n(little.begin(), kBlock / 2, std::byte{});
  EXPECT_TRUE(encoded(little, Element::kBytes).empty());
}

TEST_F(PayloadCodecTest, a_block_that_does_not_gain_is_stored_raw_among_others) {
  Bytes payload = make_payload(Payload::kKv, Element::kBf16, 5 * kBlock);
  const Bytes noise = make_payload(Payload::kNoise, Element::kBf16, kBlock);
  std::copy(noise.begin(), noise.end(), payload.begin() + 2 * kBlock);
  const Bytes stored = encoded(payload, Element::kBf16);
  ASSERT_FALSE(stored.empty());
  EXPECT_NE(std::search(stored.begin(), stored.end(), noise.begin(), noise.end()), stored.end());
  const Shards back({payload.size()});
  ASSERT_TRUE(decode(stored, Element::kBf16, back));
  EXPECT_TRUE(back.joined() == payload);
}

TEST_F(PayloadCodecTest, output_follows_the_format) {
  const Bytes payload = make_payload(Payload::kKv, Element::kBf16, 4001);
  const Bytes stored = encoded(payload, Element::kBf16);
  ASSERT_GT(stored.size(), 2005U);
  const std::size_t frame_bytes =
      std::to_integer<std::size_t>(stored[0]) | std::to_integer<std::size_t>(stored[1]) << 8;
  ASSERT_EQ(stored.size(), 4 + 2000 + 1 + frame_bytes);
  Bytes upper(2000);
  ASSERT_EQ(ZSTD_decompress(upper.data(), upper.size(), stored.data() + 2005, frame_bytes), upper.size());
  for (std::size_t i = 0; i < 2000; ++i) {
    const unsigned number =
        std::to_integer<unsigned>(payload[2 * i]) | std::to_integer<unsigned>(payload[2 * i + 1]) << 8;
    ASSERT_EQ(std::to_integer<unsigned>(upper[i]), number >> 7 & 0xFF) << i;
    ASSERT_EQ(std::to_integer<unsigned>(stored[4 + i]), (number << 1 & 0xFE) | number >> 15) << i;
  }
  EXPECT_EQ(stored[2004], payload[4000]);
}

TEST_F(PayloadCodecTest, a_payload_built_by_hand_is_read) {
  const Bytes kept = make_payload(Payload::kNoise, Element::kBytes, 500), coded(500, std::byte{0x7F});
  EXPECT_EQ(decoded_as(block_of(kept, frame_of(coded)), Element::kBf16, 1000), StatusKind::kOk);
  EXPECT_EQ(decoded_as(block_of({}, frame_of(coded)), Element::kBytes, 500), StatusKind::kOk);
  EXPECT_EQ(decoded_as(block_of(kept, {}), Element::kBf16, 500), StatusKind::kOk);  // raw
  EXPECT_EQ(decoded_as({}, Element::kBf16, 0), StatusKind::kOk);
}

TEST_F(PayloadCodecTest, an_invalid_payload_is_corrupt) {
  const Bytes kept(500, std::byte{1}), coded = make_payload(Payload::kKv, Element::kBytes, 500);
  const Bytes frame = frame_of(coded), good = block_of(kept, frame);
  const auto corrupt = [&](const Bytes& in, Element element = Element::kBf16, std::size_t bytes = 1000) {
    return decoded_as(in, element, bytes) == StatusKind::kCorrupt;
  };
  ASSERT_FALSE(corrupt(good));
  EXPECT_TRUE(corrupt({}));
  EXPECT_TRUE(corrupt(good + Bytes(1))) << "one extra byte";
  EXPECT_TRUE(corrupt(good + good)) << "one extra block";
  EXPECT_TRUE(corrupt(good, Element::kBf16, 1002)) << "longer shards";
  EXPECT_TRUE(corrupt(good, Element::kBf16, 998)) << "shorter shards";
  EXPECT_TRUE(corrupt(good, Element::kBytes)) << "another element";
  EXPECT_TRUE(corrupt(good, Element::kBf16, 0));
  EXPECT_TRUE(corrupt(block_of(kept, frame_of(coded, false)))) << "a frame without its content length";
  EXPECT_TRUE(corrupt(block_of(kept, frame_of(Bytes(499))))) << "a shorter content";
  EXPECT_TRUE(corrupt(block_of(kept, frame_of(Bytes(501))))) << "a longer content";
  EXPECT_TRUE(corrupt(block_of(kept, frame_of(Bytes(500)) + frame_of({})))) << "two frames";
  EXPECT_TRUE(corrupt(block_of(kept, frame_of(Bytes(500)) + Bytes(3)))) << "bytes after the frame";
  EXPECT_TRUE(corrupt(block_of(kept, Bytes(3)))) << "no room for a magic number";
  Bytes magic = frame_of(Bytes(500));
  for (const int other : {0x27, 0x26, 0x25}) {  // zstd 0.7, 0.6, 0.5
    magic[0] = static_cast<std::byte>(other);
    EXPECT_TRUE(corrupt(block_of(kept, magic)));
  }
  const Bytes skipped{std::byte{0x50}, std::byte{0x2A}, std::byte{0x4D}, std::byte{0x18},
                      std::byte{},     std::byte{},     std::byte{},     std::byte{}};
  EXPECT_TRUE(corrupt(block_of(kept, skipped + frame_of(Bytes(500))))) << "a skippable frame";
}

TEST_F(PayloadCodecTest, lengths_are_checked_before_they_are_used) {
  const Bytes good = block_of(Bytes(500), frame_of(Bytes(500)));
  for (const std::uint32_t length : {1U, 499U, 500U, 501U, 0xFFFFU, 0x7FFFFFFFU, 0x80000000U, 0xFFFFFFFFU}) {
    Bytes in = good;
    for (std::size_t i = 0; i < 4; ++i) in[i] = static_cast<std::byte>(length >> 8 * i);
    EXPECT_EQ(decoded_as(in, Element::kBf16, 1000), StatusKind::kCorrupt) << length;
  }
}

TEST_F(PayloadCodecTest, every_truncation_is_corrupt) {
  const Bytes payload = make_payload(Payload::kKv, Element::kBf16, kBlock + 3000);
  const Bytes stored = encoded(payload, Element::kBf16);
  ASSERT_FALSE(stored.empty());
  const Shards back({payload.size()});
  for (std::size_t bytes = 0; bytes < stored.size();
       bytes < 64 || bytes + 2200 > stored.size() ? ++bytes : bytes += 997) {
    const Bytes part(stored.begin(), stored.begin() + static_cast<std::ptrdiff_t>(bytes));
    ASSERT_EQ(decode(part, Element::kBf16, back).kind(), StatusKind::kCorrupt) << bytes;
  }
}

TEST_F(PayloadCodecTest, damage_yields_corrupt_or_wrong_bytes_but_never_writes_beyond_the_shards) {
  std::mt19937 random(7);
  int seen = 0;
  for (const Element element : kElements) {
    const Bytes payload =
        make_payload(element == Element::kBytes ? Payload::kConstant : Payload::kKv, element, 6001);
    const Bytes stored = encoded(payload, element);
    ASSERT_FALSE(stored.empty());
    const Shards back({1000, 5001});
    for (int round = 0; round < 1500; ++round) {
      Bytes damaged = stored;
      for (int flips = 1 + round % 3; flips > 0; --flips) {
        // Half of the damage hits lengths and frame headers.
        const std::size_t kept = element == Element::kBytes ? 4 : 4 + payload.size() / 2;
        const std::size_t at =
            round % 2 == 0 ? random() % damaged.size() : (kept + random() % 40) % damaged.size();
        damaged[at] ^= static_cast<std::byte>(1 + random() % 255);
      }
      const Status status = decode(damaged, element, back);
      ASSERT_TRUE(status || status.kind() == StatusKind::kCorrupt) << status.to_string();
      seen += status ? 0 : 1;
    }
  }
  EXPECT_GT(seen, 0);
  // The codec keeps no state from the damaged payloads.
  round_trip(2 * kBlock, Payload::kKv, Element::kBf16);
}

TEST_F(PayloadCodecTest, threads_share_one_codec) {
  constexpr unsigned kThreads = 4;
  std::latch all_there(kThreads);
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      const Bytes payload = make_payload(Payload::kKv, Element::kBf16, kBlock + 5000, i);
      const Shards shards({payload.size()}, payload), back({payload.size()});
      all_there.arrive_and_wait();
      for (int round = 0; round < 20; ++round) {
        const Bytes stored = encoded(shards, Element::kBf16);
        ASSERT_FALSE(stored.empty());
        ASSERT_TRUE(decode(stored, Element::kBf16, back));
        ASSERT_TRUE(back.joined() == payload);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace kv_offload
