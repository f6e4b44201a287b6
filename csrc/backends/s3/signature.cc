// SPDX-License-Identifier: Apache-2.0
#include "backends/s3/signature.h"

#ifdef KV_OFFLOAD_S3
#include <openssl/evp.h>
#include <openssl/hmac.h>

#include <array>
#include <memory>
#endif

namespace kv_offload::s3 {

#ifdef KV_OFFLOAD_S3

bool can_sign() { return true; }

namespace {

std::string hex_of_sum(std::string_view bytes) {
  std::string text;
  for (const char byte : bytes) text += fmt::format("{:02x}", static_cast<unsigned char>(byte));
  return text;
}

std::string hmac_sha256(std::string_view key, std::string_view text) {
  std::array<unsigned char, EVP_MAX_MD_SIZE> sum{};
  unsigned length = 0;
  const auto* bytes = reinterpret_cast<const unsigned char*>(text.data());
  if (HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()), bytes, text.size(), sum.data(), &length) ==
      nullptr) {
    return {};
  }
  return {reinterpret_cast<const char*>(sum.data()), length};
}

std::string sha256_hex(std::string_view text) {
  const std::span<const std::byte> piece = std::as_bytes(std::span(text));
  return s3::sha256_hex({&piece, 1});
}

}  // namespace

std::string sha256_hex(std::span<const std::span<const std::byte>> pieces) {
  const std::unique_ptr<EVP_MD_CTX, void (*)(EVP_MD_CTX*)> context(EVP_MD_CTX_new(), &EVP_MD_CTX_free);
  std::array<unsigned char, EVP_MAX_MD_SIZE> sum{};
  unsigned length = 0;
  bool ok = context && EVP_DigestInit_ex(context.get(), EVP_sha256(), nullptr) == 1;
  for (const auto& piece : pieces) {
    ok = ok && EVP_DigestUpdate(context.get(), piece.data(), piece.size()) == 1;
  }
  if (!ok || EVP_DigestFinal_ex(context.get(), sum.data(), &length) != 1) return {};
  return hex_of_sum({reinterpret_cast<const char*>(sum.data()), length});
}

bool sign(const ToSign& request, const Keys& keys, std::time_t now, HeaderMap* headers) {
  std::tm utc{};
  std::array<char, 17> timestamp{};
  if (gmtime_r(&now, &utc) == nullptr ||
      std::strftime(timestamp.data(), timestamp.size(), "%Y%m%dT%H%M%SZ", &utc) != timestamp.size() - 1) {
    return false;
  }
  const std::string_view moment(timestamp.data()), day = moment.substr(0, 8);
  (*headers)["x-amz-date"] = moment;
  (*headers)["x-amz-content-sha256"] = request.body_sum;
  if (!keys.session_token.empty()) (*headers)["x-amz-security-token"] = keys.session_token;

  // The canonical request: the map keeps the headers in the required order.
  std::string canonical = fmt::format("{}\n{}\n{}\n", request.method, request.path, request.query), names;
  for (const auto& [name, value] : *headers) {
    canonical += fmt::format("{}:{}\n", name, value);
    names += (names.empty() ? "" : ";") + name;
  }
  canonical += fmt::format("\n{}\n{}", names, request.body_sum);
  const std::string scope = fmt::format("{}/{}/s3/aws4_request", day, request.region);
  const std::string sum = sha256_hex(canonical);
  // The signing key is derived in four steps. An empty string means that OpenSSL failed.
  std::string key = hmac_sha256("AWS4" + keys.secret_key, day);
  for (const std::string_view part :
       {request.region, std::string_view("s3"), std::string_view("aws4_request")}) {
    if (key.empty()) return false;
    key = hmac_sha256(key, part);
  }
  if (key.empty()) return false;
  const std::string signature =
      hex_of_sum(hmac_sha256(key, fmt::format("AWS4-HMAC-SHA256\n{}\n{}\n{}", moment, scope, sum)));
  if (request.body_sum.empty() || sum.empty() || signature.empty()) return false;
  (*headers)["authorization"] = fmt::format("AWS4-HMAC-SHA256 Credential={}/{},SignedHeaders={},Signature={}",
                                            keys.access_key, scope, names, signature);
  return true;
}

#else

bool can_sign() { return false; }
std::string sha256_hex(std::span<const std::span<const std::byte>>) { return {}; }
bool sign(const ToSign&, const Keys&, std::time_t, HeaderMap*) { return false; }

#endif

}  // namespace kv_offload::s3
