// A medium that is a server which several tiers share: what can happen to one, whatever its kind.
#pragma once

#include <string>
#include <vector>

#include "storage/loopback_server.h"
#include "storage/tier_medium.h"

namespace kv_offload::testing {

class RemoteMedium : public Medium {
 public:
  virtual void kill() = 0;               // and all that it keeps in memory
  virtual void start() = 0;              // again, empty
  virtual void stand_still() = 0;        // answers nothing
  virtual void go_on() = 0;              // those that waited are answered
  virtual void set_full(bool full) = 0;  // takes no more records
  // To so many of a thousand requests something happens on their way; 0: to none.
  virtual void go_wrong(unsigned seed, unsigned permille) = 0;
  virtual std::size_t went_wrong(Mishap mishap) const = 0;

  // Behind the backs of all who use it.
  virtual std::vector<std::string> names() const = 0;  // of records
  virtual std::string value(const std::string& name) const = 0;
  virtual void set_value(const std::string& name, const std::string& value) = 0;
  virtual void remove(const std::string& name) = 0;

  virtual std::size_t reads() const = 0;  // of records, that came
  virtual int connections() const = 0;
};

}  // namespace kv_offload::testing
