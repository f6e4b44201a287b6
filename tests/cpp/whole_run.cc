// SPDX-License-Identifier: Apache-2.0
// Checks of a whole run of the core's tests: every test that starts threads is listed for ThreadSanitizer,
// and no test ends the process.

#include <dlfcn.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>
#include <utility>

namespace {
std::atomic<unsigned> g_begun{0};
bool g_is_running = false;
pid_t g_process = 0;
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

bool is_listed(std::string_view file) {  // the path given to the compiler; ends with tests/cpp/...
  constexpr std::string_view kFolder = "tests/cpp/";
  const std::string_view name = file.substr(file.rfind(kFolder) + kFolder.size());
  constexpr std::string_view kListed = KV_OFFLOAD_THREAD_TESTS;  // ":cache/fetch_test.cc:...:"
  return kListed.find(fmt::format(":{}:", name)) != std::string_view::npos;
}

class Listener final : public testing::EmptyTestEventListener {
  void OnTestProgramStart(const testing::UnitTest& /*tests*/) override {
    // A test that calls exit(0) would also end the tests after it.
    std::atexit([] {
      if (g_is_running && getpid() == g_process) {
        std::fputs("the process ended before its last test\n", stderr);
        std::_Exit(EXIT_FAILURE);
      }
    });
    g_process = getpid();  // children of tests may exit
    g_is_running = true;
  }
  void OnTestProgramEnd(const testing::UnitTest& /*tests*/) override { g_is_running = false; }
  void OnTestEnd(const testing::TestInfo& test) override {
    // Threads started by the set-up of a suite count for the suite's first test.
    const unsigned before = std::exchange(seen_, g_begun.load());
    if (g_begun == before || is_listed(test.file())) return;
    ADD_FAILURE_AT(test.file(), test.line())
        << "this test starts threads: its file must be in thread_tests of tests/cpp/CMakeLists.txt, or "
           "ThreadSanitizer never runs it";
  }
  unsigned seen_ = 0;
};

[[maybe_unused]] const bool g_listens = [] {
  testing::UnitTest::GetInstance()->listeners().Append(new Listener);
  return true;
}();

}  // namespace
