// SPDX-License-Identifier: Apache-2.0
#include "backends/fs/epoch_manager.h"

#include <algorithm>
#include <cerrno>
#include <utility>
#include <vector>

#include "backends/fs/layout.h"

namespace kv_offload {

Status EpochManager::begin() {
  constexpr int kAttempts = 100;
  const std::string path = root_.namespace_path();
  records_.free_unused();
  const MutexLock making(making_);
  int rc = -EBUSY;
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    std::vector<std::uint64_t> numbers;
    if (Status status = list_epochs(ops_, root_.namespace_directory.get(), &numbers); !status) return status;
    const std::optional<RecordIndex::Next> next = records_.next();
    if (!next) return Status::ok();
    std::shared_ptr<FsEpoch> made;
    rc = make_next(*next, numbers, &made);
    if (rc == -EEXIST || rc == -ENOENT) continue;  // another process creates one too
    if (rc < 0) break;
    const std::uint64_t number = made->number;
    if (made->made) root_.count(made->directory);
    const auto extent = made->made ? RecordIndex::Extent::kOrder : RecordIndex::Extent::kSome;
    if (records_.begin(std::move(made), *next, extent)) {
      root_.space->share_as(sharer(root_.namespace_name, number));
      return Status::ok();
    }
    rc = -EBUSY;
  }
  return Status::error(rc == -ENOSPC || rc == -EDQUOT ? StatusKind::kNoSpace : StatusKind::kIo,
                       Status::from_errno(-rc, "create the next epoch").message(), -rc, path);
}

int EpochManager::make_next(const RecordIndex::Next& next, const std::vector<std::uint64_t>& numbers,
                            std::shared_ptr<FsEpoch>* made) {
  const int directory = root_.namespace_directory.get();
  const std::string path = root_.namespace_path();
  // Another server may have been reset, and our epoch removed, since the last poll.
  const bool alone = next.by_reset || reset_made_any_from(ops_, directory, next.least_number);
  if (!alone) {
    for (const std::uint64_t same : {next.least_number, next.least_number - 1}) {
      if (!std::binary_search(numbers.begin(), numbers.end(), same) || made_by_reset(ops_, directory, same))
        continue;
      return open_epoch(ops_, directory, path, same, EpochCreation::kNone, 0, made);
    }
  }
  const std::uint64_t number = std::max(next.least_number, numbers.empty() ? 1 : numbers.back() + 1);
  if (alone) return open_epoch(ops_, directory, path, number, EpochCreation::kByReset, 0, made);
  return open_epoch(ops_, directory, path, number, EpochCreation::kAtStart, removed_id_, made);
}

bool EpochManager::keep(std::vector<std::string>* lost) {
  records_.free_unused();
  if (!records_.epoch()) (void)begin();  // an earlier attempt to create it failed
  std::vector<std::uint64_t> numbers;
  std::shared_ptr<FsEpoch> own = records_.epoch();
  const int directory = root_.namespace_directory.get();
  if (!own || !list_epochs(ops_, directory, &numbers)) return false;
  if (!std::binary_search(numbers.begin(), numbers.end(), own->number) ||
      is_unlinked(ops_, own->directory.get(), directory, layout::epoch_directory_name(own->number))) {
    lost->push_back(layout::epoch_directory_name(own->number) + " with its records");
    removed_id_ = own->id;
    records_.drop(own);
    if (!begin()) return false;
    own = records_.epoch();
    numbers.clear();
    if (!own || !list_epochs(ops_, directory, &numbers)) return false;
  }
  (void)keep_mark(ops_, directory, *own);  // without it, other processes would reclaim the epoch as unused
  records_.set_newer(own, !numbers.empty() && numbers.back() > own->number);
  return numbers.size() > 1;
}

}  // namespace kv_offload
