// The one way a record's bytes reach a file and come back: vectored transfers
// that go on after short counts and EINTR. Any thread; no state.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/aligned_buffer.h"
#include "base/status.h"
#include "storage/fs/file_ops.h"
#include "storage/record.h"

namespace kv_offload {

// The header page and the padded shards, in file order.
std::vector<iovec> record_parts(std::span<std::byte> header_page, std::span<const Shard> shards);

// O_DIRECT can move them.
bool is_aligned(std::span<const Shard> shards);

// Takes the first `bytes` of the parts away from them; fewer when there are no more.
std::vector<iovec> take_front(std::vector<iovec>* parts, std::size_t bytes);

enum class Transfer : std::uint8_t { kRead, kWrite };
// Moves all parts from file offset `from` on. direct: continue only at 4 KiB steps.
// kCorrupt when the file ends early (reads); kIo, kNoSpace with errno otherwise.
Status transfer_all(FileOps& ops, int fd, std::vector<iovec> parts, Transfer direction, bool direct,
                    const std::string& path, std::int64_t from = 0);

// What a reader of an open file found, seen again: a file that does not match and to which its name no longer
// leads was evicted meanwhile, and another record may have been written into it. kNotFound then, no damage.
Status unless_evicted(FileOps& ops, int directory, const std::string& path, std::uint64_t inode,
                      Status found);

// Adds what it took on disk to *freed. 0 or -errno; a file that is gone already is no error.
int unlink_file(FileOps& ops, int directory, const std::string& path, std::uint64_t* freed);

}  // namespace kv_offload
