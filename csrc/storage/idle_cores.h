// IdleCores: how many of the cores that this process may run on nobody used lately. From /proc/stat: of the
// whole machine, whatever share of a core a container may use.
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
  static constexpr Nanos kEvery{std::chrono::seconds(2)};

  // `cpus`: those that count. `read`: the text of /proc/stat. Both outlive nothing: they are copied.
  IdleCores(const Clock& clock, std::vector<unsigned> cpus, std::function<std::string()> read);
  // Of this process.
  explicit IdleCores(const Clock& clock);

  // Over the time since it was looked at last, some seconds ago. Below 0: it is not known (yet).
  double now();

 private:
  struct Ticks {
    std::uint64_t idle = 0, all = 0;
  };
  std::vector<Ticks> look() const;

  const Clock& clock_;
  const std::vector<unsigned> cpus_;
  const std::function<std::string()> read_;
  std::vector<Ticks> last_;
  Nanos looked_at_{0};
  double idle_ = -1;
};

}  // namespace kv_offload
