// SPDX-License-Identifier: Apache-2.0
// libcurl, loaded from the system when the first bucket is opened. Builds need no libcurl headers. Wheels do
// not bundle libcurl, because it depends on about thirty libraries.
//
// This header declares the part of libcurl's ABI that the tier calls. Names and numbers are those of
// curl/curl.h. libcurl never changes them under the soname libcurl.so.4; libcurl_test.cc compares them.
#pragma once

#include <sys/socket.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace kv_offload::s3::curl {

struct Easy;  // CURL
struct List;  // curl_slist

// CURLcode. Versions before 7.62 use 51 in place of 60.
inline constexpr int kOk = 0, kUnsupportedProtocol = 1, kUrlMalformat = 3, kTimedOut = 28,
                     kPeerFailedOfOld = 51, kGotNothing = 52, kSendError = 55, kPeerFailed = 60,
                     kCaBadFile = 77;
inline constexpr int kSeekOk = 0, kCannotSeek = 2;  // CURL_SEEKFUNC_*
inline constexpr long kGlobalDefault = 3, kHttp11 = 2, kHttpAndHttps = 3, kMaxReadSize = 512 * 1024;
inline constexpr int kWithTls = 1 << 2;  // CURL_VERSION_SSL

// CURLoption. The ranges are: long below 10000, pointer from 10000, function from 20000, 64-bit number from
// 30000.
enum Option : int {
  kFollowLocation = 52,
  kNoBody = 44,
  kUpload = 46,
  kVerifyPeer = 64,
  kMaxConnects = 71,
  kFreshConnect = 74,
  kVerifyHost = 81,
  kHttpVersion = 84,
  kBufferSize = 98,
  kNoSignal = 99,
  kTimeoutMs = 155,
  kConnectTimeoutMs = 156,
  kProtocols = 181,
  kPathAsIs = 234,
  kUploadBufferSize = 280,  // 7.62
  kQuickExit = 322,         // 7.87
  kWriteData = 10001,
  kUrl = 10002,
  kProxy = 10004,
  kReadData = 10009,
  kHttpHeader = 10023,
  kHeaderData = 10029,
  kCustomRequest = 10036,
  kCaInfo = 10065,
  kCaPath = 10097,
  kSeekData = 10168,
  kWriteFunction = 20011,
  kReadFunction = 20012,
  kHeaderFunction = 20079,
  kOpenSocketFunction = 20163,
  kSeekFunction = 20167,
  kInFileSize = 30115,
};

// The leading fields of curl_version_info_data that we read.
struct Version {
  int age;
  const char* version;
  unsigned number;  // 0xMMmmpp
  const char* host;
  int features;
};
// curl_sockaddr
struct Address {
  int family, socktype, protocol;
  unsigned bytes;
  sockaddr address;
};

struct Library {
  int (*global_init)(long flags) = nullptr;
  const Version* (*version_info)(int age) = nullptr;
  Easy* (*easy_init)() = nullptr;
  void (*easy_cleanup)(Easy*) = nullptr;
  void (*easy_reset)(Easy*) = nullptr;
  int (*easy_setopt)(Easy*, int option, ...) = nullptr;
  int (*easy_perform)(Easy*) = nullptr;
  const char* (*easy_strerror)(int code) = nullptr;
  List* (*slist_append)(List*, const char*) = nullptr;
  void (*slist_free_all)(List*) = nullptr;
};

struct Loaded {
  Library library;
  std::string version;  // "7.88.1 (/usr/lib/x86_64-linux-gnu/libcurl.so.4)"
  std::string problem;  // empty if the library can be used
};

// Loads and initialises the first usable library. It stays loaded until the process exits. If none is usable,
// `problem` gives the reason for each. Thread-safe, except with libcurl before 7.84: no other user of it in
// this process may initialise it at the same time.
Loaded load(const std::vector<std::string>& names);
// Returns why we cannot use a libcurl of this version; empty if we can.
std::string problem_of(const Version& version, const std::string& name);
// Returns the library of this process, searched for once: KV_OFFLOAD_LIBCURL if set, else libcurl.so.4 or
// Debian's GnuTLS build. Thread-safe.
const Loaded& loaded();

}  // namespace kv_offload::s3::curl
