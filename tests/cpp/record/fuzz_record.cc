// SPDX-License-Identifier: Apache-2.0
// libFuzzer target for the record header. Whatever a file holds, decoding ends in a header that encodes to
// the same page, or in kCorrupt. Clang only (CMake: fuzz_record). The harness corrects the checksum, so that
// the fuzzer gets past it.
#include <xxhash.h>

#include <cstdlib>
#include <cstring>

#include "base/aligned_buffer.h"
#include "record/record_form.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kv_offload;
  const AlignedBuffer page(kRecordHeaderBytes), again(kRecordHeaderBytes);
  // Starts from a good header, so that most inputs are almost valid.
  RecordHeader good;
  good.key = ChunkKey::unchecked("0123456789abcdef0123456789abcdefgrou", 36);
  good.shard_bytes = {5000, 4096};
  good.payload_bytes = good.stored_bytes = 8192 + 4096;
  if (size % 2 == 1) {
    good.codec = Codec::kSplitZstd;
    good.stored_bytes = 5001;
    good.cipher = Cipher::kAes256Gcm;
    good.cipher_fields.salt.fill(5);
  }
  encode_header(good, page.span());
  for (std::size_t i = 0; i < size && i < kRecordHeaderBytes; ++i) page.data()[i] ^= std::byte{data[i]};
  const bool keep_checksum = size > kRecordHeaderBytes;
  const std::uint64_t checksum = XXH3_64bits(page.data(), kRecordHeaderBytes - 8);
  if (!keep_checksum) std::memcpy(page.data() + kRecordHeaderBytes - 8, &checksum, 8);
  RecordHeader header;
  const Status status = decode_header(page.span(), &header);
  if (!status) {
    if (status.kind() != StatusKind::kCorrupt) std::abort();
    return 0;
  }
  encode_header(header, again.span());
  if (std::memcmp(page.data(), again.data(), kRecordHeaderBytes) != 0) std::abort();
  // Reads a record with these shards, whatever the header says. It never succeeds: the payload's checksum is
  // wrong.
  static RecordForm form({});
  static const AlignedBuffer row(8192), second(4096);
  RecordOp op;
  op.key = good.key;
  op.shards = {row.span().first(5000), second.span()};
  static const NamespaceId any{};
  IncomingRecord record(form, any, op);
  std::memcpy(record.header_page().data(), page.data(), kRecordHeaderBytes);
  for (const std::uint64_t bytes : {header.record_bytes(), record.max_bytes()}) {
    if (record.check_length(bytes) && record.open(bytes)) std::abort();
  }
  return 0;
}
