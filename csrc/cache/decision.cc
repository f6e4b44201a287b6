// Load or recompute: what of a prefix is fetched, how long a request waits for
// it, and what it brought in the end.
#include <algorithm>

#include "cache/cache_impl.h"

namespace kv_offload {
namespace {

constexpr std::uint32_t kProbeChunks = 8;  // several sizes in one queue: latency and rate are told apart
constexpr double kOfDeadline = 0.8;        // of the time left, what may be planned with
constexpr Nanos kLeastPatience = std::chrono::milliseconds(5);

std::string_view to_string(Decision::Choice choice) {
  switch (choice) {
    case Decision::Choice::kLoad:
      return "load";
    case Decision::Choice::kPartial:
      return "partial";
    case Decision::Choice::kRecompute:
      return "recompute";
  }
  return "unknown";
}

Nanos to_nanos(double seconds) {
  return std::chrono::duration_cast<Nanos>(std::chrono::duration<double>(seconds));
}

}  // namespace

// The first scan, from its first chunk that is not in host memory on. Groups that
// are read together add their bytes.
std::vector<Stretch> TieredCache::Impl::stretches_of(const RequestState& request, const Scans& scans,
                                                     std::uint32_t* hits_before) const {
  const std::uint32_t group = scans.front().first;  // not a binding: lambdas capture it
  const Scan& first = scans.front().second;
  std::uint64_t chunk_bytes = 0;
  for (const auto& [other, scan] : scans) {
    chunk_bytes += groups[other].bytes * groups[group].tokens / groups[other].tokens;
  }
  std::vector<Stretch> stretches;
  const auto add = [&](std::int32_t tier) {
    if (stretches.empty() || stretches.back().tier != tier) stretches.push_back({tier, 0, 0, 0});
    Stretch& last = stretches.back();
    ++last.chunks;
    last.tokens += groups[group].tokens;
    last.bytes += chunk_bytes;
  };
  *hits_before = 0;
  if (!first.is_prefix) {  // a window: all of it, or what was found of the prefix is worth nothing
    for (const auto& candidate : first.candidates) add(candidate.tier);
    const std::uint16_t prefix = request.pass.front().group;
    const auto sights = std::find_if(request.pass.begin(), request.pass.end(),
                                     [&](const Sight& sight) { return sight.group != prefix; }) -
                        request.pass.begin();
    stretches.back().tokens =
        std::max(stretches.back().tokens, static_cast<std::uint64_t>(sights) * groups[prefix].tokens);
    return stretches;
  }
  for (std::uint32_t i = first.begin; i < first.end; ++i) {
    const Sight& sight = request.pass[i];
    if (sight.kind == Sight::Kind::kMiss || sight.kind == Sight::Kind::kUnknown) break;
    if (sight.kind == Sight::Kind::kHit && stretches.empty()) {
      ++*hits_before;
    } else {
      add(sight.kind == Sight::Kind::kRecorded ? sight.detail : Stretch::kHere);
    }
  }
  return stretches;
}

void TieredCache::Impl::decide(RequestState& request, Scans& scans) {
  if (request.decided) return;
  request.decided = true;
  const std::uint32_t group = scans.front().first;
  std::uint32_t hits_before = 0;
  const std::vector<Stretch> stretches = stretches_of(request, scans, &hits_before);
  if (request.load_policy != LoadPolicy::kAuto) {
    metrics.add("kv_offload_decisions_total", {"load"});
    return;
  }
  std::vector<double> hints(ops.size(), 0);
  for (const Stretch& stretch : stretches) {
    if (stretch.tier >= 0)
      hints[static_cast<std::size_t>(stretch.tier)] += static_cast<double>(stretch.bytes);
  }
  for (std::size_t t = 0; t < ops.size(); ++t) {
    if (hints[t] > 0) hints[t] = ops.estimate_read_seconds(t, static_cast<std::uint64_t>(hints[t]));
  }
  CostModel::Question question;
  question.stretches = stretches;
  question.hints = hints;
  question.context = groups.tokens_before(group, request.first_end) +
                     hits_before * static_cast<double>(groups[group].tokens);
  question.loads_anyway = hits_before > 0;
  question.deadline_seconds = kOfDeadline * to_seconds(request.deadline - request.pass_time);
  question.divisible = scans.front().second.is_prefix;  // of a window all is needed
  const Decision decision = costs.decide(question);
  record(request, decision);
  const Scans all = scans;
  if (decision.choice == Decision::Choice::kRecompute) {
    cut(request, scans, 0);
  } else {
    be_patient(request, decision);
    if (decision.choice == Decision::Choice::kPartial) {
      cut(request, scans, std::uint64_t{hits_before + decision.chunks} * groups[group].tokens);
    }
  }
  probe(request, group, all.front().second.candidates);
}

// What of the scans lies behind `tokens`, counted from where they began, is not
// fetched by this request any more.
void TieredCache::Impl::cut(RequestState& request, Scans& scans, std::uint64_t tokens) const {
  if (tokens == 0) {
    for (auto& reason : request.closed) reason = MissReason::kRecomputeCheaper;
    for (auto& [group, scan] : scans) scan.candidates.clear();
    return;
  }
  for (auto& [group, scan] : scans) {
    const std::uint64_t end = std::min<std::uint64_t>(scan.end, scan.begin + tokens / groups[group].tokens);
    std::size_t kept = 0;
    for (std::uint32_t i = scan.begin; i < end; ++i) kept += request.pass[i].kind == Sight::Kind::kRecorded;
    if (kept < scan.candidates.size()) scan.candidates.resize(kept);
    request.closed[group] = MissReason::kRecomputeCheaper;
  }
}

void TieredCache::Impl::record(RequestState& request, const Decision& decision) {
  const std::string_view choice = to_string(decision.choice);
  request.report.choice = choice;
  request.report.load_seconds = decision.load_seconds;
  request.report.compute_seconds = decision.compute_seconds;
  metrics.add("kv_offload_decisions_total", {choice});
  if (decision.load_seconds <= 0 || decision.compute_seconds <= 0) return;
  metrics.add("kv_offload_estimated_seconds_total", {choice, "load"}, decision.load_seconds);
  metrics.add("kv_offload_estimated_seconds_total", {choice, "compute"}, decision.compute_seconds);
}

// A tier that turns out slower than estimated costs at most what computing would
// have cost, most often a quarter of it; while reads arrive, see waits_on.
void TieredCache::Impl::be_patient(RequestState& request, const Decision& decision) const {
  if (decision.compute_seconds <= 0) return;
  const double compute = decision.compute_seconds;
  const double seconds = std::clamp(2 * decision.load_seconds, compute / 4, compute);
  request.patience = request.pass_time + std::max(kLeastPatience, to_nanos(seconds));
}

bool TieredCache::Impl::waits_on(RequestState& request, Nanos now) {
  const std::size_t missing = request.awaited.size();
  if (missing == 0) return true;  // all is there, it only was not asked about yet
  if (request.fetched_for <= missing) return false;
  const std::size_t arrived = request.fetched_for - missing;
  const double so_far = to_seconds(now - request.waits_since);
  const double rest = so_far / static_cast<double>(arrived) * static_cast<double>(missing);
  const std::uint32_t group = chunks.at(request.awaited.front()).group;
  const double tokens = groups[group].tokens;
  const double compute = costs.prefill.seconds(
      static_cast<double>(missing) * tokens,
      groups.tokens_before(group, request.first_end) + static_cast<double>(arrived) * tokens);
  if (rest >= compute) return false;
  request.patience = now + std::max(kLeastPatience, to_nanos(rest));
  return true;
}

// That it took too long says little of why: the first reads go on, and tell.
void TieredCache::Impl::give_up(RequestState& request, Nanos now) {
  metrics.add("kv_offload_decisions_total", {"give_up"});
  std::uint32_t kept = 0;
  std::erase_if(request.awaited, [&](Slot slot) {
    if (kept == kProbeChunks || !ops.leave_as_probe(slot, now)) return false;
    ++kept;
    return true;
  });
}

// Reads the first chunks from tiers that are not used at present. They are worth
// having, but nobody is told to wait for them.
void TieredCache::Impl::probe(RequestState& request, std::uint32_t group,
                              std::span<const Scan::Candidate> candidates) {
  for (std::size_t tier = 0; tier < ops.size(); ++tier) {
    const bool holds = std::any_of(candidates.begin(), candidates.end(),
                                   [&](const auto& candidate) { return candidate.tier == tier; });
    if (!holds || !costs.should_probe(tier, request.pass_time)) continue;
    std::vector<TierOps::Read> planned;
    for (const auto& candidate : candidates) {
      if (candidate.tier != tier || planned.size() == kProbeChunks) continue;
      const ChunkKey& key = request.pass_keys[candidate.key];
      if (chunks.find(key) != nullptr) continue;
      const RowId row = row_supply.take(group, request.number, nullptr);
      if (row == kNoRow) break;
      const Slot slot = chunks.insert_fetching(key, group, row, request.about(candidate.parent, 0));
      planned.push_back({slot, candidate.tier});
    }
    ops.read(planned, Nanos(0), true);
    metrics.add("kv_offload_decisions_total", {"probe"});
  }
}

void TieredCache::Impl::publish_speeds() {
  for (const auto& [label, tokens] : {std::pair{"1024", 1024.0}, {"8192", 8192.0}, {"65536", 65536.0}}) {
    const double speed = costs.prefill.tokens_per_second(tokens);
    if (speed > 0) metrics.set("kv_offload_prefill_tokens_per_second", {label}, speed);
  }
  for (std::size_t t = 0; t < ops.size(); ++t) {
    const double speed = costs.read_bytes_per_second(t);
    if (speed > 0) metrics.set("kv_offload_load_bytes_per_second", {ops.name(t)}, speed);
  }
  if (const double speed = costs.copy().bytes_per_second(); speed > 0) {
    metrics.set("kv_offload_load_bytes_per_second", {"cpu"}, speed);
  }
}

}  // namespace kv_offload
