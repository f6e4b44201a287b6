// The epoch that an engine uses, and the epoch that it publishes for others.
#include "tier/named_epochs.h"

#include <gtest/gtest.h>

#include <string>

namespace kv_offload {
namespace {

const std::string kFirst(NamedEpochs::kNameDigits, 'a');

// Begins an epoch with a store that accepts any name.
Status begin(NamedEpochs& epochs, std::string* kept) {
  return epochs.begin([&](std::string*) { return Status::ok(); },
                      [&](const std::string& name) {
                        *kept = name;
                        return Status::ok();
                      });
}

TEST(NamedEpochsTest, a_name_kept_before_a_reset_is_not_the_start_epoch_after_it) {
  NamedEpochs epochs;
  epochs.start_with(kFirst);
  const std::string known = epochs.of_those_who_start();
  epochs.forget();  // while the store is being asked
  epochs.note_kept(known, kFirst, false);
  EXPECT_EQ(epochs.of_those_who_start(), "");
  std::string kept;
  ASSERT_TRUE(begin(epochs, &kept));
  epochs.note_kept(known, kFirst, false);
  EXPECT_EQ(epochs.of_those_who_start(), kept);
}

TEST(NamedEpochsTest, a_reset_engine_does_not_share_the_start_epoch) {
  NamedEpochs epochs;
  epochs.start_with(kFirst);
  epochs.forget();
  std::string kept;
  ASSERT_TRUE(begin(epochs, &kept));
  EXPECT_NE(NamedEpochs::name_of(epochs.current()), kept);
  EXPECT_TRUE(epochs.has_ended(kFirst));
  EXPECT_FALSE(epochs.has_ended(kept));
}

}  // namespace
}  // namespace kv_offload
