// SPDX-License-Identifier: Apache-2.0
#include "memory/memory_headroom.h"

#include <sys/statvfs.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>

namespace kv_offload {
namespace {

constexpr std::uint64_t kUnlimited = std::numeric_limits<std::uint64_t>::max();

// "  24 kB" -> 24; nullopt for "max" and anything else that is not a number.
std::optional<std::uint64_t> parse_number(std::string_view text) {
  const std::size_t start = text.find_first_not_of(" \t");
  if (start == std::string_view::npos) return std::nullopt;
  std::uint64_t number = 0;
  const auto [rest, error] = std::from_chars(text.data() + start, text.data() + text.size(), number);
  if (error != std::errc{}) return std::nullopt;
  return number;
}

std::optional<std::uint64_t> read_number(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  if (!std::getline(file, line)) return std::nullopt;
  return parse_number(line);
}

// Returns the number after `name` in a file of "name number" lines.
std::optional<std::uint64_t> read_field(const std::string& path, std::string_view name) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with(name)) return parse_number(std::string_view(line).substr(name.size()));
  }
  return std::nullopt;
}

struct Version {
  std::string_view limit, usage, inactive_file, active_file;
};
constexpr Version kVersion1{"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file ",
                            "total_active_file "};
constexpr Version kVersion2{"memory.max", "memory.current", "inactive_file ", "active_file "};

std::uint64_t left_in_group(const std::string& directory, const Version& version) {
  const auto limit = read_number(fmt::format("{}/{}", directory, version.limit));
  const auto usage = read_number(fmt::format("{}/{}", directory, version.usage));
  if (!limit || !usage) return kUnlimited;
  const std::string stat = directory + "/memory.stat";
  const std::uint64_t droppable =
      read_field(stat, version.inactive_file).value_or(0) + read_field(stat, version.active_file).value_or(0);
  const std::uint64_t held = *usage - std::min(*usage, droppable);
  return *limit - std::min(*limit, held);
}

struct CgroupMount {
  Version version;
  std::string directory;  // mount point
  std::string top;        // the group mounted there
};

// Parses a line of mountinfo: "35 31 0:32 /top /directory rw,.. - cgroup cgroup rw,memory"
std::optional<CgroupMount> parse_mount(const std::string& line) {
  std::istringstream words(line);
  std::string skipped, top, directory, word, type, source, options;
  words >> skipped >> skipped >> skipped >> top >> directory;
  while (words >> word && word != "-") {
  }
  words >> type >> source >> options;
  if (type == "cgroup2") return CgroupMount{kVersion2, directory, top};
  const bool of_memory = ("," + options + ",").find(",memory,") != std::string::npos;
  if (type == "cgroup" && of_memory) return CgroupMount{kVersion1, directory, top};
  return std::nullopt;
}

// Returns the path of this process's group: "4:memory:/a/b" (version 1), "0::/a/b" (2).
std::string group_path(const std::string& root, bool version2) {
  std::ifstream file(root + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    const std::size_t first = line.find(':');
    const std::size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool is_memory_line =
        version2 ? line.starts_with("0::") : ("," + controllers + ",").find(",memory,") != std::string::npos;
    if (is_memory_line) return line.substr(second + 1);
  }
  return {};
}

std::uint64_t left_in_mount(const std::string& root, const CgroupMount& mount) {
  std::string path = group_path(root, mount.version.limit == kVersion2.limit);
  // In a container the mount may show only a part of the tree.
  if (mount.top != "/" && path.starts_with(mount.top)) path.erase(0, mount.top.size());
  std::uint64_t least = kUnlimited;
  while (true) {
    while (!path.empty() && path.back() == '/') path.pop_back();
    least = std::min(least, left_in_group(root + mount.directory + path, mount.version));
    if (path.empty()) return least;
    const std::size_t cut = path.rfind('/');
    path.erase(cut == std::string::npos ? 0 : cut);
  }
}

std::uint64_t left_in_cgroups(const std::string& root) {
  std::uint64_t least = kUnlimited;
  std::ifstream file(root + "/proc/self/mountinfo");
  for (std::string line; std::getline(file, line);) {
    if (const auto mount = parse_mount(line)) least = std::min(least, left_in_mount(root, *mount));
  }
  return least;
}

std::uint64_t left_in_directory(const std::string& directory) {
  struct statvfs figures {};
  if (::statvfs(directory.c_str(), &figures) != 0) {
    throw_resource("shared memory directory {}: {}; mount a tmpfs there (in a container: /dev/shm)",
                   directory, std::strerror(errno));
  }
  if (figures.f_blocks == 0) return kUnlimited;  // a tmpfs mounted with size=0
  return std::uint64_t{figures.f_bavail} * figures.f_frsize;
}

}  // namespace

MemoryHeadroom memory_headroom_under(const std::string& root, const std::string& shm_directory) {
  MemoryHeadroom headroom{left_in_directory(shm_directory), shm_directory};
  const auto limit = [&](std::uint64_t bytes, const char* name) {
    if (bytes < headroom.bytes) headroom = {bytes, name};
  };
  limit(left_in_cgroups(root), "cgroup memory limit");
  if (const auto kib = read_field(root + "/proc/meminfo", "MemAvailable:"))
    limit(*kib * 1024, "MemAvailable");
  return headroom;
}

MemoryHeadroom memory_headroom(const std::string& shm_directory) {
  return memory_headroom_under("", shm_directory);
}

}  // namespace kv_offload
