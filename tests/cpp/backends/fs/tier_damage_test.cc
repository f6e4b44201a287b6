// SPDX-License-Identifier: Apache-2.0
// Ten thousand damaged records: each is detected before a byte of it is used, counted as corrupt and removed.
#include <gtest/gtest.h>
#include <xxhash.h>

#include <fcntl.h>

#include <array>
#include <limits>
#include <set>

#include "fixture.h"
#include "record/record.h"
#include "sim_disk.h"
#include "test_iterations.h"

namespace kv_offload {
namespace {

using namespace testing;

const ShardSizes kDamageShards = {12000, 1, 4096};
constexpr std::size_t kFileBytes = 4096 + 12288 + 4096 + 4096;

enum class Damage { kBit, kHeaderBit, kFieldByte, kZeroPage, kCut, kGrown, kOtherRecord, kSpliced, kNoise };
constexpr std::array kDamages = {Damage::kBit,         Damage::kHeaderBit, Damage::kFieldByte,
                                 Damage::kZeroPage,    Damage::kCut,       Damage::kGrown,
                                 Damage::kOtherRecord, Damage::kSpliced,   Damage::kNoise};

SimDisk::Bytes damaged(SimDisk::Bytes bytes, const SimDisk::Bytes& other, Damage damage,
                       std::mt19937_64& random) {
  const auto flip = [&](std::size_t at) { bytes[at] ^= static_cast<std::byte>(1u << random() % 8); };
  const std::size_t pages = bytes.size() / kPageBytes;
  switch (damage) {
    case Damage::kBit:
      flip(random() % bytes.size());
      break;
    case Damage::kHeaderBit:
      flip(random() % kRecordHeaderBytes);
      break;
    case Damage::kFieldByte:
      flip(random() % 160);
      break;
    case Damage::kZeroPage:
      std::fill_n(bytes.begin() + static_cast<std::ptrdiff_t>(random() % pages * kPageBytes), kPageBytes,
                  std::byte{0});
      break;
    case Damage::kCut:
      bytes.resize(random() % bytes.size());
      break;
    case Damage::kGrown:
      bytes.resize(bytes.size() + 1 + random() % 8192);
      break;
    case Damage::kOtherRecord:
      bytes = other;
      break;
    case Damage::kSpliced: {  // header of one record, payload of another
      const std::size_t at = (1 + random() % (pages - 1)) * kPageBytes;
      std::copy(other.begin() + static_cast<std::ptrdiff_t>(at), other.end(),
                bytes.begin() + static_cast<std::ptrdiff_t>(at));
      break;
    }
    case Damage::kNoise:
      for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
      break;
  }
  return bytes;
}

class FsTierDamage : public ::testing::Test {
 protected:
  FsTierDamage() {
    options_ = options_for("/root");
    options_.file_ops = &disk_;
    options_.clock = &clock_;
  }
  std::string path_of(std::uint32_t number) {
    const ChunkKey key = key_of(number);
    return "/root/" + layout::namespace_name(options_.namespace_id) + "/g1/" +
           layout::record_path(key, kFileBytes);
  }
  SimDisk disk_;
  FakeClock clock_;
  FsTierOptions options_;
};

TEST_F(FsTierDamage, all_of_ten_thousand_random_damages_are_detected) {
  TierUser user(options_);
  user.wait_for_scan();
  std::mt19937_64 random(5);
  constexpr std::uint32_t kOther = 1000000;
  ASSERT_TRUE(user.write(kOther, kDamageShards));
  const SimDisk::Bytes other = disk_.content(path_of(kOther));
  std::uint32_t planted = 0;
  std::set<std::uint32_t> spared;
  for (std::uint32_t round = 0; planted < static_cast<std::uint32_t>(rounds(10000)); ++round) {
    const std::uint32_t number = round % 100;
    ASSERT_TRUE(user.write(number, kDamageShards));
    const SimDisk::Bytes good = disk_.content(path_of(number));
    const SimDisk::Bytes bad = damaged(good, other, kDamages[round % kDamages.size()], random);
    if (bad == good) {  // that page contained zeros
      spared.insert(number);
      continue;
    }
    spared.erase(number);
    disk_.replace(path_of(number), bad);
    ++planted;
    const Status status = user.read(number, kDamageShards);
    ASSERT_EQ(status.kind(), StatusKind::kCorrupt)
        << "damage " << round % kDamages.size() << " in round " << round << ": " << status.to_string();
    ASSERT_FALSE(user.has(number));
  }
  EXPECT_EQ(user.removed(TierRemoval::Reason::kCorrupt), planted);
  EXPECT_TRUE(user.read(kOther, kDamageShards));
  // kOther and six files of the root itself.
  EXPECT_EQ(disk_.files().size(), 7 + spared.size()) << "a damaged record was left";
}

// A record of another format version with valid checksums is a miss and not damage.
TEST_F(FsTierDamage, records_of_other_formats_are_never_accepted) {
  TierUser user(options_);
  for (const std::uint32_t version : {1u, 3u, 255u}) {
    ASSERT_TRUE(user.write(1, kDamageShards));
    SimDisk::Bytes bytes = disk_.content(path_of(1));
    std::memcpy(bytes.data() + 8, &version, sizeof(version));
    const std::uint64_t checksum = XXH3_64bits(bytes.data(), kRecordHeaderBytes - 8);
    std::memcpy(bytes.data() + kRecordHeaderBytes - 8, &checksum, sizeof(checksum));
    disk_.replace(path_of(1), bytes);
    const Status status = user.read(1, kDamageShards);
    EXPECT_EQ(status.kind(), StatusKind::kNotFound);
    EXPECT_NE(status.message().find("version"), std::string::npos) << status.to_string();
    EXPECT_EQ(user.finish(user.start(OpKind::kWrite, 1, kDamageShards)).bytes,
              kFileBytes - kRecordHeaderBytes)
        << "the record in its place does not block the write";
    EXPECT_TRUE(user.read(1, kDamageShards));
    disk_.replace(path_of(1), bytes);
    EXPECT_EQ(user.read(1, kDamageShards).kind(), StatusKind::kNotFound);
  }
  EXPECT_EQ(user.removed(TierRemoval::Reason::kCorrupt), 0u);
  EXPECT_EQ(user.removed(TierRemoval::Reason::kVanished), 6u);
}

// The control: damage that checksums cannot detect, because they were corrected.
TEST_F(FsTierDamage, the_comparison_detects_a_wrong_byte_under_valid_checksums) {
  TierUser user(options_);
  ASSERT_TRUE(user.write(1, kDamageShards));
  SimDisk::Bytes bytes = disk_.content(path_of(1));
  const std::span<std::byte> page(bytes.data(), kRecordHeaderBytes);
  RecordHeader header;
  ASSERT_TRUE(decode_header(page, &header));
  bytes[5000] ^= std::byte{1};
  header.checksum = XXH3_64bits(bytes.data() + kRecordHeaderBytes, bytes.size() - kRecordHeaderBytes);
  encode_header(header, page);
  disk_.replace(path_of(1), bytes);
  const OpId read = user.start(OpKind::kRead, 1, kDamageShards);
  EXPECT_TRUE(user.finish(read).status);
  EXPECT_FALSE(user.holds_what_it_should(read));
}

// Clocks jump: file times may have any value, and only their order matters.
TEST_F(FsTierDamage, file_times_of_any_year_only_define_an_order) {
  constexpr std::int64_t kLongAgo = std::numeric_limits<std::int64_t>::min();
  constexpr std::int64_t kFarAway = std::numeric_limits<std::int64_t>::max();
  {
    TierUser user(options_);
    for (std::uint32_t i = 0; i < 6; ++i) ASSERT_TRUE(user.write(i, kDamageShards));
  }
  const std::array<std::int64_t, 6> times = {kFarAway, 0, kLongAgo, -1, 1, kFarAway - 1};
  for (std::uint32_t i = 0; i < 6; ++i) ASSERT_EQ(disk_.set_mtime(AT_FDCWD, path_of(i), times[i]), 0);
  disk_.kill();
  disk_.boot();
  TierUser user(options_);
  user.wait_for_scan();
  for (std::uint32_t i = 0; i < 6; ++i) EXPECT_TRUE(user.read(i, kDamageShards)) << i;
}

}  // namespace
}  // namespace kv_offload
