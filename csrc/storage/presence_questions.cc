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
  std::atomic<bool> begun{false};  // the catalogue was told
  std::vector<ChunkKey> unknown;   // those of the keys that are asked for here
  std::vector<Part> parts;

  Prompt(std::shared_ptr<const Context> in, std::vector<ChunkKey> given, KeyOrder given_order, Submitted now)
      : context(std::move(in)), keys(std::move(given)), order(given_order), submitted(std::move(now)) {}
  // The same keys, as far as two prompts can differ: each key stands for all that lies before it. Keys that
  // are no prefix may differ within; those are asked for when they are handed over later.
  bool is(const std::vector<ChunkKey>& others, KeyOrder others_order, const Submitted& now) const {
    return order == others_order && submitted.epoch == now.epoch && submitted.era == now.era &&
           keys.size() == others.size() && keys.front() == others.front() && keys.back() == others.back();
  }
  std::span<const ChunkKey> keys_of(std::size_t part) const {
    return std::span(unknown).subspan(parts[part].first, parts[part].count);
  }
};

PresenceQuestions::PresenceQuestions(std::shared_ptr<PooledStore> shared, const PooledTierOptions& options,
                                     IoPool::Submitter submit)
    : context_(std::make_shared<const Context>(
          Context{std::move(shared), &clock_of(options), options.op_deadline, std::move(submit)})) {}

void PresenceQuestions::ask(std::vector<ChunkKey> keys, KeyOrder order) {
  const Submitted now(*context_->shared);
  bool asked = false;
  std::erase_if(prompts_, [&](const HandedOver& one) {
    const auto prompt = one.prompt.lock();
    if (!prompt) return true;
    // One whose answers have come is over, though a thread may be about to let go of it.
    const auto waits = [&] {
      return !prompt->begun.load() ||
             context_->shared->catalogue().contains(keys.front()) == Presence::kUnknown;
    };
    asked |= prompt->is(keys, order, now) && waits();
    return false;
  });
  if (asked) return;
  const auto prompt = std::make_shared<Prompt>(context_, std::move(keys), order, now);
  prompts_.push_back({prompt, {}});
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

bool PresenceQuestions::is_handed_over(const ChunkKey& key) {
  return std::any_of(prompts_.begin(), prompts_.end(), [&](HandedOver& one) {
    const auto prompt = one.prompt.lock();
    if (!prompt || prompt->begun.load()) return false;
    if (one.keys.empty()) one.keys.insert(prompt->keys.begin(), prompt->keys.end());
    return one.keys.contains(key);
  });
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
  Catalogue& catalogue = context.shared->catalogue();
  Status status = contained([&] {
    pick(*prompt);
    return Status::ok();
  });
  prompt->begun.store(true);
  std::vector<IoPool::Op> others;
  std::optional<std::size_t> own;
  if (status)
    status = contained([&] {
      // All that may throw comes before the first pass is asked for: one that is lost would be missed.
      std::vector<IoPool::Op> ops = divide(prompt);
      others.reserve(ops.size());
      Breaker& breaker = context.shared->breaker(Lane::kRead);
      const Nanos now = context.clock->now();
      for (std::size_t part = 0; part < ops.size(); ++part) {
        prompt->parts[part].pass = breaker.admit(now, Breaker::Kind::kQuestion);
        if (!prompt->parts[part].pass) {
          catalogue.give_up_asking(prompt->keys_of(part), prompt->submitted.era);
        } else if (!own) {
          own = part;
        } else {
          others.push_back(std::move(ops[part]));
        }
      }
      return Status::ok();
    });
  if (!status) return catalogue.give_up_asking(prompt->unknown, prompt->submitted.era);
  context.submit(std::move(others));
  if (own) end_part(*prompt, *own, ask_part(*prompt, *own));
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
  return ops;
}

Status PresenceQuestions::ask_part(Prompt& prompt, std::size_t part) {
  return run_locate(*prompt.context->shared, prompt.keys_of(part), prompt.order, prompt.submitted);
}

void PresenceQuestions::end_part(Prompt& prompt, std::size_t part, const Status& status) {
  PooledStore& shared = *prompt.context->shared;
  Breaker& breaker = shared.breaker(Lane::kRead);
  const Breaker::Pass& pass = *prompt.parts[part].pass;
  if (device_failed(status)) {
    breaker.failed(pass, prompt.context->clock->now());
  } else if (status) {
    breaker.succeeded(pass);
  } else {
    breaker.not_tried(pass);
  }
  // Last: who sees that the question has ended also sees what the breaker makes of it.
  if (!status) shared.catalogue().give_up_asking(prompt.keys_of(part), prompt.submitted.era);
}

}  // namespace kv_offload
