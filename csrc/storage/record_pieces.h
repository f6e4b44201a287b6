// RecordPieces: a record where its bytes are, for stores that hand whole records to a library: a page for the
// header, then the shards of an op, each as far as it is padded.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/aligned_buffer.h"
#include "storage/record.h"
#include "storage/tier.h"

namespace kv_offload {

class RecordPieces {
 public:
  // Both outlive it.
  RecordPieces(const TierOp& op, const NamespaceId& namespace_id) : op_(op), namespace_id_(namespace_id) {}

  std::uint64_t payload_bytes() const { return padded_payload_bytes(op_.shards); }
  std::uint64_t bytes() const { return kRecordHeaderBytes + payload_bytes(); }
  std::span<std::byte> header_page() const { return page_.span(); }
  // In order; const std::byte or std::byte.
  template <typename Byte>
  std::vector<std::span<Byte>> all() const {
    std::vector<std::span<Byte>> pieces{page_.span()};
    for (const Shard& shard : op_.shards) pieces.emplace_back(padded(shard));
    return pieces;
  }

  // Before a write: zeros behind the shards, and the header of a record written now.
  void seal() const;
  // After all of it was read: is it the record of the op. kCorrupt if not.
  Status verify() const;

 private:
  static std::span<std::byte> padded(const Shard& shard) {
    return {shard.data(), round_up(shard.size(), kPageBytes)};
  }

  const TierOp& op_;
  const NamespaceId& namespace_id_;
  const AlignedBuffer page_{kRecordHeaderBytes};
};

}  // namespace kv_offload
