// SPDX-License-Identifier: Apache-2.0
#include "tier/presence_lookup.h"

#include <algorithm>
#include <atomic>
#include <optional>
#include <utility>

#include "base/thread_annotations.h"
#include "tier/circuit_breaker.h"

namespace kv_offload {
namespace {

// The keys of a prompt after such a one are useless.
bool is_missing(Presence presence) {
  return presence == Presence::kAbsent || presence == Presence::kStaleMiss ||
         presence == Presence::kSkipped || presence == Presence::kLookupFailed;
}

}  // namespace

// Keys of a prompt that are looked up together. Everything except the atomics is written before other threads
// see it.
struct PresenceLookup::Window {
  // Keys of one store call.
  struct Part {
    std::size_t first = 0, count = 0;  // range in `unknown`
    std::optional<CircuitBreaker::Pass> pass;
  };

  std::vector<ChunkKey> unknown;  // the keys that this window looks up
  std::vector<Part> parts;
  std::vector<std::atomic<bool>> ended;    // of the admitted parts: answered or given up
  std::atomic<std::size_t> unanswered{0};  // admitted parts, plus one while they are handed out
  std::atomic<bool> failed{false};         // a part was given up

  std::span<const ChunkKey> keys_of(std::size_t part) const {
    return std::span(unknown).subspan(parts[part].first, parts[part].count);
  }
};

struct PresenceLookup::Prompt {
  const std::shared_ptr<const Context> context;
  const std::vector<ChunkKey> keys;
  const LookupOptions options;
  const Submitted submitted;
  // A thread will pick the keys from here on, or find that they are not needed. Only one thread at a time
  // changes it.
  std::atomic<std::size_t> next{0};
  std::atomic<bool> is_running{false};  // a window is being looked up
  Mutex mutex;
  WindowPtr window GUARDED_BY(mutex);  // the last one begun
  // Of other tenants, with the same last keys.
  std::vector<std::weak_ptr<Prompt>> same_keys GUARDED_BY(mutex);

  Prompt(std::shared_ptr<const Context> in, std::vector<ChunkKey> lookup_keys,
         const LookupOptions& lookup_options, Submitted now)
      : context(std::move(in)),
        keys(std::move(lookup_keys)),
        options(lookup_options),
        submitted(std::move(now)) {}

  // True if a thread will look these keys up, or find that their lookups are pending. REQUIRES: both lists
  // end with the same key.
  bool covers(const std::vector<ChunkKey>& others, const LookupOptions& theirs, const Submitted& now) const {
    if (options.order != theirs.order) return false;
    if (submitted.epoch != now.epoch || submitted.epoch_number != now.epoch_number) return false;
    return others.size() <= keys.size() - next.load() &&
           std::equal(others.rbegin(), others.rend(), keys.rbegin());
  }
  void add_same_keys(const PromptPtr& other) EXCLUDES(mutex) {
    const MutexLock lock(mutex);
    std::erase_if(same_keys, [](const std::weak_ptr<Prompt>& one) { return one.expired(); });
    same_keys.push_back(other);
  }
  bool is_looked_up_for_others() EXCLUDES(mutex) {
    const MutexLock lock(mutex);
    return std::any_of(same_keys.begin(), same_keys.end(), [](const std::weak_ptr<Prompt>& one) {
      const auto prompt = one.lock();
      return prompt && prompt->is_running.load();
    });
  }
  void cancel_rest() { next.store(keys.size()); }
};

PresenceLookup::PresenceLookup(std::shared_ptr<TierRuntime> shared, const ThreadPoolTierOptions& options,
                               IoPool::Submitter submit)
    : context_(std::make_shared<const Context>(
          Context{std::move(shared), &clock_of(options), options.op_timeout, std::move(submit)})) {}

void PresenceLookup::start(std::vector<ChunkKey> keys, const LookupOptions& options) {
  const Submitted now(*context_->shared);
  if (prompts_.size() >= most_prompts_) {
    std::erase_if(prompts_, [](const auto& prompt) { return prompt.second.expired(); });
    most_prompts_ = 2 * prompts_.size() + kFewPrompts;
  }
  const auto [first, last] = prompts_.equal_range(keys.back());
  std::vector<PromptPtr> same_keys;
  for (auto one = first; one != last; ++one) {
    const auto prompt = one->second.lock();
    if (!prompt || !prompt->covers(keys, options, now)) continue;
    // A lookup of another tenant that waits may be due later. The result of one that runs is known soon.
    if (prompt->options.tenant == options.tenant || prompt->is_running.load()) return;
    same_keys.push_back(prompt);
  }
  const auto prompt = std::make_shared<Prompt>(context_, std::move(keys), options, now);
  for (const PromptPtr& other : same_keys) {  // the turn of either may come first
    prompt->add_same_keys(other);
    other->add_same_keys(prompt);
  }
  prompts_.emplace(prompt->keys.back(), prompt);
  std::vector<IoPool::Op> ops;
  ops.push_back(next_window_op(prompt));
  context_->submit(std::move(ops));
}

// Lookups that have not begun find the breaker open and give up by themselves.
void PresenceLookup::cancel_all() {
  for (const auto& [last_key, one] : prompts_) {
    const auto prompt = one.lock();
    if (!prompt) continue;
    WindowPtr window;
    {
      const MutexLock lock(prompt->mutex);
      window = prompt->window;
    }
    for (std::size_t part = 0; window && part < window->parts.size(); ++part) {
      if (window->ended[part].load()) continue;
      cancel(*prompt, window->keys_of(part));
      window->failed.store(true);
      window->ended[part].store(true);
    }
    prompt->is_running.store(false);
  }
}

IoPool::Op PresenceLookup::op_of(const Prompt& prompt, std::function<Status()> run,
                                 std::function<void(const Status&)> end) {
  IoPool::Op op;
  op.tag = kTag;
  op.urgent = true;  // short, and the request may be waiting for nothing else
  op.tenant = prompt.options.tenant;
  op.weight = static_cast<float>(prompt.options.weight);
  op.deadline = prompt.context->clock->now() + prompt.context->op_timeout;
  op.run = std::move(run);
  op.done = [end = std::move(end)](const Status& status, double, double) { end(status); };
  return op;
}

IoPool::Op PresenceLookup::next_window_op(const PromptPtr& prompt) {
  return op_of(
      *prompt,
      [prompt] {
        start_next_window(prompt);
        return Status::ok();
      },
      [](const Status&) {});  // an op that never ran has begun no lookup
}

// Picks keys until some of them are unknown, and looks those up.
void PresenceLookup::start_next_window(const PromptPtr& prompt) {
  TierRuntime& shared = *prompt->context->shared;
  while (prompt->next.load() < prompt->keys.size()) {
    WindowPtr window;
    std::vector<IoPool::Op> ops;
    const Status prepared = catch_exceptions([&] {
      window = std::make_shared<Window>();
      if (!prompt->submitted.epoch || prompt->submitted.epoch != shared.store->epoch()) {
        prompt->cancel_rest();
        return Status::ok();
      }
      const std::size_t at_once =
          std::max<std::size_t>(shared.store->keys_per_locate(prompt->options.order), 1);
      const std::size_t next = prompt->next.load(), all = prompt->keys.size();
      const std::size_t wanted = std::max({kFirstWindow, at_once, next});
      const std::size_t end = prompt->options.order == KeyOrder::kPrefix ? std::min(all, next + wanted) : all;
      pick(*prompt, end, window.get());
      ops = divide(prompt, window, at_once);
      prompt->next.store(end);
      if (end == all || !window->unknown.empty()) return Status::ok();
      // The caller asks for the later keys again if these are found.
      const Presence end_key = shared.catalog().contains(prompt->keys[end - 1]);
      const bool is_pending = end_key == Presence::kLookupPending;
      if (is_missing(end_key) || (is_pending && prompt->is_looked_up_for_others())) prompt->cancel_rest();
      return Status::ok();
    });
    if (!prepared) {
      prompt->cancel_rest();
      if (window) cancel(*prompt, window->unknown);
      return;
    }
    if (!ops.empty()) return start(prompt, window, std::move(ops));
  }
}

// The thread that picked the keys looks up the first part itself.
void PresenceLookup::start(const PromptPtr& prompt, const WindowPtr& window, std::vector<IoPool::Op> ops) {
  const Context& context = *prompt->context;
  CircuitBreaker& breaker = context.shared->breaker(Lane::kRead);
  const Nanos now = context.clock->now();
  std::optional<std::size_t> own;
  std::size_t admitted = 0;
  for (std::size_t part = 0; part < ops.size(); ++part) {
    // The breaker admits each part separately; this thread keeps the first one admitted.
    window->parts[part].pass = breaker.admit(now, CircuitBreaker::Kind::kLookup);
    if (!window->parts[part].pass) continue;
    ++admitted;
    if (!own) own = part;
  }
  // The extra one keeps the window from ending while its parts are handed out.
  window->unanswered.store(admitted + 1);
  {
    const MutexLock lock(prompt->mutex);
    prompt->window = window;
  }
  prompt->is_running.store(true);
  const Status shared = catch_exceptions([&] {
    std::vector<IoPool::Op> others;
    for (std::size_t part = 0; part < ops.size(); ++part) {
      // All admitted parts but its own are queued for other threads.
      if (part != own && window->parts[part].pass) others.push_back(std::move(ops[part]));
    }
    context.submit(std::move(others));
    return Status::ok();
  });
  for (std::size_t part = 0; part < ops.size(); ++part) {
    // A part that was refused, or that could not be queued, is given up.
    if (!window->parts[part].pass) {
      window->failed.store(true);
      cancel(*prompt, window->keys_of(part));
    } else if (part != own && !shared) {
      end_part(prompt, *window, part, shared);
    }
  }
  if (own) end_part(prompt, *window, *own, run_part(*prompt, *window, *own));
  if (window->unanswered.fetch_sub(1) == 1) end_window(prompt, *window);
}

void PresenceLookup::cancel(const Prompt& prompt, std::span<const ChunkKey> keys) {
  (void)catch_exceptions([&] {
    Catalog& catalog = prompt.context->shared->catalog();
    for (std::size_t first = 0; first < keys.size(); first += kKeysPerLock) {
      const std::size_t count = std::min(kKeysPerLock, keys.size() - first);
      catalog.cancel_lookup(keys.subspan(first, count), prompt.submitted.epoch_number);
    }
    return Status::ok();
  });
}

// Marks the unknown keys up to `end` as pending in the catalog.
void PresenceLookup::pick(Prompt& prompt, std::size_t end, Window* window) {
  TierRuntime& shared = *prompt.context->shared;
  const std::span<const ChunkKey> keys(prompt.keys);
  std::size_t first = prompt.next.load();
  window->unknown.reserve(end - first);  // whatever throws, it holds every key that the catalog was given
  for (std::size_t count = 0; first < end; first += count) {
    count = std::min(kKeysPerLock, end - first);
    shared.catalog().begin_lookup(keys.subspan(first, count), prompt.submitted.epoch_number,
                                  &window->unknown);
  }
}

// Returns one op per store call.
std::vector<IoPool::Op> PresenceLookup::divide(const PromptPtr& prompt, const WindowPtr& window,
                                               std::size_t at_once) {
  std::vector<IoPool::Op> ops;
  for (std::size_t first = 0; first < window->unknown.size(); first += at_once) {
    const std::size_t part = window->parts.size();
    window->parts.push_back({first, std::min(at_once, window->unknown.size() - first), std::nullopt});
    ops.push_back(op_of(
        *prompt, [prompt, window, part] { return run_part(*prompt, *window, part); },
        [prompt, window, part](const Status& status) { end_part(prompt, *window, part, status); }));
  }
  window->ended = std::vector<std::atomic<bool>>(window->parts.size());
  return ops;
}

Status PresenceLookup::run_part(Prompt& prompt, Window& window, std::size_t part) {
  return catch_exceptions([&] {
    TierRuntime& shared = *prompt.context->shared;
    // The device may have become stuck after the part was admitted.
    if (!shared.breaker(Lane::kRead).is_valid(*window.parts[part].pass)) return breaker_open_error();
    return run_locate(shared, window.keys_of(part), prompt.options.order, prompt.submitted);
  });
}

void PresenceLookup::end_part(const PromptPtr& prompt, Window& window, std::size_t part,
                              const Status& status) {
  TierRuntime& shared = *prompt->context->shared;
  CircuitBreaker& breaker = shared.breaker(Lane::kRead);
  const CircuitBreaker::Pass& pass = *window.parts[part].pass;
  if (device_failed(status)) {
    breaker.failed(pass, prompt->context->clock->now());
  } else if (status) {
    shared.answered(Lane::kRead, pass);
  } else {
    breaker.withdraw(pass);
  }
  // Last: a thread that sees the lookup end also sees its effect on the breaker. A part that was given up
  // while stuck may have a new lookup by now, so it is not given up twice.
  if (!status && !window.ended[part].load()) cancel(*prompt, window.keys_of(part));
  if (!status) window.failed.store(true);
  window.ended[part].store(true);
  if (window.unanswered.fetch_sub(1) == 1) end_window(prompt, window);
}

// All parts have ended, and no thread is picking keys.
void PresenceLookup::end_window(const PromptPtr& prompt, const Window& window) {
  prompt->is_running.store(false);
  const std::size_t next = prompt->next.load();
  if (next >= prompt->keys.size()) return;
  const Presence last = prompt->context->shared->catalog().contains(prompt->keys[next - 1]);
  if (window.failed.load() || is_missing(last)) return prompt->cancel_rest();
  const Status submitted = catch_exceptions([&] {
    std::vector<IoPool::Op> ops;
    ops.push_back(next_window_op(prompt));
    prompt->context->submit(std::move(ops));
    return Status::ok();
  });
  if (!submitted) prompt->cancel_rest();
}

}  // namespace kv_offload
