// NamedEpochs: the epochs of a store that many engines share and that keeps nothing for certain
// (record_store.h says what an epoch is).
//
// An epoch is a random name, never a count: a store may forget any key (it evicts, it restarts empty), and a
// count that begins anew would name an epoch a second time. The store keeps one name for those who start: the
// first gives it, the others take it. A reset puts a new one there, and takes another for itself that is
// nowhere in the store: what it writes then is nobody's who starts. Who runs on in the old epoch is apart
// from that moment on.
//
// Any thread. How the store is asked is the store's own; no lock is held meanwhile.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "base/status.h"
#include "base/thread_annotations.h"
#include "storage/record_store.h"

namespace kv_offload {

class NamedEpochs {
 public:
  using EpochPtr = RecordStore::EpochPtr;
  static constexpr std::size_t kNameDigits = 32;  // hexadecimal

  static std::string new_name();  // throws ResourceError: the system gives no random numbers
  static bool is_name(std::string_view text);
  // REQUIRES: of a NamedEpochs, not null.
  static const std::string& name_of(const EpochPtr& epoch);

  // At our start the store keeps this name; empty: none, and begin() makes up for it.
  void start_with(const std::string& kept) EXCLUDES(mutex_);
  // The name that those who start use, as far as we know; empty: unknown, or ended by our own reset. It may
  // be put back where it is gone.
  std::string of_those_who_start() const EXCLUDES(mutex_);
  // Upkeep has looked: the store keeps `kept`; of_those_who_start() was `known` before it looked. One that
  // only reads joins an epoch that others have made since it started.
  void note_kept(const std::string& known, const std::string& kept, bool read_only) EXCLUDES(mutex_);
  // RecordStore::begin_epoch. ask: the name that the store keeps, or now gets from us. put: this new name in
  // place of whatever is there.
  Status begin(const std::function<Status(std::string* kept)>& ask,
               const std::function<Status(const std::string& name)>& put) EXCLUDES(mutex_);
  EpochPtr current() const EXCLUDES(mutex_);
  void forget() EXCLUDES(mutex_);
  bool apart() const EXCLUDES(mutex_);  // the store keeps another name than that of our epoch
  // A reset of ours ended it. A store that keeps it all the same has lost what came after (a replica that had
  // not heard of it took over; another put back what was dropped), and must be told again.
  bool has_ended(std::string_view name) const EXCLUDES(mutex_);

 private:
  struct Named;

  void set_start(const std::string& name) REQUIRES(mutex_);

  mutable Mutex mutex_;
  EpochPtr epoch_ GUARDED_BY(mutex_);
  std::string start_ GUARDED_BY(mutex_);
  // What start_ has been since our last reset: each is older than the next one, which ends them all.
  std::deque<std::string> starts_ GUARDED_BY(mutex_);
  std::uint64_t resets_ GUARDED_BY(mutex_) = 0;  // calls of forget()
  bool apart_ GUARDED_BY(mutex_) = false;
  std::deque<std::string> ended_ GUARDED_BY(mutex_);  // by our resets, the last of them
};

}  // namespace kv_offload
