// SPDX-License-Identifier: Apache-2.0
// Three servers on one full root, of which one is idle, stopped or killed: the longest time without a write
// of the others, the bytes of the root above its limit, and the delay until they find each other's records.
// Prints JSON.
//
//   shared_root ROOT [SECONDS A PHASE] [MAX_BYTES] [RECORD_BYTES]
//
// Creates and removes ROOT. Each server writes with a short pause between records. Every 50 ms one of them
// marks a record, which the others look up until they find it (a mark that is evicted before is not counted).
// "all" is the baseline.
#include <fmt/format.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <filesystem>
#include <new>
#include <thread>
#include <unordered_set>
#include <vector>

#include "backends/fs/tier.h"
#include "base/aligned_buffer.h"
#include "bench.h"

namespace kv_offload::bench {
namespace {

constexpr int kServers = 3;
constexpr std::size_t kMarks = 4096;
constexpr double kMarkEvery = 0.05;
constexpr std::chrono::milliseconds kPause{5};  // so that a mark is found before it is evicted

// Shared between the processes.
struct Board {
  std::atomic<int> idle{-1};
  std::atomic<int> marking{0};
  struct Server {
    std::atomic<std::uint64_t> writes{0}, refused{0};
    std::atomic<double> last_write{0}, longest_gap{0};  // seconds
  } servers[kServers];
  std::atomic<std::uint64_t> marks{0};
  struct Mark {
    std::atomic<std::uint64_t> number{0};
    std::atomic<double> at{0};
  } mark[kMarks];
  std::atomic<std::uint64_t> found{0}, lost{0};
  std::atomic<double> seconds_to_find[kMarks];
};

// As `du`: a file that is renamed while we walk counts once.
std::uint64_t du(const std::string& path, std::unordered_set<ino_t>* seen) {
  struct ::stat info;
  if (::lstat(path.c_str(), &info) != 0 || !seen->insert(info.st_ino).second) return 0;
  std::uint64_t bytes = static_cast<std::uint64_t>(info.st_blocks) * 512;
  if (!S_ISDIR(info.st_mode)) return bytes;
  std::error_code error;
  for (std::filesystem::directory_iterator it(path, error), end; !error && it != end; it.increment(error))
    bytes += du(it->path().string(), seen);
  return bytes;
}
std::uint64_t du(const std::string& path) {
  std::unordered_set<ino_t> seen;
  return du(path, &seen);
}

class Server {
 public:
  Server(Board& board, int index, const FsTierOptions& options, std::uint64_t record_bytes)
      : board_(board), index_(index), row_(record_bytes), tier_(make_fs_tier(options)) {}

  [[noreturn]] void serve() {
    std::uint64_t number = 0;
    double marked = now();
    for (;;) {
      if (board_.idle.load() == index_) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        continue;
      }
      const std::uint64_t key = static_cast<std::uint64_t>(index_) << 40 | ++number;
      const bool written = write(key);
      Board::Server& own = board_.servers[index_];
      (written ? own.writes : own.refused).fetch_add(1);
      if (written) {
        const double at = now(), last = own.last_write.exchange(at);
        if (last > 0) own.longest_gap.store(std::max(own.longest_gap.load(), at - last));
        if (board_.marking.load() == index_ && at - marked >= kMarkEvery) {
          marked = at;
          mark(key, at);
        }
      }
      look();
      std::this_thread::sleep_for(kPause);
    }
  }

 private:
  bool write(std::uint64_t key) {
    TierOp op;
    op.id = ++last_op_;
    op.kind = OpKind::kWrite;
    op.key = key_of(key);
    op.shards = {Shard(row_.data(), row_.size())};
    std::vector<TierOp> ops;
    ops.push_back(std::move(op));
    tier_->submit(std::move(ops));
    std::vector<Completion> done;
    std::vector<TierRemoval> removals;
    for (;; std::this_thread::yield()) {
      tier_->poll(&done, &removals);
      if (!done.empty()) return done.front().status.is_ok();
    }
  }
  void mark(std::uint64_t key, double at) {
    const std::uint64_t slot = board_.marks.load();
    if (slot >= kMarks) return;
    board_.mark[slot].number.store(key);
    board_.mark[slot].at.store(at);
    board_.marks.store(slot + 1);
  }
  // Looks for marked records of the others.
  void look() {
    for (; seen_ < board_.marks.load(); ++seen_) {
      const std::uint64_t key = board_.mark[seen_].number.load();
      if (static_cast<int>(key >> 40) != index_) open_.push_back(seen_);
    }
    constexpr double kGiveUp = 10;
    std::erase_if(open_, [&](std::uint64_t slot) {
      const double waited = now() - board_.mark[slot].at.load();
      if (tier_->contains(key_of(board_.mark[slot].number.load())) == Presence::kPresent) {
        const std::uint64_t at = board_.found.fetch_add(1);
        if (at < kMarks) board_.seconds_to_find[at].store(waited);
        return true;
      }
      board_.lost.fetch_add(waited > kGiveUp);
      return waited > kGiveUp;
    });
  }

  Board& board_;
  const int index_;
  AlignedBuffer row_;
  std::unique_ptr<Tier> tier_;
  OpId last_op_ = 0;
  std::uint64_t seen_ = 0;
  std::deque<std::uint64_t> open_;
};

struct Phase {
  const char* name;
  int disturbed;  // the server that does not take part; -1: all do
  int number;     // of the signal, 0: it idles
};

class Run {
 public:
  Run(std::string root, std::uint64_t max_bytes, std::uint64_t record_bytes)
      : root_(std::move(root)), record_bytes_(record_bytes) {
    board_ =
        new (::mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) Board;
    options_.root_dir = root_;
    options_.max_bytes = max_bytes;
    options_.namespace_id.fill(0x11);
    options_.namespace_json = "{}";
    for (int i = 0; i < kServers; ++i) start(i);
  }
  ~Run() {
    for (const pid_t child : children_) stop(child);
    ::munmap(board_, sizeof(Board));
    std::error_code ignored;
    std::filesystem::remove_all(root_, ignored);
  }
  // Until the root is full and each has written into it.
  bool fill() {
    const double give_up = now() + 120;
    while (now() < give_up) {
      bool all = du(root_) > options_.max_bytes - options_.max_bytes / 8;
      for (const Board::Server& server : board_->servers) all = all && server.writes.load() > 0;
      if (all) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    return false;
  }
  std::string phase(const Phase& phase, double seconds) {
    board_->marking.store(phase.disturbed == 0 ? 1 : 0);
    if (phase.disturbed >= 0 && phase.number == 0) board_->idle.store(phase.disturbed);
    if (phase.number != 0) ::kill(children_[phase.disturbed], phase.number);
    const double started = now();
    std::uint64_t writes = 0, refused = 0;
    for (Board::Server& server : board_->servers) {
      server.longest_gap.store(0);
      server.last_write.store(started);
      writes -= server.writes.load();
      refused -= server.refused.load();
    }
    const std::uint64_t first = board_->found.load(), lost = board_->lost.load();
    std::uint64_t most = 0, samples = 0;
    while (now() - started < seconds) {
      most = std::max(most, du(root_));
      ++samples;
    }
    double gap = 0;
    for (int i = 0; i < kServers; ++i) {
      Board::Server& server = board_->servers[i];
      writes += server.writes.load();
      refused += server.refused.load();
      // One that has not written since counts until now.
      if (i != phase.disturbed)
        gap = std::max({gap, server.longest_gap.load(), now() - std::max(started, server.last_write.load())});
    }
    std::vector<double> found;
    for (std::uint64_t i = first; i < std::min<std::uint64_t>(board_->found.load(), kMarks); ++i)
      found.push_back(board_->seconds_to_find[i].load());
    std::sort(found.begin(), found.end());
    const auto at = [&](double share) {
      return found.empty() ? 0
                           : found[static_cast<std::size_t>(share * static_cast<double>(found.size() - 1))];
    };
    const auto above = static_cast<double>(most) - static_cast<double>(options_.max_bytes);
    std::string line = fmt::format(
        R"({{"phase": "{}", "seconds": {:.1f}, "writes_per_second": {:.1f}, "refused": {}, "longest_gap_seconds": {:.3f}, )"
        R"("records_above_bound": {:.2f}, "samples": {}, "found": {}, "lost": {}, "find_median_seconds": {:.3f}, )"
        R"("find_p99_seconds": {:.3f}, "find_most_seconds": {:.3f}}})",
        phase.name, now() - started, static_cast<double>(writes) / (now() - started), refused, gap,
        std::max(0.0, above / static_cast<double>(record_bytes_)), samples, found.size(),
        board_->lost.load() - lost, at(0.5), at(0.99), at(1));
    undo(phase);
    return line;
  }

 private:
  void undo(const Phase& phase) {
    board_->idle.store(-1);
    if (phase.number == SIGSTOP) ::kill(children_[phase.disturbed], SIGCONT);
    if (phase.number == SIGKILL) {
      stop(children_[phase.disturbed]);
      start(phase.disturbed);
    }
  }
  void stop(pid_t child) {
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
  }
  void start(int index) {
    const pid_t child = ::fork();
    if (child == 0) {
      ::alarm(3600);
      Server(*board_, index, options_, record_bytes_).serve();
    }
    children_[index] = child;
  }
  const std::string root_;
  const std::uint64_t record_bytes_;
  FsTierOptions options_;
  Board* board_ = nullptr;
  pid_t children_[kServers] = {};
};

}  // namespace
}  // namespace kv_offload::bench

int main(int argc, char** argv) {
  using namespace kv_offload::bench;
  if (argc < 2) {
    fmt::print(stderr, "usage: {} ROOT [SECONDS A PHASE] [MAX_BYTES] [RECORD_BYTES]\n", argv[0]);
    return 2;
  }
  const auto number = [&](int at, double usual) { return argc > at ? std::atof(argv[at]) : usual; };
  const double seconds = number(2, 20);
  Run run(argv[1], static_cast<std::uint64_t>(number(3, 2048.0 * (1 << 20))),
          static_cast<std::uint64_t>(number(4, 256 << 10)));
  if (!run.fill()) {
    fmt::print(stderr, "the root was not filled within two minutes\n");
    return 1;
  }
  const Phase phases[] = {{"all", -1, 0},
                          {"one idles", 1, 0},
                          {"one is stopped", 1, SIGSTOP},
                          {"the first is stopped", 0, SIGSTOP},
                          {"one is killed", 2, SIGKILL},
                          {"all again", -1, 0}};
  fmt::print("[");
  for (const Phase& phase : phases) {
    fmt::print("{}\n{}", &phase == phases ? "" : ",", run.phase(phase, seconds));
    std::fflush(stdout);
  }
  fmt::print("]\n");
}
