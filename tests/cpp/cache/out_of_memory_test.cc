// SPDX-License-Identifier: Apache-2.0
// Each allocation of each call fails in turn. Afterwards each row is in one place: free, owned by a chunk
// that may be evicted, or in quarantine until its copy ends.
#include "out_of_memory.h"

#include <set>

#include "cache/cache_fixture.h"

namespace kv_offload {
namespace {

constexpr std::uint64_t kSmallRegion = 6;
constexpr unsigned kNoAllocation = 1'000'000;  // more allocations than any call has

// A sequence of calls that uses every path of a row: stored, read from a tier, loaded, written and evicted.
class OutOfMemoryTest : public CacheTest {
 protected:
  using Call = std::function<void()>;

  void SetUp() override { set_up(); }
  void set_up() {
    WorldOptions options;
    options.rows = kSmallRegion;
    options.cache.keep_events = true;
    options.cache.load_policy = LoadPolicy::kAlways;
    options.cache.full_attention = {true};
    make(std::move(options));
    record({"x", "y"});
    (void)store({"a", "b", "c", "d"});
    tier().finish();
    step();
    reading_ = loading_ = storing_ = kNone;
    stores_.clear();
    loads_.clear();
    stores_ended_ = false;
    loads_ended_ = 0;
  }

  std::vector<Call> calls() {
    return {
        // Its chunks raise the priority of the chunk before them, which needs memory.
        [this] { reading_ = begin({.priority = 1}); },
        [this] { look_up_recorded(); },
        [this] { step(); },  // plans the reads of x and y
        [this] { loading_ = begin(); },
        [this] { begin_load(loading_, old_); },
        [this] { storing_ = begin(); },
        [this] { begin_store(storing_, new_); },
        [this] { end_stores(); },
        [this] { look_up_recorded(); },
        [this] { step(); },  // the reads have arrived
        [this] { begin_load(reading_, recorded_); },
        [this] { end_loads(); },
        [this] { step(); },
        [this] { end(std::exchange(reading_, kNone)); },
        [this] { cache().abandon_jobs(); },
        [this] { end(std::exchange(storing_, kNone)); },
        [this] { step(); },
    };
  }
  // Before the call at this place, without failing allocations.
  void environment(std::size_t place) {
    if (place == 7) {
      for (const StoreGrant& grant : stores_) world().report(grant.transfer.ticket);
    }
    if (place == 8 || place == 12) tier().finish();
    if (place == 11 && !loads_.empty()) world().report(loads_.front().transfer.ticket);
  }
  static constexpr std::size_t kUnlimited = 100;

  // Makes all calls. One allocation of the call at `failing` fails: the one after `after` others. With a
  // reset before the call at this place. Returns false if no allocation failed.
  bool run(std::size_t failing, unsigned after, std::size_t reset = kUnlimited) {
    set_up();
    std::vector<Call> all = calls();
    bool came = false;
    for (std::size_t place = 0; place < all.size(); ++place) {
      if (place == reset)
        came |= attempt([this] { cache().reset(); }, failing == reset ? after : kNoAllocation);
      environment(place);
      came |= attempt(all[place], reset == kUnlimited && place == failing ? after : kNoAllocation);
      if (place == 7) check_stores_ended();
    }
    return came;
  }
  // Returns true if memory ran out. A call that needs what an earlier one did not do is refused.
  static bool attempt(const Call& call, unsigned after) {
    const testing::FailingAllocation failing(after);
    try {
      call();
    } catch (const std::bad_alloc&) {
    } catch (const InvalidArgument&) {
    }
    return failing.came();
  }

  void look_up_recorded() {
    if (reading_ == kNone) return;
    (void)lookup(reading_, "a");
    for (const ChunkKey& key : recorded_) (void)cache().lookup(reading_, key);
  }
  void begin_load(RequestHandle request, const std::vector<ChunkKey>& wanted) {
    loads_.reserve(2);
    loads_.push_back({wanted, cache().prepare_load(request, wanted)});
  }
  void begin_store(RequestHandle request, const std::vector<ChunkKey>& wanted) {
    stores_.reserve(1);
    stores_.push_back(cache().prepare_store(request, wanted));
  }
  void end_stores() {
    stores_ended_ = true;
    cache().complete_store(new_);
  }
  void end_loads() {
    if (loads_.empty()) return;
    loads_ended_ = 1;
    cache().complete_load(loads_.front().keys);
  }

  // complete_store() is not repeated: no chunk of it waits for its bytes any more.
  void check_stores_ended() {
    for (const char* name : {"e", "f"}) EXPECT_NE(peek({name}), "P");
  }
  // A reset allocates what it needs itself first.
  void check_not_reset(const std::string& about) {
    for (const ChunkKey& key : old_) EXPECT_TRUE(cache().is_in_memory(key)) << about;
  }

  // Ends all that runs. Then no row is in use, and all of them can be used again.
  void check(const std::string& about) {
    for (const StoreGrant& grant : stores_) {
      if (grant.transfer.ticket != kNoTicket) world().report(grant.transfer.ticket);
    }
    for (const Job& load : loads_) world().report(load.transfer.ticket);
    for (const RequestHandle request : {reading_, loading_, storing_}) {
      if (request != kNone) end(request);
    }
    for (int i = 0; i < 3; ++i) {
      tier().finish();
      step();
    }
    if (!stores_ended_) cache().complete_store(new_);
    for (; loads_ended_ < loads_.size(); ++loads_ended_) cache().complete_load(loads_[loads_ended_].keys);
    step();
    tier().finish();
    step();
    const auto stats = cache().stats();
    EXPECT_EQ(stats.pinned_chunks, 0u) << about;
    EXPECT_EQ(stats.quarantined_rows, 0u) << about;
    EXPECT_EQ(stats.waiting_requests, 0u) << about;
    const Names last{"1", "2", "3", "4", "5", "6"};
    const RequestHandle request = begin();
    const Job job = offer(request, last);
    EXPECT_EQ(job.keys.size(), kSmallRegion) << about;
    EXPECT_THAT(std::set<RowId>(job.transfer.rows.begin(), job.transfer.rows.end()),
                ::testing::SizeIs(job.keys.size()))
        << "one row has two chunks; " << about;
    copy(job);
    complete(job);
    EXPECT_EQ(scan(request, names(job.keys)), std::string(job.keys.size(), 'H')) << about;
    load(request, names(job.keys));
    end(request);
  }

  static constexpr RequestHandle kNone = ~RequestHandle{0};
  const std::vector<ChunkKey> recorded_ = keys({"x", "y"}), old_ = keys({"c", "d"}), new_ = keys({"e", "f"});
  RequestHandle reading_ = kNone, loading_ = kNone, storing_ = kNone;
  std::vector<StoreGrant> stores_;
  std::vector<Job> loads_;
  bool stores_ended_ = false;    // vLLM calls complete_store() once
  std::size_t loads_ended_ = 0;  // the same
};

TEST_F(OutOfMemoryTest, no_row_is_lost_or_freed_twice) {
  unsigned failures = 0;
  for (std::size_t place = 0; place < calls().size(); ++place) {
    for (unsigned after = 0; run(place, after); ++after) {
      ++failures;
      check(fmt::format("allocation {} of call {} failed", after, place));
      if (HasFailure()) return;
    }
    check(fmt::format("no allocation of call {} failed", place));
  }
  EXPECT_GT(failures, 50u) << "the calls use every path";
}

TEST_F(OutOfMemoryTest, a_reset_that_runs_out_of_memory_loses_no_row) {
  for (std::size_t place = 1; place < calls().size(); ++place) {
    for (unsigned after = 0; run(place, after, place); ++after) {
      const std::string about = fmt::format("allocation {} of a reset before call {} failed", after, place);
      if (after == 0) check_not_reset(about);
      check(about);
      if (HasFailure()) return;
    }
    check(fmt::format("no allocation of a reset before call {} failed", place));
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace kv_offload
