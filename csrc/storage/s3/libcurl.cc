#include "storage/s3/libcurl.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <cstdlib>

namespace kv_offload::s3::curl {
namespace {

constexpr unsigned kOldest = 0x073d00;  // 7.61: Red Hat 8; older ones were never tried
constexpr const char* kHowToGetIt =
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

}  // namespace

std::string problem_of(const Version& version, const std::string& name) {
  if (version.number < kOldest) {
    return fmt::format("the s3 tier needs libcurl 7.61 or newer, and {} is {}: {}", name, version.version,
                       kHowToGetIt);
  }
  if ((version.features & kWithTls) == 0) {
    return fmt::format("the s3 tier needs a libcurl with TLS, and {} ({}) has none: {}", name,
                       version.version, kHowToGetIt);
  }
  return {};
}

Loaded load(const std::vector<std::string>& names) {
  Loaded found;
  std::string errors;
  for (const std::string& name : names) {
    // Never closed: it has threads, and state of the libraries below it. Local, so that its OpenSSL is not
    // taken for the wheel's, nor the other way round.
    void* const handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) {
      const char* error = dlerror();
      errors += fmt::format("{}{}", errors.empty() ? "" : "; ", error != nullptr ? error : name);
      continue;
    }
    if (!find_all(handle, &found.library)) {
      found.problem = fmt::format("{} is no libcurl that the s3 tier can use: {}", name, kHowToGetIt);
      return found;
    }
    const Version& version = *found.library.version_info(0);
    found.version = fmt::format("{} ({})", version.version, name);
    found.problem = problem_of(version, name);
    if (!found.problem.empty()) return found;
    if (const int started = found.library.global_init(kGlobalDefault); started != kOk) {
      found.problem = fmt::format("libcurl {} cannot be started: {}", found.version,
                                  found.library.easy_strerror(started));
    }
    return found;
  }
  found.problem =
      fmt::format("the s3 tier needs libcurl, and none can be loaded ({}): {}", errors, kHowToGetIt);
  return found;
}

const Loaded& loaded() {
  static const Loaded* const found = [] {
    const char* const named = std::getenv("KV_OFFLOAD_LIBCURL");
    if (named != nullptr && *named != '\0') return new Loaded(load({named}));
    return new Loaded(load({"libcurl.so.4", "libcurl-gnutls.so.4"}));
  }();
  return *found;  // for as long as threads that are stuck in it
}

}  // namespace kv_offload::s3::curl
