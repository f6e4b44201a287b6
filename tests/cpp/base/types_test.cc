#include <gtest/gtest.h>

#include "base/status.h"
#include "base/types.h"

namespace kv_offload {
namespace {

TEST(Status, carries_kind_errno_and_path) {
  const Status status = Status::from_errno(ENOSPC, "write", "/some/file");
  EXPECT_EQ(status.kind(), StatusKind::kNoSpace);
  EXPECT_EQ(status.to_string(), "no_space: write: No space left on device (errno 28) [/some/file]");
}

TEST(ChunkKey, hex_round_trip_and_group) {
  const ChunkKey key(std::string("\x01\x02\xff\x00\x00\x00\x00\x07", 8));
  EXPECT_EQ(key.group_id(), 7u);
  EXPECT_EQ(key.hex(), "0102ff0000000007");
  EXPECT_EQ(ChunkKey::from_hex(key.hex()), key);
  EXPECT_THROW(ChunkKey::from_hex("0102FF0000000007"), InvalidArgument);
  EXPECT_THROW(ChunkKey(std::string(48, 'x')), InvalidArgument);
}

TEST(ByteSize, parses_units_and_names_what_it_cannot) {
  EXPECT_EQ(parse_byte_size("32GiB"), 32ull << 30);
  EXPECT_EQ(parse_byte_size("1.5 KiB"), 1536u);
  EXPECT_EQ(parse_byte_size("7"), 7u);
  EXPECT_EQ(parse_byte_size("2GB"), 2'000'000'000u);
  EXPECT_THROW(parse_byte_size("lots"), InvalidArgument);
  EXPECT_THROW(parse_byte_size("-1GiB"), InvalidArgument);
}

}  // namespace
}  // namespace kv_offload
