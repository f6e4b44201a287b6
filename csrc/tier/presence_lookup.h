// SPDX-License-Identifier: Apache-2.0
// PresenceLookup: looks up which keys of prompts a store has records for, on the threads of a pool.
//
// The scheduler's thread only hands the keys over. An I/O thread picks the keys that are unknown and have no
// pending lookup (Catalog::begin_lookup). It gives all but the first part of them to other threads and
// looks that part up itself. From then on the catalog reports the lookups as pending, and the keys are not
// handed over again. Until then a waiting request hands its prompt over in each step: whole, or without the
// first keys if another prompt looks these up. It is not queued twice.
//
// The chunks of a prompt (KeyOrder::kPrefix) are looked up in windows, each as long as all windows before it.
// Chunks after a missing one are useless, so for a new prompt of a million tokens the first window is enough.
// The parts of a window are looked up concurrently. A prompt that is present takes one more round trip for
// each doubling of its length.
//
// Store calls of several tenants start in turn, also with their reads: in proportion to the tenants' weights,
// each call counts by its time (IoPool). A prompt that one tenant has queued does not cover the same prompt
// of another tenant, which may be due earlier. The keys that a thread has picked are not picked for another
// tenant, and while they are looked up, the keys after them wait: most new prompts end there.
//
// Threads: only the scheduler's. No call does I/O or waits for a thread that does.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "base/types.h"
#include "tier/io_pool.h"
#include "tier/thread_pool_tier.h"
#include "tier/tier.h"
#include "tier/tier_runtime.h"

namespace kv_offload {

class PresenceLookup {
 public:
  static constexpr std::uint64_t kTag = std::uint64_t{1} << 63;  // of lookup ops; above every caller id
  static constexpr std::size_t kKeysPerLock = 64;   // bounds how long contains() waits while keys are picked
  static constexpr std::size_t kFirstWindow = 256;  // keys; at least the keys of one store call

  PresenceLookup(std::shared_ptr<TierRuntime> shared, const ThreadPoolTierOptions& options,
                 IoPool::Submitter submit);

  // REQUIRES: at least one key.
  void start(std::vector<ChunkKey> keys, const LookupOptions& options);
  // The device is stuck: gives pending lookups up, because their threads may never return.
  void cancel_all();

 private:
  static constexpr std::size_t kFewPrompts = 64;
  // Everything that a thread needs if it is detached during a lookup.
  struct Context {
    std::shared_ptr<TierRuntime> shared;
    const Clock* clock;
    Nanos op_timeout;
    IoPool::Submitter submit;
  };
  struct Prompt;
  struct Window;
  using PromptPtr = std::shared_ptr<Prompt>;
  using WindowPtr = std::shared_ptr<Window>;

  static IoPool::Op op_of(const Prompt& prompt, std::function<Status()> run,
                          std::function<void(const Status&)> end);
  static IoPool::Op next_window_op(const PromptPtr& prompt);
  static void start_next_window(const PromptPtr& prompt);
  static void pick(Prompt& prompt, std::size_t end, Window* window);
  static std::vector<IoPool::Op> divide(const PromptPtr& prompt, const WindowPtr& window,
                                        std::size_t at_once);
  static void start(const PromptPtr& prompt, const WindowPtr& window, std::vector<IoPool::Op> ops);
  static Status run_part(Prompt& prompt, Window& window, std::size_t part);
  static void cancel(const Prompt& prompt, std::span<const ChunkKey> keys);
  static void end_part(const PromptPtr& prompt, Window& window, std::size_t part, const Status& status);
  static void end_window(const PromptPtr& prompt, const Window& window);

  const std::shared_ptr<const Context> context_;
  // By the last key, which prompts seldom share. A prompt exists as long as its lookups.
  std::unordered_multimap<ChunkKey, std::weak_ptr<Prompt>> prompts_;
  std::size_t most_prompts_ = kFewPrompts;  // at this size expired prompts are removed
};

}  // namespace kv_offload
