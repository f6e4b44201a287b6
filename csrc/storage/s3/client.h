// Requests to a bucket of an S3 store, each within a time: signed here, transferred by libcurl, and the bytes
// of records go from and into the rows themselves.
//
// No redirect is followed, no proxy of the environment is used, certificates and names are always verified.
// What a store says in an error is never quoted but for its code: it repeats what was signed.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/status.h"
#include "base/thread_annotations.h"
#include "storage/opened_as_it_comes.h"

namespace kv_offload::s3 {

struct Keys {
  std::string access_key, secret_key, session_token;
};

// Keys that replace those of a bucket while it is in use. Any thread.
class NewerKeys {
 public:
  void set(Keys keys) EXCLUDES(mutex_) {
    const MutexLock lock(mutex_);
    keys_ = std::move(keys);
  }
  std::optional<Keys> get() const EXCLUDES(mutex_) {
    const MutexLock lock(mutex_);
    return keys_;
  }

 private:
  mutable Mutex mutex_;
  std::optional<Keys> keys_ GUARDED_BY(mutex_);
};

struct Bucket {
  std::string endpoint;  // "https://host[:port]"; empty: AWS's of the region
  std::string region = "us-east-1";
  std::string name;
  bool path_style = false;  // the bucket in the path, not in the host's name
  std::string ca_file;      // who may have signed the store's certificate; empty: the system's
  std::string access_key, secret_key, session_token;
  std::shared_ptr<NewerKeys> newer_keys = {};  // none: those above are used for ever
};
// "s3://bucket at https://host"; no credentials.
std::string address_of(const Bucket& bucket);
// Why no bucket can be used in this process: no OpenSSL when it was built, no libcurl here that will do.
// Empty: one can.
std::string unavailable_reason();
std::string library_version();  // "7.88.1 (/usr/lib/libcurl.so.4)"; empty without one

// A moment of real time by which a call has ended: what it waits for is a socket.
using Deadline = std::chrono::steady_clock::time_point;

enum class Verb : std::uint8_t { kGet, kHead, kPut, kDelete };

// Gets a body that has no place of its own, as it comes.
class BodySink {
 public:
  virtual ~BodySink() = default;
  virtual bool take(std::span<const std::byte> bytes) noexcept = 0;  // false: enough
};

struct Request {
  Verb verb = Verb::kGet;
  std::string key = {};                               // letters, digits and -_./ only: signed as it is
  std::vector<std::span<const std::byte>> from = {};  // kPut
  std::vector<std::span<std::byte>> into = {};        // kGet: what a body of status 200 fills
  FillObserver* observer = nullptr;                   // of `into`, and a body of status 200
  std::size_t least_bytes = SIZE_MAX;  // of that body, filling it from the front; default: all of `into`
  std::string condition = {};          // a header, such as "If-None-Match: *"
  bool once = false;           // sent once and no more: what it does must not be done a second time, later
  std::string query = {};      // as it is signed: names in order, each with a "=", values percent-encoded
  std::size_t text_bytes = 0;  // kGet, in place of `into`: a body of status 200 is text, of at most so many
  BodySink* sink = nullptr;    // kGet, in place of `into`, for a body of status 200
};

struct Answer {
  long status = 0;
  std::string code = {};  // <Code> of an error; empty where there is none, as of each HEAD
  std::string text = {};  // of status 200 to a kGet with text_bytes
  std::string etag = {};
  std::string region = {};  // where the bucket is, of an answer that says so
  // Of status 200 to a kGet: the body is longer than `into` or shorter than least_bytes, and `into` holds
  // nothing of use; or it is longer than text_bytes.
  bool wrong_length = false;
  std::uint64_t length = 0;  // of that body, as announced, or as far as it came
  bool told_length = false;  // of a body for a sink: it came whole
  bool versioned = false;    // the bucket keeps older versions
  // No answer at all:
  bool misconfigured = false;  // the store's certificate is not one to believe, or there is no such address
  bool lost = false;           // the connection ended before a byte of it
};

// What an answer that is not 2xx stands for. 404 is kNotFound, unless the bucket is missing.
Status refusal(const Answer& answer, const Bucket& bucket);
// The kinds that a start does not get over by waiting: credentials, permissions, no such bucket, another
// region.
bool is_setting(const Answer& answer);

// Any thread. Connections are kept alive, at most one for each thread that ever needed one at once.
class Client {
 public:
  // Throws ResourceError: unavailable_reason(). `pause` (for tests) is called
  // in place of waiting before a request is sent again.
  explicit Client(const Bucket& bucket, std::function<void(Nanos)> pause = {});
  ~Client();
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  // Ok: the store answered, whatever it said; a store that is overloaded or fails (429, 5xx) is asked again
  // while there is time. Not ok: no whole answer.
  Status call(const Request& request, Deadline deadline, Answer* answer) EXCLUDES(mutex_);
  const Bucket& bucket() const { return bucket_; }
  void stop() EXCLUDES(mutex_);   // nothing is asked again
  void close() EXCLUDES(mutex_);  // connections in use are closed when they come back

 private:
  struct Handle;

  Status call_once(const Request& request, const std::string& sum, Deadline deadline, Answer* answer,
                   Nanos* retry_after);
  bool wait(Nanos time) EXCLUDES(mutex_);  // false: stopped
  std::unique_ptr<Handle> take() EXCLUDES(mutex_);
  void give_back(std::unique_ptr<Handle> handle) EXCLUDES(mutex_);

  const Bucket bucket_;
  const std::function<void(Nanos)> pause_;
  Mutex mutex_;
  CondVar changed_;
  bool stopped_ GUARDED_BY(mutex_) = false, closed_ GUARDED_BY(mutex_) = false;
  std::vector<std::unique_ptr<Handle>> idle_ GUARDED_BY(mutex_);
};

}  // namespace kv_offload::s3
