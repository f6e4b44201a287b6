// SPDX-License-Identifier: Apache-2.0
// Requests to a bucket of an S3 store, each within a deadline. We sign them; libcurl transfers them. Record
// bytes move directly between libcurl and the host memory rows.
//
// Follows no redirects, ignores proxy environment variables, and always verifies certificates and names.
// Error messages quote only the error code of a response: its body repeats what was signed.
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
#include "record/streaming_record_reader.h"

namespace kv_offload::s3 {

struct Keys {
  std::string access_key, secret_key, session_token;
};

// Credentials that replace those of a bucket while it is in use. Thread-safe.
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
  std::string endpoint;  // "https://host[:port]"; empty: the AWS endpoint of the region
  std::string region = "us-east-1";
  std::string name;
  bool path_style = false;  // the bucket is part of the path, not of the host name
  std::string ca_file;      // CA certificates to trust; empty: the system's
  std::string access_key, secret_key, session_token;
  std::shared_ptr<NewerKeys> newer_keys = {};  // null: the credentials above never change
};
// Returns "s3://bucket at https://host", without credentials.
std::string address_of(const Bucket& bucket);
// Returns why this process cannot use a bucket: built without OpenSSL, or no suitable libcurl on this system.
// Empty if it can.
std::string unavailable_reason();
std::string library_version();  // "7.88.1 (/usr/lib/libcurl.so.4)"; empty without libcurl

// The real time by which a call must end. Calls wait for sockets, so this is not engine time.
using Deadline = std::chrono::steady_clock::time_point;

enum class Verb : std::uint8_t { kGet, kHead, kPut, kDelete };

// Receives a response body piece by piece, instead of `into`.
class BodySink {
 public:
  virtual ~BodySink() = default;
  virtual bool take(std::span<const std::byte> bytes) noexcept = 0;  // false: stop the transfer
};

struct Request {
  Verb verb = Verb::kGet;
  std::string key = {};                               // letters, digits and -_./ only: signed unencoded
  std::vector<std::span<const std::byte>> from = {};  // kPut
  std::vector<std::span<std::byte>> into = {};        // kGet: the buffers for the body of a 200 response
  ReadProgressSink* observer = nullptr;               // called for `into`, with the body of a 200 response
  // Minimum length of that body, which fills `into` from the front; default: all of `into`.
  std::size_t least_bytes = SIZE_MAX;
  std::string condition = {};  // a header, such as "If-None-Match: *"
  bool once = false;           // sent at most once: a late repetition would do harm
  std::string query = {};      // as signed: names in order, each with a "=", values percent-encoded
  // kGet, instead of `into`: the body of a 200 response is text of at most this many bytes.
  std::size_t text_bytes = 0;
  BodySink* sink = nullptr;  // kGet, instead of `into`: receives the body of a 200 response
};

struct Answer {
  long status = 0;
  std::string code = {};  // <Code> of an error; empty if there is none, as for every HEAD
  std::string text = {};  // the body of a 200 response to a kGet with text_bytes
  std::string etag = {};
  std::string region = {};  // the bucket's region, if the response has it
  // For a 200 response to a kGet: the body is longer than `into` or shorter than least_bytes, and `into`
  // holds nothing usable; or the body is longer than text_bytes.
  bool wrong_length = false;
  std::uint64_t length = 0;  // body length: announced, or else received so far
  bool has_length = false;   // for a sink: the response says where its body ends, by a length or as chunks
  bool versioned = false;    // the bucket keeps older versions
  // The next two are set only if there is no response at all. misconfigured: the certificate is not trusted,
  // ca_file is unusable, or the address is invalid.
  bool misconfigured = false;
  bool lost = false;  // the connection ended before the first response byte
};

// Returns the status for a response other than 2xx. 404 is kNotFound, unless the bucket is missing.
Status refusal(const Answer& answer, const Bucket& bucket);
// True for errors that waiting does not fix at startup: credentials, permissions, a missing bucket, another
// region.
bool is_configuration_error(const Answer& answer);

// Thread-safe. Keeps idle connections open; the pool grows to the largest number of connections in use at
// once.
class Client {
 public:
  // Throws ResourceError with unavailable_reason(). Tests pass `pause`, which is called instead of waiting
  // before a retry.
  explicit Client(const Bucket& bucket, std::function<void(Nanos)> pause = {});
  ~Client();
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  // Ok: the store responded with any status. Responses that mean overload or failure (429, 5xx) are retried
  // while there is time. Not ok: no complete response.
  Status call(const Request& request, Deadline deadline, Answer* answer) EXCLUDES(mutex_);
  const Bucket& bucket() const { return bucket_; }
  void stop() EXCLUDES(mutex_);   // no more retries
  void close() EXCLUDES(mutex_);  // connections in use are closed when they are given back

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
