#include "storage/presence_questions.h"

#include <algorithm>
#include <atomic>
#include <optional>
#include <utility>

#include "storage/breaker.h"

namespace kv_offload {

// What is not const is written by the thread that begins it, before others see it.
struct PresenceQuestions::Prompt {
  // Keys that one call asks the store for.
  struct Part {
    std::size_t first = 0, count = 0;  // of `unknown`
    std::optional<Breaker::Pass> pass;
  };

  const std::shared_ptr<const Context> context;
  const std::vector<ChunkKey> keys;
  const KeyOrder order;
  const Submitted submitted;
  std::vector<ChunkKey> unknown;  // those of the keys that are asked for here
  std::vector<Part> parts;
  std::vector<std::atomic<bool>> ended;  // of the parts that were let through: answered or given up
  std::atomic<bool> begun{false};        // all of this was written

  Prompt(std::shared_ptr<const Context> in, std::vector<ChunkKey> given, KeyOrder given_order, Submitted now)
      : context(std::move(in)), keys(std::move(given)), order(given_order), submitted(std::move(now)) {}

  std::span<const ChunkKey> keys_of(std::size_t part) const {
    return std::span(unknown).subspan(parts[part].first, parts[part].count);
  }
  // A thread will ask for them, or find that they are being asked for. REQUIRES: both end with the same key.
  bool stands_for(const std::vector<ChunkKey>& others, KeyOrder others_order, const Submitted& now) const {
    if (order != others_order || submitted.epoch != now.epoch || submitted.era != now.era) return false;
    return !begun.load() && others.size() <= keys.size() &&
           std::equal(others.rbegin(), others.rend(), keys.rbegin());
  }
};

PresenceQuestions::PresenceQuestions(std::shared_ptr<PooledStore> shared, const PooledTierOptions& options,
                                     IoPool::Submitter submit)
    : context_(std::make_shared<const Context>(
          Context{std::move(shared), &clock_of(options), options.op_deadline, std::move(submit)})) {}

void PresenceQuestions::ask(std::vector<ChunkKey> keys, KeyOrder order) {
  const Submitted now(*context_->shared);
  if (prompts_.size() >= most_prompts_) {
    std::erase_if(prompts_, [](const auto& prompt) { return prompt.second.expired(); });
    most_prompts_ = 2 * prompts_.size() + kFewPrompts;
  }
  const auto [first, last] = prompts_.equal_range(keys.back());
  for (auto one = first; one != last; ++one) {
    const auto prompt = one->second.lock();
    if (prompt && prompt->stands_for(keys, order, now)) return;
  }
  const auto prompt = std::make_shared<Prompt>(context_, std::move(keys), order, now);
  prompts_.emplace(prompt->keys.back(), prompt);
  std::vector<IoPool::Op> ops;
  ops.push_back(op_of(
      *context_,
      [prompt] {
        begin(prompt);
        return Status::ok();
      },
      [](const Status&) {}));  // one that never ran has begun nothing
  context_->submit(std::move(ops));
}

// What has not begun finds the breaker open, and gives up by itself.
void PresenceQuestions::give_up_all() {
  for (const auto& [last_key, one] : prompts_) {
    const auto prompt = one.lock();
    if (!prompt || !prompt->begun.load()) continue;
    for (std::size_t part = 0; part < prompt->parts.size(); ++part) {
      if (prompt->ended[part].load()) continue;
      give_up(*prompt, prompt->keys_of(part));
      prompt->ended[part].store(true);
    }
  }
}

IoPool::Op PresenceQuestions::op_of(const Context& context, std::function<Status()> run,
                                    std::function<void(const Status&)> end) {
  IoPool::Op op;
  op.tag = kTag;
  op.urgent = true;  // short, and who asks may have nothing to wait for
  op.deadline = context.clock->now() + context.op_deadline;
  op.run = std::move(run);
  op.done = [end = std::move(end)](const Status& status, double, double) { end(status); };
  return op;
}

// The thread that begins asks for the first part itself.
void PresenceQuestions::begin(const PromptPtr& prompt) {
  const Context& context = *prompt->context;
  std::vector<IoPool::Op> ops;
  const Status prepared = contained([&] {
    pick(*prompt);
    ops = divide(prompt);
    return Status::ok();
  });
  if (!prepared) prompt->parts.clear();
  prompt->begun.store(true);
  if (!prepared) return give_up(*prompt, prompt->unknown);

  Breaker& breaker = context.shared->breaker(Lane::kRead);
  const Nanos now = context.clock->now();
  std::optional<std::size_t> own;
  for (std::size_t part = 0; part < ops.size(); ++part) {
    prompt->parts[part].pass = breaker.admit(now, Breaker::Kind::kQuestion);
    if (prompt->parts[part].pass && !own) own = part;
  }
  const Status shared = contained([&] {
    std::vector<IoPool::Op> others;
    for (std::size_t part = 0; part < ops.size(); ++part) {
      if (part != own && prompt->parts[part].pass) others.push_back(std::move(ops[part]));
    }
    context.submit(std::move(others));
    return Status::ok();
  });
  for (std::size_t part = 0; part < ops.size(); ++part) {
    if (!prompt->parts[part].pass) {
      give_up(*prompt, prompt->keys_of(part));
    } else if (part != own && !shared) {
      end_part(*prompt, part, shared);
    }
  }
  if (own) end_part(*prompt, *own, ask_part(*prompt, *own));
}

void PresenceQuestions::give_up(const Prompt& prompt, std::span<const ChunkKey> keys) {
  (void)contained([&] {
    prompt.context->shared->catalogue().give_up_asking(keys, prompt.submitted.era);
    return Status::ok();
  });
}

// Tells the catalogue which of the keys are being asked for.
void PresenceQuestions::pick(Prompt& prompt) {
  PooledStore& shared = *prompt.context->shared;
  if (!prompt.submitted.epoch || prompt.submitted.epoch != shared.store->epoch()) return;
  prompt.unknown.reserve(prompt.keys.size());  // all that the catalogue was told is in it, whatever throws
  const std::span<const ChunkKey> keys(prompt.keys);
  for (std::size_t first = 0; first < keys.size(); first += kKeysPerLock) {
    const std::size_t count = std::min(kKeysPerLock, keys.size() - first);
    shared.catalogue().begin_asking(keys.subspan(first, count), prompt.submitted.era, &prompt.unknown);
  }
}

// An op for each call of the store.
std::vector<IoPool::Op> PresenceQuestions::divide(const PromptPtr& prompt) {
  const Context& context = *prompt->context;
  const std::size_t at_once = std::max<std::size_t>(context.shared->store->keys_per_locate(prompt->order), 1);
  std::vector<IoPool::Op> ops;
  for (std::size_t first = 0; first < prompt->unknown.size(); first += at_once) {
    const std::size_t part = prompt->parts.size();
    prompt->parts.push_back({first, std::min(at_once, prompt->unknown.size() - first), std::nullopt});
    ops.push_back(op_of(
        context, [prompt, part] { return ask_part(*prompt, part); },
        [prompt, part](const Status& status) { end_part(*prompt, part, status); }));
  }
  prompt->ended = std::vector<std::atomic<bool>>(prompt->parts.size());
  return ops;
}

Status PresenceQuestions::ask_part(Prompt& prompt, std::size_t part) {
  return contained([&] {
    PooledStore& shared = *prompt.context->shared;
    // The device may have got stuck after it was let through.
    if (!shared.breaker(Lane::kRead).stands(*prompt.parts[part].pass)) return off();
    return run_locate(shared, prompt.keys_of(part), prompt.order, prompt.submitted);
  });
}

void PresenceQuestions::end_part(Prompt& prompt, std::size_t part, const Status& status) {
  PooledStore& shared = *prompt.context->shared;
  Breaker& breaker = shared.breaker(Lane::kRead);
  const Breaker::Pass& pass = *prompt.parts[part].pass;
  if (device_failed(status)) {
    breaker.failed(pass, prompt.context->clock->now());
  } else if (status) {
    shared.answered(Lane::kRead, pass);
  } else {
    breaker.not_tried(pass);
  }
  // Last: who sees that the question has ended also sees what the breaker makes of it. One that was given up
  // while it was stuck may be asked anew by now.
  if (!status && !prompt.ended[part].load()) give_up(prompt, prompt.keys_of(part));
  prompt.ended[part].store(true);
}

}  // namespace kv_offload
