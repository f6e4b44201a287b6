// SPDX-License-Identifier: Apache-2.0
// Lossy records, from the shards of an op to the bytes in a store and back.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

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

RecordFormOptions lossy_form(const ErrorBounds& bounds, const KvRuns& runs, Element element = Element::kBf16,
                             std::shared_ptr<const BoundFactors> factors = nullptr) {
  CompressionOptions options{
      .compress = Compress::kLossy, .bounds = bounds, .factors = {std::move(factors)}, .elements = {element}};
  return {.compression = std::make_shared<CompressionChoice>(options), .bounds = bounds, .runs = {runs}};
}

RecordFormOptions lossy_form(double max_error = 0.05, Element element = Element::kBf16) {
  return lossy_form({max_error, max_error}, {}, element);
}

TierOp op_on(const Row& row) {
  TierOp op;
  op.key = key_of(1);
  op.shards = row.shards();
  return op;
}

void fill(const Row& row, Payload kind, Element element = Element::kBf16) {
  std::size_t seed = 0;
  for (const Shard& shard : row.shards()) {
    const Bytes bytes = testing::make_payload(kind, element, shard.size(), static_cast<unsigned>(++seed));
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
  EXPECT_GT(header.loss.keys, 0.02F);
  EXPECT_LE(header.loss.keys, LossyCodec::rounded_up(0.05));
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

TEST_F(LossyRecord, a_calibration_lowers_the_loss_and_is_not_needed_to_read) {
  const ShardSizes sizes = {1 << 17, 1 << 17};
  Row row(sizes), other(sizes);
  fill(row, Payload::kKv);
  const auto calibrated = [](std::size_t shards) {
    const std::vector<BoundFactors::OfGroup> quarter(8, {0.25F, 0});
    return lossy_form({0.2, 0.2}, {}, Element::kBf16,
                      std::make_shared<const BoundFactors>(std::vector(shards, quarter)));
  };
  RecordForm form(calibrated(2)), plain(lossy_form(0.2)), other_shards(calibrated(1));
  const Bytes bytes = bytes_of(form, op_on(row));
  const RecordHeader header = header_of(bytes);
  EXPECT_EQ(header.codec, Codec::kLossy);
  EXPECT_GT(header.loss.keys, 0.025F);
  EXPECT_LE(header.loss.keys, 0.05F);
  EXPECT_GT(bytes.size(), bytes_of(plain, op_on(row)).size());
  EXPECT_TRUE(read_bytes(plain, op_on(other), bytes));
  // Never more loss than the calibration allows: a record that it does not fit is exact.
  EXPECT_EQ(header_of(bytes_of(other_shards, op_on(row))).codec, Codec::kSplitZstd);
}

TEST_F(LossyRecord, fp8_is_stored_with_loss_and_states_its_type) {
  for (const Element element : {Element::kE4m3, Element::kE5m2}) {
    RecordForm form(lossy_form(0.1, element));
    fill(row_, Payload::kKv, element);
    const Bytes bytes = bytes_of(form, op_on(row_));
    const RecordHeader header = header_of(bytes);
    EXPECT_EQ(header.codec, Codec::kLossy);
    EXPECT_EQ(header.element, element);
    EXPECT_GT(header.loss.keys, 0.05F);
    EXPECT_LE(header.loss.keys, LossyCodec::rounded_up(0.1));
    EXPECT_LT(static_cast<double>(bytes.size()), (150000 + 4096 + 70001) / 1.8);
    // The type is in the header: a reader need not be configured for it.
    RecordForm reader(lossy_form(0.1, Element::kBytes));
    ASSERT_TRUE(read_bytes(reader, op_on(other_), bytes));
    EXPECT_FALSE(same());
    double error = 0, norm = 0;
    const auto ours = row_.shards(), theirs = other_.shards();
    for (std::size_t shard = 0; shard < ours.size(); ++shard) {
      for (std::size_t i = 0; i < ours[shard].size(); ++i) {
        const double before = testing::fp8_value(std::to_integer<std::uint8_t>(ours[shard][i]), element);
        const double after = testing::fp8_value(std::to_integer<std::uint8_t>(theirs[shard][i]), element);
        error += (after - before) * (after - before);
        norm += before * before;
      }
    }
    EXPECT_NEAR(header.loss.rms, std::sqrt(error / norm), 1e-4);
  }
}

TEST_F(LossyRecord, fp8_that_the_lossy_codec_refuses_is_stored_as_bytes) {
  RecordForm form(lossy_form(0.1, Element::kE5m2));
  for (const Payload kind : {Payload::kNan, Payload::kNoise}) {
    fill(row_, kind, Element::kE5m2);
    const Bytes bytes = bytes_of(form, op_on(row_));
    EXPECT_EQ(header_of(bytes).codec, kind == Payload::kNan ? Codec::kSplitZstd : Codec::kRaw);
    EXPECT_EQ(header_of(bytes).element, Element::kBytes);
    ASSERT_TRUE(read_bytes(form, op_on(other_), bytes));
    EXPECT_TRUE(same());
  }
}

TEST_F(LossyRecord, fp8_is_bytes_for_a_form_without_loss) {
  CompressionOptions options{.compress = Compress::kZstd, .elements = {Element::kE4m3}};
  RecordForm form({.compression = std::make_shared<CompressionChoice>(options)});
  fill(row_, Payload::kKv, Element::kE4m3);
  const Bytes bytes = bytes_of(form, op_on(row_));
  EXPECT_EQ(header_of(bytes).element, Element::kBytes);
  ASSERT_TRUE(read_bytes(form, op_on(other_), bytes));
  EXPECT_TRUE(same());
}

TEST_F(LossyRecord, a_form_without_loss_or_with_a_smaller_bound_rejects_it) {
  const Bytes bytes = bytes_of(form_, op_on(row_));
  RecordForm exact({}), smaller(lossy_form(0.02)), larger(lossy_form(0.1));
  EXPECT_EQ(read_bytes(exact, op_on(other_), bytes).kind(), StatusKind::kCorrupt);
  EXPECT_EQ(read_bytes(smaller, op_on(other_), bytes).kind(), StatusKind::kCorrupt);
  EXPECT_TRUE(read_bytes(larger, op_on(other_), bytes));
}

// Shards of whole runs of keys and values.
class LossyRecordOfRuns : public ::testing::Test {
 protected:
  static constexpr KvRuns kRuns{128, 128};
  LossyRecordOfRuns() { fill(row_, Payload::kKv); }
  const ShardSizes sizes_ = {150 * 1024, 70 * 1024};
  Row row_{sizes_}, other_{sizes_};
};

TEST_F(LossyRecordOfRuns, a_record_states_the_loss_of_keys_and_of_values) {
  RecordForm form(lossy_form({0.03, 0.08}, kRuns));
  const Bytes bytes = bytes_of(form, op_on(row_));
  const Loss loss = header_of(bytes).loss;
  EXPECT_GT(loss.keys, 0.015F);
  EXPECT_LE(loss.keys, LossyCodec::rounded_up(0.03));
  EXPECT_GT(loss.values, 0.04F);
  EXPECT_LE(loss.values, LossyCodec::rounded_up(0.08));
  EXPECT_TRUE(read_bytes(form, op_on(other_), bytes));
  const CompressionStats stats = form.compression()->stats();
  EXPECT_EQ(stats.largest_key_error, loss.keys);
  EXPECT_EQ(stats.largest_value_error, loss.values);
}

TEST_F(LossyRecordOfRuns, a_reader_with_a_smaller_bound_for_keys_or_values_rejects_it) {
  RecordForm form(lossy_form({0.05, 0.1}, kRuns));
  const Bytes bytes = bytes_of(form, op_on(row_));
  const auto read = [&](const ErrorBounds& bounds, const KvRuns& runs) {
    RecordForm reader(lossy_form(bounds, runs));
    return read_bytes(reader, op_on(other_), bytes).kind();
  };
  EXPECT_EQ(read({0.05, 0.1}, kRuns), StatusKind::kOk);
  EXPECT_EQ(read({0.1, 0.2}, kRuns), StatusKind::kOk);
  EXPECT_EQ(read({0.04, 0.1}, kRuns), StatusKind::kCorrupt);
  EXPECT_EQ(read({0.05, 0.08}, kRuns), StatusKind::kCorrupt);
  EXPECT_EQ(read({0.05, 0.05}, kRuns), StatusKind::kCorrupt);
  EXPECT_EQ(read({0.05, 0.1}, {}), StatusKind::kCorrupt) << "it does not know which elements are values";
  EXPECT_EQ(read({0.1, 0.1}, {}), StatusKind::kOk);
}

TEST_F(LossyRecordOfRuns, a_forged_loss_beyond_a_bound_is_corrupt) {
  RecordForm form(lossy_form({0.05, 0.1}, kRuns));
  const Bytes good = bytes_of(form, op_on(row_));
  for (const std::size_t at : {792u, 800u}) {
    for (const float loss : {0.11F, 0.5F, std::numeric_limits<float>::quiet_NaN()}) {
      Bytes forged = good;
      std::memcpy(forged.data() + at, &loss, sizeof(loss));
      testing::make_header_right(&forged);
      EXPECT_EQ(read_bytes(form, op_on(other_), forged).kind(), StatusKind::kCorrupt) << at << " " << loss;
    }
  }
}

TEST_F(LossyRecord, a_store_that_writes_without_loss_reads_lossy_records_of_its_namespace) {
  RecordForm other({.bounds = {0.05, 0.05}});
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
