// SPDX-License-Identifier: Apache-2.0
#include "record/idle_cores.h"

#include <sched.h>

#include <algorithm>
#include <fstream>
#include <sstream>

namespace kv_offload {
namespace {

std::string proc_stat() {
  std::ifstream file("/proc/stat");
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

std::vector<unsigned> allowed_cpus() {
  std::vector<unsigned> cpus;
  cpu_set_t allowed;
  if (::sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return cpus;
  for (unsigned cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &allowed)) cpus.push_back(cpu);
  }
  return cpus;
}

}  // namespace

IdleCores::IdleCores(const Clock& clock, std::vector<unsigned> cpus, std::function<std::string()> read)
    : clock_(clock), cpus_(std::move(cpus)), read_(std::move(read)) {}

IdleCores::IdleCores(const Clock& clock) : IdleCores(clock, allowed_cpus(), proc_stat) {}

// The line of a CPU: "cpu3 user nice system idle iowait irq softirq steal guest guest_nice". Guest time is
// part of user.
std::vector<IdleCores::Ticks> IdleCores::read_ticks() const {
  constexpr int kCounted = 8, kIdle = 3, kIoWait = 4;
  std::vector<Ticks> found(cpus_.size());
  std::istringstream lines(read_());
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string name;
    words >> name;
    if (!name.starts_with("cpu") || name.size() == 3) continue;
    const auto cpu = std::find_if(cpus_.begin(), cpus_.end(), [&](unsigned each) {
      return name.compare(3, std::string::npos, std::to_string(each)) == 0;
    });
    if (cpu == cpus_.end()) continue;
    Ticks& ticks = found[static_cast<std::size_t>(cpu - cpus_.begin())];
    std::uint64_t value = 0;
    for (int i = 0; i < kCounted && words >> value; ++i) {
      ticks.all += value;
      if (i == kIdle || i == kIoWait) ticks.idle += value;
    }
  }
  return found;
}

double IdleCores::now() {
  const Nanos now = clock_.now();
  if (!last_.empty() && now - read_at_ < kReadInterval) return idle_;
  std::vector<Ticks> ticks = read_ticks();
  if (!last_.empty()) {
    idle_ = 0;
    bool known = false;
    for (std::size_t i = 0; i < ticks.size(); ++i) {
      // Idle counters may decrease slightly.
      if (ticks[i].all <= last_[i].all || ticks[i].idle < last_[i].idle) continue;
      known = true;
      idle_ += static_cast<double>(ticks[i].idle - last_[i].idle) /
               static_cast<double>(ticks[i].all - last_[i].all);
    }
    if (!known) idle_ = -1;
  }
  last_ = std::move(ticks);
  read_at_ = now;
  return idle_;
}

}  // namespace kv_offload
