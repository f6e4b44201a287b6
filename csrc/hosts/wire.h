// SPDX-License-Identifier: Apache-2.0
// Reads and writes the integers and texts of message bodies, little-endian.
//
// Threads: none; an object belongs to one thread.
#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace kv_offload::wire {

using Bytes = std::vector<std::uint8_t>;
using ByteSpan = std::span<const std::uint8_t>;

template <typename Number>
void put(Bytes* to, Number value) {
  std::array<std::uint8_t, sizeof value> bytes;
  for (std::size_t i = 0; i < sizeof value; ++i) bytes[i] = static_cast<std::uint8_t>(value >> 8 * i);
  to->insert(to->end(), bytes.begin(), bytes.end());
}
inline void put_double(Bytes* to, double value) { put(to, std::bit_cast<std::uint64_t>(value)); }
inline void put_bool(Bytes* to, bool value) { to->push_back(value ? 1 : 0); }
inline void put_bytes(Bytes* to, ByteSpan bytes) { to->insert(to->end(), bytes.begin(), bytes.end()); }
inline ByteSpan as_bytes(std::string_view text) {
  return {reinterpret_cast<const std::uint8_t*>(text.data()), text.size()};
}

// Reads from the front of a span. After a read past the end or of a value that no writer produces, is_good()
// is false; after a read past the end, all values are zero.
class Input {
 public:
  explicit Input(ByteSpan bytes) : left_(bytes) {}
  template <typename Number>
  Number number() {
    Number value = 0;
    const ByteSpan bytes = take(sizeof value);
    for (std::size_t i = 0; i < bytes.size(); ++i)
      value = static_cast<Number>(value | static_cast<Number>(Number{bytes[i]} << 8 * i));
    return value;
  }
  // Not negative; infinity is possible.
  double amount() {
    const auto value = std::bit_cast<double>(number<std::uint64_t>());
    return check(value >= 0 && !std::signbit(value)) ? value : 0;
  }
  // An amount of time that can be converted to nanoseconds.
  double seconds() {
    const double value = amount();
    return check(value <= 1e9) ? value : 0;
  }
  bool boolean() { return at_most<std::uint8_t>(1) != 0; }
  // Also for enumerations, by their last value.
  template <typename Number>
  Number at_most(Number last) {
    const auto value = number<Number>();
    return check(value <= last) ? value : Number{0};
  }
  ByteSpan take(std::size_t count) {
    if (!check(count <= left_.size())) return {};
    const ByteSpan taken = left_.first(count);
    left_ = left_.subspan(count);
    return taken;
  }
  std::string text(std::size_t bytes) {
    const ByteSpan taken = take(bytes);
    return {reinterpret_cast<const char*>(taken.data()), taken.size()};
  }
  bool check(bool holds) {
    is_good_ = is_good_ && holds;
    return holds;
  }
  std::size_t left() const { return left_.size(); }
  bool is_good() const { return is_good_; }
  bool ended_well() const { return is_good_ && left_.empty(); }

 private:
  ByteSpan left_;
  bool is_good_ = true;
};

}  // namespace kv_offload::wire
