// SPDX-License-Identifier: Apache-2.0
#include "backends/fs/root_repairer.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>

#include <cerrno>
#include <exception>
#include <filesystem>
#include <utility>

#include "backends/fs/layout.h"
#include "backends/fs/root_files.h"

namespace kv_offload {
namespace {

FsTierOptions without_warnings(FsTierOptions options) {
  options.warn = [](const std::string&) {};
  return options;
}

}  // namespace

RootRepairer::RootRepairer(const FsTierOptions& options, const OpenRoot& root)
    : options_(options), quietly_(without_warnings(options)), root_(root), ops_(root.ops) {
  if (FileInfo info; ops_.fstat(root_.directory.get(), &info) == 0) device_ = info.device;
}

std::vector<std::string> RootRepairer::poll(const std::shared_ptr<FsEpoch>& own) {
  std::vector<std::string> lost;
  problem_.clear();
  try {
    repair_root(&lost);
    if (problem_.empty()) repair_files(&lost);
  } catch (const std::exception& error) {
    problem_ = error.what();
  }
  if (problem_.empty()) check_modes(own);
  if (!problem_.empty() && problem_ != warned_problem_) options_.warn(problem_);
  warned_problem_ = problem_;
  return lost;
}

void RootRepairer::repair_root(std::vector<std::string>* lost) {
  const std::filesystem::path path(root_.path);
  FileInfo held, named, parent;
  // A relative path refers to another place once the process has changed its directory.
  if (!path.is_absolute() || ops_.fstat(root_.directory.get(), &held) != 0) return;
  const int rc = ops_.stat(AT_FDCWD, root_.path, &named);
  const bool missing = rc == -ENOENT;
  if (!missing && (rc != 0 || (named.inode == held.inode && named.device == held.device))) return;
  const std::string above = (path.has_filename() ? path : path.parent_path()).parent_path().string();
  const bool parent_exists = ops_.stat(AT_FDCWD, above, &parent) == 0;
  if (missing ? !parent_exists || parent.device != device_ : named.device != device_) {
    problem_ = fmt::format(
        "{} is no longer the directory that this server opened, and another file system is there "
        "(unmounted?): this server creates nothing there and keeps using the directory that it opened; "
        "mount the file system again",
        root_.path);
    return;
  }
  const Fd again = open_root_directory(quietly_, ops_);
  if (ops_.replace(root_.directory.get(), again.get()) == 0) lost->emplace_back("the directory");
}

bool RootRepairer::is_replaced(const std::string& name, std::uint64_t size) const {
  FileInfo info;
  const int directory = name == layout::kRootFile ? root_.directory.get() : root_.namespace_directory.get();
  const int rc = ops_.stat(directory, name, &info);
  return rc == -ENOENT || (rc == 0 && info.size != size);
}

void RootRepairer::repair_files(std::vector<std::string>* lost) {
  (void)ops_.refresh(root_.directory.get(), ".");
  const std::string format(layout::kRootFile), description(layout::kNamespaceFile);
  if (is_replaced(format, layout::kRootText.size())) {
    write_format(quietly_, ops_, root_);
    lost->push_back(format);
  }
  const int directory = root_.namespace_directory.get();
  const bool whole = is_unlinked(ops_, directory, root_.directory.get(), root_.namespace_name);
  const bool lock =
      !whole && is_unlinked(ops_, root_.open_lock.get(), directory, std::string(layout::kOpenFile));
  const bool described =
      !whole && !options_.namespace_json.empty() && is_replaced(description, options_.namespace_json.size());
  if (!whole && !lock && !described) return;
  const NamespaceFiles made = open_namespace(quietly_, ops_, root_, kUpkeepLockWait);
  // The directory first: a lock in a removed directory is useless.
  if (ops_.replace(directory, made.directory.get()) != 0 ||
      ops_.replace(root_.open_lock.get(), made.open_lock.get()) != 0)
    return;
  if (whole) lost->push_back("the namespace " + root_.namespace_name.substr(0, 12));
  if (lock) lost->push_back(std::string(layout::kOpenFile));
  if (described) lost->push_back(description);
}

// A chmod is an operator's decision, so it is only reported. It must not look like a device failure.
void RootRepairer::check_modes(const std::shared_ptr<FsEpoch>& own) {
  const auto check = [&](const Fd& directory, const std::string& path) {
    FileInfo info;
    if (!problem_.empty() || ops_.fstat(directory.get(), &info) != 0 || info.links == 0) return;
    if ((info.mode & S_IRWXU) != S_IRWXU) {
      problem_ = fmt::format("{} has mode {:o} now, and this server cannot use it: chmod 700 it", path,
                             info.mode & 07777);
    } else if ((info.mode & (S_IWGRP | S_IWOTH)) != 0) {
      problem_ = fmt::format("{} has mode {:o} now: other users can forge records; chmod 700 it", path,
                             info.mode & 07777);
    }
  };
  check(root_.directory, root_.path);
  check(root_.namespace_directory, root_.namespace_path());
  if (own) check(own->directory, own->path);
}

}  // namespace kv_offload
