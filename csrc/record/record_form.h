// SPDX-License-Identifier: Apache-2.0
// The transformation between the shards of an op and the stored bytes of its record, for all kinds of stores:
//
//   RecordForm       how a store writes: raw or encoded, encrypted or not
//   OutgoingRecord   a record being written: where its stored bytes are
//   IncomingRecord   a record being read: where its stored bytes go, and their verification
//
// Raw and unencrypted records need no transformation: the stored bytes are the shards, in place. Otherwise a
// write builds the stored bytes in a buffer. A read puts the stored bytes into the shards' memory, because a
// record is never longer than a raw one. They are decrypted there, step by step while they are in the CPU's
// cache, and decoded from a buffer.
//
// Invariants: IncomingRecord::finish() returns ok only if header, length and checksum match (for an encrypted
// record its tag instead of the checksum); the shards then hold the written bytes. A store with keys rejects
// records that are not encrypted. A buffer belongs to one record or is free; there are at most as many
// buffers as threads that are inside at the same time.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/aligned_buffer.h"
#include "base/status.h"
#include "base/thread_annotations.h"
#include "record/compression_choice.h"
#include "record/encryption.h"
#include "record/huge_buffer.h"
#include "record/lossy_codec.h"
#include "record/record.h"
#include "record/record_op.h"

namespace kv_offload {

// Bytes of the records that were read from and written to the tier: headers, encoded payload, padding.
struct RecordTraffic {
  std::atomic<std::uint64_t> read_bytes{0}, written_bytes{0};
};

struct RecordFormOptions {
  std::shared_ptr<CompressionChoice> compression = {};  // null: raw
  std::shared_ptr<const EncryptionKeys> keys = {};      // null: not encrypted
  // Largest loss of a record that may be read; zeros: none. Not only of records that this store encodes: the
  // namespace has the bounds of the tier that may lose something.
  ErrorBounds bounds = {};
  std::vector<KvRuns> runs = {};  // by position of the group; unknown for a group without an entry
  // Shared by all copies of these options: the store counts, the tier reports. Never null.
  std::shared_ptr<RecordTraffic> traffic = std::make_shared<RecordTraffic>();
};

// Any thread.
class RecordForm {
 public:
  // Each step is copied, checksummed, encrypted or decrypted before the next one, while it is in the nearest
  // cache that holds it.
  static constexpr std::size_t kStepBytes = std::size_t{256} << 10;

  explicit RecordForm(const RecordFormOptions& options) : options_(options) {}

  const EncryptionKeys* keys() const { return options_.keys.get(); }
  CompressionChoice* compression() const { return options_.compression.get(); }
  RecordTraffic& traffic() const { return *options_.traffic; }
  PayloadCodec& payload_codec() { return payload_codec_; }
  LossyCodec& lossy_codec() { return lossy_codec_; }
  const ErrorBounds& bounds() const { return options_.bounds; }
  KvRuns runs(std::uint32_t group) const {
    return group < options_.runs.size() ? options_.runs[group] : KvRuns{};
  }
  // Returns null if memory runs out.
  std::unique_ptr<HugeBuffer> take_buffer(std::uint64_t bytes) EXCLUDES(mutex_);
  void give_back(std::unique_ptr<HugeBuffer> buffer) noexcept EXCLUDES(mutex_);

 private:
  const RecordFormOptions options_;
  PayloadCodec payload_codec_;
  LossyCodec lossy_codec_;
  Mutex mutex_;
  std::vector<std::unique_ptr<HugeBuffer>> free_ GUARDED_BY(mutex_);
};

// One thread.
class OutgoingRecord {
 public:
  // The arguments must outlive this object. Zeroes the padding of the shards.
  OutgoingRecord(RecordForm& form, const NamespaceId& namespace_id, const RecordOp& op);
  ~OutgoingRecord() { form_.give_back(std::move(buffer_)); }
  OutgoingRecord(const OutgoingRecord&) = delete;
  OutgoingRecord& operator=(const OutgoingRecord&) = delete;

  // Call first. kCorrupt: a whole record is not a record of this key and namespace. Encodes the payload if
  // the form chose the codec and it saves space. From here on bytes() is the final record size.
  Status encode();
  std::uint64_t bytes() const { return header_.record_bytes(); }
  // The size of the record if it were raw.
  std::uint64_t raw_bytes() const { return kRecordHeaderBytes + header_.payload_bytes; }
  bool in_place() const {
    return !op_.is_whole_record && header_.codec == Codec::kRaw && form_.keys() == nullptr;
  }
  // In place: complete except for its checksum, for stores that compute the sum while they move the bytes.
  const RecordHeader& header() const { return header_; }
  // Encrypts, checksums and builds the header. REQUIRES: encode() was called.
  Status finish();
  // In order, valid as long as this object. REQUIRES: finish() was called.
  const std::vector<std::span<const std::byte>>& pieces() const { return pieces_; }
  // Call when the store has the record. Only now the codec's result is reported to the choice, because only
  // successful ops count. Returns the raw payload bytes moved.
  std::uint64_t written();

 private:
  // Result of the codec, whether it saved space or not.
  struct EncodeAttempt {
    std::uint64_t stored_bytes = 0;
    double seconds = 0;
  };
  Status take_whole_record(const NamespaceId& namespace_id);
  // Encodes with loss if the form allows it and the element has a codec for that, otherwise without. Returns
  // the bytes in `out`; 0: it would not become smaller; nullopt: memory ran out.
  std::optional<std::uint64_t> encode_into(std::span<std::byte> out);
  bool take_buffer(std::uint64_t payload_bytes);
  Status encrypt_into_buffer();

  RecordForm& form_;
  const RecordOp& op_;
  RecordHeader header_;
  Status whole_record_;                   // of an op with a whole record: why it cannot be stored
  std::optional<EncodeAttempt> attempt_;  // not reported yet
  std::unique_ptr<HugeBuffer> buffer_;    // header page, then the stored bytes
  std::optional<AlignedBuffer> page_;
  std::vector<std::span<const std::byte>> pieces_;
};

// One thread. Calls in this order: begin() when the header page is full, add() for the bytes after it,
// finish().
class IncomingRecord {
 public:
  // The arguments must outlive this object.
  IncomingRecord(RecordForm& form, const NamespaceId& namespace_id, const RecordOp& op);
  IncomingRecord(RecordForm&, NamespaceId&&, const RecordOp&) = delete;
  ~IncomingRecord() { form_.give_back(std::move(buffer_)); }
  IncomingRecord(const IncomingRecord&) = delete;
  IncomingRecord& operator=(const IncomingRecord&) = delete;

  std::uint64_t payload_bytes() const { return payload_bytes_; }  // raw
  std::uint64_t max_bytes() const { return kRecordHeaderBytes + payload_bytes_; }
  // Returns kCorrupt if a record of this op cannot have this many bytes.
  Status check_length(std::uint64_t bytes) const;
  std::span<std::byte> header_page() const { return page_.span(); }
  // The header page, then the shards including padding: max_bytes() in total, filled from the front.
  std::vector<std::span<std::byte>> pieces() const;

  // `bytes`: the record's length. kCorrupt: the record does not belong to the op. kNotFound: another release
  // wrote it.
  Status begin(std::uint64_t bytes);
  // Adds the next stored bytes and moves them to `to`, their place in pieces(). `from` may be the same place.
  Status add(const std::byte* from, std::span<std::byte> to);
  // kCorrupt: the added bytes do not match the header, or were not encrypted with one of our keys.
  Status finish();
  // Runs all steps for a record of `bytes` bytes that is already in pieces().
  Status open(std::uint64_t bytes);

 private:
  Status decode();

  RecordForm& form_;
  const NamespaceId& namespace_id_;
  const RecordOp& op_;
  const std::uint64_t payload_bytes_;
  const AlignedBuffer page_{kRecordHeaderBytes};
  RecordHeader header_;
  std::uint64_t added_ = 0;
  PayloadChecksum checksum_;
  std::optional<RecordCipher> cipher_;
  std::unique_ptr<HugeBuffer> buffer_;
};

}  // namespace kv_offload
