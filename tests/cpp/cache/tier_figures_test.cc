// SPDX-License-Identifier: Apache-2.0
#include "cache/tier_figures.h"

#include <gtest/gtest.h>

namespace kv_offload {
namespace {

TEST(TierFigures, the_largest_errors_of_keys_and_values_are_published) {
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
