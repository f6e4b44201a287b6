// SPDX-License-Identifier: Apache-2.0
#include "backends/s3/transfer.h"

#include <strings.h>

#include <algorithm>
#include <charconv>
#include <cstring>

#include "backends/s3/libcurl.h"

namespace kv_offload::s3 {
namespace {

constexpr std::size_t kMostAnswerBytes = 65536;  // for headers, and for bodies that are not records

std::uint64_t number_of(std::string_view text) {
  std::uint64_t value = 0;
  std::from_chars(text.data(), text.data() + text.size(), value);
  return value;
}

template <std::size_t kSize>
void keep(std::array<char, kSize>* to, std::string_view value) {
  to->fill('\0');
  if (value.size() < to->size()) std::copy(value.begin(), value.end(), to->begin());
}

}  // namespace

Transfer::Transfer(const Request& request) : request_(request) {
  for (const auto& piece : request.into) max_bytes_ += piece.size();
  min_bytes_ = std::min<std::uint64_t>(request.least_bytes, max_bytes_);
  text_.reserve(request.text_bytes);
}

std::size_t Transfer::on_header(char* data, std::size_t size, std::size_t count, void* self) noexcept {
  auto& transfer = *static_cast<Transfer*>(self);
  const std::size_t bytes = size * count;
  transfer.header_bytes_ += bytes;
  if (transfer.header_bytes_ > kMostAnswerBytes) return 0;
  transfer.header({data, bytes});
  return bytes;
}

void Transfer::header(std::string_view line) {
  // Ignores trailers of a chunked body. A status in a trailer could cause a retry, and the observer would
  // then see parts of two bodies.
  if (received_ > 0 || error_bytes_ > 0) return;
  if (line.starts_with("HTTP/")) {  // also after "100 Continue"
    const std::size_t space = line.find(' ');
    status_ = space == line.npos ? 0 : static_cast<long>(number_of(line.substr(space + 1)));
    has_length_ = chunked_ = false;
    retry_after_ = 0;
    return;
  }
  const std::size_t colon = line.find(':');
  if (colon == line.npos) return;
  const std::string_view name = line.substr(0, colon);
  std::string_view value = line.substr(colon + 1);
  while (!value.empty() && (value.front() == ' ' || value.front() == '\t')) value.remove_prefix(1);
  while (!value.empty() && static_cast<unsigned char>(value.back()) <= ' ') value.remove_suffix(1);
  const auto is = [&](std::string_view known) {
    return name.size() == known.size() && strncasecmp(name.data(), known.data(), known.size()) == 0;
  };
  if (is("content-length")) {
    announced_ = number_of(value);
    has_length_ = true;
  } else if (is("retry-after")) {
    retry_after_ = number_of(value);
  } else if (is("etag")) {
    keep(&etag_, value);
  } else if (is("x-amz-bucket-region")) {
    keep(&region_, value);
  } else if (is("transfer-encoding")) {
    chunked_ = true;
  } else if (is("x-amz-version-id")) {
    versioned_ = value != "null";  // "null": the bucket no longer keeps versions
  }
}

std::size_t Transfer::on_body(char* data, std::size_t size, std::size_t count, void* self) noexcept {
  const std::size_t bytes = size * count;
  return static_cast<Transfer*>(self)->body(data, bytes) ? bytes : 0;
}

bool Transfer::body(const char* data, std::size_t bytes) {
  // An error body, or the body of a PUT or DELETE: keep the part with the error code.
  if (status_ != 200 || request_.verb != Verb::kGet) {
    const std::size_t kept = std::min(error_bytes_, error_.size());
    std::memcpy(error_.data() + kept, data, std::min(bytes, error_.size() - kept));
    error_bytes_ += bytes;
    error_body_full_ = error_bytes_ > kMostAnswerBytes;
    return !error_body_full_;
  }
  received_ += bytes;
  if (request_.text_bytes > 0) {
    wrong_length_ = received_ > request_.text_bytes;
    if (!wrong_length_) text_.append(data, bytes);
    return !wrong_length_;
  }
  if (request_.sink != nullptr) {
    sink_ended_ = !request_.sink->take(std::as_bytes(std::span(data, bytes)));
    return !sink_ended_;
  }
  // Stop before the first byte if the announced length cannot fit.
  wrong_length_ =
      (has_length_ && (announced_ > max_bytes_ || announced_ < min_bytes_)) || received_ > max_bytes_;
  if (wrong_length_) return false;
  std::uint64_t offset = received_ - bytes;
  while (bytes > 0) {
    const auto& to = request_.into[piece_];
    const std::size_t part = std::min(bytes, to.size() - at_);
    const std::span<std::byte> filled = to.subspan(at_, part);
    std::memcpy(filled.data(), data, part);
    if (request_.observer != nullptr) request_.observer->filled(filled, offset, has_length_ ? announced_ : 0);
    offset += part;
    data += part;
    bytes -= part;
    at_ += part;
    if (at_ == to.size()) at_ = 0, ++piece_;
  }
  return true;
}

std::size_t Transfer::on_read(char* data, std::size_t size, std::size_t count, void* self) noexcept {
  auto& transfer = *static_cast<Transfer*>(self);
  std::size_t room = size * count, done = 0;
  while (room > 0 && transfer.piece_ < transfer.request_.from.size()) {
    const auto& from = transfer.request_.from[transfer.piece_];
    const std::size_t part = std::min(room, from.size() - transfer.at_);
    std::memcpy(data + done, from.data() + transfer.at_, part);
    done += part;
    room -= part;
    transfer.at_ += part;
    if (transfer.at_ == from.size()) transfer.at_ = 0, ++transfer.piece_;
  }
  return done;
}

// libcurl rewinds when a kept-alive connection turns out to be closed.
int Transfer::on_seek(void* self, std::int64_t offset, int) noexcept {
  if (offset != 0) return curl::kCannotSeek;
  auto& transfer = *static_cast<Transfer*>(self);
  transfer.piece_ = transfer.at_ = 0;
  return curl::kSeekOk;
}

Status Transfer::take(Answer* answer) const {
  answer->status = status_;
  answer->code = code();
  answer->etag = etag_.data();
  answer->region = region_.data();
  answer->versioned = versioned_;
  if (request_.sink != nullptr && status_ == 200) {
    answer->length = has_length_ ? announced_ : received_;
    answer->has_length = has_length_ || chunked_;
    return Status::ok();
  }
  if (request_.verb != Verb::kGet || status_ != 200) return Status::ok();
  if (request_.text_bytes > 0) {
    answer->text = text_;
    answer->wrong_length = wrong_length_;
    answer->length = received_;
    return Status::ok();
  }
  // Without a length or chunks, a cut connection looks like the end.
  if (!has_length_ && received_ < max_bytes_ && (received_ < min_bytes_ || !chunked_)) {
    return Status::error(StatusKind::kIo, "the store's response ended too early");
  }
  answer->length = has_length_ ? announced_ : received_;
  answer->wrong_length =
      wrong_length_ || received_ > max_bytes_ || received_ < min_bytes_ || received_ != answer->length;
  return Status::ok();
}

std::string Transfer::code() const {
  const std::string_view text(error_.data(), std::min(error_bytes_, error_.size()));
  const std::size_t start = text.find("<Code>"), end = text.find("</Code>");
  if (start == text.npos || end == text.npos || end < start + 6 || end - start > 70) return {};
  const std::string_view word = text.substr(start + 6, end - start - 6);
  const bool plain = std::all_of(word.begin(), word.end(), [](unsigned char c) { return isalnum(c); });
  return plain ? std::string(word) : std::string();
}

}  // namespace kv_offload::s3
