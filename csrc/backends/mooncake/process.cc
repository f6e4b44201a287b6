// SPDX-License-Identifier: Apache-2.0
#include "backends/mooncake/process.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <iterator>
#include <string_view>
#include <thread>
#include <utility>

extern char** environ;

namespace kv_offload::mooncake {
namespace {

constexpr int kChildDescriptor = 3;
constexpr std::chrono::milliseconds kPollInterval{5};
// If the kernel does not release a killed process in this time (it waits for a device), the process is
// abandoned to init.
constexpr std::chrono::seconds kKilledWithin{5};

class Child final : public Process {
 public:
  explicit Child(pid_t pid) : pid_(pid) {}
  ~Child() override {
    if (!has_ended()) ::kill(pid_, SIGKILL);
    wait_until(std::chrono::steady_clock::now() + kKilledWithin);
  }
  void wait_until(Deadline until) override {
    while (!has_ended() && std::chrono::steady_clock::now() < until)
      std::this_thread::sleep_for(kPollInterval);
  }
  std::string end_reason() override { return has_ended() ? end_reason_ : ""; }

 private:
  // Until waitpid() reaps the child, its pid cannot be reused.
  bool has_ended() {
    if (!end_reason_.empty()) return true;
    int state = 0;
    const pid_t found = ::waitpid(pid_, &state, WNOHANG);
    if (found == 0 || (found < 0 && errno == EINTR)) return false;
    if (found < 0) {
      end_reason_ = "it ended";  // another waiter in this process reaped it
    } else if (WIFSIGNALED(state)) {
      end_reason_ = fmt::format("it was ended by signal {}", WTERMSIG(state));
    } else {
      end_reason_ = fmt::format("it ended with status {}", WEXITSTATUS(state));
    }
    return true;
  }

  const pid_t pid_;
  std::string end_reason_;
};

// The part of the engine's environment that the client needs: paths of programs, modules and temporary files,
// the locale, proxies and certificates, and the settings of Mooncake, its transports and sanitizers. Nothing
// else is passed: the engine's environment holds unrelated passwords, tokens and keys.
constexpr std::string_view kPassedNames[] = {"PATH",
                                             "HOME",
                                             "USER",
                                             "LOGNAME",
                                             "LANG",
                                             "LANGUAGE",
                                             "TZ",
                                             "TMPDIR",
                                             "TEMP",
                                             "TMP",
                                             "VIRTUAL_ENV",
                                             "LD_LIBRARY_PATH",
                                             "LD_PRELOAD",
                                             "SSL_CERT_FILE",
                                             "SSL_CERT_DIR",
                                             "http_proxy",
                                             "https_proxy",
                                             "no_proxy",
                                             "HTTP_PROXY",
                                             "HTTPS_PROXY",
                                             "NO_PROXY",
                                             "all_proxy",
                                             "KV_OFFLOAD_MOONCAKE_LOG"};
constexpr std::string_view kPassedPrefixes[] = {"LC_",   "PYTHON", "CONDA_", "MC_",   "MOONCAKE_", "GLOG_",
                                                "IBV_",  "RDMAV_", "MLX4_",  "MLX5_", "UCX_",      "FI_",
                                                "ASAN_", "TSAN_",  "UBSAN_", "LSAN_"};

bool is_inherited(std::string_view variable) {
  const std::string_view name = variable.substr(0, variable.find('='));
  return std::ranges::find(kPassedNames, name) != std::end(kPassedNames) ||
         std::ranges::any_of(kPassedPrefixes,
                             [&](std::string_view prefix) { return name.starts_with(prefix); });
}

std::vector<char*> passed_environment() {
  std::vector<char*> inherited;
  for (char** variable = environ; variable != nullptr && *variable != nullptr; ++variable) {
    if (is_inherited(*variable)) inherited.push_back(*variable);
  }
  inherited.push_back(nullptr);
  return inherited;
}

// Default signal handling, as if started by a shell: the engine's signal settings do not apply.
void set_signals(posix_spawnattr_t* attributes) {
  sigset_t none, all;
  sigemptyset(&none);
  sigfillset(&all);
  posix_spawnattr_setsigmask(attributes, &none);
  posix_spawnattr_setsigdefault(attributes, &all);
  posix_spawnattr_setflags(attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
}

Status spawn(const std::vector<std::string>& argv, Descriptor peer_end, std::unique_ptr<Process>* begun) {
  // Uses a descriptor above the target number: dup2() of a descriptor onto itself would leave it
  // close-on-exec.
  const Descriptor above(::fcntl(peer_end.get(), F_DUPFD_CLOEXEC, kChildDescriptor + 1));
  if (above.get() < 0) return Status::from_errno(errno, "dup");
  std::vector<char*> words;
  for (const std::string& word : argv) words.push_back(const_cast<char*>(word.c_str()));
  words.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawnattr_t attributes;
  posix_spawn_file_actions_init(&actions);
  posix_spawnattr_init(&attributes);
  posix_spawn_file_actions_adddup2(&actions, above.get(), kChildDescriptor);
  set_signals(&attributes);
  pid_t pid = -1;
  std::vector<char*> environment = passed_environment();
  const int error = ::posix_spawnp(&pid, words[0], &actions, &attributes, words.data(), environment.data());
  posix_spawn_file_actions_destroy(&actions);
  posix_spawnattr_destroy(&attributes);
  if (error != 0) {
    return Status::error(StatusKind::kIo, fmt::format("{} cannot be run: {}", argv[0], std::strerror(error)),
                         error);
  }
  *begun = std::make_unique<Child>(pid);
  return Status::ok();
}

}  // namespace

Launch launch_of(std::vector<std::string> argv) {
  return [argv = std::move(argv)](Descriptor peer_end, std::unique_ptr<Process>* begun) {
    return spawn(argv, std::move(peer_end), begun);
  };
}

}  // namespace kv_offload::mooncake
