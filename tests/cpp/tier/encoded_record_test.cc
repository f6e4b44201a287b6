// SPDX-License-Identifier: Apache-2.0
// Encoded records, from the shards of an op to the bytes in a store and back.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "record/numbers_for_tests.h"
#include "record/record_bytes.h"
#include "record/record_form.h"
#include "tier/encoded_medium.h"
#include "tier/encrypted_medium.h"
#include "tier/tier_conformance.h"
#include "tier/tier_driver.h"

namespace kv_offload {
namespace {

using testing::always_encoded;
using testing::Bytes;
using testing::bytes_of;
using testing::key_of;
using testing::make_sums_right;
using testing::Payload;
using testing::read_bytes;
using testing::Row;
using testing::ShardSizes;
using testing::space_of;
using ::testing::StartsWith;

const ShardSizes kSizes = {150000, 0, 4096, 70001};
constexpr std::size_t kPadded = 151552 + 4096 + 73728;

TierOp op_on(const Row& row, std::uint32_t group = 0) {
  TierOp op;
  op.key = key_of(1);
  op.group = group;
  op.shards = row.shards();
  return op;
}

void fill(const Row& row, Payload kind) {
  std::size_t seed = 0;
  for (const Shard& shard : row.shards()) {
    const Bytes bytes =
        testing::make_payload(kind, Element::kBf16, shard.size(), static_cast<unsigned>(++seed));
    std::copy(bytes.begin(), bytes.end(), shard.begin());
  }
}

bool same(const Row& left, const Row& right) {
  const auto ours = left.shards(), theirs = right.shards();
  for (std::size_t i = 0; i < ours.size(); ++i) {
    // Compares the padding too: all of it is part of the row.
    const std::size_t padded = round_up(ours[i].size(), kPageBytes);
    if (!std::equal(ours[i].data(), ours[i].data() + padded, theirs[i].data())) return false;
  }
  return true;
}

RecordHeader header_of(const Bytes& bytes) {
  RecordHeader header;
  EXPECT_TRUE(decode_header({bytes.data(), kRecordHeaderBytes}, &header));
  return header;
}

class EncodedRecord : public ::testing::Test {
 protected:
  EncodedRecord() { fill(row_, Payload::kKv); }
  std::shared_ptr<CompressionChoice> choice_ = always_encoded(Element::kBf16);
  RecordForm form_{{.compression = choice_}}, plain_{{}};
  Row row_{kSizes}, other_{kSizes};
};

TEST_F(EncodedRecord, an_encoded_record_is_smaller_and_decodes_unchanged) {
  const Bytes bytes = bytes_of(form_, op_on(row_));
  EXPECT_LT(bytes.size(), kRecordHeaderBytes + kPadded * 3 / 4);
  EXPECT_EQ(bytes.size() % kPageBytes, 0U);
  const RecordHeader header = header_of(bytes);
  EXPECT_EQ(header.codec, Codec::kSplitZstd);
  EXPECT_EQ(header.element, Element::kBf16);
  EXPECT_EQ(header.payload_bytes, kPadded);
  ASSERT_TRUE(read_bytes(form_, op_on(other_), bytes));
  EXPECT_TRUE(same(other_, row_));
  const CompressionStats stats = choice_->stats();
  EXPECT_EQ(stats.encoded_raw_bytes, kPadded);
  EXPECT_EQ(stats.encoded_stored_bytes, bytes.size() - kRecordHeaderBytes);
  EXPECT_GT(stats.encode_seconds, 0);
  EXPECT_GT(stats.decode_seconds, 0);
}

TEST_F(EncodedRecord, no_bytes_of_an_earlier_record_follow_an_encoded_one) {
  const Row larger({4 * kSizes[0]});
  fill(larger, Payload::kKv);
  (void)bytes_of(form_, op_on(larger));  // fills the buffer that the next record reuses
  const Bytes bytes = bytes_of(form_, op_on(row_));
  const std::span<const std::byte> behind =
      std::span(bytes).subspan(kRecordHeaderBytes + header_of(bytes).stored_bytes);
  ASSERT_FALSE(behind.empty());
  EXPECT_THAT(behind, ::testing::Each(std::byte{0}));
}

TEST_F(EncodedRecord, the_choice_counts_decoding_only_when_it_succeeds) {
  const Bytes raw = bytes_of(plain_, op_on(row_));
  ASSERT_TRUE(read_bytes(form_, op_on(other_), raw));
  EXPECT_EQ(choice_->stats().decode_seconds, 0) << "nothing was decoded";
  Bytes bad = bytes_of(form_, op_on(row_));
  std::fill_n(bad.begin() + kRecordHeaderBytes, 4, std::byte{0xFF});
  make_sums_right(&bad);
  EXPECT_EQ(read_bytes(form_, op_on(other_), bad).kind(), StatusKind::kCorrupt);
  EXPECT_EQ(choice_->stats().decode_seconds, 0);
}

TEST_F(EncodedRecord, the_choice_counts_encoding_only_when_the_record_was_written) {
  const TierOp op = op_on(row_);
  {
    OutgoingRecord given_up(form_, space_of(1), op);
    ASSERT_TRUE(given_up.encode());
    ASSERT_TRUE(given_up.finish());
  }
  EXPECT_EQ(choice_->stats().encode_seconds, 0);
  EXPECT_EQ(choice_->stats().encoded_raw_bytes, 0U);
  OutgoingRecord record(form_, space_of(1), op);
  ASSERT_TRUE(record.encode());
  ASSERT_TRUE(record.finish());
  EXPECT_EQ(record.written(), kPadded);
  const double told = choice_->stats().encode_seconds;
  EXPECT_GT(told, 0);
  EXPECT_EQ(record.written(), kPadded);
  EXPECT_EQ(choice_->stats().encode_seconds, told) << "once";
}

TEST_F(EncodedRecord, a_form_without_encoding_reads_encoded_records) {
  ASSERT_TRUE(read_bytes(plain_, op_on(other_), bytes_of(form_, op_on(row_))));
  EXPECT_TRUE(same(other_, row_));
}

TEST_F(EncodedRecord, a_form_with_encoding_reads_raw_records) {
  ASSERT_TRUE(read_bytes(form_, op_on(other_), bytes_of(plain_, op_on(row_))));
  EXPECT_TRUE(same(other_, row_));
}

TEST_F(EncodedRecord, a_record_that_gains_nothing_is_stored_raw_without_a_copy) {
  fill(row_, Payload::kNoise);
  const TierOp op = op_on(row_);
  OutgoingRecord record(form_, space_of(1), op);
  ASSERT_TRUE(record.encode());
  EXPECT_TRUE(record.in_place());
  EXPECT_EQ(record.bytes(), kRecordHeaderBytes + kPadded);
  EXPECT_EQ(choice_->stats().encoded_raw_bytes, 0U);
}

TEST_F(EncodedRecord, the_choice_is_made_for_each_group) {
  RecordForm by_choice({.compression = std::make_shared<CompressionChoice>(
                            CompressionOptions{.compress = Compress::kAuto, .elements = {Element::kBf16}})});
  EXPECT_EQ(header_of(bytes_of(by_choice, op_on(row_))).codec, Codec::kRaw) << "nothing was measured yet";
  EXPECT_EQ(header_of(bytes_of(form_, op_on(row_, 1))).element, Element::kBytes)
      << "group 1 has no declared element type";
}

TEST_F(EncodedRecord, damage_of_an_encoded_record_is_detected) {
  const Bytes good = bytes_of(form_, op_on(row_));
  for (const std::size_t size : {kRecordHeaderBytes, good.size() - kPageBytes, good.size() + kPageBytes}) {
    Bytes bad = good;
    bad.resize(size);
    EXPECT_EQ(read_bytes(form_, op_on(other_), bad).kind(), StatusKind::kCorrupt) << size;
  }
  std::mt19937 random(5);
  for (int round = 0; round < 100; ++round) {
    Bytes bad = good;
    const std::size_t at = random() % bad.size();
    bad[at] ^= static_cast<std::byte>(1U << random() % 8);
    // A flipped bit in the version makes it a record of another release.
    const StatusKind expected = at >= 8 && at < 12 ? StatusKind::kNotFound : StatusKind::kCorrupt;
    ASSERT_EQ(read_bytes(form_, op_on(other_), bad).kind(), expected) << "byte " << at;
  }
}

// The codec itself must survive wrong bytes under correct checksums.
TEST_F(EncodedRecord, a_forged_payload_never_reaches_beyond_the_shards) {
  const Bytes good = bytes_of(form_, op_on(row_));
  std::mt19937 random(6);
  for (int round = 0; round < 100; ++round) {
    Bytes bad = good;
    for (int flips = 0; flips < 3; ++flips) {
      bad[kRecordHeaderBytes + random() % (bad.size() - kRecordHeaderBytes)] ^=
          static_cast<std::byte>(1 + random() % 255);
    }
    make_sums_right(&bad);
    const Status status = read_bytes(form_, op_on(other_), bad);
    ASSERT_TRUE(status || status.kind() == StatusKind::kCorrupt) << status.to_string();
  }
  Bytes bad = good;
  std::fill_n(bad.begin() + kRecordHeaderBytes, 4, std::byte{0xFF});
  make_sums_right(&bad);
  EXPECT_EQ(read_bytes(form_, op_on(other_), bad).kind(), StatusKind::kCorrupt);
}

#ifdef KV_OFFLOAD_ENCRYPTION
TEST_F(EncodedRecord, an_encoded_record_can_be_encrypted) {
  RecordForm encryption({.compression = choice_, .keys = testing::keys_of({1})});
  const Bytes bytes = bytes_of(encryption, op_on(row_));
  EXPECT_EQ(header_of(bytes).codec, Codec::kSplitZstd);
  EXPECT_LT(bytes.size(), kRecordHeaderBytes + kPadded * 3 / 4);
  ASSERT_TRUE(read_bytes(encryption, op_on(other_), bytes));
  EXPECT_TRUE(same(other_, row_));
  Bytes bad = bytes;
  bad[kRecordHeaderBytes + 5000] ^= std::byte{1};
  make_sums_right(&bad);
  EXPECT_EQ(read_bytes(encryption, op_on(other_), bad).kind(), StatusKind::kCorrupt);
}
#endif

// A tier reserves and counts the stored bytes.
TEST(EncodedTier, space_is_counted_by_stored_size) {
  testing::FsMedium medium;
  ThreadPoolTierOptions options;
  options.name = "fs";
  options.form.compression = always_encoded();
  testing::TierDriver user(medium.open(options));
  user.wait_for_scan();
  constexpr std::uint64_t kRaw = 64 * kPageBytes;
  ASSERT_TRUE(user.write(1, {kRaw}));
  const TierStats stats = user.tier().stats();
  EXPECT_LT(stats.bytes, kRaw);
  EXPECT_TRUE(stats.may_encode);
  EXPECT_TRUE(stats.encodes);
  EXPECT_EQ(stats.encoded_raw_bytes, kRaw);
  EXPECT_LT(stats.encoded_stored_bytes, kRaw / 3);
  EXPECT_TRUE(user.read(1, {kRaw}));
  EXPECT_EQ(user.tier().codec_reason(), "on: compress is zstd");
}

// The choice compares codec time with the time of successful ops, so it must not count failed ones.
TEST(EncodedTier, failed_writes_do_not_reach_the_choice) {
  testing::FsMedium files;
  testing::MemoryMedium memory;
  for (testing::Medium* medium :
       {static_cast<testing::Medium*>(&files), static_cast<testing::Medium*>(&memory)}) {
    ThreadPoolTierOptions options;
    options.name = "tier";
    options.form.compression = always_encoded();
    testing::TierDriver user(medium->open(options));
    user.wait_for_scan();
    medium->fail_transfers(true);
    EXPECT_FALSE(user.write(1, {64 * kPageBytes}));
    EXPECT_EQ(user.tier().stats().encoded_raw_bytes, 0U);
    EXPECT_EQ(options.form.compression->stats().encode_seconds, 0);
  }
}

TEST(EncodedTier, ops_report_the_tiers_speed_to_the_choice) {
  testing::MemoryMedium medium;
  ThreadPoolTierOptions options;
  options.name = "memory";
  options.form.compression = std::make_shared<CompressionChoice>(
      CompressionOptions{.compress = Compress::kAuto, .elements = {Element::kBf16}});
  testing::TierDriver user(medium.open(options));
  EXPECT_THAT(user.tier().codec_reason(), StartsWith("off: too little"));
  for (std::uint32_t i = 0; i < CompressionChoice::kMinOps; ++i) {
    ASSERT_TRUE(user.write(i));
    ASSERT_TRUE(user.read(i));
  }
  user.poll();
  EXPECT_THAT(user.tier().codec_reason(), ::testing::HasSubstr(": a read of 1 MiB takes "));
}

}  // namespace
}  // namespace kv_offload
