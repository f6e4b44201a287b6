// SPDX-License-Identifier: Apache-2.0
// Metrics: the single list of metric names. Counters, gauges and histograms live in a prometheus-cpp
// registry. drain() passes their changes to vLLM's /metrics; an optional exposer serves this process's
// registry itself.
//
// Any thread may record and drain. One mutex, held for a search among the series of one name.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace kv_offload {

enum class MetricType : std::uint8_t { kCounter, kGauge, kHistogram };

struct MetricDefinition {
  std::string name;
  MetricType type;
  std::string documentation;
  std::vector<std::string> labels;
  std::vector<double> buckets;  // histograms
  bool worker = false;          // only on a worker's own /metrics, never drained
};
// All metrics, in order of design. build_metric_definitions declares exactly this list to vLLM, except the
// worker metrics.
std::span<const MetricDefinition> metric_definitions();

struct MetricChange {
  const MetricDefinition* definition = nullptr;
  std::vector<std::string> label_values;
  double value = 0;                  // counter: increase; gauge: current value
  std::vector<double> observations;  // histogram
};

class Metrics {
 public:
  // A drain returns at most this many observations per histogram series since the last drain, the first ones.
  // text() and the exposer include all.
  static constexpr std::size_t kMostObservations = 4096;

  using Labels = std::initializer_list<std::string_view>;
  Metrics();
  ~Metrics();
  // Throws std::logic_error (a bug in our code) for an unknown name, a wrong number of labels, a verb that
  // does not fit the metric's type, a decreasing counter, or a non-finite value.
  void add(std::string_view name, Labels label_values, double increase = 1);
  void set(std::string_view name, Labels label_values, double value);
  void observe(std::string_view name, Labels label_values, double value);
  // The same for label values known only at run time (the bindings).
  using LabelSpan = std::span<const std::string_view>;
  void add(std::string_view name, LabelSpan label_values, double increase = 1);
  void set(std::string_view name, LabelSpan label_values, double value);
  void observe(std::string_view name, LabelSpan label_values, double value);
  double value(std::string_view name, LabelSpan label_values) const;
  // Returns the changes since the last drain, without worker metrics. Cheap if nothing changed: returns an
  // empty list.
  std::vector<MetricChange> drain();
  // Returns the current value (tests, CLI): 0 for a series never recorded; for a histogram, the number of
  // observations.
  double value(std::string_view name, Labels label_values) const;
  // Serves this registry at http://address/metrics ("127.0.0.1:9400"; port 0: any free one) until destroyed.
  // Returns the port. Throws ResourceError naming the address if it cannot listen.
  std::uint16_t expose(const std::string& address);
  // Returns all metrics in Prometheus text format.
  std::string text() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kv_offload
