// SPDX-License-Identifier: Apache-2.0
// RemoteRecords: access to the records under the prefix of a server or a bucket without a tier, for the
// commands stat, ls, verify, purge and copy. RecordCheck: checks that the bytes under a name are the record
// that the name claims; for directories, too.
//
// Servers may write, read and evict concurrently: a listed record may be missing when it is looked at. Memory
// stays bounded whatever a server answers: names arrive in pages, records in pieces.
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
#include "record/encryption.h"
#include "record/record.h"
#include "record/whole_record.h"

namespace kv_offload {

// A name under the prefix and its parsed parts. A record has all three parts, in hex. The name of a
// namespace's epoch has the first part only. Any other name has none.
struct RemoteRecord {
  std::string name;  // as stored on the server: any bytes
  std::string namespace_id, epoch, key;
  std::uint64_t bytes = 0;                                   // size on the server
  std::int64_t used_unix_nanos = 0, written_unix_nanos = 0;  // 0: the server does not report it

  bool is_record() const { return !key.empty(); }
};

// Parses `rest`, the name without the prefix and its separator. REQUIRES: record->name is set.
void parse_remote_name(std::string_view rest, char separator, RemoteRecord* record);

struct RemotePage {
  std::vector<RemoteRecord> records;
  std::string next;  // where the next page starts; empty: this was the last page
};

struct RemoteRemoved {
  std::uint64_t records = 0, bytes = 0;
};

// Each call is bounded: every answer that it waits for must arrive within the deadline set at creation.
class RemoteRecords {
 public:
  virtual ~RemoteRecords() = default;

  // Lists the bytes of records from now on, not the memory that they take on the server.
  virtual void use_record_sizes() {}
  // Sets the keys with which verify() and read() decrypt records. Call before any other method.
  virtual void use_keys(std::shared_ptr<const EncryptionKeys> keys) { keys_ = std::move(keys); }
  // Returns one page of the records of one namespace, or (empty) of all. from: empty, or `next` of the
  // previous page. Records that exist throughout the listing are listed, possibly twice. sizes: include bytes
  // and times.
  virtual Status list(const std::string& namespace_id, std::string from, bool sizes, RemotePage* page) = 0;
  // Reads the creation time from the record's header. 0: unknown, or cannot be read without counting as a
  // use.
  virtual Status written(const RemoteRecord& record, std::int64_t* unix_nanos) = 0;
  // Reads the record's header, even if that counts as a use. kNotFound: it no longer exists. kCorrupt: it has
  // no valid header.
  virtual Status read_header(const RemoteRecord& record, RecordHeader* header) = 0;
  // Reads the whole record. kNotFound: it no longer exists. kCorrupt: it is proven wrong; with `repair` it
  // was removed (*removed), unless another record replaced it meanwhile. Other errors: it could not be read
  // or not be removed.
  virtual Status verify(const RemoteRecord& record, bool repair, bool* removed) = 0;
  // Like verify() without `repair`; *copy becomes the record's bytes if ok.
  virtual Status read(const RemoteRecord& record, WholeRecord* copy) = 0;
  // Reads the epoch that newly started processes of this namespace use; *name is empty if there is none.
  virtual Status read_startup_epoch(const std::string& namespace_id, std::string* name) = 0;
  // Removes the records. Adds those removed to *removed, with their listed bytes, even if it fails midway.
  virtual Status remove(std::span<const RemoteRecord> records, RemoteRemoved* removed) = 0;
  // True if several threads may call this object concurrently: each call waits for one server round trip per
  // record.
  virtual bool takes_threads() const { return false; }
  // True if a removed record is kept as an older version, which still takes up space.
  virtual bool keeps_versions() const { return false; }

 protected:
  const EncryptionKeys* keys() const { return keys_.get(); }

 private:
  std::shared_ptr<const EncryptionKeys> keys_;
};

// Checks the bytes of a record as they arrive, in order. Keeps only the header, and the bytes if there is a
// `copy` for them. With keys, encrypted records are decrypted as well; without keys, the encryption tag is
// not checked. Encoded payloads are not decoded: a payload that the codec cannot read passes if its checksums
// match.
class RecordCheck {
 public:
  // Both must outlive this object.
  explicit RecordCheck(const EncryptionKeys* keys = nullptr, WholeRecord* copy = nullptr);
  void add(std::span<const std::byte> bytes) noexcept;
  // Sets *room to memory for the next bytes, at most `most`: of the header page, then of the copy, if any.
  // add() does not copy bytes that were read to there. Valid until the next call. kIo: out of memory.
  // REQUIRES: no header yet, or check_header() is ok.
  Status room(std::size_t most, std::span<std::byte>* room) noexcept;
  bool has_header() const { return total_ >= kRecordHeaderBytes; }
  // kCorrupt: the length or the header is proven wrong. kUnavailable: the record cannot be judged, because
  // another release wrote it or it was encrypted with a key that we do not have. REQUIRES: has_header(), or
  // all bytes were added.
  Status check_header(const RemoteRecord& named, std::uint64_t length) const;
  // Call after the last byte.
  Status finish(const RemoteRecord& named);
  std::uint64_t total() const { return total_; }
  // The record's length according to its header; 0 without a valid header. REQUIRES: has_header().
  std::uint64_t announced() const { return valid_ ? header_.record_bytes() : 0; }
  std::uint64_t raw_bytes() const { return valid_ ? kRecordHeaderBytes + header_.payload_bytes : 0; }

 private:
  void on_header();
  void keep(std::span<const std::byte> bytes);
  void open(std::span<const std::byte> bytes);

  const EncryptionKeys* const keys_;
  WholeRecord* const copy_;
  const AlignedBuffer page_{kRecordHeaderBytes};
  std::uint64_t total_ = 0;
  PayloadChecksum checksum_;
  RecordHeader header_;
  bool valid_ = false;
  Status decoded_, opened_;
  std::optional<RecordCipher> cipher_;
  AlignedBuffer scratch_;       // room() without a copy
  AlignedBuffer opened_bytes_;  // scratch output of the decryption, never read
};

}  // namespace kv_offload
