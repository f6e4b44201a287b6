// SPDX-License-Identifier: Apache-2.0
#include "base/types.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <iterator>

#include "base/status.h"

namespace kv_offload {

std::string hex_of(std::span<const std::uint8_t> bytes) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  text.reserve(bytes.size() * 2);
  for (const std::uint8_t byte : bytes) {
    text.push_back(kDigits[byte >> 4]);
    text.push_back(kDigits[byte & 15]);
  }
  return text;
}

ChunkKey::ChunkKey(std::string_view bytes) {
  if (!fits(bytes.size())) {
    throw_invalid("invalid chunk key of {} bytes: a key has {}..{} bytes (a hash and 4 bytes of group id)",
                  bytes.size(), kMinBytes, kMaxBytes);
  }
  size_ = static_cast<std::uint8_t>(bytes.size());
  std::memcpy(bytes_.data(), bytes.data(), bytes.size());
}

std::string ChunkKey::hex() const {
  return hex_of({reinterpret_cast<const std::uint8_t*>(bytes().data()), bytes().size()});
}

ChunkKey ChunkKey::from_hex(std::string_view hex) {
  const auto digit = [&](char c) -> int {
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    throw_invalid("'{}' is not a chunk key in hex: '{}' is not a lower-case hex digit", hex, c);
  };
  if (hex.size() % 2 != 0) throw_invalid("'{}' is not a chunk key in hex: odd length", hex);
  std::string bytes;
  bytes.reserve(hex.size() / 2);
  for (std::size_t i = 0; i < hex.size(); i += 2) {
    bytes.push_back(static_cast<char>(digit(hex[i]) << 4 | digit(hex[i + 1])));
  }
  return ChunkKey(bytes);
}

std::uint64_t parse_byte_size(std::string_view text) {
  struct Unit {
    std::string_view name;
    double factor;
  };
  // A single letter is decimal, as in Kubernetes: a user who writes 32G and means 32GiB gets less than
  // intended, never more.
  static constexpr Unit kUnits[] = {
      {"", 1},         {"b", 1},       {"kib", 0x1p10}, {"mib", 0x1p20}, {"gib", 0x1p30}, {"tib", 0x1p40},
      {"pib", 0x1p50}, {"ki", 0x1p10}, {"mi", 0x1p20},  {"gi", 0x1p30},  {"ti", 0x1p40},  {"pi", 0x1p50},
      {"kb", 1e3},     {"mb", 1e6},    {"gb", 1e9},     {"tb", 1e12},    {"pb", 1e15},    {"k", 1e3},
      {"m", 1e6},      {"g", 1e9},     {"t", 1e12},     {"p", 1e15},
  };
  constexpr double kSmallestWithoutUnit = 0x1p20;
  double number = 0;
  const char* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, number);
  std::string unit;
  for (const char* c = rest; c != end; ++c) {
    if (*c != ' ') unit.push_back(static_cast<char>(std::tolower(static_cast<unsigned char>(*c))));
  }
  const auto* found =
      std::find_if(std::begin(kUnits), std::end(kUnits), [&](const Unit& u) { return u.name == unit; });
  if (error != std::errc{} || found == std::end(kUnits) || !std::isfinite(number) || number < 0 ||
      number * found->factor >= 0x1p63) {
    throw_invalid(
        "'{}' is not a size; write a number with KiB, MiB, GiB, TiB, KB, MB, GB or TB, such as 32GiB", text);
  }
  if (unit.empty() && number > 0 && number < kSmallestWithoutUnit) {  // a plain 32 hardly means 32 bytes
    throw_invalid("'{}' has no unit; below 1 MiB a size needs one, such as 32GiB, 512MiB or 4096B", text);
  }
  return static_cast<std::uint64_t>(number * found->factor);
}

std::string format_bytes(std::uint64_t bytes) {
  static constexpr std::string_view kNames[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  double value = static_cast<double>(bytes);
  std::size_t unit = 0;
  while (value >= 1024 && unit + 1 < std::size(kNames)) {
    value /= 1024;
    ++unit;
  }
  return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.1f} {}", value, kNames[unit]);
}

}  // namespace kv_offload
