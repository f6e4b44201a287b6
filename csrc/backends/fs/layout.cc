// SPDX-License-Identifier: Apache-2.0
#include "backends/fs/layout.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <tuple>

namespace kv_offload::layout {
namespace {

int hex_digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  return -1;
}

std::optional<std::uint64_t> parse_number(std::string_view text) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool canonical = text.size() == 1 || (!text.empty() && text[0] != '0');
  if (error != std::errc{} || end != text.data() + text.size() || !canonical) return std::nullopt;
  return value;
}

}  // namespace

bool is_probe_root(std::string_view name) {
  constexpr std::size_t kMostDigits = 20;
  if (!name.starts_with(kProbePrefix)) return false;
  name.remove_prefix(kProbePrefix.size());
  return !name.empty() && name.size() <= kMostDigits &&
         std::all_of(name.begin(), name.end(), [](char c) { return hex_digit(c) >= 0; });
}

bool is_raw_file(std::string_view name) {
  constexpr std::size_t kCharacters = 8;
  if (!name.starts_with(kRawPrefix)) return false;
  name.remove_prefix(kRawPrefix.size());
  return name.size() == kCharacters &&
         name.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789_") == name.npos;
}

// The first bytes are random, because sharers are identified by them.
NamespaceId probe_namespace(std::uint64_t random) {
  constexpr std::string_view kText = "kv_offload speed probe..";
  NamespaceId id{};
  static_assert(sizeof(random) + kText.size() == std::tuple_size_v<NamespaceId>);
  std::memcpy(id.data(), &random, sizeof(random));
  std::memcpy(id.data() + sizeof(random), kText.data(), kText.size());
  return id;
}

bool is_probe_namespace(std::string_view name) {
  constexpr std::size_t kRandomDigits = 2 * sizeof(std::uint64_t);
  return is_namespace_name(name) &&
         name.substr(kRandomDigits) == namespace_name(probe_namespace(0)).substr(kRandomDigits);
}

std::string namespace_name(const NamespaceId& id) { return hex_of(id); }

bool is_namespace_name(std::string_view name) {
  return name.size() == 64 && std::all_of(name.begin(), name.end(), [](char c) { return hex_digit(c) >= 0; });
}

std::string epoch_directory_name(std::uint64_t epoch) { return fmt::format("g{}", epoch); }

std::optional<std::uint64_t> parse_epoch(std::string_view name) {
  if (name.size() < 2 || name[0] != 'g') return std::nullopt;
  return parse_number(name.substr(1));
}

std::string mark_name(std::uint64_t epoch, Mark kind) {
  return fmt::format("g{}.{}", epoch, kind == Mark::kReset ? "reset" : "open");
}

std::optional<std::uint64_t> parse_mark(std::string_view name) {
  const std::size_t dot = name.find('.');
  if (dot == name.npos || (name.substr(dot) != ".open" && name.substr(dot) != ".reset")) return std::nullopt;
  return parse_epoch(name.substr(0, dot));
}

std::uint32_t leaf_of(const ChunkKey& key) { return static_cast<unsigned char>(key.bytes()[0]); }

std::string leaf_path(std::uint32_t leaf) { return fmt::format("{:02x}", leaf); }

std::optional<std::uint8_t> parse_hex_byte(std::string_view name) {
  if (name.size() != 2) return std::nullopt;
  const int high = hex_digit(name[0]), low = hex_digit(name[1]);
  if (high < 0 || low < 0) return std::nullopt;
  return static_cast<std::uint8_t>(high << 4 | low);
}

std::string record_name(const ChunkKey& key, std::uint64_t file_bytes) {
  return fmt::format("{}.{}.rec", key.hex(), file_bytes);
}

std::string record_path(const ChunkKey& key, std::uint64_t file_bytes) {
  return leaf_path(leaf_of(key)) + '/' + record_name(key, file_bytes);
}

std::optional<ParsedRecord> parse_record(std::string_view name) {
  const std::size_t dot = name.find('.');
  if (dot == std::string_view::npos || !name.ends_with(".rec")) return std::nullopt;
  const std::string_view hex = name.substr(0, dot);
  // Only whole bytes, and a length that a key can have.
  if (hex.size() % 2 != 0 || !ChunkKey::fits(hex.size() / 2)) return std::nullopt;
  if (name.size() < dot + 1 + 4) return std::nullopt;
  const auto bytes = parse_number(name.substr(dot + 1, name.size() - dot - 1 - 4));
  // A record holds at least its header, in whole pages, below the bound that keeps sums from overflow.
  if (!bytes || *bytes < kRecordHeaderBytes || *bytes % kPageBytes != 0 || *bytes > kMostRecordBytes)
    return std::nullopt;
  char raw[ChunkKey::kMaxBytes];
  for (std::size_t i = 0; i < hex.size() / 2; ++i) {
    const int high = hex_digit(hex[2 * i]), low = hex_digit(hex[2 * i + 1]);
    if (high < 0 || low < 0) return std::nullopt;
    raw[i] = static_cast<char>(high << 4 | low);
  }
  return ParsedRecord{ChunkKey::unchecked(raw, hex.size() / 2), *bytes};
}

std::string temporary_name(std::uint64_t writer, std::uint64_t number) {
  return fmt::format(".tmp-{}-{:016x}-{}", ::getpid(), writer, number);
}

bool is_temporary(std::string_view name) {
  constexpr std::string_view kPrefix = ".tmp-";
  if (!name.starts_with(kPrefix)) return false;
  const std::size_t writer = name.find('-', kPrefix.size());
  const std::size_t number = writer == name.npos ? name.npos : name.find('-', writer + 1);
  if (number == name.npos || number - writer - 1 > 16) return false;
  const auto all_hex = [](std::string_view text) {
    return !text.empty() && std::all_of(text.begin(), text.end(), [](char c) { return hex_digit(c) >= 0; });
  };
  return parse_number(name.substr(kPrefix.size(), writer - kPrefix.size())).has_value() &&
         all_hex(name.substr(writer + 1, number - writer - 1)) &&
         parse_number(name.substr(number + 1)).has_value();
}

std::uint64_t writer_of(std::string_view temporary) {
  std::uint64_t writer = 0;
  const std::size_t start = temporary.find('-', std::string_view(".tmp-").size()) + 1;
  for (std::size_t at = start; at < temporary.size() && temporary[at] != '-'; ++at)
    writer = writer << 4 | static_cast<std::uint64_t>(hex_digit(temporary[at]));
  return writer;
}

std::string presence_name(std::uint64_t writer) { return fmt::format("open-{:016x}", writer); }

std::optional<std::uint64_t> parse_presence(std::string_view name) {
  constexpr std::string_view kPrefix = "open-";
  if (!name.starts_with(kPrefix) || name.size() != kPrefix.size() + 16) return std::nullopt;
  std::uint64_t writer = 0;
  for (const char c : name.substr(kPrefix.size())) {
    if (hex_digit(c) < 0) return std::nullopt;
    writer = writer << 4 | static_cast<std::uint64_t>(hex_digit(c));
  }
  return writer;
}

}  // namespace kv_offload::layout
