// SPDX-License-Identifier: Apache-2.0
#include "backends/redis/slots.h"

#include <algorithm>
#include <array>
#include <charconv>

namespace kv_offload::redis {
namespace {

constexpr std::size_t kLongestHost = 255;  // the longest DNS name
constexpr std::size_t kMostReplicas = 64;  // kept per master

// CRC16-CCITT (XMODEM), as in the Redis cluster specification.
constexpr std::array<std::uint16_t, 256> crc16_table() {
  std::array<std::uint16_t, 256> table{};
  for (unsigned i = 0; i < 256; ++i) {
    unsigned crc = i << 8;
    for (int bit = 0; bit < 8; ++bit) crc = (crc & 0x8000) != 0 ? (crc << 1) ^ 0x1021 : crc << 1;
    table[i] = static_cast<std::uint16_t>(crc);
  }
  return table;
}

// Accepts only characters that a host can contain. The text is used in name lookups, certificate verification
// and messages.
bool is_host(std::string_view text) {
  // ':' and '%' occur in IPv6 addresses and their zones.
  return text.size() <= kLongestHost && std::all_of(text.begin(), text.end(), [](char c) {
           return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' ||
                  c == ':' || c == '-' || c == '_' || c == '%';
         });
}
bool is_address(std::string_view host) {
  return host.find(':') != host.npos || host.find_first_not_of("0123456789.") == host.npos;
}

template <typename Number>
bool to_number(std::string_view text, Number* number) {
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), *number);
  return error == std::errc() && stop == text.data() + text.size();
}

bool is_text(const Reply& reply) {
  return reply.kind == Reply::Kind::kString || reply.kind == Reply::Kind::kStatus;
}

// [host or nil, port, id, [name, value, ...]]; the last two since Redis 4 and 7.
std::optional<Endpoint> endpoint_of(const Reply& reply) {
  const auto& parts = reply.elements;
  if (parts.size() < 2 || parts[1].kind != Reply::Kind::kInteger) return std::nullopt;
  Endpoint endpoint;
  std::string address, name;
  if (parts.size() > 3) {
    const auto& about = parts[3].elements;
    for (std::size_t i = 0; i + 1 < about.size(); i += 2) {
      if (!is_text(about[i]) || !is_text(about[i + 1])) continue;
      if (about[i].text == "hostname" && is_host(about[i + 1].text)) name = about[i + 1].text;
      if (about[i].text == "ip" && is_host(about[i + 1].text)) address = about[i + 1].text;
    }
  }
  if (is_text(parts[0])) endpoint.host = parts[0].text;
  if (endpoint.host == "?") endpoint.host = address;  // the node prefers host names and has none
  if (parts[0].text == "?" && address.empty()) return std::nullopt;
  if (!is_host(endpoint.host)) return std::nullopt;
  // The connection goes to the address; the certificate contains the name.
  if (!name.empty() && !endpoint.host.empty() && is_address(endpoint.host)) endpoint.tls_name = name;
  const long long port = parts[1].integer;
  if (port < 0 || port > 65535 || (port == 0 && !endpoint.host.empty())) return std::nullopt;
  endpoint.port = static_cast<std::uint16_t>(port);
  return endpoint;
}

}  // namespace

std::uint16_t slot_of(std::string_view key) {
  static constexpr std::array kTable = crc16_table();
  if (const std::size_t open = key.find('{'); open != key.npos) {
    const std::size_t close = key.find('}', open + 1);
    if (close != key.npos && close > open + 1) key = key.substr(open + 1, close - open - 1);
  }
  unsigned crc = 0;
  for (const char c : key) {
    crc = ((crc << 8) ^ kTable[((crc >> 8) ^ static_cast<unsigned char>(c)) & 0xFF]) & 0xFFFF;
  }
  return static_cast<std::uint16_t>(crc % kSlots);
}

Server server_at(const Endpoint& endpoint, const Server& reporter) {
  Server server = reporter;
  if (endpoint.host.empty() && reporter.host.empty()) return server;  // on its Unix socket
  server.unix_socket.clear();
  if (endpoint.host.empty()) {
    server.port = endpoint.port;
    return server;
  }
  server.host = endpoint.host;
  server.port = endpoint.port;
  server.tls_name = endpoint.tls_name;
  return server;
}

std::optional<std::vector<SlotRange>> slot_ranges(const Reply& reply) {
  if (reply.kind != Reply::Kind::kArray) return std::nullopt;
  std::vector<SlotRange> ranges;
  std::vector<bool> taken(kSlots);
  for (const Reply& part : reply.elements) {
    const auto& entry = part.elements;
    if (entry.size() < 3 || entry[0].kind != Reply::Kind::kInteger ||
        entry[1].kind != Reply::Kind::kInteger) {
      return std::nullopt;
    }
    const long long first = entry[0].integer, last = entry[1].integer;
    if (first < 0 || last < first || last >= static_cast<long long>(kSlots)) return std::nullopt;
    for (auto slot = static_cast<std::size_t>(first); slot <= static_cast<std::size_t>(last); ++slot) {
      if (taken[slot]) return std::nullopt;  // two owners
      taken[slot] = true;
    }
    const std::optional<Endpoint> owner = endpoint_of(entry[2]);
    if (!owner) continue;
    SlotRange range{static_cast<std::uint16_t>(first), static_cast<std::uint16_t>(last), *owner, {}};
    for (std::size_t i = 3; i < entry.size() && range.replicas.size() < kMostReplicas; ++i) {
      if (const auto replica = endpoint_of(entry[i])) range.replicas.push_back(*replica);
    }
    ranges.push_back(std::move(range));
  }
  return ranges;
}

std::optional<Redirect> redirect_of(const Reply& reply) {
  if (reply.kind != Reply::Kind::kError) return std::nullopt;
  std::string_view rest = reply.text;
  Redirect redirect;
  redirect.asking = rest.starts_with("ASK ");
  if (!redirect.asking && !rest.starts_with("MOVED ")) return std::nullopt;
  rest.remove_prefix(rest.find(' ') + 1);
  const std::size_t space = rest.find(' ');
  if (space == rest.npos || !to_number(rest.substr(0, space), &redirect.slot)) return std::nullopt;
  rest.remove_prefix(space + 1);
  const std::size_t colon = rest.rfind(':');  // the last colon: an IPv6 address contains more of them
  if (colon == rest.npos || !to_number(rest.substr(colon + 1), &redirect.to.port)) return std::nullopt;
  redirect.to.host = rest.substr(0, colon);
  redirect.has_no_address = redirect.to.host == "?";
  if (redirect.has_no_address) redirect.to.host.clear();
  if (redirect.slot >= kSlots || redirect.to.port == 0 || !is_host(redirect.to.host)) return std::nullopt;
  return redirect;
}

}  // namespace kv_offload::redis
