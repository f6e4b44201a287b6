// SPDX-License-Identifier: Apache-2.0
#include "bindings/bindings.h"
#include "metrics/metrics.h"

namespace kv_offload::bindings {
namespace {

const char* name_of(MetricType type) {
  switch (type) {
    case MetricType::kCounter:
      return "counter";
    case MetricType::kGauge:
      return "gauge";
    case MetricType::kHistogram:
      return "histogram";
  }
  return "";
}

std::vector<std::string_view> views(const std::vector<std::string>& labels) {
  return {labels.begin(), labels.end()};
}

py::list drain(Metrics& metrics) {
  py::list changes;
  for (MetricChange& change : metrics.drain()) {
    const bool histogram = change.definition->type == MetricType::kHistogram;
    const py::object value =
        histogram ? py::object(py::cast(change.observations)) : py::object(py::float_(change.value));
    changes.append(py::make_tuple(change.definition->name, name_of(change.definition->type),
                                  py::tuple(py::cast(change.label_values)), value));
  }
  return changes;
}

}  // namespace

void bind_metrics(py::module_& module) {
  using Labels = const std::vector<std::string>&;

  py::class_<MetricDefinition>(module, "MetricDefinition")
      .def_readonly("name", &MetricDefinition::name)
      .def_property_readonly("type", [](const MetricDefinition& self) { return name_of(self.type); })
      .def_readonly("documentation", &MetricDefinition::documentation)
      .def_property_readonly("labels",
                             [](const MetricDefinition& self) { return py::tuple(py::cast(self.labels)); })
      .def_property_readonly("buckets",
                             [](const MetricDefinition& self) { return py::tuple(py::cast(self.buckets)); })
      .def_readonly("worker", &MetricDefinition::worker)
      .def("__repr__",
           [](const MetricDefinition& self) { return fmt::format("<MetricDefinition {}>", self.name); });

  module.def("metric_definitions", [] {
    const auto definitions = metric_definitions();
    return std::vector<MetricDefinition>(definitions.begin(), definitions.end());
  });

  py::class_<Metrics, std::shared_ptr<Metrics>>(module, "Metrics")
      .def(py::init<>())
      .def("drain", &drain)
      .def(
          "add",
          [](Metrics& self, const std::string& name, Labels labels, double increase) {
            self.add(name, views(labels), increase);
          },
          py::arg("name"), py::arg("labels"), py::arg("increase") = 1.0)
      .def(
          "set",
          [](Metrics& self, const std::string& name, Labels labels, double value) {
            self.set(name, views(labels), value);
          },
          py::arg("name"), py::arg("labels"), py::arg("value"))
      .def(
          "observe",
          [](Metrics& self, const std::string& name, Labels labels, double value) {
            self.observe(name, views(labels), value);
          },
          py::arg("name"), py::arg("labels"), py::arg("value"))
      .def(
          "value",
          [](const Metrics& self, const std::string& name, Labels labels) {
            return self.value(name, views(labels));
          },
          py::arg("name"), py::arg("labels") = std::vector<std::string>{})
      .def("text", &Metrics::text)
      .def("expose", &Metrics::expose, py::arg("address"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace kv_offload::bindings
