// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cerrno>

#include "base/status.h"
#include "base/types.h"

namespace kv_offload {
namespace {

TEST(Status, a_status_has_kind_errno_and_path) {
  const Status status = Status::from_errno(ENOSPC, "write", "/some/file");
  EXPECT_EQ(status.kind(), StatusKind::kNoSpace);
  EXPECT_EQ(status.to_string(), "no_space: write: No space left on device (errno 28) [/some/file]");
}

TEST(Status, errno_values_map_to_status_kinds) {
  EXPECT_TRUE(Status::ok().is_ok());
  EXPECT_EQ(Status::ok().to_string(), "ok");
  EXPECT_EQ(Status::from_errno(ENOENT, "open").kind(), StatusKind::kNotFound);
  EXPECT_EQ(Status::from_errno(EDQUOT, "write").kind(), StatusKind::kNoSpace);
  EXPECT_EQ(Status::from_errno(ETIMEDOUT, "read").kind(), StatusKind::kTimeout);
  EXPECT_EQ(Status::from_errno(EACCES, "open").kind(), StatusKind::kIo);
  EXPECT_EQ(to_string(StatusKind::kUnavailable), "unavailable");
  EXPECT_EQ(to_string(StatusKind::kExpired), "expired");
}

TEST(ChunkKey, keys_of_another_length_or_group_are_different) {
  const ChunkKey a(std::string("\x01\x00\x00\x00\x00", 5));
  const ChunkKey longer(std::string("\x01\x00\x00\x00\x00\x00", 6));
  const ChunkKey group_1(std::string("\x01\x00\x00\x00\x01", 5));
  EXPECT_NE(a, longer) << "zero padding is not part of the key";
  EXPECT_LT(a, longer);
  EXPECT_LT(a, group_1);
  EXPECT_NE(ChunkKey::Hash()(a), ChunkKey::Hash()(group_1));
  EXPECT_THROW(ChunkKey(std::string(4, 'x')), InvalidArgument);
  EXPECT_THROW(ChunkKey::from_hex("012"), InvalidArgument);
}

TEST(ChunkKey, hex_text_parses_back_to_the_same_key) {
  const ChunkKey key(std::string("\x01\x02\xff\x00\x00\x00\x00\x07", 8));
  EXPECT_EQ(key.group_id(), 7u);
  EXPECT_EQ(key.hex(), "0102ff0000000007");
  EXPECT_EQ(ChunkKey::from_hex(key.hex()), key);
  EXPECT_THROW(ChunkKey::from_hex("0102FF0000000007"), InvalidArgument);
  EXPECT_THROW(ChunkKey(std::string(48, 'x')), InvalidArgument);
}

TEST(ByteSize, units_are_parsed_and_invalid_sizes_refused) {
  EXPECT_EQ(parse_byte_size("32GiB"), 32ull << 30);
  EXPECT_EQ(parse_byte_size("1.5 KiB"), 1536u);
  EXPECT_EQ(parse_byte_size("7B"), 7u);
  EXPECT_EQ(parse_byte_size("2GB"), 2'000'000'000u);
  EXPECT_EQ(parse_byte_size("1048576"), 1u << 20);
  EXPECT_THROW(parse_byte_size("lots"), InvalidArgument);
  EXPECT_THROW(parse_byte_size("-1GiB"), InvalidArgument);
}

TEST(ByteSize, kubernetes_units_are_parsed) {
  EXPECT_EQ(parse_byte_size("32Gi"), 32ull << 30);
  EXPECT_EQ(parse_byte_size("32G"), 32'000'000'000u);
  EXPECT_EQ(parse_byte_size("512M"), 512'000'000u);
  EXPECT_EQ(parse_byte_size("512 mi"), 512u << 20);
  EXPECT_EQ(parse_byte_size("4Ki"), 4096u);
  EXPECT_EQ(parse_byte_size("1P"), 1'000'000'000'000'000u);
}

TEST(ByteSize, a_size_below_a_mebibyte_needs_a_unit) {
  EXPECT_THROW(parse_byte_size("32"), InvalidArgument);
  EXPECT_THROW(parse_byte_size("1e3"), InvalidArgument);
  EXPECT_THROW(parse_byte_size("1048575"), InvalidArgument);
  EXPECT_EQ(parse_byte_size("32B"), 32u);
  EXPECT_EQ(parse_byte_size("0"), 0u);  // the same in every unit
}

TEST(ByteSize, a_size_is_formatted_in_its_largest_unit) {
  EXPECT_EQ(format_bytes(1023), "1023 B");
  EXPECT_EQ(format_bytes(1536), "1.5 KiB");
  EXPECT_EQ(format_bytes(32ull << 30), "32.0 GiB");
}

}  // namespace
}  // namespace kv_offload
