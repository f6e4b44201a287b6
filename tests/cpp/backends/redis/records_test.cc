// SPDX-License-Identifier: Apache-2.0
// Administration of records from outside: concurrent changes, and servers with arbitrary answers.
#include "backends/redis/records.h"

#include <gtest/gtest.h>

#include <chrono>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "backends/redis/medium.h"

namespace kv_offload {
namespace {

using namespace testing;
using std::chrono::seconds;
using Answers = RedisScript::Answers;
using Verb = RedisProxy::Verb;

const std::string kName =
    "kv_offload:" + std::string(64, 'a') + ":" + std::string(32, 'b') + ":" + std::string(72, 'c');

std::string bulk(const std::string& text) { return fmt::format("${}\r\n{}\r\n", text.size(), text); }
std::string page_of(const std::string& cursor, const std::vector<std::string>& names) {
  std::string answer = "*2\r\n" + bulk(cursor) + fmt::format("*{}\r\n", names.size());
  for (const std::string& name : names) answer += bulk(name);
  return answer;
}

std::unique_ptr<RemoteRecords> opened(const redis::Server& server, unsigned page = 512) {
  RedisRecordsOptions options;
  options.server = server;
  options.deadline = seconds(60);
  options.page = page;
  return open_redis_records(options);
}

class RedisRecordsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    TierDriver user(make_redis_tier(medium_.options()));
    for (std::uint32_t number = 1; number <= 3; ++number) ASSERT_TRUE(user.write(number, {3 << 20}));
  }
  static std::vector<RemoteRecord> all_of(RemoteRecords& records, bool sizes = true) {
    std::vector<RemoteRecord> found;
    RemotePage page;
    do {
      const Status status = records.list("", page.next, sizes, &page);
      EXPECT_TRUE(status) << status.to_string();
      for (const RemoteRecord& record : page.records) {
        if (record.is_record()) found.push_back(record);
      }
    } while (!page.next.empty());
    return found;
  }
  RemoteRecord record_of(const ChunkKey& key) {
    const auto records = opened(medium_.server.address());
    for (const RemoteRecord& record : all_of(*records, false)) {
      if (record.key == key.hex()) return record;
    }
    ADD_FAILURE() << "not listed";
    return {};
  }

  RedisMedium medium_;
};

TEST_F(RedisRecordsTest, all_records_are_listed_in_pages_of_any_size) {
  for (int i = 0; i < 300; ++i) medium_.server.call({"SET", fmt::format("other:{}", i), "x"});
  for (const unsigned page : {1u, 7u, 512u}) {
    const auto records = opened(medium_.server.address(), page);
    std::set<std::string> keys;
    for (const RemoteRecord& record : all_of(*records)) {
      keys.insert(record.key);
      EXPECT_EQ(record.namespace_id, std::string(64, '1'));
      EXPECT_EQ(record.epoch.size(), 32u);
      EXPECT_GE(record.bytes, kRecordHeaderBytes + (3u << 20));
      EXPECT_GT(record.used_unix_nanos, 0);
    }
    EXPECT_EQ(keys, (std::set{key_of(1).hex(), key_of(2).hex(), key_of(3).hex()})) << page;
  }
}

TEST_F(RedisRecordsTest, a_record_removed_while_it_is_listed_is_left_out) {
  const auto records = opened(medium_.server.address());
  const RemoteRecord gone = record_of(key_of(1));
  medium_.lose(key_of(1));
  bool removed = false;
  EXPECT_EQ(records->verify(gone, true, &removed).kind(), StatusKind::kNotFound);
  EXPECT_FALSE(removed);
  RemoteRemoved total;
  EXPECT_TRUE(records->remove(std::vector{gone}, &total));
  EXPECT_EQ(total.records, 0u) << "it was removed before, and is not counted";
  std::int64_t nanos = 1;
  EXPECT_TRUE(records->written(gone, &nanos));
  EXPECT_EQ(nanos, 0);
}

// ---- copies

TEST_F(RedisRecordsTest, a_record_is_read_as_it_is_stored_unless_it_is_damaged) {
  { ASSERT_TRUE(TierDriver(make_redis_tier(medium_.options())).write(9)); }
  const auto records = opened(medium_.server.address());
  const RemoteRecord record = record_of(key_of(9));
  WholeRecord copy;
  ASSERT_TRUE(records->read(record, &copy));
  const std::string_view read(reinterpret_cast<const char*>(copy.bytes().data()), copy.bytes().size());
  EXPECT_TRUE(medium_.server.call({"GET", record.name}).text == read);
  medium_.damage(key_of(9));
  EXPECT_EQ(records->read(record, &copy).kind(), StatusKind::kCorrupt);
  EXPECT_EQ(medium_.server.call({"EXISTS", record.name}).integer, 1) << "it is not repaired";
  medium_.lose(key_of(9));
  EXPECT_EQ(records->read(record, &copy).kind(), StatusKind::kNotFound);
}

TEST_F(RedisRecordsTest, sizes_are_those_of_the_records_on_request) {
  const auto records = opened(medium_.server.address());
  records->use_record_sizes();
  for (const RemoteRecord& record : all_of(*records))
    EXPECT_EQ(record.bytes, kRecordHeaderBytes + (3u << 20));
}

TEST_F(RedisRecordsTest, the_startup_epoch_is_that_of_the_records_until_a_reset) {
  const auto records = opened(medium_.server.address());
  const std::string space(64, '1'), key = "kv_offload:" + space + ":epoch";
  const RemoteRecord record = record_of(key_of(1));
  std::string name;
  ASSERT_TRUE(records->read_startup_epoch(space, &name));
  EXPECT_EQ(name, record.epoch);
  TierDriver user(make_redis_tier(medium_.options()));
  ASSERT_TRUE(user.tier().reset());
  ASSERT_TRUE(records->read_startup_epoch(space, &name));
  EXPECT_EQ(name.size(), 32u);
  EXPECT_NE(name, record.epoch);
  user.tier().close();  // it would write the key again
  for (const std::string value : {"", "no name"}) {
    medium_.server.call({"DEL", key});
    if (!value.empty()) medium_.server.call({"SET", key, value});
    ASSERT_TRUE(records->read_startup_epoch(space, &name));
    EXPECT_EQ(name, "") << value;
  }
  medium_.server.call({"DEL", key});
  medium_.server.call({"LPUSH", key, "x"});
  ASSERT_TRUE(records->read_startup_epoch(space, &name));
  EXPECT_EQ(name, "");
}

TEST_F(RedisRecordsTest, records_that_are_read_in_several_pieces_are_verified_completely) {
  const auto records = opened(medium_.server.address());
  const RemoteRecord record = record_of(key_of(1));
  bool removed = false;
  EXPECT_TRUE(records->verify(record, true, &removed));
  medium_.server.call({"SETRANGE", record.name, std::to_string((2 << 20) + 5000), "x"});
  EXPECT_EQ(records->verify(record, false, &removed).kind(), StatusKind::kCorrupt);
  EXPECT_FALSE(removed);
  EXPECT_EQ(medium_.server.call({"EXISTS", record.name}).integer, 1);
  EXPECT_EQ(records->verify(record, true, &removed).kind(), StatusKind::kCorrupt);
  EXPECT_TRUE(removed);
  EXPECT_EQ(medium_.server.call({"EXISTS", record.name}).integer, 0);
}

// Looking at a value larger than any record costs no more than reading its header.
TEST_F(RedisRecordsTest, a_huge_value_is_not_read) {
  const auto records = opened(medium_.proxy.address());
  const RemoteRecord record = record_of(key_of(1));
  medium_.server.call({"SETRANGE", record.name, "64000000", "x"});
  const std::size_t before = medium_.proxy.faults.seen(Verb::kOther);
  bool removed = false;
  EXPECT_EQ(records->verify(record, true, &removed).kind(), StatusKind::kCorrupt);
  EXPECT_TRUE(removed);
  EXPECT_LT(medium_.proxy.faults.seen(Verb::kOther) - before, 10u);
}

// The damaged record was read. Before it is removed, another server writes the record again.
TEST_F(RedisRecordsTest, a_record_that_replaced_a_damaged_one_stays) {
  {
    TierDriver user(make_redis_tier(medium_.options()));
    ASSERT_TRUE(user.write(9));
  }
  const RemoteRecord record = record_of(key_of(9));
  const std::string whole = medium_.server.call({"GET", record.name}).text;
  ASSERT_EQ(whole.size(), kRecordHeaderBytes + 8192);
  const auto records = opened(medium_.proxy.address());
  medium_.damage(key_of(9));
  medium_.proxy.faults.block(Verb::kMulti);
  bool removed = true;
  Status status;
  std::thread looker([&] { status = records->verify(record, true, &removed); });
  medium_.proxy.faults.wait_for_blocked(1);
  medium_.server.call({"SET", record.name, whole});
  medium_.proxy.faults.release();
  looker.join();
  EXPECT_TRUE(status) << status.to_string();
  EXPECT_FALSE(removed);
  EXPECT_EQ(medium_.server.call({"GET", record.name}).text, whole);
}

// After a refused MULTI, DEL would run at once, whatever another server wrote meanwhile.
TEST_F(RedisRecordsTest, nothing_is_removed_without_transactions) {
  medium_.server.call({"ACL", "SETUSER", "looker", "on", ">hunter2", "~*", "+@all", "-multi", "-exec"});
  redis::Server server = medium_.server.address();
  server.user = "looker";
  server.password = "hunter2";
  const RemoteRecord record = record_of(key_of(1));
  medium_.damage(key_of(1));
  const auto records = opened(server);
  for (const auto& [rights, expected] :
       {std::pair("-multi", "it was not removed: the user may not use MULTI here: allow +multi"),
        std::pair("+multi", "it was not removed: the user may not use EXEC here: allow +exec")}) {
    medium_.server.call({"ACL", "SETUSER", "looker", rights});
    for (int again = 0; again < 2; ++again) {
      bool removed = true;
      const Status status = records->verify(record, true, &removed);
      EXPECT_NE(status.message().find(expected), std::string::npos) << status.to_string();
      EXPECT_FALSE(removed);
      EXPECT_EQ(medium_.server.call({"EXISTS", record.name}).integer, 1);
    }
  }
}

// A cursor of one process is meaningless to another.
TEST_F(RedisRecordsTest, a_restart_during_a_listing_is_reported) {
  for (int i = 0; i < 100; ++i) medium_.server.call({"SET", fmt::format("kv_offload:{}", i), "x"});
  const auto records = opened(medium_.server.address(), 1);
  RemotePage page;
  ASSERT_TRUE(records->list("", "", false, &page));
  ASSERT_FALSE(page.next.empty());
  const std::string next = page.next;
  medium_.server.kill();
  medium_.server.start();
  const Status status = records->list("", next, false, &page);
  EXPECT_NE(status.message().find("the server was restarted"), std::string::npos) << status.to_string();
  EXPECT_TRUE(records->list("", "", false, &page)) << "a new listing";
}

TEST_F(RedisRecordsTest, freed_bytes_are_counted_once) {
  const auto records = opened(medium_.server.address());
  std::vector<RemoteRecord> found = all_of(*records);
  const std::uint64_t bytes = found[0].bytes + found[1].bytes;
  found[2] = found[0];
  RemoteRemoved total;
  ASSERT_TRUE(records->remove(found, &total));
  EXPECT_EQ(total.records, 2u);
  EXPECT_EQ(total.bytes, bytes);
}

// ---- arbitrary answers

TEST(RedisRecordsScriptTest, a_record_that_vanished_is_not_listed_with_zero_bytes) {
  const RedisScript server(RedisScript::usual({{"CLIENT", "+OK\r\n"},
                                               {"SCAN", page_of("0", {kName})},
                                               {"MEMORY", "$-1\r\n"},
                                               {"OBJECT", "$-1\r\n"}}));
  RemotePage page;
  ASSERT_TRUE(opened(server.address())->list("", "", true, &page));
  EXPECT_TRUE(page.records.empty());
}

// The server may have executed it before the connection ended.
TEST(RedisRecordsScriptTest, a_removal_without_an_answer_is_not_reported_as_failed) {
  RedisScript server(RedisScript::usual({{"CLIENT", "+OK\r\n"},
                                         {"UNWATCH", "+OK\r\n"},
                                         {"WATCH", "+OK\r\n"},
                                         {"EXISTS", ":1\r\n"},
                                         {"STRLEN", ":1\r\n"},
                                         {"GETRANGE", bulk("x")},
                                         {"MULTI", "+OK\r\n"},
                                         {"DEL", "+QUEUED\r\n"},
                                         {"EXEC", ""}}));
  RemoteRecord record;
  record.name = kName;
  bool removed = true;
  const Status status = opened(server.address())->verify(record, true, &removed);
  EXPECT_NE(status.message().find("it may have been removed"), std::string::npos) << status.to_string();
  EXPECT_FALSE(removed);
  server.answer("MULTI", "");
  const Status before = opened(server.address())->verify(record, true, &removed);
  EXPECT_NE(before.message().find("it was not removed"), std::string::npos) << before.to_string();
}

TEST(RedisRecordsScriptTest, a_server_that_does_not_report_its_mode_is_refused) {
  const RedisScript server(RedisScript::usual({{"CLIENT", "+OK\r\n"}, {"INFO", "-NOPERM x\r\n"}}));
  try {
    (void)opened(server.address());
    ADD_FAILURE() << "was accepted";
  } catch (const ResourceError& error) {
    EXPECT_NE(std::string(error.what()).find("allow +info"), std::string::npos) << error.what();
  }
  const RedisScript plain(RedisScript::usual({{"CLIENT", "+OK\r\n"}, {"INFO", "-ERR unknown command\r\n"}}));
  (void)opened(plain.address());
}

TEST(RedisRecordsScriptTest, an_overlong_name_takes_no_memory_and_is_reported) {
  const RedisScript server(RedisScript::usual(
      {{"CLIENT", "+OK\r\n"}, {"SCAN", page_of("0", {kName + std::string(1 << 20, 'x')})}}));
  RemotePage page;
  const Status status = opened(server.address())->list("", "", false, &page);
  EXPECT_NE(status.message().find("a name far longer"), std::string::npos) << status.to_string();
  EXPECT_TRUE(page.records.empty());
}

TEST(RedisRecordsScriptTest, an_answer_that_is_not_a_page_is_refused) {
  for (const std::string& answer :
       {std::string("+OK\r\n"), std::string("*0\r\n"), std::string("*2\r\n:0\r\n*0\r\n"), page_of("x", {}),
        page_of("", {}), page_of(std::string(21, '9'), {}), page_of("0", {"other"}),
        std::string("*2\r\n$1\r\n0\r\n*1\r\n:1\r\n"), std::string("*2\r\n$1\r\n0\r\n*16385\r\n"),
        page_of("7", {kName})}) {
    const RedisScript server(RedisScript::usual({{"CLIENT", "+OK\r\n"}, {"SCAN", answer}}));
    RemotePage page;
    EXPECT_EQ(opened(server.address())->list("", "7", false, &page).kind(), StatusKind::kIo) << answer;
  }
}

TEST(RedisRecordsScriptTest, a_name_that_is_listed_twice_is_counted_once) {
  const RedisScript server(
      RedisScript::usual({{"CLIENT", "+OK\r\n"}, {"SCAN", page_of("0", {kName, kName, "kv_offload:\xff"})}}));
  RemotePage page;
  ASSERT_TRUE(opened(server.address())->list("", "", false, &page));
  ASSERT_EQ(page.records.size(), 2u);
  EXPECT_TRUE(page.records[0].is_record());
  EXPECT_EQ(page.records[1].name, "kv_offload:\xff");
  EXPECT_TRUE(page.records[1].namespace_id.empty());
}

TEST(RedisRecordsScriptTest, the_write_time_is_read_only_where_reading_does_not_count_as_a_use) {
  RecordHeader header;
  header.namespace_id.fill(0xaa);
  header.key = key_of(1);
  header.shard_bytes = {4096};
  header.payload_bytes = header.stored_bytes = 4096;
  header.created_unix_nanos = 1'700'000'000'000'000'000;
  std::string text(kRecordHeaderBytes, '\0');
  encode_header(header, std::as_writable_bytes(std::span(text)));
  for (const bool known : {true, false}) {
    const RedisScript server(RedisScript::usual(
        {{"CLIENT", known ? "+OK\r\n" : "-ERR Unknown subcommand\r\n"}, {"GETRANGE", bulk(text)}}));
    RemoteRecord record;
    record.name = kName;
    std::int64_t nanos = 0;
    ASSERT_TRUE(opened(server.address())->written(record, &nanos));
    EXPECT_EQ(nanos, known ? 1'700'000'000'000'000'000 : 0);
  }
}

TEST(RedisRecordsScriptTest, refusals_name_the_remedy_and_repeat_no_secret) {
  const std::string secret = "hunter2-never-shown";
  for (const auto& [answer, expected] : std::vector<std::pair<std::string, std::string>>{
           {"NOPERM User x " + secret, "may not use SCAN here: allow +scan and the keys ~kv_offload:*"},
           {"MOVED 1 " + secret + ":1", "while its slots move"},
           {"LOADING " + secret, "still loading"},
           {"ERR " + secret, "refused the command"}}) {
    const RedisScript server(RedisScript::usual({{"CLIENT", "+OK\r\n"}, {"SCAN", "-" + answer + "\r\n"}}));
    RemotePage page;
    const Status status = opened(server.address())->list("", "", false, &page);
    EXPECT_NE(status.message().find(expected), std::string::npos) << status.to_string();
    EXPECT_EQ(status.message().find(secret), std::string::npos);
  }
}

TEST(RedisRecordsScriptTest, refused_sizes_are_not_reported_as_zero) {
  for (const auto& [memory, expected] : std::vector<std::pair<std::string, bool>>{
           {"-LOADING x\r\n", false}, {"-NOPERM x\r\n", true}, {"-ERR unknown command\r\n", true}}) {
    const RedisScript server(
        RedisScript::usual({{"CLIENT", "+OK\r\n"},
                            {"SCAN", page_of("0", {kName})},
                            {"MEMORY", memory},
                            {"STRLEN", ":12288\r\n"},
                            {"OBJECT", "-ERR An LFU maxmemory policy is selected\r\n"}}));
    RemotePage page;
    const Status status = opened(server.address())->list("", "", true, &page);
    EXPECT_EQ(static_cast<bool>(status), expected) << status.to_string();
    if (status) {
      EXPECT_EQ(page.records.at(0).bytes, 12288u);
    }
  }
}

TEST(RedisRecordsScriptTest, an_incomplete_or_missing_cluster_map_is_refused) {
  const std::string port = "*2\r\n$0\r\n\r\n:6379\r\n";
  for (const auto& [map, expected] : std::vector<std::pair<std::string, std::string>>{
           {"*1\r\n*3\r\n:0\r\n:99\r\n" + port, "16284 of the cluster's 16384 slots are on no node"},
           {"*0\r\n", "no slot is assigned to a node yet"},
           {"-ERR x\r\n", "refused the command"}}) {
    const RedisScript server(RedisScript::usual(
        {{"CLIENT", "+OK\r\n"}, {"INFO", bulk("# Cluster\r\ncluster_enabled:1\r\n")}, {"CLUSTER", map}}));
    try {
      (void)opened(server.address());
      ADD_FAILURE() << "was accepted";
    } catch (const ResourceError& error) {
      EXPECT_NE(std::string(error.what()).find(expected), std::string::npos) << error.what();
    }
  }
}

}  // namespace
}  // namespace kv_offload
