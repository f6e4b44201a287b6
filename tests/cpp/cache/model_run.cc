// SPDX-License-Identifier: Apache-2.0
#include "cache/model_run.h"

namespace kv_offload {
namespace {

constexpr std::size_t kWindow = 2;
constexpr std::size_t kMaxRequests = 8;
constexpr std::size_t kPromptChunks = 10;
constexpr Nanos kDeadline = std::chrono::seconds(5);

WorldOptions world_of(const ModelOptions& options) {
  WorldOptions world{.rows = options.rows, .shard_bytes = options.shard_bytes};
  world.cache.full_attention = options.full_attention;
  world.cache.tiers = {options.tier};
  world.cache.lookup_timeout = kDeadline;
  world.cache.keep_events = true;
  world.cache.load_policy = options.load_policy;
  world.cache.eviction_policy = options.eviction_policy;
  return world;
}

}  // namespace

ModelRun::ModelRun(ModelOptions options)
    : options_(std::move(options)), random_(options_.seed), world_(world_of(options_)) {
  world_.tier->max_records = 60;
  world_.tier->skip_verification = options_.planted == Planted::kSkippedVerification;
  world_.tier->verdict = [this](const TierOp& op) {
    for (std::uint32_t area = 0; area < op.shards.size() && op.kind == OpKind::kWrite; ++area) {
      if (!matches(op.shards[area], op.key, area, world_.tier->born(op))) {
        violate("a write read the bytes of another chunk");
      }
    }
    const auto dice = random_() % 100;
    if (dice < 4) return StatusKind::kIo;
    if (dice < 6) return op.kind == OpKind::kRead ? StatusKind::kCorrupt : StatusKind::kNoSpace;
    if (dice < 7) return StatusKind::kTimeout;
    return StatusKind::kOk;
  };
}

void ModelRun::violate(std::string what) {
  if (violations_.size() < 20) violations_.push_back(fmt::format("call {}: {}", calls_, std::move(what)));
}

void ModelRun::run(std::uint64_t calls) {
  const std::uint64_t end = calls_ + calls;
  while (calls_ < end && violations_.size() < 20) {
    if (requests_.size() < kMaxRequests && chance(60)) begin_request();
    step();
    work_on_jobs(50);
    work_on_tier();
    world_.clock.advance(std::chrono::milliseconds(random_() % 300));
    if (chance(1)) world_.clock.advance(std::chrono::seconds(4));
    if (chance(1)) reset();
  }
}

void ModelRun::begin_request() {
  Request request;
  if (chance(5)) request.options.load_tiers = 0;
  if (chance(5)) request.options.load_policy = LoadPolicy::kNever;
  if (chance(5)) request.options.skip_store = true;
  if (chance(10)) request.options.priority = chance(50) ? 1 : -1;
  // Prompts share prefixes: each one follows a document and branches off at a random chunk.
  const auto document = random_() % 6;
  const std::size_t length = 1 + random_() % kPromptChunks;
  const std::size_t branch_at = random_() % (2 * kPromptChunks);
  const auto branch = random_() % 3;
  for (std::uint32_t group = 0; group < options_.shard_bytes.size(); ++group) {
    std::vector<ChunkKey> keys;
    for (std::size_t i = 0; i < length; ++i) {
      keys.push_back(key_of(i < branch_at ? fmt::format("d{}c{}", document, i)
                                          : fmt::format("d{}b{}{}c{}", document, branch_at, branch, i),
                            group));
    }
    request.keys.push_back(std::move(keys));
  }
  request.handle = cache().begin_request("r", request.options);
  ++calls_;
  requests_[++last_serial_] = std::move(request);
}

void ModelRun::step() {
  std::vector<std::uint32_t> serials;
  for (const auto& [serial, request] : requests_) serials.push_back(serial);
  for (const std::uint32_t serial : serials) {
    Request& request = requests_.at(serial);
    if (request.phase == Phase::kWaiting && request.jobs == 0 && chance(80)) admit_or_wait(serial, request);
  }
  const auto end_step = [&] {
    cache().end_step();
    ++calls_;
    drain_events();
  };
  if (options_.step_ends_before_stores) end_step();
  for (const std::uint32_t serial : serials) {
    Request& request = requests_.at(serial);
    const bool done = request.stored >= request.keys[0].size();
    if (request.phase == Phase::kRunning && !done) offer(serial, request);
    if (request.phase == Phase::kRunning && chance(5)) {  // preempted
      request.phase = Phase::kWaiting;
      request.stored = 0;
      ++happened["preemption"];
    }
    if ((request.phase == Phase::kRunning && done && chance(50)) || chance(2)) end_request(serial);
  }
  if (!options_.step_ends_before_stores) end_step();
}

LookupResult ModelRun::look(Request& request, const ChunkKey& key) {
  const LookupResult result = cache().lookup(request.handle, key);
  ++calls_;
  drain_events();
  const bool is_pending = result == LookupResult::kPending || result == LookupResult::kRetry;
  // The cost model may recompute a resident chunk, because the time that passes here is random.
  const bool may_decline = options_.load_policy == LoadPolicy::kAuto && result == LookupResult::kMiss;
  if ((result == LookupResult::kHit) != resident_.contains(key) && !may_decline) {
    violate(fmt::format("lookup returned {} for a chunk that is {}resident", static_cast<int>(result),
                        resident_.contains(key) ? "" : "not "));
  }
  if (is_pending) {
    bool on_the_way = filling_.contains(key) || world_.tier->records.contains(key);
    world_.tier->for_each_op([&](const TierOp& op) { on_the_way |= op.key == key; });
    // A failed op that was not polled in this step is still in flight.
    if (!on_the_way && request.waits_since < Nanos(0)) ++happened["pending on a lost op"];
    if (request.waits_since < Nanos(0)) request.waits_since = world_.clock.now();
    if (world_.clock.now() - request.waits_since > kDeadline) violate("a request waits past its deadline");
    ++happened["pending"];
  }
  ++happened[result == LookupResult::kHit ? "hit" : is_pending ? "pending or retry" : "miss"];
  return result;
}

bool ModelRun::find_hits(Request& request, std::vector<std::vector<ChunkKey>>* hits) {
  bool pending = false;
  std::size_t boundary = request.keys[0].size();
  for (std::uint32_t group = 0; group < options_.shard_bytes.size(); ++group) {
    if (!options_.full_attention[group]) continue;
    std::size_t count = 0;
    for (; count < boundary; ++count) {
      const LookupResult result = look(request, request.keys[group][count]);
      if (result == LookupResult::kMiss) break;
      pending |= result != LookupResult::kHit;
    }
    boundary = count;
  }
  for (std::uint32_t group = 0; group < options_.shard_bytes.size() && boundary > 0; ++group) {
    if (options_.full_attention[group]) continue;
    std::size_t streak = 0, at = boundary;
    bool pending_in_window = false;
    while (at > 0 && streak < std::min(kWindow, at + streak)) {
      const LookupResult result = look(request, request.keys[group][--at]);
      if (result == LookupResult::kMiss) {
        streak = 0;
        pending_in_window = false;
      } else {
        ++streak;
        pending_in_window |= result != LookupResult::kHit;
      }
    }
    pending |= pending_in_window;
    boundary = std::min(boundary, at + streak);
  }
  if (pending) return false;
  hits->assign(options_.shard_bytes.size(), {});
  for (std::uint32_t group = 0; group < hits->size(); ++group) {
    const std::size_t from = options_.full_attention[group] || boundary < kWindow ? 0 : boundary - kWindow;
    for (std::size_t i = from; i < boundary; ++i) (*hits)[group].push_back(request.keys[group][i]);
  }
  // A tighter boundary may need other window chunks: vLLM looks up again.
  for (const auto& keys : *hits) {
    for (const ChunkKey& key : keys) {
      if (!resident_.contains(key)) {
        hits->assign(hits->size(), {});
        return true;
      }
    }
  }
  return true;
}

void ModelRun::admit_or_wait(std::uint32_t serial, Request& request) {
  // A wait may begin again if the request was not looked up for a long time: RequestTable::expire.
  if (world_.clock.now() - request.looked_up >= kDeadline / 4) request.waits_since = Nanos(-1);
  request.looked_up = world_.clock.now();
  std::vector<std::vector<ChunkKey>> hits;
  if (!find_hits(request, &hits)) return;
  request.waits_since = Nanos(-1);  // also without free blocks: RequestTable::expire
  if (chance(10)) return;           // no free blocks on the device: vLLM looks up again later
  std::size_t count = 0;
  for (const auto& keys : hits) count += keys.size();
  if (count == 0) {
    request.phase = Phase::kRunning;
    return;
  }
  load(serial, request, hits);
}

void ModelRun::load(std::uint32_t serial, Request& request, const std::vector<std::vector<ChunkKey>>& hits) {
  Job job;
  job.request = serial;
  job.weights = weights_;
  for (std::uint32_t group = 0; group < hits.size(); ++group) {
    for (const ChunkKey& key : hits[group]) {
      job.keys.push_back(key);
      job.groups.push_back(group);
    }
  }
  job.transfer = cache().prepare_load(request.handle, job.keys);
  ++calls_;
  ++happened["load"];
  check_loaded(job, "as it was promised");
  request.phase = Phase::kLoading;
  ++request.jobs;
  jobs_.push_back(std::move(job));
}

void ModelRun::offer(std::uint32_t serial, Request& request) {
  const std::size_t count = std::min(request.keys[0].size() - request.stored, 1 + random_() % 4);
  std::vector<ChunkKey> offered;
  std::vector<std::uint32_t> groups, depths;
  for (std::uint32_t group = 0; group < request.keys.size(); ++group) {
    for (std::size_t i = request.stored; i < request.stored + count; ++i) {
      offered.push_back(request.keys[group][i]);
      groups.push_back(group);
      depths.push_back(static_cast<std::uint32_t>(i));
    }
  }
  request.stored += count;
  const StoreGrant grant = cache().prepare_store(request.handle, offered, depths);
  ++calls_;
  drain_events();
  request.waits_since = Nanos(-1);
  if (grant.accepted.empty()) return;
  Job job;
  job.store = true;
  job.request = serial;
  job.weights = weights_;
  job.transfer = grant.transfer;
  for (const std::uint32_t i : grant.accepted) {
    job.keys.push_back(offered[i]);
    job.groups.push_back(groups[i]);
    if (resident_.contains(offered[i]) || !filling_.insert(offered[i]).second) {
      violate("a chunk was accepted that is already resident");
    }
    check_granted(offered[i], grant.transfer.rows[job.keys.size() - 1]);
  }
  for (const ChunkKey& key : grant.evicted) {
    if (resident_.contains(key)) violate("an evicted chunk is reported as resident");
  }
  happened["stored chunk"] += job.keys.size();
  happened["eviction"] += grant.evicted.size();
  ++request.jobs;
  jobs_.push_back(std::move(job));
}

// No rank or op may still access a newly allocated row.
void ModelRun::check_granted(const ChunkKey& key, RowId row) {
  for (const Job& job : jobs_) {
    if (job.reported) continue;
    for (const RowId other : job.transfer.rows) {
      if (other == row) violate(fmt::format("{} got a row that a rank is still copying", key.hex()));
    }
  }
  const std::byte* place = world_.region->area(0).data() + row * kPageBytes;
  world_.tier->for_each_op([&](const TierOp& op) {
    if (op.shards[0].data() == place)
      violate(fmt::format("{} got a row that an op in flight uses", key.hex()));
  });
}

void ModelRun::end_request(std::uint32_t serial) {
  cache().end_request(requests_.at(serial).handle);
  ++calls_;
  requests_.erase(serial);
}

void ModelRun::reset() {
  for (Job& job : jobs_) {
    job.stale = true;
    if (options_.planted == Planted::kStaleRow && !job.reported) {
      world_.report(job.transfer.ticket);
      job.reported = true;
    }
  }
  cache().reset();
  ++calls_;
  ++happened["reset"];
  drain_events();
  if (!resident_.empty()) violate("chunks are resident after a reset");
  filling_.clear();
  ++weights_;
  for (auto& [serial, request] : requests_) {
    request.jobs = 0;
    request.phase = Phase::kWaiting;
    request.stored = 0;
    request.waits_since = Nanos(-1);
  }
}

// ---- the ranks

void ModelRun::work_on_jobs(int percent) {
  std::deque<Job> rest;
  std::deque<Job> jobs = std::move(jobs_);
  jobs_.clear();
  while (!jobs.empty()) {
    Job job = std::move(jobs.front());
    jobs.pop_front();
    if (chance(job.stale ? percent / 5 : percent)) {
      finish_job(job);
    } else {
      rest.push_back(std::move(job));
    }
  }
  for (Job& job : jobs_) rest.push_back(std::move(job));
  jobs_ = std::move(rest);
}

void ModelRun::finish_job(Job& job) {
  const bool early = options_.planted == Planted::kEarlyCompletion && !job.stale && chance(20);
  if (job.store && !early) copy(job);
  if (!job.store && !job.stale) check_loaded(job, "until its load ended");
  if (!job.store && job.stale && options_.planted == Planted::kNone) {
    check_loaded(job, "until its load ended, reset or not");
  }
  const std::uint64_t failed = job.store && chance(4) ? 1 + random_() % 3 : 0;
  if (!job.reported && !chance(job.stale ? 0 : 1)) {
    world_.report(job.transfer.ticket, failed);
    job.reported = true;
  }
  if (job.stale) return;
  auto shuffled = job.keys;  // vLLM passes an unordered set
  std::shuffle(shuffled.begin(), shuffled.end(), random_);
  if (job.store) {
    for (const ChunkKey& key : job.keys) filling_.erase(key);
    cache().complete_store(shuffled);
  } else {
    cache().complete_load(shuffled);
  }
  ++calls_;
  drain_events();
  if (const auto request = requests_.find(job.request); request != requests_.end()) {
    --request->second.jobs;
    if (!job.store) {
      request->second.phase = Phase::kRunning;
      request->second.stored = job.keys.size() / options_.shard_bytes.size();
    }
  }
  if (!job.reported || early) {  // completed, but a rank is still copying and reports later
    ++happened["late report"];
    Job late = job;
    late.stale = true;
    late.reported = job.reported;
    jobs_.push_back(std::move(late));
  }
}

void ModelRun::copy(const Job& job) {
  for (std::size_t i = 0; i < job.keys.size(); ++i) {
    const bool wrong = options_.planted == Planted::kWrongRow && job.keys.size() > 1 && chance(5);
    const RowId row = job.transfer.rows[wrong ? (i + 1) % job.keys.size() : i];
    world_.copy(job.keys[i], row, job.groups[i], job.weights);
  }
}

void ModelRun::check_loaded(const Job& job, const char* when) {
  for (std::size_t i = 0; i < job.keys.size(); ++i) {
    if (!world_.holds(job.keys[i], job.transfer.rows[i], job.groups[i], job.weights)) {
      violate(fmt::format("a row does not hold its chunk {}", when));
    }
  }
}

// ---- the tier

void ModelRun::work_on_tier() {
  if (options_.load_policy == LoadPolicy::kAuto && chance(5))
    world_.tier->read_seconds = chance(50) ? 1e-3 : 20;
  FakeTier& tier = *world_.tier;
  if (chance(20)) tier.start(OpKind::kRead);
  if (chance(20)) tier.start(OpKind::kWrite);
  if (chance(50)) tier.finish_started();
  if (chance(60)) tier.finish(random_() % 12);
  if (chance(2)) tier.available = !tier.available;
  if (chance(2)) tier.knows = !tier.knows;
  if (chance(2)) tier.is_sure = !tier.is_sure;
  if (tier.records.empty()) return;
  auto record = std::next(tier.records.begin(), static_cast<long>(random_() % tier.records.size()));
  if (chance(5)) record->second.corrupt = true;
  if (chance(3)) tier.remove(ChunkKey(record->first), TierRemoval::Reason::kVanished);
}

void ModelRun::drain_events() {
  for (const CacheEvent& event : cache().take_events()) {
    if (event.storage) continue;
    for (const ChunkKey& key : event.keys) {
      const bool changed = event.removed ? resident_.erase(key) > 0 : resident_.insert(key).second;
      if (!changed) violate("an event repeats a known state");
    }
  }
}

// ---- the end

void ModelRun::quiesce() {
  for (const char* choice : {"load", "recompute", "probe", "give_up"}) {
    happened[fmt::format("{}, decided", choice)] =
        static_cast<std::uint64_t>(world_.metrics.value("kv_offload_decisions_total", {choice}));
  }
  while (!requests_.empty()) end_request(requests_.begin()->first);
  for (int i = 0; i < 10; ++i) {
    while (!jobs_.empty()) work_on_jobs(100);
    world_.tier->finish_started();
    world_.tier->finish();
    cache().end_step();
    drain_events();
  }
  const auto stats = cache().stats();
  if (stats.pinned_chunks != 0) violate(fmt::format("{} chunks are pinned at the end", stats.pinned_chunks));
  if (stats.quarantined_rows != 0)
    violate(fmt::format("{} rows are held at the end", stats.quarantined_rows));
  if (stats.waiting_requests != 0 || stats.requests != 0) violate("requests are left at the end");
  if (stats.resident_chunks != resident_.size()) violate("the events do not match the resident chunks");
  if (cache().has_pending_work()) violate("work is pending at the end");
  // Every row can be allocated again.
  cache().reset();
  drain_events();
  const RequestHandle request = cache().begin_request("last", {});
  std::vector<ChunkKey> keys;
  for (std::uint64_t i = 0; i < options_.rows + 1; ++i) keys.push_back(key_of(fmt::format("last{}", i)));
  const std::size_t accepted = cache().prepare_store(request, keys).accepted.size();
  if (options_.shard_bytes.size() == 1 && accepted != options_.rows) {
    violate(fmt::format("{} of {} rows can be allocated at the end", accepted, options_.rows));
  }
}

}  // namespace kv_offload
