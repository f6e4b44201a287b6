#include "storage/remote_records.h"

#include <algorithm>
#include <cstring>

namespace kv_offload {
namespace {

constexpr std::size_t kNamespaceDigits = 64, kEpochDigits = 32;

bool is_hex(std::string_view text) { return text.find_first_not_of("0123456789abcdef") == text.npos; }

}  // namespace

void parse_remote_name(std::string_view rest, char separator, RemoteRecord* record) {
  if (rest.size() <= kNamespaceDigits || rest[kNamespaceDigits] != separator) return;
  const std::string_view space = rest.substr(0, kNamespaceDigits);
  if (!is_hex(space)) return;
  rest.remove_prefix(kNamespaceDigits + 1);
  if (rest == "epoch") {
    record->namespace_id = space;
    return;
  }
  if (rest.size() <= kEpochDigits || rest[kEpochDigits] != separator) return;
  const std::string_view epoch = rest.substr(0, kEpochDigits), key = rest.substr(kEpochDigits + 1);
  if (!is_hex(epoch) || !is_hex(key) || key.size() % 2 != 0 || !ChunkKey::fits(key.size() / 2)) return;
  record->namespace_id = space;
  record->epoch = epoch;
  record->key = key;
}

void RecordCheck::add(std::span<const std::byte> bytes) noexcept {
  if (total_ < kRecordHeaderBytes) {
    const std::size_t have = static_cast<std::size_t>(total_);
    const std::size_t part = std::min(bytes.size(), kRecordHeaderBytes - have);
    if (part > 0) std::memcpy(page_.data() + have, bytes.data(), part);
    total_ += part;
    bytes = bytes.subspan(part);
  }
  checksum_.add(bytes);
  total_ += bytes.size();
}

Status RecordCheck::check_header(const RemoteRecord& named, std::uint64_t length) const {
  if (length < kRecordHeaderBytes) {
    return Status::error(StatusKind::kCorrupt, fmt::format("{} bytes long, too short for a record", length));
  }
  if (const std::uint32_t version = other_version(page_.span()); version != 0) {
    return Status::error(StatusKind::kUnavailable,
                         fmt::format("a record of version {}, which this release does not know", version));
  }
  RecordHeader header;
  if (Status status = decode_header(page_.span(), &header); !status) return status;
  if (hex_of(header.namespace_id) != named.namespace_id || header.key.hex() != named.key) {
    return Status::error(StatusKind::kCorrupt, "the header is of another namespace or key");
  }
  if (header.payload_bytes + kRecordHeaderBytes == length) return Status::ok();
  return Status::error(StatusKind::kCorrupt, fmt::format("{} bytes long, its header says {}", length,
                                                         header.payload_bytes + kRecordHeaderBytes));
}

std::uint64_t RecordCheck::announced() const {
  RecordHeader header;
  return decode_header(page_.span(), &header) ? header.payload_bytes + kRecordHeaderBytes : 0;
}

Status RecordCheck::finish(const RemoteRecord& named) const {
  if (Status status = check_header(named, total_); !status) return status;
  RecordHeader header;
  if (Status status = decode_header(page_.span(), &header); !status) return status;
  if (checksum_.value() == header.payload_checksum) return Status::ok();
  return Status::error(StatusKind::kCorrupt,
                       fmt::format("payload checksum is {:#018x}, the header says {:#018x}",
                                   checksum_.value(), header.payload_checksum));
}

}  // namespace kv_offload
