// SPDX-License-Identifier: Apache-2.0
#include "backends/s3/libcurl.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <link.h>

#include <cstdlib>

namespace kv_offload::s3::curl {
namespace {

constexpr unsigned kOldest = 0x073d00;  // 7.61: Red Hat 8; older versions are untested
constexpr const char* kInstallHint =
    "install it (Debian, Ubuntu: apt install libcurl4; Red Hat: dnf install libcurl), or name one in "
    "KV_OFFLOAD_LIBCURL, such as /opt/conda/lib/libcurl.so.4";

template <typename Function>
bool find(void* handle, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(handle, name));
  return *function != nullptr;
}

bool find_all(void* handle, Library* library) {
  return find(handle, "curl_global_init", &library->global_init) &&
         find(handle, "curl_version_info", &library->version_info) &&
         find(handle, "curl_easy_init", &library->easy_init) &&
         find(handle, "curl_easy_cleanup", &library->easy_cleanup) &&
         find(handle, "curl_easy_reset", &library->easy_reset) &&
         find(handle, "curl_easy_setopt", &library->easy_setopt) &&
         find(handle, "curl_easy_perform", &library->easy_perform) &&
         find(handle, "curl_easy_strerror", &library->easy_strerror) &&
         find(handle, "curl_slist_append", &library->slist_append) &&
         find(handle, "curl_slist_free_all", &library->slist_free_all);
}

// Returns the file path, because a machine may have several libraries of one name.
std::string library_path(void* handle, const std::string& name) {
  const link_map* map = nullptr;
  const bool found = dlinfo(handle, RTLD_DI_LINKMAP, static_cast<void*>(&map)) == 0;
  return found && map != nullptr && map->l_name != nullptr && *map->l_name != '\0' ? map->l_name : name;
}

// Loads and initialises one library. Returns the problem, or an empty string on success.
std::string load_one(const std::string& name, Loaded* found) {
  // Never closed: the library has threads, and state in its dependencies. RTLD_LOCAL keeps its OpenSSL and
  // the wheel's apart.
  void* const handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* error = dlerror();
    return error != nullptr ? error : name;
  }
  const std::string path = library_path(handle, name);
  if (!find_all(handle, &found->library)) return fmt::format("{} is not libcurl", path);
  const Version& version = *found->library.version_info(0);
  found->version = fmt::format("{} ({})", version.version, path);
  if (std::string problem = problem_of(version, path); !problem.empty()) return problem;
  const int started = found->library.global_init(kGlobalDefault);
  if (started == kOk) return {};
  return fmt::format("{} cannot be initialised: {}", found->version, found->library.easy_strerror(started));
}

}  // namespace

std::string problem_of(const Version& version, const std::string& name) {
  if (version.number < kOldest) return fmt::format("{} is {}, which is too old", name, version.version);
  if ((version.features & kWithTls) == 0) return fmt::format("{} ({}) has no TLS", name, version.version);
  return {};
}

Loaded load(const std::vector<std::string>& names) {
  std::string problems;
  for (const std::string& name : names) {
    Loaded found;
    const std::string problem = load_one(name, &found);
    if (problem.empty()) return found;
    problems += fmt::format("{}{}", problems.empty() ? "" : "; ", problem);
  }
  Loaded none;
  none.problem = fmt::format("the s3 tier needs libcurl 7.61 or newer with TLS, but none is usable ({}): {}",
                             problems, kInstallHint);
  return none;
}

const Loaded& loaded() {
  static const Loaded* const found = [] {
    const char* const named = std::getenv("KV_OFFLOAD_LIBCURL");
    if (named != nullptr && *named != '\0') return new Loaded(load({named}));
    return new Loaded(load({"libcurl.so.4", "libcurl-gnutls.so.4"}));
  }();
  return *found;  // never destroyed: threads may be stuck in the library
}

}  // namespace kv_offload::s3::curl
