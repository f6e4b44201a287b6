// A small S3 store of the tests: objects in memory, on a loopback port, which fails, hangs and lies where it
// is told. It checks each request's signature (AWS SigV4) by code of its own.
#pragma once

#include <gtest/gtest.h>

#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "storage/s3/client.h"

namespace kv_offload::testing {

struct S3Message {
  std::string method, path, body;
  std::map<std::string, std::string> headers;  // names in lower case
};

class S3Server {
 public:
  enum class Verb { kRead, kWrite, kLocate, kRemove, kEpoch, kOther };

  S3Server();
  ~S3Server();
  S3Server(const S3Server&) = delete;
  S3Server& operator=(const S3Server&) = delete;

  s3::Bucket address() const;
  static constexpr const char* kSecret = "secret-never-shown";

  // ---- objects, without a request
  std::vector<std::string> keys() const;  // of records
  std::string get(const std::string& key) const;
  void set(const std::string& key, const std::string& value);
  bool remove(const std::string& key);
  bool has(const std::string& key) const;

  // ---- what happens to requests of this verb
  void fail(Verb verb, bool fails);        // ends their connection
  void cut(Verb verb, std::size_t after);  // answers are cut after so many bytes; 0: whole
  void answer(Verb verb, std::string text, int times = 1 << 30);  // these bytes, and nothing is done
  void answer_after(Verb verb, std::string text, int times);  // it is done, and these bytes are the answer
  void block(Verb verb);                                      // until release()
  void release();
  void wait_for_blocked(int connections);
  void ignore_conditions(bool ignored);
  int connections() const;
  std::size_t requests(Verb verb) const;  // that came
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
  std::string act(const S3Message& message);  // under the lock
  static Verb verb_of(const S3Message& message);

  int listener_ = -1;
  std::uint16_t port_ = 0;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::string> objects_;
  std::set<Verb> failing_, blocked_;
  std::map<Verb, std::size_t> cut_, seen_;
  std::map<Verb, Lie> lies_;
  std::map<Verb, S3Message> last_;
  std::size_t wrong_signatures_ = 0;
  bool ignores_conditions_ = false, closing_ = false;
  int waiting_ = 0;
  std::set<int> open_;
  std::vector<std::thread> threads_;
  std::thread accepting_;
};

}  // namespace kv_offload::testing
