// RootMender: puts back what another program removes from a root while it is served: the root directory,
// kv_offload.json, the directory of the namespace and the files in it. (OwnGeneration makes the generation
// again, Space the ledger.)
//
// Invariant: nothing is made on another file system than the root was on: of an unmounted disk only the mount
// point is left. Descriptors of OpenRoot keep their numbers, so other threads need no lock.
//
// Threads: upkeep's alone.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "storage/fs/open_root.h"

namespace kv_offload {

class RootMender {
 public:
  // Both outlive this.
  RootMender(const FsTierOptions& options, const OpenRoot& root);

  // What was missing and was made again, as an operator calls it. What cannot be made is told once and tried
  // again with the next look.
  std::vector<std::string> look(const std::shared_ptr<Generation>& own);

 private:
  bool is_other(const std::string& name, std::uint64_t size) const;
  void mend_root(std::vector<std::string>* lost);
  void mend_files(std::vector<std::string>* lost);
  void check_modes(const std::shared_ptr<Generation>& own);

  const FsTierOptions& options_;
  FsTierOptions quietly_;  // the same; what happened is told in one line
  const OpenRoot& root_;
  FileOps& ops_;
  std::uint64_t device_ = 0;  // of the root's file system
  std::string problem_, told_;
};

}  // namespace kv_offload
