// SPDX-License-Identifier: Apache-2.0
// Request signatures (AWS Signature Version 4, in headers). libcurl's own implementation cannot sign S3
// requests before 7.87, and most distributions ship an older version.
// https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html
#pragma once

#include <cstddef>
#include <ctime>
#include <map>
#include <span>
#include <string>
#include <string_view>

#include "backends/s3/client.h"

namespace kv_offload::s3 {

// False: this build has no OpenSSL, which computes the hashes.
bool can_sign();

// Returns the hash of the concatenated pieces; empty: OpenSSL failed.
std::string sha256_hex(std::span<const std::span<const std::byte>> pieces);

using HeaderMap = std::map<std::string, std::string>;  // names in lower case
struct ToSign {
  std::string_view method, path;
  std::string_view query;     // sorted, percent-encoded, each name with a "="
  std::string_view body_sum;  // sha256_hex() of the body, or UNSIGNED-PAYLOAD
  std::string_view region;
};
// Adds x-amz-date, x-amz-content-sha256, x-amz-security-token and authorization to the headers. All headers
// are signed; they must include the host. False: OpenSSL failed, or `now` has no such date.
bool sign(const ToSign& request, const Keys& keys, std::time_t now, HeaderMap* headers);

}  // namespace kv_offload::s3
