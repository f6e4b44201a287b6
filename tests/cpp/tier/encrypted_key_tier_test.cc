// SPDX-License-Identifier: Apache-2.0
#include "tier/encrypted_key_tier.h"

#include <gtest/gtest.h>

#include <set>
#include <stdexcept>

#include "out_of_memory.h"
#include "record/record_bytes.h"
#include "step_watch.h"
#include "tier/digest_cache.h"
#include "tier/encrypted_medium.h"
#include "tier/memory_store.h"
#include "tier/tier_driver.h"

namespace kv_offload {
namespace {

#ifdef KV_OFFLOAD_ENCRYPTION

using namespace testing;

TEST(NameDigestTest, the_digest_depends_on_key_master_key_and_namespace) {
  const auto keys = keys_of({1, 2});
  const NameDigest one(*keys, 0, space_of(1)), again(*keys, 0, space_of(1)), other_key(*keys, 1, space_of(1)),
      other_space(*keys, 0, space_of(2));
  std::set<std::string> seen;
  for (std::uint32_t number = 0; number < 50; ++number) {
    const ChunkKey digest = one.of(key_of(number, 3));
    EXPECT_EQ(digest.size(), NameDigest::kBytes);
    EXPECT_EQ(digest.group_id(), 3u);
    EXPECT_EQ(digest, again.of(key_of(number, 3)));
    for (const ChunkKey& each : {digest, other_key.of(key_of(number, 3)), other_space.of(key_of(number, 3)),
                                 one.of(key_of(number, 4))})
      EXPECT_TRUE(seen.insert(std::string(each.bytes())).second);
  }
  // It depends on every byte of the key, including the last byte of the hash.
  for (std::size_t at = 0; at < ChunkKey::kMaxBytes - 4; ++at) {
    std::string other(ChunkKey::kMaxBytes, 'k');
    other[at] = 'l';
    EXPECT_TRUE(seen.insert(std::string(one.of(ChunkKey(other)).bytes())).second) << at;
  }
  // The key's length matters too.
  const std::string text(47, '\0');
  for (std::size_t size = ChunkKey::kMinBytes; size <= ChunkKey::kMaxBytes; ++size)
    EXPECT_TRUE(seen.insert(std::string(one.of(ChunkKey(text.substr(0, size))).bytes())).second) << size;
}

class EncryptedKeyTierTest : public ::testing::Test {
 protected:
  std::unique_ptr<Tier> open(std::initializer_list<int> keys) { return open(keys_of(keys)); }
  std::unique_ptr<Tier> open(std::shared_ptr<const EncryptionKeys> keys) {
    ThreadPoolTierOptions options;
    options.name = "tier";
    options.clock = &clock_;
    options.form.keys = std::move(keys);
    return with_encrypted_keys(
        make_thread_pool_tier(std::make_unique<MemoryStore>(server_, space_, 64, false, options.form),
                              options),
        options.form.keys, space_);
  }
  FakeClock clock_;
  const NamespaceId space_ = space_of(1);
  const std::shared_ptr<MemoryServer> server_ = std::make_shared<MemoryServer>();
};

TEST_F(EncryptedKeyTierTest, no_stored_name_is_that_of_a_chunk) {
  TierDriver user(open({1}));
  ASSERT_TRUE(user.write(1));
  (void)user.has(2);
  for (const auto& asked : server_->asked()) {
    for (const ChunkKey& key : asked) EXPECT_EQ(key.size(), NameDigest::kBytes);
  }
  server_->lose(key_of(1));
  EXPECT_TRUE(user.read(1)) << "it was stored under its own name";
  server_->lose(NameDigest(*keys_of({1}), 0, space_).of(key_of(1)));
  EXPECT_EQ(user.read(1).kind(), StatusKind::kNotFound);
}

TEST_F(EncryptedKeyTierTest, after_a_key_rotation_old_records_are_readable_and_new_ones_use_the_new_key) {
  { ASSERT_TRUE(TierDriver(open({1})).write(1)); }
  {
    TierDriver rotated(open({2, 1}));
    EXPECT_TRUE(rotated.has(1));
    EXPECT_TRUE(rotated.read(1));
    ASSERT_TRUE(rotated.write(2));
    EXPECT_TRUE(rotated.read(2));
  }
  TierDriver newer(open({2}));
  EXPECT_FALSE(newer.has(1)) << "its key was dropped";
  EXPECT_TRUE(newer.has(2));
  EXPECT_TRUE(newer.read(2));
  TierDriver older(open({1}));
  EXPECT_TRUE(older.has(1));
  EXPECT_FALSE(older.has(2));
}

TEST_F(EncryptedKeyTierTest, a_record_under_two_keys_is_lost_when_both_are_missing) {
  { ASSERT_TRUE(TierDriver(open({1})).write(1)); }
  TierDriver user(open({2, 1}));
  ASSERT_TRUE(user.has(1));
  ASSERT_TRUE(user.write(1));
  EXPECT_EQ(server_->size(), 2u);
  server_->lose(NameDigest(*keys_of({2}), 0, space_).of(key_of(1)));
  EXPECT_EQ(user.read(1).kind(), StatusKind::kNotFound);
  EXPECT_EQ(user.removed(TierRemoval::Reason::kVanished), 0u) << "it is stored under the other key";
  EXPECT_TRUE(user.read(1));
  server_->lose(NameDigest(*keys_of({1}), 0, space_).of(key_of(1)));
  EXPECT_EQ(user.read(1).kind(), StatusKind::kNotFound);
  ASSERT_EQ(user.removed(TierRemoval::Reason::kVanished), 1u);
  EXPECT_EQ(user.removals.front().key, key_of(1));
}

TEST_F(EncryptedKeyTierTest, each_tenant_with_a_key_has_its_records_encrypted_with_it) {
  const auto keys = keys_of({1}, {2, 0, 3});
  {
    TierDriver user(open(keys));
    for (std::uint32_t tenant = 0; tenant < 4; ++tenant) {
      user.tenant = static_cast<TenantId>(tenant);
      ASSERT_TRUE(user.write(tenant));
    }
    for (std::uint32_t tenant = 0; tenant < 4; ++tenant) {
      user.tenant = static_cast<TenantId>(3 - tenant);  // a server has all keys
      EXPECT_TRUE(user.has(tenant));
      EXPECT_TRUE(user.read(tenant)) << tenant;
    }
  }
  const auto found = [&](std::initializer_list<int> with) {
    TierDriver user(open(with));
    std::vector<std::uint32_t> numbers;
    for (std::uint32_t tenant = 0; tenant < 4; ++tenant) {
      if (user.has(tenant) && user.read(tenant)) numbers.push_back(tenant);
    }
    return numbers;
  };
  using Numbers = std::vector<std::uint32_t>;
  EXPECT_EQ(found({1}), (Numbers{0, 2})) << "tenant 2 has no key of its own";
  EXPECT_EQ(found({2}), (Numbers{1}));
  EXPECT_EQ(found({3}), (Numbers{3}));
}

TEST_F(EncryptedKeyTierTest, a_record_is_present_for_every_tenant_whatever_key_encrypts_it) {
  TierDriver user(open(keys_of({1}, {2, 3})));
  user.tenant = 1;
  ASSERT_TRUE(user.write(7));
  EXPECT_EQ(user.tier().contains(key_of(7)), Presence::kPresent) << "whatever tenant asks";
}

// Records the ops below the name layer, including the digest of the parent chunk.
class Recorder : public Tier {
 public:
  explicit Recorder(std::vector<TierOp>* ops, std::vector<TierUse>* uses,
                    std::vector<LookupOptions>* lookups = nullptr)
      : ops_(ops), uses_(uses), lookups_(lookups) {}
  std::string_view name() const override { return "recorder"; }
  void submit(std::vector<TierOp> ops) override {
    for (TierOp& op : ops) ops_->push_back(std::move(op));
  }
  bool cancel(OpId) override { return false; }
  void poll(std::vector<Completion>*, std::vector<TierRemoval>* removals) override {
    removals->push_back({key_of(5), TierRemoval::Reason::kEvicted});  // not one of our digests
  }
  Presence contains(const ChunkKey&) const override { return Presence::kAbsent; }
  void prefetch_presence(std::vector<ChunkKey>, const LookupOptions& options) override {
    if (lookups_ != nullptr) lookups_->push_back(options);
  }
  void touch(const ChunkKey&) override {}
  void used(const TierUses& uses) override { *uses_ = *uses; }
  Status reset(std::uint64_t) override { return Status::ok(); }
  TierStats stats() const override { return {}; }
  std::string codec_reason() const override { return "off: too little was measured"; }
  void close() override {}
  double estimate_read_seconds(std::uint64_t) const override { return 0; }

 private:
  std::vector<TierOp>* ops_;
  std::vector<TierUse>* uses_;
  std::vector<LookupOptions>* lookups_;
};

// Reports its record as removed, written and removed again.
class Forgetful final : public Recorder {
 public:
  explicit Forgetful(std::vector<TierOp>* ops) : Recorder(ops, nullptr), submitted_(ops) {}
  void poll(std::vector<Completion>* completions, std::vector<TierRemoval>* removals) override {
    for (const TierOp& op : *submitted_) {
      removals->push_back({op.key, TierRemoval::Reason::kEvicted});
      if (!ended_) completions->push_back({op.id, op.kind, op.key, Status::ok(), 0, 0, 0});
    }
    ended_ = true;
  }

 private:
  const std::vector<TierOp>* submitted_;
  bool ended_ = false;
};

TEST(EncryptedKeyTierOrderTest, a_removal_before_a_write_does_not_hide_a_later_removal) {
  std::vector<TierOp> ops, given(1);
  const auto tier = with_encrypted_keys(std::make_unique<Forgetful>(&ops), keys_of({1}), space_of(1));
  given[0].id = 1;
  given[0].kind = OpKind::kWrite;
  given[0].key = key_of(1);
  tier->submit(std::move(given));
  for (std::size_t told = 1; told <= 2; ++told) {
    std::vector<Completion> completions;
    std::vector<TierRemoval> removals;
    tier->poll(&completions, &removals);
    ASSERT_EQ(removals.size(), 1u);
    EXPECT_EQ(removals.front().key, key_of(1));
  }
}

// Reports its record as removed, has it again, and loses it.
class FoundAgain final : public Recorder {
 public:
  explicit FoundAgain(std::vector<TierOp>* ops) : Recorder(ops, nullptr), submitted_(ops) {}
  void poll(std::vector<Completion>*, std::vector<TierRemoval>* removals) override {
    for (const TierOp& op : *submitted_) removals->push_back({op.key, TierRemoval::Reason::kVanished});
  }
  Presence contains(const ChunkKey&) const override { return presence; }
  Presence presence = Presence::kPresent;

 private:
  const std::vector<TierOp>* submitted_;
};

TEST(EncryptedKeyTierOrderTest, a_removal_of_a_present_record_does_not_hide_a_later_removal) {
  std::vector<TierOp> ops, given(1);
  auto inner = std::make_unique<FoundAgain>(&ops);
  FoundAgain& again = *inner;
  const auto tier = with_encrypted_keys(std::move(inner), keys_of({1}), space_of(1));
  given[0].kind = OpKind::kWrite;
  given[0].key = key_of(1);
  tier->submit(std::move(given));
  std::vector<Completion> completions;
  std::vector<TierRemoval> removals;
  tier->poll(&completions, &removals);
  EXPECT_TRUE(removals.empty());
  again.presence = Presence::kAbsent;
  tier->poll(&completions, &removals);
  ASSERT_EQ(removals.size(), 1u);
  EXPECT_EQ(removals.front().key, key_of(1));
}

// Takes all ops without allocating, and ends them at the next poll.
class Taker final : public Recorder {
 public:
  explicit Taker(std::vector<TierOp>* ops) : Recorder(ops, nullptr), taken_(ops) {}
  void submit(std::vector<TierOp> ops) override { *taken_ = std::move(ops); }
  void poll(std::vector<Completion>* completions, std::vector<TierRemoval>*) override {
    for (const TierOp& op : *taken_) completions->push_back({op.id, op.kind, op.key, Status::ok(), 0, 0, 0});
    taken_->clear();
  }

 private:
  std::vector<TierOp>* const taken_;
};

// The caller reuses the rows of refused ops: a read that ran anyway would overwrite them.
TEST(EncryptedKeyTierOrderTest, an_op_whose_submission_ran_out_of_memory_does_not_run) {
  std::vector<TierOp> taken;
  const auto tier = with_encrypted_keys(std::make_unique<Taker>(&taken), keys_of({2, 1}), space_of(1));
  std::uint32_t number = 0;
  const auto submit = [&] {
    std::vector<TierOp> given(3);
    for (TierOp& op : given) op.key = key_of(op.id = ++number);
    tier->submit(std::move(given));
  };
  const unsigned failures = fail_each_allocation(submit, [&] {
    EXPECT_TRUE(taken.empty());
    taken.clear();
  });
  EXPECT_GT(failures, 4u);
  std::vector<Completion> completions;
  std::vector<TierRemoval> removals;
  tier->poll(&completions, &removals);
  ASSERT_EQ(completions.size(), 3u);
  for (const Completion& completion : completions)
    EXPECT_EQ(completion.key, key_of(static_cast<std::uint32_t>(completion.id)));
}

TEST(EncryptedKeyTierOrderTest, the_codec_description_is_passed_through) {
  std::vector<TierOp> ops;
  std::vector<TierUse> uses;
  const auto tier = with_encrypted_keys(std::make_unique<Recorder>(&ops, &uses), keys_of({1}), space_of(1));
  EXPECT_EQ(tier->codec_reason(), "off: too little was measured");
}

// Of 16 chunks, the first 8 may be stored under the old key and the next 8 under the new one.
TEST(EncryptedKeyTierOrderTest, with_several_keys_lookups_do_not_assume_a_prefix) {
  std::vector<TierOp> ops;
  std::vector<TierUse> uses;
  std::vector<LookupOptions> lookups;
  for (const auto& keys : {keys_of({1}), keys_of({2, 1})}) {
    const auto tier =
        with_encrypted_keys(std::make_unique<Recorder>(&ops, &uses, &lookups), keys, space_of(1));
    tier->prefetch_presence({key_of(1), key_of(2)}, {KeyOrder::kPrefix, 7, 0.25});
  }
  const LookupOptions unordered{KeyOrder::kNone, 7, 0.25};
  EXPECT_EQ(lookups, (std::vector{LookupOptions{KeyOrder::kPrefix, 7, 0.25}, unordered, unordered}));
}

// Returns one presence for one name, and another presence for all other names.
class Telling final : public Recorder {
 public:
  Telling(const ChunkKey& key, Presence one, Presence others)
      : Recorder(nullptr, nullptr), key_(key), one_(one), others_(others) {}
  Presence contains(const ChunkKey& key) const override { return key == key_ ? one_ : others_; }

 private:
  const ChunkKey key_;
  const Presence one_, others_;
};

TEST(EncryptedKeyTierOrderTest, with_several_keys_the_presence_that_requires_most_work_wins) {
  const std::vector<Presence> by_rank{Presence::kPresent,      Presence::kUnknown,   Presence::kLookupPending,
                                      Presence::kLookupFailed, Presence::kStaleMiss, Presence::kAbsent};
  const auto keys = keys_of({2, 1});
  const ChunkKey first = NameDigest(*keys, 0, space_of(1)).of(key_of(1));
  for (std::size_t one = 0; one < by_rank.size(); ++one) {
    for (std::size_t other = 0; other < by_rank.size(); ++other) {
      const auto tier = with_encrypted_keys(std::make_unique<Telling>(first, by_rank[one], by_rank[other]),
                                            keys, space_of(1));
      EXPECT_EQ(tier->contains(key_of(1)), by_rank[std::min(one, other)]) << one << " " << other;
    }
  }
}

TEST(EncryptedKeyTierOrderTest, the_parent_chunk_is_named_by_its_digest) {
  std::vector<TierOp> ops;
  std::vector<TierUse> uses;
  const auto tier = with_encrypted_keys(std::make_unique<Recorder>(&ops, &uses), keys_of({1}), space_of(1));
  const NameDigest digest(*keys_of({1}), 0, space_of(1));
  const auto of = [](std::uint32_t number) { return chunk_id(key_of(number)); };
  std::vector<TierOp> given(3);
  for (std::uint32_t i = 0; i < 3; ++i) {
    given[i].id = i;
    given[i].key = key_of(i);
    given[i].entry_info.parent = i == 0 ? 0 : of(i - 1);
  }
  given[2].entry_info.parent = of(77);  // an unknown chunk
  tier->submit(std::move(given));
  EXPECT_EQ(ops[1].entry_info.id, chunk_id(digest.of(key_of(1))));
  EXPECT_EQ(ops[1].entry_info.parent, chunk_id(digest.of(key_of(0))));
  EXPECT_EQ(ops[2].entry_info.parent, 0u);
  tier->used(std::make_shared<std::vector<TierUse>>(1, TierUse{key_of(1), {.parent = of(0), .depth = 3}}));
  EXPECT_EQ(uses.front().key, digest.of(key_of(1)));
  EXPECT_EQ(uses.front().entry_info.parent, chunk_id(digest.of(key_of(0))));
  EXPECT_EQ(uses.front().entry_info.depth, 3u);
  std::vector<Completion> completions;
  std::vector<TierRemoval> removals;
  tier->poll(&completions, &removals);
  EXPECT_TRUE(removals.empty()) << "we know no such name";
}

// The keys of a waiting request are looked up in every step.
TEST(EncryptedKeyTierOrderTest, each_key_is_hashed_once_under_each_of_our_keys) {
  constexpr std::uint32_t kKeys = 1000;
  std::vector<TierOp> ops;
  std::vector<TierUse> uses;
  std::vector<LookupOptions> lookups;
  const auto tier =
      with_encrypted_keys(std::make_unique<Recorder>(&ops, &uses, &lookups), keys_of({3, 2, 1}), space_of(1));
  std::vector<ChunkKey> keys;
  auto used = std::make_shared<std::vector<TierUse>>();
  std::vector<TierOp> given(kKeys);
  for (std::uint32_t i = 0; i < kKeys; ++i) {
    keys.push_back(key_of(i));
    used->push_back({keys.back(), {}});
    given[i].id = i;
    given[i].key = keys.back();
  }
  EXPECT_GE(steps_of([&] {
              for (const ChunkKey& key : keys) (void)tier->contains(key);
            }),
            3 * kKeys);
  const std::uint64_t again = steps_of([&] {
    for (const ChunkKey& key : keys) (void)tier->contains(key);
    for (std::size_t i = kKeys; i-- > 0;) tier->forget_miss(keys[i]);
    for (std::size_t i = 0; i < kKeys; i += 7) tier->touch(keys[i]);
    tier->prefetch_presence(keys, KeyOrder::kPrefix);
    tier->used(used);
  });
  EXPECT_EQ(again, 0u);
  tier->submit(std::move(given));
  EXPECT_EQ(ops.back().key, NameDigest(*keys_of({3}), 0, space_of(1)).of(keys.back()));
}

#endif

// Two keys with equal hashes alternate with more keys than are remembered: no key gets the name of another.
TEST(DigestCacheTest, a_name_belongs_to_its_key_after_forgetting_and_with_equal_hashes) {
  std::size_t computed = 0;
  const auto name_of = [&](const ChunkKey& key, std::size_t way) {
    ++computed;
    std::string name(key.bytes().substr(8, DigestCache::kDigestBytes));
    name[0] = static_cast<char>(name[0] + static_cast<char>(way));
    return ChunkKey(name + std::string(key.bytes().substr(key.size() - 4)));
  };
  DigestCache names(2, 4, name_of);
  std::vector<ChunkKey> keys;
  for (std::uint32_t number = 0; number < 6; ++number) keys.push_back(testing::key_of(number));
  std::string twin(keys[1].bytes());
  twin[20] = static_cast<char>(twin[20] + 1);
  keys.insert(keys.begin() + 2, ChunkKey(twin));
  ASSERT_EQ(chunk_id(keys[1]), chunk_id(keys[2]));
  std::size_t lookups = 0;
  for (const std::size_t stride : {1, 2, 3, 5}) {
    for (std::size_t i = 0; i < 3 * keys.size(); ++i) {
      const ChunkKey& key = keys[i * stride % keys.size()];
      const DigestCache::Place place = names.place_of(key);
      for (const std::size_t way : {0u, 1u}) EXPECT_EQ(names.name(place, way), name_of(key, way));
      EXPECT_EQ(names.place_of(key), place);
      EXPECT_EQ(names.find(chunk_id(key)), place);
      computed -= 2;
      ++lookups;
    }
  }
  EXPECT_LE(computed, 2 * lookups) << "repeated requests compute nothing";
  std::size_t remembered = 0;
  for (const ChunkKey& key : keys) remembered += names.find(chunk_id(key)).has_value();
  EXPECT_LE(remembered, 5u) << "four, one of which has a twin";
}

// Any digest of any key may fail, and is requested again at once or after the others.
TEST(DigestCacheTest, a_name_that_could_not_be_computed_leaves_no_wrong_one) {
  constexpr std::size_t kWays = 3, kMost = 3, kKeys = 5, kRounds = 2;
  for (std::size_t fails = 0; fails < kRounds * kKeys * kWays; ++fails) {
    std::size_t computed = 0;
    const auto right_name = [](const ChunkKey& key, std::size_t way) {
      std::string name(key.bytes().substr(8, DigestCache::kDigestBytes));
      name[0] = static_cast<char>(name[0] + static_cast<char>(way));
      return ChunkKey(name + std::string(key.bytes().substr(key.size() - 4)));
    };
    DigestCache names(kWays, kMost, [&](const ChunkKey& key, std::size_t way) {
      if (computed++ == fails) throw std::runtime_error("no digest");
      return right_name(key, way);
    });
    unsigned thrown = 0;
    const auto expect_right = [&](std::uint32_t number) {
      const ChunkKey key = testing::key_of(number);
      try {
        const DigestCache::Place place = names.place_of(key);
        for (std::size_t way = 0; way < kWays; ++way)
          EXPECT_EQ(names.name(place, way), right_name(key, way)) << fails << ", key " << number;
      } catch (const std::runtime_error&) {
        ++thrown;
      }
    };
    for (std::size_t round = 0; round < kRounds; ++round) {
      for (std::uint32_t number = 0; number < kKeys; ++number) {
        expect_right(number);
        expect_right(number);
        if (number > 0) expect_right(number - 1);
      }
    }
    EXPECT_EQ(thrown, 1u) << fails;
  }
}

}  // namespace
}  // namespace kv_offload
