// SPDX-License-Identifier: Apache-2.0
// WholeRecord: a record as it is stored: the header page and the padded stored bytes, in page-aligned memory.
// For copying records between tiers without decoding or decrypting them. begin() uses the memory of the
// record before it again, so a copy does not wait for new pages.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <span>

#include "record/record.h"

namespace kv_offload {

class WholeRecord {
 public:
  const RecordHeader& header() const { return header_; }
  std::span<std::byte> bytes() const { return {memory_.get(), size_}; }

  // Starts again with this header page. Memory grows with the bytes that arrive, not with the length in the
  // header, and does not shrink. Throws std::bad_alloc, like room() and append().
  void begin(const RecordHeader& header, std::span<const std::byte> page);
  // Returns memory for the next bytes, at most `most`; empty after the last byte. append() does not copy
  // bytes that were read to there. Valid until the next call. REQUIRES: begin() was called.
  std::span<std::byte> room(std::size_t most);
  // Ignores bytes beyond the length in the header.
  void append(std::span<const std::byte> more);

 private:
  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };
  std::size_t left() const { return static_cast<std::size_t>(header_.record_bytes()) - size_; }
  void reserve(std::size_t more);

  RecordHeader header_;
  std::unique_ptr<std::byte[], Free> memory_;
  std::size_t capacity_ = 0, size_ = 0;
};

}  // namespace kv_offload
