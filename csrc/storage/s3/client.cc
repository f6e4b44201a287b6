#include "storage/s3/client.h"

#ifdef KV_OFFLOAD_S3
#include <curl/curl.h>
#include <openssl/evp.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <random>
#include <utility>

#include "storage/s3/transfer.h"
#endif

namespace kv_offload::s3 {
namespace {

std::string base_of(const Bucket& bucket) {
  if (!bucket.endpoint.empty()) return bucket.endpoint;
  const bool china = bucket.region.starts_with("cn-");
  return fmt::format("https://s3.{}.amazonaws.com{}", bucket.region, china ? ".cn" : "");
}

}  // namespace

std::string address_of(const Bucket& bucket) {
  return fmt::format("s3://{} at {}", bucket.name, base_of(bucket));
}

#ifdef KV_OFFLOAD_S3

namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr unsigned kMostTries = 5;
constexpr Nanos kFirstPause{milliseconds(50)};

std::string url_of(const Bucket& bucket, const std::string& key) {
  std::string url = base_of(bucket);
  if (bucket.path_style) return fmt::format("{}/{}/{}", url, bucket.name, key);
  return url.insert(url.find("://") + 3, bucket.name + ".") + "/" + key;
}

std::string sha256_hex(std::span<const std::span<const std::byte>> pieces) {
  const std::unique_ptr<EVP_MD_CTX, void (*)(EVP_MD_CTX*)> context(EVP_MD_CTX_new(), &EVP_MD_CTX_free);
  std::array<unsigned char, EVP_MAX_MD_SIZE> sum{};
  unsigned length = 0;
  bool ok = context && EVP_DigestInit_ex(context.get(), EVP_sha256(), nullptr) == 1;
  for (const auto& piece : pieces) {
    ok = ok && EVP_DigestUpdate(context.get(), piece.data(), piece.size()) == 1;
  }
  if (!ok || EVP_DigestFinal_ex(context.get(), sum.data(), &length) != 1) return {};
  std::string text;
  for (unsigned i = 0; i < length; ++i) text += fmt::format("{:02x}", sum[i]);
  return text;
}

// Between half of it and all of it.
Nanos jittered(Nanos pause) {
  thread_local std::minstd_rand random{std::random_device{}()};
  return pause / 2 + Nanos(std::uniform_int_distribution<Nanos::rep>(0, pause.count() / 2)(random));
}

bool asks_again(long status) {
  return status == 429 || status == 500 || status == 502 || status == 503 || status == 504;
}

curl_socket_t open_socket(void*, curlsocktype, curl_sockaddr* address) noexcept {
  return socket(address->family, address->socktype | SOCK_CLOEXEC, address->protocol);
}

struct FreeList {
  void operator()(curl_slist* list) const { curl_slist_free_all(list); }
};
using Headers = std::unique_ptr<curl_slist, FreeList>;

void add(Headers* headers, const std::string& line) {
  curl_slist* longer = curl_slist_append(headers->get(), line.c_str());
  if (longer == nullptr) throw std::bad_alloc();
  (void)headers->release();
  headers->reset(longer);
}

}  // namespace

bool is_built() { return true; }

struct Client::Handle {
  Handle() {
    if (easy == nullptr) throw std::bad_alloc();
  }
  ~Handle() { curl_easy_cleanup(easy); }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
  CURL* const easy = curl_easy_init();
};

namespace {

template <typename Value>
void set(CURL* easy, CURLoption option, Value value) {
  // Not known to this libcurl, or no memory: what would follow is not what was asked for.
  if (const CURLcode done = curl_easy_setopt(easy, option, value); done != CURLE_OK) {
    throw_resource("libcurl refuses a setting: {}", curl_easy_strerror(done));
  }
}

Keys keys_of(const Bucket& bucket) {
  std::optional<Keys> newer = bucket.newer_keys ? bucket.newer_keys->get() : std::nullopt;
  return newer ? *std::move(newer) : Keys{bucket.access_key, bucket.secret_key, bucket.session_token};
}

void set_who(CURL* easy, const Bucket& bucket, const Keys& keys) {
  set(easy, CURLOPT_AWS_SIGV4, fmt::format("aws:amz:{}:s3", bucket.region).c_str());
  set(easy, CURLOPT_USERNAME, keys.access_key.c_str());
  set(easy, CURLOPT_PASSWORD, keys.secret_key.c_str());
  if (bucket.ca_file.empty()) return;
  set(easy, CURLOPT_CAINFO, bucket.ca_file.c_str());
  set(easy, CURLOPT_CAPATH, static_cast<const char*>(nullptr));  // and nobody else whom the system trusts
}

void set_how(CURL* easy, milliseconds left) {
  set(easy, CURLOPT_NOSIGNAL, 1L);
  set(easy, CURLOPT_QUICK_EXIT, 1L);  // at the deadline nothing waits for the system's look-up of a name
  set(easy, CURLOPT_MAXCONNECTS, 1L);
  set(easy, CURLOPT_PROXY, "");
  set(easy, CURLOPT_FOLLOWLOCATION, 0L);
  set(easy, CURLOPT_PATH_AS_IS, 1L);
  set(easy, CURLOPT_SSL_VERIFYPEER, 1L);
  set(easy, CURLOPT_SSL_VERIFYHOST, 2L);
  set(easy, CURLOPT_HTTP_VERSION, static_cast<long>(CURL_HTTP_VERSION_1_1));
  set(easy, CURLOPT_BUFFERSIZE, static_cast<long>(CURL_MAX_READ_SIZE));
  set(easy, CURLOPT_UPLOAD_BUFFERSIZE, 2L << 20);
  set(easy, CURLOPT_TIMEOUT_MS, static_cast<long>(left.count()));
  set(easy, CURLOPT_CONNECTTIMEOUT_MS, static_cast<long>(left.count()));
  set(easy, CURLOPT_OPENSOCKETFUNCTION, &open_socket);
  set(easy, CURLOPT_PROTOCOLS_STR, "http,https");
}

Status failure(CURLcode result, Answer* answer) {
  if (result == CURLE_OPERATION_TIMEDOUT) {
    return Status::error(StatusKind::kTimeout, "the store did not answer in time");
  }
  answer->misconfigured = result == CURLE_PEER_FAILED_VERIFICATION || result == CURLE_SSL_CACERT_BADFILE ||
                          result == CURLE_URL_MALFORMAT;
  answer->lost = result == CURLE_SEND_ERROR || result == CURLE_GOT_NOTHING;
  return Status::error(StatusKind::kIo,
                       fmt::format("no answer of the store: {}", curl_easy_strerror(result)));
}

}  // namespace

Client::Client(const Bucket& bucket, std::function<void(Nanos)> pause)
    : bucket_(bucket), pause_(std::move(pause)) {
  static const CURLcode started = curl_global_init(CURL_GLOBAL_DEFAULT);
  if (started != CURLE_OK) throw_resource("libcurl cannot be started: {}", curl_easy_strerror(started));
  const curl_version_info_data& loaded = *curl_version_info(CURLVERSION_NOW);
  if (loaded.version_num < 0x075700) {
    throw_resource("the s3 tier needs libcurl 7.87 or newer, for its signatures; this process has {}",
                   loaded.version);
  }
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
  curl_easy_reset(handle->easy);  // leaves its connections; nothing of the request is kept
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
  Nanos pause = kFirstPause;
  for (unsigned tries = 1;; ++tries) {
    Nanos retry_after{0};
    Status status = call_once(request, deadline, answer, &retry_after);
    const bool again = status ? asks_again(answer->status) : answer->lost;
    if (!again || request.once || tries == kMostTries) return status;
    const Nanos time = std::max(jittered(pause), retry_after);
    if (steady_clock::now() + time >= deadline || !wait(time)) return status;
    pause *= 2;
  }
}

Status Client::call_once(const Request& request, Deadline deadline, Answer* answer, Nanos* retry_after) {
  *answer = {};
  const std::string url = url_of(bucket_, request.key);
  const bool unsigned_body = request.verb == Verb::kPut && url.starts_with("https:");
  const std::string sum = unsigned_body ? "UNSIGNED-PAYLOAD" : sha256_hex(request.from);
  const auto left = std::chrono::duration_cast<milliseconds>(deadline - steady_clock::now());
  if (left <= milliseconds(0)) return Status::error(StatusKind::kTimeout, "no time is left to ask the store");
  Transfer transfer(request);
  std::unique_ptr<Handle> handle = take();
  CURL* easy = handle->easy;
  set_how(easy, left);
  const Keys keys = keys_of(bucket_);
  set_who(easy, bucket_, keys);
  set(easy, CURLOPT_URL, url.c_str());
  Headers headers;
  add(&headers, "x-amz-content-sha256: " + sum);
  if (!keys.session_token.empty()) add(&headers, "x-amz-security-token: " + keys.session_token);
  if (!request.condition.empty()) add(&headers, request.condition);
  // A record is sent without waiting for "100 Continue". Not by a header "Expect:": libcurl 7.88 signs it and
  // leaves it out.
  set(easy, CURLOPT_EXPECT_100_TIMEOUT_MS, 0L);
  set(easy, CURLOPT_HTTPHEADER, headers.get());
  set(easy, CURLOPT_HEADERFUNCTION, &Transfer::on_header);
  set(easy, CURLOPT_HEADERDATA, &transfer);
  set(easy, CURLOPT_WRITEFUNCTION, &Transfer::on_body);
  set(easy, CURLOPT_WRITEDATA, &transfer);
  // On a connection that was kept alive, libcurl itself would send it a second time.
  if (request.once) set(easy, CURLOPT_FRESH_CONNECT, 1L);
  if (request.verb == Verb::kHead) set(easy, CURLOPT_NOBODY, 1L);
  if (request.verb == Verb::kDelete) set(easy, CURLOPT_CUSTOMREQUEST, "DELETE");
  if (request.verb == Verb::kPut) {
    curl_off_t bytes = 0;
    for (const auto& piece : request.from) bytes += static_cast<curl_off_t>(piece.size());
    set(easy, CURLOPT_UPLOAD, 1L);
    set(easy, CURLOPT_INFILESIZE_LARGE, bytes);
    set(easy, CURLOPT_READFUNCTION, &Transfer::on_read);
    set(easy, CURLOPT_READDATA, &transfer);
    set(easy, CURLOPT_SEEKFUNCTION, &Transfer::on_seek);
    set(easy, CURLOPT_SEEKDATA, &transfer);
  }
  const CURLcode result = curl_easy_perform(easy);
  if (result != CURLE_OK && !transfer.was_stopped()) return failure(result, answer);  // with the connection
  if (result == CURLE_OK) give_back(std::move(handle));
  *retry_after = std::chrono::seconds(std::min<std::uint64_t>(transfer.retry_after_seconds(), 3600));
  return transfer.take(answer);
}

#else

bool is_built() { return false; }
struct Client::Handle {};
Client::Client(const Bucket& bucket, std::function<void(Nanos)>) : bucket_(bucket) {
  throw_resource(
      "this build has no s3 tier: build it where the headers of libcurl 7.87 or newer and of OpenSSL are "
      "(libcurl4-openssl-dev, libssl-dev)");
}
Client::~Client() = default;
Status Client::call(const Request&, Deadline, Answer*) {
  return Status::error(StatusKind::kUnavailable, "this build has no s3 tier");
}
void Client::stop() {}
void Client::close() {}

#endif

}  // namespace kv_offload::s3
