// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>

#include "backends/s3/client.h"

namespace kv_offload::s3 {
namespace {

struct ErrorMapping {
  std::string_view code;
  StatusKind kind;
  bool setting;
  std::string_view sentence;
};

constexpr std::array kErrorMappings{
    ErrorMapping{"NoSuchBucket", StatusKind::kIo, true,
                 "the bucket does not exist: create it, or correct bucket"},
    ErrorMapping{
        "AccessDenied", StatusKind::kIo, true,
        "access is denied: allow s3:GetObject, s3:PutObject and s3:DeleteObject on the objects of the "
        "prefix, and s3:ListBucket on the bucket (without it the store reports missing objects as denied)"},
    ErrorMapping{"InvalidAccessKeyId", StatusKind::kIo, true, "the store does not know the access key"},
    ErrorMapping{"SignatureDoesNotMatch", StatusKind::kIo, true,
                 "the store refuses the signature: the secret key or the region is wrong"},
    ErrorMapping{"InvalidToken", StatusKind::kIo, true, "the store refuses the session token"},
    ErrorMapping{"ExpiredToken", StatusKind::kIo, true, "the credentials have expired: renew them"},
    ErrorMapping{"RequestTimeTooSkewed", StatusKind::kIo, true,
                 "the clock of this host differs from the store's: set it"},
    ErrorMapping{"AuthorizationHeaderMalformed", StatusKind::kIo, true,
                 "the store refuses the region or the access key: correct region"},
    ErrorMapping{"PermanentRedirect", StatusKind::kIo, true,
                 "the bucket is at another endpoint: correct region or endpoint"},
    ErrorMapping{"SlowDown", StatusKind::kIo, false, "the store asks for fewer requests"},
    ErrorMapping{"Throttling", StatusKind::kIo, false, "the store asks for fewer requests"},
    ErrorMapping{"RequestLimitExceeded", StatusKind::kIo, false, "the store asks for fewer requests"},
    ErrorMapping{"RequestTimeout", StatusKind::kIo, false, "the store waited too long for the request"},
    ErrorMapping{"QuotaExceeded", StatusKind::kNoSpace, false, "the store is full"},
    ErrorMapping{"XMinioStorageFull", StatusKind::kNoSpace, false, "the store is full"},
    ErrorMapping{"InsufficientStorage", StatusKind::kNoSpace, false, "the store is full"},
};

const ErrorMapping* find_mapping(std::string_view code) {
  const auto found = std::find_if(kErrorMappings.begin(), kErrorMappings.end(),
                                  [&](const ErrorMapping& one) { return one.code == code; });
  return found == kErrorMappings.end() ? nullptr : &*found;
}

// The message for a response to HEAD, which has no body.
std::string_view describe_status(long status) {
  switch (status) {
    case 400:
      return "the store refuses the request and does not say why: credentials may have expired, or the "
             "region or the clock of this host is wrong";
    case 403:
      return "access is denied and the store does not say why: the keys are wrong or have expired, the clock "
             "of this host is wrong, or a permission is missing (s3:GetObject, s3:PutObject and "
             "s3:DeleteObject on the objects of the prefix, s3:ListBucket on the bucket)";
    case 429:
    case 503:
      return "the store asks for fewer requests";
    default:
      return {};
  }
}

bool is_redirect(const Answer& answer) { return answer.status >= 300 && answer.status < 400; }

bool is_region(std::string_view text) {
  return !text.empty() && text.size() <= 40 &&
         text.find_first_not_of("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_") ==
             text.npos;
}

}  // namespace

Status refusal(const Answer& answer, const Bucket& bucket) {
  // A wrong region shows in a redirect or a 400.
  if (is_region(answer.region) && answer.region != bucket.region &&
      (is_redirect(answer) || answer.status == 400)) {
    return Status::error(StatusKind::kIo, fmt::format("the bucket is in region {}, not in {}: correct region",
                                                      answer.region, bucket.region));
  }
  if (const ErrorMapping* mapping = find_mapping(answer.code)) {
    return Status::error(mapping->kind, std::string(mapping->sentence));
  }
  // Without a known code, the HTTP status decides.
  if (is_redirect(answer)) return refusal({.status = 400, .code = "PermanentRedirect"}, bucket);
  if (answer.status == 404) return Status::error(StatusKind::kNotFound, "no record of this key");
  if (answer.status == 507) return refusal({.status = 400, .code = "InsufficientStorage"}, bucket);
  const std::string_view sentence = answer.code.empty() ? describe_status(answer.status) : "";
  if (!sentence.empty()) return Status::error(StatusKind::kIo, std::string(sentence));
  return Status::error(StatusKind::kIo, fmt::format("the store refused the request ({}, {})", answer.status,
                                                    answer.code.empty() ? "no code" : answer.code));
}

bool is_configuration_error(const Answer& answer) {
  const ErrorMapping* mapping = find_mapping(answer.code);
  if (answer.misconfigured || is_redirect(answer)) return true;
  if (mapping != nullptr) return mapping->setting;
  // 408 and 429 are temporary. 404, 409 and 412 describe the object.
  constexpr std::array kOther{404L, 408L, 409L, 412L, 429L};
  return answer.status >= 400 && answer.status < 500 &&
         std::find(kOther.begin(), kOther.end(), answer.status) == kOther.end();
}

}  // namespace kv_offload::s3
