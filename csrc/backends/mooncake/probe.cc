// SPDX-License-Identifier: Apache-2.0
#include "backends/mooncake/probe.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "backends/mooncake/errors.h"
#include "tier/epoch_registry.h"

namespace kv_offload::mooncake {
namespace {

using std::chrono::steady_clock;

constexpr int kProbeRequests = 9;

double seconds_since(steady_clock::time_point start) {
  return std::chrono::duration<double>(steady_clock::now() - start).count();
}

class Prober {
 public:
  Prober(const ClientOptions& options, std::string place, const std::string& key_prefix,
         std::uint64_t record_bytes, Deadline until)
      : client_(options),
        place_(std::move(place)),
        name_(fmt::format("{}:probe:{}", key_prefix, EpochRegistry::new_name())),
        record_bytes_(record_bytes),
        until_(until) {
    const auto start = steady_clock::now();
    bool refused = false;
    const Status started = client_.wait_for_start(until_, &refused);
    if (refused) throw_invalid("mooncake store at {}: {}", place_, started.message());
    check(started);
    start_seconds_ = seconds_since(start);
    check(client_.take(record_bytes_, &channel_));
  }

  void ask(Probe* found) {
    std::vector<double> times;
    for (int i = 0; i < kProbeRequests; ++i) {
      const auto start = steady_clock::now();
      if (const std::int64_t code = call(Verb::kExist, name_); code < 0) check(refusal(code, text_));
      times.push_back(seconds_since(start));
    }
    std::sort(times.begin(), times.end());
    found->answer_seconds = times[kProbeRequests / 2];
    found->version = client_.version();
    found->start_seconds = start_seconds_;
  }

  void transfer(unsigned records, Probe* found) {
    const auto record = channel_->object().first(record_bytes_);
    std::fill(record.begin(), record.end(), std::byte{0x5a});
    unsigned written = 0, read = 0;
    auto start = steady_clock::now();
    // A slow store gets fewer records: time must be left to read them.
    const auto enough = start + (until_ - start) / 3;
    for (; written < records && (written == 0 || steady_clock::now() < enough); ++written) {
      const std::int64_t code = call(Verb::kPut, name(written));
      if (code < 0) found->write_refused = refusal(code, text_).message();
      if (code < 0) break;
    }
    const double writing = seconds_since(start);
    start = steady_clock::now();
    for (unsigned i = 0; i < written; ++i) {
      read += call(Verb::kGet, name(i)) == static_cast<std::int64_t>(record_bytes_);
    }
    const double reading = seconds_since(start);
    for (unsigned i = 0; i < written; ++i) (void)call(Verb::kRemove, name(i));
    if (!found->write_refused.empty()) return;
    if (read < written) {
      found->write_refused = "the store does not return the records that it accepted";
      return;
    }
    const double total = static_cast<double>(record_bytes_) * written;
    found->write_bytes_per_second = total / writing;
    found->read_bytes_per_second = total / reading;
  }

 private:
  std::string name(unsigned i) const { return fmt::format("{}-{}", name_, i); }
  void check(const Status& status) const {
    if (!status) throw_resource("mooncake {}: {}", place_, status.message());
  }
  std::int64_t call(Verb verb, const std::string& name) {
    Answer answer;
    check(channel_->call(verb, {&name, 1}, verb == Verb::kPut ? record_bytes_ : 0, until_, &answer));
    text_ = answer.text;
    return answer.result;
  }

  Client client_;
  const std::string place_, name_;
  const std::uint64_t record_bytes_;
  const Deadline until_;
  double start_seconds_ = 0;
  std::string text_;
  std::unique_ptr<Channel> channel_;
};

}  // namespace

Probe probe(const ClientOptions& options, const std::string& place, const std::string& key_prefix,
            std::uint64_t record_bytes, unsigned records, Nanos deadline) {
  Probe found;
  Prober prober(options, place, key_prefix, record_bytes, steady_clock::now() + deadline);
  prober.ask(&found);
  if (records > 0) prober.transfer(records, &found);
  return found;
}

}  // namespace kv_offload::mooncake
