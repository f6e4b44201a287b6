// SPDX-License-Identifier: Apache-2.0
#include "record/record.h"

#include <gtest/gtest.h>
#include <xxhash.h>

#include <limits>

#include "backends/fs/fixture.h"
#include "base/aligned_buffer.h"

namespace kv_offload {
namespace {

using testing::key_of;
using testing::Row;

RecordHeader some_header() {
  RecordHeader header;
  header.namespace_id.fill(7);
  header.key = key_of(1);
  header.group = 3;
  header.shard_bytes = {5000, 4096, 1};
  header.payload_bytes = 8192 + 4096 + 4096;
  header.codec = Codec::kSplitZstd;
  header.element = Element::kFp16;
  header.stored_bytes = 9000;
  header.checksum = 0x1234567890ABCDEFull;
  header.cipher = Cipher::kAes256Gcm;
  header.cipher_fields.key_id.fill(0x21);
  header.cipher_fields.salt.fill(0x22);
  header.cipher_fields.tag.fill(0x23);
  header.created_unix_nanos = 99;
  header.tenant = "acme-1";
  return header;
}

TEST(Record, the_header_decodes_to_the_same_values) {
  const AlignedBuffer page(kRecordHeaderBytes);
  const RecordHeader header = some_header();
  encode_header(header, page.span());
  RecordHeader found;
  ASSERT_TRUE(decode_header(page.span(), &found));
  EXPECT_EQ(found.namespace_id, header.namespace_id);
  EXPECT_EQ(found.key, header.key);
  EXPECT_EQ(found.group, header.group);
  EXPECT_EQ(found.shard_bytes, header.shard_bytes);
  EXPECT_EQ(found.payload_bytes, header.payload_bytes);
  EXPECT_EQ(found.codec, header.codec);
  EXPECT_EQ(found.element, header.element);
  EXPECT_EQ(found.stored_bytes, header.stored_bytes);
  EXPECT_EQ(found.checksum, header.checksum);
  EXPECT_EQ(found.cipher, header.cipher);
  EXPECT_EQ(found.cipher_fields, header.cipher_fields);
  EXPECT_EQ(found.created_unix_nanos, header.created_unix_nanos);
  EXPECT_EQ(found.tenant, header.tenant);
}

TEST(Record, fields_are_at_the_offsets_of_the_format) {
  const AlignedBuffer page(kRecordHeaderBytes);
  encode_header(some_header(), page.span());
  const auto byte = [&](std::size_t at) { return std::to_integer<int>(page.data()[at]); };
  EXPECT_EQ(std::memcmp(page.data(), "KVOREC1\n", 8), 0);
  EXPECT_EQ(byte(8), 2);
  EXPECT_EQ(byte(13), 0x10);  // 4096
  EXPECT_EQ(byte(16), 7);
  EXPECT_EQ(byte(48), 36);
  EXPECT_EQ(byte(100), 3);
  EXPECT_EQ(byte(104), 3);
  EXPECT_EQ(byte(108), 1);
  EXPECT_EQ(byte(113), 0x30);  // 12288
  EXPECT_EQ(byte(120), 0xEF);
  EXPECT_EQ(byte(128), 99);
  EXPECT_EQ(byte(136), 5000 % 256);
  EXPECT_EQ(byte(648), 2);
  EXPECT_EQ(byte(652), 1);
  EXPECT_EQ(byte(656), 9000 % 256);
  EXPECT_EQ(byte(664), 0x21);
  EXPECT_EQ(byte(680), 0x22);
  EXPECT_EQ(byte(712), 0x23);
  EXPECT_EQ(byte(727), 0x23);
  EXPECT_EQ(byte(728), 'a');
  EXPECT_EQ(byte(733), '1');
  EXPECT_EQ(byte(734), 0);
  EXPECT_EQ(byte(792), 0);
}

TEST(Record, the_name_of_a_tenant_is_a_name_or_missing) {
  const AlignedBuffer page(kRecordHeaderBytes);
  RecordHeader header = some_header(), found;
  for (const std::string& name : {std::string(), std::string("a"), std::string(64, 'z')}) {
    header.tenant = name;
    encode_header(header, page.span());
    ASSERT_TRUE(decode_header(page.span(), &found));
    EXPECT_EQ(found.tenant, name);
  }
  for (const std::string& name : {std::string("a b"), std::string("a/b"), std::string(65, 'z')}) {
    header.tenant = name;
    encode_header(header, page.span());
    ASSERT_TRUE(decode_header(page.span(), &found)) << name;
    EXPECT_EQ(found.tenant, "") << "an impossible name is not stored";
  }
}

TEST(Record, every_flipped_byte_of_the_header_is_detected) {
  const AlignedBuffer page(kRecordHeaderBytes);
  encode_header(some_header(), page.span());
  RecordHeader found;
  for (std::size_t at = 0; at < kRecordHeaderBytes; ++at) {
    page.data()[at] ^= std::byte{0x10};
    EXPECT_EQ(decode_header(page.span(), &found).kind(), StatusKind::kCorrupt) << "byte " << at;
    page.data()[at] ^= std::byte{0x10};
  }
  EXPECT_TRUE(decode_header(page.span(), &found));
}

TEST(Record, a_header_of_another_record_does_not_match) {
  const RecordHeader header = some_header();
  const Row row({5000, 4096, 1});
  const auto shards = row.shards();
  EXPECT_TRUE(match_header(header, header.namespace_id, header.key, 3, shards));
  NamespaceId other = header.namespace_id;
  other[31] ^= 1;
  EXPECT_EQ(match_header(header, other, header.key, 3, shards).kind(), StatusKind::kCorrupt);
  EXPECT_EQ(match_header(header, header.namespace_id, key_of(2), 3, shards).kind(), StatusKind::kCorrupt);
  EXPECT_EQ(match_header(header, header.namespace_id, header.key, 2, shards).kind(), StatusKind::kCorrupt);
  const Row longer({5000, 4096, 2});
  const auto other_shards = longer.shards();
  EXPECT_EQ(match_header(header, header.namespace_id, header.key, 3, other_shards).kind(),
            StatusKind::kCorrupt);
  const std::vector<Shard> fewer(shards.begin(), shards.end() - 1);
  EXPECT_EQ(match_header(header, header.namespace_id, header.key, 3, fewer).kind(), StatusKind::kCorrupt);
}

// Each case has a valid checksum, and no writer of ours could have produced it.
TEST(Record, a_header_with_inconsistent_numbers_is_rejected) {
  const AlignedBuffer page(kRecordHeaderBytes);
  struct Case {
    std::size_t at;
    std::uint32_t value;
  };
  const std::uint64_t padded = some_header().payload_bytes;
  for (const Case& wrong :
       {Case{108, 2}, Case{108, 3}, Case{108, 5}, Case{648, 3}, Case{652, 2}, Case{652, 0}, Case{108, 0},
        Case{656, 0}, Case{656, 12289}, Case{656, static_cast<std::uint32_t>(padded)},
        Case{112, static_cast<std::uint32_t>(padded)}, Case{728, 1}, Case{728, 0x2F6D6361}, Case{740, 1},
        Case{792, 1}, Case{796, 1}, Case{800, 1}, Case{4084, 1}}) {
    encode_header(some_header(), page.span());
    std::memcpy(page.data() + wrong.at, &wrong.value, sizeof(wrong.value));
    const std::uint64_t checksum = XXH3_64bits(page.data(), kRecordHeaderBytes - 8);
    std::memcpy(page.data() + kRecordHeaderBytes - 8, &checksum, sizeof(checksum));
    RecordHeader found;
    EXPECT_EQ(decode_header(page.span(), &found).kind(), StatusKind::kCorrupt) << "at " << wrong.at;
    EXPECT_EQ(other_version(page.span()), 0u);
  }
}

RecordHeader lossy_header() {
  RecordHeader header = some_header();
  header.codec = Codec::kLossy;
  header.element = Element::kBf16;
  header.loss = {0.05F, 0.03F, 0.1F};
  return header;
}

TEST(Record, the_header_of_a_lossy_record_states_its_loss) {
  const AlignedBuffer page(kRecordHeaderBytes);
  encode_header(lossy_header(), page.span());
  RecordHeader found;
  ASSERT_TRUE(decode_header(page.span(), &found));
  EXPECT_EQ(found.codec, Codec::kLossy);
  EXPECT_EQ(found.loss, (Loss{0.05F, 0.03F, 0.1F}));
  float stated[3] = {};
  std::memcpy(stated, page.data() + 792, sizeof(stated));
  EXPECT_EQ(stated[0], 0.05F) << "keys";
  EXPECT_EQ(stated[1], 0.03F) << "the payload";
  EXPECT_EQ(stated[2], 0.1F) << "values";
}

TEST(Record, an_impossible_loss_is_rejected) {
  const AlignedBuffer page(kRecordHeaderBytes);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  RecordHeader header = lossy_header(), found;
  for (const Loss& loss : {Loss{-0.1F, 0.0F}, Loss{0.7F, 0.1F}, Loss{nan, 0.1F}, Loss{0.1F, 0.2F},
                           Loss{0.1F, nan}, Loss{0.1F, -0.1F}, Loss{0.1F, 0.1F, 0.7F},
                           Loss{0.1F, 0.1F, -0.1F}, Loss{0.1F, 0.1F, nan}, Loss{0.1F, 0.3F, 0.2F}}) {
    header.loss = loss;
    encode_header(header, page.span());
    EXPECT_EQ(decode_header(page.span(), &found).kind(), StatusKind::kCorrupt)
        << loss.keys << " " << loss.rms << " " << loss.values;
  }
  for (const Loss& loss : {Loss{0.6F, 0.6F}, Loss{0.1F, 0.2F, 0.6F}, Loss{0, 0.1F, 0.1F}}) {
    header.loss = loss;
    encode_header(header, page.span());
    EXPECT_TRUE(decode_header(page.span(), &found));
  }
  header.element = Element::kBytes;
  encode_header(header, page.span());
  EXPECT_EQ(decode_header(page.span(), &found).kind(), StatusKind::kCorrupt) << "not numbers";
  header = some_header();
  for (const Loss& loss : {Loss{0.1F, 0.1F}, Loss{0, 0, 0.1F}}) {
    header.loss = loss;
    encode_header(header, page.span());
    EXPECT_EQ(decode_header(page.span(), &found).kind(), StatusKind::kCorrupt) << "another codec";
  }
}

TEST(Record, fp8_is_an_element_of_lossy_records_only) {
  const AlignedBuffer page(kRecordHeaderBytes);
  for (const Element element : {Element::kE4m3, Element::kE5m2}) {
    RecordHeader header = lossy_header(), found;
    header.element = element;
    encode_header(header, page.span());
    ASSERT_TRUE(decode_header(page.span(), &found));
    EXPECT_EQ(found.element, element);
    header.element = static_cast<Element>(5);
    encode_header(header, page.span());
    EXPECT_EQ(decode_header(page.span(), &found).kind(), StatusKind::kCorrupt) << "unknown";
    header = some_header();
    header.element = element;
    encode_header(header, page.span());
    EXPECT_EQ(decode_header(page.span(), &found).kind(), StatusKind::kCorrupt) << "without loss";
  }
}

TEST(Record, an_encoded_record_that_saves_no_page_is_rejected) {
  const AlignedBuffer page(kRecordHeaderBytes);
  RecordHeader header = some_header(), found;
  for (const std::uint64_t stored : {header.payload_bytes - kPageBytes + 1, header.payload_bytes,
                                     header.payload_bytes + 1, std::uint64_t{1} << 60}) {
    header.stored_bytes = stored;
    encode_header(header, page.span());
    EXPECT_EQ(decode_header(page.span(), &found).kind(), StatusKind::kCorrupt) << stored;
  }
  header.stored_bytes = header.payload_bytes - kPageBytes;
  encode_header(header, page.span());
  EXPECT_TRUE(decode_header(page.span(), &found));
}

TEST(Record, the_authenticated_fields_exclude_only_those_computed_after_them) {
  const AlignedBuffer fields(kRecordHeaderBytes), others(kRecordHeaderBytes);
  RecordHeader header = some_header();
  encode_authenticated_fields(header, fields.span());
  header.checksum ^= 1;
  header.cipher_fields.tag.fill(9);
  encode_authenticated_fields(header, others.span());
  EXPECT_EQ(std::memcmp(fields.data(), others.data(), kRecordHeaderBytes), 0);
  header.created_unix_nanos ^= 1;
  encode_authenticated_fields(header, others.span());
  EXPECT_NE(std::memcmp(fields.data(), others.data(), kRecordHeaderBytes), 0);
}

TEST(Record, the_payload_checksum_covers_every_byte_and_no_padding) {
  Row row({5000, 100});
  row.fill(1);
  auto shards = row.shards();
  const std::uint64_t checksum = payload_checksum(shards);
  for (const std::size_t at : {0u, 1u, 2500u, 4095u, 4096u, 4999u}) {
    shards[0][at] ^= std::byte{1};
    EXPECT_NE(payload_checksum(shards), checksum) << "byte " << at;
    shards[0][at] ^= std::byte{1};
  }
  shards[1][99] ^= std::byte{1};
  EXPECT_NE(payload_checksum(shards), checksum);
  shards[1][99] ^= std::byte{1};
  shards[1].data()[100] ^= std::byte{1};  // after the shard
  EXPECT_EQ(payload_checksum(shards), checksum);
  EXPECT_EQ(padded_payload_bytes(shards), 12288u);
}

TEST(Record, the_checksum_does_not_depend_on_how_the_payload_is_split) {
  Row whole({8192});
  whole.fill(5);
  const auto one = whole.shards();
  const std::vector<Shard> two{one[0].first(4096), one[0].subspan(4096)};
  EXPECT_EQ(payload_checksum(one), payload_checksum(two));
}

}  // namespace
}  // namespace kv_offload
