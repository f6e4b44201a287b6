// SPDX-License-Identifier: Apache-2.0
// The media of each tier kind, for the tests that check every kind against tier.h.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "backends/fs/faulty_file_ops.h"
#include "backends/fs/fixture.h"
#include "backends/mooncake/medium.h"
#include "backends/redis/medium.h"
#include "tier/encrypted_key_tier.h"
#include "tier/memory_store.h"
#include "tier/thread_pool_tier.h"
#ifdef KV_OFFLOAD_S3
#include "backends/s3/medium.h"
#endif
#include "tier/tier_medium.h"

namespace kv_offload::testing {

class FsMedium final : public Medium {
 public:
  std::unique_ptr<Tier> open(const ThreadPoolTierOptions& options) override {
    FsTierOptions fs_options = options_for(root_);
    static_cast<ThreadPoolTierOptions&>(fs_options) = options;
    fs_options.file_ops = &ops_;
    return make_fs_tier(fs_options);
  }
  void lose(const ChunkKey& key) override { EXPECT_TRUE(fs::remove(path_of(key))); }
  void damage(const ChunkKey& key) override { flip_a_bit(path_of(key)); }
  void fail_transfers(bool fail) override {
    ops_.set_rule(
        [fail](Call call) { return fail && (call == Call::kPreadv || call == Call::kPwritev) ? -EIO : 0; });
  }
  void fail_resets(bool fail) override {
    ops_.set_rule([fail](Call call) { return fail && call == Call::kMkdir ? -EIO : 0; });
  }
  void block(OpKind kind) override {
    ops_.block(kind == OpKind::kRead ? Call::kPreadv : Call::kPwritev, 2 * kPageBytes);
  }
  void release() override { ops_.release(); }
  void wait_for_blocked(int threads) override { ops_.wait_for_blocked(threads); }
  void wait_for_let_go() override { ops_.wait_for_all_closed(); }

 private:
  // Never destroyed: an abandoned thread is still inside a call of it when the last file is closed.
  static FaultyFileOps& kept() {
    static std::vector<std::unique_ptr<FaultyFileOps>> all;
    return *all.emplace_back(std::make_unique<FaultyFileOps>());
  }
  fs::path path_of(const ChunkKey& key) const {
    for (const fs::path& path : records_in(root_)) {
      if (path.filename().string().starts_with(key.hex())) return path;
    }
    ADD_FAILURE() << "no record of " << key.hex();
    return {};
  }

  TempDir dir_;
  std::string root_ = dir_.path() + "/root";
  FaultyFileOps& ops_ = kept();
};

class MemoryMedium final : public Medium {
 public:
  using Verb = MemoryServer::Verb;

  std::unique_ptr<Tier> open(const ThreadPoolTierOptions& options) override {
    NamespaceId id{};
    id.fill(0x11);
    return with_encrypted_keys(
        make_thread_pool_tier(std::make_unique<MemoryStore>(server, id, 64, false, options.form), options),
        options.form.keys, id);
  }
  void lose(const ChunkKey& key) override { server->lose(key); }
  void damage(const ChunkKey& key) override { server->damage(key); }
  void fail_transfers(bool fail) override {
    server->fail(Verb::kRead, fail ? StatusKind::kIo : StatusKind::kOk);
    server->fail(Verb::kWrite, fail ? StatusKind::kIo : StatusKind::kOk);
  }
  void fail_resets(bool fail) override {
    server->fail(Verb::kEpoch, fail ? StatusKind::kIo : StatusKind::kOk);
  }
  void block(OpKind kind) override { server->block(kind == OpKind::kRead ? Verb::kRead : Verb::kWrite); }
  void release() override { server->release(); }
  void wait_for_blocked(int threads) override { server->wait_for_blocked(threads); }
  void wait_for_let_go() override {
    while (server.use_count() > 1) std::this_thread::yield();
  }

  const std::shared_ptr<MemoryServer> server = std::make_shared<MemoryServer>();
};

}  // namespace kv_offload::testing
