#include "storage/record_pieces.h"

namespace kv_offload {

void RecordPieces::seal() const {
  zero_padding(op_.shards);
  RecordHeader header = make_header(namespace_id_, op_.key, op_.group, op_.shards);
  header.payload_checksum = payload_checksum(op_.shards);
  encode_header(header, page_.span());
}

Status RecordPieces::verify() const {
  // Of all that was read: what pads the shards belongs to the row.
  PayloadChecksum checksum;
  for (const Shard& shard : op_.shards) checksum.add(padded(shard));
  return verify_record(page_.span(), namespace_id_, op_.key, op_.group, op_.shards, checksum.value());
}

}  // namespace kv_offload
