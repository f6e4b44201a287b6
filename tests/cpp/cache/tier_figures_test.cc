// SPDX-License-Identifier: Apache-2.0
#include "cache/tier_figures.h"

#include <gtest/gtest.h>

#include "metrics/metrics.h"

namespace kv_offload {
namespace {

void count(std::array<std::uint64_t, kStatusKinds>* counts, StatusKind kind, std::uint64_t number) {
  (*counts)[static_cast<std::size_t>(kind)] = number;
}

TEST(TierFiguresTest, the_part_of_each_host_has_labels_of_its_own_and_totals_count_once) {
  std::vector<TierPart> parts(2);
  parts[0].stats.bytes = 10;
  parts[1].stats.bytes = 20;
  parts[1].stats.capacity_bytes = 30;
  parts[1].stats.chunks = 4;
  parts[1].stats.writable = false;
  parts[1].stats.breaker_trips = 1;
  parts[1].stats.write_timeouts = 5;
  parts[1].read_bytes_per_second = 1e9;
  parts[1].slowest_reads = 7;
  count(&parts[1].reads, StatusKind::kOk, 100);
  count(&parts[1].reads, StatusKind::kCorrupt, 2);
  count(&parts[1].reads, StatusKind::kNotFound, 9);
  count(&parts[1].writes, StatusKind::kNoSpace, 3);
  count(&parts[1].removals, StatusKind::kIo, 6);
  count(&parts[1].removals, StatusKind::kUnavailable, 7);
  count(&parts[1].removals, StatusKind::kDeclined, 8);
  count(&parts[1].writes, StatusKind::kDeclined, 9);
  Metrics metrics;
  TierFigures figures;
  figures.publish("fs", parts, metrics);
  figures.publish("fs", parts, metrics);
  parts[1].slowest_reads = 8;
  figures.publish("fs", parts, metrics);
  const auto value = [&](std::string_view name, Metrics::Labels labels) {
    return metrics.value(name, labels);
  };
  EXPECT_EQ(value("kv_offload_host_tier_bytes", {"0", "fs"}), 10);
  EXPECT_EQ(value("kv_offload_host_tier_bytes", {"1", "fs"}), 20);
  EXPECT_EQ(value("kv_offload_host_tier_capacity_bytes", {"1", "fs"}), 30);
  EXPECT_EQ(value("kv_offload_host_tier_chunks", {"1", "fs"}), 4);
  EXPECT_EQ(value("kv_offload_host_tier_usable", {"0", "fs", "write"}), 1);
  EXPECT_EQ(value("kv_offload_host_tier_usable", {"1", "fs", "read"}), 1);
  EXPECT_EQ(value("kv_offload_host_tier_usable", {"1", "fs", "write"}), 0);
  EXPECT_EQ(value("kv_offload_host_read_bytes_per_second", {"1", "fs"}), 1e9);
  EXPECT_EQ(value("kv_offload_host_slowest_reads_total", {"1", "fs"}), 8);
  EXPECT_EQ(value("kv_offload_host_breaker_trips_total", {"1", "fs"}), 1);
  const auto failures = [&](std::string_view op, StatusKind kind) {
    return value("kv_offload_host_failures_total", {"1", "fs", op, to_string(kind)});
  };
  EXPECT_EQ(failures("read", StatusKind::kCorrupt), 2);
  EXPECT_EQ(failures("read", StatusKind::kNotFound), 0) << "not a failure";
  EXPECT_EQ(failures("write", StatusKind::kNoSpace), 3);
  EXPECT_EQ(failures("write", StatusKind::kTimeout), 5);
  EXPECT_EQ(failures("remove", StatusKind::kIo), 6);
  EXPECT_EQ(failures("remove", StatusKind::kUnavailable), 0) << "repeated when the host takes it";
  EXPECT_EQ(failures("remove", StatusKind::kDeclined), 8) << "the part stays";
  EXPECT_EQ(failures("write", StatusKind::kDeclined), 0);
}

TEST(TierFiguresTest, the_largest_errors_of_keys_and_values_are_published) {
  Metrics metrics;
  TierFigures figures;
  TierStats stats;
  stats.may_encode = true;
  figures.publish("far", stats, metrics);
  EXPECT_EQ(metrics.text().find("kv_offload_codec_largest_error{"), std::string::npos) << "nothing was lost";
  stats.largest_key_error = 0.0625;
  stats.largest_value_error = 0.125;
  figures.publish("far", stats, metrics);
  EXPECT_EQ(metrics.value("kv_offload_codec_largest_error", {"far", "keys"}), 0.0625);
  EXPECT_EQ(metrics.value("kv_offload_codec_largest_error", {"far", "values"}), 0.125);
}

}  // namespace
}  // namespace kv_offload
