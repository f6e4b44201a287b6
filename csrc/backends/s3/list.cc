// SPDX-License-Identifier: Apache-2.0
#include "backends/s3/list.h"

#include <array>
#include <charconv>
#include <chrono>
#include <optional>

namespace kv_offload::s3 {
namespace {

Status no_list() { return Status::error(StatusKind::kIo, "the store sent a malformed list of objects"); }

// Returns the text between <name> and </name>, searched from *at, and moves *at past the end tag. Text cannot
// match a tag by accident, because brackets in text are escaped.
std::optional<std::string_view> element(std::string_view xml, std::string_view name, std::size_t* at) {
  const std::string start = fmt::format("<{}>", name), end = fmt::format("</{}>", name);
  const std::size_t from = xml.find(start, *at);
  if (from == xml.npos) return std::nullopt;
  const std::size_t to = xml.find(end, from + start.size());
  if (to == xml.npos) return std::nullopt;
  *at = to + end.size();
  return xml.substr(from + start.size(), to - from - start.size());
}
std::optional<std::string_view> element(std::string_view xml, std::string_view name) {
  std::size_t at = 0;
  return element(xml, name, &at);
}

void append_utf8(std::string* to, std::uint32_t sign) {
  const auto put = [&](std::uint32_t byte) { to->push_back(static_cast<char>(byte)); };
  if (sign < 0x80) {
    put(sign);
  } else if (sign < 0x800) {
    put(0xc0 | sign >> 6);
    put(0x80 | (sign & 0x3f));
  } else if (sign < 0x10000) {
    put(0xe0 | sign >> 12);
    put(0x80 | (sign >> 6 & 0x3f));
    put(0x80 | (sign & 0x3f));
  } else {
    put(0xf0 | sign >> 18);
    put(0x80 | (sign >> 12 & 0x3f));
    put(0x80 | (sign >> 6 & 0x3f));
    put(0x80 | (sign & 0x3f));
  }
}

// False: not a valid XML reference.
bool append_reference(std::string* to, std::string_view name) {
  constexpr std::array<std::pair<std::string_view, char>, 5> kNamed{
      {{"amp", '&'}, {"lt", '<'}, {"gt", '>'}, {"quot", '"'}, {"apos", '\''}}};
  // Either a named reference or a decimal or hexadecimal character number.
  for (const auto& [known, sign] : kNamed) {
    if (name != known) continue;
    to->push_back(sign);
    return true;
  }
  if (!name.starts_with('#')) return false;
  const bool hex = name.size() > 1 && name[1] == 'x';
  const std::string_view digits = name.substr(hex ? 2 : 1);
  std::uint32_t sign = 0;
  const auto [end, error] =
      std::from_chars(digits.data(), digits.data() + digits.size(), sign, hex ? 16 : 10);
  if (digits.empty() || error != std::errc() || end != digits.data() + digits.size() || sign > 0x10ffff)
    return false;
  append_utf8(to, sign);
  return true;
}

std::optional<std::string> unescaped(std::string_view text) {
  std::string plain;
  for (std::size_t at = 0; at < text.size();) {
    if (text[at] == '<') return std::nullopt;
    if (text[at] != '&') {
      plain.push_back(text[at++]);
      continue;
    }
    const std::size_t end = text.find(';', at);
    if (end == text.npos || !append_reference(&plain, text.substr(at + 1, end - at - 1))) return std::nullopt;
    at = end + 1;
  }
  return plain;
}

int digit_of(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  return c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

std::optional<std::string> percent_decoded(std::string_view text) {
  std::string plain;
  for (std::size_t at = 0; at < text.size(); ++at) {
    if (text[at] != '%') {
      plain.push_back(text[at] == '+' ? ' ' : text[at]);
      continue;
    }
    if (at + 2 >= text.size()) return std::nullopt;
    const int high = digit_of(text[at + 1]), low = digit_of(text[at + 2]);
    if (high < 0 || low < 0) return std::nullopt;
    plain.push_back(static_cast<char>(high * 16 + low));
    at += 2;
  }
  return plain;
}

template <typename Number>
bool read_number(std::string_view text, Number* value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *value);
  return !text.empty() && error == std::errc() && end == text.data() + text.size();
}

// Parses "2026-11-23T10:02:03.000Z"; 0 for anything else.
std::int64_t unix_nanos_of(std::string_view text) {
  // Punctuation first, then the numbers, then their ranges (a leap second is allowed).
  if (text.size() < 20 || text[4] != '-' || text[7] != '-' || text[10] != 'T' || text[13] != ':' ||
      text[16] != ':' || text.back() != 'Z')
    return 0;
  unsigned year = 0, month = 0, day = 0, hour = 0, minute = 0, second = 0;
  if (!read_number(text.substr(0, 4), &year) || !read_number(text.substr(5, 2), &month) ||
      !read_number(text.substr(8, 2), &day) || !read_number(text.substr(11, 2), &hour) ||
      !read_number(text.substr(14, 2), &minute) || !read_number(text.substr(17, 2), &second))
    return 0;
  using namespace std::chrono;
  const year_month_day date{std::chrono::year(static_cast<int>(year)), std::chrono::month(month),
                            std::chrono::day(day)};
  if (!date.ok() || year < 1970 || year > 2200 || hour > 23 || minute > 59 || second > 60) return 0;
  const auto since = sys_days(date).time_since_epoch() + hours(hour) + minutes(minute) + seconds(second);
  return duration_cast<nanoseconds>(since).count();
}

Status read_object(std::string_view xml, bool encoded, Listed* object) {
  const auto key = element(xml, "Key"), size = element(xml, "Size");
  std::optional<std::string> name = key ? unescaped(*key) : std::nullopt;
  if (name && encoded) name = percent_decoded(*name);
  if (!name || name->empty() || !size || !read_number(*size, &object->bytes)) return no_list();
  object->key = *std::move(name);
  object->modified_unix_nanos = unix_nanos_of(element(xml, "LastModified").value_or(""));
  return Status::ok();
}

}  // namespace

std::string percent_encoded(std::string_view text) {
  std::string encoded;
  for (const char c : text) {
    // The unreserved characters of RFC 3986, which signatures require unencoded.
    const bool plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                       c == '-' || c == '_' || c == '.' || c == '~';
    encoded += plain ? std::string(1, c) : fmt::format("%{:02X}", static_cast<unsigned char>(c));
  }
  return encoded;
}

Status parse_list(std::string_view xml, std::size_t most, ListPage* page) {
  *page = {};
  const std::size_t start = xml.find("<ListBucketResult");
  if (start == xml.npos || xml.find("</ListBucketResult>", start) == xml.npos) return no_list();
  // Stores that do not support encoding-type do not repeat it, and then names are not encoded.
  const bool encoded = element(xml, "EncodingType") == "url";
  std::size_t at = start;
  // Finds every "<Contents". An element with another spelling or without an end would otherwise be skipped
  // silently.
  constexpr std::string_view kStart = "<Contents";
  for (std::size_t from; (from = xml.find(kStart, at)) != xml.npos;) {
    at = from;
    const auto contents = element(xml, "Contents", &at);
    if (!contents || contents->data() != xml.data() + from + kStart.size() + 1 ||
        contents->find(kStart) != contents->npos)
      return no_list();
    if (page->objects.size() == most) {
      return Status::error(StatusKind::kIo, "the store lists far more objects than requested");
    }
    Listed object;
    if (Status status = read_object(*contents, encoded, &object); !status) return status;
    page->objects.push_back(std::move(object));
  }
  const auto truncated = element(xml, "IsTruncated");
  if (truncated == "false") return Status::ok();
  if (truncated != "true") return no_list();
  const auto next = element(xml, "NextContinuationToken");
  const std::optional<std::string> token = next ? unescaped(*next) : std::nullopt;
  if (!token || token->empty() || token->size() > 8192) {
    return Status::error(StatusKind::kIo, "the store truncated the list without a continuation token");
  }
  page->next = *token;
  return Status::ok();
}

}  // namespace kv_offload::s3
