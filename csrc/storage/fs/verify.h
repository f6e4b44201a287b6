// Is a file what its name says: for FsRoot::verify. Functions only; they block on
// storage.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "storage/sealing.h"

namespace kv_offload {

// Header and payload of one file, checked against each other, its name
// (named_bytes, key in hex) and its namespace (hex); with keys what is sealed is
// opened. kNotFound: vanished; kCorrupt: proven wrong; kUnavailable: another
// release has written it, or none of the keys has sealed it; else it could not
// be read.
Status verify_record_file(const std::string& path, std::uint64_t named_bytes, const std::string& namespace_id,
                          const std::string& key, const SealingKeys* keys = nullptr);

// When a record was written, in unix nanoseconds: its header is read, nothing
// else. 0 when it cannot be.
std::int64_t record_created(const std::string& path);

// Files of a namespace's live generations that are named as records are but
// cannot be found as one: misspelt, or in another key's directory. Paths below
// the root.
std::vector<std::string> stray_records(int root, const std::string& namespace_name);

}  // namespace kv_offload
