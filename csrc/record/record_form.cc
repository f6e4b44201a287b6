// SPDX-License-Identifier: Apache-2.0
#include "record/record_form.h"

#include <algorithm>
#include <cstring>
#include <new>

namespace kv_offload {
namespace {

std::span<std::byte> padded(const Shard& shard) { return {shard.data(), round_up(shard.size(), kPageBytes)}; }

// kUnavailable: running out of memory does not count against the device.
Status no_buffer() { return Status::error(StatusKind::kUnavailable, "out of memory for a record buffer"); }

}  // namespace

std::unique_ptr<HugeBuffer> RecordForm::take_buffer(std::uint64_t bytes) {
  std::unique_ptr<HugeBuffer> buffer;
  {
    const MutexLock lock(mutex_);
    if (!free_.empty()) {
      buffer = std::move(free_.back());
      free_.pop_back();
    }
  }
  if (buffer && buffer->size() >= bytes) return buffer;
  buffer = std::make_unique<HugeBuffer>(bytes);
  return buffer->data() == nullptr ? nullptr : std::move(buffer);
}

void RecordForm::give_back(std::unique_ptr<HugeBuffer> buffer) noexcept {
  if (!buffer) return;
  try {
    const MutexLock lock(mutex_);
    free_.push_back(std::move(buffer));
  } catch (const std::bad_alloc&) {  // the buffer is freed instead
  }
}

// ---- writing

OutgoingRecord::OutgoingRecord(RecordForm& form, const NamespaceId& namespace_id, const RecordOp& op)
    : form_(form), op_(op) {
  if (op.is_whole_record) {
    whole_record_ = take_whole_record(namespace_id);
    return;
  }
  header_ = make_header(namespace_id, op.key, op.group, op.shards);
  header_.tenant = op.tenant;
  if (form.compression() != nullptr) header_.element = form.compression()->lossless_element(op.group);
  zero_padding(op.shards);
}

Status OutgoingRecord::take_whole_record(const NamespaceId& namespace_id) {
  const std::span<const std::byte> bytes(op_.shards[0].data(), op_.shards[0].size());
  if (bytes.size() < kRecordHeaderBytes)
    return Status::error(StatusKind::kCorrupt,
                         fmt::format("{} bytes are too short for a record", bytes.size()));
  if (Status status = decode_header(bytes.first(kRecordHeaderBytes), &header_); !status) return status;
  if (header_.namespace_id != namespace_id || header_.key != op_.key)
    return Status::error(StatusKind::kCorrupt, "the header names another namespace or key");
  if (header_.record_bytes() == bytes.size()) return Status::ok();
  return Status::error(StatusKind::kCorrupt, fmt::format("{} bytes long, its header says {}", bytes.size(),
                                                         header_.record_bytes()));
}

bool OutgoingRecord::take_buffer(std::uint64_t payload_bytes) {
  if (!buffer_) buffer_ = form_.take_buffer(kRecordHeaderBytes + payload_bytes);
  return buffer_ != nullptr;
}

Status OutgoingRecord::encode() {
  if (op_.is_whole_record) return whole_record_;
  CompressionChoice* choice = form_.compression();
  if (choice == nullptr || header_.payload_bytes <= kPageBytes || !choice->next_is_encoded(op_.group))
    return Status::ok();
  // A payload that cannot be encoded is stored raw, even when memory runs out.
  const bool may_lose = LossyCodec::handles(choice->lossy_element(op_.group));
  const std::uint64_t room = std::max(PayloadCodec::encoded_bytes_at_most(op_.shards),
                                      may_lose ? LossyCodec::encoded_bytes_at_most(op_.shards) : 0) +
                             kPageBytes;
  if (!take_buffer(std::max(header_.payload_bytes, room))) return Status::ok();
  const std::span<std::byte> out(buffer_->data() + kRecordHeaderBytes, buffer_->size() - kRecordHeaderBytes);
  const Nanos began = choice->clock().now();
  const std::optional<std::uint64_t> bytes = encode_into(out);
  const double seconds = to_seconds(choice->clock().now() - began);
  const std::uint64_t pages = round_up(bytes.value_or(0), kPageBytes);
  const bool gains = pages != 0 && pages < header_.payload_bytes;
  if (bytes) attempt_ = EncodeAttempt{gains ? pages : header_.payload_bytes, seconds};
  if (!gains) {
    header_.codec = Codec::kRaw;
    header_.element = choice->lossless_element(op_.group);
    header_.loss = {};
    return Status::ok();
  }
  std::memset(out.data() + *bytes, 0, pages - *bytes);
  header_.stored_bytes = *bytes;
  return Status::ok();
}

std::optional<std::uint64_t> OutgoingRecord::encode_into(std::span<std::byte> out) {
  const CompressionChoice& choice = *form_.compression();
  std::uint64_t bytes = 0;
  if (const Element element = choice.lossy_element(op_.group); LossyCodec::handles(element)) {
    header_.codec = Codec::kLossy;
    header_.element = element;
    if (form_.lossy_codec().encode(op_.shards, element, choice.bounds(op_.group), form_.runs(op_.group),
                                   choice.factors(op_.group), out, &bytes, &header_.loss) &&
        bytes > 0)
      return bytes;
    header_.loss = {};
  }
  header_.codec = Codec::kSplitZstd;
  header_.element = choice.lossless_element(op_.group);
  if (!form_.payload_codec().encode(op_.shards, header_.element, out, &bytes)) return std::nullopt;
  return bytes;
}

std::uint64_t OutgoingRecord::written() {
  if (attempt_)
    form_.compression()->encoded(op_.group, header_.payload_bytes, attempt_->stored_bytes, attempt_->seconds);
  if (attempt_ && header_.codec == Codec::kLossy) form_.compression()->lost(header_.loss);
  attempt_.reset();
  form_.traffic().written_bytes += bytes();
  return header_.payload_bytes;
}

Status OutgoingRecord::encrypt_into_buffer() {
  std::byte* to = buffer_->data() + kRecordHeaderBytes;
  PayloadChecksum checksum;
  std::optional<RecordCipher> cipher;
  if (form_.keys() != nullptr) {
    // A store with keys encrypts every record that it writes.
    header_.cipher = Cipher::kAes256Gcm;
    if (Status status = begin_encrypt(*form_.keys(), &header_.cipher_fields, op_.encryption_key); !status)
      return status;
    cipher.emplace();
    if (Status status = cipher->begin(RecordCipher::Direction::kEncrypt, *form_.keys(), header_); !status)
      return status;
  }
  // Encrypts (with keys) and checksums in steps that stay in the CPU cache.
  const auto pass = [&](const std::byte* from, std::uint64_t bytes) {
    while (bytes > 0) {
      const std::size_t part = std::min<std::uint64_t>(bytes, RecordForm::kStepBytes);
      if (cipher) {
        if (Status status = cipher->step(from, to, part); !status) return status;
      }
      checksum.add({to, part});
      from += part;
      to += part;
      bytes -= part;
    }
    return Status::ok();
  };
  if (header_.codec != Codec::kRaw) {
    // Encoded: the bytes are in the buffer already. Their padding is checksummed but not encrypted.
    if (Status status = pass(to, header_.stored_bytes); !status) return status;
    checksum.add({to, header_.padded_stored_bytes() - header_.stored_bytes});
  } else {
    for (const Shard& shard : op_.shards) {
      // Raw: read from the shards including their padding.
      if (Status status = pass(shard.data(), round_up(shard.size(), kPageBytes)); !status) return status;
    }
  }
  header_.checksum = checksum.value();
  return cipher ? cipher->finish_encrypt(&header_.cipher_fields) : Status::ok();
}

Status OutgoingRecord::finish() {
  pieces_.clear();
  if (op_.is_whole_record) {
    pieces_.emplace_back(op_.shards[0].data(), bytes());
    return Status::ok();
  }
  if (in_place()) {
    page_.emplace(kRecordHeaderBytes);
    header_.checksum = payload_checksum(op_.shards);
    encode_header(header_, page_->span());
    pieces_.emplace_back(page_->span());
    for (const Shard& shard : op_.shards) pieces_.emplace_back(padded(shard));
    return Status::ok();
  }
  if (!take_buffer(header_.payload_bytes)) return no_buffer();
  if (Status status = encrypt_into_buffer(); !status) return status;
  encode_header(header_, {buffer_->data(), kRecordHeaderBytes});
  pieces_.emplace_back(buffer_->data(), bytes());
  return Status::ok();
}

// ---- reading

IncomingRecord::IncomingRecord(RecordForm& form, const NamespaceId& namespace_id, const RecordOp& op)
    : form_(form), namespace_id_(namespace_id), op_(op), payload_bytes_(padded_payload_bytes(op.shards)) {}

Status IncomingRecord::check_length(std::uint64_t bytes) const {
  const bool encoded = bytes > kRecordHeaderBytes && bytes % kPageBytes == 0 && bytes < max_bytes();
  if (bytes == max_bytes() || encoded) return Status::ok();
  return Status::error(StatusKind::kCorrupt,
                       fmt::format("{} bytes long, expected {}, or fewer whole pages", bytes, max_bytes()));
}

std::vector<std::span<std::byte>> IncomingRecord::pieces() const {
  std::vector<std::span<std::byte>> pieces{page_.span()};
  for (const Shard& shard : op_.shards) pieces.emplace_back(padded(shard));
  return pieces;
}

Status IncomingRecord::begin(std::uint64_t bytes) {
  if (const std::uint32_t version = other_version(page_.span()); version != 0)
    return of_another_version(version);
  if (Status status = decode_header(page_.span(), &header_); !status) return status;
  if (Status status = match_header(header_, namespace_id_, op_.key, op_.group, op_.shards); !status)
    return status;
  if (header_.record_bytes() != bytes) {
    return Status::error(StatusKind::kCorrupt,
                         fmt::format("{} bytes long, its header says {}", bytes, header_.record_bytes()));
  }
  // Every writer of this namespace keeps its bounds, so such a record is damaged or forged.
  const Loss& lost = header_.loss;
  // With unknown runs the keys' bound applies to all elements.
  const ErrorBounds allowed{form_.bounds().keys, form_.runs(op_.group).in(op_.shards).known()
                                                     ? form_.bounds().values
                                                     : form_.bounds().keys};
  if (header_.codec == Codec::kLossy && !allowed.allow(lost))
    return Status::error(
        StatusKind::kCorrupt,
        fmt::format("loss exceeds the bounds: keys {:.4g} (at most {:.4g}), values {:.4g} (at most {:.4g})",
                    lost.keys, allowed.keys, lost.values, allowed.values));
  if (form_.keys() == nullptr) {
    if (header_.cipher == Cipher::kNone) return Status::ok();
    return Status::error(StatusKind::kCorrupt,
                         "the record is encrypted, but no encryption key is configured");
  }
  if (header_.cipher == Cipher::kNone)
    return Status::error(StatusKind::kCorrupt, "the record is not encrypted");
  cipher_.emplace();
  return cipher_->begin(RecordCipher::Direction::kDecrypt, *form_.keys(), header_);
}

Status IncomingRecord::add(const std::byte* from, std::span<std::byte> to) {
  while (!to.empty()) {
    const std::size_t part = std::min(to.size(), RecordForm::kStepBytes);
    if (!cipher_) checksum_.add({from, part});  // the tag replaces the checksum
    // The padding of the stored bytes is not encrypted.
    const std::uint64_t left = header_.stored_bytes - std::min(added_, header_.stored_bytes);
    const std::size_t encrypted = cipher_ ? std::min<std::uint64_t>(part, left) : 0;
    if (encrypted > 0) {
      if (Status status = cipher_->step(from, to.data(), encrypted); !status) return status;
    }
    if (from != to.data()) std::memcpy(to.data() + encrypted, from + encrypted, part - encrypted);
    added_ += part;
    from += part;
    to = to.subspan(part);
  }
  return Status::ok();
}

Status IncomingRecord::finish() {
  if (added_ != header_.padded_stored_bytes()) {
    return Status::error(StatusKind::kCorrupt, fmt::format("{} stored bytes arrived, its header says {}",
                                                           added_, header_.padded_stored_bytes()));
  }
  if (!cipher_ && checksum_.value() != header_.checksum) {
    return Status::error(StatusKind::kCorrupt,
                         fmt::format("payload checksum is {:#018x}, the header says {:#018x}",
                                     checksum_.value(), header_.checksum));
  }
  if (cipher_) {
    if (Status status = cipher_->finish_decrypt(header_.cipher_fields); !status) return status;
  }
  if (header_.codec != Codec::kRaw) {
    if (Status status = decode(); !status) return status;
  }
  form_.traffic().read_bytes += header_.record_bytes();
  return Status::ok();
}

Status IncomingRecord::decode() {
  CompressionChoice* choice = form_.compression();
  const Nanos began = choice != nullptr ? choice->clock().now() : Nanos{0};
  buffer_ = form_.take_buffer(header_.stored_bytes);
  if (!buffer_) return no_buffer();
  std::uint64_t at = 0;
  for (const Shard& shard : op_.shards) {
    const std::uint64_t part =
        std::min<std::uint64_t>(round_up(shard.size(), kPageBytes), header_.stored_bytes - at);
    std::memcpy(buffer_->data() + at, shard.data(), part);
    at += part;
  }
  const std::span<const std::byte> stored(buffer_->data(), header_.stored_bytes);
  const Status status = header_.codec == Codec::kLossy
                            ? form_.lossy_codec().decode(stored, header_.element, op_.shards)
                            : form_.payload_codec().decode(stored, header_.element, op_.shards);
  if (!status) return status;
  zero_padding(op_.shards);
  if (choice != nullptr) {
    choice->decoded(payload_bytes_, header_.padded_stored_bytes(), to_seconds(choice->clock().now() - began));
  }
  return Status::ok();
}

Status IncomingRecord::open(std::uint64_t bytes) {
  if (Status status = begin(bytes); !status) return status;
  std::uint64_t left = header_.padded_stored_bytes();
  for (const Shard& shard : op_.shards) {
    const std::uint64_t part = std::min<std::uint64_t>(round_up(shard.size(), kPageBytes), left);
    if (Status status = add(shard.data(), {shard.data(), part}); !status) return status;
    left -= part;
  }
  return finish();
}

}  // namespace kv_offload
