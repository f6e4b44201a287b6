// Process: a program beside the engine, which it never outlives: it is begun by a thread that lives as long,
// at the end of a socket that nobody else has.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "storage/mooncake/channel.h"

namespace kv_offload::mooncake {

// One that runs. Its end: the destructor, which kills it and waits for it.
class Process {
 public:
  virtual ~Process() = default;
  // Its socket was closed: has it until then to go by itself.
  virtual void wait_until(Deadline until) = 0;
  // "it was killed by signal 9"; empty while it runs.
  virtual std::string how_it_ended() = 0;
};

// Begins one that has `theirs` as its descriptor 3. From one thread, whose end would be the process's.
using Launch = std::function<Status(Descriptor theirs, std::unique_ptr<Process>* begun)>;

// Of this program; argv[0] is its path, and where it is not one, looked for in PATH.
Launch launch_of(std::vector<std::string> argv);

}  // namespace kv_offload::mooncake
