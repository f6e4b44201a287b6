// SPDX-License-Identifier: Apache-2.0
// A process that ends at any moment, by SIGKILL or a power cut. The next start opens the root, finds the
// complete records, and never reads a wrong byte.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>

#include "fixture.h"
#include "record/record.h"
#include "sim_disk.h"
#include "test_iterations.h"
#include "tier/encrypted_medium.h"

namespace kv_offload {
namespace {

using namespace testing;

constexpr std::uint64_t kSmallBound = std::uint64_t{1} << 20;
const ShardSizes kPowerCutShards = {12000, 4096};

// Plants a fault: the checksum of any payload is reported as valid.
class BlindDisk final : public SimDisk {
 public:
  using SimDisk::SimDisk;
  std::int64_t preadv(int fd, const iovec* parts, int count, std::int64_t offset) override {
    const std::int64_t moved = SimDisk::preadv(fd, parts, count, offset);
    RecordHeader header;
    if (count < 2 || moved <= 0) return moved;
    const std::span<std::byte> page(static_cast<std::byte*>(parts[0].iov_base), parts[0].iov_len);
    if (!decode_header(page, &header)) return moved;
    std::vector<Shard> payload;
    for (int i = 1; i < count; ++i) {
      payload.emplace_back(static_cast<std::byte*>(parts[i].iov_base), parts[i].iov_len);
    }
    header.checksum = payload_checksum(payload);
    encode_header(header, page);
    return moved;
  }
};

// Counts the files that move from one namespace into another.
class MovesDisk final : public SimDisk {
 public:
  using SimDisk::SimDisk;
  int move(int from_directory, const std::string& from, int to_directory, const std::string& to,
           bool keep_existing) override {
    const int rc = SimDisk::move(from_directory, from, to_directory, to, keep_existing);
    moves += rc == 0 && from_directory != to_directory;
    return rc;
  }
  std::atomic<int> moves{0};
};

struct Plan {
  bool power = true;
  FsyncMode fsync = FsyncMode::kNone;
  std::uint64_t max_bytes = std::uint64_t{64} << 20;
  bool resets = false;
  bool encrypted = false;
  bool two_namespaces =
      false;  // lives alternate between two, so that each finds the dead records of the other
};

// Many lives of a process on one disk, each of which ends during a write.
class Lives {
 public:
  Lives(SimDisk& disk, Plan plan) : disk_(disk), plan_(plan), random_(99) {
    options_ = options_for("/root", plan.max_bytes);
    options_.file_ops = &disk_;
    options_.clock = &clock_;
    options_.fsync = plan.fsync;
    if (plan.encrypted) options_.form.keys = keys_of({1});
  }
  void live(int lives, unsigned most_changes) {
    for (int life = 0; life < lives; ++life) {
      const bool other = plan_.two_namespaces && life % 2 == 1;
      options_.namespace_id.fill(other ? 0x22 : 0x11);
      TierUser user(options_);
      user.weights = weights_ + (other ? 1000 : 0);
      user.wait_for_scan();
      poll(user);
      disk_.end_after(1 + random_() % most_changes, plan_.power);
      write_until_the_end(user);
      user.tier().close();
      // Files that were evicted may return after a power cut.
      above += disk_.peak() > std::max(plan_.max_bytes, booted_with_ + 16 * kPageBytes);
      peak = std::max(peak, disk_.peak());
      disk_.boot();
      booted_with_ = disk_.du();
    }
    options_.namespace_id.fill(0x11);
    TierUser user(options_);
    user.weights = weights_;
    user.wait_for_scan();
    poll(user);
  }

  // The result of a life is random, and a slow machine or a sanitizer runs fewer lives.
  template <typename Seen>
  void live_until(Seen seen, int lives, unsigned most_changes) {
    for (int more = 0; more == 0 || (more < 20 && !seen()); ++more) live(lives, most_changes);
  }

  std::uint64_t found = 0, corrupt = 0, wrong = 0, broken_promises = 0, old = 0, unswept = 0, drifted = 0;
  std::uint64_t promises = 0, peak = 0, above = 0;

 private:
  void poll(TierUser& user) {
    for (std::uint32_t number = 0; number < next_; ++number) {
      if (!user.has(number)) {
        broken_promises += promised_.contains(number);
        continue;
      }
      const OpId read = user.start(OpKind::kRead, number, kPowerCutShards);
      const Status status = user.finish(read).status;
      if (status) {
        ++found;
        old += before_reset_.contains(number) && !rewritten_.contains(number);
        wrong += !user.holds_what_it_should(read);
      } else {
        corrupt += status.kind() == StatusKind::kCorrupt;
        broken_promises += promised_.contains(number);
        EXPECT_EQ(status.kind(), StatusKind::kCorrupt) << status.to_string();
      }
    }
    promised_.clear();
    // A process that lost its lock with the power is dead once it stays idle for a while.
    const bool settled = user.until([&] {
      clock_.advance(std::chrono::seconds(1));
      user.poll();
      return user.tier().stats().bytes == disk_.du() && (may_come_back() || temporaries() == 0);
    });
    // A second look could fall between a background reclaim's change on the disk and in the total.
    if (settled) return;
    drifted += user.tier().stats().bytes != disk_.du();
    unswept += temporaries();
  }
  void write_until_the_end(TierUser& user) {
    while (!disk_.ended()) {
      if (plan_.resets && random_() % 12 == 0 && user.tier().reset()) {
        for (std::uint32_t number = 0; number < next_; ++number) before_reset_.insert(number);
        rewritten_.clear();
        promised_.clear();
        user.weights = ++weights_;
      }
      std::vector<std::pair<std::uint32_t, OpId>> ops;
      for (int i = 0; i < 3; ++i) {
        // Also writes records that may exist already.
        const std::uint32_t number = next_ > 0 && random_() % 4 == 0 ? random_() % next_ : next_++;
        rewritten_.insert(number);
        ops.emplace_back(number, user.start(OpKind::kWrite, number, kPowerCutShards));
      }
      for (const auto& [number, op] : ops) {
        if (!user.finish(op).status) continue;
        ++promises;
        promised_.insert(number);
      }
    }
  }
  // Without fsync, a full root writes into the files of evicted records. After a power cut, the intermediate
  // name may return although the write ended long ago. It is in the total, and the next count removes it.
  bool may_come_back() const {
    return plan_.power && plan_.fsync == FsyncMode::kNone && plan_.max_bytes < 2 * kSmallBound;
  }
  std::size_t temporaries() const {
    std::size_t count = 0;
    for (const std::string& path : disk_.files()) {
      count += layout::is_temporary(path.substr(path.rfind('/') + 1));
    }
    return count;
  }

  SimDisk& disk_;
  const Plan plan_;
  std::mt19937_64 random_;
  FakeClock clock_;
  FsTierOptions options_;
  std::uint32_t next_ = 0, weights_ = 0;
  std::uint64_t booted_with_ = 0;
  std::set<std::uint32_t> promised_, before_reset_, rewritten_;
};

TEST(PowerCut, the_next_start_finds_complete_records_and_no_wrong_byte) {
  SimDisk disk;
  Lives lives(disk, {});
  lives.live_until([&] { return lives.found > 0 && lives.corrupt > 0; }, rounds(300), 60);
  EXPECT_EQ(lives.wrong, 0u);
  EXPECT_EQ(lives.unswept, 0u);
  EXPECT_EQ(lives.drifted, 0u);
  EXPECT_GT(lives.found, 0u);
  EXPECT_GT(lives.corrupt, 0u) << "hardly anything was torn";
  RecordProperty("torn", static_cast<int>(lives.corrupt));
}

#ifdef KV_OFFLOAD_ENCRYPTION

TEST(PowerCut, the_next_start_finds_complete_encrypted_records) {
  SimDisk disk;
  Lives lives(disk,
              {.max_bytes = kSmallBound + (std::uint64_t{256} << 10), .resets = true, .encrypted = true});
  // Few lives end between a complete record and the next reset, so even a sanitized run has hundreds of them.
  lives.live_until([&] { return lives.found > 0 && lives.corrupt > 0; }, std::max(30, rounds(100)), 100);
  EXPECT_EQ(lives.wrong + lives.old + lives.above, 0u);
  EXPECT_GT(lives.found, 0u);
  EXPECT_GT(lives.corrupt, 0u) << "hardly anything was torn";
}

TEST(Kill, a_kill_at_any_call_loses_no_encrypted_record) {
  SimDisk disk;
  Lives lives(disk, {.power = false, .encrypted = true});
  lives.live_until([&] { return lives.promises > 10; }, rounds(50), 60);
  EXPECT_GT(lives.promises, 10u);
  EXPECT_EQ(lives.broken_promises + lives.wrong + lives.corrupt + lives.unswept + lives.drifted, 0u);
}

#endif

TEST(PowerCut, without_checksums_wrong_bytes_would_be_detected) {
  BlindDisk disk;
  Lives lives(disk, {});
  lives.live_until([&] { return lives.wrong > 0; }, rounds(60), 60);
  EXPECT_GT(lives.wrong, 0u);
}

TEST(PowerCut, synced_data_is_never_torn) {
  SimDisk disk;
  Lives lives(disk, {.fsync = FsyncMode::kData});
  lives.live_until([&] { return lives.found > 0; }, rounds(150), 60);
  EXPECT_EQ(lives.wrong + lives.corrupt + lives.unswept + lives.drifted, 0u);
  EXPECT_GT(lives.found, 0u);
}

// Also evicted records, which may return.
TEST(PowerCut, synced_data_is_never_torn_in_a_full_root) {
  SimDisk disk;
  Lives lives(disk, {.fsync = FsyncMode::kData, .max_bytes = kSmallBound + (std::uint64_t{256} << 10)});
  lives.live_until([&] { return lives.peak > kSmallBound; }, rounds(100), 300);
  EXPECT_EQ(lives.wrong + lives.corrupt + lives.unswept + lives.above, 0u);
  EXPECT_GT(lives.peak, kSmallBound) << "the bound was never reached";
}

TEST(PowerCut, fully_synced_records_are_never_lost) {
  SimDisk disk;
  Lives lives(disk, {.fsync = FsyncMode::kFull});
  lives.live_until([&] { return lives.promises > 15; }, rounds(150), 60);
  EXPECT_GT(lives.promises, 15u);
  EXPECT_EQ(lives.broken_promises + lives.wrong + lives.corrupt + lives.unswept + lives.drifted, 0u);
}

TEST(PowerCut, a_disk_that_ignores_fsync_is_detected) {
  SimDisk disk;
  disk.lie_about_sync();
  Lives lives(disk, {.fsync = FsyncMode::kFull});
  lives.live_until([&] { return lives.broken_promises > 2; }, rounds(60), 60);
  EXPECT_GT(lives.broken_promises, 2u);
  EXPECT_EQ(lives.wrong, 0u);
}

TEST(PowerCut, no_record_from_before_a_reset_returns) {
  SimDisk disk;
  Lives lives(disk, {.fsync = FsyncMode::kFull, .resets = true});
  lives.live_until([&] { return lives.found > 0; }, rounds(200), 100);
  EXPECT_EQ(lives.wrong + lives.old, 0u);
  EXPECT_GT(lives.found, 0u);
}

TEST(PowerCut, the_bound_holds_across_power_cuts) {
  SimDisk disk;
  Lives lives(disk, {.max_bytes = kSmallBound + (std::uint64_t{256} << 10)});
  lives.live_until([&] { return lives.peak > kSmallBound; }, rounds(150), 300);
  EXPECT_EQ(lives.wrong + lives.above, 0u);
  EXPECT_GT(lives.peak, kSmallBound) << "the bound was never reached";
}

TEST(Kill, a_kill_at_any_call_loses_no_written_record) {
  SimDisk disk;
  Lives lives(disk, {.power = false});
  lives.live_until([&] { return lives.promises > 10; }, rounds(100), 60);
  EXPECT_GT(lives.promises, 10u);
  EXPECT_EQ(lives.broken_promises + lives.wrong + lives.corrupt + lives.unswept + lives.drifted, 0u);
}

TEST(Kill, a_kill_alongside_a_dead_namespace_leaves_a_consistent_root) {
  MovesDisk disk;
  Lives lives(
      disk, {.power = false, .max_bytes = kSmallBound + (std::uint64_t{256} << 10), .two_namespaces = true});
  lives.live_until([&] { return disk.moves > 20; }, rounds(200), 300);
  EXPECT_EQ(lives.wrong + lives.corrupt + lives.unswept + lives.drifted, 0u);
  EXPECT_LE(lives.peak, kSmallBound + (std::uint64_t{256} << 10));
  EXPECT_GT(disk.moves, 20) << "the control: files of dead records are reused";
}

TEST(PowerCut, a_power_cut_alongside_a_dead_namespace_leaves_no_wrong_byte) {
  MovesDisk disk;
  Lives lives(disk, {.max_bytes = kSmallBound + (std::uint64_t{256} << 10), .two_namespaces = true});
  lives.live_until([&] { return lives.corrupt > 0 && disk.moves > 20; }, rounds(60), 300);
  EXPECT_EQ(lives.wrong + lives.above, 0u);
  EXPECT_GT(lives.corrupt, 0u) << "hardly anything was torn";
  EXPECT_GT(disk.moves, 20) << "the control: files of dead records are reused";
}

TEST(Kill, a_kill_with_resets_and_a_bound_leaves_a_consistent_root) {
  SimDisk disk;
  Lives lives(disk, {.power = false, .max_bytes = kSmallBound + (std::uint64_t{256} << 10), .resets = true});
  lives.live_until([&] { return lives.peak > kSmallBound; }, rounds(200), 300);
  EXPECT_EQ(lives.wrong + lives.old + lives.corrupt + lives.unswept + lives.drifted, 0u);
  EXPECT_LE(lives.peak, kSmallBound + (std::uint64_t{256} << 10));
  EXPECT_GT(lives.peak, kSmallBound) << "the bound was never reached";
}

}  // namespace
}  // namespace kv_offload
