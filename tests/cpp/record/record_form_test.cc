// SPDX-License-Identifier: Apache-2.0
#include "record/record_form.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "record/record_bytes.h"
#include "record/whole_record.h"
#include "tier/encrypted_medium.h"
#include "tier/tier_driver.h"

namespace kv_offload {
namespace {

using testing::Bytes;
using testing::bytes_of;
using testing::key_of;
using testing::keys_of;
using testing::make_header_right;
using testing::make_sums_right;
using testing::read_bytes;
using testing::Row;
using testing::ShardSizes;
using testing::space_of;

const ShardSizes kRowSizes = {5000, 4096, 1, 0};

RecordOp op_of(const Row& row, std::uint32_t number = 1) {
  RecordOp op;
  op.key = key_of(number);
  op.group = 2;
  op.shards = row.shards();
  return op;
}

TEST(RecordFormTest, a_raw_unencrypted_record_uses_no_intermediate_buffer) {
  RecordForm form({});
  Row row(kRowSizes);
  row.fill(1);
  const RecordOp op = op_of(row);
  OutgoingRecord record(form, space_of(1), op);
  ASSERT_TRUE(record.encode());
  EXPECT_TRUE(record.in_place());
  ASSERT_TRUE(record.finish());
  ASSERT_EQ(record.pieces().size(), 1 + kRowSizes.size());
  for (std::size_t i = 0; i < kRowSizes.size(); ++i) {
    EXPECT_EQ(record.pieces()[1 + i].data(), op.shards[i].data());
    EXPECT_EQ(record.pieces()[1 + i].size(), round_up(kRowSizes[i], kPageBytes));
  }
}

// ---- whole records

class WholeRecordTest : public ::testing::Test {
 protected:
  WholeRecordTest() {
    row_.fill(1);
    bytes_ = bytes_of(form_, op_of(row_));
    EXPECT_TRUE(decode_header(std::span(bytes_).first(kRecordHeaderBytes), &header_));
  }
  // Returns the op that stores these bytes as the record of this key.
  static RecordOp op_of_whole(const Bytes& bytes, const AlignedBuffer& memory, std::uint32_t number = 1) {
    std::copy(bytes.begin(), bytes.end(), memory.data());
    RecordOp op;
    op.key = key_of(number);
    op.shards = {memory.span().first(bytes.size())};
    op.is_whole_record = true;
    return op;
  }
  Status refused(const Bytes& bytes, std::uint32_t number = 1, std::uint8_t space = 1) {
    const AlignedBuffer memory(std::max<std::size_t>(bytes.size(), 1));
    const RecordOp op = op_of_whole(bytes, memory, number);
    return OutgoingRecord(form_, space_of(space), op).encode();
  }
  RecordForm form_{{}};
  Row row_{kRowSizes};
  Bytes bytes_;
  RecordHeader header_;
};

TEST_F(WholeRecordTest, its_bytes_are_stored_unchanged_whatever_the_form_of_the_store) {
  const AlignedBuffer memory(bytes_.size());
  const RecordOp op = op_of_whole(bytes_, memory);
  CompressionOptions options{.compress = Compress::kZstd, .elements = {Element::kBytes}};
  RecordForm encoding({.compression = std::make_shared<CompressionChoice>(options)});
  for (RecordForm* form : {&form_, &encoding}) {
    OutgoingRecord record(*form, space_of(1), op);
    ASSERT_TRUE(record.encode());
    EXPECT_EQ(record.bytes(), bytes_.size());
    EXPECT_EQ(record.raw_bytes(), kRecordHeaderBytes + header_.payload_bytes);
    EXPECT_FALSE(record.in_place());
    ASSERT_TRUE(record.finish());
    Bytes stored;
    for (const auto& piece : record.pieces()) stored.insert(stored.end(), piece.begin(), piece.end());
    EXPECT_TRUE(stored == bytes_);
    EXPECT_EQ(record.written(), header_.payload_bytes);
  }
}

TEST_F(WholeRecordTest, bytes_that_are_not_the_record_of_the_key_are_refused) {
  EXPECT_TRUE(refused(bytes_));
  EXPECT_EQ(refused(bytes_, 2).kind(), StatusKind::kCorrupt) << "another key";
  EXPECT_EQ(refused(bytes_, 1, 2).kind(), StatusKind::kCorrupt) << "another namespace";
  Bytes other = bytes_;
  other.resize(bytes_.size() - kPageBytes);
  EXPECT_EQ(refused(other).kind(), StatusKind::kCorrupt);
  other.resize(bytes_.size() + kPageBytes);
  EXPECT_EQ(refused(other).kind(), StatusKind::kCorrupt);
  other.resize(100);
  EXPECT_EQ(refused(other).kind(), StatusKind::kCorrupt);
  other = bytes_;
  other[200] ^= std::byte{1};
  EXPECT_EQ(refused(other).kind(), StatusKind::kCorrupt) << "the header is damaged";
}

TEST_F(WholeRecordTest, memory_follows_the_bytes_that_arrive_and_not_the_header) {
  RecordHeader announced = header_;
  announced.payload_bytes = announced.stored_bytes = std::uint64_t{1} << 40;
  WholeRecord record;
  record.begin(announced, std::span(bytes_).first(kRecordHeaderBytes));
  record.append(std::span(bytes_).subspan(kRecordHeaderBytes));
  EXPECT_TRUE(std::equal(bytes_.begin(), bytes_.end(), record.bytes().begin(), record.bytes().end()));
  record.begin(header_, std::span(bytes_).first(kRecordHeaderBytes));
  for (const std::byte& each : std::span(bytes_).subspan(kRecordHeaderBytes)) record.append({&each, 1});
  record.append(bytes_);
  EXPECT_TRUE(std::equal(bytes_.begin(), bytes_.end(), record.bytes().begin(), record.bytes().end()))
      << "bytes after its end are ignored";
}

TEST_F(WholeRecordTest, bytes_that_are_read_into_its_room_are_not_copied) {
  WholeRecord record;
  record.begin(header_, std::span(bytes_).first(kRecordHeaderBytes));
  for (std::size_t at = kRecordHeaderBytes; at < bytes_.size();) {
    const std::span<std::byte> room = record.room(3000);
    ASSERT_EQ(room.size(), std::min<std::size_t>(3000, bytes_.size() - at));
    std::copy_n(bytes_.begin() + static_cast<std::ptrdiff_t>(at), room.size(), room.begin());
    record.append(room);
    EXPECT_EQ(record.bytes().data() + at, room.data());
    at += room.size();
  }
  EXPECT_TRUE(record.room(1).empty()) << "it is complete";
  EXPECT_TRUE(std::equal(bytes_.begin(), bytes_.end(), record.bytes().begin(), record.bytes().end()));
}

TEST_F(WholeRecordTest, the_next_record_is_read_into_the_same_memory) {
  WholeRecord record;
  record.begin(header_, std::span(bytes_).first(kRecordHeaderBytes));
  record.append(std::span(bytes_).subspan(kRecordHeaderBytes));
  const std::byte* const memory = record.bytes().data();
  RecordHeader smaller = header_;
  smaller.payload_bytes = smaller.stored_bytes = kPageBytes;
  const Bytes other(kRecordHeaderBytes + kPageBytes, std::byte{7});
  record.begin(smaller, std::span(other).first(kRecordHeaderBytes));
  record.append(std::span(other).subspan(kRecordHeaderBytes));
  EXPECT_TRUE(std::equal(other.begin(), other.end(), record.bytes().begin(), record.bytes().end()));
  record.begin(header_, std::span(bytes_).first(kRecordHeaderBytes));
  record.append(std::span(bytes_).subspan(kRecordHeaderBytes));
  EXPECT_TRUE(std::equal(bytes_.begin(), bytes_.end(), record.bytes().begin(), record.bytes().end()));
  EXPECT_EQ(record.bytes().data(), memory);
}

#ifdef KV_OFFLOAD_ENCRYPTION

class EncryptedRecordTest : public ::testing::Test {
 protected:
  EncryptedRecordTest() { row_.fill(1); }
  RecordForm form_{{.keys = keys_of({1})}};
  Row row_{kRowSizes}, other_{kRowSizes};
};

TEST_F(EncryptedRecordTest, an_encrypted_record_decrypts_and_reveals_no_plaintext) {
  const Bytes bytes = bytes_of(form_, op_of(row_));
  EXPECT_EQ(bytes.size(), kRecordHeaderBytes + 4 * kPageBytes);
  const Shard shard = row_.shards()[0];
  EXPECT_EQ(std::search(bytes.begin(), bytes.end(), shard.begin(), shard.begin() + 16), bytes.end());
  EXPECT_TRUE(row_.holds(1)) << "the row was encrypted in place";
  ASSERT_TRUE(read_bytes(form_, op_of(other_), bytes));
  EXPECT_TRUE(other_.holds(1));
  for (const Shard& each : other_.shards()) {
    for (const std::byte* at = each.data() + each.size();
         at != each.data() + round_up(each.size(), kPageBytes); ++at)
      ASSERT_EQ(*at, std::byte{0}) << "after a shard";
  }
}

// Also when the attacker corrected the checksums afterwards.
TEST_F(EncryptedRecordTest, every_flipped_byte_of_the_header_is_detected) {
  const Bytes good = bytes_of(form_, op_of(row_));
  for (std::size_t at = 0; at < kRecordHeaderBytes; ++at) {
    Bytes bad = good;
    bad[at] ^= std::byte{0x10};
    const StatusKind kind = read_bytes(form_, op_of(other_), bad).kind();
    ASSERT_EQ(kind, StatusKind::kCorrupt) << "byte " << at;
    const bool is_a_sum = (at >= 120 && at < 128) || at >= kRecordHeaderBytes - 8;
    if (is_a_sum) continue;  // make_sums_right() corrects these
    make_sums_right(&bad);
    const StatusKind forged = read_bytes(form_, op_of(other_), bad).kind();
    const bool is_version = at >= 8 && at < 12;
    ASSERT_EQ(forged, is_version ? StatusKind::kNotFound : StatusKind::kCorrupt) << "byte " << at;
  }
}

TEST_F(EncryptedRecordTest, a_forged_payload_is_detected_under_correct_checksums) {
  const Bytes good = bytes_of(form_, op_of(row_));
  std::mt19937 random(3);
  for (int round = 0; round < 200; ++round) {
    Bytes bad = good;
    const std::size_t at = kRecordHeaderBytes + random() % (bad.size() - kRecordHeaderBytes);
    bad[at] ^= static_cast<std::byte>(1u << random() % 8);
    make_sums_right(&bad);
    ASSERT_EQ(read_bytes(form_, op_of(other_), bad).kind(), StatusKind::kCorrupt) << "byte " << at;
  }
}

TEST_F(EncryptedRecordTest, a_truncated_or_extended_record_is_detected) {
  const Bytes good = bytes_of(form_, op_of(row_));
  for (const std::size_t size : {std::size_t{0}, std::size_t{100}, kRecordHeaderBytes, good.size() - 1,
                                 good.size() - kPageBytes, good.size() + 1, good.size() + kPageBytes}) {
    Bytes bad = good;
    bad.resize(size);
    EXPECT_EQ(read_bytes(form_, op_of(other_), bad).kind(), StatusKind::kCorrupt) << size;
  }
}

TEST_F(EncryptedRecordTest, bytes_of_another_record_namespace_or_key_are_detected) {
  const Bytes good = bytes_of(form_, op_of(row_));
  EXPECT_EQ(read_bytes(form_, op_of(other_, 2), good).kind(), StatusKind::kCorrupt) << "of another key";
  EXPECT_EQ(read_bytes(form_, op_of(other_), good, space_of(2)).kind(), StatusKind::kCorrupt);
  // Moved here with a matching header: the authentication tag also covers the name and the namespace.
  Bytes renamed = bytes_of(form_, op_of(row_, 2));
  const std::string name(key_of(1).bytes());
  std::memcpy(renamed.data() + 52, name.data(), name.size());
  make_header_right(&renamed);
  EXPECT_EQ(read_bytes(form_, op_of(other_), renamed).kind(), StatusKind::kCorrupt);
  Bytes moved = bytes_of(form_, op_of(row_), space_of(2));
  std::memset(moved.data() + 16, 1, 32);
  make_header_right(&moved);
  EXPECT_EQ(read_bytes(form_, op_of(other_), moved).kind(), StatusKind::kCorrupt);
  // Puts the payload of one record under the header of another.
  const Bytes second = bytes_of(form_, op_of(row_));
  Bytes spliced = good;
  std::copy(second.begin() + kRecordHeaderBytes, second.end(), spliced.begin() + kRecordHeaderBytes);
  make_sums_right(&spliced);
  EXPECT_EQ(read_bytes(form_, op_of(other_), spliced).kind(), StatusKind::kCorrupt);
}

TEST_F(EncryptedRecordTest, a_form_with_keys_rejects_plain_records_and_one_without_rejects_encrypted_ones) {
  RecordForm plain({}), rotated({.keys = keys_of({2, 1})}), foreign({.keys = keys_of({2})});
  EXPECT_EQ(read_bytes(form_, op_of(other_), bytes_of(plain, op_of(row_))).kind(), StatusKind::kCorrupt);
  const Bytes encrypted = bytes_of(form_, op_of(row_));
  EXPECT_EQ(read_bytes(plain, op_of(other_), encrypted).kind(), StatusKind::kCorrupt);
  EXPECT_EQ(read_bytes(foreign, op_of(other_), encrypted).kind(), StatusKind::kCorrupt);
  EXPECT_TRUE(read_bytes(rotated, op_of(other_), encrypted));
  EXPECT_TRUE(other_.holds(1));
}

TEST_F(EncryptedRecordTest, records_larger_than_one_step_are_encrypted_completely) {
  const ShardSizes sizes = {RecordForm::kStepBytes * 2 + 1000, RecordForm::kStepBytes};
  Row large(sizes), found(sizes);
  large.fill(4);
  ASSERT_TRUE(read_bytes(form_, op_of(found), bytes_of(form_, op_of(large))));
  EXPECT_TRUE(found.holds(4));
}

#endif

}  // namespace
}  // namespace kv_offload
