// SPDX-License-Identifier: Apache-2.0
#include "backends/fs/oldest_records.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <utility>

#include "backends/fs/layout.h"

namespace kv_offload {

std::uint64_t OldestRecords::remove(const Request& request, const std::atomic<bool>& stop) {
  std::uint64_t freed = 0;
  bool began = false;
  std::uint64_t freed_before_pass = 0;
  while (freed < request.bytes && !stop.load()) {
    if (candidates_.empty() && next_leaf_ < leaves_.size()) {
      if (request.may_take(opened_[leaves_[next_leaf_].source].source)) {
        queue(list_next());
      } else {
        ++next_leaf_;
      }
      continue;
    }
    if (candidates_.empty()) {
      if (began && freed == freed_before_pass) break;  // none of them can be removed
      began = true;
      freed_before_pass = freed;
      if (!begin_pass(request, request.bytes - freed, stop)) break;
      continue;
    }
    if (!request.may_take(opened_[candidates_.back().source].source)) {
      candidates_.pop_back();
      continue;
    }
    const std::uint64_t bytes = remove_next(request);
    freed += bytes;
    if (bytes > 0) request.on_removed(bytes);
  }
  return freed;
}

void OldestRecords::open(const std::vector<Source>& sources) {
  opened_.clear();
  leaves_.clear();
  next_leaf_ = 0;
  const bool some_useless =
      std::any_of(sources.begin(), sources.end(), [](const Source& source) { return !source.findable; });
  for (const Source& source : sources) {
    if (some_useless && source.findable) continue;
    int error = 0;
    const Fd space = open_fd(ops_, root_, source.namespace_name, kOpenDirectory, 0, &error);
    if (!space) continue;
    Opened opened{source, open_fd(ops_, space.get(), layout::epoch_directory_name(source.epoch),
                                  kOpenDirectory, 0, &error)};
    std::vector<std::uint32_t> numbers;
    std::uint64_t ignored = 0;
    if (!opened.directory || !list_leaves(ops_, opened.directory.get(), &numbers, &ignored)) continue;
    for (const std::uint32_t number : numbers) leaves_.push_back({opened_.size(), number});
    opened_.push_back(std::move(opened));
  }
  // The first leaves then sample each source.
  std::sort(leaves_.begin(), leaves_.end(), [](const Leaf& a, const Leaf& b) {
    return std::pair(a.number, a.source) < std::pair(b.number, b.source);
  });
}

// Returns false if there are no records.
bool OldestRecords::begin_pass(const Request& request, std::uint64_t needed, const std::atomic<bool>& stop) {
  open(request.sources());
  std::vector<Candidate> sample;
  std::uint64_t bytes = 0;
  while (next_leaf_ < leaves_.size() && sample.size() < kSample && !stop.load()) {
    for (const Candidate& found : list_next()) {
      bytes += found.record.charge();
      sample.push_back(found);
    }
  }
  if (sample.empty()) {
    opened_.clear();
    return false;
  }
  newest_ = std::numeric_limits<std::int64_t>::max();
  if (opened_[sample.front().source].source.findable) {
    const double listed = static_cast<double>(next_leaf_) / static_cast<double>(leaves_.size());
    const double enough = std::max(static_cast<double>(bytes) / kParts, static_cast<double>(needed) * listed);
    std::sort(sample.begin(), sample.end(), [](const Candidate& a, const Candidate& b) {
      return a.record.mtime_nanos < b.record.mtime_nanos;
    });
    double sum = 0;
    for (const Candidate& candidate : sample) {
      newest_ = candidate.record.mtime_nanos;
      sum += static_cast<double>(candidate.record.charge());
      if (sum >= enough) break;
    }
  }
  queue(std::move(sample));
  return true;
}

std::vector<OldestRecords::Candidate> OldestRecords::list_next() {
  const Leaf leaf = leaves_[next_leaf_++];
  LeafFound found;
  (void)scan_leaf(ops_, opened_[leaf.source].directory.get(), leaf.number, {}, &found);
  std::vector<Candidate> candidates;
  candidates.reserve(found.records.size());
  for (const FoundRecord& record : found.records) candidates.push_back({leaf.source, record});
  return candidates;
}

// Removes the newest candidates first: a prompt is written from its first chunk on, and without the first
// chunk the later ones are useless.
void OldestRecords::queue(std::vector<Candidate> found) {
  std::erase_if(found, [&](const Candidate& found_one) { return found_one.record.mtime_nanos > newest_; });
  std::sort(found.begin(), found.end(), [](const Candidate& a, const Candidate& b) {
    return a.record.mtime_nanos < b.record.mtime_nanos;
  });
  candidates_ = std::move(found);
}

// Returns 0 if the record was already removed, was used since it was listed, or cannot be removed.
std::uint64_t OldestRecords::remove_next(const Request& request) {
  const Candidate candidate = candidates_.back();
  candidates_.pop_back();
  const int directory = opened_[candidate.source].directory.get();
  const std::string path = layout::record_path(candidate.record.key, candidate.record.file_bytes);
  FileInfo info;
  if (ops_.stat(directory, path, &info) != 0 || info.mtime_nanos > newest_) return 0;
  if (request.reuse) {
    const std::uint64_t bytes = request.reuse(opened_[candidate.source].source, {directory, path}, info);
    if (bytes > 0) return bytes;
  }
  return ops_.unlink(directory, path) == 0 ? info.charge() : 0;
}

}  // namespace kv_offload
