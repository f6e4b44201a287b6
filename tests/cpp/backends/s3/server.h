// SPDX-License-Identifier: Apache-2.0
// A small S3 store for the tests: objects in memory, on a loopback port, with failures, hangs and wrong
// answers as configured. It checks each request's signature (AWS SigV4) with its own code.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "backends/s3/client.h"
#include "tier/loopback_server.h"

namespace kv_offload::testing {

struct S3Message {
  std::string method, path, body;
  std::map<std::string, std::string> headers;  // names in lower case
};

class S3Server {
 public:
  enum class Verb { kRead, kWrite, kLocate, kRemove, kEpoch, kList, kOther };
  static constexpr Verb kVerbs[] = {Verb::kRead,  Verb::kWrite, Verb::kLocate, Verb::kRemove,
                                    Verb::kEpoch, Verb::kList,  Verb::kOther};

  S3Server();
  ~S3Server() { kill(); }
  S3Server(const S3Server&) = delete;
  S3Server& operator=(const S3Server&) = delete;

  s3::Bucket address() const;
  void kill();   // ends all connections and drops all objects
  void start();  // starts again at the previous address
  static constexpr const char* kSecret = "secret-never-shown";

  // ---- objects, without a request
  std::vector<std::string> keys() const;  // names of records
  std::string get(const std::string& key) const;
  void set(const std::string& key, const std::string& value);
  bool remove(const std::string& key);
  bool has(const std::string& key) const;

  // ---- faults of requests
  Faults<Verb> faults;
  void answer(Verb verb, std::string text, int times = 1 << 30);  // sends these bytes and executes nothing
  void answer_after(Verb verb, std::string text, int times);  // executes the request and sends these bytes
  void ignore_conditions(bool ignored);
  void keep_versions(bool kept);   // answers report versions; older versions are not kept
  void list_as_it_is(bool plain);  // listed names are not encoded, even on request
  int connections() const;
  std::size_t wrong_signatures() const;
  S3Message last(Verb verb) const;

 private:
  struct Lie {
    std::string text;
    int times = 0;
    bool done = false;
  };
  void serve(int client);
  bool answer_one(int client, const S3Message& message);
  // Returns the answer; *more: whether the connection continues. Caller must hold the lock.
  std::string answer_to(const S3Message& message, bool* more);
  std::string act(const S3Message& message);  // caller must hold the lock
  std::string list(std::string_view query) const;
  static Verb verb_of(const S3Message& message);

  std::uint16_t port_ = 0;
  mutable std::mutex mutex_;
  std::map<std::string, std::string> objects_;
  std::map<Verb, Lie> lies_;
  std::map<Verb, S3Message> last_;
  std::size_t wrong_signatures_ = 0;
  bool ignores_conditions_ = false, keeps_versions_ = false, lists_plainly_ = false;
  std::unique_ptr<Acceptor> acceptor_;  // last: its threads use the others; null: killed
};

}  // namespace kv_offload::testing
