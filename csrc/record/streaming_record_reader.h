// SPDX-License-Identifier: Apache-2.0
// Checksums or decrypts a record while it arrives: each part is still in the CPU's cache then.
#pragma once

#include <cstdint>
#include <exception>
#include <span>

#include "record/record_form.h"

namespace kv_offload {

// Called for each part of a value's destination that was filled. A part never crosses pieces of the
// destination. offset: its position in the value; a part that does not start where the previous one ended
// belongs to another answer. announced: length of the whole value as the store reports it; 0: unknown.
class ReadProgressSink {
 public:
  virtual ~ReadProgressSink() = default;
  virtual void filled(std::span<std::byte> part, std::uint64_t offset, std::uint64_t announced) noexcept = 0;
};

// Processes one answer that fills IncomingRecord::pieces(). Without an announced length, it begins only after
// the last byte.
class StreamingRecordReader final : public ReadProgressSink {
 public:
  explicit StreamingRecordReader(IncomingRecord& record) : record_(record) {}

  void filled(std::span<std::byte> part, std::uint64_t offset, std::uint64_t announced) noexcept override {
    if (status_ && offset != received_) {
      status_ = Status::error(StatusKind::kIo, "the store restarted its answer");
    }
    if (!status_) return;
    try {
      if (received_ < kRecordHeaderBytes) {
        // The header page is a separate piece, so no part extends beyond it.
        if (received_ + part.size() == kRecordHeaderBytes && announced > 0) {
          status_ = record_.begin(announced);
          begun_ = true;
        }
      } else if (begun_) {
        status_ = record_.add(part.data(), part);
      }
    } catch (const std::exception& error) {
      status_ = Status::error(StatusKind::kIo, error.what());
    }
    received_ += part.size();
  }
  // Call after the last byte of a record of `bytes` bytes; like IncomingRecord::open().
  Status finish(std::uint64_t bytes) {
    if (!status_) return status_;
    return begun_ ? record_.finish() : record_.open(bytes);
  }

 private:
  IncomingRecord& record_;
  Status status_;
  std::uint64_t received_ = 0;
  bool begun_ = false;
};

}  // namespace kv_offload
