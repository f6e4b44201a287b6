// SPDX-License-Identifier: Apache-2.0
#include "record/compression_choice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>
#include <new>

namespace kv_offload {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr std::uint64_t kMiB = 1 << 20;
constexpr std::uint32_t kFloats = 0, kStates = 1;  // groups

// A tier of a given speed whose records pass through a codec of a given speed. No real time passes.
struct Simulated {
  explicit Simulated(Compress compress = Compress::kAuto)
      : choice({.compress = compress, .elements = {Element::kBf16, Element::kBytes}, .idle_cores = [this] {
                  return idle_cores;
                }}) {}

  void write(std::uint32_t group = kFloats) {
    const bool encode = choice.next_is_encoded(group);
    const double stored = encode ? 1 / ratio : 1;
    const double codec = encode ? kMiB / codec_speed.encode : 0;
    if (encode) choice.encoded(group, kMiB, static_cast<std::uint64_t>(kMiB * stored), codec);
    choice.moved(OpKind::kWrite, kMiB, kMiB * stored / write_speed + codec);
    was_encoded = encode;
  }
  // Reads what the last write stored.
  void read() {
    const double stored = was_encoded ? 1 / ratio : 1;
    const double codec = was_encoded ? kMiB / codec_speed.decode : 0;
    if (was_encoded) choice.decoded(kMiB, static_cast<std::uint64_t>(kMiB * stored), codec);
    choice.moved(OpKind::kRead, kMiB, kMiB * stored / read_speed + codec);
  }
  void use(unsigned ops) {
    for (unsigned i = 0; i < ops; ++i) {
      write();
      read();
    }
  }
  bool on() const { return choice.stats().on; }

  double read_speed = 3e9, write_speed = 2e9, ratio = 1.45, idle_cores = 8;
  CodecSpeed codec_speed{1.2e9, 2.5e9};
  bool was_encoded = false;
  CompressionChoice choice;
};

TEST(CompressionChoice, none_never_encodes_and_zstd_always_does) {
  Simulated none(Compress::kNone), zstd(Compress::kZstd);
  none.read_speed = none.write_speed = 1e6;
  none.use(200);
  EXPECT_FALSE(none.on());
  EXPECT_FALSE(none.was_encoded);
  zstd.use(200);
  EXPECT_TRUE(zstd.on());
  EXPECT_TRUE(zstd.was_encoded);
  zstd.write(kStates);
  EXPECT_TRUE(zstd.was_encoded) << "zstd encodes every group";
}

TEST(CompressionChoice, auto_stays_off_on_a_fast_disk) {
  Simulated tier;
  tier.use(1000);
  EXPECT_FALSE(tier.on());
  EXPECT_THAT(tier.choice.reason(), StartsWith("off: a read of 1 MiB takes 0.35 ms raw and "));
}

TEST(CompressionChoice, auto_turns_on_for_a_slow_tier) {
  Simulated tier;
  tier.read_speed = tier.write_speed = 500e6;
  tier.use(CompressionChoice::kMinOps - 1);
  EXPECT_FALSE(tier.on()) << "too few ops were measured";
  EXPECT_THAT(tier.choice.reason(), HasSubstr("too little"));
  tier.use(3);
  EXPECT_TRUE(tier.on());
  tier.use(1000);
  EXPECT_TRUE(tier.on()) << "encoded reads are faster, and the tier itself is not";
  EXPECT_THAT(tier.choice.reason(), StartsWith("on: a read of 1 MiB takes 2.10 ms raw and 1.8"));
}

TEST(CompressionChoice, auto_encodes_only_floating_point_groups) {
  Simulated tier;
  tier.read_speed = tier.write_speed = 100e6;
  tier.use(100);
  tier.write(kStates);
  EXPECT_FALSE(tier.was_encoded);
  tier.write(7);  // a group without a declared element type
  EXPECT_FALSE(tier.was_encoded);
  tier.write(kFloats);
  EXPECT_TRUE(tier.was_encoded);
}

TEST(CompressionChoice, writes_decide_until_there_are_reads) {
  Simulated tier;
  tier.write_speed = 200e6;
  for (int i = 0; i < 20; ++i) tier.write();
  EXPECT_TRUE(tier.on());
  EXPECT_THAT(tier.choice.reason(), StartsWith("on: a write of 1 MiB"));
  tier.read_speed = 5e9;
  tier.use(200);
  EXPECT_FALSE(tier.on()) << "requests wait for reads";
}

TEST(CompressionChoice, writes_may_become_slower_within_a_limit) {
  Simulated tier;
  tier.read_speed = 500e6;
  tier.write_speed = 5e9;  // 0.2 ns a byte; the codec alone takes 0.8 ns
  tier.use(300);
  EXPECT_FALSE(tier.on());
  EXPECT_THAT(tier.choice.reason(), HasSubstr("but a write takes 1."));
}

TEST(CompressionChoice, follows_a_tier_whose_speed_changes) {
  Simulated tier;
  tier.use(300);
  ASSERT_FALSE(tier.on());
  tier.read_speed = tier.write_speed = 300e6;
  tier.use(300);
  EXPECT_TRUE(tier.on());
  tier.read_speed = 6e9;
  tier.write_speed = 2e9;
  tier.use(300);
  EXPECT_FALSE(tier.on());
}

// Between its two thresholds the choice stays unchanged, and noise around one of them rarely switches it.
TEST(CompressionChoice, does_not_oscillate) {
  for (double speed = 600e6; speed < 1600e6; speed += 20e6) {
    Simulated tier;
    unsigned switches = 0;
    bool before = false;
    for (int i = 0; i < 2000; ++i) {
      tier.read_speed = tier.write_speed = speed * (i % 2 == 0 ? 0.9 : 1.1);
      tier.use(1);
      switches += tier.on() != before ? 1 : 0;
      before = tier.on();
    }
    EXPECT_LE(switches, 1U) << speed;
  }
}

TEST(CompressionChoice, keeps_its_state_between_the_thresholds) {
  constexpr double kBetween = 634e6;  // 1.06 times as fast when encoded
  Simulated was_on, was_off;
  was_on.read_speed = was_on.write_speed = 300e6;
  was_on.use(100);
  ASSERT_TRUE(was_on.on());
  for (Simulated* tier : {&was_on, &was_off}) {
    tier->read_speed = tier->write_speed = kBetween;
    tier->use(500);
  }
  EXPECT_TRUE(was_on.on());
  EXPECT_FALSE(was_off.on());
}

TEST(CompressionChoice, a_decision_is_stable) {
  Simulated tier;
  tier.read_speed = tier.write_speed = 300e6;
  tier.use(20);
  ASSERT_TRUE(tier.on());
  tier.read_speed = tier.write_speed = 1e12;
  for (unsigned i = 0; i < CompressionChoice::kOpsPerDecision / 4; ++i) tier.use(1);
  EXPECT_TRUE(tier.on());
  tier.use(CompressionChoice::kOpsPerDecision);
  EXPECT_FALSE(tier.on());
}

TEST(CompressionChoice, requires_a_larger_gain_without_idle_cores) {
  Simulated idle, busy;
  busy.idle_cores = 0.5;
  for (Simulated* tier : {&idle, &busy}) {
    tier->read_speed = tier->write_speed = 450e6;
    tier->use(300);
  }
  EXPECT_TRUE(idle.on());
  EXPECT_FALSE(busy.on());
  EXPECT_THAT(busy.choice.reason(),
              HasSubstr("less than one core is idle, so it must be 1.25 times as fast"));
  busy.read_speed = busy.write_speed = 100e6;
  busy.use(300);
  EXPECT_TRUE(busy.on());
}

TEST(CompressionChoice, a_group_that_gains_nothing_is_retried_periodically) {
  Simulated tier(Compress::kZstd);
  tier.ratio = 1;
  unsigned encoded = 0;
  constexpr unsigned kWrites = 10 * CompressionChoice::kTryAgain;
  for (unsigned i = 0; i < kWrites; ++i) {
    tier.write(kStates);
    encoded += tier.was_encoded ? 1 : 0;
  }
  constexpr unsigned kFirst = CompressionChoice::kMinRecords;
  EXPECT_EQ(encoded, kFirst + (kWrites - kFirst) / CompressionChoice::kTryAgain);
  tier.write(kFloats);
  EXPECT_TRUE(tier.was_encoded) << "groups are decided separately";
  tier.ratio = 3;
  for (unsigned i = 0; i < kWrites; ++i) tier.write(kStates);
  EXPECT_TRUE(tier.was_encoded);
}

TEST(CompressionChoice, a_first_record_that_gains_nothing_does_not_decide_its_group) {
  Simulated tier(Compress::kZstd);
  tier.ratio = 1;
  tier.write();
  tier.ratio = 1.45;
  for (unsigned i = 0; i < 10 * CompressionChoice::kMinRecords; ++i) {
    tier.write();
    EXPECT_TRUE(tier.was_encoded) << i;
  }
}

// The codec runs on a core that was idle, so it makes that core busy itself.
TEST(CompressionChoice, the_core_used_by_the_codec_does_not_disable_compression) {
  Simulated tier;
  tier.read_speed = tier.write_speed = 500e6;  // 1.12 times as fast when encoded
  unsigned switches = 0;
  bool before = false;
  for (int i = 0; i < 2000; ++i) {
    tier.idle_cores = tier.on() ? 0.6 : 1.4;
    tier.use(1);
    switches += tier.on() != before ? 1 : 0;
    before = tier.on();
  }
  EXPECT_EQ(switches, 1U);
  EXPECT_TRUE(tier.on());
}

TEST(CompressionChoice, newly_idle_cores_lower_the_required_gain) {
  Simulated tier;
  tier.idle_cores = 0.5;
  tier.read_speed = tier.write_speed = 100e6;
  tier.use(100);
  ASSERT_TRUE(tier.on());
  EXPECT_THAT(tier.choice.reason(), HasSubstr("less than one core was idle, so it must be 1.15 times"));
  tier.idle_cores = 4;
  tier.use(100);
  tier.idle_cores = 0.5;
  tier.read_speed = tier.write_speed = 550e6;  // 1.10 times as fast when encoded
  tier.use(500);
  EXPECT_TRUE(tier.on());
}

// Counting idle cores may block on a file. The scheduler calls stats() and must not wait for it.
TEST(CompressionChoice, stats_are_available_while_a_thread_counts_idle_cores) {
  CompressionChoice* asked = nullptr;
  unsigned counted = 0;
  std::future<void> figures;
  CompressionChoice choice({.compress = Compress::kAuto, .elements = {Element::kBf16}, .idle_cores = [&] {
                              if (++counted > 1) return 8.0;
                              figures = std::async(std::launch::async, [&] {
                                (void)asked->stats();
                                (void)asked->reason();
                                (void)asked->next_is_encoded(kFloats);
                                // No second thread starts to count.
                                asked->moved(OpKind::kRead, kMiB, 1);
                              });
                              // With a lock held here, this would wait forever.
                              EXPECT_EQ(figures.wait_for(std::chrono::seconds(240)),
                                        std::future_status::ready);
                              return 8.0;
                            }});
  asked = &choice;
  for (unsigned i = 0; i < CompressionChoice::kMinOps; ++i) choice.moved(OpKind::kRead, kMiB, 1);
  EXPECT_EQ(counted, 1U);
  EXPECT_TRUE(choice.stats().on);
}

TEST(CompressionChoice, idle_cores_that_cannot_be_counted_are_unknown) {
  CompressionChoice choice({.compress = Compress::kAuto,
                            .elements = {Element::kBf16},
                            .idle_cores = []() -> double { throw std::bad_alloc(); }});
  for (unsigned i = 0; i < CompressionChoice::kMinOps; ++i) choice.moved(OpKind::kRead, kMiB, 1);
  EXPECT_TRUE(choice.stats().on);
}

TEST(CompressionChoice, counts_cost_and_savings) {
  CompressionChoice choice({.compress = Compress::kZstd, .elements = {Element::kBf16}});
  choice.encoded(0, 1000, 600, 0.5);
  choice.encoded(0, 1000, 1000, 0.25);  // gained nothing
  choice.decoded(1000, 600, 0.125);
  const CompressionStats stats = choice.stats();
  EXPECT_EQ(stats.encode_seconds, 0.75);
  EXPECT_EQ(stats.decode_seconds, 0.125);
  EXPECT_EQ(stats.encoded_raw_bytes, 1000U);
  EXPECT_EQ(stats.encoded_stored_bytes, 600U);
}

TEST(CompressionChoice, reports_that_there_is_nothing_to_encode) {
  for (const Element element : {Element::kBytes, Element::kE4m3, Element::kE5m2}) {
    const CompressionChoice choice({.compress = Compress::kAuto, .elements = {element}});
    EXPECT_EQ(choice.reason(), "off: the KV cache is neither bfloat16 nor float16");
  }
}

TEST(CompressionChoice, fp8_is_bytes_without_loss) {
  CompressionOptions options{.compress = Compress::kZstd, .bounds = {0.05, 0.05}};
  options.elements = {Element::kE4m3, Element::kBf16};
  const CompressionChoice without(options);
  EXPECT_EQ(without.lossless_element(0), Element::kBytes);
  EXPECT_EQ(without.lossless_element(1), Element::kBf16);
  EXPECT_EQ(without.lossy_element(0), Element::kBytes);
  options.compress = Compress::kLossy;
  options.exact = {false, true};
  const CompressionChoice with(options);
  EXPECT_EQ(with.lossless_element(0), Element::kBytes);
  EXPECT_EQ(with.lossy_element(0), Element::kE4m3);
  EXPECT_EQ(with.lossy_element(1), Element::kBytes);
  EXPECT_EQ(with.lossy_element(2), Element::kBytes);
}

}  // namespace
}  // namespace kv_offload
