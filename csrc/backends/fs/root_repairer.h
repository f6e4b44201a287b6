// SPDX-License-Identifier: Apache-2.0
// RootRepairer: restores what another program removes from a root while it is served: the root directory,
// kv_offload.json, the namespace directory and the files in it. (EpochManager creates the epoch again,
// SpaceLedger the ledger.)
//
// Invariant: nothing is created on another file system than the root's: after an unmount only the mount point
// is left. Descriptors of OpenRoot keep their numbers, so other threads need no lock.
//
// Threads: upkeep thread only.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "backends/fs/open_root.h"

namespace kv_offload {

class RootRepairer {
 public:
  // Both must outlive this object.
  RootRepairer(const FsTierOptions& options, const OpenRoot& root);

  // Returns the files that were missing and were created again, in words for an operator. A failure is
  // reported once, and retried at the next poll.
  std::vector<std::string> poll(const std::shared_ptr<FsEpoch>& own);

 private:
  bool is_replaced(const std::string& name, std::uint64_t size) const;
  void repair_root(std::vector<std::string>* lost);
  void repair_files(std::vector<std::string>* lost);
  void check_modes(const std::shared_ptr<FsEpoch>& own);

  const FsTierOptions& options_;
  FsTierOptions quietly_;  // without warnings; the caller logs one line
  const OpenRoot& root_;
  FileOps& ops_;
  std::uint64_t device_ = 0;  // of the root's file system
  std::string problem_, warned_problem_;
};

}  // namespace kv_offload
