// SPDX-License-Identifier: Apache-2.0
#include "backends/mooncake/client.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "base/thread.h"
#include "base/types.h"

namespace kv_offload::mooncake {
namespace {

using std::chrono::steady_clock;

constexpr std::size_t kMostIdle = 64;
// Channel memory is allocated in steps, so that groups of nearly equal record size share channels.
constexpr std::size_t kStep = std::size_t{256} << 10;
constexpr std::chrono::seconds kExitGrace{1};
// A process that ran this long does not count as a failing start.
constexpr std::chrono::seconds kStableRunTime{60};

// Parses the first message of the process: "ready VERSION", "refused SENTENCE" or "failed SENTENCE".
bool parse_start_message(std::string_view text, std::string_view word, std::string* rest) {
  if (!text.starts_with(word) || text.size() <= word.size()) return false;
  *rest = text.substr(word.size() + 1);
  return true;
}

// "it ended with status 127" is more helpful than a closed socket.
Status early_exit_error(Process* process) {
  process->wait_until(steady_clock::now() + kExitGrace);
  const std::string reason = process->end_reason();
  return Status::error(StatusKind::kIo,
                       fmt::format("the Mooncake client process did not report its start: {}",
                                   reason.empty() ? "it closed its socket" : reason));
}

}  // namespace

Client::Client(ClientOptions options)
    : options_(std::move(options)), wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (wake_.get() < 0) throw_resource("cannot create an eventfd (errno {})", errno);
  supervisor_ = std::thread([this] { supervise(); });
}

Client::~Client() { close(); }

void Client::close() {
  {
    const MutexLock lock(mutex_);
    closed_ = true;
    changed_.notify_all();
  }
  wake();
  if (supervisor_.joinable()) supervisor_.join();
  const MutexLock lock(mutex_);
  idle_.clear();
}

void Client::wake() const {
  const std::uint64_t one = 1;
  (void)!::write(wake_.get(), &one, sizeof(one));
}

// ---- the supervisor

void Client::supervise() {
  // The child inherits this thread's CPU share. It reads records that requests wait for.
  begin_thread("kv-mooncake", CpuShare::kFull);
  Nanos next_pause = options_.shortest_pause;
  while (true) {
    Descriptor control;
    std::unique_ptr<Process> process;
    const auto begun = steady_clock::now();
    // An exception that escapes from the thread would terminate the engine.
    try {
      run_process(&control, &process);
    } catch (const std::exception&) {
      set_ended(Status::error(StatusKind::kIo, "out of memory"), false);
    }
    process.reset();
    if (steady_clock::now() - begun > kStableRunTime) next_pause = options_.shortest_pause;
    if (!pause(next_pause)) return;
    next_pause = std::min(next_pause * 2, options_.longest_pause);
  }
}

// Returns when the process has ended or must be killed.
void Client::run_process(Descriptor* control, std::unique_ptr<Process>* process) {
  if (!begin(control, process)) return;
  const bool hung = wait_for_end(control->get());
  // Closing the socket ends concurrent calls; they must end now if the process was killed for hanging.
  control->reset();
  if (*process && !hung) (*process)->wait_until(steady_clock::now() + kExitGrace);
  const std::string reason = *process ? (*process)->end_reason() : "";
  set_ended(Status::error(StatusKind::kIo, fmt::format("the Mooncake client process is restarting: {}",
                                                       hung ? "it was killed because a call timed out"
                                                       : reason.empty() ? "it ended"
                                                                        : reason)),
            false);
}

Status Client::begin(Descriptor* control, std::unique_ptr<Process>* process) {
  std::string message, rest;
  bool refused = false;
  const auto start = [&] {
    Descriptor peer_end;
    if (Status status = make_pair(control, &peer_end); !status) return status;
    if (Status status = options_.launch(std::move(peer_end), process); !status) return status;
    if (!send_message(control->get(), std::as_bytes(std::span(options_.setup)))) {
      return early_exit_error(process->get());
    }
    // Waits for close(), too, so that closing does not wait for a slow start.
    std::array<std::byte, kMostText> buffer{};
    std::size_t got = 0;
    const auto until = steady_clock::now() + options_.start_deadline;
    pollfd either[2] = {{control->get(), POLLIN, 0}, {wake_.get(), POLLIN, 0}};
    while (steady_clock::now() < until) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - steady_clock::now());
      const int ready = ::poll(either, 2, static_cast<int>(left.count()));
      if (ready > 0 && either[1].revents != 0 && was_closed()) {
        return Status::error(StatusKind::kUnavailable, "the tier is closed");
      }
      if (ready > 0 && either[0].revents != 0) break;
    }
    const Status status = receive_message(control->get(), buffer, until, &got);
    if (status.kind() == StatusKind::kTimeout) {
      return Status::error(StatusKind::kTimeout, "Mooncake's client did not start in time");
    }
    if (!status) return early_exit_error(process->get());
    message = text_of(std::span(buffer).first(got));
    if (parse_start_message(message, "ready", &rest)) return Status::ok();
    refused = parse_start_message(message, "refused", &rest);
    if (!refused && !parse_start_message(message, "failed", &rest)) rest = "unexpected start message";
    return Status::error(StatusKind::kIo, rest);
  };
  Status status = start();
  if (!status) {
    set_ended(status, refused);
    return status;
  }
  set_running(control->get(), rest);
  return status;
}

void Client::set_running(int control, const std::string& version) {
  const MutexLock lock(mutex_);
  state_ = State::kRunning;
  version_ = version;
  control_ = control;
  hung_ = false;
  ++client_;
  changed_.notify_all();
}

void Client::set_ended(const Status& status, bool refused) {
  const MutexLock lock(mutex_);
  state_ = refused ? State::kRefused : State::kFailed;
  failure_ = status;
  control_ = -1;
  idle_.clear();
  changed_.notify_all();
}

bool Client::wait_for_end(int control) {
  while (true) {
    pollfd either[2] = {{control, POLLIN, 0}, {wake_.get(), POLLIN, 0}};
    const int ready = ::poll(either, 2, poll_timeout());
    const bool closed = was_closed();
    const MutexLock lock(mutex_);
    // Cleared before the supervisor closes the descriptor: its number may be reused at once.
    if (hung_ || closed) control_ = -1;
    if (hung_) return true;
    if (closed) return false;
    // The process sends nothing after its start, so this is its end.
    if (ready > 0 && either[0].revents != 0) {
      control_ = -1;
      return false;
    }
  }
}

int Client::poll_timeout() {
  const MutexLock lock(mutex_);
  if (!stopped_ || hung_) return hung_ ? 0 : -1;
  const auto now = steady_clock::now();
  const Deadline oldest = calls_.empty() ? now : *calls_.begin();
  const auto left = std::max(oldest, stopped_at_) + kStopGrace - now;
  hung_ = left <= left.zero();
  if (hung_) return 0;
  return static_cast<int>(std::chrono::ceil<std::chrono::milliseconds>(left).count());
}

bool Client::was_closed() {
  std::uint64_t woken = 0;
  (void)!::read(wake_.get(), &woken, sizeof(woken));
  const MutexLock lock(mutex_);
  return closed_;
}

bool Client::pause(Nanos time) {
  const auto until = steady_clock::now() + time;
  const MutexLock lock(mutex_);
  while (!closed_ && !stopped_) {
    const auto left = until - steady_clock::now();
    if (left <= left.zero()) return true;
    changed_.wait_for(mutex_, left);
  }
  return false;
}

// ---- callers

Status Client::wait_for_start(Deadline until, bool* refused) {
  const MutexLock lock(mutex_);
  until = std::min(until, steady_clock::now() + options_.start_deadline + kExitGrace);
  while (state_ == State::kStarting && !closed_) {
    const auto left = until - steady_clock::now();
    if (left <= left.zero()) {
      return Status::error(StatusKind::kTimeout, "Mooncake's client did not start in time");
    }
    changed_.wait_for(mutex_, left);
  }
  *refused = state_ == State::kRefused;
  return state_ == State::kRunning ? Status::ok() : failure_;
}

Status Client::take(std::size_t object_bytes, std::unique_ptr<Channel>* channel) {
  const MutexLock lock(mutex_);
  if (closed_) return Status::error(StatusKind::kUnavailable, "the tier is closed");
  if (state_ == State::kStarting) {
    return Status::error(StatusKind::kIo, "the Mooncake client process has not started yet");
  }
  if (state_ != State::kRunning) return failure_;
  if (control_ < 0) return Status::error(StatusKind::kIo, "the Mooncake client process ended");
  const auto fits = std::find_if(idle_.begin(), idle_.end(), [&](const std::unique_ptr<Channel>& one) {
    return one->object().size() >= object_bytes;
  });
  if (fits != idle_.end()) {
    *channel = std::move(*fits);
    idle_.erase(fits);
    return Status::ok();
  }
  // Replaces one that is too small: there are as many channels as are in use at once.
  if (!idle_.empty()) idle_.pop_back();
  Descriptor peer_end, memory;
  std::unique_ptr<Channel> made;
  const std::size_t bytes = round_up(std::max<std::size_t>(object_bytes, 1), kStep);
  if (Status status = Channel::make(bytes, client_, &made, &peer_end, &memory); !status) return status;
  const std::array descriptors{peer_end.get(), memory.get()};
  const std::uint64_t total = kNamesBytes + made->object().size();
  if (Status status = send_message(control_, std::as_bytes(std::span(&total, 1)), descriptors); !status) {
    return status;
  }
  *channel = std::move(made);
  return Status::ok();
}

void Client::give_back(std::unique_ptr<Channel> channel) {
  const MutexLock lock(mutex_);
  const bool reusable = state_ == State::kRunning && control_ >= 0 && channel->client() == client_;
  if (reusable && !closed_ && idle_.size() < kMostIdle) idle_.push_back(std::move(channel));
}

Status Client::call(const Channel& channel, Verb verb, std::span<const std::string> names,
                    std::uint64_t object_bytes, Deadline until, Nanos op_timeout, Answer* answer) {
  const auto begun = steady_clock::now();
  const bool short_time = is_short(until, op_timeout);
  {
    const MutexLock lock(mutex_);
    calls_.insert(begun);
  }
  Status status = channel.call(verb, names, object_bytes, until, answer);
  if (status.kind() == StatusKind::kTimeout && !short_time) report_hung(channel);
  const MutexLock lock(mutex_);
  calls_.erase(calls_.find(begun));
  return status;
}

bool Client::is_short(Deadline until, Nanos op_timeout) {
  return until - steady_clock::now() < op_timeout / 4;
}

void Client::stop() {
  {
    const MutexLock lock(mutex_);
    if (stopped_) return;
    stopped_ = true;
    stopped_at_ = steady_clock::now();
    changed_.notify_all();
  }
  wake();
}

void Client::report_hung(const Channel& channel) {
  {
    const MutexLock lock(mutex_);
    if (state_ != State::kRunning || channel.client() != client_) return;
    hung_ = true;
    control_ = -1;
  }
  wake();
}

std::string Client::version() const {
  const MutexLock lock(mutex_);
  return version_;
}

std::uint64_t Client::starts() const {
  const MutexLock lock(mutex_);
  return client_;
}

}  // namespace kv_offload::mooncake
