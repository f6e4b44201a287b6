// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "backends/s3/probe.h"
#include "backends/s3/records.h"
#include "backends/s3/store.h"
#include "backends/s3/tier.h"
#include "bindings/bindings.h"
#include "bindings/tier_spec.h"

namespace kv_offload::bindings {
namespace {

using namespace py::literals;

struct S3TierSpec final : TierSpec {
  S3TierOptions options;
  std::unique_ptr<Tier> open() const override {
    S3TierOptions chosen = options;
    chosen.form = form();
    chosen.read_only = slot.write_policy == WritePolicy::kReadOnly;
    chosen.epoch = epoch;
    return make_s3_tier(chosen);
  }
  std::unique_ptr<RecordStore> open_for_import() const override {
    return std::make_unique<s3::S3Store>(options);
  }
};

s3::Bucket bucket_of(std::string name, std::string endpoint, std::string region, bool path_style,
                     std::string ca_file, std::string access_key, std::string secret_key,
                     std::string session_token) {
  s3::Bucket bucket;
  bucket.name = std::move(name);
  bucket.endpoint = std::move(endpoint);
  bucket.region = std::move(region);
  bucket.path_style = path_style;
  bucket.ca_file = std::move(ca_file);
  bucket.access_key = std::move(access_key);
  bucket.secret_key = std::move(secret_key);
  bucket.session_token = std::move(session_token);
  bucket.newer_keys = std::make_shared<s3::NewerKeys>();
  return bucket;
}

// Holds the keys weakly, so that it does not keep them alive.
class S3Renewer {
 public:
  explicit S3Renewer(const s3::Bucket& bucket) : keys_(bucket.newer_keys) {}
  bool is_used() const { return !keys_.expired(); }
  void set(std::string access_key, std::string secret_key, std::string session_token) const {
    if (const auto keys = keys_.lock()) {
      keys->set({std::move(access_key), std::move(secret_key), std::move(session_token)});
    }
  }

 private:
  std::weak_ptr<s3::NewerKeys> keys_;
};

std::shared_ptr<S3TierSpec> s3_tier_spec(const s3::Bucket& bucket, const py::bytes& namespace_id,
                                         std::string name, std::string prefix, unsigned n_read_threads,
                                         unsigned n_write_threads, double op_timeout_seconds) {
  auto spec = std::make_shared<S3TierSpec>();
  S3TierOptions& options = spec->options;
  options.bucket = bucket;
  options.namespace_id = namespace_id_of(namespace_id);
  options.name = std::move(name);
  options.prefix = std::move(prefix);
  options.n_read_threads = n_read_threads;
  options.n_write_threads = n_write_threads;
  options.op_timeout = to_nanos(op_timeout_seconds, "op_timeout_seconds");
  return spec;
}

py::dict probe_bucket(const s3::Bucket& bucket, const std::string& prefix, std::uint64_t record_bytes,
                      unsigned records, double deadline_seconds) {
  s3::Probe found;
  {
    const py::gil_scoped_release release;
    found = s3::probe(bucket, prefix, record_bytes, records, to_nanos(deadline_seconds, "deadline_seconds"));
  }
  return py::dict("answer_seconds"_a = found.answer_seconds, "records"_a = found.records,
                  "write_bytes_per_second"_a = found.write_bytes_per_second,
                  "read_bytes_per_second"_a = found.read_bytes_per_second,
                  "write_refused"_a = found.write_refused);
}

py::tuple ask_s3_bucket(const s3::Bucket& bucket, const std::string& query, double deadline_seconds) {
  s3::Answer answer;
  {
    const py::gil_scoped_release release;
    answer = s3::ask_bucket(bucket, query, to_nanos(deadline_seconds, "deadline_seconds"));
  }
  return py::make_tuple(answer.status, answer.code, py::bytes(answer.text));
}

std::unique_ptr<RemoteRecords> s3_records(const s3::Bucket& bucket, std::string prefix,
                                          double deadline_seconds, unsigned page) {
  S3RecordsOptions options;
  options.bucket = bucket;
  options.prefix = std::move(prefix);
  options.deadline = to_nanos(deadline_seconds, "deadline_seconds");
  options.page = std::max(1u, page);
  const py::gil_scoped_release release;
  return open_s3_records(options);
}

}  // namespace

void bind_s3(py::module_& module) {
  // Neither repr shows the keys.
  py::class_<s3::Bucket>(module, "S3Bucket")
      .def(py::init(&bucket_of), py::kw_only(), py::arg("name"), py::arg("endpoint") = "",
           py::arg("region") = "us-east-1", py::arg("path_style") = false, py::arg("ca_file") = "",
           py::arg("access_key") = "", py::arg("secret_key") = "", py::arg("session_token") = "")
      .def("renewer", [](const s3::Bucket& self) { return S3Renewer(self); })
      .def("__repr__",
           [](const s3::Bucket& self) { return fmt::format("<S3Bucket {}>", s3::address_of(self)); });
  py::class_<S3Renewer>(module, "S3Renewer")
      .def_property_readonly("is_used", &S3Renewer::is_used)
      .def("set", &S3Renewer::set, py::arg("access_key"), py::arg("secret_key"),
           py::arg("session_token") = "");
  py::class_<S3TierSpec, TierSpec, std::shared_ptr<S3TierSpec>>(module, "S3Tier")
      .def(py::init(&s3_tier_spec), py::kw_only(), py::arg("bucket"), py::arg("namespace_id"),
           py::arg("name") = "s3", py::arg("prefix") = "kv_offload", py::arg("n_read_threads") = 8,
           py::arg("n_write_threads") = 4, py::arg("op_timeout_seconds") = 10.0)
      .def("__repr__", [](const S3TierSpec& self) {
        return fmt::format("<S3Tier {:?} at {}>", self.options.name, s3::address_of(self.options.bucket));
      });
  module.def("probe_s3", &probe_bucket, py::arg("bucket"), py::arg("prefix"), py::arg("record_bytes"),
             py::arg("records"), py::arg("deadline_seconds"));
  module.def("ask_s3_bucket", &ask_s3_bucket, py::arg("bucket"), py::arg("query"),
             py::arg("deadline_seconds"));
  module.def("s3_unavailable_reason", &s3::unavailable_reason);
  module.def("s3_library_version", &s3::library_version);
  module.def("s3_records", &s3_records, py::arg("bucket"), py::kw_only(), py::arg("prefix"),
             py::arg("deadline_seconds"), py::arg("page") = 1000);
}

}  // namespace kv_offload::bindings
