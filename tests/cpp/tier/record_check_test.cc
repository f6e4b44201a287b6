// SPDX-License-Identifier: Apache-2.0
// Records whose bytes are read to the memory of a RecordCheck. Other checks are in the tests of each kind.
#include <gtest/gtest.h>

#include <algorithm>

#include "record/record_bytes.h"
#include "tier/remote_records.h"
#include "tier/tier_driver.h"

namespace kv_offload {
namespace {

using namespace testing;

class RecordCheckTest : public ::testing::Test {
 protected:
  RecordCheckTest() {
    RecordForm form({});
    Row row({20'000});
    row.fill(1);
    RecordOp op;
    op.key = key_of(1);
    op.shards = row.shards();
    bytes_ = bytes_of(form, op);
    named_.namespace_id = hex_of(space_of(1));
    named_.key = key_of(1).hex();
  }
  // Gives the bytes to the check in parts of at most 3000, each in its room().
  Status checked(WholeRecord* copy) {
    RecordCheck check(nullptr, copy);
    while (check.total() < bytes_.size()) {
      std::span<std::byte> room;
      if (Status status = check.room(5000, &room); !status) return status;
      EXPECT_LE(room.size(), 5000u);
      const auto rest = std::span(bytes_).subspan(check.total());
      const std::size_t part = std::min({room.size(), rest.size(), std::size_t{3000}});
      if (part == 0) return Status::error(StatusKind::kIo, "there is no room");
      std::copy_n(rest.begin(), part, room.begin());
      check.add(room.first(part));
      if (!check.has_header()) continue;
      if (Status status = check.check_header(named_, bytes_.size()); !status) return status;
    }
    return check.finish(named_);
  }
  Bytes bytes_;
  RemoteRecord named_;
};

TEST_F(RecordCheckTest, bytes_that_are_read_into_its_room_are_checked) {
  const Status status = checked(nullptr);
  EXPECT_TRUE(status) << status.to_string();
  bytes_.back() ^= std::byte{1};
  EXPECT_EQ(checked(nullptr).kind(), StatusKind::kCorrupt);
}

TEST_F(RecordCheckTest, bytes_that_are_read_into_its_room_are_checked_and_kept) {
  WholeRecord copy;
  for (int times = 0; times < 2; ++times) {
    const Status status = checked(&copy);
    ASSERT_TRUE(status) << status.to_string();
    EXPECT_TRUE(std::equal(bytes_.begin(), bytes_.end(), copy.bytes().begin(), copy.bytes().end()));
  }
  bytes_.back() ^= std::byte{1};
  EXPECT_EQ(checked(&copy).kind(), StatusKind::kCorrupt);
}

}  // namespace
}  // namespace kv_offload
