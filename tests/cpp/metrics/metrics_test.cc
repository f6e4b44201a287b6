// SPDX-License-Identifier: Apache-2.0
#include "metrics/metrics.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmath>
#include <limits>
#include <map>
#include <regex>
#include <set>
#include <stdexcept>
#include <thread>

#include "base/status.h"

namespace kv_offload {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

const MetricDefinition& definition_of(const std::string& name) {
  for (const MetricDefinition& definition : metric_definitions()) {
    if (definition.name == name) return definition;
  }
  throw std::out_of_range(name);
}

TEST(MetricDefinitions, definitions_are_well_formed_and_names_unique) {
  std::set<std::string> names;
  for (const MetricDefinition& definition : metric_definitions()) {
    EXPECT_TRUE(names.insert(definition.name).second) << definition.name;
    EXPECT_TRUE(std::regex_match(definition.name, std::regex("kv_offload_[a-z_]+"))) << definition.name;
    EXPECT_EQ(definition.name.ends_with("_total"), definition.type == MetricType::kCounter)
        << definition.name;
    EXPECT_EQ(definition.buckets.empty(), definition.type != MetricType::kHistogram);
    EXPECT_TRUE(std::is_sorted(definition.buckets.begin(), definition.buckets.end()));
    EXPECT_FALSE(definition.documentation.empty());
    EXPECT_EQ(definition.worker, definition.name.starts_with("kv_offload_copy_"));
  }
}

TEST(MetricDefinitions, public_metric_names_and_labels_are_unchanged) {
  const std::map<std::string, std::vector<std::string>> promised{
      {"kv_offload_hit_tokens_total", {"tier"}},
      {"kv_offload_miss_tokens_total", {"reason"}},
      {"kv_offload_tier_bytes", {"tier"}},
      {"kv_offload_tier_capacity_bytes", {"tier"}},
      {"kv_offload_tier_chunks", {"tier"}},
      {"kv_offload_tier_capacity_tokens", {"tier"}},
      {"kv_offload_read_bytes_total", {"tier"}},
      {"kv_offload_write_bytes_total", {"tier"}},
      {"kv_offload_read_record_bytes_total", {"tier"}},
      {"kv_offload_write_record_bytes_total", {"tier"}},
      {"kv_offload_stored_bytes_total", {}},
      {"kv_offload_read_seconds", {"tier"}},
      {"kv_offload_write_seconds", {"tier"}},
      {"kv_offload_evicted_bytes_total", {"tier"}},
      {"kv_offload_dropped_bytes_total", {"tier", "reason"}},
      {"kv_offload_failures_total", {"tier", "op", "kind"}},
      {"kv_offload_queue_depth", {"tier", "op"}},
      {"kv_offload_oldest_op_seconds", {"tier", "op"}},
      {"kv_offload_decisions_total", {"choice"}},
      {"kv_offload_saved_seconds_total", {}},
      {"kv_offload_info", {"version", "namespace", "layout", "copier", "eviction_policy", "tiers"}},
  };
  for (const auto& [name, labels] : promised) EXPECT_EQ(definition_of(name).labels, labels) << name;
}

class MetricsTest : public testing::Test {
 protected:
  // Adds up all drains, by name and labels.
  void drain() {
    for (const MetricChange& change : metrics_.drain()) {
      std::string key = change.definition->name;
      for (const std::string& label : change.label_values) key += "/" + label;
      if (change.definition->type == MetricType::kGauge) sums_[key] = 0;
      sums_[key] += change.value;
      auto& seen = observations_[key];
      seen.insert(seen.end(), change.observations.begin(), change.observations.end());
    }
  }

  Metrics metrics_;
  std::map<std::string, double> sums_;
  std::map<std::string, std::vector<double>> observations_;
};

TEST_F(MetricsTest, drained_increases_add_up_to_the_totals) {
  for (int i = 1; i <= 100; ++i) {
    metrics_.add("kv_offload_hit_tokens_total", {i % 3 == 0 ? "fs" : "cpu"}, i);
    metrics_.add("kv_offload_stored_tokens_total", {});
    if (i % 7 == 0) drain();
  }
  drain();
  EXPECT_EQ(sums_["kv_offload_hit_tokens_total/fs"], metrics_.value("kv_offload_hit_tokens_total", {"fs"}));
  EXPECT_EQ(sums_["kv_offload_hit_tokens_total/cpu"], metrics_.value("kv_offload_hit_tokens_total", {"cpu"}));
  EXPECT_EQ(sums_["kv_offload_hit_tokens_total/cpu"] + sums_["kv_offload_hit_tokens_total/fs"], 5050);
  EXPECT_EQ(sums_["kv_offload_stored_tokens_total"], 100);
}

TEST_F(MetricsTest, a_drain_contains_only_changed_series) {
  EXPECT_TRUE(metrics_.drain().empty());
  metrics_.set("kv_offload_tier_bytes", {"cpu"}, 5);
  metrics_.set("kv_offload_tier_bytes", {"fs"}, 6);
  EXPECT_EQ(metrics_.drain().size(), 2u);
  EXPECT_TRUE(metrics_.drain().empty());
  metrics_.set("kv_offload_tier_bytes", {"cpu"}, 5);
  EXPECT_TRUE(metrics_.drain().empty()) << "an unchanged value was drained";
  metrics_.set("kv_offload_tier_bytes", {"cpu"}, 4);
  const auto changes = metrics_.drain();
  ASSERT_EQ(changes.size(), 1u);
  EXPECT_THAT(changes[0].label_values, ElementsAre("cpu"));
  EXPECT_EQ(changes[0].value, 4) << "a gauge is drained as its current value";
}

TEST_F(MetricsTest, a_series_recorded_as_zero_is_drained_once) {
  metrics_.set("kv_offload_queue_depth", {"fs", "read"}, 0);
  metrics_.add("kv_offload_hit_tokens_total", {"cpu"}, 0);
  EXPECT_EQ(metrics_.drain().size(), 2u);
  EXPECT_TRUE(metrics_.drain().empty());
}

TEST_F(MetricsTest, observations_are_drained_once_and_in_order) {
  metrics_.observe("kv_offload_read_seconds", {"fs"}, 0.25);
  metrics_.observe("kv_offload_read_seconds", {"fs"}, 0.5);
  drain();
  metrics_.observe("kv_offload_read_seconds", {"fs"}, 1);
  drain();
  EXPECT_THAT(observations_["kv_offload_read_seconds/fs"], ElementsAre(0.25, 0.5, 1));
  EXPECT_EQ(metrics_.value("kv_offload_read_seconds", {"fs"}), 3);
}

TEST_F(MetricsTest, observations_kept_for_a_drain_are_bounded) {
  for (std::size_t i = 0; i < Metrics::kMostObservations + 10; ++i) {
    metrics_.observe("kv_offload_read_seconds", {"fs"}, static_cast<double>(i));
  }
  drain();
  const auto& kept = observations_["kv_offload_read_seconds/fs"];
  ASSERT_EQ(kept.size(), Metrics::kMostObservations);
  EXPECT_EQ(kept.back(), static_cast<double>(Metrics::kMostObservations - 1))
      << "the oldest observations are kept";
  EXPECT_THAT(metrics_.text(), HasSubstr("kv_offload_read_seconds_count{tier=\"fs\"} 4106"));
}

TEST_F(MetricsTest, worker_metrics_are_shown_but_not_drained) {
  metrics_.add("kv_offload_copy_bytes_total", {"store"}, 9);
  metrics_.observe("kv_offload_copy_seconds", {"store"}, 0.1);
  EXPECT_TRUE(metrics_.drain().empty());
  EXPECT_THAT(metrics_.text(), HasSubstr("kv_offload_copy_bytes_total{direction=\"store\"} 9"));
}

TEST_F(MetricsTest, invalid_calls_throw_a_logic_error) {
  EXPECT_THROW(metrics_.add("kv_offload_no_such_total", {}), std::logic_error);
  EXPECT_THROW(metrics_.add("kv_offload_hit_tokens_total", {}), std::logic_error);
  EXPECT_THROW(metrics_.add("kv_offload_hit_tokens_total", {"cpu", "x"}), std::logic_error);
  EXPECT_THROW(metrics_.value("kv_offload_hit_tokens_total", {}), std::logic_error);
  EXPECT_THROW(metrics_.add("kv_offload_hit_tokens_total", {"cpu"}, -1), std::logic_error);
  EXPECT_THROW(metrics_.set("kv_offload_hit_tokens_total", {"cpu"}, 1), std::logic_error);
  EXPECT_THROW(metrics_.observe("kv_offload_read_seconds", {"fs"}, std::nan("")), std::logic_error);
  EXPECT_TRUE(metrics_.drain().empty()) << "rejected calls left a trace";
  EXPECT_EQ(metrics_.value("kv_offload_hit_tokens_total", {"cpu"}), 0);
}

TEST_F(MetricsTest, text_has_help_type_and_values) {
  metrics_.add("kv_offload_failures_total", {"fs", "read", "corrupt"}, 2);
  metrics_.observe("kv_offload_read_seconds", {"fs"}, 0.2);
  const std::string text = metrics_.text();
  EXPECT_THAT(text, HasSubstr("# HELP kv_offload_failures_total Failed operations"));
  EXPECT_THAT(text, HasSubstr("# TYPE kv_offload_failures_total counter"));
  EXPECT_THAT(text, HasSubstr("kv_offload_failures_total{kind=\"corrupt\",op=\"read\",tier=\"fs\"} 2"));
  EXPECT_THAT(text, HasSubstr("# TYPE kv_offload_read_seconds histogram"));
  EXPECT_THAT(text, HasSubstr("kv_offload_read_seconds_bucket{tier=\"fs\",le=\"0.1\"} 0"));
  EXPECT_THAT(text, HasSubstr("kv_offload_read_seconds_bucket{tier=\"fs\",le=\"0.25\"} 1"));
  EXPECT_THAT(text, HasSubstr("kv_offload_saved_seconds_total 0")) << "the metric is exported from the start";
}

TEST_F(MetricsTest, concurrent_updates_are_all_counted) {
  const auto record = [&] {
    for (int i = 0; i < 10'000; ++i) {
      metrics_.add("kv_offload_hit_tokens_total", {"cpu"});
      metrics_.set("kv_offload_tier_bytes", {"cpu"}, i);
      metrics_.observe("kv_offload_read_seconds", {"fs"}, 0.1);
    }
  };
  std::thread a(record), b(record);
  for (int i = 0; i < 1000; ++i) drain();
  a.join();
  b.join();
  drain();
  EXPECT_EQ(sums_["kv_offload_hit_tokens_total/cpu"], 20'000);
  EXPECT_EQ(metrics_.value("kv_offload_read_seconds", {"fs"}), 20'000);
}

// ---- the exposer

std::string http_get(std::uint16_t port, const std::string& path) {
  const int socket = ::socket(AF_INET, SOCK_STREAM, 0);
  const timeval patience{.tv_sec = 20,
                         .tv_usec = 0};  // a missing response fails the test instead of hanging it
  ::setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  std::string answer;
  if (::connect(socket, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0) {
    const std::string request = "GET " + path + " HTTP/1.0\r\n\r\n";
    EXPECT_EQ(::write(socket, request.data(), request.size()), static_cast<ssize_t>(request.size()));
    char buffer[4096];
    for (ssize_t got; (got = ::read(socket, buffer, sizeof(buffer))) > 0;) {
      answer.append(buffer, static_cast<std::size_t>(got));
    }
  }
  ::close(socket);
  return answer;
}

TEST_F(MetricsTest, a_scrape_over_http_returns_the_values) {
  const std::uint16_t port = metrics_.expose("127.0.0.1:0");
  metrics_.add("kv_offload_copy_bytes_total", {"load"}, 4096);
  const std::string answer = http_get(port, "/metrics");
  EXPECT_THAT(answer, HasSubstr("200 OK"));
  EXPECT_THAT(answer, HasSubstr("# TYPE kv_offload_copy_bytes_total counter"));
  EXPECT_THAT(answer, HasSubstr("kv_offload_copy_bytes_total{direction=\"load\"} 4096"));
}

TEST_F(MetricsTest, an_unusable_address_is_named_in_the_error) {
  const std::string taken = "127.0.0.1:" + std::to_string(metrics_.expose("127.0.0.1:0"));
  for (const std::string& address : {taken, std::string("192.0.2.1:9400"), std::string("nonsense:x")}) {
    try {
      metrics_.expose(address);
      ADD_FAILURE() << "served on " << address;
    } catch (const ResourceError& error) {
      EXPECT_THAT(error.what(), HasSubstr(address));
    }
  }
}

TEST(Exposer, the_http_server_stops_with_its_metrics) {
  std::uint16_t port = 0;
  {
    Metrics metrics;
    port = metrics.expose("127.0.0.1:0");
    EXPECT_THAT(http_get(port, "/metrics"), Not(testing::IsEmpty()));
  }
  EXPECT_THAT(http_get(port, "/metrics"), testing::IsEmpty());
}

}  // namespace
}  // namespace kv_offload
