// Records that are summed, or opened, while they come: each part is still in the CPU's cache then.
#pragma once

#include <cstdint>
#include <exception>
#include <span>

#include "storage/record_form.h"

namespace kv_offload {

// Told of each part of a value's place when it has been filled. A part is of one piece of that place only.
// offset: where it lies in the value; what does not begin where the last part ended is of another answer.
// announced: how long the whole value is, as the store says; 0: it does not.
class FillObserver {
 public:
  virtual ~FillObserver() = default;
  virtual void filled(std::span<std::byte> part, std::uint64_t offset, std::uint64_t announced) noexcept = 0;
};

// Of one answer that fills IncomingRecord::pieces(). Of one that does not say how long it is nothing is begun
// before its end.
class OpenedAsItComes final : public FillObserver {
 public:
  explicit OpenedAsItComes(IncomingRecord& record) : record_(record) {}

  void filled(std::span<std::byte> part, std::uint64_t offset, std::uint64_t announced) noexcept override {
    if (status_ && offset != came_) {
      status_ = Status::error(StatusKind::kIo, "the store began its answer anew");
    }
    if (!status_) return;
    try {
      if (came_ < kRecordHeaderBytes) {
        // The header page is a piece of its own, so no part goes beyond it.
        if (came_ + part.size() == kRecordHeaderBytes && announced > 0) {
          status_ = record_.begin(announced);
          begun_ = true;
        }
      } else if (begun_) {
        status_ = record_.add(part.data(), part);
      }
    } catch (const std::exception& error) {
      status_ = Status::error(StatusKind::kIo, error.what());
    }
    came_ += part.size();
  }
  // After the last byte of a record of so many; as IncomingRecord::open().
  Status finish(std::uint64_t bytes) {
    if (!status_) return status_;
    return begun_ ? record_.finish() : record_.open(bytes);
  }

 private:
  IncomingRecord& record_;
  Status status_;
  std::uint64_t came_ = 0;
  bool begun_ = false;
};

}  // namespace kv_offload
