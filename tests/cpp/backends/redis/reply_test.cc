// SPDX-License-Identifier: Apache-2.0
#include "backends/redis/reply.h"

#include <gtest/gtest.h>

namespace kv_offload::redis {
namespace {

TEST(RedisReplyTest, a_full_server_is_a_bound_and_not_a_device_failure) {
  const Status status = refusal("OOM command not allowed when used memory > 'maxmemory'.");
  EXPECT_EQ(status.kind(), StatusKind::kNoSpace);
  EXPECT_EQ(status.error_number(), 0);
}

TEST(RedisReplyTest, an_unexpected_reply_is_an_io_error) {
  EXPECT_EQ(unexpected_reply().kind(), StatusKind::kIo);
  EXPECT_EQ(unexpected_reply().message(), "unexpected reply to this command");
}

TEST(RedisReplyTest, refusals_are_distinguished) {
  EXPECT_EQ(refusal("WRONGTYPE Operation against a key holding the wrong kind of value").kind(),
            StatusKind::kCorrupt);
  for (const auto& [text, sentence] :
       {std::pair{"READONLY You can't write", "read-only replica"},
        std::pair{"LOADING Redis is loading", "still loading"},
        std::pair{"MOVED 3999 127.0.0.1:6381", "another server has the key"},
        std::pair{"ASK 3999 127.0.0.1:6381", "the key is moving to another server"},
        std::pair{"CLUSTERDOWN Hash slot not served", "the cluster is down"},
        std::pair{"TRYAGAIN Multiple keys", "being moved"}, std::pair{"MISCONF Redis is", "cannot save"},
        std::pair{"NOAUTH Authentication required.", "password_env"}}) {
    EXPECT_EQ(refusal(text).kind(), StatusKind::kIo) << text;
    EXPECT_NE(refusal(text).message().find(sentence), std::string::npos) << text;
  }
}

TEST(RedisReplyTest, a_message_without_an_error_code_is_not_repeated) {
  for (const std::string& text :
       {std::string("hunter2 is wrong"), std::string("\x1b[31mERR"), std::string(), std::string(300, 'A')}) {
    EXPECT_EQ(refusal(text).message(), "the server refused the command (no code)") << text;
  }
  EXPECT_NE(refusal("EXECABORT x").message().find("EXECABORT"), std::string::npos);
}

TEST(RedisReplyTest, settings_errors_are_distinguished_from_temporary_errors) {
  EXPECT_TRUE(is_configuration_error("NOAUTH x") && is_configuration_error("NOPERM x"));
  EXPECT_FALSE(is_configuration_error("LOADING x") || is_configuration_error("READONLY x") ||
               is_configuration_error("OOM x") || is_configuration_error("ERR x") ||
               is_configuration_error("MOVED 1 a:1") || is_configuration_error("CLUSTERDOWN x"));
}

TEST(RedisReplyTest, quoted_arguments_are_not_repeated) {
  const Status status = refusal("ERR unknown command 'AUTH', with args beginning with: 'me' 'secret'");
  EXPECT_EQ(status.to_string().find("secret"), std::string::npos);
}

}  // namespace
}  // namespace kv_offload::redis
