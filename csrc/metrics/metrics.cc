// SPDX-License-Identifier: Apache-2.0
#include "metrics/metrics.h"

#include <prometheus/counter.h>
#include <prometheus/exposer.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <deque>
#include <stdexcept>
#include <unordered_map>
#include <utility>

#include "base/status.h"
#include "base/thread_annotations.h"

namespace kv_offload {
namespace {

// One metric with one set of label values.
struct Series {
  const MetricDefinition* definition = nullptr;
  std::vector<std::string> label_values;
  prometheus::Counter* counter = nullptr;  // exactly one of the three is set; owned by the registry
  prometheus::Gauge* gauge = nullptr;
  prometheus::Histogram* histogram = nullptr;
  double value = 0;    // see Metrics::value()
  double drained = 0;  // counters: the part that drain() has returned
  std::vector<double> observations;
  bool changed = false;  // since the last drain; then it is in Impl::changed
};

// The registry's family of a metric, with its series.
struct Family {
  const MetricDefinition* definition = nullptr;
  prometheus::Family<prometheus::Counter>* counters = nullptr;
  prometheus::Family<prometheus::Gauge>* gauges = nullptr;
  prometheus::Family<prometheus::Histogram>* histograms = nullptr;
  std::deque<Series> series;  // few; a deque keeps their addresses stable
};

Family make_family(const MetricDefinition& definition, prometheus::Registry& registry) {
  Family family;
  family.definition = &definition;
  const auto build = [&](auto builder) -> auto& {
    return builder.Name(definition.name).Help(definition.documentation).Register(registry);
  };
  switch (definition.type) {
    case MetricType::kCounter:
      family.counters = &build(prometheus::BuildCounter());
      break;
    case MetricType::kGauge:
      family.gauges = &build(prometheus::BuildGauge());
      break;
    case MetricType::kHistogram:
      family.histograms = &build(prometheus::BuildHistogram());
      break;
  }
  return family;
}

}  // namespace

struct Metrics::Impl {
  std::shared_ptr<prometheus::Registry> registry = std::make_shared<prometheus::Registry>();
  std::atomic<bool> any_changed{false};
  Mutex mutex;
  std::unordered_map<std::string_view, Family> families GUARDED_BY(mutex);
  std::vector<Series*> changed GUARDED_BY(mutex);
  std::vector<std::unique_ptr<prometheus::Exposer>> exposers GUARDED_BY(mutex);  // must stop first

  Impl();
  Family& family_of(std::string_view name, LabelSpan label_values) REQUIRES(mutex);
  static Series* find(Family& family, LabelSpan label_values);
  Series& series_of(std::string_view name, LabelSpan label_values, MetricType type, double value)
      REQUIRES(mutex);
  static Series& make_series(Family& family, LabelSpan label_values);
  void mark_changed(Series& series) REQUIRES(mutex);
};

Metrics::Impl::Impl() {
  const MutexLock lock(mutex);
  for (const MetricDefinition& definition : metric_definitions()) {
    Family& family = families.emplace(definition.name, make_family(definition, *registry)).first->second;
    if (definition.labels.empty()) make_series(family, {});  // exported as 0 from the start
  }
}

Family& Metrics::Impl::family_of(std::string_view name, LabelSpan label_values) {
  const auto found = families.find(name);
  if (found == families.end()) throw std::logic_error(fmt::format("unknown metric {}", name));
  const MetricDefinition& definition = *found->second.definition;
  if (label_values.size() != definition.labels.size()) {
    throw std::logic_error(fmt::format("metric {} has {} labels, {} were given", name,
                                       definition.labels.size(), label_values.size()));
  }
  return found->second;
}

Series* Metrics::Impl::find(Family& family, LabelSpan label_values) {
  for (Series& series : family.series) {
    if (std::equal(label_values.begin(), label_values.end(), series.label_values.begin())) return &series;
  }
  return nullptr;
}

Series& Metrics::Impl::series_of(std::string_view name, LabelSpan label_values, MetricType type,
                                 double value) {
  Family& family = family_of(name, label_values);
  if (family.definition->type != type)
    throw std::logic_error(fmt::format("metric {} has another type", name));
  if (!std::isfinite(value))
    throw std::logic_error(fmt::format("metric {} cannot record the value {}", name, value));
  if (Series* series = find(family, label_values)) return *series;
  Series& made = make_series(family, label_values);
  mark_changed(made);  // so that vLLM exports it, even at 0
  return made;
}

Series& Metrics::Impl::make_series(Family& family, LabelSpan label_values) {
  Series series;
  series.definition = family.definition;
  series.label_values.assign(label_values.begin(), label_values.end());
  prometheus::Labels labels;
  for (std::size_t i = 0; i < label_values.size(); ++i) {
    labels.emplace(family.definition->labels[i], series.label_values[i]);
  }
  if (family.counters != nullptr) series.counter = &family.counters->Add(labels);
  if (family.gauges != nullptr) series.gauge = &family.gauges->Add(labels);
  if (family.histograms != nullptr) {
    series.histogram = &family.histograms->Add(labels, family.definition->buckets);
  }
  return family.series.emplace_back(std::move(series));  // complete, or not at all if memory runs out
}

void Metrics::Impl::mark_changed(Series& series) {
  if (series.changed || series.definition->worker) return;
  changed.push_back(&series);
  series.changed = true;
  any_changed.store(true, std::memory_order_release);
}

Metrics::Metrics() : impl_(std::make_unique<Impl>()) {}

Metrics::~Metrics() {
  std::vector<std::unique_ptr<prometheus::Exposer>> exposers;
  {
    const MutexLock lock(impl_->mutex);
    exposers.swap(impl_->exposers);
  }
}

void Metrics::add(std::string_view name, LabelSpan label_values, double increase) {
  const MutexLock lock(impl_->mutex);
  if (increase < 0) throw std::logic_error(fmt::format("counter {} cannot grow by {}", name, increase));
  Series& series = impl_->series_of(name, label_values, MetricType::kCounter, increase);
  if (increase == 0) return;
  series.value += increase;
  series.counter->Increment(increase);
  impl_->mark_changed(series);
}

void Metrics::set(std::string_view name, LabelSpan label_values, double value) {
  const MutexLock lock(impl_->mutex);
  Series& series = impl_->series_of(name, label_values, MetricType::kGauge, value);
  if (series.value == value) return;
  series.value = value;
  series.gauge->Set(value);
  impl_->mark_changed(series);
}

void Metrics::observe(std::string_view name, LabelSpan label_values, double value) {
  const MutexLock lock(impl_->mutex);
  Series& series = impl_->series_of(name, label_values, MetricType::kHistogram, value);
  series.value += 1;
  series.histogram->Observe(value);
  impl_->mark_changed(series);
  if (series.definition->worker || series.observations.size() >= kMostObservations) return;
  series.observations.push_back(value);
}

double Metrics::value(std::string_view name, LabelSpan label_values) const {
  const MutexLock lock(impl_->mutex);
  const Series* series = Impl::find(impl_->family_of(name, label_values), label_values);
  return series == nullptr ? 0 : series->value;
}

void Metrics::add(std::string_view name, Labels label_values, double increase) {
  add(name, LabelSpan(label_values.begin(), label_values.size()), increase);
}

void Metrics::set(std::string_view name, Labels label_values, double value) {
  set(name, LabelSpan(label_values.begin(), label_values.size()), value);
}

void Metrics::observe(std::string_view name, Labels label_values, double value) {
  observe(name, LabelSpan(label_values.begin(), label_values.size()), value);
}

double Metrics::value(std::string_view name, Labels label_values) const {
  return value(name, LabelSpan(label_values.begin(), label_values.size()));
}

std::vector<MetricChange> Metrics::drain() {
  if (!impl_->any_changed.load(std::memory_order_acquire)) return {};
  const MutexLock lock(impl_->mutex);
  impl_->any_changed.store(false, std::memory_order_relaxed);
  std::vector<MetricChange> changes;
  changes.reserve(impl_->changed.size());
  for (Series* series : std::exchange(impl_->changed, {})) {
    series->changed = false;
    MetricChange& change = changes.emplace_back();
    change.definition = series->definition;
    change.label_values = series->label_values;
    change.observations = std::exchange(series->observations, {});
    if (series->definition->type != MetricType::kHistogram) change.value = series->value - series->drained;
    if (series->definition->type == MetricType::kCounter) series->drained = series->value;
  }
  return changes;
}

std::uint16_t Metrics::expose(const std::string& address) {
  std::unique_ptr<prometheus::Exposer> exposer;
  std::vector<int> ports;
  try {
    exposer = std::make_unique<prometheus::Exposer>(address);
    ports = exposer->GetListeningPorts();
  } catch (const std::exception& error) {
    throw_resource(
        "metrics cannot be served on {} ({}): the address is not this machine's, the port is taken or not "
        "allowed; change metrics_port",
        address, error.what());
  }
  if (ports.empty())
    throw_resource("metrics cannot be served on {}: no such address; change metrics_port", address);
  exposer->RegisterCollectable(impl_->registry);
  const MutexLock lock(impl_->mutex);
  impl_->exposers.push_back(std::move(exposer));
  return static_cast<std::uint16_t>(ports.front());
}

std::string Metrics::text() const {
  return prometheus::TextSerializer().Serialize(impl_->registry->Collect());
}

}  // namespace kv_offload
