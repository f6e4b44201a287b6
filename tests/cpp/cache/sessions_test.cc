// SPDX-License-Identifier: Apache-2.0
#include "cache/sessions.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "cache/parts.h"
#include "out_of_memory.h"

namespace kv_offload {
namespace {

using ::testing::ElementsAre;

constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr double kNow = 100;
constexpr std::uint32_t kRed = 7, kBlue = 8;  // families
constexpr SessionId kA{1, 1}, kB{1, 2}, kC{1, 3};

Hint resume(double seconds, SessionId target = {}) { return {HintType::kResume, target, {}, seconds}; }
Hint release(SessionId target = {}, SessionId trunk = {}) { return {HintType::kRelease, target, trunk, 0}; }
Hint supersede(SessionId target = {}) { return {HintType::kSupersede, target, {}, 0}; }

// Sessions on real requests and stores. Time stands at kNow until a test moves it.
class SessionsTest : public ::testing::Test {
 protected:
  struct Parts : RequestParts {
    explicit Parts(PartsOptions options)
        : RequestParts(std::move(options)),
          stores({groups, chunks, key_history, tickets, costs, row_provider, write_back, requests, metrics}),
          sessions({groups, chunks, clock}, this->options, 8 * kPageBytes) {
      clock.advance(std::chrono::duration_cast<Nanos>(std::chrono::duration<double>(kNow)) - clock.now());
    }
    StorePath stores;
    Sessions sessions;
  };

  void make(PartsOptions options) { parts_ = std::make_unique<Parts>(std::move(options)); }
  Parts& parts() {
    if (!parts_) make(options());
    return *parts_;
  }
  static PartsOptions options() {
    PartsOptions made;
    made.rows = 64;
    made.cache.full_attention = {true};
    return made;
  }
  static std::vector<ChunkKey> keys(const Names& names, std::uint32_t group = 0) {
    std::vector<ChunkKey> result;
    for (const auto& name : names) result.push_back(key_of(name, group));
    return result;
  }

  // A request of a family that computes this prompt and stores it.
  RequestHandle begin(std::uint32_t family, const Names& prompt, std::uint32_t group = 0) {
    const RequestHandle request = parts().requests.begin({.family = family});
    if (look_up_first_) parts().requests.lookup(request, key_of(prompt.front(), group));
    store(request, prompt, group);
    return request;
  }
  void store(RequestHandle request, const Names& prompt, std::uint32_t group = 0) {
    const auto all = keys(prompt, group);
    const StoreGrant grant = parts().stores.prepare(request, all, {});
    if (grant.transfer.ticket == kNoTicket) return;
    parts().report(grant.transfer.ticket);
    parts().stores.complete(all, true);
  }
  std::vector<HintOutcome> end(RequestHandle request, SessionId session, const std::vector<Hint>& hints,
                               std::uint64_t client = 0) {
    const auto outcomes = parts().sessions.end_turn({session, client}, parts().requests.at(request), hints);
    parts().requests.end(request);
    return outcomes;
  }
  std::vector<HintOutcome> turn(SessionId session, std::uint32_t family, const Names& prompt,
                                const std::vector<Hint>& hints = {}, std::uint64_t client = 0) {
    return end(begin(family, prompt), session, hints, client);
  }
  std::vector<HintOutcome> apply(const Hint& hint) {
    return parts().sessions.apply(std::span<const Hint>(&hint, 1));
  }
  // The expected return of each chunk.
  std::vector<double> returns(const Names& names, std::uint32_t group = 0) {
    std::vector<double> times;
    for (const ChunkKey& key : keys(names, group)) {
      const ChunkEntry* entry = parts().chunks.find(key);
      times.push_back(entry == nullptr ? std::nan("") : entry->returns_at);
    }
    return times;
  }

  bool look_up_first_ = false;  // as vLLM does
  std::unique_ptr<Parts> parts_;
};

TEST_F(SessionsTest, the_return_of_a_session_is_that_of_its_prompt) {
  EXPECT_THAT(turn(kA, kRed, {"a", "b", "c"}, {resume(20)}), ElementsAre(HintOutcome::kAccepted));
  EXPECT_THAT(returns({"a", "b", "c"}), ElementsAre(120, 120, 120));
}

TEST_F(SessionsTest, a_hint_that_is_repeated_without_a_turn_expects_the_session_later) {
  turn(kA, kRed, {"a"}, {resume(20)});
  for (int given = 1; given < 4; ++given) apply(resume(20, kA));
  parts().clock.advance(std::chrono::seconds(20));
  apply(resume(20, kA));
  EXPECT_THAT(returns({"a"}), ElementsAre(140)) << "it becomes overdue now";
  parts().clock.advance(std::chrono::seconds(1000));
  apply(resume(20, kA));
  EXPECT_THAT(returns({"a"}), ElementsAre(1120 + 400));
  apply(resume(500, kA));
  EXPECT_THAT(returns({"a"}), ElementsAre(1120 + 500)) << "a hint may expect it even later";
  turn(kA, kRed, {"a"}, {resume(20)});
  apply(resume(30, kA));
  EXPECT_THAT(returns({"a"}), ElementsAre(1120 + 30)) << "after a turn it counts from the beginning";
  for (int given = 2; given < 4; ++given) apply(resume(20, kA));
  parts().clock.advance(std::chrono::seconds(1020));
  apply(resume(20, kA));
  EXPECT_THAT(returns({"a"}), ElementsAre(2140 + 400)) << "it is overdue again";
}

TEST_F(SessionsTest, a_corrected_return_counts_as_given) {
  turn(kA, kRed, {"a"}, {resume(5)});
  apply(resume(300, kA));
  parts().clock.advance(std::chrono::seconds(250));
  apply(resume(10, kA));
  EXPECT_THAT(returns({"a"}), ElementsAre(350 + 10));
  parts().clock.advance(std::chrono::seconds(3600));
  apply(resume(1, kA));
  EXPECT_THAT(returns({"a"}), ElementsAre(3950 + 1)) << "after a silence, the client knows again";
}

TEST_F(SessionsTest, a_turn_without_hints_expects_nothing) {
  turn(kA, kRed, {"a", "b"});
  EXPECT_THAT(returns({"a", "b"}), ElementsAre(0, 0));
  EXPECT_EQ(parts().sessions.size(), 1u);
}

TEST_F(SessionsTest, the_next_use_ends_the_expectation) {
  turn(kA, kRed, {"a", "b"}, {resume(20)});
  const RequestHandle request = begin(kRed, {"a", "b", "c"});
  EXPECT_THAT(returns({"a", "b", "c"}), ElementsAre(0, 0, 0));
  end(request, kA, {resume(50)});
  EXPECT_THAT(returns({"a", "b", "c"}), ElementsAre(150, 150, 150));
}

TEST_F(SessionsTest, a_chunk_that_is_still_copied_gets_the_return_of_its_prompt) {
  const RequestHandle request = begin(kRed, {"a"});
  const auto last = keys({"b"});
  const StoreGrant grant = parts().stores.prepare(request, last, std::vector<std::uint32_t>{32});
  end(request, kA, {resume(20)});
  parts().report(grant.transfer.ticket);
  parts().stores.complete(last, true);
  EXPECT_THAT(returns({"a", "b"}), ElementsAre(120, 120));
  const Slot slot = parts().chunks.slot_of(parts().chunks.find(last[0]));
  EXPECT_EQ(parts().chunks.entry_info(slot).returns_at, 120);
}

TEST_F(SessionsTest, chunks_that_another_session_uses_are_unchanged) {
  turn(kA, kRed, {"s", "a"});
  turn(kB, kBlue, {"s", "b"});
  EXPECT_THAT(apply(release(kA)), ElementsAre(HintOutcome::kAccepted));
  EXPECT_THAT(returns({"s", "a", "b"}), ElementsAre(0, kNever, 0));
  turn(kA, kRed, {"s", "a"}, {resume(20)});  // "s" is shared for as long as it is here
  EXPECT_THAT(returns({"s", "a", "b"}), ElementsAre(0, 120, 0));
}

TEST_F(SessionsTest, chunks_of_requests_without_a_session_are_unchanged) {
  turn({}, 0, {"s", "x"});
  turn(kA, kRed, {"s", "a"}, {resume(20)});
  turn(kB, kRed, {"s", "b"}, {release()});
  EXPECT_THAT(returns({"s", "x", "a", "b"}), ElementsAre(0, 0, 120, kNever));
}

TEST_F(SessionsTest, a_chunk_before_one_that_another_session_loads_is_unchanged) {
  turn(kA, kRed, {"r", "s", "a"}, {resume(20)});
  // The device's prefix cache has "r", so the request loads "s" alone.
  const RequestHandle request = parts().requests.begin({.family = kBlue});
  const auto loaded = keys({"s"});
  const DeviceLoads::Begun load = parts().device_loads.begin(loaded, parts().requests.load_of(request));
  parts().requests.admit_load(request, loaded, load);
  EXPECT_THAT(returns({"r", "s", "a"}), ElementsAre(0, 0, 120));
  end(request, kB, {release()});
  EXPECT_THAT(returns({"r", "s", "a"}), ElementsAre(0, 0, 120));
}

TEST_F(SessionsTest, a_loaded_prompt_is_the_prompt_of_its_session) {
  turn(kA, kRed, {"a", "b"});
  const RequestHandle request = parts().requests.begin({.family = kRed});
  const auto loaded = keys({"a", "b"});
  const DeviceLoads::Begun load = parts().device_loads.begin(loaded, parts().requests.load_of(request));
  parts().requests.admit_load(request, loaded, load);
  end(request, kA, {resume(20)});
  EXPECT_THAT(returns({"a", "b"}), ElementsAre(120, 120));
}

TEST_F(SessionsTest, a_released_session_does_not_return_and_is_forgotten) {
  turn(kA, kRed, {"a", "b"});
  EXPECT_THAT(apply(release(kA)), ElementsAre(HintOutcome::kAccepted));
  EXPECT_THAT(returns({"a", "b"}), ElementsAre(kNever, kNever));
  EXPECT_THAT(apply(resume(20, kA)), ElementsAre(HintOutcome::kMissing));
  EXPECT_EQ(parts().sessions.size(), 0u);
}

TEST_F(SessionsTest, the_last_turn_may_release_its_session) {
  turn(kA, kRed, {"a"});
  EXPECT_THAT(turn(kA, kRed, {"a", "b"}, {release()}), ElementsAre(HintOutcome::kAccepted));
  EXPECT_THAT(returns({"a", "b"}), ElementsAre(kNever, kNever));
  EXPECT_EQ(parts().sessions.size(), 0u);
}

TEST_F(SessionsTest, an_unknown_session_is_missing) {
  EXPECT_THAT(apply(resume(20, kA)), ElementsAre(HintOutcome::kMissing));
  EXPECT_THAT(apply(release(kA)), ElementsAre(HintOutcome::kMissing));
  EXPECT_THAT(turn(kB, kBlue, {"b"}, {supersede(kA), resume(1)}),
              ElementsAre(HintOutcome::kMissing, HintOutcome::kAccepted));
}

TEST_F(SessionsTest, a_prompt_that_was_not_stored_is_missing) {
  const RequestHandle request = parts().requests.begin({.family = kRed});
  EXPECT_THAT(end(request, kA, {resume(20)}), ElementsAre(HintOutcome::kMissing));
}

TEST_F(SessionsTest, a_superseded_prompt_keeps_the_chunks_that_the_new_one_uses) {
  turn(kA, kRed, {"a", "b", "c"}, {resume(20)});
  EXPECT_THAT(turn(kA, kRed, {"a", "x"}, {supersede()}), ElementsAre(HintOutcome::kAccepted));
  EXPECT_THAT(returns({"a", "b", "c", "x"}), ElementsAre(0, kNever, kNever, 0));
  EXPECT_THAT(turn(kA, kRed, {"a", "y"}, {resume(30), supersede()}),
              ElementsAre(HintOutcome::kAccepted, HintOutcome::kAccepted));
  EXPECT_THAT(returns({"a", "x", "y"}), ElementsAre(130, kNever, 130));
}

TEST_F(SessionsTest, a_released_branch_keeps_its_session) {
  turn(kA, kRed, {"a", "b"}, {resume(20)});
  turn(kB, kRed, {"a", "b", "x"}, {release({}, kA)});  // the branch
  EXPECT_THAT(returns({"a", "b", "x"}), ElementsAre(0, 0, kNever));
  turn(kC, kRed, {"a", "b", "y"});
  EXPECT_THAT(apply(release(kC, kA)), ElementsAre(HintOutcome::kAccepted));
  EXPECT_THAT(returns({"a", "b", "y"}), ElementsAre(0, 0, kNever));
  EXPECT_THAT(apply(release(kA)), ElementsAre(HintOutcome::kAccepted));
  EXPECT_THAT(returns({"a", "b"}), ElementsAre(kNever, kNever));
}

TEST_F(SessionsTest, odd_times_are_rejected) {
  EXPECT_THAT(turn(kA, kRed, {"a"}, {resume(std::nan("")), resume(-1)}),
              ElementsAre(HintOutcome::kRejected, HintOutcome::kRejected));
  EXPECT_THAT(returns({"a"}), ElementsAre(0));
  EXPECT_THAT(apply(supersede(kA)), ElementsAre(HintOutcome::kRejected));  // needs the new prompt
}

TEST_F(SessionsTest, an_evicted_chunk_is_skipped) {
  PartsOptions small = options();
  small.rows = 3;
  make(small);
  turn(kA, kRed, {"a", "b", "c"});
  turn({}, 0, {"x"});  // evicts one
  EXPECT_THAT(apply(release(kA)), ElementsAre(HintOutcome::kAccepted));
  const auto times = returns({"a", "b", "c"});
  EXPECT_EQ(std::count(times.begin(), times.end(), kNever), 2);
}

TEST_F(SessionsTest, a_windows_last_chunks_are_chunks_of_the_prompt) {
  PartsOptions two = options();
  two.shard_bytes = {300, 300};
  two.cache.full_attention = {true, false};
  make(two);
  const RequestHandle request = begin(kRed, {"a", "b"});
  Names window;
  for (int i = 0; i < 40; ++i) window.push_back(fmt::format("w{}", i));
  store(request, window, 1);
  end(request, kA, {resume(20)});
  EXPECT_THAT(returns({"a", "b"}), ElementsAre(120, 120));
  EXPECT_THAT(returns({"w24", "w39"}, 1), ElementsAre(120, 120));
}

TEST_F(SessionsTest, the_least_recent_session_is_forgotten_first) {
  PartsOptions few = options();
  few.cache.max_sessions = 2;
  make(few);
  turn(kA, kRed, {"a"}, {}, 1);
  turn(kB, kBlue, {"b"}, {}, 2);
  turn(kA, kRed, {"a"}, {}, 1);
  turn(kC, 9, {"c"}, {}, 3);
  EXPECT_EQ(parts().sessions.size(), 2u);
  EXPECT_THAT(apply(resume(1, kB)), ElementsAre(HintOutcome::kMissing));
  EXPECT_THAT(apply(resume(1, kA)), ElementsAre(HintOutcome::kAccepted));
  EXPECT_THAT(apply(resume(1, kC)), ElementsAre(HintOutcome::kAccepted));
}

TEST_F(SessionsTest, a_client_forgets_its_own_sessions_first) {
  PartsOptions few = options();
  few.cache.max_sessions = 4;
  make(few);
  turn(kA, kRed, {"a"}, {}, 1);
  for (std::uint64_t i = 0; i < 10; ++i) turn({9, i}, kBlue, {fmt::format("b{}", i)}, {}, 2);
  EXPECT_EQ(parts().sessions.size(), 3u);
  EXPECT_THAT(apply(resume(1, kA)), ElementsAre(HintOutcome::kAccepted));
  EXPECT_THAT(apply(resume(1, {9, 7})), ElementsAre(HintOutcome::kMissing));
  EXPECT_THAT(apply(resume(1, {9, 8})), ElementsAre(HintOutcome::kAccepted));
}

TEST_F(SessionsTest, long_prompts_leave_room_for_fewer_sessions) {
  PartsOptions small = options();
  small.rows = 3;
  make(small);  // at most six chunk ids
  turn(kA, kRed, {"a", "b", "c"}, {}, 1);
  turn(kB, kRed, {"a", "b", "c"}, {}, 2);
  EXPECT_EQ(parts().sessions.size(), 2u);
  turn(kC, kRed, {"a"}, {}, 3);
  EXPECT_EQ(parts().sessions.size(), 2u);
  EXPECT_THAT(apply(resume(1, kA)), ElementsAre(HintOutcome::kMissing));
}

TEST_F(SessionsTest, a_retained_prompt_is_retained_until_the_next_turn_ends) {
  const auto priority = [&](const char* name) { return parts().chunks.find(key_of(name))->priority; };
  EXPECT_THAT(turn(kA, kRed, {"a", "b"}, {{HintType::kRetain, {}, {}, 60}}),
              ElementsAre(HintOutcome::kAccepted));
  EXPECT_EQ(priority("b"), 2);
  turn(kA, kRed, {"a", "x"});  // does not use "b"
  EXPECT_EQ(priority("a"), 0);
  EXPECT_EQ(priority("b"), 0);
}

TEST_F(SessionsTest, a_released_or_forgotten_session_is_not_pinned) {
  PartsOptions few = options();
  few.cache.max_sessions = 2;
  make(few);
  const Hint pin{HintType::kPin, {}, {}, 60};
  turn(kA, kRed, {"a", "b"}, {pin}, 1);
  EXPECT_EQ(parts().sessions.pinned_bytes(), 2 * kPageBytes);
  turn(kA, kRed, {"a"}, {}, 1);  // pins outlive the turn
  EXPECT_EQ(parts().sessions.pinned_bytes(), 2 * kPageBytes);
  apply(release(kA));
  EXPECT_EQ(parts().sessions.pinned_bytes(), 0u);
  turn(kA, kRed, {"a"}, {pin}, 1);
  turn(kB, kBlue, {"x"}, {pin}, 2);
  EXPECT_EQ(parts().sessions.pinned_bytes(), 2 * kPageBytes);
  turn(kC, kBlue, {"y"}, {}, 3);  // forgets kA
  EXPECT_EQ(parts().sessions.pinned_bytes(), kPageBytes);
}

TEST_F(SessionsTest, a_hint_about_another_session_may_pin_it) {
  turn(kA, kRed, {"a", "b"});
  EXPECT_THAT(apply({HintType::kPin, kA, {}, 60}), ElementsAre(HintOutcome::kAccepted));
  EXPECT_EQ(parts().sessions.pinned_bytes(), 2 * kPageBytes);
  EXPECT_THAT(turn({}, kRed, {"a"}, {{HintType::kPin, {}, {}, 60}}), ElementsAre(HintOutcome::kRejected));
}

TEST_F(SessionsTest, the_hints_of_one_call_name_a_bounded_number_of_chunks) {
  PartsOptions large = options();
  large.rows = Sessions::kMaxNamed;
  make(large);
  Names prompt;
  for (std::uint64_t i = 0; i <= Sessions::kMaxNamed / 2; ++i) prompt.push_back(fmt::format("c{}", i));
  turn(kB, kBlue, {"b"});
  const std::vector<Hint> hints{resume(20), resume(30), release()};
  EXPECT_THAT(turn(kA, kRed, prompt, hints),
              ElementsAre(HintOutcome::kAccepted, HintOutcome::kRejected, HintOutcome::kRejected));
  EXPECT_THAT(returns({prompt.back()}), ElementsAre(120));
  EXPECT_EQ(parts().sessions.size(), 2u);  // a rejected release forgets nothing
  EXPECT_THAT(turn(kA, kRed, prompt, {supersede(), resume(20)}),
              ElementsAre(HintOutcome::kAccepted, HintOutcome::kRejected));
  const std::vector<Hint> others{release(kA), release(kA), resume(20, kB)};
  EXPECT_THAT(parts().sessions.apply(others),
              ElementsAre(HintOutcome::kAccepted, HintOutcome::kMissing, HintOutcome::kAccepted));
}

TEST_F(SessionsTest, a_reset_forgets_all_sessions) {
  turn(kA, kRed, {"a"});
  parts().sessions.forget();
  EXPECT_THAT(apply(resume(1, kA)), ElementsAre(HintOutcome::kMissing));
  turn(kA, kRed, {"a"});
  EXPECT_EQ(parts().sessions.size(), 1u);
}

TEST_F(SessionsTest, a_hint_applies_to_the_rest_of_a_prompt_whose_end_was_evicted) {
  const RequestHandle request = begin(kRed, {"a", "b", "c"});
  parts().finish();  // the writes to the tier
  parts().chunks.discard(parts().chunks.slot_of(parts().chunks.find(key_of("c"))));
  EXPECT_THAT(end(request, kA, {resume(20)}), ElementsAre(HintOutcome::kAccepted));
  EXPECT_THAT(returns({"a", "b"}), ElementsAre(120, 120));
}

// Pairs of sessions return in the opposite order of their hints.
TEST_F(SessionsTest, hints_that_turn_out_wrong_are_rejected_for_that_client_only) {
  const std::uint64_t wrong = 1, other = 2;
  for (int round = 0; round < 100; ++round) {
    const bool is_late = round % 2 == 0;
    turn(kA, kRed, {"a"}, {resume(is_late ? 10 : 100)}, wrong);
    parts().clock.advance(std::chrono::seconds(is_late ? 100 : 10));
    look_up_first_ = true;
  }
  EXPECT_FALSE(parts().sessions.is_trusted(wrong));
  EXPECT_TRUE(parts().sessions.is_trusted(other));
  EXPECT_THAT(turn(kA, kRed, {"a"}, {resume(10)}, wrong), ElementsAre(HintOutcome::kRejected));
  EXPECT_THAT(returns({"a"}), ElementsAre(0));
  EXPECT_THAT(turn(kB, kBlue, {"b"}, {resume(10)}, other), ElementsAre(HintOutcome::kAccepted));
}

TEST_F(SessionsTest, a_request_that_carries_its_return_marks_its_chunks_while_it_runs) {
  turn({}, 0, {"s"});
  RequestOptions carried{.family = kRed};
  carried.returns_in = 30;
  const RequestHandle request = parts().requests.begin(carried);
  parts().chunks.set_now(kNow);
  store(request, {"s", "a", "b"});
  EXPECT_THAT(returns({"s", "a", "b"}), ElementsAre(0, 130, 130));
  end(request, kA, {resume(50)});
  EXPECT_THAT(returns({"s", "a", "b"}), ElementsAre(0, 150, 150));
}

TEST_F(SessionsTest, a_turn_that_runs_out_of_memory_is_remembered_or_not) {
  PartsOptions two = options();
  two.cache.max_sessions = 2;
  make(two);
  const RequestHandle request = begin(kRed, {"a", "b"});
  const auto end_turn = [&] { (void)parts().sessions.end_turn({kA, 1}, parts().requests.at(request), {}); };
  const auto check = [&] {
    turn(kB, kBlue, {"c"}, {}, 2);
    turn(kC, kBlue, {"d"}, {}, 3);
    EXPECT_EQ(parts().sessions.size(), 2u);
    apply(release(kB));
    apply(release(kC));
    EXPECT_EQ(parts().sessions.size(), 0u);
  };
  EXPECT_GT(testing::fail_each_allocation(end_turn, check), 3u);
  EXPECT_EQ(parts().sessions.size(), 1u);
  EXPECT_GT(testing::fail_each_allocation(end_turn, [] {}), 0u) << "its second turn";
  check();
}

}  // namespace
}  // namespace kv_offload
