// SPDX-License-Identifier: Apache-2.0
#include "backends/fs/root.h"

#include <gtest/gtest.h>
#include <xxhash.h>

#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <functional>

#include "backends/fs/verify.h"
#include "fixture.h"
#include "tier/encrypted_medium.h"

namespace kv_offload {
namespace {

using namespace testing;

class FsRootTest : public ::testing::Test {
 protected:
  FsRootTest() {
    TierUser user(options_for(root_));
    for (std::uint32_t i = 0; i < 6; ++i) EXPECT_TRUE(user.write(i, {5000, 4096}));
    FsTierOptions other = options_for(root_);
    other.namespace_id.fill(0x22);
    other.namespace_json = "{}";
    TierUser second(other);
    EXPECT_TRUE(second.write(1));
  }
  void flip(std::uint32_t number, std::streamoff at) {
    std::fstream file(path_of(root_, number), std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(at);
    file.put('!');
  }
  TempDir dir_;
  std::string root_ = dir_.path() + "/root";
};

TEST_F(FsRootTest, stat_reports_the_content) {
  std::ofstream(root_ + "/.tmp-1-00-1") << "x";
  FsRoot root(root_);
  const RootInfo info = root.stat();
  EXPECT_EQ(info.bytes, du(root_));
  EXPECT_EQ(info.records, 7u);
  EXPECT_EQ(info.temporaries, 1u);
  ASSERT_EQ(info.namespaces.size(), 2u);
  EXPECT_EQ(info.namespaces[0].id, std::string(64, '1'));
  EXPECT_EQ(info.namespaces[0].records, 6u);
  EXPECT_EQ(info.namespaces[0].epoch, 1u);
  EXPECT_NE(info.namespaces[0].json.find("bf16"), std::string::npos);
  EXPECT_LE(info.namespaces[0].oldest_unix_nanos, info.namespaces[0].newest_unix_nanos);
  EXPECT_FALSE(info.namespaces[0].open);
}

TEST_F(FsRootTest, records_of_one_or_all_namespaces_are_listed) {
  FsRoot root(root_);
  std::size_t all = 0, one = 0;
  for (auto cursor = root.records(std::nullopt); cursor.next();) ++all;
  for (auto cursor = root.records(std::string(64, '2')); auto record = cursor.next();) {
    ++one;
    EXPECT_EQ(record->key, key_of(1).hex());
    EXPECT_EQ(record->bytes, 12288u);
    EXPECT_TRUE(fs::exists(record->path));
  }
  EXPECT_EQ(all, 7u);
  EXPECT_EQ(one, 1u);
  EXPECT_THROW(root.records("nothing"), InvalidArgument);
}

TEST_F(FsRootTest, verify_finds_damage_and_repair_removes_it) {
  FsRoot root(root_);
  std::uint64_t seen = 0;
  EXPECT_TRUE(root.verify(false,
                          [&](std::uint64_t done, std::uint64_t all) {
                            EXPECT_EQ(done, ++seen);
                            EXPECT_EQ(all, 7u);
                          })
                  .empty());
  flip(2, 5000);
  flip(3, 100);
  fs::resize_file(path_of(root_, 4), 4096);
  auto damaged = root.verify(false, {});
  ASSERT_EQ(damaged.size(), 3u);
  for (const DamagedRecord& record : damaged) {
    EXPECT_EQ(record.kind, StatusKind::kCorrupt);
    EXPECT_FALSE(record.removed);
    EXPECT_FALSE(record.message.empty());
    EXPECT_TRUE(fs::exists(record.path));
  }
  damaged = root.verify(true, {});
  EXPECT_EQ(damaged.size(), 3u);
  EXPECT_EQ(root.stat().records, 4u);
  EXPECT_TRUE(root.verify(false, {}).empty());
  TierUser user(options_for(root_));
  user.wait_for_scan();
  EXPECT_TRUE(user.usage_becomes_exact(root_));
}

TEST_F(FsRootTest, verify_finds_records_that_no_lookup_can_find) {
  const fs::path misplaced = path_of(root_, 1).parent_path() / path_of(root_, 2).filename();
  fs::rename(path_of(root_, 2), misplaced);
  const fs::path misspelt = path_of(root_, 3).parent_path() / "abc.rec";
  fs::rename(path_of(root_, 3), misspelt);
  FsRoot root(root_);
  const auto damaged = root.verify(true, {});
  ASSERT_EQ(damaged.size(), 2u);
  for (const DamagedRecord& record : damaged) EXPECT_TRUE(record.removed) << record.path;
  EXPECT_FALSE(fs::exists(misplaced));
  EXPECT_FALSE(fs::exists(misspelt));
  EXPECT_TRUE(root.verify(false, {}).empty());
}

TEST_F(FsRootTest, purge_removes_one_namespace_or_all_even_while_in_use) {
  FsRoot root(root_);
  TierUser user(options_for(root_));
  user.wait_for_scan();
  const std::uint64_t before = du(root_);
  const auto [records, bytes] = root.purge(std::string(64, '2'));
  EXPECT_EQ(records, 1u);
  EXPECT_EQ(bytes, before - du(root_));
  EXPECT_FALSE(fs::exists(root_ + "/" + std::string(64, '2')));
  EXPECT_TRUE(user.read(1, {5000, 4096}));
  EXPECT_EQ(root.purge(std::nullopt).first, 6u);
  EXPECT_EQ(user.read(1, {5000, 4096}).kind(), StatusKind::kNotFound);
  EXPECT_TRUE(user.write(9));
  EXPECT_TRUE(user.read(9));
  EXPECT_TRUE(user.usage_becomes_exact(root_));
}

// Runs `check` in a process that owns the root and is not privileged to ignore file permissions.
bool without_privileges(const std::string& root, const std::function<bool()>& check) {
  constexpr ::uid_t kUser = 65534;
  const ::pid_t child = ::fork();
  if (child == 0) {
    ::alarm(60);  // a child must not hang the test
    bool prepared = true;
    if (::geteuid() == 0) {
      prepared = ::lchown(fs::path(root).parent_path().c_str(), kUser, kUser) == 0;
      for (const auto& entry : fs::recursive_directory_iterator(fs::path(root).parent_path()))
        prepared = ::lchown(entry.path().c_str(), kUser, kUser) == 0 && prepared;
      prepared = prepared && ::setgid(kUser) == 0 && ::setuid(kUser) == 0;
    }
    ::_exit(prepared && check() ? 0 : 1);
  }
  int status = 1;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

TEST_F(FsRootTest, a_directory_that_cannot_be_listed_is_not_reported_as_good) {
  const fs::path leaf = path_of(root_, 2).parent_path();
  EXPECT_TRUE(without_privileges(root_, [&] { return FsRoot(root_).verify(false, {}).empty(); }));
  for (const fs::path& directory : {leaf, leaf.parent_path(), leaf.parent_path().parent_path()}) {
    const auto is_reported = [&] {
      fs::permissions(directory, fs::perms::none);
      const std::vector<DamagedRecord> found = FsRoot(root_).verify(true, {});
      const RootInfo shown = FsRoot(root_).stat();
      fs::permissions(directory, fs::perms::owner_all);
      return found.size() == 1 && found[0].path == directory && found[0].kind == StatusKind::kIo &&
             !found[0].removed && shown.unreadable.size() == 1 && shown.unreadable[0].path == directory &&
             shown.namespaces.size() == 2 && shown.records < 7;
    };
    EXPECT_TRUE(without_privileges(root_, is_reported)) << directory;
  }
}

TEST_F(FsRootTest, a_purge_that_cannot_remove_a_record_fails) {
  const fs::path leaf = path_of(root_, 2).parent_path();
  for (const fs::perms mode : {fs::perms::owner_read | fs::perms::owner_exec, fs::perms::none}) {
    const auto is_refused = [&] {
      fs::permissions(leaf, mode);
      bool refused = false;
      try {
        (void)FsRoot(root_).purge(std::nullopt);
      } catch (const ResourceError& error) {
        refused = std::string(error.what()).find(leaf.string()) != std::string::npos;
      }
      fs::permissions(leaf, fs::perms::owner_all);
      return refused && records_in(root_).size() == 1 && !path_of(root_, 2).empty();
    };
    EXPECT_TRUE(without_privileges(root_, is_refused));
  }
  EXPECT_EQ(FsRoot(root_).purge(std::nullopt).first, 1u);
}

TEST_F(FsRootTest, records_behind_one_that_cannot_be_removed_are_removed) {
  const fs::path record = path_of(root_, 2);
  EXPECT_THROW((void)FsRoot(root_).remove({record.parent_path().string(), record.string()}), ResourceError);
  EXPECT_FALSE(fs::exists(record));
}

TEST_F(FsRootTest, a_record_is_read_as_it_is_stored_unless_it_is_damaged) {
  const std::string space(64, '1'), path = path_of(root_, 1).string();
  WholeRecord record;
  ASSERT_TRUE(read_record_file(path, space, nullptr, &record));
  std::ifstream file(path, std::ios::binary);
  const std::string stored{std::istreambuf_iterator<char>(file), {}};
  const std::string_view read(reinterpret_cast<const char*>(record.bytes().data()), record.bytes().size());
  EXPECT_TRUE(stored == read);
  EXPECT_EQ(record.header().key, key_of(1));
  EXPECT_EQ(read_record_file(path, std::string(64, '2'), nullptr, &record).kind(), StatusKind::kCorrupt);
  EXPECT_EQ(read_record_file(root_ + "/ledger", space, nullptr, &record).kind(), StatusKind::kCorrupt);
  EXPECT_EQ(read_record_file(path_of(root_, 2).string() + "x", space, nullptr, &record).kind(),
            StatusKind::kCorrupt);
  flip(1, 5000);
  EXPECT_EQ(read_record_file(path, space, nullptr, &record).kind(), StatusKind::kCorrupt);
  fs::remove(path);
  EXPECT_EQ(read_record_file(path, space, nullptr, &record).kind(), StatusKind::kNotFound);
}

TEST_F(FsRootTest, the_startup_epoch_ends_with_a_reset) {
  FsRoot root(root_);
  const std::string space(64, '1');
  EXPECT_EQ(root.startup_epoch(space), 1u);
  EXPECT_EQ(root.startup_epoch(std::string(64, '3')), std::nullopt);
  TierUser user(options_for(root_));
  ASSERT_TRUE(user.tier().reset());
  EXPECT_EQ(root.startup_epoch(space), std::nullopt) << "the next process that starts makes another one";
  const TierUser next(options_for(root_));
  EXPECT_EQ(root.startup_epoch(space), 3u);
}

TEST_F(FsRootTest, a_namespace_that_cannot_be_read_is_not_one_without_an_epoch) {
  const std::string space(64, '4');
  std::ofstream(fs::path(root_) / space) << "not a directory";
  FsRoot root(root_);
  EXPECT_THROW((void)root.startup_epoch(space), ResourceError);
}

TEST_F(FsRootTest, records_that_are_removed_are_subtracted_once) {
  TierUser user(options_for(root_));
  user.wait_for_scan();
  FsRoot root(root_);
  const std::vector<std::string> paths{path_of(root_, 1).string(), path_of(root_, 2).string()};
  EXPECT_EQ(root.remove(paths), 2u);
  EXPECT_EQ(root.remove(paths), 0u) << "they are missing";
  EXPECT_EQ(records_in(root_).size(), 5u);
  // If the server's count of the root ends meanwhile, the sum may be too high until the next count.
  EXPECT_GE(directory_usage(root_), du(root_)) << "according to the ledger";
  EXPECT_TRUE(user.usage_becomes_exact(root_));
  EXPECT_THROW(root.remove({root_ + "/ledger/x"}), ResourceError);
}

TEST_F(FsRootTest, a_directory_that_is_not_a_root_is_refused) {
  EXPECT_THROW(FsRoot(dir_.path()), InvalidArgument);
  EXPECT_THROW(FsRoot(dir_.path() + "/nothing"), InvalidArgument);
}

TEST_F(FsRootTest, a_probe_measures_and_leaves_no_files) {
  const DiskProbe probe = probe_disk(dir_.path(), 1 << 20, 65536);
  EXPECT_GT(probe.write_bytes_per_second, 0);
  EXPECT_GT(probe.read_bytes_per_second, 0);
  EXPECT_EQ(std::distance(fs::directory_iterator(dir_.path()), {}), 1);
  EXPECT_THROW(probe_disk(dir_.path(), 1 << 20, 1000), InvalidArgument);
}

class FsProbeTest : public ::testing::Test {
 protected:
  static constexpr std::uint64_t kBound = std::uint64_t{4} << 20, kRecord = 65536;

  // Creates the files that killed probes of a directory, of its raw speed and of a root leave in `directory`.
  static void leave_probes(const std::string& directory) {
    { EXPECT_TRUE(TierUser(options_for(directory + "/.kv_offload_probe_1")).write(1)); }
    std::ofstream(directory + "/.kv_offload_raw_a_1bcdef") << std::string(100000, 'x');
    FsTierOptions options = options_for(directory);
    options.namespace_id = layout::probe_namespace(1);
    options.namespace_json.clear();
    const fs::path from = directory + "/elsewhere";
    options.root_dir = from.string();
    { EXPECT_TRUE(TierUser(options).write(1)); }
    const std::string name = layout::namespace_name(options.namespace_id);
    fs::rename(from / name, fs::path(directory) / name);
    fs::remove_all(from);
  }
  static std::size_t entries(const std::string& directory) {
    return static_cast<std::size_t>(std::distance(fs::directory_iterator(directory), {}));
  }
  TempDir dir_;
  std::string root_ = dir_.path() + "/root";
  FsTierOptions options_ = options_for(root_, kBound);
};

TEST_F(FsProbeTest, a_probe_of_a_root_in_use_measures_within_the_bound_and_leaves_no_records) {
  TierUser user(options_);
  user.wait_for_scan();
  for (std::uint32_t i = 0; i < 10; ++i) ASSERT_TRUE(user.write(i, {kRecord}));
  const std::optional<DiskProbe> probe = probe_root(root_, kBound, 1 << 20, kRecord);
  ASSERT_TRUE(probe);
  EXPECT_GT(probe->write_bytes_per_second, 0);
  EXPECT_GT(probe->read_bytes_per_second, 0);
  EXPECT_EQ(records_in(root_).size(), 10u);
  EXPECT_EQ(FsRoot(root_).stat().namespaces.size(), 1u);
  EXPECT_TRUE(user.usage_becomes_exact(root_));
  EXPECT_THROW(probe_root(root_, kBound, 1 << 20, 1000), InvalidArgument);
}

TEST_F(FsProbeTest, a_probe_of_a_full_root_evicts_nothing) {
  TierUser user(options_);
  user.wait_for_scan();
  std::uint32_t count = 0;
  while (user.tier().stats().evicted_bytes == 0) ASSERT_TRUE(user.write(count++, {kRecord}));
  const std::vector<fs::path> before = records_in(root_);
  EXPECT_FALSE(probe_root(root_, kBound, 1 << 20, kRecord));
  EXPECT_EQ(records_in(root_), before);
  EXPECT_THROW(ReservedSpace(root_, kBound, 1 << 20), ResourceError);
  EXPECT_TRUE(user.usage_becomes_exact(root_));
  user.tier().close();
  EXPECT_FALSE(probe_root(root_, kBound, 1 << 20, kRecord)) << "no server has it open";
  EXPECT_EQ(records_in(root_), before);
}

TEST_F(FsProbeTest, a_root_that_was_not_counted_yet_is_measured_after_a_count) {
  {
    TierUser user(options_);
    for (std::uint32_t i = 0; i < 10; ++i) ASSERT_TRUE(user.write(i, {kRecord}));
  }
  fs::remove(root_ + "/ledger");
  EXPECT_TRUE(probe_root(root_, kBound, 1 << 20, kRecord));
  EXPECT_EQ(directory_usage(root_), du(root_));
  EXPECT_FALSE(probe_root(root_, std::uint64_t{1} << 20, 1 << 20, kRecord));
}

TEST_F(FsProbeTest, reserved_space_is_used_by_no_other_process) {
  TierUser user(options_);
  user.wait_for_scan();
  for (std::uint32_t i = 0; i < 10; ++i) ASSERT_TRUE(user.write(i, {kRecord}));
  {
    const ReservedSpace reserved(root_, kBound, std::uint64_t{3} << 20);
    for (std::uint32_t i = 100; i < 150; ++i) ASSERT_TRUE(user.write(i, {kRecord}));
    EXPECT_LE(du(root_), kBound - (std::uint64_t{3} << 20));
  }
  const std::size_t before = records_in(root_).size();
  for (std::uint32_t i = 200; i < 250; ++i) ASSERT_TRUE(user.write(i, {kRecord}));
  EXPECT_GT(records_in(root_).size(), before + 20) << "it is free again";
  EXPECT_TRUE(user.usage_becomes_exact(root_));
}

TEST_F(FsProbeTest, a_start_and_the_next_probe_remove_what_killed_probes_left) {
  { ASSERT_TRUE(TierUser(options_).write(1)); }
  const std::size_t clean = entries(root_);
  leave_probes(root_);
  ASSERT_EQ(entries(root_), clean + 3);
  TierUser user(options_);
  EXPECT_EQ(entries(root_), clean + 1) << "and the presence of the server";
  user.wait_for_scan();
  EXPECT_TRUE(user.usage_becomes_exact(root_));
  leave_probes(root_);
  (void)probe_root(root_, kBound, 1 << 20, kRecord);
  EXPECT_EQ(entries(root_), clean + 1);
  EXPECT_TRUE(user.usage_becomes_exact(root_));

  const std::string plain = dir_.path() + "/plain";
  fs::create_directory(plain);
  leave_probes(plain);
  (void)probe_disk(plain, 1 << 20, kRecord);
  EXPECT_EQ(entries(plain), 0u);
}

TEST_F(FsProbeTest, a_probe_that_was_killed_before_it_had_a_namespace_is_removed_after_an_hour) {
  const fs::path killed = dir_.path() + "/.kv_offload_probe_5", begins = dir_.path() + "/.kv_offload_probe_6";
  for (const fs::path& path : {killed, begins}) {
    fs::create_directory(path);
    std::ofstream(path / layout::kRootFile) << layout::kRootText;
  }
  fs::last_write_time(killed, fs::file_time_type::clock::now() - std::chrono::minutes(61));
  fs::last_write_time(begins, fs::file_time_type::clock::now() - std::chrono::minutes(59));
  (void)probe_disk(dir_.path(), 1 << 20, kRecord);
  EXPECT_FALSE(fs::exists(killed));
  EXPECT_TRUE(fs::exists(begins));
}

TEST_F(FsProbeTest, other_files_with_similar_names_stay) {
  { ASSERT_TRUE(TierUser(options_).write(1)); }
  const fs::path root(root_), outside(dir_.path() + "/outside");
  { ASSERT_TRUE(TierUser(options_for(outside.string())).write(1)); }
  std::ofstream(outside / "file") << "x";
  fs::copy(outside, root / ".kv_offload_probe_backup", fs::copy_options::recursive);
  std::ofstream(root / ".kv_offload_raw_a_1bcdef.txt") << "x";
  fs::create_directory(root / ".kv_offload_raw_a_1bcdeg");
  fs::create_directory_symlink(outside, root / ".kv_offload_probe_3");
  fs::create_symlink(outside / "file", root / ".kv_offload_raw_a_1bcdeh");
  const std::size_t before = entries(root_), records = records_in(dir_.path()).size();
  // The link below goes with the probe, and what it names stays.
  { ASSERT_TRUE(TierUser(options_for(root_ + "/.kv_offload_probe_4")).write(1)); }
  fs::create_directory_symlink(outside, root / ".kv_offload_probe_4" / "link");
  TierUser user(options_);
  EXPECT_EQ(entries(root_), before + 1) << "and the presence of the server";
  EXPECT_EQ(records_in(dir_.path()).size(), records);
  EXPECT_TRUE(fs::exists(outside / "file"));
}

TEST_F(FsProbeTest, a_probe_in_progress_is_not_removed) {
  { ASSERT_TRUE(TierUser(options_).write(1)); }
  TierUser elsewhere(options_for(root_ + "/.kv_offload_probe_2"));
  FsTierOptions options = options_;
  options.namespace_id = layout::probe_namespace(2);
  TierUser in_root(options);
  ASSERT_TRUE(elsewhere.write(1));
  ASSERT_TRUE(in_root.write(1));
  TierUser user(options_);
  EXPECT_TRUE(elsewhere.read(1));
  EXPECT_TRUE(in_root.read(1));
}

// A complete record of another version is reported and never removed.
TEST_F(FsRootTest, verify_keeps_records_of_another_version) {
  const fs::path path = path_of(root_, 2);
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  std::vector<char> page(kRecordHeaderBytes);
  file.read(page.data(), static_cast<std::streamsize>(page.size()));
  page[8] = 1;
  const std::uint64_t checksum = XXH3_64bits(page.data(), kRecordHeaderBytes - 8);
  std::memcpy(page.data() + kRecordHeaderBytes - 8, &checksum, sizeof(checksum));
  file.seekp(0);
  file.write(page.data(), static_cast<std::streamsize>(page.size())).flush();
  FsRoot root(root_);
  const auto damaged = root.verify(true, {});
  ASSERT_EQ(damaged.size(), 1u);
  EXPECT_EQ(damaged[0].kind, StatusKind::kUnavailable);
  EXPECT_NE(damaged[0].message.find("version 1"), std::string::npos);
  EXPECT_TRUE(fs::exists(path));
}

#ifdef KV_OFFLOAD_ENCRYPTION

TEST(FsRootEncryptedTest, verify_checks_encryption_with_the_key_and_everything_else_without) {
  const TempDir dir;
  const std::string path = dir.path() + "/root";
  FsTierOptions options = options_for(path);
  options.form.keys = keys_of({1});
  {
    TierUser user(options);
    for (std::uint32_t i = 0; i < 3; ++i) ASSERT_TRUE(user.write(i));
  }
  FsRoot root(path);
  EXPECT_TRUE(root.verify(false, {}).empty());
  EXPECT_TRUE(root.verify(false, {}, keys_of({2, 1})).empty());
  for (const DamagedRecord& unknown : root.verify(true, {}, keys_of({2}))) {
    EXPECT_EQ(unknown.kind, StatusKind::kUnavailable) << "another server may own it";
    EXPECT_FALSE(unknown.removed);
  }
  EXPECT_EQ(root.verify(true, {}, keys_of({2})).size(), 3u);
  // A forgery: one byte was changed and the checksums were corrected.
  const fs::path forged = records_in(path).front();
  std::vector<char> bytes(fs::file_size(forged));
  std::fstream file(forged, std::ios::in | std::ios::out | std::ios::binary);
  file.read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  bytes[5000] ^= 1;
  const std::uint64_t sum = XXH3_64bits(bytes.data() + kRecordHeaderBytes, bytes.size() - kRecordHeaderBytes);
  std::memcpy(bytes.data() + 120, &sum, sizeof(sum));
  const std::uint64_t checksum = XXH3_64bits(bytes.data(), kRecordHeaderBytes - 8);
  std::memcpy(bytes.data() + kRecordHeaderBytes - 8, &checksum, sizeof(checksum));
  file.seekp(0);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size())).flush();
  EXPECT_TRUE(root.verify(false, {}).empty()) << "without the key it cannot be detected";
  const auto damaged = root.verify(true, {}, keys_of({1}));
  ASSERT_EQ(damaged.size(), 1u);
  EXPECT_EQ(damaged[0].kind, StatusKind::kCorrupt);
  EXPECT_FALSE(fs::exists(forged));
}

TEST(FsRootEncryptedTest, no_name_in_an_encrypted_root_is_that_of_a_chunk) {
  const TempDir dir;
  const std::string path = dir.path() + "/root";
  FsTierOptions options = options_for(path);
  {
    TierUser plain(options);
    ASSERT_TRUE(plain.write(1));
  }
  options.form.keys = keys_of({1});
  TierUser user(options);
  user.wait_for_scan();
  EXPECT_FALSE(user.has(1)) << "plain records are not found";
  ASSERT_TRUE(user.write(1));
  EXPECT_TRUE(user.read(1));
  std::size_t with_its_name = 0;
  for (const fs::path& record : records_in(path))
    with_its_name += record.filename().string().starts_with(key_of(1).hex());
  EXPECT_EQ(with_its_name, 1u) << "of the tier without a key";
  EXPECT_EQ(records_in(path).size(), 2u);
}

#endif

}  // namespace
}  // namespace kv_offload
