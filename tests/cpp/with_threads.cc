// SPDX-License-Identifier: Apache-2.0
#include "with_threads.h"

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <pthread.h>

#include <atomic>
#include <fstream>
#include <string>
#include <string_view>
#include <utility>

namespace {
std::atomic<unsigned> g_begun{0};
using Create = decltype(pthread_create);
}  // namespace

extern "C" {
// The sanitizer's own wrapper, if there is one: a program's pthread_create replaces it, but it
// keeps this name.
__attribute__((weak)) Create __interceptor_pthread_create;

int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*run)(void*),
                   void* argument) noexcept {
  g_begun.fetch_add(1, std::memory_order_relaxed);
  Create* const create = __interceptor_pthread_create != nullptr
                             ? __interceptor_pthread_create
                             : reinterpret_cast<Create*>(dlsym(RTLD_NEXT, "pthread_create"));
  return create(thread, attributes, run, argument);
}
}

namespace {

bool says_so(std::string_view file) {  // the path given to the compiler; ends with tests/cpp/...
  constexpr std::string_view kFolder = "tests/cpp/";
  std::ifstream source(
      std::string(KV_OFFLOAD_TESTS_CPP "/").append(file.substr(file.rfind(kFolder) + kFolder.size())));
  for (std::string line; std::getline(source, line);) {
    if (line == "#include \"with_threads.h\"") return true;
  }
  return false;
}

class Listener final : public testing::EmptyTestEventListener {
  void OnTestEnd(const testing::TestInfo& test) override {
    // Threads started by the set-up of a suite count for the suite's first test.
    const unsigned before = std::exchange(seen_, g_begun.load());
    if (g_begun == before || says_so(test.file())) return;
    ADD_FAILURE_AT(test.file(), test.line())
        << "this test starts threads: its file must include with_threads.h, or ThreadSanitizer never runs it";
  }
  unsigned seen_ = 0;
};

[[maybe_unused]] const bool g_listens = [] {
  testing::UnitTest::GetInstance()->listeners().Append(new Listener);
  return true;
}();

}  // namespace
