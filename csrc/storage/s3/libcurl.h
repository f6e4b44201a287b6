// libcurl, loaded from the system when the first bucket is opened: a build needs no headers of it, and wheels
// carry none, as it brings some thirty libraries along.
//
// What is declared here is the part of its ABI that the tier calls. Names and numbers are those of
// curl/curl.h, which libcurl never changes under the soname libcurl.so.4; libcurl_test.cc compares them.
#pragma once

#include <sys/socket.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace kv_offload::s3::curl {

struct Easy;  // CURL
struct List;  // curl_slist

// CURLcode. 51 is 60 of before 7.62.
inline constexpr int kOk = 0, kUnsupportedProtocol = 1, kUrlMalformat = 3, kTimedOut = 28,
                     kPeerFailedOfOld = 51, kGotNothing = 52, kSendError = 55, kPeerFailed = 60,
                     kCaBadFile = 77;
inline constexpr int kSeekOk = 0, kCannotSeek = 2;  // CURL_SEEKFUNC_*
inline constexpr long kGlobalDefault = 3, kHttp11 = 2, kHttpAndHttps = 3, kMaxReadSize = 512 * 1024;
inline constexpr int kWithTls = 1 << 2;  // CURL_VERSION_SSL

// CURLoption: what is a long, a pointer, a function, a 64-bit number.
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

// curl_version_info_data, as far as it is read.
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
  std::string problem;  // empty: it can be used
};

// The first of these that will do is taken, and stays loaded as long as the process lives; it is started.
// Otherwise the problem says what is wrong with each. Any thread, but for a libcurl before 7.84: no other
// user of it in this process may start it now.
Loaded load(const std::vector<std::string>& names);
// Why a libcurl of this version is none for us; empty: it is one.
std::string problem_of(const Version& version, const std::string& name);
// That of this process, looked for once: KV_OFFLOAD_LIBCURL if it is set, else libcurl.so.4 or Debian's with
// GnuTLS. Any thread.
const Loaded& loaded();

}  // namespace kv_offload::s3::curl
