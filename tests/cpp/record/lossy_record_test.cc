// SPDX-License-Identifier: Apache-2.0
// Lossy records, from the shards of an op to the bytes in a store and back.
#include <gtest/gtest.h>

#include <algorithm>

#include "record/lossy_codec.h"
#include "record/numbers_for_tests.h"
#include "record/record_bytes.h"
#include "record/record_form.h"
#include "tier/encrypted_medium.h"
#include "tier/tier_driver.h"

namespace kv_offload {
namespace {

using testing::Bytes;
using testing::bytes_of;
using testing::key_of;
using testing::make_sums_right;
using testing::Payload;
using testing::read_bytes;
using testing::Row;
using testing::ShardSizes;

const ShardSizes kSizes = {150000, 0, 4096, 70001};

RecordFormOptions lossy_form(double max_error = 0.05, Element element = Element::kBf16) {
  CompressionOptions options{.compress = Compress::kLossy, .max_error = max_error, .elements = {element}};
  return {.compression = std::make_shared<CompressionChoice>(options), .max_error = max_error};
}

TierOp op_on(const Row& row) {
  TierOp op;
  op.key = key_of(1);
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

RecordHeader header_of(const Bytes& bytes) {
  RecordHeader header;
  EXPECT_TRUE(decode_header({bytes.data(), kRecordHeaderBytes}, &header));
  return header;
}

class LossyRecord : public ::testing::Test {
 protected:
  LossyRecord() { fill(row_, Payload::kKv); }
  // True if the other row holds exactly the bytes of the row.
  bool same() const {
    const auto ours = row_.shards(), theirs = other_.shards();
    for (std::size_t i = 0; i < ours.size(); ++i) {
      if (!std::equal(ours[i].begin(), ours[i].end(), theirs[i].begin())) return false;
    }
    return true;
  }
  RecordForm form_{lossy_form()};
  Row row_{kSizes}, other_{kSizes};
};

TEST_F(LossyRecord, a_record_is_smaller_than_without_loss_and_states_its_loss) {
  const Bytes bytes = bytes_of(form_, op_on(row_));
  const RecordHeader header = header_of(bytes);
  EXPECT_EQ(header.codec, Codec::kLossy);
  EXPECT_EQ(header.element, Element::kBf16);
  EXPECT_GT(header.loss.largest, 0.02F);
  EXPECT_LE(header.loss.largest, LossyCodec::rounded_up(0.05));
  EXPECT_GT(header.loss.rms, 0.01F);
  EXPECT_LT(bytes.size(), (150000 + 4096 + 70001) / 2);
  ASSERT_TRUE(read_bytes(form_, op_on(other_), bytes));
  EXPECT_FALSE(same());
  // Encoding changes nothing in the row: host memory keeps the exact numbers.
  Row exact(kSizes);
  fill(exact, Payload::kKv);
  const auto ours = row_.shards(), theirs = exact.shards();
  for (std::size_t i = 0; i < ours.size(); ++i)
    EXPECT_TRUE(std::equal(ours[i].begin(), ours[i].end(), theirs[i].begin())) << i;
}

TEST_F(LossyRecord, bytes_that_are_not_numbers_are_stored_without_loss) {
  RecordForm bytes_form(lossy_form(0.05, Element::kBytes));
  row_.fill(1);
  const Bytes bytes = bytes_of(bytes_form, op_on(row_));
  EXPECT_EQ(header_of(bytes).codec, Codec::kSplitZstd);
  EXPECT_EQ(header_of(bytes).loss, Loss{});
  ASSERT_TRUE(read_bytes(bytes_form, op_on(other_), bytes));
  EXPECT_TRUE(same());
}

TEST_F(LossyRecord, a_payload_that_the_lossy_codec_refuses_is_stored_without_loss) {
  fill(row_, Payload::kNan);  // every group is exact, so nothing is gained
  const Bytes bytes = bytes_of(form_, op_on(row_));
  EXPECT_NE(header_of(bytes).codec, Codec::kLossy);
  EXPECT_EQ(header_of(bytes).loss, Loss{});
  ASSERT_TRUE(read_bytes(form_, op_on(other_), bytes));
  EXPECT_TRUE(same());
}

TEST_F(LossyRecord, a_form_without_loss_or_with_a_smaller_bound_rejects_it) {
  const Bytes bytes = bytes_of(form_, op_on(row_));
  RecordForm exact({}), smaller(lossy_form(0.02)), larger(lossy_form(0.1));
  EXPECT_EQ(read_bytes(exact, op_on(other_), bytes).kind(), StatusKind::kCorrupt);
  EXPECT_EQ(read_bytes(smaller, op_on(other_), bytes).kind(), StatusKind::kCorrupt);
  EXPECT_TRUE(read_bytes(larger, op_on(other_), bytes));
}

TEST_F(LossyRecord, a_store_that_writes_without_loss_reads_lossy_records_of_its_namespace) {
  RecordForm other({.max_error = 0.05});
  ASSERT_TRUE(read_bytes(other, op_on(other_), bytes_of(form_, op_on(row_))));
  fill(row_, Payload::kKv);
  const Bytes bytes = bytes_of(other, op_on(row_));
  EXPECT_EQ(header_of(bytes).codec, Codec::kRaw);
  ASSERT_TRUE(read_bytes(form_, op_on(other_), bytes));
  EXPECT_TRUE(same());
}

TEST_F(LossyRecord, a_damaged_payload_under_correct_checksums_is_corrupt_or_numbers) {
  const Bytes good = bytes_of(form_, op_on(row_));
  for (const std::size_t at : {kRecordHeaderBytes, kRecordHeaderBytes + 1, kRecordHeaderBytes + 9}) {
    Bytes bad = good;
    bad[at] ^= std::byte{0x81};
    EXPECT_EQ(read_bytes(form_, op_on(other_), bad).kind(), StatusKind::kCorrupt) << "checksum";
    make_sums_right(&bad);
    EXPECT_EQ(read_bytes(form_, op_on(other_), bad).kind(), StatusKind::kCorrupt) << at;
  }
}

#ifdef KV_OFFLOAD_ENCRYPTION
TEST_F(LossyRecord, lossy_records_can_be_encrypted) {
  RecordFormOptions options = lossy_form();
  options.keys = testing::keys_of({1});
  RecordForm encrypting(options);
  const Bytes bytes = bytes_of(encrypting, op_on(row_));
  EXPECT_EQ(header_of(bytes).codec, Codec::kLossy);
  ASSERT_TRUE(read_bytes(encrypting, op_on(other_), bytes));
  Bytes forged = bytes;
  forged[792] ^= std::byte{1};  // states another loss
  testing::make_header_right(&forged);
  EXPECT_EQ(read_bytes(encrypting, op_on(other_), forged).kind(), StatusKind::kCorrupt);
}
#endif

}  // namespace
}  // namespace kv_offload
