// Metrics: the only list of metric names. Counters, gauges and histograms live
// in a prometheus-cpp registry; drain() hands their changes to vLLM's /metrics,
// an optional exposer serves the registry of this process itself.
//
// Any thread may record and drain; one mutex, held for a search among the series
// of one name.
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
  bool worker = false;          // seen only on a worker's own /metrics, never drained
};
// Every metric there is, in order of design: what build_metric_definitions
// declares to vLLM is exactly this list less the worker ones.
std::span<const MetricDefinition> metric_definitions();

struct MetricChange {
  const MetricDefinition* definition = nullptr;
  std::vector<std::string> label_values;
  double value = 0;                  // counter: increase; gauge: now
  std::vector<double> observations;  // histogram
};

class Metrics {
 public:
  // In a drain, a histogram's series has at most the first so many observations
  // since the last one; text() and the exposer have all.
  static constexpr std::size_t kMostObservations = 4096;

  using Labels = std::initializer_list<std::string_view>;
  Metrics();
  ~Metrics();
  // Unknown name, wrong number of labels, a verb that is not the metric's, a
  // counter's decrease, a value that is not a number: std::logic_error (our mistake).
  void add(std::string_view name, Labels label_values, double increase = 1);
  void set(std::string_view name, Labels label_values, double value);
  void observe(std::string_view name, Labels label_values, double value);
  // The same with label values known only at run time (the bindings).
  using LabelSpan = std::span<const std::string_view>;
  void add(std::string_view name, LabelSpan label_values, double increase = 1);
  void set(std::string_view name, LabelSpan label_values, double value);
  void observe(std::string_view name, LabelSpan label_values, double value);
  double value(std::string_view name, LabelSpan label_values) const;
  // Changes since the last drain; empty when nothing changed (cheap to ask).
  // Worker metrics are never in it.
  std::vector<MetricChange> drain();
  // Value now (tests, CLI); 0 for a series never recorded; of a histogram, the
  // number of observations.
  double value(std::string_view name, Labels label_values) const;
  // Serve this registry at http://address/metrics ("127.0.0.1:9400"; port 0: any
  // free one) until destroyed. Returns the port. Throws ResourceError naming the
  // address when it cannot listen.
  std::uint16_t expose(const std::string& address);
  // Prometheus text format of everything.
  std::string text() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kv_offload
