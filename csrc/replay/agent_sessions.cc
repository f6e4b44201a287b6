// SPDX-License-Identifier: Apache-2.0
#include "replay/agent_sessions.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <queue>
#include <span>
#include <unordered_map>
#include <utility>

#include "base/status.h"

namespace kv_offload {
namespace {

constexpr double kNoReturn = std::numeric_limits<double>::infinity();

// Counts the users of chunks, to know how many different ones are in use, averaged over the requests.
class WorkingSet {
 public:
  void add(std::span<const std::uint64_t> chunks) {
    for (const std::uint64_t chunk : chunks) ++users_[chunk];
  }
  void remove(std::span<const std::uint64_t> chunks) {
    for (const std::uint64_t chunk : chunks) {
      const auto found = users_.find(chunk);
      if (--found->second == 0) users_.erase(found);
    }
  }
  void count_request() {
    ++requests_;
    sum_ += users_.size();
  }
  double average() const {
    return requests_ == 0 ? 0 : static_cast<double>(sum_) / static_cast<double>(requests_);
  }

 private:
  std::unordered_map<std::uint64_t, std::uint32_t> users_;
  std::uint64_t requests_ = 0, sum_ = 0;
};

// Knows which chunks several sessions use.
class ChunkOwners {
 public:
  void add(std::uint64_t chunk, std::uint32_t session) {
    const auto [owner, is_new] = owners_.try_emplace(chunk, session);
    if (!is_new && owner->second != session) owner->second = kSeveral;
  }
  std::size_t size() const { return owners_.size(); }
  bool is_shared(std::uint64_t chunk) const { return owners_.at(chunk) == kSeveral; }

 private:
  static constexpr std::uint32_t kSeveral = std::numeric_limits<std::uint32_t>::max();
  std::unordered_map<std::uint64_t, std::uint32_t> owners_;
};

class SessionMerger {
 public:
  SessionMerger(const AgentSessions& sessions, const MergeOptions& options)
      : sessions_(sessions), options_(options) {}

  MergedSessions run() {
    const std::size_t active = std::min(options_.active, options_.order.size());
    for (std::size_t i = 0; i < active; ++i) begin_next_session(0);
    while (!events_.empty()) {
      const Event event = events_.top();
      events_.pop();
      if (event.is_end) {
        end_stream(event);
      } else {
        begin_request(event);
      }
    }
    Trace& trace = merged_.trace;
    for (std::size_t i = 0; i < trace.size(); ++i) {
      const auto chunks = trace.request(i);
      trace.times[i].shared = static_cast<std::uint32_t>(
          std::find_if_not(chunks.begin(), chunks.end(), [&](auto c) { return owners_.is_shared(c); }) -
          chunks.begin());
    }
    merged_.needed_chunks = working_set_.average();
    merged_.different_chunks = owners_.size();
    return std::move(merged_);
  }

 private:
  struct Stream {
    std::vector<std::uint32_t> requests;
    std::size_t next = 0;        // position in `requests`
    std::uint32_t previous = 0;  // as in RequestTimes
    std::vector<std::uint64_t> blocks, chunks;
  };
  struct Session {
    std::map<std::uint32_t, Stream> streams;
    std::size_t running = 0;  // streams that have not ended
  };
  struct Event {
    double time;
    std::uint64_t number;  // order of events at the same time
    std::uint32_t session, stream;
    bool is_end;  // of the stream
    bool operator>(const Event& other) const {
      return std::pair(time, number) > std::pair(other.time, other.number);
    }
  };

  std::size_t first_of(std::uint32_t session) const {
    return session == 0 ? 0 : sessions_.session_ends[session - 1];
  }
  double pause_before(std::uint32_t request) const {
    return std::min(sessions_.pauses[request], options_.max_pause);
  }
  void add_event(double time, std::uint32_t session, std::uint32_t stream, bool is_end) {
    events_.push({time, ++last_event_, session, stream, is_end});
  }

  void begin_next_session(double now) {
    if (next_session_ == options_.order.size()) return;
    const std::uint32_t number = options_.order[next_session_++];
    const auto begin = static_cast<std::uint32_t>(first_of(number));
    const std::uint32_t end = sessions_.session_ends[number];
    if (begin == end) return begin_next_session(now);
    Session& session = active_[number];
    for (std::uint32_t at = begin; at < end; ++at) {
      session.streams[sessions_.streams[at]].requests.push_back(at);
    }
    session.running = session.streams.size();
    add_event(now, number, sessions_.streams[begin], false);
  }

  void begin_request(const Event& event) {
    Session& session = active_.at(event.session);
    Stream& stream = session.streams.at(event.stream);
    const std::uint32_t request = stream.requests[stream.next++];
    take_prompt(stream, request, event.session);
    RequestTimes times{event.time, event.time + sessions_.durations[request], kNoReturn, 0, stream.previous};
    stream.previous = static_cast<std::uint32_t>(merged_.trace.size() + 1);
    if (stream.next < stream.requests.size()) {
      times.returns_at = times.ends + pause_before(stream.requests[stream.next]);
      add_event(times.returns_at, event.session, event.stream, false);
    } else {
      add_event(times.ends, event.session, event.stream, true);
    }
    Trace& trace = merged_.trace;
    trace.blocks.insert(trace.blocks.end(), stream.chunks.begin(), stream.chunks.end());
    trace.ends.push_back(static_cast<std::uint32_t>(trace.blocks.size()));
    trace.times.push_back(times);
    merged_.requests.push_back(request);
    // The next request in recorded order may be the first one of another stream.
    if (const std::uint32_t after = request + 1; after < sessions_.session_ends[event.session]) {
      const std::uint32_t other = sessions_.streams[after];
      if (session.streams.at(other).requests.front() == after) {
        add_event(event.time + pause_before(after), event.session, other, false);
      }
    }
  }

  void take_prompt(Stream& stream, std::uint32_t request, std::uint32_t session) {
    const std::size_t common = sessions_.common[request];
    if (common > stream.blocks.size()) {
      throw_invalid("request {} has {} blocks in common with the previous one of its stream, which has {}",
                    request, common, stream.blocks.size());
    }
    stream.blocks.resize(common);
    const std::uint64_t begin = request == 0 ? 0 : sessions_.new_ends[request - 1];
    stream.blocks.insert(
        stream.blocks.end(), sessions_.new_blocks.begin() + static_cast<std::ptrdiff_t>(begin),
        sessions_.new_blocks.begin() + static_cast<std::ptrdiff_t>(sessions_.new_ends[request]));
    const std::size_t kept = common / options_.chunk_blocks;
    working_set_.remove(std::span(stream.chunks).subspan(kept));
    stream.chunks.resize(kept);
    for (std::size_t end = (kept + 1) * options_.chunk_blocks; end <= stream.blocks.size();
         end += options_.chunk_blocks) {
      stream.chunks.push_back(stream.blocks[end - 1]);
      owners_.add(stream.chunks.back(), session);
    }
    working_set_.add(std::span(stream.chunks).subspan(kept));
    working_set_.count_request();
  }

  void end_stream(const Event& event) {
    Session& session = active_.at(event.session);
    working_set_.remove(session.streams.at(event.stream).chunks);
    if (--session.running > 0) return;
    active_.erase(event.session);
    begin_next_session(event.time);
  }

  const AgentSessions& sessions_;
  const MergeOptions& options_;
  MergedSessions merged_;
  WorkingSet working_set_;
  ChunkOwners owners_;
  std::unordered_map<std::uint32_t, Session> active_;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  std::uint64_t last_event_ = 0;
  std::size_t next_session_ = 0;
};

template <typename Ends>
void require_ends(const char* name, const Ends& ends, std::size_t count, std::size_t last) {
  if (ends.size() == count && std::is_sorted(ends.begin(), ends.end()) &&
      (ends.empty() ? 0 : ends.back()) == last) {
    return;
  }
  throw_invalid("invalid sessions: {} must be {} ascending numbers, the last one {}", name, count, last);
}

void require_sessions(const AgentSessions& sessions) {
  const std::size_t requests = sessions.streams.size();
  require_ends("session_ends", sessions.session_ends, sessions.session_ends.size(), requests);
  require_ends("new_ends", sessions.new_ends, requests, sessions.new_blocks.size());
  if (sessions.durations.size() != requests || sessions.pauses.size() != requests ||
      sessions.common.size() != requests) {
    throw_invalid("invalid sessions: durations, pauses and common must have {} elements, one per request",
                  requests);
  }
  const auto is_time = [](double seconds) { return std::isfinite(seconds) && seconds >= 0; };
  if (!std::all_of(sessions.durations.begin(), sessions.durations.end(), is_time) ||
      !std::all_of(sessions.pauses.begin(), sessions.pauses.end(), is_time)) {
    throw_invalid("invalid sessions: durations and pauses must be seconds, 0 or more");
  }
}

void require_options(const MergeOptions& options, std::size_t sessions) {
  if (options.active == 0) throw_invalid("active is 0; it must be at least 1");
  if (options.chunk_blocks == 0) throw_invalid("chunk_blocks is 0; it must be at least 1");
  if (!(options.max_pause >= 0)) throw_invalid("max_pause is {}; it must be at least 0", options.max_pause);
  std::vector<bool> seen(sessions);
  for (const std::uint32_t number : options.order) {
    if (number >= sessions || seen[number]) {
      throw_invalid("order names session {}, which it names twice or which is not one of {}", number,
                    sessions);
    }
    seen[number] = true;
  }
}

}  // namespace

MergedSessions merge_sessions(const AgentSessions& sessions, const MergeOptions& options) {
  require_sessions(sessions);
  require_options(options, sessions.session_ends.size());
  return SessionMerger(sessions, options).run();
}

}  // namespace kv_offload
