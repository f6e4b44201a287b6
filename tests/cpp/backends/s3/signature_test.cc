// SPDX-License-Identifier: Apache-2.0
// Signatures of the examples of AWS:
// https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html
#include "backends/s3/signature.h"

#include <gtest/gtest.h>

namespace kv_offload::s3 {
namespace {

constexpr std::time_t kFriday = 1369353600;  // 2013-05-24 00:00:00 UTC
constexpr const char* kEmpty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

std::string signature_of(std::string_view method, std::string_view path, std::string_view query,
                         std::string_view sum, HeaderMap headers = {}) {
  headers["host"] = "examplebucket.s3.amazonaws.com";
  const Keys keys{"AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", ""};
  EXPECT_TRUE(sign({method, path, query, sum, "us-east-1"}, keys, kFriday, &headers));
  const std::string& text = headers["authorization"];
  EXPECT_TRUE(text.starts_with(
      "AWS4-HMAC-SHA256 Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request,SignedHeaders="))
      << text;
  return text.substr(text.rfind('=') + 1);
}

TEST(S3SignatureTest, signatures_match_the_examples_of_aws) {
  EXPECT_EQ(signature_of("GET", "/test.txt", "", kEmpty, {{"range", "bytes=0-9"}}),
            "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41");
  const std::string_view text = "Welcome to Amazon S3.";
  const std::span<const std::byte> body = std::as_bytes(std::span(text));
  EXPECT_EQ(signature_of(
                "PUT", "/test%24file.text", "", sha256_hex({&body, 1}),
                {{"date", "Fri, 24 May 2013 00:00:00 GMT"}, {"x-amz-storage-class", "REDUCED_REDUNDANCY"}}),
            "98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd");
  EXPECT_EQ(signature_of("GET", "/", "lifecycle=", kEmpty),
            "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543");
  EXPECT_EQ(signature_of("GET", "/", "max-keys=2&prefix=J", kEmpty),
            "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7");
}

TEST(S3SignatureTest, the_hash_of_pieces_equals_the_hash_of_the_whole) {
  const std::string_view whole = "Welcome to Amazon S3.";
  const std::span<const std::byte> body = std::as_bytes(std::span(whole));
  const std::array<std::span<const std::byte>, 3> pieces{body.first(3), body.subspan(3, 0), body.subspan(3)};
  EXPECT_EQ(sha256_hex(pieces), sha256_hex({&body, 1}));
  EXPECT_EQ(sha256_hex({}), kEmpty);
}

TEST(S3SignatureTest, the_session_token_is_signed) {
  HeaderMap headers{{"host", "h"}};
  EXPECT_TRUE(sign({"GET", "/", "", kEmpty, "r"}, {"a", "s", "t"}, kFriday, &headers));
  EXPECT_EQ(headers["x-amz-security-token"], "t");
  EXPECT_NE(headers["authorization"].find("x-amz-date;x-amz-security-token,"), std::string::npos);
}

}  // namespace
}  // namespace kv_offload::s3
