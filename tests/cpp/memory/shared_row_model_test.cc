// SPDX-License-Identifier: Apache-2.0
// Checks SharedRow exhaustively: one owner and two readers, every interleaving of their memory accesses, with
// store buffers as on x86 (a store that is not sequentially consistent becomes visible later), and readers
// that are killed between any two accesses. In a second model the owner is killed too, and another one takes
// the row over while a reader still has the old view.
//
// The checker runs the real code. An actor is replayed from its start with the results of its earlier
// accesses; the first access without a result is the actor's next step.
#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "memory/shared_row.h"
#include "test_iterations.h"

namespace kv_offload {
namespace {

enum class Place : std::size_t { kVersion, kPins, kBytes, kDead0, kDead1, kDead2, kOpen };
constexpr std::size_t kModelPlaces = 7;

struct Access {
  enum class Kind { kLoad, kStore, kOr, kAnd } kind;
  Place place;
  std::uint64_t value;
  bool is_ordered;  // sequentially consistent
};
struct NextStep {
  Access access;
};
struct WrongBytes {};

// The actor that is replayed now.
struct Replay {
  const std::vector<std::uint64_t>* results = nullptr;
  std::size_t next = 0;
};
Replay replay;

struct ModelWord {
  Place place;
  static std::uint64_t perform(Access access) {
    if (replay.next == replay.results->size()) throw NextStep{access};
    return (*replay.results)[replay.next++];
  }
  std::uint64_t load(std::memory_order order) const {
    return perform({Access::Kind::kLoad, place, 0, order == std::memory_order_seq_cst});
  }
  void store(std::uint64_t value, std::memory_order order) {
    perform({Access::Kind::kStore, place, value, order == std::memory_order_seq_cst});
  }
  void fetch_or(std::uint64_t value, std::memory_order) { perform({Access::Kind::kOr, place, value, true}); }
  void fetch_and(std::uint64_t value, std::memory_order) {
    perform({Access::Kind::kAnd, place, value, true});
  }
};

ModelWord version{Place::kVersion}, pins{Place::kPins}, bytes{Place::kBytes},
    dead[2]{{Place::kDead1}, {Place::kDead2}}, dead_owner{Place::kDead0}, opening{Place::kOpen};
constexpr auto kModelRelaxed = std::memory_order_relaxed;

using ModelRow = SharedRow<ModelWord>;

// Reuses the row twice. The bytes of version n are n; 0 while they are written. Tries a few times if the row
// is pinned, and clears the pins of dead readers.
void own() {
  for (const std::uint64_t next : {2, 3}) {
    ModelRow row{version, pins};
    bool is_free = row.withdraw();
    for (int tries = 0; tries < 1 && !is_free; ++tries) {
      for (unsigned reader = 0; reader < 2; ++reader) {
        if (dead[reader].load(kModelRelaxed) != 0) row.unpin(reader);
      }
      is_free = !row.is_pinned();
    }
    if (!is_free) return;
    bytes.store(0, kModelRelaxed);
    bytes.store(next, kModelRelaxed);
    row.publish(next);
  }
}

// One read under a sanitizer: a second one multiplies the interleavings by ten.
constexpr int kReads = testing::kSanitized ? 1 : 2;

void read(unsigned reader) {
  const std::uint64_t found = version.load(std::memory_order_acquire);
  if (found == 0) return;
  ModelRow row{version, pins};
  if (!row.pin(reader, found)) return;
  for (int reads = 0; reads < kReads; ++reads) {
    if (bytes.load(kModelRelaxed) != found) throw WrongBytes();
  }
  row.unpin(reader);
}

// ---- a takeover: what SharedRows does with one row, its opening number, and a view of the first owner

constexpr std::uint64_t kFirstOpening = 1, kFirstOfNext = 10;  // versions from here on are of the next owner

void own_once() {
  ModelRow row{version, pins};
  if (!row.withdraw()) return;
  bytes.store(0, kModelRelaxed);
  bytes.store(2, kModelRelaxed);
  row.publish(2);
}

// Waits for nobody: it starts at any time after the owner's death.
void take_over() {
  if (dead_owner.load(kModelRelaxed) == 0) return;
  ModelRow row{version, pins};
  opening.store(0, std::memory_order_seq_cst);
  (void)row.withdraw();
  opening.store(kFirstOfNext, std::memory_order_seq_cst);
  if (row.is_pinned()) {
    if (dead[0].load(kModelRelaxed) != 0) row.unpin(0);
    if (row.is_pinned()) return;
  }
  bytes.store(0, kModelRelaxed);
  bytes.store(kFirstOfNext + 1, kModelRelaxed);
  row.publish(kFirstOfNext + 1);
}

// A view of the first owner. Rows of the next one may belong to other weights, so they are wrong here.
void read_in_view(bool checks_opening = true) {
  const std::uint64_t found = version.load(std::memory_order_acquire);
  if (found == 0) return;
  ModelRow row{version, pins};
  if (!row.pin(0, found)) return;
  if (checks_opening && opening.load(std::memory_order_seq_cst) != kFirstOpening) return row.unpin(0);
  for (int reads = 0; reads < 2; ++reads) {
    if (bytes.load(kModelRelaxed) != found || found >= kFirstOfNext) throw WrongBytes();
  }
  row.unpin(0);
}

class Checker {
 public:
  using Actor = std::function<void()>;
  explicit Checker(std::array<Actor, 3> actors, bool weak = false, bool owner_dies = false)
      : actors_(std::move(actors)), weak_(weak), owner_dies_(owner_dies) {}

  // Returns true if a reader reads wrong bytes in some interleaving.
  bool finds_wrong_bytes() {
    State start;
    start.at(Place::kVersion) = start.at(Place::kBytes) = 1;
    start.at(Place::kOpen) = kFirstOpening;
    visit(start);
    return wrong_;
  }
  std::size_t states() const { return seen_.size(); }

 private:
  struct State {
    std::array<std::uint64_t, kModelPlaces> memory{};
    std::uint64_t& at(Place place) { return memory[static_cast<std::size_t>(place)]; }
    std::array<std::vector<std::uint64_t>, 3> results;
    std::array<std::vector<std::pair<Place, std::uint64_t>>, 3> buffers;
    std::array<bool, 3> ended{}, dead{};

    std::string text() const {
      std::string all;
      const auto add = [&](std::uint64_t value) { all += std::to_string(value) + ","; };
      for (const auto value : memory) add(value);
      for (std::size_t i = 0; i < 3; ++i) {
        for (const auto value : results[i]) add(value);
        all += dead[i] ? "d" : ended[i] ? "e" : "|";
        for (const auto& [place, value] : buffers[i]) add(static_cast<std::uint64_t>(place)), add(value);
        all += ";";
      }
      return all;
    }
  };

  void visit(const State& state) {
    if (wrong_ || !seen_.insert(state.text()).second) return;
    for (std::size_t i = 0; i < 3; ++i) {
      drain_one(state, i);
      step(state, i);
      // An idle owner may be killed too.
      if (i > 0 ? !state.ended[i] : owner_dies_ && !state.dead[0]) kill(state, i);
    }
  }
  void drain_one(State state, std::size_t i) {
    if (state.buffers[i].empty()) return;
    const auto [place, value] = state.buffers[i].front();
    state.buffers[i].erase(state.buffers[i].begin());
    state.at(place) = value;
    visit(state);
  }
  // A killed process's stores all arrive, and it makes no further step.
  void kill(State state, std::size_t i) {
    for (const auto& [place, value] : state.buffers[i]) state.at(place) = value;
    state.buffers[i].clear();
    state.ended[i] = state.dead[i] = true;
    constexpr std::array kDead{Place::kDead0, Place::kDead1, Place::kDead2};
    state.at(kDead[i]) = 1;
    visit(state);
  }
  void step(State state, std::size_t i) {
    if (state.ended[i]) return;
    try {
      replay = {&state.results[i], 0};
      actors_[i]();
      state.ended[i] = true;
    } catch (const WrongBytes&) {
      wrong_ = true;
      return;
    } catch (const NextStep& next) {
      if (!perform(next.access, &state, i)) return;
    }
    visit(state);
  }
  // False if the access must wait until the actor's own stores have arrived.
  bool perform(const Access& access, State* state, std::size_t i) const {
    auto& buffer = state->buffers[i];
    std::uint64_t result = 0;
    switch (access.kind) {
      case Access::Kind::kStore:
        if (access.is_ordered && !weak_) {
          if (!buffer.empty()) return false;
          state->at(access.place) = access.value;
        } else {
          buffer.emplace_back(access.place, access.value);
        }
        break;
      case Access::Kind::kLoad:
        result = state->at(access.place);
        for (const auto& [place, value] : buffer) {
          if (place == access.place) result = value;
        }
        break;
      default:
        if (!buffer.empty()) return false;
        state->at(access.place) = access.kind == Access::Kind::kOr ? state->at(access.place) | access.value
                                                                   : state->at(access.place) & access.value;
    }
    state->results[i].push_back(result);
    return true;
  }

  const std::array<Actor, 3> actors_;
  const bool weak_;  // no store is sequentially consistent
  const bool owner_dies_;
  std::set<std::string> seen_;
  bool wrong_ = false;
};

std::array<Checker::Actor, 3> owner_and_readers() {
  return {own, [] { read(0); }, [] { read(1); }};
}

TEST(SharedRowModel, no_interleaving_lets_a_reader_see_a_row_that_is_reused) {
  auto actors = owner_and_readers();
  if (testing::kSanitized) actors[2] = [] {};  // one reader: a tenth of the states
  Checker checker(actors);
  EXPECT_FALSE(checker.finds_wrong_bytes());
  EXPECT_GT(checker.states(), testing::kSanitized ? 100u : 1000u);
}

// The checker itself must be able to fail.
TEST(SharedRowModel, a_withdrawal_that_stays_in_the_store_buffer_is_found) {
  EXPECT_TRUE(Checker(owner_and_readers(), true).finds_wrong_bytes());
}

TEST(SharedRowModel, a_reader_that_checks_the_version_before_it_pins_is_found) {
  auto actors = owner_and_readers();
  actors[1] = [] {
    const std::uint64_t found = version.load(std::memory_order_acquire);
    if (found == 0) return;
    pins.fetch_or(1, std::memory_order_seq_cst);
    if (bytes.load(kModelRelaxed) != found) throw WrongBytes();
  };
  EXPECT_TRUE(Checker(actors).finds_wrong_bytes());
}

TEST(SharedRowModel, an_owner_that_reads_the_pins_before_it_withdraws_is_found) {
  auto actors = owner_and_readers();
  actors[0] = [] {
    if ((pins.load(std::memory_order_seq_cst) & kReaderBits) != 0) return;
    version.store(0, std::memory_order_seq_cst);
    bytes.store(2, kModelRelaxed);
    version.store(2, std::memory_order_release);
  };
  EXPECT_TRUE(Checker(actors).finds_wrong_bytes());
}

TEST(SharedRowModel, no_interleaving_with_a_takeover_lets_a_reader_see_a_row_that_is_reused) {
  Checker checker({own_once, [] { read_in_view(); }, take_over}, false, true);
  EXPECT_FALSE(checker.finds_wrong_bytes());
  EXPECT_GT(checker.states(), 1000u);
}

TEST(SharedRowModel, a_view_that_does_not_check_the_opening_is_found) {
  EXPECT_TRUE(Checker({own_once, [] { read_in_view(false); }, take_over}, false, true).finds_wrong_bytes());
}

TEST(SharedRowModel, a_takeover_that_does_not_read_the_pins_is_found) {
  const auto take_all = [] {
    if (dead_owner.load(kModelRelaxed) == 0) return;
    opening.store(0, std::memory_order_seq_cst);
    version.store(0, std::memory_order_seq_cst);
    bytes.store(kFirstOfNext + 1, kModelRelaxed);
  };
  EXPECT_TRUE(Checker({own_once, [] { read_in_view(); }, take_all}, false, true).finds_wrong_bytes());
}

TEST(SharedRowModel, a_takeover_that_stays_in_the_store_buffer_is_found) {
  EXPECT_TRUE(Checker({own_once, [] { read_in_view(); }, take_over}, true, true).finds_wrong_bytes());
}

}  // namespace
}  // namespace kv_offload
