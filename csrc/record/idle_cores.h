// SPDX-License-Identifier: Apache-2.0
// IdleCores: measures how many of the cores that this process may run on were idle lately. Reads /proc/stat,
// which covers the whole machine and ignores a container's CPU quota.
//
// One thread at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/clock.h"

namespace kv_offload {

class IdleCores {
 public:
  static constexpr Nanos kReadInterval{std::chrono::seconds(2)};

  // `cpus`: the cores to count. `read`: returns the text of /proc/stat. Both are copied.
  IdleCores(const Clock& clock, std::vector<unsigned> cpus, std::function<std::string()> read);
  // Counts the cores of this process.
  explicit IdleCores(const Clock& clock);

  // Returns the idle cores, averaged over the time since the last measurement some seconds ago. Below 0: not
  // known (yet).
  double now();

 private:
  struct Ticks {
    std::uint64_t idle = 0, all = 0;
  };
  std::vector<Ticks> read_ticks() const;

  const Clock& clock_;
  const std::vector<unsigned> cpus_;
  const std::function<std::string()> read_;
  std::vector<Ticks> last_;
  Nanos read_at_{0};
  double idle_ = -1;
};

}  // namespace kv_offload
