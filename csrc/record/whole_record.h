// SPDX-License-Identifier: Apache-2.0
// WholeRecord: a record as it is stored: the header page and the padded stored bytes, in page-aligned memory.
// For copying records between tiers without decoding or decrypting them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <span>
#include <utility>

#include "base/aligned_buffer.h"
#include "record/record.h"

namespace kv_offload {

class WholeRecord {
 public:
  const RecordHeader& header() const { return header_; }
  std::span<std::byte> bytes() const { return buffer_.span().first(size_); }

  // Starts again with this header page. Memory grows with the bytes that arrive, not with the length in the
  // header. Throws std::bad_alloc, like append().
  void begin(const RecordHeader& header, std::span<const std::byte> page) {
    header_ = header;
    size_ = 0;
    append(page);
  }
  // Ignores bytes beyond the length in the header.
  void append(std::span<const std::byte> more) {
    const std::size_t most = static_cast<std::size_t>(header_.record_bytes());
    more = more.first(std::min(more.size(), most - size_));
    if (size_ + more.size() > buffer_.size()) {
      AlignedBuffer larger(std::min(most, std::max(size_ + more.size(), 2 * buffer_.size())));
      if (size_ > 0) std::memcpy(larger.data(), buffer_.data(), size_);
      buffer_ = std::move(larger);
    }
    if (!more.empty()) std::memcpy(buffer_.data() + size_, more.data(), more.size());
    size_ += more.size();
  }

 private:
  RecordHeader header_;
  AlignedBuffer buffer_;
  std::size_t size_ = 0;
};

}  // namespace kv_offload
