// PresenceQuestions: asks a store which keys of prompts it has records of, on the threads of a pool.
//
// The scheduler's thread hands the keys over and nothing else: an I/O thread picks those that are unknown and
// that nobody asks for (Catalogue::begin_asking), gives all but the first few of them to other threads, and
// asks for these itself. From then on the catalogue says that they are being asked for, and nobody hands them
// over again. Until then a prompt is handed over in each step that its request waits in, whole, or without
// its first keys where another prompt asks for these: it is not taken twice.
//
// The chunks of a prompt (KeyOrder::kPrefix) are asked for in windows, each as long as all before it: behind
// a chunk that is missing nothing is of use, and of a new prompt of a million tokens the first window tells.
// The parts of a window are asked for at once. A prompt that is there takes one answer more for each doubling
// of its length.
//
// Threads: the scheduler's, alone. No call does I/O or waits for who does.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <unordered_map>
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
  static constexpr std::size_t kFirstWindow = 256;  // keys; at least what one call of the store takes

  PresenceQuestions(std::shared_ptr<PooledStore> shared, const PooledTierOptions& options,
                    IoPool::Submitter submit);

  // keys: at least one.
  void ask(std::vector<ChunkKey> keys, KeyOrder order);
  // The device is stuck: what is being asked for is given up, for nobody knows when its threads come back.
  void give_up_all();

 private:
  static constexpr std::size_t kFewPrompts = 64;
  // All that a thread needs which was let go while it asked.
  struct Context {
    std::shared_ptr<PooledStore> shared;
    const Clock* clock;
    Nanos op_deadline;
    IoPool::Submitter submit;
  };
  struct Prompt;
  struct Window;
  using PromptPtr = std::shared_ptr<Prompt>;
  using WindowPtr = std::shared_ptr<Window>;

  static IoPool::Op op_of(const Context& context, std::function<Status()> run,
                          std::function<void(const Status&)> end);
  static IoPool::Op op_that_goes_on(const PromptPtr& prompt);
  static void go_on(const PromptPtr& prompt);
  static void pick(Prompt& prompt, std::size_t end, Window* window);
  static std::vector<IoPool::Op> divide(const PromptPtr& prompt, const WindowPtr& window,
                                        std::size_t at_once);
  static void ask(const PromptPtr& prompt, const WindowPtr& window, std::vector<IoPool::Op> ops);
  static Status ask_part(Prompt& prompt, Window& window, std::size_t part);
  static void give_up(const Prompt& prompt, std::span<const ChunkKey> keys);
  static void end_part(const PromptPtr& prompt, Window& window, std::size_t part, const Status& status);
  static void end_window(const PromptPtr& prompt, const Window& window);

  const std::shared_ptr<const Context> context_;
  // By the last key, which is no other prompt's, mostly. While one is asked for, it lives.
  std::unordered_multimap<ChunkKey, std::weak_ptr<Prompt>> prompts_;
  std::size_t most_prompts_ = kFewPrompts;  // then those that live no longer are swept out
};

}  // namespace kv_offload
