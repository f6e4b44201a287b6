// SPDX-License-Identifier: Apache-2.0
// The cache on a real directory whose file system fails, hangs and recovers. Checks the lookup
// results and counters, and that the scheduler never waits.
#include <gtest/gtest.h>

#include <cerrno>
#include <thread>

#include "backends/fs/faulty_file_ops.h"
#include "backends/fs/fixture.h"
#include "cache/cache_fixture.h"

namespace kv_offload {
namespace {

using std::chrono::seconds;
using testing::Call;
using testing::FaultyFileOps;
using ::testing::IsEmpty;

// ops outlive the threads that a test leaves running.
class OnDiskTest : public CacheTest {
 protected:
  explicit OnDiskTest(std::uint64_t max_bytes = std::uint64_t{8} << 20, std::uint64_t rows = 64) {
    make({.rows = rows,
          .cache = {.load_policy = LoadPolicy::kAlways},
          .make_tier = [=, this](const Clock& clock) {
            FsTierOptions options = testing::options_for(root_, max_bytes);
            options.file_ops = &ops_;
            options.clock = &clock;
            return make_fs_tier(options);
          }});
    EXPECT_TRUE(until([&] { return stats().scan_complete; }));
  }
  ~OnDiskTest() override {
    ops_.clear();
    ops_.release();
    world_.reset();
  }
  // Smaller than a read or write call of a record; all other calls transfer at most a page.
  static constexpr std::size_t kRecordBytes = 8192;
  TierStats stats() { return cache().tiers()[0]->stats(); }
  bool until(const std::function<bool()>& condition) {
    const auto give_up = std::chrono::steady_clock::now() + seconds(120);
    while (!condition()) {
      if (std::chrono::steady_clock::now() > give_up) return false;
      step();
      std::this_thread::yield();
    }
    return true;
  }
  // Completed writes have released their pins.
  void write_all() {
    EXPECT_TRUE(until([&] { return cache().stats().pinned_chunks == 0; }));
  }
  void store_and_write(const Names& names) {
    store(names);
    write_all();
  }
  // Records chunks and evicts them from host memory.
  void record(const Names& names) {
    store_and_write(names);
    restart();
  }
  void restart() {
    cache().close();
    world().cache.reset();
    world().open();
    EXPECT_TRUE(until([&] { return stats().scan_complete; }));
  }
  // Waits like vLLM and returns the letters of the last scan.
  std::string ask(RequestHandle request, const Names& wanted) {
    std::string seen;
    EXPECT_TRUE(until([&] {
      seen = scan(request, wanted);
      return seen.find_first_of("PR") == std::string::npos;
    }));
    return seen;
  }
  std::map<std::string, double> failures() {
    cache().publish_gauges();
    std::map<std::string, double> found;
    for (const char* op : {"read", "write", "reset", "store", "load"}) {
      for (const char* kind : {"corrupt", "io", "no_space", "timeout", "expired", "device", "unavailable"}) {
        const double count = world().failures("fs", op, kind);
        if (count > 0) found[fmt::format("{} {}", op, kind)] = count;
      }
    }
    return found;
  }
  void expect_one_more(const std::string& what, std::map<std::string, double> before) {
    ++before[what];
    EXPECT_EQ(failures(), before);
  }

  testing::TempDir dir_;
  std::string root_ = dir_.path() + "/root";
  FaultyFileOps ops_;
};

struct Fault {
  Call call;
  int error;
  const char* kind;
};
class OnDiskWriteFaults : public OnDiskTest, public ::testing::WithParamInterface<Fault> {};

TEST_P(OnDiskWriteFaults, a_write_fault_is_counted_once_and_keeps_the_chunk_in_memory) {
  const auto before = failures();
  ops_.set_rule([&](Call call) { return call == GetParam().call ? -GetParam().error : 0; });
  store_and_write({"a"});
  ops_.clear();
  expect_one_more(std::string("write ") + GetParam().kind, before);
  EXPECT_EQ(peek({"a"}), "H");
  EXPECT_EQ(world().dropped("fs", GetParam().kind), 2 * 4096);
  EXPECT_THAT(testing::temporaries_in(root_), IsEmpty());
  EXPECT_THAT(testing::records_in(root_), IsEmpty());
}

INSTANTIATE_TEST_SUITE_P(
    Faults, OnDiskWriteFaults,
    ::testing::Values(Fault{Call::kPwritev, EIO, "io"}, Fault{Call::kPwritev, ENOSPC, "no_space"},
                      Fault{Call::kPwritev, EDQUOT, "no_space"}, Fault{Call::kRename, EIO, "io"},
                      Fault{Call::kRename, ENOSPC, "no_space"}, Fault{Call::kOpen, EMFILE, "io"},
                      Fault{Call::kOpen, EROFS, "io"}, Fault{Call::kFstat, EIO, "io"}));

class OnDiskReadFaults : public OnDiskTest, public ::testing::WithParamInterface<Fault> {};

TEST_P(OnDiskReadFaults, a_read_fault_is_a_miss_counted_once) {
  record({"a", "b"});
  const auto before = failures();
  const RequestHandle request = begin();
  // Every call fails: the tier's maintenance makes these calls too.
  ops_.fail_all(GetParam().call, GetParam().error);
  EXPECT_EQ(ask(request, {"a"}), "M");
  ops_.clear();
  expect_one_more(std::string("read ") + GetParam().kind, before);
  end(request);
  EXPECT_EQ(world().miss_tokens("io_error"), World::kTokens);
  world().clock.advance(seconds(2));  // the back-off ends
  const RequestHandle again = begin();
  EXPECT_EQ(ask(again, {"a", "b"}), "HH");
  load(again, {"a", "b"});  // checks the bytes
}

INSTANTIATE_TEST_SUITE_P(Faults, OnDiskReadFaults,
                         ::testing::Values(Fault{Call::kPreadv, EIO, "io"}, Fault{Call::kOpen, EMFILE, "io"},
                                           Fault{Call::kOpen, EACCES, "io"}, Fault{Call::kFstat, EIO, "io"}));

TEST_F(OnDiskTest, a_damaged_record_counts_as_one_failure_and_a_vanished_one_as_none) {
  record({"a", "b"});
  const auto before = failures();
  const auto records = testing::records_in(root_);
  ASSERT_EQ(records.size(), 2u);
  std::fstream(records[0], std::ios::in | std::ios::out | std::ios::binary).seekp(5000).put('!');
  std::filesystem::remove(records[1]);
  const RequestHandle first = begin(), second = begin();
  EXPECT_EQ(ask(first, {"a"}) + ask(second, {"b"}), "MM");
  expect_one_more("read corrupt", before);
}

// ---- a device that hangs

TEST_F(OnDiskTest, a_frozen_device_blocks_neither_the_scheduler_nor_a_request) {
  record({"a"});
  const int opened_with = ops_.calls_here();
  EXPECT_GT(opened_with, 0) << "the tier was opened on this thread, so the counter detects calls";
  // A read and a write of a record are inside the device; maintenance calls may be there too.
  ops_.block(Call::kPwritev, kRecordBytes);
  store({"s"});
  ops_.wait_for_blocked_in(Call::kPwritev);
  ops_.block(Call::kPreadv, kRecordBytes);
  const RequestHandle request = begin();
  EXPECT_EQ(scan(request, {"a"}), "P");
  step();
  ops_.wait_for_blocked_in(Call::kPreadv);
  ops_.freeze();
  for (int i = 0; i < 100; ++i) {  // all stores continue
    EXPECT_EQ(store({fmt::format("s{}", i)}).size(), 1u);
    EXPECT_EQ(peek({fmt::format("s{}", i)}), "H");
    step();
  }
  EXPECT_EQ(scan(request, {"a"}), "P");
  pass_time(seconds(5));
  step();
  EXPECT_EQ(scan(request, {"a"}), "M");  // the deadline passed
  EXPECT_FALSE(cache().has_pending_work());
  pass_time(seconds(6));
  step();
  EXPECT_FALSE(stats().readable || stats().writable);
  store({"late"});
  step();
  cache().publish_gauges();
  EXPECT_EQ(ops_.calls_here(), opened_with) << "the scheduler's thread called the file system";
  EXPECT_GT(world().dropped("fs", "pressure"), 0);
  EXPECT_GT(world().dropped("fs", "unavailable"), 0);
  // Ops inside the device time out, once each. The others never started. (A thread may reach its
  // call late.)
  EXPECT_TRUE(until([&] {
    pass_time(seconds(30));
    step();
    return failures().size() == 2;
  }));
  auto found = failures();
  EXPECT_EQ(found.size(), 2u);
  EXPECT_EQ(found["read timeout"], 1);
  EXPECT_GE(found["write timeout"], 1);
  EXPECT_LE(found["write timeout"], 6);
  pass_time(seconds(30));
  step();
  EXPECT_EQ(failures(), found) << "counted twice";
}

TEST_F(OnDiskTest, reads_that_never_reached_the_device_are_misses_without_failures) {
  const Names prompt{"a", "b", "c", "d", "e", "f", "g", "h", "i", "j"};  // more chunks than threads
  record(prompt);
  ops_.block(Call::kPreadv, kRecordBytes);
  const RequestHandle request = begin();
  EXPECT_EQ(scan(request, prompt), "PPPPPPPPPP");
  step();
  ops_.wait_for_blocked_in(Call::kPreadv);
  pass_time(seconds(5));
  step();
  EXPECT_EQ(scan(request, prompt), "M");
  end(request);
  EXPECT_EQ(world().miss_tokens("deadline"), World::kTokens)
      << "the first chunk of a prompt of unknown length";
  EXPECT_THAT(failures(), IsEmpty());
}

TEST_F(OnDiskTest, a_frozen_device_that_recovers_is_used_again) {
  record({"a", "b"});
  ops_.freeze();
  RequestHandle request = begin();
  // A read is repeated if its deadline passed before its thread reached the device.
  EXPECT_TRUE(until([&] {
    scan(request, {"a"});
    step();
    ops_.wait_for_blocked(1);
    pass_time(seconds(11));
    step();
    EXPECT_EQ(scan(request, {"a"}), "M");
    end(request);
    request = begin();
    return !stats().readable;
  }));
  end(request);
  ops_.release();
  EXPECT_TRUE(until([&] { return stats().queued_reads + stats().queued_writes == 0; }));
  const double switched_off = world().miss_tokens("io_error");
  EXPECT_EQ(peek({"b"}), "M") << "back-off";
  EXPECT_EQ(world().miss_tokens("io_error"), switched_off + World::kTokens);
  pass_time(seconds(61));
  step();
  const RequestHandle again = begin();
  EXPECT_EQ(ask(again, {"b"}), "H");
  load(again, {"b"});
  store_and_write({"c"});
  EXPECT_TRUE(stats().readable && stats().writable);
  EXPECT_EQ(testing::records_in(root_).size(), 3u);
}

// A thread that hangs in the device when the engine ends returns later and reads into its row. Memory that
// an abandoned thread may still use is never freed here.
TEST(OnDiskAfterClose, a_read_that_returns_after_close_has_its_memory_mapped) {
  struct Left {
    FaultyFileOps ops;
    FakeClock clock;
  };
  static Left* const left = new Left;
  testing::TempDir dir;
  World world({.rows = 4, .cache = {.load_policy = LoadPolicy::kAlways}, .make_tier = [&](const Clock&) {
                 FsTierOptions options = testing::options_for(dir.path() + "/root");
                 options.file_ops = &left->ops;
                 options.clock = &left->clock;
                 options.close_wait = std::chrono::milliseconds(10);
                 return make_fs_tier(options);
               }});
  const std::vector<ChunkKey> key{key_of("a")};
  const auto all_ended = [&] {
    while (world.cache->stats().pinned_chunks > 0) {
      world.cache->end_step();
      std::this_thread::yield();
    }
  };
  const RequestHandle writer = world.cache->begin_request("w", {});
  const StoreGrant grant = world.cache->prepare_store(writer, key);
  world.copy(key[0], grant.transfer.rows[0], 0);
  world.report(grant.transfer.ticket);
  world.cache->complete_store(key);
  all_ended();
  world.cache->close();
  world.cache.reset();
  world.open();
  while (!world.cache->tiers()[0]->stats().scan_complete) std::this_thread::yield();
  const RequestHandle reader = world.cache->begin_request("r", {});
  ASSERT_EQ(world.cache->lookup(reader, key[0]), LookupResult::kPending);
  left->ops.block(Call::kPreadv, 8192);
  world.cache->end_step();
  left->ops.wait_for_blocked_in(Call::kPreadv);
  const std::weak_ptr<HostRegion> region = world.region;
  world.cache.reset();
  world.ranks.clear();
  world.region.reset();
  ASSERT_FALSE(region.expired()) << "the region was unmapped while a thread read into it";
  left->ops.release();
  left->ops.wait_for_all_closed();  // the thread has read, and was the last owner of its tier
  while (!region.expired()) std::this_thread::yield();
}

// Every record is read once, regardless of the number of waiting requests.
TEST_F(OnDiskTest, a_burst_over_one_missing_prefix_reads_it_once) {
  const Names prefix{"a", "b", "c", "d"};
  record(prefix);
  std::vector<RequestHandle> burst;
  for (int i = 0; i < 50; ++i) burst.push_back(begin());
  for (const RequestHandle request : burst) EXPECT_EQ(scan(request, prefix), "PPPP");
  for (const RequestHandle request : burst) EXPECT_EQ(ask(request, prefix), "HHHH");
  for (const RequestHandle request : burst) {
    load(request, prefix);
    end(request);
  }
  EXPECT_EQ(world().metrics.value("kv_offload_read_bytes_total", {"fs"}), 4 * 2 * 4096);
  EXPECT_EQ(cache().stats().pinned_chunks, 0u);
}

// ---- a disk smaller than host memory

class SmallDiskTest : public OnDiskTest {
 protected:
  SmallDiskTest() : OnDiskTest(std::uint64_t{1} << 20, 256) {}  // fewer than 86 records of 12 KiB
};

// A prompt in frequent use is hit in host memory, so no read refreshes its records on the disk.
TEST_F(SmallDiskTest, the_prompt_in_use_survives_a_restart_and_unused_prompts_do_not) {
  const Names prompt{"a", "b", "c", "d", "e", "f", "g", "h"};
  store_and_write(prompt);
  for (int i = 0; i < 120; ++i) {
    store_and_write({fmt::format("x{}", i)});
    const RequestHandle request = begin();
    ASSERT_EQ(scan(request, prompt), "HHHHHHHH");
    load(request, prompt);
    end(request);
    step();
  }
  EXPECT_GT(stats().evicted_bytes, 30 * kRecordBytes);
  restart();
  EXPECT_EQ(ask(begin(), prompt), "HHHHHHHH");
  EXPECT_EQ(ask(begin(), {"x0"}), "M");
}

}  // namespace
}  // namespace kv_offload
