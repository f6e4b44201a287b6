#include "storage/compression_choice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>
#include <map>
#include <new>

#include "storage/tier_driver.h"
#include "with_threads.h"

namespace kv_offload {
namespace {

using ::testing::HasSubstr;
using testing::key_of;
using ::testing::StartsWith;

constexpr std::uint64_t kMiB = 1 << 20;
constexpr std::uint32_t kFloats = 0, kStates = 1;  // groups

TierOp op_of(OpId id, std::uint32_t group = kFloats, std::uint32_t key = 1) {
  TierOp op;
  op.id = id;
  op.group = group;
  op.key = key_of(key);
  return op;
}

// A tier of a given speed whose records go through a codec of a given speed, without time passing.
struct Simulated {
  explicit Simulated(Compress compress = Compress::kAuto)
      : choice({.compress = compress,
                .elements = {Element::kBf16, Element::kBytes, Element::kBf16},
                .idle_cores = [this] { return idle_cores; }}) {}

  struct Record {
    bool is_encoded = false;
    double stored() const { return is_encoded ? 1 / ratio : 1; }
    double ratio = 1;
  };

  void write(std::uint32_t group = kFloats) { write(++written, group); }
  void write(std::uint32_t number, std::uint32_t group) {
    Record& record = records[number];
    record = {choice.is_to_encode(key_of(number), group), ratio};
    const double codec = record.is_encoded ? bytes / codec_speed.encode : 0;
    const TierOp op = op_of(number, group, number);
    const auto raw = static_cast<std::uint64_t>(bytes);
    if (record.is_encoded)
      choice.encoded(op, raw, static_cast<std::uint64_t>(bytes * record.stored()), codec);
    choice.moved(op.id, OpKind::kWrite, raw, wait + bytes * record.stored() / write_speed + codec);
    was_encoded = record.is_encoded;
    encoded += record.is_encoded ? 1 : 0;
  }
  void read(std::uint32_t number, std::uint32_t group = kFloats, double stands_still = 0) {
    const Record& record = records[number];
    const double codec = record.is_encoded ? bytes / codec_speed.decode : 0;
    const TierOp op = op_of(number, group, number);
    const auto raw = static_cast<std::uint64_t>(bytes);
    if (record.is_encoded) {
      choice.decoded(op, raw, static_cast<std::uint64_t>(bytes * record.stored()), codec);
    } else {
      choice.found_raw(op);
    }
    choice.moved(op.id, OpKind::kRead, raw,
                 wait + bytes * record.stored() / read_speed + codec + stands_still);
  }
  void use(unsigned ops) {
    for (unsigned i = 0; i < ops; ++i) {
      write();
      read(written);
    }
  }
  bool on() const { return choice.stats().on; }

  double read_speed = 3e9, write_speed = 2e9, ratio = 1.45, idle_cores = 8, bytes = kMiB;
  CodecSpeed codec_speed{1.2e9, 2.5e9};
  double wait = 0;  // of each op, however much it moves
  bool was_encoded = false;
  std::uint32_t written = 0, encoded = 0;
  std::map<std::uint32_t, Record> records;
  CompressionChoice choice;
};

TEST(CompressionChoice, none_and_zstd_are_what_they_say) {
  Simulated none(Compress::kNone), zstd(Compress::kZstd);
  none.read_speed = none.write_speed = 1e6;
  none.use(200);
  EXPECT_FALSE(none.on());
  EXPECT_FALSE(none.was_encoded);
  zstd.use(200);
  EXPECT_TRUE(zstd.on());
  EXPECT_TRUE(zstd.was_encoded);
  zstd.write(kStates);
  EXPECT_TRUE(zstd.was_encoded) << "whatever gains";
}

TEST(CompressionChoice, auto_stays_off_on_a_fast_disk) {
  Simulated tier;
  tier.use(1000);
  EXPECT_FALSE(tier.on());
  EXPECT_THAT(tier.choice.reason(), StartsWith("off: a read of 1 MiB takes 0.35 ms raw and "));
}

TEST(CompressionChoice, auto_goes_on_where_a_tier_is_slow) {
  Simulated tier;
  tier.read_speed = tier.write_speed = 500e6;
  tier.use(CompressionChoice::kOpsToKnow - 1);
  EXPECT_FALSE(tier.on()) << "nothing is known yet";
  EXPECT_THAT(tier.choice.reason(), HasSubstr("too little"));
  tier.use(3);
  EXPECT_TRUE(tier.on());
  tier.use(1000);
  EXPECT_TRUE(tier.on()) << "encoded, reads are faster: the tier is not";
  EXPECT_THAT(tier.choice.reason(), StartsWith("on: a read of 1 MiB takes 2.10 ms raw and 1.8"));
}

TEST(CompressionChoice, only_numbers_are_encoded_by_auto) {
  Simulated tier;
  tier.read_speed = tier.write_speed = 100e6;
  tier.use(100);
  tier.write(kStates);
  EXPECT_FALSE(tier.was_encoded);
  tier.write(7);  // a group that nothing was said of
  EXPECT_FALSE(tier.was_encoded);
  tier.write(kFloats);
  EXPECT_TRUE(tier.was_encoded);
}

TEST(CompressionChoice, writes_decide_until_there_were_reads) {
  Simulated tier;
  tier.write_speed = 200e6;
  for (int i = 0; i < 20; ++i) tier.write();
  EXPECT_TRUE(tier.on());
  EXPECT_THAT(tier.choice.reason(), StartsWith("on: a write of 1 MiB"));
  tier.read_speed = 5e9;
  tier.use(200);
  EXPECT_FALSE(tier.on()) << "reads are what requests wait for";
}

TEST(CompressionChoice, writes_may_become_slower_but_not_by_much) {
  Simulated tier;
  tier.read_speed = 500e6;
  tier.write_speed = 5e9;  // 0.2 ns a byte; the codec alone takes 0.8
  tier.use(300);
  EXPECT_FALSE(tier.on());
  EXPECT_THAT(tier.choice.reason(), HasSubstr("but a write 1."));
}

TEST(CompressionChoice, follows_a_tier_that_changes) {
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

// Between its two thresholds it stays as it is, and noise around one of them switches it rarely.
TEST(CompressionChoice, does_not_switch_to_and_fro) {
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

TEST(CompressionChoice, between_its_thresholds_it_stays_as_it_is) {
  constexpr double kBetween = 634e6;  // encoded, 1.06 times as fast
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

TEST(CompressionChoice, a_decision_settles) {
  Simulated tier;
  tier.read_speed = tier.write_speed = 300e6;
  tier.use(20);
  ASSERT_TRUE(tier.on());
  tier.read_speed = tier.write_speed = 1e12;
  for (unsigned i = 0; i < CompressionChoice::kOpsToSettle / 4; ++i) tier.use(1);
  EXPECT_TRUE(tier.on());
  tier.use(CompressionChoice::kOpsToSettle);
  EXPECT_FALSE(tier.on());
}

// Most of each read is a wait that fewer bytes do not shorten: for a core, or for an answer. When its codec
// has become slow, encoded reads are 1.05 times as fast by reckoning; side by side, 0.84.
struct Waiting : Simulated {
  Waiting() {
    read_speed = write_speed = 1e9;
    wait = 4 * kMiB / 1e9;
    use(100);
    EXPECT_TRUE(on());
  }
  void become_slow() { codec_speed.decode = 0.77e9; }
};

TEST(CompressionChoice, reads_side_by_side_show_a_loss) {
  Waiting tier;
  tier.become_slow();
  tier.use(100);
  EXPECT_TRUE(tier.on()) << "the control: by reckoning";
  tier.use(1000);
  EXPECT_FALSE(tier.on());
  EXPECT_THAT(tier.choice.reason(), StartsWith("off: a read of 1 MiB takes 5."));
  EXPECT_THAT(tier.choice.reason(), HasSubstr("side by side, encoded reads are 0.84 times as fast"));
  unsigned was_on = 0;
  for (int i = 0; i < 5000; ++i) {
    tier.use(1);
    was_on += tier.on() ? 1 : 0;
  }
  EXPECT_EQ(was_on, 0U) << "what was seen is not forgotten";
  tier.wait = 0;
  tier.read_speed = 300e6;
  tier.codec_speed.decode = 2.5e9;
  tier.use(3000);
  EXPECT_TRUE(tier.on()) << "one record in some is still encoded, so that a change is seen";
}

// All would wait less if all were encoded: that is not seen side by side, and is not asked for.
TEST(CompressionChoice, what_is_equal_side_by_side_is_no_loss) {
  Waiting tier;
  tier.use(5000);
  EXPECT_TRUE(tier.on());
  EXPECT_THAT(tier.choice.reason(), HasSubstr("encoded reads are 0.98 times as fast"));
}

TEST(CompressionChoice, one_record_in_some_is_stored_the_other_way) {
  Simulated slow, fast, fastest;
  slow.read_speed = slow.write_speed = 300e6;
  fast.read_speed = fast.write_speed = 1e9;  // encoded, 0.95 times as fast
  for (Simulated* tier : {&slow, &fast, &fastest}) {
    tier->use(100);
    tier->encoded = 0;
    tier->use(3200);
  }
  ASSERT_TRUE(slow.on());
  ASSERT_FALSE(fast.on());
  const double one_in = CompressionChoice::kComparedOneIn;
  EXPECT_NEAR(slow.encoded, 3200 * (1 - 1 / one_in), 40);
  EXPECT_NEAR(fast.encoded, 3200 / one_in, 40);
  EXPECT_EQ(fastest.encoded, 0U) << "that it would lose is sure without";
}

// Small records of a group wait as long as large ones of another. The few that are compared are of either.
TEST(CompressionChoice, groups_of_other_sizes_are_not_compared_with_each_other) {
  constexpr std::uint32_t kOthers = 2;
  for (const bool was_on : {true, false}) {
    Simulated tier;
    tier.read_speed = tier.write_speed = 300e6;
    tier.use(was_on ? 100 : 0);
    ASSERT_EQ(tier.on(), was_on);
    tier.wait = 1e-3;
    tier.read_speed = tier.write_speed = was_on ? 10e9 : 200e6;
    for (int i = 0; i < 4000; ++i) {
      const bool large = i % 2 == 0;
      tier.bytes = large ? 4 * kMiB : kMiB / 16;
      const std::uint32_t group = large ? kFloats : kOthers;
      tier.write(group);
      tier.read(tier.written, group);
    }
    EXPECT_EQ(tier.on(), !was_on) << tier.choice.reason();
  }
}

TEST(CompressionChoice, a_codec_that_was_slow_for_a_while_is_tried_again) {
  Simulated tier;
  tier.read_speed = tier.write_speed = 300e6;
  tier.use(100);
  ASSERT_TRUE(tier.on());
  tier.codec_speed = {0.15e9, 0.15e9};
  tier.use(1000);
  ASSERT_FALSE(tier.on());
  tier.codec_speed = {1.2e9, 2.5e9};
  tier.use(20000);
  EXPECT_TRUE(tier.on()) << tier.choice.reason();
}

TEST(CompressionChoice, a_few_records_that_are_read_again_and_again_do_not_switch_it) {
  Waiting tier;
  tier.become_slow();
  tier.use(2000);
  ASSERT_FALSE(tier.on());
  std::uint32_t first = 1;
  const auto has_compared = [&] {
    for (std::uint32_t i = 0; i < 20; ++i) {
      if (CompressionChoice::is_compared(key_of(first + i))) return true;
    }
    return false;
  };
  while (has_compared()) ++first;
  for (int i = 0; i < 20000; ++i) {
    tier.read(first + static_cast<std::uint32_t>(i % 20));
    ASSERT_FALSE(tier.on()) << i;
  }
}

TEST(CompressionChoice, a_read_that_stands_still_changes_nothing) {
  Simulated tier;
  tier.read_speed = tier.write_speed = 300e6;
  tier.use(1000);
  ASSERT_TRUE(tier.on());
  for (int i = 0; i < 20000; ++i) {
    tier.write();
    tier.read(tier.written, kFloats, i % 500 == 0 ? 1 : 0);
    ASSERT_TRUE(tier.on()) << i << ": " << tier.choice.reason();
  }
}

// What slows reads down for a while meets the many of one way and the few of the other at different times.
TEST(CompressionChoice, a_tier_whose_speed_wanders_does_not_switch) {
  Simulated tier;
  tier.read_speed = tier.write_speed = 300e6;
  tier.use(100);
  ASSERT_TRUE(tier.on());
  for (int i = 0; i < 20000; ++i) {
    tier.read_speed = tier.write_speed = i / 150 % 2 == 0 ? 300e6 : 100e6;
    tier.use(1);
    ASSERT_TRUE(tier.on()) << i;
  }
}

// Records of before a switch are of another age, and not spread over the keys: they say nothing.
TEST(CompressionChoice, only_reads_of_what_would_be_written_now_are_compared) {
  const auto compared = [](std::uint32_t group, bool other_way_only) {
    Simulated tier;  // off: of all others, one in some is encoded
    constexpr std::uint32_t kMany = 4000;
    for (std::uint32_t i = 0; i < kMany; ++i) {
      const bool is_compared = CompressionChoice::is_compared(key_of(i));
      tier.records[i] = {other_way_only ? is_compared : !is_compared, 1.45};
      tier.read(i, group);
    }
    return tier.choice.reason().find("side by side") != std::string::npos;
  };
  EXPECT_TRUE(compared(kFloats, true)) << "the control";
  EXPECT_FALSE(compared(kFloats, false));
  EXPECT_FALSE(compared(kStates, true));
}

TEST(CodecComparison, compares_what_came_in_the_same_time) {
  CodecComparison comparison;
  double slow = 1;
  for (unsigned block = 0; block < 40; ++block) {
    EXPECT_EQ(comparison.gain() > 0, block >= CodecComparison::kBlocksToKnow) << block;
    slow *= 1.3;
    for (unsigned i = 0; i < 31; ++i) comparison.add(true, slow);
    comparison.add(false, slow * 1.25);
  }
  EXPECT_NEAR(comparison.gain(), 1.25, 1e-9);
}

TEST(CodecComparison, a_block_has_some_reads_of_one_or_the_other) {
  CodecComparison comparison;
  constexpr unsigned kOps = CodecComparison::kBlocksToKnow * CodecComparison::kOpsInBlock;
  for (unsigned i = 0; i < kOps; ++i) {
    EXPECT_EQ(comparison.gain(), 0) << i;
    comparison.add(i % 2 == 0, 1);
  }
  EXPECT_EQ(comparison.gain(), 1);
}

TEST(CodecComparison, what_one_way_took_long_ago_is_not_compared_with_the_other) {
  CodecComparison comparison;
  for (unsigned block = 0; block < CodecComparison::kBlocksToKnow; ++block) {
    for (unsigned i = 0; i < CodecComparison::kMostOpsInBlock; ++i) comparison.add(true, 5);
    for (unsigned i = 0; i < CodecComparison::kOpsInBlock; ++i) comparison.add(true, 1);
    comparison.add(false, 1);
  }
  EXPECT_EQ(comparison.gain(), 1);
}

TEST(CodecComparison, one_block_says_no_more_than_a_factor_of_two) {
  CodecComparison comparison;
  for (unsigned block = 0; block < 2 * CodecComparison::kBlocksToKnow; ++block) {
    for (unsigned i = 0; i < CodecComparison::kOpsInBlock; ++i) comparison.add(false, 1e6);
    comparison.add(true, 1);
  }
  EXPECT_NEAR(comparison.gain(), 2, 1e-9);
}

// Of an op that failed, or that is told of and never ends, nothing counts with another.
TEST(CompressionChoice, an_op_that_fails_says_nothing) {
  const auto said = [](auto&& before) {
    CompressionChoice choice({.compress = Compress::kAuto, .elements = {Element::kBf16}});
    for (OpId id = 0; id < CompressionChoice::kOpsToKnow; ++id) {
      before(choice, id);
      choice.moved(id, OpKind::kRead, kMiB, 1);
    }
    return choice.reason();
  };
  const auto half = [](CompressionChoice& choice, OpId id) {
    choice.decoded(op_of(id), kMiB, kMiB / 2, 1e-4);
  };
  EXPECT_THAT(said(half), StartsWith("on: a read of 1 MiB takes 1999.80 ms raw")) << "the control";
  const char* const nothing = "on: a read of 1 MiB takes 1000.00 ms raw";
  EXPECT_THAT(said([&](CompressionChoice& choice, OpId id) {
                half(choice, id);
                choice.failed(id);
              }),
              StartsWith(nothing));
  EXPECT_THAT(said([&](CompressionChoice& choice, OpId id) {
                half(choice, id);
                for (OpId other = 1000; other < 2000; ++other) half(choice, other);
              }),
              StartsWith(nothing))
      << "as many as this are not remembered";
}

TEST(CompressionChoice, without_idle_cores_it_has_to_gain_more) {
  Simulated idle, busy;
  busy.idle_cores = 0.5;
  for (Simulated* tier : {&idle, &busy}) {
    tier->read_speed = tier->write_speed = 450e6;
    tier->use(300);
  }
  EXPECT_TRUE(idle.on());
  EXPECT_FALSE(busy.on());
  EXPECT_THAT(busy.choice.reason(),
              HasSubstr("less than a core is idle, so it has to be 1.25 times as fast"));
  busy.read_speed = busy.write_speed = 100e6;
  busy.use(300);
  EXPECT_TRUE(busy.on());
}

TEST(CompressionChoice, a_group_that_gains_nothing_is_tried_now_and_then) {
  Simulated tier(Compress::kZstd);
  tier.ratio = 1;
  unsigned encoded = 0;
  constexpr unsigned kWrites = 10 * CompressionChoice::kTryAgain;
  for (unsigned i = 0; i < kWrites; ++i) {
    tier.write(kStates);
    encoded += tier.was_encoded ? 1 : 0;
  }
  constexpr unsigned kFirst = CompressionChoice::kRecordsToKnow;
  EXPECT_EQ(encoded, kFirst + (kWrites - kFirst) / CompressionChoice::kTryAgain);
  tier.write(kFloats);
  EXPECT_TRUE(tier.was_encoded) << "another group is another matter";
  tier.ratio = 3;
  for (unsigned i = 0; i < kWrites; ++i) tier.write(kStates);
  EXPECT_TRUE(tier.was_encoded);
}

TEST(CompressionChoice, a_first_record_that_gains_nothing_says_nothing_of_its_group) {
  Simulated tier(Compress::kZstd);
  tier.ratio = 1;
  tier.write();
  tier.ratio = 1.45;
  for (unsigned i = 0; i < 10 * CompressionChoice::kRecordsToKnow; ++i) {
    tier.write();
    EXPECT_TRUE(tier.was_encoded) << i;
  }
}

// It runs on a core that was idle: that this one is busy then is its own doing.
TEST(CompressionChoice, the_core_that_the_codec_takes_does_not_switch_it_off) {
  Simulated tier;
  tier.read_speed = tier.write_speed = 500e6;  // encoded, 1.12 times as fast
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

TEST(CompressionChoice, cores_that_become_idle_while_it_is_on_lower_what_it_has_to_gain) {
  Simulated tier;
  tier.idle_cores = 0.5;
  tier.read_speed = tier.write_speed = 100e6;
  tier.use(100);
  ASSERT_TRUE(tier.on());
  EXPECT_THAT(tier.choice.reason(), HasSubstr("less than a core was idle, so it has to be 1.15 times"));
  tier.idle_cores = 4;
  tier.use(100);
  tier.idle_cores = 0.5;
  tier.read_speed = tier.write_speed = 550e6;  // encoded, 1.10 times as fast
  tier.use(500);
  EXPECT_TRUE(tier.on());
}

// To count idle cores may mean to wait for a file. The scheduler asks for stats() and waits for none.
TEST(CompressionChoice, figures_are_there_while_a_thread_waits_for_the_idle_cores) {
  CompressionChoice* asked = nullptr;
  unsigned counted = 0;
  std::future<void> figures;
  CompressionChoice choice({.compress = Compress::kAuto, .elements = {Element::kBf16}, .idle_cores = [&] {
                              if (++counted > 1) return 8.0;
                              figures = std::async(std::launch::async, [&] {
                                (void)asked->stats();
                                (void)asked->reason();
                                (void)asked->is_to_encode(key_of(1), kFloats);
                                // Nor is anybody else sent to count.
                                asked->moved(1, OpKind::kRead, kMiB, 1);
                              });
                              // For a lock that is held here it would wait forever.
                              EXPECT_EQ(figures.wait_for(std::chrono::seconds(240)),
                                        std::future_status::ready);
                              return 8.0;
                            }});
  asked = &choice;
  for (unsigned i = 0; i < CompressionChoice::kOpsToKnow; ++i) choice.moved(1, OpKind::kRead, kMiB, 1);
  EXPECT_EQ(counted, 1U);
  EXPECT_TRUE(choice.stats().on);
}

TEST(CompressionChoice, idle_cores_that_cannot_be_counted_are_not_known) {
  CompressionChoice choice({.compress = Compress::kAuto,
                            .elements = {Element::kBf16},
                            .idle_cores = []() -> double { throw std::bad_alloc(); }});
  for (unsigned i = 0; i < CompressionChoice::kOpsToKnow; ++i) choice.moved(1, OpKind::kRead, kMiB, 1);
  EXPECT_TRUE(choice.stats().on);
}

TEST(CompressionChoice, counts_what_it_cost_and_saved) {
  CompressionChoice choice({.compress = Compress::kZstd, .elements = {Element::kBf16}});
  choice.encoded(op_of(1), 1000, 600, 0.5);
  choice.encoded(op_of(1), 1000, 1000, 0.25);  // gained nothing
  choice.decoded(op_of(1), 1000, 600, 0.125);
  const CompressionStats stats = choice.stats();
  EXPECT_EQ(stats.encode_seconds, 0.75);
  EXPECT_EQ(stats.decode_seconds, 0.125);
  EXPECT_EQ(stats.encoded_raw_bytes, 1000U);
  EXPECT_EQ(stats.encoded_stored_bytes, 600U);
}

TEST(CompressionChoice, nothing_to_encode_is_said) {
  const CompressionChoice choice({.compress = Compress::kAuto, .elements = {Element::kBytes}});
  EXPECT_EQ(choice.reason(), "off: the KV cache is neither bfloat16 nor float16");
}

}  // namespace
}  // namespace kv_offload
