// SPDX-License-Identifier: Apache-2.0
// Charges: how many bytes a new record counts against the bound while the file system does not report its
// blocks yet (ZFS: a few seconds), and how much of that charge may still change.
//
// Invariant: a file is never charged less than charged_bytes(). Where settled records take more than their
// size (copies, parity, large allocation units), new records are charged by that factor in advance.
//
// The catalog stores the sizes given in the record names. Servers divide a root by the disk space of their
// records (Shares), which is less where records are encoded: see of_named().
//
// Threads: any.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "backends/fs/file_ops.h"

namespace kv_offload {

class Charges {
 public:
  std::uint64_t of(std::uint64_t disk_bytes, std::uint64_t size) const {
    const std::uint64_t whole = charged_bytes(0, size);
    return disk_bytes >= whole ? disk_bytes : whole + excess_of(whole);
  }
  // Returns the charge of a record that was just written. The difference between its blocks and its size is
  // added to unsettled(), which requests a count.
  std::uint64_t of_written(const FileInfo& info) {
    const std::uint64_t whole = charged_bytes(0, info.size), blocks = info.disk_bytes;
    unsettled_.fetch_add(blocks > whole ? blocks - whole : whole - blocks);
    return of(blocks, info.size);
  }
  std::uint64_t of_planned(std::uint64_t size) const { return size + excess_of(size); }
  // Learns from all records of a scan whose blocks are reported: their blocks, and their sizes in whole
  // pages.
  void learn(std::uint64_t blocks, std::uint64_t whole) {
    if (whole == 0) return;
    // A larger excess means a file tree that is not ours; counts keep the bound there.
    constexpr std::uint64_t kMostExcess = 3;
    const double excess = static_cast<double>(blocks - std::min(blocks, whole)) / static_cast<double>(whole);
    excess_.store(std::min(excess, static_cast<double>(kMostExcess)));
  }
  // Running total.
  std::uint64_t unsettled() const { return unsettled_.load(); }
  // Adds a record written by this process: the size in its name, and its charge. The two differ where
  // records are encoded.
  void add_stored(std::uint64_t named, std::uint64_t charged) {
    named_.fetch_add(named);
    stored_.fetch_add(charged);
  }
  // Replaces these sums with those of all records of a scan.
  void learn_stored(std::uint64_t named, std::uint64_t charged) {
    if (named == 0) return;
    named_.store(named);
    stored_.store(charged);
  }
  // Estimates the charge of records with `named` bytes by name, from the records seen so far.
  std::uint64_t of_named(std::uint64_t named) const {
    const auto seen = static_cast<double>(named_.load());
    return seen > 0 ? static_cast<std::uint64_t>(static_cast<double>(named) *
                                                 (static_cast<double>(stored_.load()) / seen))
                    : named;
  }

 private:
  std::uint64_t excess_of(std::uint64_t whole) const {
    return static_cast<std::uint64_t>(static_cast<double>(whole) * excess_.load());
  }
  std::atomic<double> excess_{0};  // as a fraction of a record's size
  std::atomic<std::uint64_t> unsettled_{0};
  std::atomic<std::uint64_t> named_{0}, stored_{0};
};

}  // namespace kv_offload
