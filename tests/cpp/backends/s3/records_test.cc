// SPDX-License-Identifier: Apache-2.0
// Administration of a bucket's records from outside: listings, concurrent writes, and stores that misbehave.
#include "backends/s3/records.h"

#include <gtest/gtest.h>

#include <cstring>
#include <set>
#include <thread>

#include "backends/s3/list.h"
#include "backends/s3/tier_fixture.h"

namespace kv_offload {
namespace {

using namespace testing;
using Verb = S3Server::Verb;
using std::chrono::seconds;

std::string list_of(const std::string& inside) {
  return "<?xml version=\"1.0\"?><ListBucketResult xmlns=\"x\">" + inside + "</ListBucketResult>";
}
std::string ok_of(const std::string& body) {
  return fmt::format("HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{}", body.size(),
                     body);
}

class S3RecordsTest : public S3TierTest {
 protected:
  void SetUp() override {
    s3::S3Store store(options());
    for (std::uint32_t number = 1; number <= 5; ++number) ASSERT_TRUE(write(store, number));
  }
  std::unique_ptr<RemoteRecords> opened(unsigned page = 1000) {
    S3RecordsOptions chosen;
    chosen.bucket = server_.address();
    chosen.deadline = seconds(60);
    chosen.page = page;
    chosen.pause = [](Nanos) {};
    return open_s3_records(chosen);
  }
  static std::vector<RemoteRecord> all_of(RemoteRecords& records, const std::string& space = "") {
    std::vector<RemoteRecord> found;
    RemotePage page;
    do {
      const Status status = records.list(space, page.next, true, &page);
      EXPECT_TRUE(status) << status.to_string();
      for (const RemoteRecord& record : page.records) {
        if (record.is_record()) found.push_back(record);
      }
    } while (!page.next.empty());
    return found;
  }
  RemoteRecord record_of(std::uint32_t number) {
    const auto records = opened();
    for (const RemoteRecord& record : all_of(*records)) {
      if (record.key == key_of(number).hex()) return record;
    }
    ADD_FAILURE() << "not listed";
    return {};
  }
  Status listed(const std::string& answer) {
    server_.answer(Verb::kList, answer, kAlways);
    RemotePage page;
    return opened()->list("", "", true, &page);
  }
  std::string refused_list(const std::string& answer) {
    const Status status = listed(answer);
    EXPECT_EQ(status.kind(), StatusKind::kIo) << status.to_string();
    return status.message();
  }
};

TEST_F(S3RecordsTest, a_record_is_read_as_it_is_stored_unless_it_is_damaged) {
  const auto records = opened();
  const RemoteRecord record = record_of(1);
  WholeRecord copy;
  ASSERT_TRUE(records->read(record, &copy));
  const std::string_view read(reinterpret_cast<const char*>(copy.bytes().data()), copy.bytes().size());
  EXPECT_TRUE(server_.get(record.name) == read);
  medium_.damage(key_of(1));
  EXPECT_EQ(records->read(record, &copy).kind(), StatusKind::kCorrupt);
  medium_.lose(key_of(1));
  EXPECT_EQ(records->read(record, &copy).kind(), StatusKind::kNotFound);
}

TEST_F(S3RecordsTest, the_startup_epoch_is_that_of_the_records_until_a_reset) {
  const auto records = opened();
  const std::string space(64, '1');
  std::string name;
  ASSERT_TRUE(records->read_startup_epoch(space, &name));
  EXPECT_EQ(name, record_of(1).epoch);
  const auto tier = open();
  ASSERT_TRUE(tier->reset());
  ASSERT_TRUE(records->read_startup_epoch(space, &name));
  EXPECT_EQ(name.size(), 32u);
  EXPECT_NE(name, record_of(1).epoch);
  tier->close();
  server_.set("kv_offload/" + space + "/epoch", "no name");
  ASSERT_TRUE(records->read_startup_epoch(space, &name));
  EXPECT_EQ(name, "");
  ASSERT_TRUE(records->read_startup_epoch(std::string(64, '2'), &name));
  EXPECT_EQ(name, "") << "there is none";
  server_.answer(Verb::kEpoch, error_of("403 Forbidden", "AccessDenied"), 1);
  EXPECT_NE(records->read_startup_epoch(space, &name).message().find("s3:GetObject"), std::string::npos);
}

TEST_F(S3RecordsTest, all_records_are_listed_in_pages_of_any_size) {
  server_.set("kv_offload2/" + std::string(64, 'a') + "/epoch", "x");
  server_.set("kv_offload/no record & <\xff>", "x");
  for (const bool plain : {false, true}) {
    server_.list_as_it_is(plain);
    for (const unsigned page : {1u, 2u, 1000u}) {
      std::set<std::string> keys;
      for (const RemoteRecord& record : all_of(*opened(page))) {
        keys.insert(record.key);
        EXPECT_EQ(record.namespace_id, std::string(64, '1'));
        EXPECT_EQ(record.bytes, kRecordHeaderBytes + 8192);
        EXPECT_EQ(record.written_unix_nanos, 1'795'428'123'000'000'000);
      }
      EXPECT_EQ(keys.size(), 5u) << page << plain;
    }
  }
  EXPECT_EQ(server_.wrong_signatures(), 0u);
  EXPECT_EQ(all_of(*opened(), std::string(64, '1')).size(), 5u);
  EXPECT_TRUE(all_of(*opened(), std::string(64, '2')).empty());
}

TEST_F(S3RecordsTest, a_name_that_is_not_a_record_is_listed_unchanged) {
  const std::string name = "kv_offload/no record+100% & <\xff>";
  server_.set(name, "x");
  for (const bool plain : {false, true}) {
    server_.list_as_it_is(plain);
    RemotePage page;
    ASSERT_TRUE(opened()->list("", "", true, &page));
    std::size_t found = 0;
    for (const RemoteRecord& record : page.records) found += record.name == name && !record.is_record();
    EXPECT_EQ(found, 1u) << plain;
  }
}

TEST_F(S3RecordsTest, damage_is_detected_and_removed_only_if_unchanged) {
  const auto records = opened();
  const RemoteRecord record = record_of(1);
  const std::string whole = server_.get(record.name);
  bool removed = true;
  EXPECT_TRUE(records->verify(record, true, &removed));
  EXPECT_FALSE(removed);
  medium_.damage(key_of(1));
  EXPECT_EQ(records->verify(record, false, &removed).kind(), StatusKind::kCorrupt);
  EXPECT_TRUE(server_.has(record.name));

  server_.faults.block(Verb::kRemove);  // the damaged record was read
  Status status;
  std::thread looker([&] { status = records->verify(record, true, &removed); });
  server_.faults.wait_for_blocked(1);
  server_.set(record.name, whole);
  server_.faults.release();
  looker.join();
  EXPECT_TRUE(status) << status.to_string();
  EXPECT_FALSE(removed);
  EXPECT_EQ(server_.get(record.name), whole);

  medium_.damage(key_of(1));
  EXPECT_EQ(records->verify(record, true, &removed).kind(), StatusKind::kCorrupt);
  EXPECT_TRUE(removed);
  EXPECT_FALSE(server_.has(record.name));
  EXPECT_EQ(records->verify(record, true, &removed).kind(), StatusKind::kNotFound);
}

TEST_F(S3RecordsTest, nothing_is_removed_from_a_store_that_ignores_conditions) {
  server_.ignore_conditions(true);
  medium_.damage(key_of(1));
  const RemoteRecord record = record_of(1);
  bool removed = true;
  const Status status = opened()->verify(record, true, &removed);
  EXPECT_EQ(status.kind(), StatusKind::kCorrupt);
  EXPECT_NE(status.message().find("it was not removed: the store does not support conditional removal"),
            std::string::npos)
      << status.to_string();
  EXPECT_FALSE(removed);
  EXPECT_TRUE(server_.has(record.name));
}

TEST_F(S3RecordsTest, a_huge_object_is_not_read_to_its_end) {
  const RemoteRecord record = record_of(1);
  // The store sends the first bytes of 1 TiB; a reader that wants more finds a truncated answer.
  for (const std::string& start :
       {std::string(kRecordHeaderBytes, 'x'), server_.get(record.name) + std::string(1, 'x')}) {
    server_.answer(Verb::kRead,
                   "HTTP/1.1 200 OK\r\nContent-Length: 1099511627776\r\nConnection: close\r\n\r\n" + start,
                   kAlways);
    bool removed = false;
    const Status status = opened()->verify(record, false, &removed);
    EXPECT_EQ(status.kind(), StatusKind::kCorrupt) << status.to_string();
  }
}

TEST_F(S3RecordsTest, a_record_that_vanished_before_its_removal_is_not_damage) {
  const auto records = opened();
  const RemoteRecord record = record_of(1), before = record_of(2);
  medium_.damage(key_of(1));
  medium_.damage(key_of(2));
  bool removed = false;
  EXPECT_EQ(records->verify(before, true, &removed).kind(), StatusKind::kCorrupt);
  EXPECT_TRUE(removed) << "the store is known to support conditions";
  server_.faults.block(Verb::kRemove);
  Status status;
  std::thread looker([&] { status = records->verify(record, true, &removed); });
  server_.faults.wait_for_blocked(1);
  server_.remove(record.name);
  server_.answer(Verb::kRemove, error_of("404 Not Found", "NoSuchKey"), kAlways);
  server_.faults.release();
  looker.join();
  EXPECT_FALSE(removed);
  EXPECT_EQ(status.kind(), StatusKind::kNotFound) << status.to_string();
}

TEST_F(S3RecordsTest, the_known_outcome_of_a_removal_is_reported) {
  const RemoteRecord record = record_of(1);
  medium_.damage(key_of(1));
  const auto records = opened();
  bool removed = true;
  const auto verified = [&] {
    const Status status = records->verify(record, true, &removed);
    EXPECT_EQ(status.kind(), StatusKind::kCorrupt) << status.to_string();
    EXPECT_FALSE(removed);
    return status.message();
  };
  server_.answer(Verb::kRemove, error_of("412 Precondition Failed", "PreconditionFailed"), kAlways);
  const std::string refused = verified();
  EXPECT_NE(refused.find("it was not removed: the store rejects its own ETag"), std::string::npos) << refused;
  server_.answer(Verb::kRemove, error_of("403 Forbidden", "AccessDenied"), kAlways);
  const std::string denied = verified();
  EXPECT_NE(denied.find("it was not removed: access is denied"), std::string::npos) << denied;
  server_.answer_after(Verb::kRemove, "", kAlways);
  const std::string cut = verified();
  EXPECT_NE(cut.find("it may have been removed"), std::string::npos) << cut;
  EXPECT_FALSE(server_.has(record.name));
}

TEST_F(S3RecordsTest, a_record_of_a_later_release_stays) {
  const RemoteRecord record = record_of(1);
  std::string later = server_.get(record.name);
  later[8] = 99;
  PayloadChecksum sum;
  sum.add(std::as_bytes(std::span(later).first(kRecordHeaderBytes - 8)));
  const std::uint64_t checksum = sum.value();
  std::memcpy(later.data() + kRecordHeaderBytes - 8, &checksum, 8);
  server_.set(record.name, later);
  bool removed = false;
  const Status status = opened()->verify(record, true, &removed);
  EXPECT_EQ(status.kind(), StatusKind::kUnavailable) << status.to_string();
  EXPECT_NE(status.message().find("version 99"), std::string::npos);
  EXPECT_EQ(server_.get(record.name), later);
}

TEST_F(S3RecordsTest, a_truncated_answer_is_not_damage) {
  const RemoteRecord record = record_of(1);
  server_.faults.cut(Verb::kRead, 6000);
  bool removed = false;
  EXPECT_EQ(opened()->verify(record, true, &removed).kind(), StatusKind::kIo);
  server_.faults.cut(Verb::kRead, 0);
  const std::string part = server_.get(record.name).substr(0, 6000);
  server_.answer(Verb::kRead, "HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + part, kAlways);
  EXPECT_EQ(opened()->verify(record, true, &removed).kind(), StatusKind::kIo) << "without a length";
  EXPECT_TRUE(server_.has(record.name));
}

TEST_F(S3RecordsTest, removals_are_counted_and_kept_versions_are_reported) {
  const auto records = opened();
  std::vector<RemoteRecord> found = all_of(*records);
  RemoteRemoved total;
  ASSERT_TRUE(records->remove(std::span(found).first(2), &total));
  EXPECT_EQ(total.records, 2u);
  EXPECT_EQ(total.bytes, 2 * (kRecordHeaderBytes + 8192));
  EXPECT_FALSE(records->keeps_versions());
  server_.keep_versions(true);
  ASSERT_TRUE(records->remove(std::span(found).subspan(2, 1), &total));
  EXPECT_TRUE(records->keeps_versions());
  server_.answer(Verb::kRemove, error_of("403 Forbidden", "AccessDenied"), kAlways);
  const Status status = records->remove(std::span(found).subspan(3), &total);
  EXPECT_NE(status.message().find("s3:DeleteObject"), std::string::npos) << status.to_string();
  EXPECT_EQ(total.records, 3u);
  EXPECT_EQ(server_.keys().size(), 2u);
}

TEST_F(S3RecordsTest, invalid_listings_are_refused) {
  const std::string object = "<Contents><Key>kv_offload/a</Key><Size>1</Size></Contents>";
  const std::string more = "<IsTruncated>true</IsTruncated>", whole = "<IsTruncated>false</IsTruncated>";
  for (const std::string& body :
       {std::string("no list"), std::string("<ListBucketResult>"), list_of(more), list_of(object),
        list_of(object + "<NextContinuationToken>t</NextContinuationToken>"),
        list_of(object + "<IsTruncated>True</IsTruncated>"), list_of(object + "<IsTruncated/>"),
        list_of(whole + "<Contents x=\"y\"><Key>kv_offload/a</Key><Size>1</Size></Contents>" + object),
        list_of(whole + "<Contents><Key>kv_offload/a</Key><Size>1</Size>"),
        list_of(whole + "<Contents><Key>kv_offload/a</Key><Size>1</Size>" + object),
        list_of(whole + object + "<Contents/>"),
        list_of(whole + "<Contents><Key>kv_offload/a</Key></Contents>"),
        list_of(whole + "<Contents><Size>1</Size></Contents>"),
        list_of(whole + "<Contents><Key>kv_offload/&bogus;</Key><Size>1</Size></Contents>"),
        list_of(whole + "<Contents><Key>kv_offload/&#x110000;</Key><Size>1</Size></Contents>"),
        list_of(whole + "<Contents><Key>kv_offload/a</Key><Size>-1</Size></Contents>"),
        list_of(
            whole +
            "<EncodingType>url</EncodingType><Contents><Key>kv_offload/%4</Key><Size>1</Size></Contents>"),
        list_of(whole + "<Contents><Key>elsewhere/a</Key><Size>1</Size></Contents>"),
        list_of(more + "<NextContinuationToken>" + std::string(9000, 'x') + "</NextContinuationToken>")}) {
    refused_list(ok_of(body));
  }
  std::string many;
  EXPECT_TRUE(listed(ok_of(list_of(whole + object)))) << "the control";
  for (int i = 0; i < 4000; ++i) many += object;
  EXPECT_NE(refused_list(ok_of(list_of(many))).find("far more objects"), std::string::npos);
  EXPECT_NE(refused_list(ok_of(list_of(std::string(9 << 20, ' ')))).find("longer than 8 MiB"),
            std::string::npos);
  EXPECT_NE(refused_list(error_of("403 Forbidden", "AccessDenied")).find("s3:ListBucket"), std::string::npos);
  EXPECT_NE(refused_list(error_of("404 Not Found", "NoSuchBucket")).find("the bucket does not exist"),
            std::string::npos);
  for (const auto& [status, code] :
       {std::pair("403 Forbidden", "SignatureDoesNotMatch"), std::pair("403 Forbidden", "AccessDenied")}) {
    EXPECT_EQ(refused_list(error_of(status, code)).find(S3Server::kSecret), std::string::npos);
  }
}

TEST_F(S3RecordsTest, a_circular_listing_ends) {
  server_.answer(
      Verb::kList,
      ok_of(list_of("<IsTruncated>true</IsTruncated><NextContinuationToken>t</NextContinuationToken>")),
      kAlways);
  const auto records = opened();
  RemotePage page;
  ASSERT_TRUE(records->list("", "", true, &page));
  EXPECT_EQ(page.next, "t");
  EXPECT_EQ(records->list("", "t", true, &page).kind(), StatusKind::kIo);
}

TEST(S3ListTest, text_and_times_are_parsed_correctly) {
  s3::ListPage page;
  ASSERT_TRUE(s3::parse_list(
      list_of("<Contents><Key>a&amp;&#233;&#x20AC;&lt;/Key&gt;</Key><LastModified>1970-01-02T00:00:01Z"
              "</LastModified><Size>18446744073709551615</Size></Contents>"
              "<Contents><Key>b%2F+</Key><LastModified>2026-13-01T00:00:00Z</LastModified><Size>0</Size>"
              "</Contents><IsTruncated>false</IsTruncated>"),
      10, &page));
  ASSERT_EQ(page.objects.size(), 2u);
  EXPECT_EQ(page.objects[0].key, "a&\u00e9\u20ac</Key>");
  EXPECT_EQ(page.objects[0].bytes, UINT64_MAX);
  EXPECT_EQ(page.objects[0].modified_unix_nanos, 86'401'000'000'000);
  EXPECT_EQ(page.objects[1].key, "b%2F+") << "not marked as encoded";
  EXPECT_EQ(page.objects[1].modified_unix_nanos, 0) << "no such month";
  EXPECT_TRUE(page.next.empty());
  EXPECT_EQ(s3::percent_encoded("a/b c\xff~"), "a%2Fb%20c%FF~");
}

}  // namespace
}  // namespace kv_offload
