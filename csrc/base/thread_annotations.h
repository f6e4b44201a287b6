// SPDX-License-Identifier: Apache-2.0
// Lock annotations checked by Clang's -Wthread-safety, and the mutex that carries them (names from Clang's
// documentation of the analysis).
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#if defined(__clang__)
#define KVO_ANNOTATE(x) __attribute__((x))
#else
#define KVO_ANNOTATE(x)
#endif

#define GUARDED_BY(m) KVO_ANNOTATE(guarded_by(m))
#define PT_GUARDED_BY(m) KVO_ANNOTATE(pt_guarded_by(m))
#define REQUIRES(...) KVO_ANNOTATE(requires_capability(__VA_ARGS__))
#define EXCLUDES(...) KVO_ANNOTATE(locks_excluded(__VA_ARGS__))
#define ACQUIRE(...) KVO_ANNOTATE(acquire_capability(__VA_ARGS__))
#define RELEASE(...) KVO_ANNOTATE(release_capability(__VA_ARGS__))
#define TRY_ACQUIRE(...) KVO_ANNOTATE(try_acquire_capability(__VA_ARGS__))
#define NO_THREAD_SAFETY_ANALYSIS KVO_ANNOTATE(no_thread_safety_analysis)

namespace kv_offload {

class KVO_ANNOTATE(capability("mutex")) Mutex {
 public:
  // Observes each hold of each mutex, on the thread that holds it. For tests and benchmarks that measure how
  // long another thread may have to wait.
  class Watcher {
   public:
    virtual ~Watcher() = default;
    virtual void locked(const Mutex& mutex) = 0;
    virtual void unlocking(const Mutex& mutex) = 0;
  };
  // Null: no watcher. REQUIRES: no other thread uses a mutex during the call.
  static void watch(Watcher* watcher) { watcher_.store(watcher); }

  void lock() ACQUIRE() {
    if (!mutex_.try_lock()) {
      waiting_.fetch_add(1, std::memory_order_relaxed);
      mutex_.lock();
      waiting_.fetch_sub(1, std::memory_order_relaxed);
    }
    notify_locked();
  }
  void unlock() RELEASE() {
    if (Watcher* watcher = watcher_.load(std::memory_order_relaxed)) [[unlikely]]
      watcher->unlocking(*this);
    mutex_.unlock();
  }
  bool try_lock() TRY_ACQUIRE(true) {
    if (!mutex_.try_lock()) return false;
    notify_locked();
    return true;
  }
  // Call between two holds in a long loop: returns once no thread waits for this mutex. Unlocking alone does
  // not let another thread in: a woken thread finds the mutex locked again, as long as the loop runs.
  void yield_to_waiters() const {
    while (waiting_.load(std::memory_order_relaxed) > 0) std::this_thread::yield();
  }

 private:
  void notify_locked() const {
    if (Watcher* watcher = watcher_.load(std::memory_order_relaxed)) [[unlikely]]
      watcher->locked(*this);
  }

  static inline std::atomic<Watcher*> watcher_{nullptr};
  std::mutex mutex_;
  std::atomic<unsigned> waiting_{0};  // threads
};

// Scoped lock; usable with CondVar.
class KVO_ANNOTATE(scoped_lockable) MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) ACQUIRE(mutex) : mutex_(mutex) { mutex_.lock(); }
  ~MutexLock() RELEASE() { mutex_.unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex& mutex_;
};

// Waits with the mutex held by the caller. Spurious wake-ups happen, so callers must loop.
class CondVar {
 public:
  void wait(Mutex& mutex) REQUIRES(mutex) { cv_.wait(mutex); }
  template <typename Rep, typename Period>
  void wait_for(Mutex& mutex, std::chrono::duration<Rep, Period> time) REQUIRES(mutex) {
    cv_.wait_for(mutex, time);
  }
  void notify_one() { cv_.notify_one(); }
  void notify_all() { cv_.notify_all(); }

 private:
  std::condition_variable_any cv_;
};

}  // namespace kv_offload
