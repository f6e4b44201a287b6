// SPDX-License-Identifier: Apache-2.0
#include "backends/s3/client.h"

#include <sys/socket.h>

#include <algorithm>
#include <ctime>
#include <random>
#include <utility>

#include "backends/s3/libcurl.h"
#include "backends/s3/signature.h"
#include "backends/s3/transfer.h"
#include "base/no_sigpipe.h"

namespace kv_offload::s3 {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr unsigned kMostTries = 5;
constexpr Nanos kFirstPause{milliseconds(50)};

std::string base_of(const Bucket& bucket) {
  if (!bucket.endpoint.empty()) return bucket.endpoint;
  const bool china = bucket.region.starts_with("cn-");
  return fmt::format("https://s3.{}.amazonaws.com{}", bucket.region, china ? ".cn" : "");
}

// The URL of a request, in the parts that are signed.
struct Target {
  std::string scheme, host, path;  // "https://", "host[:port]" as sent, "/..."
};

Target target_of(const Bucket& bucket, const std::string& key) {
  const std::string base = base_of(bucket);
  const std::size_t at = base.find("://") + 3;
  Target target{base.substr(0, at), base.substr(at), "/" + key};
  if (bucket.path_style) {
    target.path = fmt::format("/{}/{}", bucket.name, key);
  } else {
    target.host = bucket.name + "." + target.host;
  }
  return target;
}

std::string_view method_of(Verb verb) {
  switch (verb) {
    case Verb::kGet:
      return "GET";
    case Verb::kHead:
      return "HEAD";
    case Verb::kPut:
      return "PUT";
    case Verb::kDelete:
      return "DELETE";
  }
  return {};
}

// Without TLS the body's checksum is signed. Otherwise an eavesdropper could send other bytes under the same
// signature while it is valid.
std::string sum_of_body(const Request& request, const Bucket& bucket) {
  const bool with_tls = base_of(bucket).starts_with("https:");
  return request.verb == Verb::kPut && with_tls ? "UNSIGNED-PAYLOAD" : sha256_hex(request.from);
}

// Returns a random pause between half of it and all of it.
Nanos jittered(Nanos pause) {
  thread_local std::minstd_rand random{std::random_device{}()};
  return pause / 2 + Nanos(std::uniform_int_distribution<Nanos::rep>(0, pause.count() / 2)(random));
}

bool is_retryable(long status) {
  return status == 429 || status == 500 || status == 502 || status == 503 || status == 504;
}

int open_socket(void*, int, curl::Address* address) noexcept {
  return socket(address->family, address->socktype | SOCK_CLOEXEC, address->protocol);
}

const curl::Library& library() { return curl::loaded().library; }

// Splits a header line such as "If-Match: x" (Request::condition).
std::pair<std::string, std::string> header_of(const std::string& line) {
  const std::size_t colon = line.find(": ");
  std::string name = line.substr(0, colon);
  std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return std::tolower(c); });
  return {std::move(name), line.substr(colon + 2)};
}

struct FreeList {
  void operator()(curl::List* list) const { library().slist_free_all(list); }
};
using Headers = std::unique_ptr<curl::List, FreeList>;

void add(Headers* headers, const std::string& line) {
  curl::List* longer = library().slist_append(headers->get(), line.c_str());
  if (longer == nullptr) throw std::bad_alloc();
  (void)headers->release();
  headers->reset(longer);
}

}  // namespace

std::string address_of(const Bucket& bucket) {
  return fmt::format("s3://{} at {}", bucket.name, base_of(bucket));
}

std::string unavailable_reason() {
  if (can_sign()) return curl::loaded().problem;
  return "this build has no s3 tier: build it with OpenSSL's headers installed (libssl-dev, openssl-devel)";
}
std::string library_version() { return can_sign() ? curl::loaded().version : std::string(); }

struct Client::Handle {
  Handle() {
    if (easy == nullptr) throw std::bad_alloc();
  }
  ~Handle() {
    const NoSigpipe no_signal;  // TLS sends a close notification
    library().easy_cleanup(easy);
  }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
  curl::Easy* const easy = library().easy_init();
};

namespace {

template <typename Value>
void set(curl::Easy* easy, curl::Option option, Value value) {
  static_assert(std::is_same_v<Value, long> || std::is_pointer_v<Value>, "as libcurl reads it");
  // Either this libcurl does not know the option or it is out of memory. The request would not be the
  // intended one.
  if (const int done = library().easy_setopt(easy, option, value); done != curl::kOk) {
    throw_resource("libcurl refuses a setting: {}", library().easy_strerror(done));
  }
}

Keys keys_of(const Bucket& bucket) {
  std::optional<Keys> newer = bucket.newer_keys ? bucket.newer_keys->get() : std::nullopt;
  return newer ? *std::move(newer) : Keys{bucket.access_key, bucket.secret_key, bucket.session_token};
}

static_assert(sizeof(long) == sizeof(std::int64_t), "kInFileSize is given as a long");

void set_connection_options(curl::Easy* easy, const Bucket& bucket, milliseconds left) {
  // Makes the deadline also end a name lookup of the system; older versions cannot.
  (void)library().easy_setopt(easy, curl::kQuickExit, 1L);
  (void)library().easy_setopt(easy, curl::kUploadBufferSize, 2L << 20);
  set(easy, curl::kNoSignal, 1L);
  set(easy, curl::kMaxConnects, 1L);
  set(easy, curl::kProxy, "");
  set(easy, curl::kFollowLocation, 0L);
  set(easy, curl::kPathAsIs, 1L);
  set(easy, curl::kVerifyPeer, 1L);
  set(easy, curl::kVerifyHost, 2L);
  set(easy, curl::kHttpVersion, curl::kHttp11);
  set(easy, curl::kBufferSize, curl::kMaxReadSize);
  set(easy, curl::kTimeoutMs, static_cast<long>(left.count()));
  set(easy, curl::kConnectTimeoutMs, static_cast<long>(left.count()));
  set(easy, curl::kOpenSocketFunction, &open_socket);
  set(easy, curl::kProtocols, curl::kHttpAndHttps);
  if (bucket.ca_file.empty()) return;
  set(easy, curl::kCaInfo, bucket.ca_file.c_str());
  set(easy, curl::kCaPath, static_cast<const char*>(nullptr));  // trust no other CA of the system
}

void set_request_options(curl::Easy* easy, const Request& request, Transfer* transfer) {
  set(easy, curl::kHeaderFunction, &Transfer::on_header);
  set(easy, curl::kHeaderData, transfer);
  set(easy, curl::kWriteFunction, &Transfer::on_body);
  set(easy, curl::kWriteData, transfer);
  // On a kept-alive connection, libcurl itself would send the request a second time.
  if (request.once) set(easy, curl::kFreshConnect, 1L);
  if (request.verb == Verb::kHead) set(easy, curl::kNoBody, 1L);
  if (request.verb == Verb::kDelete) set(easy, curl::kCustomRequest, "DELETE");
  if (request.verb != Verb::kPut) return;
  long bytes = 0;  // curl_off_t on this platform
  for (const auto& piece : request.from) bytes += static_cast<long>(piece.size());
  set(easy, curl::kUpload, 1L);
  set(easy, curl::kInFileSize, bytes);
  set(easy, curl::kReadFunction, &Transfer::on_read);
  set(easy, curl::kReadData, transfer);
  set(easy, curl::kSeekFunction, &Transfer::on_seek);
  set(easy, curl::kSeekData, transfer);
}

Status failure(int result, Answer* answer) {
  if (result == curl::kTimedOut) {
    return Status::error(StatusKind::kTimeout, "the store did not answer in time");
  }
  answer->misconfigured = result == curl::kPeerFailed || result == curl::kPeerFailedOfOld ||
                          result == curl::kCaBadFile || result == curl::kUrlMalformat ||
                          result == curl::kUnsupportedProtocol;
  answer->lost = result == curl::kSendError || result == curl::kGotNothing;
  return Status::error(StatusKind::kIo,
                       fmt::format("no response from the store: {}", library().easy_strerror(result)));
}

}  // namespace

Client::Client(const Bucket& bucket, std::function<void(Nanos)> pause)
    : bucket_(bucket), pause_(std::move(pause)) {
  if (const std::string reason = unavailable_reason(); !reason.empty()) throw_resource("{}", reason);
}
Client::~Client() = default;

std::unique_ptr<Client::Handle> Client::take() {
  {
    const MutexLock lock(mutex_);
    if (!idle_.empty()) {
      auto handle = std::move(idle_.back());
      idle_.pop_back();
      return handle;
    }
  }
  return std::make_unique<Handle>();
}

void Client::give_back(std::unique_ptr<Handle> handle) {
  library().easy_reset(handle->easy);  // keeps the connections, but nothing of the request
  const MutexLock lock(mutex_);
  if (!closed_) idle_.push_back(std::move(handle));
}

void Client::stop() {
  const MutexLock lock(mutex_);
  stopped_ = true;
  changed_.notify_all();
}

void Client::close() {
  std::vector<std::unique_ptr<Handle>> idle;
  const MutexLock lock(mutex_);
  closed_ = stopped_ = true;
  idle.swap(idle_);
  changed_.notify_all();
}

bool Client::wait(Nanos time) {
  if (pause_) pause_(time);
  const auto until = steady_clock::now() + (pause_ ? Nanos(0) : time);
  const MutexLock lock(mutex_);
  while (!stopped_ && steady_clock::now() < until) changed_.wait_for(mutex_, until - steady_clock::now());
  return !stopped_;
}

Status Client::call(const Request& request, Deadline deadline, Answer* answer) {
  const std::string sum = sum_of_body(request, bucket_);
  Nanos pause = kFirstPause;
  for (unsigned tries = 1;; ++tries) {
    Nanos retry_after{0};
    Status status = call_once(request, sum, deadline, answer, &retry_after);
    const bool again = status ? is_retryable(answer->status) : answer->lost;
    if (!again || request.once || tries == kMostTries) return status;
    const Nanos time = std::max(jittered(pause), retry_after);
    if (steady_clock::now() + time >= deadline || !wait(time)) return status;
    pause *= 2;
  }
}

Status Client::call_once(const Request& request, const std::string& sum, Deadline deadline, Answer* answer,
                         Nanos* retry_after) {
  *answer = {};
  const auto left = std::chrono::duration_cast<milliseconds>(deadline - steady_clock::now());
  if (left <= milliseconds(0))
    return Status::error(StatusKind::kTimeout, "no time is left for a request to the store");
  const Target target = target_of(bucket_, request.key);
  HeaderMap signed_headers{{"host", target.host}};
  if (!request.condition.empty()) signed_headers.insert(header_of(request.condition));
  const ToSign to_sign{method_of(request.verb), target.path, request.query, sum, bucket_.region};
  if (!sign(to_sign, keys_of(bucket_), std::time(nullptr), &signed_headers)) {
    return Status::error(StatusKind::kIo, "OpenSSL cannot sign a request");
  }
  Headers headers;
  for (const auto& [name, value] : signed_headers) add(&headers, fmt::format("{}: {}", name, value));
  add(&headers, "Expect:");  // send a record without waiting for "100 Continue"
  Transfer transfer(request);
  std::unique_ptr<Handle> handle = take();
  curl::Easy* easy = handle->easy;
  set_connection_options(easy, bucket_, left);
  const std::string url = fmt::format("{}{}{}{}{}", target.scheme, target.host, target.path,
                                      request.query.empty() ? "" : "?", request.query);
  set(easy, curl::kUrl, url.c_str());
  set(easy, curl::kHttpHeader, headers.get());
  set_request_options(easy, request, &transfer);
  // With kNoSignal we must handle SIGPIPE, and libcurl before 7.87 writes TLS data with write(2).
  const NoSigpipe no_signal;
  const int result = library().easy_perform(easy);
  // A failure drops the connection, too.
  if (result != curl::kOk && !transfer.was_stopped()) return failure(result, answer);
  if (result == curl::kOk) give_back(std::move(handle));
  *retry_after = std::chrono::seconds(std::min<std::uint64_t>(transfer.retry_after_seconds(), 3600));
  return transfer.take(answer);
}

}  // namespace kv_offload::s3
