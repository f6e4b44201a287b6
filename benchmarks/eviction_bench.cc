// SPDX-License-Identifier: Apache-2.0
// How much time does a policy take with many chunks? Nanoseconds of one eviction
// (victim, erase) together with its insert, of an access, and of a hint: the median and
// the maximum, for every policy, without hints and with hints about the return of half
// of the prompts. The baseline is lru without hints. One JSON object per line.
//
//   eviction_bench [CHUNKS ...]        default: 10000 1000000
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <random>
#include <vector>

#include "policy/eviction_policy.h"

namespace kv_offload {
namespace {

constexpr std::uint32_t kPrompt = 100;  // chunks per request

class Bench {
 public:
  Bench(const std::string& name, std::uint32_t chunks, bool hints)
      : name_(name), chunks_(chunks), hints_(hints), policy_(make_eviction_policy(name)), ids_(chunks) {
    if (hints_) policy_->set_now(0);
  }

  void run() {
    for (Slot slot = 0; slot < chunks_; slot += kPrompt) store(slot);
    for (std::uint32_t turn = 0; turn < chunks_ / kPrompt; ++turn) serve(nullptr, nullptr, nullptr);
    std::vector<double> evictions, accesses, hints;
    for (int turn = 0; turn < 4000; ++turn) serve(&evictions, &accesses, &hints);
    print("evict and insert", evictions);
    print("access", accesses);
    if (hints_) print("hint", hints);
  }

 private:
  static double now() {
    return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }
  void insert(Slot slot, ChunkId parent) {
    ids_[slot] = (++last_id_ * 0x9E3779B97F4A7C15ull) | 1;
    policy_->insert(slot, {.id = ids_[slot], .parent = parent, .request = request_});
    policy_->set_recorded(slot, ids_[slot] >> 40 & 1);  // by a tier, half of them
  }
  void store(Slot first) {
    ++request_;
    ChunkId parent = 0;
    for (Slot i = 0; i < kPrompt && first + i < chunks_; ++i) {
      insert(first + i, parent);
      parent = ids_[first + i];
    }
    for (Slot i = 0; i < kPrompt && first + i < chunks_; ++i) hint(first + i, nullptr);
  }
  // The prompts of even requests return, in up to ten minutes.
  void hint(Slot slot, std::vector<double>* hints) {
    if (!hints_ || request_ % 2 == 1) return;
    const double returns_at = seconds_ + 1 + static_cast<double>(request_ * 2'654'435'761u % 600);
    const double begin = now();
    policy_->set_return(slot, returns_at, ids_[slot]);
    if (hints != nullptr) hints->push_back(now() - begin);
  }
  // One prompt that hits 100 chunks somewhere, and one new one of 1 to 100 chunks.
  void serve(std::vector<double>* evictions, std::vector<double>* accesses, std::vector<double>* hints) {
    ++request_;
    if (hints_) policy_->set_now(seconds_ += 0.01);
    const Slot hit = static_cast<Slot>(random_() % (chunks_ / kPrompt)) * kPrompt;
    for (Slot i = kPrompt; i-- > 0;) {
      const double begin = now();
      policy_->access(hit + i, {.id = ids_[hit + i], .request = request_});
      if (accesses != nullptr) accesses->push_back(now() - begin);
    }
    for (Slot i = 0; i < kPrompt; ++i) hint(hit + i, hints);
    ++request_;
    ChunkId parent = 0;
    for (auto left = 1 + random_() % kPrompt; left-- > 0;) {
      const double begin = now();
      const Slot victim = policy_->victim().value();
      policy_->erase(victim);
      insert(victim, parent);
      if (evictions != nullptr) evictions->push_back(now() - begin);
      hint(victim, hints);
      parent = ids_[victim];
    }
  }
  void print(const char* what, std::vector<double>& nanos) const {
    std::sort(nanos.begin(), nanos.end());
    fmt::print(
        "{{\"policy\": \"{}\", \"hints\": {}, \"what\": \"{}\", \"chunks\": {}, \"calls\": {}, "
        "\"median_ns\": {:.0f}, "
        "\"p999_ns\": {:.0f}, \"worst_ns\": {:.0f}}}\n",
        name_, hints_, what, chunks_, nanos.size(), nanos[nanos.size() / 2], nanos[nanos.size() * 999 / 1000],
        nanos.back());
    std::fflush(stdout);
  }

  std::string name_;
  std::uint32_t chunks_;
  bool hints_;
  double seconds_ = 0;
  std::unique_ptr<EvictionPolicy> policy_;
  std::vector<ChunkId> ids_;
  ChunkId last_id_ = 0;
  std::uint32_t request_ = 0;
  std::mt19937_64 random_{1};
};

}  // namespace
}  // namespace kv_offload

int main(int argc, char** argv) {
  std::vector<std::uint32_t> sizes;
  for (int i = 1; i < argc; ++i)
    sizes.push_back(static_cast<std::uint32_t>(std::strtoul(argv[i], nullptr, 10)));
  if (sizes.empty()) sizes = {10'000, 1'000'000};
  for (const std::uint32_t size : sizes) {
    for (const std::string& name : kv_offload::eviction_policy_names()) {
      for (const bool hints : {false, true}) kv_offload::Bench(name, size, hints).run();
    }
  }
  return 0;
}
