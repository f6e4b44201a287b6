// SPDX-License-Identifier: Apache-2.0
#include "backends/fs/open_root.h"

#include "backends/fs/record_file.h"

namespace kv_offload {

void OpenRoot::count(const Fd& made) const {
  if (FileInfo info; ops.fstat(made.get(), &info) == 0) space->add(info.charge());
}

int OpenRoot::remove_file(int at, const std::string& name) const {
  const SpaceLedger::Finished before = space->finished();
  std::uint64_t freed = 0;
  const int rc = unlink_file(ops, at, name, &freed);
  space->remove(freed, before);
  return rc;
}

std::function<void(std::uint64_t)> OpenRoot::each_removed() const {
  return [&to = *space, before = space->finished()](std::uint64_t bytes) mutable {
    to.remove(bytes, before);
    before = to.finished();
  };
}

void OpenRoot::close() {
  space->close();
  open_lock.reset();
}

}  // namespace kv_offload
