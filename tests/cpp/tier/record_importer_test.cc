// SPDX-License-Identifier: Apache-2.0
// Records written into a directory as the command copy does; the other kinds are in their own tests.
#include "tier/record_importer.h"

#include <gtest/gtest.h>

#include <sys/stat.h>

#include "backends/fs/faulty_file_ops.h"
#include "backends/fs/fixture.h"
#include "backends/fs/store.h"
#include "record/record_bytes.h"
#include "tier/memory_store.h"

namespace kv_offload {
namespace {

using namespace testing;

class RecordImporterTest : public ::testing::Test {
 protected:
  FsTierOptions options(std::uint64_t max_bytes = std::uint64_t{64} << 20) {
    FsTierOptions chosen = options_for(root_, max_bytes);
    chosen.namespace_json.clear();
    chosen.may_evict = false;
    return chosen;
  }
  std::unique_ptr<RecordImporter> open(const FsTierOptions& chosen) {
    return std::make_unique<RecordImporter>(std::make_unique<FsStore>(chosen, ops_, clock_of(chosen)));
  }
  // Returns a record as a tier of options_for() stores it; an encoded one if there is a choice.
  WholeRecord record_of(std::uint32_t number, const RecordFormOptions& form = {}) {
    RecordForm chosen(form);
    Row row({8192});
    row.fill(number);
    RecordOp op;
    op.key = key_of(number);
    op.shards = row.shards();
    const Bytes bytes = bytes_of(chosen, op, options_for(root_).namespace_id);
    RecordHeader header;
    EXPECT_TRUE(decode_header(std::span(bytes).first(kRecordHeaderBytes), &header));
    WholeRecord record;
    record.begin(header, std::span(bytes).first(kRecordHeaderBytes));
    record.append(std::span(bytes).subspan(kRecordHeaderBytes));
    return record;
  }
  Status import(RecordImporter& importer, std::uint32_t number, std::int64_t used = 0) {
    bool written = false;
    const Status status = importer.write(record_of(number), used, &written);
    EXPECT_TRUE(status || !written);
    return status;
  }

  TempDir dir_;
  const std::string root_ = dir_.path() + "/root";
  FaultyFileOps ops_;
};

TEST_F(RecordImporterTest, a_server_finds_raw_and_encoded_records) {
  const CompressionOptions compression{.compress = Compress::kZstd, .elements = {Element::kBytes}};
  const WholeRecord encoded = record_of(2, {.compression = std::make_shared<CompressionChoice>(compression)});
  ASSERT_LT(encoded.bytes().size(), record_of(2).bytes().size());
  {
    const auto importer = open(options());
    EXPECT_TRUE(import(*importer, 1));
    bool written = false;
    EXPECT_TRUE(importer->write(encoded, 0, &written));
    EXPECT_TRUE(written);
    EXPECT_TRUE(importer->write(record_of(2), 0, &written));
    EXPECT_FALSE(written) << "the record is there in another form";
    EXPECT_EQ(importer->epoch(), "1");
  }
  EXPECT_EQ(fs::file_size(path_of(root_, 2)), encoded.bytes().size());
  EXPECT_FALSE(fs::exists(root_ + "/" + std::string(64, '1') + "/namespace.json")) << "it is unknown here";
  TierUser user(options_for(root_));
  user.wait_for_scan();
  EXPECT_TRUE(user.read(1));
  EXPECT_TRUE(user.read(2));
  EXPECT_TRUE(user.usage_becomes_exact(root_));
}

TEST_F(RecordImporterTest, a_server_that_runs_finds_the_records) {
  TierUser user(options_for(root_));
  user.wait_for_scan();
  EXPECT_FALSE(user.has(1));
  const auto importer = open(options());
  ASSERT_TRUE(import(*importer, 1));
  EXPECT_TRUE(user.until([&] { return user.has(1); }));
  EXPECT_TRUE(user.read(1));
}

TEST_F(RecordImporterTest, a_record_keeps_its_time_of_last_use) {
  const auto importer = open(options());
  constexpr std::int64_t kUsed = 1'600'000'000'123'456'789;
  ASSERT_TRUE(import(*importer, 1, kUsed));
  struct ::stat info;
  ASSERT_EQ(::stat(path_of(root_, 1).c_str(), &info), 0);
  EXPECT_EQ(info.st_mtim.tv_sec * 1'000'000'000 + info.st_mtim.tv_nsec, kUsed);
}

TEST_F(RecordImporterTest, a_full_directory_takes_no_record_and_evicts_none) {
  constexpr std::uint64_t kBound = std::uint64_t{1} << 20;
  FsTierOptions dead = options_for(root_, kBound);
  dead.namespace_id.fill(0x22);
  { EXPECT_TRUE(TierUser(dead).write(900)); }  // no server has this namespace open
  TierUser user(options_for(root_, kBound));
  for (std::uint32_t number = 100; number < 105; ++number) ASSERT_TRUE(user.write(number));
  const auto importer = open(options(kBound));
  std::uint32_t number = 1;
  Status status;
  while ((status = import(*importer, number))) ASSERT_LT(++number, 100u) << "the bound is never reached";
  EXPECT_EQ(status.kind(), StatusKind::kNoSpace);
  EXPECT_EQ(status.error_number(), 0);
  EXPECT_EQ(records_in(root_).size(), 1 + 5 + (number - 1));
  EXPECT_TRUE(temporaries_in(root_).empty());
  EXPECT_LE(du(root_), kBound);
  EXPECT_EQ(user.tier().stats().evicted_bytes, 0u);
}

TEST_F(RecordImporterTest, a_full_file_system_ends_with_its_error_and_evicts_nothing) {
  const auto importer = open(options());
  ASSERT_TRUE(import(*importer, 1));
  ops_.fail_all(Call::kPwritev, ENOSPC);
  const Status status = import(*importer, 2);
  ops_.clear();
  EXPECT_EQ(status.kind(), StatusKind::kNoSpace);
  EXPECT_EQ(status.error_number(), ENOSPC);
  EXPECT_EQ(records_in(root_).size(), 1u);
  EXPECT_TRUE(import(*importer, 2)) << "and continues when there is room";
}

TEST_F(RecordImporterTest, a_root_that_another_process_counts_is_not_full) {
  FakeClock clock;
  FsTierOptions chosen = options();
  chosen.clock = &clock;
  FsStore store(chosen, ops_, clock);  // not started: nobody has counted the root, if it is not new
  { EXPECT_TRUE(import(*open(options()), 1)); }
  fs::remove(root_ + "/ledger");
  FsStore late(chosen, ops_, clock);
  WholeRecord record = record_of(2);
  TierOp op;
  op.key = key_of(2);
  op.shards = {record.bytes()};
  op.is_whole_record = true;
  std::uint64_t moved = 0;
  EXPECT_EQ(late.write(op, late.epoch(), &moved).kind(), StatusKind::kUnavailable);
  late.close();
  store.close();
}

TEST_F(RecordImporterTest, records_stay_in_the_epoch_of_the_start) {
  TierUser user(options_for(root_));
  const auto importer = open(options());
  ASSERT_TRUE(user.tier().reset());
  EXPECT_TRUE(import(*importer, 1));
  EXPECT_FALSE(user.has(1));
  TierUser next(options_for(root_));
  next.wait_for_scan();
  EXPECT_FALSE(next.has(1));
}

TEST_F(RecordImporterTest, a_store_that_cannot_begin_an_epoch_is_refused) {
  const auto server = std::make_shared<MemoryServer>();
  server->fail(MemoryServer::Verb::kEpoch, StatusKind::kIo);
  auto store = std::make_unique<MemoryStore>(server, NamespaceId{});
  store->forget(0);
  EXPECT_THROW(RecordImporter(std::move(store)), ResourceError);
}

TEST_F(RecordImporterTest, a_store_that_throws_fails_that_record_only) {
  const auto importer = open(options());
  ops_.set_rule([](Call call) -> int {
    if (call == Call::kPwritev) throw std::bad_alloc();
    return 0;
  });
  EXPECT_EQ(import(*importer, 1).kind(), StatusKind::kIo);
  ops_.clear();
  EXPECT_TRUE(temporaries_in(root_).empty());
  EXPECT_TRUE(import(*importer, 1));
}

}  // namespace
}  // namespace kv_offload
