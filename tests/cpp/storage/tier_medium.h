// What a kind of tier gives to the tests that hold all kinds to tier.h: a medium, which outlives the tiers on
// it, and what can happen to one.
#pragma once

#include <memory>

#include "storage/pooled_tier.h"

namespace kv_offload::testing {

class Medium {
 public:
  virtual ~Medium() = default;
  virtual std::unique_ptr<Tier> open(const PooledTierOptions& options) = 0;
  virtual void lose(const ChunkKey& key) = 0;
  virtual void damage(const ChunkKey& key) = 0;
  virtual void fail_transfers(bool fail) = 0;
  virtual void fail_resets(bool fail) = 0;
  virtual void block(OpKind kind) = 0;  // transfers of this kind, until release()
  virtual void release() = 0;
  virtual void wait_for_blocked(int threads = 1) = 0;
  virtual void wait_for_let_go() = 0;  // no thread of a tier that was closed touches it any more
};

}  // namespace kv_offload::testing
