// PresenceQuestions: asks a store which keys of prompts it has records of, on the threads of a pool.
//
// The scheduler's thread hands the keys over and nothing else: an I/O thread picks those that are unknown and
// that nobody asks for (Catalogue::begin_asking), gives all but the first few of them to other threads, and
// asks for these itself. What is handed over again while it is being asked for, as a prompt is in each step
// that its request waits in, is not taken twice, nor is what is left of it. Only where another prompt asks
// for a part of it, it is: an I/O thread looks through it once more in each step, and finds nothing to ask
// for.
//
// Threads: the scheduler's, alone. No call does I/O or waits for who does.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "base/clock.h"
#include "base/types.h"
#include "storage/io_pool.h"
#include "storage/pooled_ops.h"
#include "storage/pooled_tier.h"
#include "storage/tier.h"

namespace kv_offload {

class PresenceQuestions {
 public:
  static constexpr std::uint64_t kTag = std::uint64_t{1} << 63;  // of its ops; above every id of a caller's
  static constexpr std::size_t kKeysPerLock = 64;  // what contains() waits for at most, while they are picked

  PresenceQuestions(std::shared_ptr<PooledStore> shared, const PooledTierOptions& options,
                    IoPool::Submitter submit);

  // keys: at least one.
  void ask(std::vector<ChunkKey> keys, KeyOrder order);
  // The device is stuck: what is being asked for is given up, for nobody knows when its threads come back.
  void give_up_all();

 private:
  // All that a thread needs which was let go while it asked.
  struct Context {
    std::shared_ptr<PooledStore> shared;
    const Clock* clock;
    Nanos op_deadline;
    IoPool::Submitter submit;
  };
  struct Prompt;
  using PromptPtr = std::shared_ptr<Prompt>;

  static IoPool::Op op_of(const Context& context, std::function<Status()> run,
                          std::function<void(const Status&)> end);
  static void begin(const PromptPtr& prompt);
  static void pick(Prompt& prompt);
  static std::vector<IoPool::Op> divide(const PromptPtr& prompt);
  static Status ask_part(Prompt& prompt, std::size_t part);
  static void give_up(const Prompt& prompt, std::span<const ChunkKey> keys);
  static void end_part(Prompt& prompt, std::size_t part, const Status& status);

  const std::shared_ptr<const Context> context_;
  std::vector<std::weak_ptr<Prompt>> prompts_;  // while one is asked for, it lives
};

}  // namespace kv_offload
