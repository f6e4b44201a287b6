// SPDX-License-Identifier: Apache-2.0
#include "backends/s3/records.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <optional>
#include <utility>

#include "backends/s3/list.h"
#include "base/thread_annotations.h"
#include "tier/epoch_registry.h"

namespace kv_offload {
namespace s3 {
namespace {

// A page of 1000 names of 1024 bytes each, all bytes encoded, and the XML around them.
constexpr std::size_t kMostListBytes = std::size_t{8} << 20;
constexpr int kMostReads = 3;  // attempts at a record that others keep writing

// Collects a list up to the maximum length.
class ListSink final : public BodySink {
 public:
  bool take(std::span<const std::byte> bytes) noexcept override {
    too_long_ = too_long_ || bytes.size() > buffer_.size() - length_;
    if (too_long_) return false;
    std::memcpy(buffer_.data() + length_, bytes.data(), bytes.size());
    length_ += bytes.size();
    return true;
  }
  bool too_long() const { return too_long_; }
  std::string_view text() const { return {reinterpret_cast<const char*>(buffer_.data()), length_}; }

 private:
  const AlignedBuffer buffer_{kMostListBytes};
  std::size_t length_ = 0;
  bool too_long_ = false;
};

// Keeps the first page of an object, and stops the transfer there.
class HeaderSink final : public BodySink {
 public:
  bool take(std::span<const std::byte> bytes) noexcept override {
    const std::size_t part = std::min(bytes.size(), page_.size() - size_);
    std::memcpy(page_.data() + size_, bytes.data(), part);
    size_ += part;
    return size_ < page_.size();
  }
  std::span<const std::byte> page() const { return std::span(page_).first(size_); }

 private:
  std::array<std::byte, kRecordHeaderBytes> page_{};
  std::size_t size_ = 0;
};

// Checks a record while it arrives, and stops the transfer when it becomes longer than its header says.
class RecordSink final : public BodySink {
 public:
  bool take(std::span<const std::byte> bytes) noexcept override {
    const bool had_header = check.has_header();
    check.add(bytes);
    try {
      if (!had_header && check.has_header()) max_bytes_ = check.announced();
    } catch (...) {  // out of memory: the record cannot be judged
      failed_ = true;
    }
    ended_ = failed_ || check.total() > max_bytes_;
    return !ended_;
  }
  bool failed() const { return failed_; }
  bool ended() const { return ended_; }
  RecordSink(const EncryptionKeys* keys, WholeRecord* copy) : check(keys, copy) {}
  RecordCheck check;

 private:
  std::uint64_t max_bytes_ = UINT64_MAX;
  bool failed_ = false, ended_ = false;
};

class S3Records final : public RemoteRecords {
 public:
  explicit S3Records(const S3RecordsOptions& options)
      : options_(options), prefix_(options.prefix + "/"), client_(options.bucket, options.pause) {}

  Status list(const std::string& namespace_id, std::string from, bool sizes, RemotePage* page) override
      EXCLUDES(mutex_);
  // An object's time is its record's, and every list contains it.
  Status written(const RemoteRecord& record, std::int64_t* unix_nanos) override {
    *unix_nanos = record.written_unix_nanos;
    return Status::ok();
  }
  Status read_header(const RemoteRecord& record, RecordHeader* header) override;
  Status verify(const RemoteRecord& record, bool repair, bool* removed) override EXCLUDES(mutex_);
  Status read(const RemoteRecord& record, WholeRecord* copy) override {
    std::string etag;
    return read_and_check(record, &etag, copy);
  }
  Status read_startup_epoch(const std::string& namespace_id, std::string* name) override;
  Status remove(std::span<const RemoteRecord> records, RemoteRemoved* removed) override;
  bool takes_threads() const override { return true; }
  bool keeps_versions() const override { return versions_; }

 private:
  Deadline deadline() const { return std::chrono::steady_clock::now() + options_.deadline; }
  Status refused(const Answer& answer, std::string_view permission) const;
  Status read_and_check(const RemoteRecord& record, std::string* etag, WholeRecord* copy = nullptr);
  enum class Removal {
    kNone,     // unchanged
    kDone,     // by this call
    kOther,    // the object is missing or was replaced meanwhile
    kUnknown,  // the request was sent, but no response arrived
  };
  Status remove_version(const std::string& key, const std::string& etag, Removal* removal, bool* other_etag)
      EXCLUDES(mutex_);
  Status supports_conditional_removal(bool* known) EXCLUDES(mutex_);
  Status probe_conditional_removal() REQUIRES(mutex_);

  const S3RecordsOptions options_;
  const std::string prefix_;
  Client client_;
  std::atomic<bool> versions_{false};
  Mutex mutex_;
  std::optional<bool> conditional_ GUARDED_BY(mutex_);
  Status probe_failure_ GUARDED_BY(mutex_);  // why conditional_ is unknown; cleared with the next page
};

Status S3Records::refused(const Answer& answer, std::string_view permission) const {
  if (answer.status == 403 && (answer.code == "AccessDenied" || answer.code.empty())) {
    return Status::error(StatusKind::kIo, fmt::format("access is denied: allow {}", permission));
  }
  const Status status = refusal(answer, options_.bucket);
  return status.kind() == StatusKind::kNotFound
             ? Status::error(StatusKind::kIo,
                             "the bucket does not exist, or the store does not support this request")
             : status;
}

// ---- lists

Status S3Records::list(const std::string& namespace_id, std::string from, bool, RemotePage* page) {
  *page = {};
  {
    const MutexLock lock(mutex_);
    probe_failure_ = Status::ok();
  }
  const std::string below = namespace_id.empty() ? prefix_ : prefix_ + namespace_id + "/";
  // The parameters in the order in which they are signed.
  std::string query = from.empty() ? "" : fmt::format("continuation-token={}&", percent_encoded(from));
  query += fmt::format("encoding-type=url&list-type=2&max-keys={}&prefix={}", options_.page,
                       percent_encoded(below));
  ListSink sink;
  const Request request{.query = query, .sink = &sink};
  Answer answer;
  if (Status status = client_.call(request, deadline(), &answer); !status) return status;
  if (answer.status != 200) return refused(answer, "s3:ListBucket on the bucket");
  if (sink.too_long())
    return Status::error(StatusKind::kIo, "a page of the store's list is longer than 8 MiB");
  ListPage listed;
  if (Status status = parse_list(sink.text(), 2 * std::size_t{options_.page} + 1000, &listed); !status)
    return status;
  if (!from.empty() && listed.next == from) {
    return Status::error(StatusKind::kIo, "the store repeats the same page of the list");
  }
  page->next = listed.next;
  for (Listed& object : listed.objects) {
    if (!object.key.starts_with(below)) {
      return Status::error(StatusKind::kIo, "the store lists objects outside the prefix");
    }
    if (object.key == prefix_ + "conditions") continue;  // our own object, not a record
    RemoteRecord record;
    record.name = std::move(object.key);
    record.bytes = object.bytes;
    record.written_unix_nanos = object.modified_unix_nanos;
    parse_remote_name(std::string_view(record.name).substr(prefix_.size()), '/', &record);
    page->records.push_back(std::move(record));
  }
  return Status::ok();
}

Status S3Records::read_header(const RemoteRecord& record, RecordHeader* header) {
  HeaderSink sink;
  const Request request{.key = record.name, .sink = &sink};
  Answer answer;
  if (Status status = client_.call(request, deadline(), &answer); !status) return status;
  if (answer.status == 404 && answer.code != "NoSuchBucket")
    return Status::error(StatusKind::kNotFound, "it no longer exists");
  if (answer.status != 200) return refused(answer, "s3:GetObject on the objects of the prefix");
  return decode_header(sink.page(), header);
}

// ---- verification

Status S3Records::read_and_check(const RemoteRecord& record, std::string* etag, WholeRecord* copy) {
  RecordSink sink(keys(), copy);
  const Request request{.key = record.name, .sink = &sink};
  Answer answer;
  if (Status status = client_.call(request, deadline(), &answer); !status) return status;
  if (answer.status == 404 && answer.code != "NoSuchBucket")
    return Status::error(StatusKind::kNotFound, "it no longer exists");
  if (answer.status != 200) return refused(answer, "s3:GetObject on the objects of the prefix");
  if (answer.versioned) versions_ = true;
  *etag = answer.etag;
  RecordCheck& check = sink.check;
  if (sink.failed()) return Status::error(StatusKind::kIo, "not enough memory to check it");
  if (sink.ended()) return check.check_header(record, std::max(answer.length, check.total()));
  // Without a length or chunks, a cut connection looks like the end.
  if (!answer.has_length) return Status::error(StatusKind::kIo, "the store does not report its length");
  if (check.total() != answer.length)
    return Status::error(StatusKind::kIo, "the store's response ended too early");
  return check.finish(record);
}

// Finds out whether the store respects If-Match in a DELETE: it must refuse to remove another version than
// the present one. Uses the object that also shows whether the store knows conditions at all (tier.h).
Status S3Records::probe_conditional_removal() {
  Answer answer;
  const Request put{.verb = Verb::kPut, .key = prefix_ + "conditions"};
  if (Status status = client_.call(put, deadline(), &answer); !status) return status;
  if (answer.status != 200) return refused(answer, "s3:PutObject on the objects of the prefix");
  const Request remove{
      .verb = Verb::kDelete, .key = put.key, .condition = "If-Match: \"00000000000000000000000000000000\""};
  if (Status status = client_.call(remove, deadline(), &answer); !status) return status;
  conditional_ = answer.status == 412;
  return Status::ok();
}

Status S3Records::supports_conditional_removal(bool* known) {
  const MutexLock lock(mutex_);
  // Failures are remembered. Otherwise each waiting thread would wait for a store that hangs.
  if (!probe_failure_) return probe_failure_;
  if (!conditional_) probe_failure_ = probe_conditional_removal();
  *known = conditional_.value_or(false);
  return probe_failure_;
}

Status S3Records::remove_version(const std::string& key, const std::string& etag, Removal* removal,
                                 bool* other_etag) {
  bool conditional = false;
  *removal = Removal::kNone;
  if (Status status = supports_conditional_removal(&conditional); !status) return status;
  if (!conditional || etag.empty()) {
    return Status::error(StatusKind::kUnavailable,
                         "the store does not support conditional removal (If-Match), so a newer object could "
                         "be lost; remove it yourself, or purge");
  }
  const Request request{.verb = Verb::kDelete, .key = key, .condition = "If-Match: " + etag, .once = true};
  Answer answer;
  *removal = Removal::kUnknown;
  if (Status status = client_.call(request, deadline(), &answer); !status) return status;
  *removal = Removal::kOther;
  *other_etag = answer.status == 412;
  if (*other_etag || answer.status == 409 || (answer.status == 404 && answer.code != "NoSuchBucket"))
    return Status::ok();
  // A request that failed in the store may have been executed.
  *removal = answer.status >= 500 ? Removal::kUnknown : Removal::kNone;
  if (answer.status != 204 && answer.status != 200)
    return refused(answer, "s3:DeleteObject on the objects of the prefix");
  if (answer.versioned) versions_ = true;
  *removal = Removal::kDone;
  return Status::ok();
}

Status S3Records::verify(const RemoteRecord& record, bool repair, bool* removed) {
  *removed = false;
  std::string refused_etag;
  for (int reads = 0; reads < kMostReads; ++reads) {
    std::string etag;
    Status status = read_and_check(record, &etag);
    if (status.kind() != StatusKind::kCorrupt || !repair) return status;
    if (!etag.empty() && etag == refused_etag) {
      return Status::error(StatusKind::kCorrupt,
                           fmt::format("{}; it was not removed: the store rejects its own ETag in If-Match; "
                                       "remove it yourself, or purge",
                                       status.message()));
    }
    Removal removal = Removal::kNone;
    bool other_etag = false;
    if (Status done = remove_version(record.name, etag, &removal, &other_etag); !done) {
      const char* const then =
          removal == Removal::kUnknown ? "it may have been removed" : "it was not removed";
      return Status::error(StatusKind::kCorrupt,
                           fmt::format("{}; {}: {}", status.message(), then, done.message()));
    }
    *removed = removal == Removal::kDone;
    if (*removed) return status;
    refused_etag = other_etag ? etag : "";
  }
  return Status::error(StatusKind::kIo, "other processes keep writing it while it is read");
}

Status S3Records::read_startup_epoch(const std::string& namespace_id, std::string* name) {
  name->clear();
  const Request request{.key = prefix_ + namespace_id + "/epoch", .text_bytes = EpochRegistry::kNameDigits};
  Answer answer;
  if (Status status = client_.call(request, deadline(), &answer); !status) return status;
  if (answer.status == 404 && answer.code != "NoSuchBucket") return Status::ok();
  if (answer.status != 200) return refused(answer, "s3:GetObject on the objects of the prefix");
  if (!answer.wrong_length && EpochRegistry::is_name(answer.text)) *name = answer.text;
  return Status::ok();
}

// ---- removal

Status S3Records::remove(std::span<const RemoteRecord> records, RemoteRemoved* removed) {
  for (const RemoteRecord& record : records) {
    const Request request{.verb = Verb::kDelete, .key = record.name};
    Answer answer;
    if (Status status = client_.call(request, deadline(), &answer); !status) return status;
    if (answer.versioned) versions_ = true;
    if (answer.status == 404 && answer.code != "NoSuchBucket") continue;
    if (answer.status != 204 && answer.status != 200)
      return refused(answer, "s3:DeleteObject on the objects of the prefix");
    ++removed->records;
    removed->bytes += record.bytes;
  }
  return Status::ok();
}

}  // namespace
}  // namespace s3

std::unique_ptr<RemoteRecords> open_s3_records(const S3RecordsOptions& options) {
  return std::make_unique<s3::S3Records>(options);
}

}  // namespace kv_offload
