// SPDX-License-Identifier: Apache-2.0
#include "backends/fs/tier.h"

#include <gtest/gtest.h>

#include "fixture.h"

namespace kv_offload {
namespace {

using namespace testing;

class FsTierTest : public ::testing::Test {
 protected:
  TempDir dir_;
  std::string root_ = dir_.path() + "/root";
};

TEST_F(FsTierTest, written_records_are_read_back) {
  TierUser user(options_for(root_));
  const std::vector<ShardSizes> shapes = {
      {4096}, {1}, {5000}, {1 << 20}, {4096, 4096, 4096, 4096}, {1, 5000, 4097, 12288}, {70001, 3, 8192, 99}};
  std::uint32_t number = 1;
  for (const ShardSizes& sizes : shapes) {
    EXPECT_FALSE(user.has(number));
    EXPECT_TRUE(user.write(number, sizes));
    EXPECT_TRUE(user.has(number));
    EXPECT_TRUE(user.read(number, sizes));
    ++number;
  }
  const TierStats stats = user.tier().stats();
  EXPECT_EQ(stats.chunks, shapes.size());
  EXPECT_EQ(stats.direct_ops + stats.buffered_ops, 2 * shapes.size());
  EXPECT_GT(user.tier().estimate_read_seconds(1 << 20), 0);
}

TEST_F(FsTierTest, direct_and_buffered_transfers_make_the_same_files) {
  std::vector<std::string> contents;
  for (const DirectMode mode : {DirectMode::kAuto, DirectMode::kOff}) {
    const std::string root = dir_.path() + (mode == DirectMode::kOff ? "/off" : "/auto");
    FsTierOptions options = options_for(root);
    options.o_direct = mode;
    TierUser user(options);
    EXPECT_TRUE(user.write(1, {5000, 4096, 1}));
    EXPECT_TRUE(user.read(1, {5000, 4096, 1}));
    EXPECT_TRUE(mode == DirectMode::kAuto || user.tier().stats().direct_ops == 0);
    std::ifstream file(path_of(root, 1), std::ios::binary);
    std::string bytes((std::istreambuf_iterator<char>(file)), {});
    ASSERT_EQ(bytes.size(), 4096u + 8192 + 4096 + 4096);
    contents.push_back(bytes.substr(4096));
  }
  EXPECT_EQ(contents[0], contents[1]);
  EXPECT_EQ(contents[0].find_first_not_of('\0', 5000), 8192u);  // the padding is zero
}

TEST_F(FsTierTest, a_restart_finds_all_records_at_once) {
  {
    TierUser user(options_for(root_));
    for (std::uint32_t i = 0; i < 200; ++i) ASSERT_TRUE(user.write(i));
  }
  TierUser user(options_for(root_));
  for (std::uint32_t i = 0; i < 200; ++i) EXPECT_TRUE(user.has(i)) << i;  // before or after the scan
  EXPECT_FALSE(user.has(1000));
  user.wait_for_scan();
  EXPECT_EQ(user.tier().stats().chunks, 200u);
  for (std::uint32_t i = 0; i < 200; ++i) EXPECT_TRUE(user.read(i));
  EXPECT_FALSE(user.has(1000));
}

TEST_F(FsTierTest, files_are_accessible_to_this_user_only) {
  TierUser user(options_for(root_));
  ASSERT_TRUE(user.write(1));
  walk(root_, [](const fs::path& path) {
    std::error_code error;
    const fs::file_status found = fs::status(path, error);
    if (found.type() == fs::file_type::not_found) return;
    EXPECT_EQ(found.permissions() & fs::perms::mask,
              fs::is_directory(found) ? fs::perms::owner_all : fs::perms::owner_read | fs::perms::owner_write)
        << path;
  });
  EXPECT_EQ(fs::status(root_).permissions(), fs::perms::owner_all);
}

TEST_F(FsTierTest, a_stored_record_is_not_written_again) {
  TierUser user(options_for(root_));
  ASSERT_TRUE(user.write(1));
  const Completion again = user.finish(user.start(OpKind::kWrite, 1, {8192}));
  EXPECT_TRUE(again.status);
  EXPECT_EQ(again.bytes, 0u);
}

TEST_F(FsTierTest, the_usage_equals_du) {
  TierUser user(options_for(root_));
  for (std::uint32_t i = 0; i < 50; ++i) ASSERT_TRUE(user.write(i, {4096 * (1 + i % 7)}));
  user.wait_for_scan();
  EXPECT_TRUE(user.usage_becomes_exact(root_));
}

TEST_F(FsTierTest, a_reset_invalidates_all_records_permanently) {
  {
    TierUser user(options_for(root_));
    for (std::uint32_t i = 0; i < 20; ++i) ASSERT_TRUE(user.write(i));
    user.wait_for_scan();
    EXPECT_TRUE(user.tier().reset());
    for (std::uint32_t i = 0; i < 20; ++i) EXPECT_FALSE(user.has(i));
    EXPECT_EQ(user.read(1).kind(), StatusKind::kNotFound);
    EXPECT_EQ(user.removed(TierRemoval::Reason::kReset), 20u);
    EXPECT_TRUE(user.write(3, {4096}));  // the same key, other bytes
    EXPECT_TRUE(user.read(3, {4096}));
    EXPECT_TRUE(user.until([&] { return records_in(root_).size() == 1; })) << "old bytes were not reclaimed";
    EXPECT_TRUE(user.usage_becomes_exact(root_));
  }
  TierUser user(options_for(root_));
  EXPECT_FALSE(user.has(1));
  EXPECT_FALSE(user.has(3)) << "no process has its weights any more";
  user.wait_for_scan();
  EXPECT_EQ(user.tier().stats().chunks, 0u);
}

TEST_F(FsTierTest, an_error_at_open_names_the_cause) {
  const auto message = [](const FsTierOptions& options) -> std::string {
    try {
      make_fs_tier(options);
    } catch (const std::exception& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_NE(message(options_for(root_, 4096)).find("max_bytes"), std::string::npos);
  FsTierOptions options = options_for(root_);
  ASSERT_EQ(message(options), "");

  fs::create_symlink(root_, dir_.path() + "/link");
  EXPECT_NE(message(options_for(dir_.path() + "/link")).find("symbolic link"), std::string::npos);
  std::ofstream(dir_.path() + "/file") << "x";
  EXPECT_NE(message(options_for(dir_.path() + "/file")).find("not a directory"), std::string::npos);
  fs::create_directory(dir_.path() + "/public");
  fs::permissions(dir_.path() + "/public", fs::perms::all);
  const std::string by_others = message(options_for(dir_.path() + "/public"));
  EXPECT_NE(by_others.find("chmod 700"), std::string::npos) << by_others;
  EXPECT_NE(by_others.find("fsGroupChangePolicy: OnRootMismatch"), std::string::npos) << by_others;
  EXPECT_NE(by_others.find("/public/kv"), std::string::npos)
      << "expected the suggestion of a directory inside the volume: " << by_others;
  std::ofstream(root_ + "/kv_offload.json") << "{\"format\": 9}";
  EXPECT_NE(message(options_for(root_)).find("another format"), std::string::npos);
}

TEST_F(FsTierTest, options_that_cannot_work_are_refused_before_anything_is_created) {
  const auto refused = [](FsTierOptions options, const std::function<void(FsTierOptions*)>& spoil) {
    spoil(&options);
    EXPECT_THROW(make_fs_tier(options), InvalidArgument);
    return !fs::exists(options.root_dir);
  };
  const FsTierOptions options = options_for(root_);
  EXPECT_TRUE(refused(options, [](FsTierOptions* spoilt) { spoilt->n_read_threads = 0; }));
  EXPECT_TRUE(refused(options, [](FsTierOptions* spoilt) { spoilt->n_write_threads = 0; }));
  EXPECT_TRUE(refused(options, [](FsTierOptions* spoilt) { spoilt->eviction_policy = "newest"; }));
}

}  // namespace
}  // namespace kv_offload
