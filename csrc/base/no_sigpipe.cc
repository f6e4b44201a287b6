// SPDX-License-Identifier: Apache-2.0
#include "base/no_sigpipe.h"

#include <pthread.h>
#include <signal.h>

#include <ctime>

namespace kv_offload {

NoSigpipe::NoSigpipe() {
  sigset_t pending, pipe, before;
  sigpending(&pending);
  was_pending_ = sigismember(&pending, SIGPIPE) == 1;
  sigemptyset(&pipe);
  sigaddset(&pipe, SIGPIPE);
  pthread_sigmask(SIG_BLOCK, &pipe, &before);
  was_blocked_ = sigismember(&before, SIGPIPE) == 1;
}

NoSigpipe::~NoSigpipe() {
  sigset_t pipe;
  sigemptyset(&pipe);
  sigaddset(&pipe, SIGPIPE);
  const timespec now{};
  while (!was_pending_ && sigtimedwait(&pipe, nullptr, &now) > 0) {
  }
  if (!was_blocked_) pthread_sigmask(SIG_UNBLOCK, &pipe, nullptr);
}

}  // namespace kv_offload
