// A small S3 store of the tests: objects in memory, on a loopback port, which fails, hangs and lies where it
// is told. It checks each request's signature (AWS SigV4) by code of its own.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "storage/loopback_server.h"
#include "storage/s3/client.h"

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
  void kill();   // connections end, and what was kept is gone
  void start();  // again, at the address of before
  static constexpr const char* kSecret = "secret-never-shown";

  // ---- objects, without a request
  std::vector<std::string> keys() const;  // of records
  std::string get(const std::string& key) const;
  void set(const std::string& key, const std::string& value);
  bool remove(const std::string& key);
  bool has(const std::string& key) const;

  // ---- what happens to requests
  Faults<Verb> faults;
  void answer(Verb verb, std::string text, int times = 1 << 30);  // these bytes, and nothing is done
  void answer_after(Verb verb, std::string text, int times);  // it is done, and these bytes are the answer
  void ignore_conditions(bool ignored);
  void keep_versions(bool kept);   // answers say so; older versions are not kept
  void list_as_it_is(bool plain);  // names in lists are not encoded, whatever was asked for
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
  // Under the lock: what is answered, and does the connection go on.
  std::string answer_to(const S3Message& message, bool* more);
  std::string act(const S3Message& message);  // under the lock
  std::string list(std::string_view query) const;
  static Verb verb_of(const S3Message& message);

  std::uint16_t port_ = 0;
  mutable std::mutex mutex_;
  std::map<std::string, std::string> objects_;
  std::map<Verb, Lie> lies_;
  std::map<Verb, S3Message> last_;
  std::size_t wrong_signatures_ = 0;
  bool ignores_conditions_ = false, keeps_versions_ = false, lists_plainly_ = false;
  std::unique_ptr<Acceptor> acceptor_;  // last: its threads use the others; none: killed
};

}  // namespace kv_offload::testing
