// SPDX-License-Identifier: Apache-2.0
// The epoch that an engine uses, and the epoch that it publishes for others.
#include "tier/epoch_registry.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

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

// Begins an epoch with a store that does not answer. Returns the name that it may have accepted.
std::string fail_to_begin(EpochRegistry& epochs) {
  std::string name;
  EXPECT_FALSE(epochs.begin([](std::string*) { return Status::ok(); },
                            [&](const std::string& given) {
                              name = given;
                              return Status::error(StatusKind::kTimeout, "no answer");
                            }));
  EXPECT_TRUE(EpochRegistry::is_name(name));
  return name;
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

// ---- the resets of an engine on several hosts

TEST(EpochRegistryTest, a_reset_publishes_its_id_but_keeps_the_epoch_of_the_engine_apart) {
  EpochRegistry epochs;
  epochs.start_with(kFirst);
  std::string kept, earlier;
  for (const std::uint64_t id : {9, 10}) {
    epochs.forget(id);
    ASSERT_TRUE(begin(epochs, &kept));
    EXPECT_EQ(EpochRegistry::id_of(kept), id);
    EXPECT_NE(EpochRegistry::id_of(EpochRegistry::name_of(epochs.current())), id);
    EXPECT_NE(kept, earlier);
    earlier = kept;
  }
  epochs.forget();
  ASSERT_TRUE(begin(epochs, &kept));
  EXPECT_NE(EpochRegistry::id_of(kept), 10u) << "the reset of an engine on one host";
}

// After a failed attempt, the store may have the name nevertheless. A second name with the same id could
// replace that of a later reset.
TEST(EpochRegistryTest, the_id_of_a_reset_is_published_only_once) {
  EpochRegistry epochs;
  epochs.start_with(kFirst);
  epochs.forget(9);
  std::vector<std::uint64_t> ids;
  for (const StatusKind kind : {StatusKind::kTimeout, StatusKind::kIo, StatusKind::kOk}) {
    const Status begun =
        epochs.begin([](std::string*) { return Status::ok(); },
                     [&](const std::string& name) {
                       ids.push_back(EpochRegistry::id_of(name));
                       return kind == StatusKind::kOk ? Status::ok() : Status::error(kind, "no answer");
                     });
    EXPECT_EQ(begun.kind(), kind);
  }
  EXPECT_EQ(ids.at(0), 9u);
  EXPECT_NE(ids.at(1), 9u);
  EXPECT_NE(ids.at(2), 9u);
}

TEST(EpochRegistryTest, an_id_of_a_reset_that_another_reset_followed_is_not_published) {
  EpochRegistry epochs;
  epochs.start_with(kFirst);
  epochs.forget(9);
  epochs.forget();
  std::string kept;
  ASSERT_TRUE(begin(epochs, &kept));
  EXPECT_NE(EpochRegistry::id_of(kept), 9u);
}

TEST(EpochRegistryTest, a_missing_name_does_not_get_the_id_of_a_reset) {
  EpochRegistry epochs;
  epochs.start_with(kFirst);
  epochs.forget(9);
  std::string known, kept;
  EXPECT_NE(EpochRegistry::id_of(epochs.name_if_missing({}, &known)), 9u);
  ASSERT_TRUE(begin(epochs, &kept));
  EXPECT_EQ(EpochRegistry::id_of(kept), 9u);
  EXPECT_EQ(epochs.name_if_missing({}, &known), kept) << "the store lost it";
}

TEST(EpochRegistryTest, the_reason_for_a_missing_epoch_is_known_until_there_is_one) {
  const Status failed = Status::error(StatusKind::kTimeout, "no answer");
  EpochRegistry epochs;
  epochs.start_with(kFirst);
  EXPECT_EQ(epochs.start_problem(), "");
  EpochRegistry found;
  found.start_with("", {}, failed);
  EXPECT_EQ(found.start_problem(), "no answer");
  ASSERT_TRUE(found.begin(
      [](std::string* stored) {
        *stored = kFirst;
        return Status::ok();
      },
      [](const std::string&) { return Status::ok(); }));
  EXPECT_EQ(found.start_problem(), "");
  EpochRegistry reset;
  reset.start_with("", {}, failed);
  reset.forget();
  EXPECT_EQ(reset.start_problem(), "") << "the tier waits for another reason";
}

// ---- the start of an engine on several hosts

TEST(EpochRegistryTest, a_reset_also_ends_the_epoch_that_was_replaced_at_the_start) {
  EpochRegistry epochs;
  epochs.start_with(EpochRegistry::name_of_id(8), kFirst);
  EXPECT_FALSE(epochs.has_ended(kFirst));
  epochs.forget();
  EXPECT_TRUE(epochs.has_ended(kFirst)) << "the store may return to it";
}

constexpr EpochChoice kFirstRound{7, false, 0}, kSecondRound{8, true, 7};

TEST(EpochRegistryTest, the_id_of_an_epoch_is_in_its_name) {
  for (const std::uint64_t id : {std::uint64_t{1}, std::uint64_t{7}, ~std::uint64_t{0}}) {
    const std::string name = EpochRegistry::name_of_id(id);
    EXPECT_TRUE(EpochRegistry::is_name(name)) << name;
    EXPECT_EQ(EpochRegistry::id_of(name), id);
    EXPECT_NE(EpochRegistry::name_of_id(id), name)
        << "an id that is used again must not find earlier records";
  }
  EXPECT_EQ(EpochRegistry::id_of(kFirst), 0xAAAAAAAAAAAAAAAAu);
  EXPECT_EQ(EpochRegistry::id_of(std::string(EpochRegistry::kNameDigits, '0')), 1u) << "0 means: no epoch";
}

TEST(EpochRegistryTest, a_missing_epoch_gets_the_chosen_id_only_if_that_was_never_used) {
  EXPECT_EQ(EpochRegistry::id_of(EpochRegistry::name_if_none(kFirstRound)), 7u);
  EXPECT_NE(EpochRegistry::id_of(EpochRegistry::name_if_none(kSecondRound)), 8u);
  EXPECT_NE(EpochRegistry::name_if_none({}), EpochRegistry::name_if_none({})) << "an engine on one host";
}

TEST(EpochRegistryTest, only_the_epoch_that_the_host_reported_is_replaced) {
  const std::string made = EpochRegistry::replacement_of(EpochRegistry::name_of_id(7), kSecondRound);
  EXPECT_EQ(EpochRegistry::id_of(made), 8u);
  EXPECT_EQ(EpochRegistry::replacement_of(kFirst, kSecondRound), "");
  EXPECT_EQ(EpochRegistry::replacement_of("", kSecondRound), "");
  EXPECT_EQ(EpochRegistry::replacement_of(kFirst, kFirstRound), "");
  EXPECT_EQ(EpochRegistry::replacement_of(kFirst, {}), "");
}

TEST(EpochRegistryTest, a_store_that_did_not_respond_at_the_start_gets_the_chosen_id_but_not_after_a_reset) {
  EpochRegistry registry;
  registry.start_with("");
  std::string known = kFirst;
  EXPECT_EQ(EpochRegistry::id_of(registry.name_if_missing(kFirstRound, &known)), kFirstRound.id);
  EXPECT_EQ(known, "");
  registry.forget();
  EXPECT_NE(EpochRegistry::id_of(registry.name_if_missing(kFirstRound, &known)), kFirstRound.id);
}

TEST(EpochRegistryTest, a_name_that_was_returned_for_the_store_is_ended_by_the_next_reset) {
  EpochRegistry epochs;
  epochs.start_with(kFirst);
  std::string known;
  EXPECT_EQ(epochs.name_if_missing(kFirstRound, &known), kFirst);
  EXPECT_EQ(known, kFirst) << "of the same moment";
  for (int reset = 0; reset < 2; ++reset) {
    epochs.forget();
    EXPECT_TRUE(epochs.has_ended(kFirst));
    const std::string name = epochs.name_if_missing(kFirstRound, &known);
    EXPECT_NE(name, kFirst);
    EXPECT_EQ(known, "");
    EXPECT_FALSE(epochs.has_ended(name));
    epochs.forget();
    EXPECT_TRUE(epochs.has_ended(name)) << "the store may have got it meanwhile";
  }
}

TEST(EpochRegistryTest, an_unused_name_is_ended_by_the_next_reset) {
  EpochRegistry epochs;
  epochs.start_with(kFirst);
  const std::string name = epochs.unused_name();
  EXPECT_TRUE(EpochRegistry::is_name(name));
  EXPECT_FALSE(epochs.has_ended(name));
  epochs.forget();
  EXPECT_TRUE(epochs.has_ended(name)) << "the store may have got it";
}

TEST(EpochRegistryTest, only_an_engine_on_several_hosts_that_replaces_its_epoch_needs_one_at_its_start) {
  const Status failed = Status::error(StatusKind::kTimeout, "no answer");
  EXPECT_TRUE(EpochRegistry::startup_problem({}, failed, false));
  EXPECT_TRUE(EpochRegistry::startup_problem({}, Status::ok(), true));
  EXPECT_TRUE(EpochRegistry::startup_problem(kFirstRound, failed, false));
  EXPECT_THAT(EpochRegistry::startup_problem(kSecondRound, failed, false).message(),
              ::testing::StartsWith("no answer. The hosts have different epochs"));
  const Status full = Status::error(StatusKind::kNoSpace, "it is full");
  EXPECT_EQ(EpochRegistry::startup_problem(kFirstRound, full, false).message(), "it is full");
  EXPECT_TRUE(EpochRegistry::startup_problem({}, full, false));
  EXPECT_TRUE(EpochRegistry::startup_problem(kSecondRound, Status::ok(), false));
  EXPECT_TRUE(EpochRegistry::startup_problem(kFirstRound, Status::ok(), true));
  EXPECT_FALSE(EpochRegistry::startup_problem(kSecondRound, Status::ok(), true));
}

// The store may have accepted the name, and an engine may have joined it.
TEST(EpochRegistryTest, a_name_whose_attempt_failed_is_ended_by_the_next_reset) {
  EpochRegistry epochs;
  epochs.start_with(kFirst);
  epochs.forget(9);
  const std::string unanswered = fail_to_begin(epochs);
  EXPECT_FALSE(epochs.has_ended(unanswered));
  epochs.forget(10);
  std::string kept;
  ASSERT_TRUE(begin(epochs, &kept));
  EXPECT_TRUE(epochs.has_ended(unanswered)) << "a replica that takes over may have it";
  EXPECT_FALSE(epochs.has_ended(kept));
}

TEST(EpochRegistryTest, a_reset_during_an_attempt_ends_its_name_also_if_the_attempt_fails) {
  for (const bool succeeds : {true, false}) {
    EpochRegistry epochs;
    epochs.start_with(kFirst);
    epochs.forget(9);
    std::string name;
    EXPECT_FALSE(epochs.begin([](std::string*) { return Status::ok(); },
                              [&](const std::string& given) {
                                name = given;
                                epochs.forget(10);
                                return succeeds ? Status::ok()
                                                : Status::error(StatusKind::kTimeout, "no answer");
                              }));
    EXPECT_TRUE(epochs.has_ended(name));
    EXPECT_EQ(epochs.current(), nullptr);
  }
}

TEST(EpochRegistryTest, names_of_failed_attempts_do_not_displace_names_that_were_in_use) {
  EpochRegistry epochs;
  epochs.start_with(kFirst);
  std::string last;
  for (int reset = 0; reset < 2; ++reset) {
    epochs.forget();
    for (int attempt = 0; attempt < 100; ++attempt) last = fail_to_begin(epochs);
  }
  epochs.forget();
  EXPECT_TRUE(epochs.has_ended(kFirst));
  EXPECT_TRUE(epochs.has_ended(last));
}

}  // namespace
}  // namespace kv_offload
