// SPDX-License-Identifier: Apache-2.0
// ContextPool: the working memory of codec calls. Each call takes a context; there are at most as many as
// calls at the same time.
//
// Threads: any.
#pragma once

#include <memory>
#include <new>
#include <utility>

#include "base/thread_annotations.h"

namespace kv_offload {

// Context: default-constructible without exceptions, with a member std::unique_ptr<Context> next.
template <typename Context>
class ContextPool {
 public:
  // Returns null if memory runs out.
  std::unique_ptr<Context> take() EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    if (idle_ == nullptr) return std::unique_ptr<Context>(new (std::nothrow) Context);
    auto context = std::move(idle_);
    idle_ = std::move(context->next);
    return context;
  }
  void give_back(std::unique_ptr<Context> context) EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    context->next = std::move(idle_);
    idle_ = std::move(context);
  }

 private:
  Mutex mutex_;
  std::unique_ptr<Context> idle_ GUARDED_BY(mutex_);  // a list
};

}  // namespace kv_offload
