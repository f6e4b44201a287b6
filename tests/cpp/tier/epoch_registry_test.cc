// SPDX-License-Identifier: Apache-2.0
// The epoch that an engine uses, and the epoch that it publishes for others.
#include "tier/epoch_registry.h"

#include <gtest/gtest.h>

#include <string>

namespace kv_offload {
namespace {

const std::string kFirst(EpochRegistry::kNameDigits, 'a');

// Begins an epoch with a store that accepts any name.
Status begin(EpochRegistry& epochs, std::string* kept) {
  return epochs.begin([&](std::string*) { return Status::ok(); },
                      [&](const std::string& name) {
                        *kept = name;
                        return Status::ok();
                      });
}

TEST(EpochRegistryTest, a_name_kept_before_a_reset_is_not_the_start_epoch_after_it) {
  EpochRegistry epochs;
  epochs.start_with(kFirst);
  const std::string known = epochs.startup_epoch();
  epochs.forget();  // while the store is being asked
  epochs.update_startup_epoch(known, kFirst, false);
  EXPECT_EQ(epochs.startup_epoch(), "");
  std::string kept;
  ASSERT_TRUE(begin(epochs, &kept));
  epochs.update_startup_epoch(known, kFirst, false);
  EXPECT_EQ(epochs.startup_epoch(), kept);
}

TEST(EpochRegistryTest, a_reset_engine_does_not_share_the_start_epoch) {
  EpochRegistry epochs;
  epochs.start_with(kFirst);
  epochs.forget();
  std::string kept;
  ASSERT_TRUE(begin(epochs, &kept));
  EXPECT_NE(EpochRegistry::name_of(epochs.current()), kept);
  EXPECT_TRUE(epochs.has_ended(kFirst));
  EXPECT_FALSE(epochs.has_ended(kept));
}

}  // namespace
}  // namespace kv_offload
