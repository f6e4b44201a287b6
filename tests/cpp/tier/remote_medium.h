// SPDX-License-Identifier: Apache-2.0
// A server as a medium that several tiers share, with the faults that any kind of server may suffer.
#pragma once

#include <string>
#include <vector>

#include "tier/loopback_server.h"
#include "tier/tier_medium.h"

namespace kv_offload::testing {

class RemoteMedium : public Medium {
 public:
  virtual void kill() = 0;               // loses everything that it keeps in memory
  virtual void start() = 0;              // starts again, empty
  virtual void stand_still() = 0;        // answers nothing
  virtual void go_on() = 0;              // answers the requests that waited
  virtual void set_full(bool full) = 0;  // accepts no more records
  // Injects a random fault into `permille` of 1,000 requests; 0: into none.
  virtual void go_wrong(unsigned seed, unsigned permille) = 0;
  virtual std::size_t went_wrong(Mishap mishap) const = 0;

  // ---- Direct access, unnoticed by the tiers.
  virtual std::vector<std::string> names() const = 0;  // of records
  virtual std::string value(const std::string& name) const = 0;
  virtual void set_value(const std::string& name, const std::string& value) = 0;
  virtual void remove(const std::string& name) = 0;

  virtual std::size_t reads() const = 0;  // record reads that arrived
  virtual int connections() const = 0;
};

}  // namespace kv_offload::testing
