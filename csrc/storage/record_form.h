// What lies between the shards of an op and the stored bytes of its record, for all kinds of stores:
//
//   RecordForm       how a store writes: raw or encoded, sealed or not
//   OutgoingRecord   a record to be written: where its stored bytes are
//   IncomingRecord   a record that is read: where its stored bytes go, and what they were
//
// Raw and not sealed, nothing lies between: the stored bytes are those of the shards, in place. Otherwise a
// write makes them in a buffer. A read puts the stored bytes where the shards are, for a record is never
// longer than a raw one; they are opened there, step by step while they are in the CPU's cache, and decoded
// from a buffer.
//
// Invariants: IncomingRecord::finish() is ok only if header, length and checksum were compared, of a sealed
// record its tag in place of the checksum, and the shards then hold what was written; a store with keys takes
// no record that is not sealed. A buffer is one record's, or free; there is at most one for each thread that
// is inside at once.
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
#include "storage/compression_choice.h"
#include "storage/huge_buffer.h"
#include "storage/record.h"
#include "storage/sealing.h"
#include "storage/tier.h"

namespace kv_offload {

// Bytes that records took on their tier when they were read and written: headers, encoded payload, padding.
struct RecordTraffic {
  std::atomic<std::uint64_t> read_bytes{0}, written_bytes{0};
};

struct RecordFormOptions {
  std::shared_ptr<CompressionChoice> compression = {};  // null: raw
  std::shared_ptr<const SealingKeys> keys = {};         // null: not sealed
  // Shared by all copies of these options: the store counts, the tier reports. Never null.
  std::shared_ptr<RecordTraffic> traffic = std::make_shared<RecordTraffic>();
};

// Any thread.
class RecordForm {
 public:
  // Copied, summed, sealed or opened before the next is: while it is in the nearest cache that it fits.
  static constexpr std::size_t kStepBytes = std::size_t{256} << 10;

  explicit RecordForm(const RecordFormOptions& options) : options_(options) {}

  const SealingKeys* keys() const { return options_.keys.get(); }
  CompressionChoice* compression() const { return options_.compression.get(); }
  RecordTraffic& traffic() const { return *options_.traffic; }
  PayloadCodec& payload_codec() { return payload_codec_; }
  // Null: there is no memory.
  std::unique_ptr<HugeBuffer> take_buffer(std::uint64_t bytes) EXCLUDES(mutex_);
  void give_back(std::unique_ptr<HugeBuffer> buffer) noexcept EXCLUDES(mutex_);

 private:
  const RecordFormOptions options_;
  PayloadCodec payload_codec_;
  Mutex mutex_;
  std::vector<std::unique_ptr<HugeBuffer>> free_ GUARDED_BY(mutex_);
};

// One thread.
class OutgoingRecord {
 public:
  // All of it outlives this. Makes the pads of the shards zero.
  OutgoingRecord(RecordForm& form, const NamespaceId& namespace_id, const TierOp& op);
  ~OutgoingRecord() { form_.give_back(std::move(buffer_)); }
  OutgoingRecord(const OutgoingRecord&) = delete;
  OutgoingRecord& operator=(const OutgoingRecord&) = delete;

  // First: the codec, where the form has chosen it and it gains. From here on bytes() is what it will take.
  Status encode();
  std::uint64_t bytes() const { return header_.record_bytes(); }
  bool in_place() const { return header_.codec == Codec::kRaw && form_.keys() == nullptr; }
  // In place: all but its checksum, for who sums while it moves them.
  const RecordHeader& header() const { return header_; }
  // Seals, sums, makes the header. REQUIRES: encoded.
  Status finish();
  // In order, until this goes. REQUIRES: finished.
  const std::vector<std::span<const std::byte>>& pieces() const { return pieces_; }
  // The store has it: only now the choice is told what the codec did, as it is told of ops that end well.
  // Returns how many bytes of payload were moved, raw.
  std::uint64_t written();

 private:
  // What the codec made of the payload, whether or not it gained.
  struct Tried {
    std::uint64_t stored_bytes = 0;
    double seconds = 0;
  };
  bool take_buffer(std::uint64_t payload_bytes);
  Status seal_into_buffer();

  RecordForm& form_;
  const TierOp& op_;
  RecordHeader header_;
  std::optional<Tried> tried_;          // not told yet
  std::unique_ptr<HugeBuffer> buffer_;  // header page, then what is stored
  std::optional<AlignedBuffer> page_;
  std::vector<std::span<const std::byte>> pieces_;
};

// One thread. Calls in this order: begin() when the header page is full, add() for what follows, finish().
class IncomingRecord {
 public:
  // All of it outlives this.
  IncomingRecord(RecordForm& form, const NamespaceId& namespace_id, const TierOp& op);
  IncomingRecord(RecordForm&, NamespaceId&&, const TierOp&) = delete;
  ~IncomingRecord() { form_.give_back(std::move(buffer_)); }
  IncomingRecord(const IncomingRecord&) = delete;
  IncomingRecord& operator=(const IncomingRecord&) = delete;

  std::uint64_t payload_bytes() const { return payload_bytes_; }  // raw
  std::uint64_t most_bytes() const { return kRecordHeaderBytes + payload_bytes_; }
  // May a record of this op have so many bytes. kCorrupt if not.
  Status check_length(std::uint64_t bytes) const;
  std::span<std::byte> header_page() const { return page_.span(); }
  // The header page, then the shards as far as they are padded: most_bytes() in all, filled from the front.
  std::vector<std::span<std::byte>> pieces() const;

  // `bytes`: of the record. kCorrupt: it is not that of the op. kNotFound: another release has written it.
  Status begin(std::uint64_t bytes);
  // The next of the stored bytes, from where they are to their place in pieces(); these may be the same.
  Status add(const std::byte* from, std::span<std::byte> to);
  // kCorrupt: what was added is not what the header says, or was not sealed by a key of ours.
  Status finish();
  // All of it, of a record of so many bytes that lies in pieces().
  Status open(std::uint64_t bytes);

 private:
  Status decode();

  RecordForm& form_;
  const NamespaceId& namespace_id_;
  const TierOp& op_;
  const std::uint64_t payload_bytes_;
  const AlignedBuffer page_{kRecordHeaderBytes};
  RecordHeader header_;
  std::uint64_t added_ = 0;
  PayloadChecksum checksum_;
  std::optional<RecordCipher> cipher_;
  std::unique_ptr<HugeBuffer> buffer_;
};

}  // namespace kv_offload
