// SPDX-License-Identifier: Apache-2.0
// The names inside a root (see fs/tier.h), built and parsed in one place. Only files whose names parse here
// are counted as ours or removed. All other files under the root count against the bound and are left
// unchanged.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "base/types.h"
#include "record/record.h"

namespace kv_offload::layout {

inline constexpr std::string_view kRootFile = "kv_offload.json";
inline constexpr std::string_view kRootText = "{\"kind\": \"kv_offload fs root\", \"format\": 2}\n";
inline constexpr std::string_view kLedgerFile = "ledger";  // LedgerPage
inline constexpr std::string_view kNamespaceFile = "namespace.json";
inline constexpr std::string_view kOpenFile = "open";  // shared flock: a process has the namespace open

// The temporary root of probe_disk(): this and 1 to 20 hex digits.
inline constexpr std::string_view kProbePrefix = ".kv_offload_probe_";
bool is_probe_root(std::string_view name);
// The file of kv_offload/raw_speed.py, which is unlinked at once: this and 8 characters that Python's
// tempfile chooses.
inline constexpr std::string_view kRawPrefix = ".kv_offload_raw_";
bool is_raw_file(std::string_view name);
NamespaceId probe_namespace(std::uint64_t random);  // of one run of probe_root()
bool is_probe_namespace(std::string_view name);

std::string namespace_name(const NamespaceId& id);  // 64 hex digits
bool is_namespace_name(std::string_view name);
std::string epoch_directory_name(std::uint64_t epoch);  // g<N>
std::optional<std::uint64_t> parse_epoch(std::string_view name);
enum class Mark : std::uint8_t { kOpen, kReset };
std::string mark_name(std::uint64_t epoch, Mark kind);  // g<N>.open, g<N>.reset
std::optional<std::uint64_t> parse_mark(std::string_view name);

// One level with few directories: creating a directory costs about as much as writing a small record, and a
// start lists all of them. A million records are 4,000 names per directory, which current file systems look
// up by hash.
inline constexpr std::uint32_t kLeaves = 256;
std::uint32_t leaf_of(const ChunkKey& key);  // from the first byte
std::string leaf_path(std::uint32_t leaf);   // "ab"
std::optional<std::uint8_t> parse_hex_byte(std::string_view name);

// Upper bound on the size in a name. A file with a larger one is counted and left unchanged. 64 million names
// of this size still sum within 64 bits.
inline constexpr std::uint64_t kMostRecordBytes = std::uint64_t{1} << 38;

// Returns "<key hex>.<file bytes>.rec".
std::string record_name(const ChunkKey& key, std::uint64_t file_bytes);
std::string record_path(const ChunkKey& key, std::uint64_t file_bytes);  // prefixed with the leaf directory
struct ParsedRecord {
  ChunkKey key;
  std::uint64_t file_bytes = 0;
};
std::optional<ParsedRecord> parse_record(std::string_view name);
// Returns ".tmp-<pid>-<writer>-<n>". The writer holds an flock on the file while it lives.
std::string temporary_name(std::uint64_t writer, std::uint64_t number);
bool is_temporary(std::string_view name);
std::uint64_t writer_of(std::string_view temporary);
// Returns "open-<writer>". The writer holds an flock on the file while it lives.
std::string presence_name(std::uint64_t writer);
std::optional<std::uint64_t> parse_presence(std::string_view name);

}  // namespace kv_offload::layout
