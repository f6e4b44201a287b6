// SPDX-License-Identifier: Apache-2.0
// Tenants of a directory: guaranteed shares of its bytes on disk, which survive restarts and hold for all
// servers that share it.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <random>
#include <string>
#include <vector>

#include "backends/fs/record_file.h"
#include "backends/fs/store.h"
#include "fixture.h"

namespace kv_offload {
namespace {

using namespace testing;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr TenantId kOther = 0, kQuiet = 1, kFlood = 2;
constexpr std::uint64_t kRootBytes = std::uint64_t{2} << 20;
constexpr std::uint64_t kShardBytes = 12288;  // a record takes 16 KiB

const std::vector<TenantOptions> kHalves{{"other", 0}, {"quiet", 0.5}, {"flood", 0.5}};

// One server. Nothing runs in the background: a test calls tick().
class Server {
 public:
  Server(const std::string& root, std::vector<TenantOptions> tenants, FakeClock& clock,
         const std::string& policy = "lru")
      : tenants_(std::move(tenants)), clock_(clock), row_({kShardBytes}) {
    FsTierOptions options = options_for(root, kRootBytes);
    options.tenants = tenants_;
    options.eviction_policy = policy;
    store_ = std::make_unique<FsStore>(options, posix_file_ops(), clock);
    store_->start();
    tick();
  }
  ~Server() { store_->close(); }

  void tick() {
    clock_.advance(std::chrono::seconds(5));
    store_->maintain();
  }
  Status write(TenantId tenant, std::uint32_t number) {
    TierOp op = op_for(OpKind::kWrite, tenant, number);
    if (tenant != 0) op.tenant = tenants_[tenant].name;
    row_.fill(number);
    std::uint64_t moved = 0;
    return store_->write(op, store_->epoch(), &moved);
  }
  // Returns how many of the writes succeeded.
  std::size_t write_all(TenantId tenant, std::uint32_t first, std::uint32_t count) {
    std::size_t written = 0;
    for (std::uint32_t n = first; n < first + count; ++n) written += write(tenant, n).is_ok();
    return written;
  }
  Status read(TenantId tenant, std::uint32_t number) {
    std::uint64_t moved = 0;
    return store_->read(op_for(OpKind::kRead, tenant, number), store_->epoch(), &moved);
  }
  std::vector<std::uint32_t> missing(std::uint32_t first, std::uint32_t count) {
    std::vector<std::uint32_t> absent;
    for (std::uint32_t n = first; n < first + count; ++n) {
      if (store_->catalog()->contains(key_of(n)) != Presence::kPresent) absent.push_back(n);
    }
    return absent;
  }
  TierStats stats() {
    TierStats stats;
    store_->figures(&stats);
    return stats;
  }
  FsStore& store() { return *store_; }

 private:
  TierOp op_for(OpKind kind, TenantId tenant, std::uint32_t number) {
    TierOp op;
    op.kind = kind;
    op.key = key_of(number);
    op.shards = row_.shards();
    op.entry_info.tenant = tenant;
    op.entry_info.request = ++requests_;
    return op;
  }

  const std::vector<TenantOptions> tenants_;
  FakeClock& clock_;
  Row row_;
  std::unique_ptr<FsStore> store_;
  std::uint32_t requests_ = 0;
};

class TenantsInRootTest : public ::testing::Test {
 protected:
  std::string root() const { return directory_.path() + "/root"; }
  std::unique_ptr<Server> start(const std::vector<TenantOptions>& tenants = kHalves) {
    return std::make_unique<Server>(root(), tenants, clock_);
  }
  const TempDir directory_;
  FakeClock clock_;
};

TEST_F(TenantsInRootTest, a_flood_evicts_nothing_within_the_share_of_a_quiet_tenant) {
  const auto server = start();
  ASSERT_EQ(server->write_all(kQuiet, 0, 15), 15u);
  EXPECT_EQ(server->write_all(kFlood, 1000, 300), 300u);
  EXPECT_THAT(server->missing(0, 15), IsEmpty());
  EXPECT_GT(server->stats().evicted_bytes, 0u);
}

// The test above can fail.
TEST_F(TenantsInRootTest, without_tenants_a_flood_takes_the_directory) {
  const auto server = start({});
  ASSERT_EQ(server->write_all(kOther, 0, 15), 15u);
  EXPECT_EQ(server->write_all(kOther, 1000, 300), 300u);
  EXPECT_EQ(server->missing(0, 15).size(), 15u);
  EXPECT_THAT(server->stats().tenant_bytes, IsEmpty());
}

TEST_F(TenantsInRootTest, an_idle_share_is_lent_and_taken_back_at_once) {
  const auto server = start();
  server->write_all(kFlood, 1000, 300);
  const auto lent = server->stats().tenant_bytes;
  EXPECT_EQ(server->write_all(kQuiet, 0, 25), 25u);
  EXPECT_THAT(server->missing(0, 25), IsEmpty());
  const auto bytes = server->stats().tenant_bytes;
  EXPECT_GT(lent[kFlood], bytes[kFlood] + 24 * std::uint64_t{16384} - 1);
  EXPECT_EQ(bytes[kQuiet], 25 * std::uint64_t{16384});
}

TEST_F(TenantsInRootTest, a_tenant_without_a_share_is_declined_where_the_others_hold_theirs) {
  const auto server = start();
  std::size_t written = 0;
  for (std::uint32_t n = 0; n < 100; ++n) {  // in turn, to the same size
    written += server->write(kQuiet, n).is_ok();
    written += server->write(kFlood, 1000 + n).is_ok();
  }
  EXPECT_EQ(written, 200u);
  const std::uint64_t evicted = server->stats().evicted_bytes;
  ASSERT_GT(evicted, 0u);
  const Status status = server->write(kOther, 5000);
  EXPECT_EQ(status.kind(), StatusKind::kDeclined) << status.to_string();
  EXPECT_EQ(server->stats().evicted_bytes, evicted);
  EXPECT_EQ(server->write(kQuiet, 5001).kind(), StatusKind::kOk) << "at the cost of its own records";
}

TEST_F(TenantsInRootTest, a_restart_keeps_the_share_of_each_tenant) {
  std::vector<std::uint64_t> before;
  {
    const auto server = start();
    server->write_all(kQuiet, 0, 15);
    server->write_all(kFlood, 1000, 300);
    before = server->stats().tenant_bytes;
  }
  // The new server numbers the tenants differently.
  const auto server = start({{"other", 0}, {"flood", 0.5}, {"quiet", 0.5}});
  EXPECT_THAT(server->stats().tenant_bytes, ElementsAre(before[0], before[kFlood], before[kQuiet]));
  EXPECT_EQ(server->write_all(1, 2000, 300), 300u);
  EXPECT_THAT(server->missing(0, 15), IsEmpty());
}

TEST_F(TenantsInRootTest, servers_of_one_directory_respect_the_same_shares) {
  const auto first = start();
  first->write_all(kQuiet, 0, 8);
  const auto second = start();
  first->write_all(kQuiet, 8, 7);
  second->tick();  // finds those
  EXPECT_THAT(second->missing(0, 15), IsEmpty());
  EXPECT_EQ(second->stats().tenant_bytes[kQuiet], first->stats().tenant_bytes[kQuiet]);
  EXPECT_EQ(second->write_all(kFlood, 1000, 300), 300u);
  for (std::uint32_t n = 0; n < 15; ++n) EXPECT_TRUE(first->read(kQuiet, n)) << n;
}

TEST_F(TenantsInRootTest, a_record_found_by_its_name_has_its_tenant) {
  const auto first = start();
  first->write_all(kQuiet, 0, 1);
  const auto second = start();
  first->write_all(kQuiet, 1, 1);
  std::vector<bool> present(1);
  const ChunkKey key = key_of(1);
  ASSERT_TRUE(second->store().locate({&key, 1}, KeyOrder::kNone, second->store().epoch(), &present));
  ASSERT_TRUE(present[0]);
  EXPECT_EQ(second->stats().tenant_bytes[kQuiet], 2 * std::uint64_t{16384});
}

TEST_F(TenantsInRootTest, records_without_a_known_tenant_are_charged_to_others_until_a_tenant_uses_them) {
  {
    const auto server = start({{"other", 0.5}, {"gone", 0.5}});
    server->write_all(kOther, 0, 10);
    server->write_all(1, 10, 10);
  }
  const auto server = start();
  const std::uint64_t record = 16384;
  EXPECT_THAT(server->stats().tenant_bytes, ElementsAre(20 * record, 0u, 0u));
  for (std::uint32_t n = 5; n < 15; ++n) ASSERT_TRUE(server->read(kQuiet, n));
  EXPECT_THAT(server->stats().tenant_bytes, ElementsAre(10 * record, 10 * record, 0u));
  server->write_all(kFlood, 1000, 300);
  EXPECT_THAT(server->missing(5, 10), IsEmpty());
}

// Not only if `other` is above its share.
TEST(TenantsInCatalog, the_first_tenant_that_uses_a_record_without_one_takes_it_over) {
  FsCatalog catalog("lru", std::vector<TenantOptions>{{"other", 0.9}, {"quiet", 0.05}, {"flood", 0.05}});
  for (std::uint32_t n = 0; n < 3; ++n) catalog.insert({key_of(n), 8192, 4096}, {});
  for (const TenantId tenant : {kQuiet, kFlood}) catalog.hit(key_of(0), {.tenant = tenant}, Nanos(1));
  EXPECT_THAT(catalog.tenant_bytes(), ElementsAre(8192u, 4096u, 0u));
}

TEST_F(TenantsInRootTest, a_reset_forgets_the_records_of_every_tenant) {
  const auto server = start();
  server->write_all(kQuiet, 0, 15);
  server->write_all(kFlood, 1000, 15);
  server->store().forget(0);
  EXPECT_THAT(server->stats().tenant_bytes, ElementsAre(0u, 0u, 0u));
  ASSERT_TRUE(server->store().begin_epoch());
  EXPECT_EQ(server->missing(0, 15).size(), 15u);
  EXPECT_EQ(server->write_all(kQuiet, 0, 15), 15u);
  EXPECT_THAT(server->stats().tenant_bytes, ElementsAre(0u, 15 * std::uint64_t{16384}, 0u));
}

TEST_F(TenantsInRootTest, a_record_names_its_tenant_and_that_of_others_names_none) {
  const auto server = start();
  server->write_all(kQuiet, 1, 1);
  server->write_all(kOther, 2, 1);
  RecordHeader header;
  ASSERT_TRUE(read_header(posix_file_ops(), AT_FDCWD, path_of(root(), 1), &header));
  EXPECT_EQ(header.tenant, "quiet");
  ASSERT_TRUE(read_header(posix_file_ops(), AT_FDCWD, path_of(root(), 2), &header));
  EXPECT_EQ(header.tenant, "");
}

// ---- the catalog alone

ChunkKey chunk(const std::string& prompt, int n) {
  return key_of(static_cast<std::uint32_t>(std::hash<std::string>{}(fmt::format("{}-{}", prompt, n))));
}

// A directory for `bytes` bytes of records.
class Directory {
 public:
  Directory(const std::string& policy, std::uint64_t bytes, const std::vector<TenantOptions>& tenants)
      : catalog_(policy, tenants), bytes_(bytes) {}
  // A request of the tenant that reads what it finds and writes the rest. Returns the number of hits.
  std::size_t use(TenantId tenant, const std::string& prompt, int chunks, std::uint64_t charge = 4096) {
    std::size_t hits = 0;
    bool found = true;
    EntryInfo info{.request = ++requests_, .tenant = tenant};
    for (int n = 0; n < chunks; ++n, info.parent = info.id) {
      const ChunkKey key = chunk(prompt, n);
      info.id = chunk_id(key);
      info.depth = static_cast<std::uint32_t>(n);
      found = found && catalog_.holds(key);
      hits += found;
      if (catalog_.holds(key)) {
        catalog_.hit(key, info, Nanos(1));
      } else if (!write(key, info, charge)) {
        return hits;
      }
    }
    return hits;
  }
  FsCatalog& catalog() { return catalog_; }

 private:
  bool write(const ChunkKey& key, const EntryInfo& info, std::uint64_t charge) {
    const FsCatalog::Need need{info.tenant, charge};
    while (used_ + charge > bytes_) {
      if (catalog_.next_is_of(info.request, &need)) return false;
      const auto victim = catalog_.take_victim(&need);
      if (!victim) return false;
      used_ -= victim->charge;
    }
    catalog_.insert({key, 8192, charge, info.tenant}, info);
    used_ += charge;
    return true;
  }

  FsCatalog catalog_;
  const std::uint64_t bytes_;
  std::uint64_t used_ = 0;
  std::uint32_t requests_ = 0;
};

// Prompts that return, next to prompts that never do.
TEST(TenantsInCatalog, a_quiet_tenant_hits_next_to_a_flood_as_alone_with_its_share) {
  for (const std::string& policy : eviction_policy_names()) {
    const auto run = [&](bool flooded) {
      Directory directory(policy, std::uint64_t{4096} * (flooded ? 200 : 100),
                          flooded ? kHalves : std::vector<TenantOptions>{});
      std::mt19937 random(3);
      std::geometric_distribution<int> session(0.06);
      std::size_t hits = 0, chunks = 0;
      for (int turn = 0; turn < 1500; ++turn) {
        const int length = 4 + turn % 5;
        hits += directory.use(flooded ? kQuiet : kOther, fmt::format("q{}", session(random)), length);
        chunks += static_cast<std::size_t>(length);
        if (flooded) directory.use(kFlood, fmt::format("f{}", turn), 40);
      }
      return static_cast<double>(hits) / static_cast<double>(chunks);
    };
    const double alone = run(false);
    EXPECT_GT(alone, 0.3) << policy;
    EXPECT_LT(alone, 0.95) << policy;
    const double next_to_flood = run(true);
    RecordProperty(policy, fmt::format("{:.4f} alone, {:.4f} next to a flood", alone, next_to_flood));
    EXPECT_GE(next_to_flood, alone - 0.01) << policy;
  }
}

TEST(TenantsInCatalog, shares_count_the_bytes_on_disk) {
  Directory directory("lru", std::uint64_t{4096} * 100, kHalves);
  for (int turn = 0; turn < 200; ++turn) {
    directory.use(kQuiet, fmt::format("q{}", turn), 1, 2048);  // encoded
    directory.use(kFlood, fmt::format("f{}", turn), 1, 4096);
  }
  const auto bytes = directory.catalog().tenant_bytes();
  EXPECT_NEAR(static_cast<double>(bytes[kQuiet]), 4096 * 50, 4096);
  EXPECT_NEAR(static_cast<double>(bytes[kFlood]), 4096 * 50, 4096);
}

TEST(TenantsInCatalog, a_record_whose_size_on_disk_is_unknown_is_charged_like_the_others) {
  FsCatalog catalog("lru", kHalves);
  catalog.insert({key_of(1), 8192, 2048, kQuiet}, {});
  catalog.insert({key_of(2), 8192, 0, kFlood}, {});
  EXPECT_THAT(catalog.tenant_bytes(), ElementsAre(0u, 2048u, 2048u));
  catalog.insert({key_of(2), 8192, 4096, kQuiet}, {});
  EXPECT_THAT(catalog.tenant_bytes(), ElementsAre(0u, 2048u, 4096u)) << "its size is known, its tenant was";
}

// As for host memory: a system prompt that a flood wrote and others use.
TEST(TenantsInCatalog, a_record_that_a_tenant_below_its_share_uses_is_no_longer_charged_to_one_above) {
  Directory directory("lru", std::uint64_t{4096} * 20, kHalves);
  directory.use(kFlood, "system", 1);
  directory.use(kFlood, "f", 19);
  EXPECT_EQ(directory.use(kQuiet, "system", 1), 1u);
  EXPECT_EQ(directory.catalog().tenant_bytes()[kQuiet], 4096u);
  for (int turn = 0; turn < 5; ++turn) directory.use(kFlood, fmt::format("g{}", turn), 20);
  EXPECT_EQ(directory.use(kQuiet, "system", 1), 1u) << "the flood did not evict it";
}

TEST(TenantsInCatalog, a_record_found_before_its_header_was_read_moves_to_its_tenant) {
  for (const std::string& policy : eviction_policy_names()) {
    FsCatalog catalog(policy, kHalves);
    catalog.insert_unordered({key_of(1), 8192});
    EXPECT_EQ(catalog.tenant_bytes()[kOther], 8192u) << policy;
    EXPECT_TRUE(catalog.insert_in_order({key_of(1), 8192, 4096, kQuiet}));
    EXPECT_THAT(catalog.tenant_bytes(), ElementsAre(0u, 4096u, 0u)) << policy;
    const FsCatalog::Need need{kFlood, 4096};
    EXPECT_EQ(catalog.take_victim(&need)->key, key_of(1)) << policy;
    EXPECT_THAT(catalog.tenant_bytes(), ElementsAre(0u, 0u, 0u)) << policy;
  }
}

}  // namespace
}  // namespace kv_offload
