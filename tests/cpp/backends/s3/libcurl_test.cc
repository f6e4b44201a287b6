// SPDX-License-Identifier: Apache-2.0
// Our declarations of libcurl agree with its header, and an unusable libcurl is reported.
#include "backends/s3/libcurl.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <type_traits>

#if __has_include(<curl/curl.h>)
#include <curl/curl.h>
#endif

namespace kv_offload::s3::curl {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

#ifdef LIBCURL_VERSION
static_assert(kOk == CURLE_OK && kUnsupportedProtocol == CURLE_UNSUPPORTED_PROTOCOL &&
              kUrlMalformat == CURLE_URL_MALFORMAT && kTimedOut == CURLE_OPERATION_TIMEDOUT &&
              kGotNothing == CURLE_GOT_NOTHING && kSendError == CURLE_SEND_ERROR &&
              kPeerFailed == CURLE_PEER_FAILED_VERIFICATION && kCaBadFile == CURLE_SSL_CACERT_BADFILE);
static_assert(kSeekOk == CURL_SEEKFUNC_OK && kCannotSeek == CURL_SEEKFUNC_CANTSEEK);
static_assert(kGlobalDefault == CURL_GLOBAL_DEFAULT && kHttp11 == CURL_HTTP_VERSION_1_1 &&
              kWithTls == CURL_VERSION_SSL && kMaxReadSize <= CURL_MAX_READ_SIZE);

template <typename Theirs>
constexpr bool same(Option ours, Theirs theirs) {
  return static_cast<int>(ours) == static_cast<int>(theirs);
}
static_assert(same(kFollowLocation, CURLOPT_FOLLOWLOCATION) && same(kNoBody, CURLOPT_NOBODY) &&
              same(kUpload, CURLOPT_UPLOAD) && same(kVerifyPeer, CURLOPT_SSL_VERIFYPEER) &&
              same(kMaxConnects, CURLOPT_MAXCONNECTS) && same(kFreshConnect, CURLOPT_FRESH_CONNECT) &&
              same(kVerifyHost, CURLOPT_SSL_VERIFYHOST) && same(kHttpVersion, CURLOPT_HTTP_VERSION) &&
              same(kBufferSize, CURLOPT_BUFFERSIZE) && same(kNoSignal, CURLOPT_NOSIGNAL) &&
              same(kTimeoutMs, CURLOPT_TIMEOUT_MS) && same(kConnectTimeoutMs, CURLOPT_CONNECTTIMEOUT_MS) &&
              same(kPathAsIs, CURLOPT_PATH_AS_IS) && same(kUploadBufferSize, CURLOPT_UPLOAD_BUFFERSIZE) &&
              kProtocols == 181 && kHttpAndHttps == (CURLPROTO_HTTP | CURLPROTO_HTTPS));
static_assert(same(kWriteData, CURLOPT_WRITEDATA) && same(kUrl, CURLOPT_URL) && same(kProxy, CURLOPT_PROXY) &&
              same(kReadData, CURLOPT_READDATA) && same(kHttpHeader, CURLOPT_HTTPHEADER) &&
              same(kHeaderData, CURLOPT_HEADERDATA) && same(kCustomRequest, CURLOPT_CUSTOMREQUEST) &&
              same(kCaInfo, CURLOPT_CAINFO) && same(kCaPath, CURLOPT_CAPATH) &&
              same(kSeekData, CURLOPT_SEEKDATA) && same(kWriteFunction, CURLOPT_WRITEFUNCTION) &&
              same(kReadFunction, CURLOPT_READFUNCTION) && same(kHeaderFunction, CURLOPT_HEADERFUNCTION) &&
              same(kOpenSocketFunction, CURLOPT_OPENSOCKETFUNCTION) &&
              same(kSeekFunction, CURLOPT_SEEKFUNCTION) && same(kInFileSize, CURLOPT_INFILESIZE_LARGE));
#if LIBCURL_VERSION_NUM >= 0x075700
static_assert(same(kQuickExit, CURLOPT_QUICK_EXIT));
#endif
static_assert(sizeof(long) == sizeof(curl_off_t), "kInFileSize is given as a long");
static_assert(offsetof(Version, version) == offsetof(curl_version_info_data, version) &&
              offsetof(Version, number) == offsetof(curl_version_info_data, version_num) &&
              offsetof(Version, features) == offsetof(curl_version_info_data, features));
static_assert(sizeof(Address) == sizeof(curl_sockaddr) &&
              offsetof(Address, socktype) == offsetof(curl_sockaddr, socktype) &&
              offsetof(Address, protocol) == offsetof(curl_sockaddr, protocol) &&
              offsetof(Address, address) == offsetof(curl_sockaddr, addr));
#endif

TEST(LibcurlTest, the_libcurl_of_this_process_is_loaded_once) {
  const Loaded& found = loaded();
  EXPECT_EQ(found.problem, "");
  EXPECT_THAT(found.version, HasSubstr("libcurl"));
  EXPECT_EQ(&loaded(), &found);
}

TEST(LibcurlTest, the_first_available_library_is_used) {
  const Loaded found = load({"libcurl-nowhere.so.4", "libcurl.so.4", "libcurl-nowhere-else.so.4"});
  EXPECT_EQ(found.problem, "");
  EXPECT_THAT(found.version, AllOf(HasSubstr(" (/"), HasSubstr("/libcurl.so.4"))) << "the file";
}

TEST(LibcurlTest, the_next_library_is_tried_after_an_unusable_one) {
  EXPECT_EQ(load({"libm.so.6", "libcurl.so.4"}).problem, "");
  EXPECT_THAT(load({"libm.so.6", "libcurl-nowhere.so.4"}).problem,
              AllOf(HasSubstr("libm.so.6 is not libcurl; libcurl-nowhere.so.4: cannot open")));
}

TEST(LibcurlTest, without_a_library_the_error_lists_the_attempts_and_what_to_install) {
  EXPECT_THAT(load({"libcurl-nowhere.so.4", "libcurl-nowhere-else.so.4"}).problem,
              AllOf(HasSubstr("libcurl-nowhere.so.4: cannot open"), HasSubstr("libcurl-nowhere-else.so.4"),
                    HasSubstr("apt install libcurl4"), HasSubstr("dnf install libcurl"),
                    HasSubstr("KV_OFFLOAD_LIBCURL")));
}

TEST(LibcurlTest, a_library_that_is_not_libcurl_is_refused) {
  EXPECT_THAT(load({"libm.so.6"}).problem, HasSubstr("libm.so.6 is not libcurl"));
}

TEST(LibcurlTest, a_library_that_is_too_old_or_lacks_tls_is_refused) {
  EXPECT_EQ(problem_of({0, "7.61.1", 0x073d01, "", kWithTls}, "x.so"), "");
  EXPECT_THAT(problem_of({0, "7.60.0", 0x073c00, "", kWithTls}, "x.so"),
              HasSubstr("x.so is 7.60.0, which is too old"));
  EXPECT_THAT(problem_of({0, "8.1.0", 0x080100, "", ~kWithTls}, "x.so"),
              HasSubstr("x.so (8.1.0) has no TLS"));
}

}  // namespace
}  // namespace kv_offload::s3::curl
