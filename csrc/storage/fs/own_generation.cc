#include "storage/fs/own_generation.h"

#include <algorithm>
#include <cerrno>
#include <utility>
#include <vector>

namespace kv_offload {

Status OwnGeneration::begin() {
  constexpr int kAttempts = 100;
  const std::string path = root_.namespace_path();
  records_.free_unused();
  const MutexLock making(making_);
  int rc = -EBUSY;
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    std::vector<std::uint64_t> numbers;
    if (Status status = list_generations(ops_, root_.namespace_directory.get(), &numbers); !status)
      return status;
    const std::optional<KnownRecords::Next> next = records_.next();
    if (!next) return Status::ok();
    const std::uint64_t number = std::max(next->least_number, numbers.empty() ? 1 : numbers.back() + 1);
    std::shared_ptr<Generation> made;
    rc = open_generation(ops_, root_.namespace_directory.get(), path, number,
                         next->by_reset ? Generate::kByReset : Generate::kAtStart, &made);
    if (rc == -EEXIST || rc == -ENOENT) continue;  // another process resets too
    if (rc < 0) break;
    root_.count(made->directory);
    if (records_.begin(std::move(made), *next, KnownRecords::Extent::kOrder)) {
      root_.space->share_as(sharer(root_.namespace_name, number));
      return Status::ok();
    }
    rc = -EBUSY;
  }
  return Status::error(rc == -ENOSPC || rc == -EDQUOT ? StatusKind::kNoSpace : StatusKind::kIo,
                       Status::from_errno(-rc, "make the next generation").message(), -rc, path);
}

bool OwnGeneration::keep() {
  records_.free_unused();
  std::vector<std::uint64_t> numbers;
  std::shared_ptr<Generation> own = records_.generation();
  if (!own || !list_generations(ops_, root_.namespace_directory.get(), &numbers)) return false;
  if (!std::binary_search(numbers.begin(), numbers.end(), own->number)) {
    records_.drop(own);
    if (!begin()) return false;
    own = records_.generation();
    numbers.clear();
    if (!own || !list_generations(ops_, root_.namespace_directory.get(), &numbers)) return false;
  }
  records_.note_newer(own, !numbers.empty() && numbers.back() > own->number);
  return numbers.size() > 1;
}

}  // namespace kv_offload
