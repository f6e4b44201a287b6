// SPDX-License-Identifier: Apache-2.0
// Transfer: the bytes of one request and its response, in the form of libcurl's callbacks.
//
// The callbacks run inside libcurl, so no exception may escape them. They do not allocate. Only observers and
// sinks may, and those catch their own exceptions. The body of a 200 response fills Request::into and never
// exceeds it. For all other bodies, only the part that contains the error code is kept.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "backends/s3/client.h"

namespace kv_offload::s3 {

class Transfer {
 public:
  explicit Transfer(const Request& request);  // `request` must outlive this object

  // CURLOPT_HEADERFUNCTION, _WRITEFUNCTION, _READFUNCTION, _SEEKFUNCTION; `self` is the Transfer.
  static std::size_t on_header(char* data, std::size_t size, std::size_t count, void* self) noexcept;
  static std::size_t on_body(char* data, std::size_t size, std::size_t count, void* self) noexcept;
  static std::size_t on_read(char* data, std::size_t size, std::size_t count, void* self) noexcept;
  static int on_seek(void* self, std::int64_t offset, int origin) noexcept;

  // The transfer was stopped on purpose; the bytes received so far are the response.
  bool was_stopped() const { return wrong_length_ || error_body_full_ || sink_ended_; }
  // Fills in the response after the request. kIo: the body ended too soon.
  Status take(Answer* answer) const;
  std::uint64_t retry_after_seconds() const { return retry_after_; }

 private:
  void header(std::string_view line);
  bool body(const char* data, std::size_t bytes);  // false: stop the transfer
  std::string code() const;

  const Request& request_;
  std::uint64_t max_bytes_ = 0, min_bytes_ = 0, announced_ = 0, received_ = 0;
  long status_ = 0;
  bool has_length_ = false, wrong_length_ = false, error_body_full_ = false;
  bool chunked_ = false, sink_ended_ = false, versioned_ = false;
  std::size_t piece_ = 0, at_ = 0;  // the position of the next byte to store or to send
  std::size_t header_bytes_ = 0, error_bytes_ = 0;
  std::array<char, 4096> error_{};  // the start of an error body, which contains its code
  std::string text_;                // at most Request::text_bytes, reserved in advance
  std::array<char, 80> etag_{}, region_{};
  std::uint64_t retry_after_ = 0;
};

}  // namespace kv_offload::s3
