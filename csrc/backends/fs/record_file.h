// SPDX-License-Identifier: Apache-2.0
// Transfers a record's bytes to and from a file: vectored transfers that continue after short counts and
// EINTR. Any thread; no state.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "backends/fs/file_ops.h"
#include "base/aligned_buffer.h"
#include "base/status.h"
#include "record/record.h"

namespace kv_offload {

// Returns the header page and the padded shards, in file order.
std::vector<iovec> record_parts(std::span<std::byte> header_page, std::span<const Shard> shards);

// True if O_DIRECT can transfer these shards.
bool is_aligned(std::span<const Shard> shards);

// Removes the first `bytes` of the parts and returns them; fewer if there are no more.
std::vector<iovec> take_front(std::vector<iovec>* parts, std::size_t bytes);

enum class Transfer : std::uint8_t { kRead, kWrite };
// Transfers all parts from file offset `from` on. direct: after a short transfer, continues at a multiple of
// 4 KiB. Errors: kCorrupt if the file ends early (reads); otherwise kIo or kNoSpace with errno.
Status transfer_all(FileOps& ops, int fd, std::vector<iovec> parts, Transfer direction, bool direct,
                    const std::string& path, std::int64_t from = 0);

// Reads the header of a record's file. Errors: like open and read; kCorrupt if it is not a header. info: the
// file's, unless null.
Status read_header(FileOps& ops, int directory, const std::string& path, RecordHeader* header,
                   FileInfo* info = nullptr);

// Checks again what a reader of an open file found. If a file does not match and its name no longer refers to
// it, it was evicted meanwhile, and another record may have been written into it. Then returns kNotFound
// instead of damage.
Status unless_evicted(FileOps& ops, int directory, const std::string& path, std::uint64_t inode,
                      Status found);

// Adds the file's disk space to *freed. Returns 0 or -errno; a missing file counts as success.
int unlink_file(FileOps& ops, int directory, const std::string& path, std::uint64_t* freed);

}  // namespace kv_offload
