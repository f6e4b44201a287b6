// Transfer: the bytes of one request and of its answer, as libcurl asks for them and gives them.
//
// Its callbacks run inside libcurl, and nothing throws into it: nothing in them allocates but what is told of
// the bytes, which keeps its exceptions. A body of status 200 fills Request::into and never goes behind it;
// that of any other is kept as far as an error's code needs.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "storage/s3/client.h"

namespace kv_offload::s3 {

class Transfer {
 public:
  explicit Transfer(const Request& asked);  // which outlives it

  // CURLOPT_HEADERFUNCTION, _WRITEFUNCTION, _READFUNCTION, _SEEKFUNCTION; `self` is the Transfer.
  static std::size_t on_header(char* data, std::size_t size, std::size_t count, void* self) noexcept;
  static std::size_t on_body(char* data, std::size_t size, std::size_t count, void* self) noexcept;
  static std::size_t on_read(char* data, std::size_t size, std::size_t count, void* self) noexcept;
  static int on_seek(void* self, std::int64_t offset, int origin) noexcept;

  // The body was stopped, and what came before is the answer.
  bool was_stopped() const { return wrong_length_ || told_enough_ || sink_ended_; }
  // After the request: what was answered. kIo: it ended too soon.
  Status take(Answer* answer) const;
  std::uint64_t retry_after_seconds() const { return retry_after_; }

 private:
  void header(std::string_view line);
  bool body(const char* data, std::size_t bytes);  // false: enough
  std::string code() const;

  const Request& request_;
  std::uint64_t most_ = 0, least_ = 0, announced_ = 0, came_ = 0;
  long status_ = 0;
  bool has_length_ = false, wrong_length_ = false, told_enough_ = false;
  bool chunked_ = false, sink_ended_ = false, versioned_ = false;
  std::size_t piece_ = 0, at_ = 0;  // where the next byte goes to, or comes from
  std::size_t header_bytes_ = 0, error_bytes_ = 0;
  std::array<char, 4096> error_{};  // the start of an error's body, where its code stands
  std::string text_;                // of Request::text_bytes, reserved from the start
  std::array<char, 80> etag_{}, region_{};
  std::uint64_t retry_after_ = 0;
};

}  // namespace kv_offload::s3
