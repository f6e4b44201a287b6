// SPDX-License-Identifier: Apache-2.0
// A record as bytes: what an op stores and reads.
#pragma once

#include <gtest/gtest.h>
#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <span>

#include "record/numbers_for_tests.h"
#include "record/record_form.h"

namespace kv_offload::testing {

inline NamespaceId space_of(std::uint8_t number) {
  NamespaceId id;
  id.fill(number);
  return id;
}

inline Bytes bytes_of(RecordForm& form, const RecordOp& op, const NamespaceId& space = space_of(1)) {
  OutgoingRecord record(form, space, op);
  EXPECT_TRUE(record.encode());
  EXPECT_TRUE(record.finish());
  Bytes bytes;
  for (const auto& piece : record.pieces()) bytes.insert(bytes.end(), piece.begin(), piece.end());
  EXPECT_EQ(bytes.size(), record.bytes());
  EXPECT_EQ(record.written(), padded_payload_bytes(op.shards));
  return bytes;
}

inline Status read_bytes(RecordForm& form, const RecordOp& op, const Bytes& bytes,
                         const NamespaceId& space = space_of(1)) {
  IncomingRecord record(form, space, op);
  if (Status status = record.check_length(bytes.size()); !status) return status;
  std::span<const std::byte> from(bytes);
  for (const auto& place : record.pieces()) {
    const std::size_t part = std::min(place.size(), from.size());
    std::copy_n(from.begin(), part, place.begin());
    from = from.subspan(part);
  }
  return record.open(bytes.size());
}

inline void make_header_right(Bytes* bytes) {
  const std::uint64_t checksum = XXH3_64bits(bytes->data(), kRecordHeaderBytes - 8);
  std::memcpy(bytes->data() + kRecordHeaderBytes - 8, &checksum, 8);
}

// Corrects the checksums, as an attacker would.
inline void make_sums_right(Bytes* bytes) {
  const std::uint64_t checksum =
      XXH3_64bits(bytes->data() + kRecordHeaderBytes, bytes->size() - kRecordHeaderBytes);
  std::memcpy(bytes->data() + 120, &checksum, 8);
  make_header_right(bytes);
}

}  // namespace kv_offload::testing
