// SPDX-License-Identifier: Apache-2.0
// The interface of a medium, for the tests that check every tier kind against tier.h. A medium outlives the
// tiers on it, and can be made to fail.
#pragma once

#include <memory>

#include "tier/thread_pool_tier.h"

namespace kv_offload::testing {

class Medium {
 public:
  virtual ~Medium() = default;
  virtual std::unique_ptr<Tier> open(const ThreadPoolTierOptions& options) = 0;
  virtual void lose(const ChunkKey& key) = 0;
  virtual void damage(const ChunkKey& key) = 0;
  virtual void fail_transfers(bool fail) = 0;
  virtual void fail_resets(bool fail) = 0;
  virtual void block(OpKind kind) = 0;  // blocks transfers of this kind until release()
  virtual void release() = 0;
  virtual void wait_for_blocked(int threads = 1) = 0;
  virtual void wait_for_let_go() = 0;  // waits until no thread of a closed tier touches the medium
};

}  // namespace kv_offload::testing
