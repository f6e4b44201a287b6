// SPDX-License-Identifier: Apache-2.0
// Checks record files against their names, for FsRoot::verify. Functions only; they block on storage.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "record/encryption.h"
#include "record/whole_record.h"

namespace kv_offload {

// Checks header and payload of one file against each other, against its name (named_bytes, key in hex) and
// its namespace (hex). With keys, decrypts encrypted records. Errors: kNotFound: vanished; kCorrupt: proven
// wrong; kUnavailable: written by another release, or encrypted with none of the keys; otherwise it could not
// be read.
Status verify_record_file(const std::string& path, std::uint64_t named_bytes, const std::string& namespace_id,
                          const std::string& key, const EncryptionKeys* keys = nullptr);
// Like verify_record_file() for a file with the name of a record; *copy becomes the record's bytes if ok.
// kCorrupt if the file has another name.
Status read_record_file(const std::string& path, const std::string& namespace_id, const EncryptionKeys* keys,
                        WholeRecord* copy);

// Returns when a record was written, in unix nanoseconds, from its header alone. 0 if the header cannot be
// read.
std::int64_t record_created(const std::string& path);

// Returns the files in a namespace's live epochs that are named like records but can never be found:
// misspelt, or in another key's directory. Paths are relative to the root.
std::vector<std::string> stray_records(int root, const std::string& namespace_name);

}  // namespace kv_offload
