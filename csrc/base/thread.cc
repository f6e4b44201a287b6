// SPDX-License-Identifier: Apache-2.0
#include "base/thread.h"

#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

namespace kv_offload {

void begin_thread(const char* name, CpuShare share) {
  ::pthread_setname_np(::pthread_self(), name);
  if (share == CpuShare::kFull) return;
  // On Linux a nice value applies to one thread (setpriority(2), "C library/kernel differences"). The call
  // fails only where a sandbox forbids it; then the thread keeps its full share.
  const auto thread = static_cast<id_t>(::gettid());
  if (::getpriority(PRIO_PROCESS, thread) < kBackgroundNice) {
    ::setpriority(PRIO_PROCESS, thread, kBackgroundNice);
  }
}

}  // namespace kv_offload
