// SPDX-License-Identifier: Apache-2.0
// Process: a child process that never outlives the engine. The kernel kills it when the thread that started
// it ends (mooncake/client.py sets PR_SET_PDEATHSIG). It also holds one end of a socket pair that no other
// process has, so it sees the engine's end.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "backends/mooncake/channel.h"
#include "base/status.h"

namespace kv_offload::mooncake {

// A running process. The destructor kills it and waits for it.
class Process {
 public:
  virtual ~Process() = default;
  // Waits for the process to exit. Call it after closing its socket.
  virtual void wait_until(Deadline until) = 0;
  // "it was ended by signal 9"; empty while it runs.
  virtual std::string end_reason() = 0;
};

// Starts a process with `peer_end` as its descriptor 3. Call it from one thread that outlives the process.
using Launch = std::function<Status(Descriptor peer_end, std::unique_ptr<Process>* begun)>;

// Launches this program. argv[0] is a path, or a name to find in PATH.
Launch launch_of(std::vector<std::string> argv);

}  // namespace kv_offload::mooncake
