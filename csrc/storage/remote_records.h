// RemoteRecords: the records under the prefix of a server or a bucket, for who looks after them without a
// tier (the commands stat, ls, verify and purge). RecordCheck: is what lies under a name the record that it
// says; for directories, too.
//
// Servers may write, read and evict there meanwhile: what is listed may be gone when it is looked at.
// Whatever a server answers, memory stays bounded: names come in pages, records in pieces.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/aligned_buffer.h"
#include "base/status.h"
#include "storage/record.h"
#include "storage/sealing.h"

namespace kv_offload {

// What a name under the prefix stands for. Records have all three parts, in hex; the name of a namespace's
// epoch has the first only, and what is neither has none.
struct RemoteRecord {
  std::string name;  // as the server has it: any bytes
  std::string namespace_id, epoch, key;
  std::uint64_t bytes = 0;                                   // that it takes there
  std::int64_t used_unix_nanos = 0, written_unix_nanos = 0;  // 0: the server does not say

  bool is_record() const { return !key.empty(); }
};

// `rest` is what follows the prefix and its separator. REQUIRES: record->name is set.
void parse_remote_name(std::string_view rest, char separator, RemoteRecord* record);

struct RemotePage {
  std::vector<RemoteRecord> records;
  std::string next;  // where to go on; empty: that was all
};

struct RemoteRemoved {
  std::uint64_t records = 0, bytes = 0;
};

// Each call ends within the deadline that it was opened with, for each answer that it waits for.
class RemoteRecords {
 public:
  virtual ~RemoteRecords() = default;

  // With which verify() opens what is sealed. Before any other call.
  virtual void use_keys(std::shared_ptr<const SealingKeys> keys) { keys_ = std::move(keys); }
  // A page of what is there, of one namespace or (empty) of all; from: empty, or the `next` of the page
  // before. What was there all the time is listed, maybe twice. sizes: with bytes and times.
  virtual Status list(const std::string& namespace_id, std::string from, bool sizes, RemotePage* page) = 0;
  // When it was written, as its header says; 0: unknown, or not to be found out without counting as a use.
  virtual Status written(const RemoteRecord& record, std::int64_t* unix_nanos) = 0;
  // Reads all of it. kNotFound: it is gone; kCorrupt: it is proven wrong, and with `repair` it was removed
  // (*removed) unless another took its place meanwhile; else it could not be read, or not be removed.
  virtual Status verify(const RemoteRecord& record, bool repair, bool* removed) = 0;
  // Adds to *removed what is gone by it, with the bytes that it was listed with; also when it fails on the
  // way.
  virtual Status remove(std::span<const RemoteRecord> records, RemoteRemoved* removed) = 0;
  // May several threads call it at once: each call of it waits for the server once for each record.
  virtual bool takes_threads() const { return false; }
  // Removing leaves what was there as an older version, which still takes its space.
  virtual bool keeps_versions() const { return false; }

 protected:
  const SealingKeys* keys() const { return keys_.get(); }

 private:
  std::shared_ptr<const SealingKeys> keys_;
};

// The bytes of a record as they come, in order. Only its header is kept. With keys what is sealed is opened,
// too; without, its seal is not looked at. What is encoded is not decoded: a payload that the codec cannot
// read passes under right checksums.
class RecordCheck {
 public:
  explicit RecordCheck(const SealingKeys* keys = nullptr);  // which outlive it
  void add(std::span<const std::byte> bytes) noexcept;
  bool has_header() const { return total_ >= kRecordHeaderBytes; }
  // kCorrupt: proven wrong by its length or its header. kUnavailable: nothing can be said of it, for another
  // release has written it or none of the keys has sealed it. REQUIRES: has_header(), or that all of it came.
  Status check_header(const RemoteRecord& named, std::uint64_t length) const;
  // After the last byte.
  Status finish(const RemoteRecord& named);
  std::uint64_t total() const { return total_; }
  // Of its header, as it says; 0: it has none that can be believed. REQUIRES: has_header().
  std::uint64_t announced() const { return valid_ ? header_.record_bytes() : 0; }
  std::uint64_t raw_bytes() const { return valid_ ? kRecordHeaderBytes + header_.payload_bytes : 0; }

 private:
  void note_header();
  void open(std::span<const std::byte> bytes);

  const SealingKeys* const keys_;
  const AlignedBuffer page_{kRecordHeaderBytes};
  std::uint64_t total_ = 0;
  PayloadChecksum checksum_;
  RecordHeader header_;
  bool valid_ = false;
  Status decoded_, opened_;
  std::optional<RecordCipher> cipher_;
  AlignedBuffer opened_bytes_;  // looked at by nobody
};

}  // namespace kv_offload
