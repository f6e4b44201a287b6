// SPDX-License-Identifier: Apache-2.0
#include "base/thread.h"

#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <thread>

namespace kv_offload {
namespace {

struct Seen {
  std::string name;
  int nice = 0;
};
Seen look() {
  char name[16] = {};
  ::pthread_getname_np(::pthread_self(), name, sizeof name);
  return {name, ::getpriority(PRIO_PROCESS, static_cast<id_t>(::gettid()))};
}
Seen in_a_thread(const char* name, CpuShare share) {
  Seen seen;
  std::thread([&] {
    begin_thread(name, share);
    seen = look();
  }).join();
  return seen;
}

TEST(Thread, begin_thread_sets_name_and_priority_of_its_thread_only) {
  const Seen before = look();
  const Seen full = in_a_thread("kvo-one", CpuShare::kFull);
  const Seen background = in_a_thread("kvo-two", CpuShare::kBackground);
  EXPECT_EQ(full.name, "kvo-one");
  EXPECT_EQ(full.nice, before.nice);
  EXPECT_EQ(background.name, "kvo-two");
  EXPECT_EQ(background.nice, std::max(before.nice, kBackgroundNice));
  EXPECT_EQ(look().name, before.name);
  EXPECT_EQ(look().nice, before.nice);
}

TEST(Thread, begin_thread_never_raises_a_lower_priority) {
  int nice = 0;
  std::thread([&] {
    ASSERT_EQ(::setpriority(PRIO_PROCESS, static_cast<id_t>(::gettid()), 15), 0);
    begin_thread("kvo-three", CpuShare::kBackground);
    nice = look().nice;
  }).join();
  EXPECT_EQ(nice, 15);
}

}  // namespace
}  // namespace kv_offload
