// SPDX-License-Identifier: Apache-2.0
#include "tier/remote_records.h"

#include <algorithm>
#include <cstring>

namespace kv_offload {
namespace {

constexpr std::size_t kNamespaceDigits = 64, kEpochDigits = 32;
constexpr std::size_t kOpenedAtOnce = std::size_t{64} << 10;

bool is_hex(std::string_view text) { return text.find_first_not_of("0123456789abcdef") == text.npos; }

}  // namespace

void parse_remote_name(std::string_view rest, char separator, RemoteRecord* record) {
  // Names are <namespace>/epoch or <namespace>/<epoch>/<key>, all in hex. Any other name leaves the parts
  // empty.
  if (rest.size() <= kNamespaceDigits || rest[kNamespaceDigits] != separator) return;
  const std::string_view space = rest.substr(0, kNamespaceDigits);
  if (!is_hex(space)) return;
  rest.remove_prefix(kNamespaceDigits + 1);
  // The name of the namespace's epoch: the other parts stay empty.
  if (rest == "epoch") {
    record->namespace_id = space;
    return;
  }
  if (rest.size() <= kEpochDigits || rest[kEpochDigits] != separator) return;
  const std::string_view epoch = rest.substr(0, kEpochDigits), key = rest.substr(kEpochDigits + 1);
  // Two digits per byte, and a length that a ChunkKey can hold.
  if (!is_hex(epoch) || !is_hex(key) || key.size() % 2 != 0 || !ChunkKey::fits(key.size() / 2)) return;
  record->namespace_id = space;
  record->epoch = epoch;
  record->key = key;
}

RecordCheck::RecordCheck(const EncryptionKeys* keys, WholeRecord* copy) : keys_(keys), copy_(copy) {
  if (keys != nullptr) opened_bytes_ = AlignedBuffer(kOpenedAtOnce);
}

void RecordCheck::add(std::span<const std::byte> bytes) noexcept {
  if (total_ < kRecordHeaderBytes) {
    const std::size_t have = static_cast<std::size_t>(total_);
    const std::size_t part = std::min(bytes.size(), kRecordHeaderBytes - have);
    // They may have been read to the page.
    if (part > 0 && bytes.data() != page_.data() + have) std::memcpy(page_.data() + have, bytes.data(), part);
    total_ += part;
    bytes = bytes.subspan(part);
    if (total_ == kRecordHeaderBytes) on_header();
  }
  checksum_.add(bytes);
  keep(bytes);
  open(bytes);
  total_ += bytes.size();
}

Status RecordCheck::room(std::size_t most, std::span<std::byte>* room) noexcept try {
  if (!has_header()) {
    *room = page_.span().subspan(static_cast<std::size_t>(total_));
    return Status::ok();
  }
  if (copy_ != nullptr) {
    *room = copy_->room(most);
    return Status::ok();
  }
  if (scratch_.size() == 0)
    scratch_ = AlignedBuffer(std::min(most, static_cast<std::size_t>(announced() - total_)));
  *room = scratch_.span().first(std::min(most, scratch_.size()));
  return Status::ok();
} catch (const std::bad_alloc&) {
  return Status::error(StatusKind::kIo, "out of memory");
}

void RecordCheck::on_header() try {
  decoded_ = decode_header(page_.span(), &header_);
  valid_ = decoded_.is_ok();
  if (valid_ && copy_ != nullptr) copy_->begin(header_, page_.span());
  if (!valid_ || keys_ == nullptr || header_.cipher == Cipher::kNone) return;
  cipher_.emplace();
  opened_ = cipher_->begin(RecordCipher::Direction::kDecrypt, *keys_, header_);
  if (opened_.kind() == StatusKind::kCorrupt)
    opened_ = Status::error(StatusKind::kUnavailable, opened_.message());  // the keys may be the wrong ones
} catch (const std::exception&) {
  valid_ = false;
  decoded_ = opened_ = Status::error(StatusKind::kIo, "out of memory");
}

void RecordCheck::keep(std::span<const std::byte> bytes) try {
  if (valid_ && copy_ != nullptr) copy_->append(bytes);
} catch (const std::bad_alloc&) {
  valid_ = false;
  decoded_ = Status::error(StatusKind::kIo, "out of memory");
}

void RecordCheck::open(std::span<const std::byte> bytes) {
  if (!cipher_ || !opened_) return;
  const std::uint64_t before = total_ - kRecordHeaderBytes;
  std::uint64_t left = header_.stored_bytes - std::min(before, header_.stored_bytes);
  while (opened_ && left > 0 && !bytes.empty()) {
    const std::size_t part = std::min({bytes.size(), kOpenedAtOnce, static_cast<std::size_t>(left)});
    opened_ = cipher_->step(bytes.data(), opened_bytes_.data(), part);
    bytes = bytes.subspan(part);
    left -= part;
  }
}

Status RecordCheck::check_header(const RemoteRecord& named, std::uint64_t length) const {
  if (length < kRecordHeaderBytes) {
    return Status::error(StatusKind::kCorrupt, fmt::format("{} bytes long, too short for a record", length));
  }
  if (const std::uint32_t version = other_version(page_.span()); version != 0)
    return Status::error(StatusKind::kUnavailable, of_another_version(version).message());
  if (!decoded_) return decoded_;
  if (hex_of(header_.namespace_id) != named.namespace_id || header_.key.hex() != named.key) {
    return Status::error(StatusKind::kCorrupt, "the header names another namespace or key");
  }
  if (header_.record_bytes() == length) return Status::ok();
  return Status::error(StatusKind::kCorrupt,
                       fmt::format("{} bytes long, its header says {}", length, header_.record_bytes()));
}

Status RecordCheck::finish(const RemoteRecord& named) {
  if (Status status = check_header(named, total_); !status) return status;
  if (checksum_.value() != header_.checksum) {
    return Status::error(StatusKind::kCorrupt,
                         fmt::format("payload checksum is {:#018x}, the header says {:#018x}",
                                     checksum_.value(), header_.checksum));
  }
  if (!cipher_ || !opened_) return opened_;
  return cipher_->finish_decrypt(header_.cipher_fields);
}

}  // namespace kv_offload
