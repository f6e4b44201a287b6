// SPDX-License-Identifier: Apache-2.0
// Stores and tiers that use the S3 server of the tests.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <mutex>
#include <string>
#include <vector>

#include "backends/s3/medium.h"
#include "backends/s3/store.h"

namespace kv_offload::testing {

inline constexpr int kAlways = 1 << 30;  // times

inline std::string error_of(std::string_view status, std::string_view code, std::string_view more = "") {
  const std::string body =
      fmt::format("<Error><Code>{}</Code><Message>{}</Message></Error>", code, S3Server::kSecret);
  return fmt::format("HTTP/1.1 {}\r\nContent-Length: {}\r\nConnection: close\r\n{}\r\n{}", status,
                     body.size(), more, body);
}

class S3TierTest : public ::testing::Test {
 protected:
  std::unique_ptr<Tier> open() { return make_s3_tier(options()); }
  S3TierOptions options() {
    S3TierOptions chosen = medium_.options();
    chosen.name = "s3";
    chosen.clock = &clock_;
    chosen.op_timeout = std::chrono::seconds(60);
    chosen.pause = [this](Nanos time) {
      const std::lock_guard lock(mutex_);
      pauses_.push_back(time);
    };
    return chosen;
  }
  // Builds an op as a pool does, without threads.
  static TierOp op_of(OpKind kind, std::uint32_t number, const Row& row) {
    TierOp op;
    op.kind = kind;
    op.key = key_of(number);
    op.shards = row.shards();
    return op;
  }
  static Status write(s3::S3Store& store, std::uint32_t number) {
    Row row({8192});
    row.fill(number);
    std::uint64_t moved = 0;
    return store.write(op_of(OpKind::kWrite, number, row), store.epoch(), &moved);
  }
  static Status read(s3::S3Store& store, std::uint32_t number) {
    Row row({8192});
    std::uint64_t moved = 0;
    const Status status = store.read(op_of(OpKind::kRead, number, row), store.epoch(), &moved);
    EXPECT_TRUE(!status || row.holds(number));
    EXPECT_EQ(moved, status ? 8192u : 0u);
    return status;
  }
  static std::vector<bool> located(s3::S3Store& store, const std::vector<ChunkKey>& keys,
                                   KeyOrder order = KeyOrder::kPrefix) {
    std::vector<bool> present(keys.size());
    EXPECT_TRUE(store.locate(keys, order, store.epoch(), &present));
    present.resize(keys.size());  // those without an answer
    return present;
  }
  std::string refused(const S3TierOptions& options) {
    try {
      (void)make_s3_tier(options);
    } catch (const ResourceError& error) {
      return error.what();
    }
    ADD_FAILURE() << "was accepted";
    return {};
  }

  std::mutex mutex_;
  std::vector<Nanos> pauses_;
  FakeClock clock_;
  S3Medium medium_;
  S3Server& server_ = medium_.server;
};

}  // namespace kv_offload::testing
