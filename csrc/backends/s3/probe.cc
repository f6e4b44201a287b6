// SPDX-License-Identifier: Apache-2.0
#include "backends/s3/probe.h"

#include <algorithm>
#include <chrono>
#include <vector>

#include "base/aligned_buffer.h"
#include "tier/epoch_registry.h"

namespace kv_offload::s3 {
namespace {

using std::chrono::steady_clock;

constexpr int kProbeRequests = 9;

double seconds_since(steady_clock::time_point start) {
  return std::chrono::duration<double>(steady_clock::now() - start).count();
}

class Prober {
 public:
  Prober(const Bucket& bucket, std::string prefix, Deadline until)
      : client_(bucket), prefix_(std::move(prefix)), until_(until) {}

  // Requests an object that need not exist, with GET, because a HEAD response carries no error code.
  void ask(Probe* found) {
    std::vector<double> times;
    for (int i = 0; i < kProbeRequests; ++i) {
      const auto start = steady_clock::now();
      const Answer answer = call({.verb = Verb::kGet, .key = prefix_ + "/conditions"});
      times.push_back(seconds_since(start));
      if (answer.status != 200 && refusal(answer, client_.bucket()).kind() != StatusKind::kNotFound) {
        const Status status = refusal(answer, client_.bucket());
        if (is_configuration_error(answer))
          throw_invalid("{}: {}", address_of(client_.bucket()), status.message());
        check(status);
      }
    }
    std::sort(times.begin(), times.end());
    found->answer_seconds = times[kProbeRequests / 2];
  }

  void transfer(std::uint64_t bytes, unsigned records, Probe* found) {
    const AlignedBuffer record(bytes), back(bytes);
    std::fill(record.span().begin(), record.span().end(), std::byte{0x5a});
    unsigned written = 0;
    auto start = steady_clock::now();
    // A slow store gets fewer records: time must be left to read them.
    const auto enough = start + (until_ - start) / 3;
    for (; written < records && (written == 0 || steady_clock::now() < enough); ++written) {
      Request put{.verb = Verb::kPut, .key = key(written)};
      put.from.emplace_back(record.span());
      if (const Answer answer = call(put); answer.status / 100 != 2) {
        found->write_refused = refusal(answer, client_.bucket()).message();
        break;
      }
    }
    const double writing = seconds_since(start);
    start = steady_clock::now();
    bool all = true;
    for (unsigned i = 0; i < written; ++i) {
      Request get{.verb = Verb::kGet, .key = key(i)};
      get.into.emplace_back(back.span());
      const Answer answer = call(get);
      all &= answer.status == 200 && !answer.wrong_length;
    }
    const double reading = seconds_since(start);
    for (unsigned i = 0; i < written; ++i) (void)call({.verb = Verb::kDelete, .key = key(i)});
    if (!found->write_refused.empty()) return;
    if (!all) {
      found->write_refused = "the store does not return the records that it accepted";
      return;
    }
    found->records = written;
    const double total = static_cast<double>(bytes) * written;
    found->write_bytes_per_second = total / writing;
    found->read_bytes_per_second = total / reading;
  }

 private:
  std::string key(unsigned i) const { return fmt::format("{}/probe/{}-{}", prefix_, name_, i); }
  void check(const Status& status) const {
    if (!status) throw_resource("{}: {}", address_of(client_.bucket()), status.message());
  }
  Answer call(const Request& request) {
    Answer answer;
    check(client_.call(request, until_, &answer));
    return answer;
  }

  Client client_;
  const std::string prefix_, name_ = EpochRegistry::new_name();  // unique
  const Deadline until_;
};

}  // namespace

Probe probe(const Bucket& bucket, const std::string& prefix, std::uint64_t record_bytes, unsigned records,
            Nanos deadline) {
  Probe found;
  Prober prober(bucket, prefix, steady_clock::now() + deadline);
  prober.ask(&found);
  if (records > 0) prober.transfer(record_bytes, records, &found);
  return found;
}

Answer ask_bucket(const Bucket& bucket, const std::string& query, Nanos deadline) {
  Client client(bucket);
  Answer answer;
  const Request ask{.verb = Verb::kGet, .query = query, .text_bytes = 65536};
  const Status status = client.call(ask, steady_clock::now() + deadline, &answer);
  if (!status) throw_resource("{}: {}", address_of(bucket), status.message());
  if (answer.wrong_length) throw_resource("{}: the response is too long", address_of(bucket));
  return answer;
}

}  // namespace kv_offload::s3
