// SPDX-License-Identifier: Apache-2.0
// EpochRegistry: epochs (see record_store.h) for a store that many engines share and that may lose any key.
//
// An epoch is a random name, never a count. A store may forget any key (it evicts, it restarts empty), and a
// count that restarts would name an epoch a second time. The store keeps one name for newly started
// processes: the first process sets it, the others adopt it. A reset stores a new name for them. The process
// that was reset uses yet another name, which is stored nowhere, so that no newly started process finds what
// it writes. Processes that keep running in the old epoch no longer share records with newly started ones.
//
// Each host of an engine on several hosts has its own store, and all must use one epoch (EpochChoice). A name
// begins with the ID. If a store has no name, the host publishes one with `id`, which is random. With is_new,
// that ID may have been in use before: it follows from the IDs of all hosts, so that engines that start at
// once agree. So the rest of the name is random: the records of the earlier epoch are not found. And it
// replaces only the name that this host has reported: never one of a reset that happened meanwhile, and never
// a missing one. In these cases the host reports another ID, and the scheduler chooses again.
//
// A reset publishes a name with one ID on all hosts. The ID is random, and each host tries to publish it only
// once per reset. So if all hosts have this ID, no other reset has reached one of them since the last of them
// published it. A second attempt could bring the ID back after a later reset, on this host only. A host that
// missed the later reset would then seem to agree, with records from before it. Therefore later attempts use
// a name with another ID: the hosts then differ, and the next start replaces all names.
//
// Upkeep is an exception. If the store has lost the name, or has one again that our reset ended, the engine
// puts back the name that it last set or found there, with the same ID. (In the second case, a store that
// cannot replace a value conditionally gets an unused name instead.) An engine that has not checked the store
// since before another engine's reset, because it was stopped or cut off, then puts back the name from before
// that reset. This happens only if the store loses the later name, and no other engine puts that one back
// first. If another host has missed that reset, the hosts then have equal IDs, and engines that start later
// find records from before that reset.
//
// Any thread. The store accesses its server in callbacks, and no lock is held during them.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "base/status.h"
#include "base/thread_annotations.h"
#include "tier/record_store.h"

namespace kv_offload {

class EpochRegistry {
 public:
  using EpochPtr = RecordStore::EpochPtr;
  static constexpr std::size_t kNameDigits = 32;  // hexadecimal

  static std::string new_name();  // throws ResourceError: the system has no random numbers
  static bool is_name(std::string_view text);
  // ---- epochs of an engine on several hosts. An ID is never 0.
  static std::uint64_t new_id();                      // random. Throws as new_name()
  static std::string name_of_id(std::uint64_t id);    // another one in each call
  static std::uint64_t id_of(std::string_view name);  // of any name. REQUIRES: is_name(name)
  // Returns the name for a store that has none when a process starts. Never empty.
  static std::string name_if_none(const EpochChoice& choice);
  // Returns the name that replaces `stored` when a process starts; empty if `stored` stays. `stored`: may be
  // empty.
  static std::string replacement_of(std::string_view stored, const EpochChoice& choice);
  // Returns why an engine on several hosts cannot use the store; ok if it can, if it does not respond and no
  // epoch has to be replaced (open_tiers.h), or if it has no epoch and read_only is set: the tier then has
  // none until another process makes one. `fetched`: status of the fetch of the stored name; kDeclined: the
  // store responds, but cannot replace an epoch; kNoSpace: it responds, but is full.
  static Status startup_problem(const EpochChoice& choice, const Status& fetched, bool read_only);

  // REQUIRES: an epoch of an EpochRegistry, not null.
  static const std::string& name_of(const EpochPtr& epoch);

  // Sets the name that the store had at our start; empty: none, and begin() sets one later. `replaced`: the
  // name that we replaced by it, or empty; our resets end it too. `fetched`: status of the fetch of `stored`.
  void start_with(const std::string& stored, const std::string& replaced = {},
                  const Status& fetched = Status::ok()) EXCLUDES(mutex_);
  // Returns how that fetch failed, as long as there has been no epoch since. Else empty.
  std::string start_problem() const EXCLUDES(mutex_);
  // Returns the name that newly started processes use, as far as we know; empty: unknown, or ended by our own
  // reset. The caller may put it back if the store lost it.
  std::string startup_epoch() const EXCLUDES(mutex_);
  // Returns the name for a store that has none at an upkeep check, and sets *known to startup_epoch(), both
  // of the same moment. It is *known, unless that is empty. If we never had an epoch, because the store did
  // not respond, the name contains choice.id: the other hosts of the engine begin theirs with the same ID.
  // After a reset it has another one: a host that missed the reset may still use that ID. Our next reset ends
  // the returned name. If a reset may have happened since this call, publish the name only if has_ended() is
  // false.
  std::string name_if_missing(const EpochChoice& choice, std::string* known) EXCLUDES(mutex_);
  // Returns a new name, for a store whose value must be replaced without a condition. Our next reset ends it.
  std::string unused_name() EXCLUDES(mutex_);
  // Reports an upkeep check: the store keeps `stored`, and startup_epoch() was `known` before the check.
  // With read_only, joins an epoch that another process made since we started.
  void update_startup_epoch(const std::string& known, const std::string& stored, bool read_only)
      EXCLUDES(mutex_);
  // RecordStore::begin_epoch. ask: reads the name that the store keeps, or sets one. put: replaces any stored
  // name with this new one. After a reset, the first call uses the ID of forget(). If two calls run at once,
  // either name may stay.
  Status begin(const std::function<Status(std::string* stored)>& ask,
               const std::function<Status(const std::string& name)>& put) EXCLUDES(mutex_);
  EpochPtr current() const EXCLUDES(mutex_);
  // See Tier::refresh_epoch. The next update_startup_epoch() joins the stored epoch. REQUIRES: read_only.
  void refresh() EXCLUDES(mutex_);
  void forget(std::uint64_t startup_id = 0) EXCLUDES(mutex_);  // see Tier::reset
  bool diverged() const EXCLUDES(mutex_);  // the store keeps a name other than that of our epoch
  // True if one of our resets ended this epoch. A store that still keeps its name has lost later changes (a
  // replica that had not received them took over, or another process put the name back) and must be updated
  // again.
  bool has_ended(std::string_view name) const EXCLUDES(mutex_);

 private:
  struct Named;

  void set_start(const std::string& name) REQUIRES(mutex_);

  mutable Mutex mutex_;
  EpochPtr epoch_ GUARDED_BY(mutex_);
  std::string start_ GUARDED_BY(mutex_);
  // The values of start_, and the names that the store may get from us, since our last reset. All of them are
  // older than our next reset, which ends them all. Each deque has the last 64 names. They are separate,
  // since each failed attempt adds an offer: offers must not displace names that were in use.
  std::deque<std::string> starts_ GUARDED_BY(mutex_);
  std::deque<std::string> offers_ GUARDED_BY(mutex_);
  std::uint64_t resets_ GUARDED_BY(mutex_) = 0;      // calls of forget()
  std::uint64_t startup_id_ GUARDED_BY(mutex_) = 0;  // of the last reset; 0: none, or it was used
  bool diverged_ GUARDED_BY(mutex_) = false;
  std::string start_problem_ GUARDED_BY(mutex_);
  std::deque<std::string> ended_ GUARDED_BY(mutex_);  // of starts_: the last ones that our resets ended
  std::deque<std::string> ended_offers_ GUARDED_BY(mutex_);
};

}  // namespace kv_offload
