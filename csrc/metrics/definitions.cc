// The list of metrics. Names and labels are part of what users build on: alerts
// and dashboards (examples/monitoring) name them.
#include "metrics/metrics.h"

namespace kv_offload {
namespace {

using enum MetricType;
using Names = std::vector<std::string>;

// 100 us, a page from a fast disk, to 30 s, past every deadline; 1, 2.5, 5 a decade.
const std::vector<double>& seconds_buckets() {
  static const std::vector<double> kBuckets{1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2,
                                            0.1,  0.25,   0.5,  1,    2.5,    5,    10,   30};
  return kBuckets;
}

MetricDefinition counter(std::string name, std::string documentation, Names labels = {}) {
  return {std::move(name), kCounter, std::move(documentation), std::move(labels), {}, false};
}

MetricDefinition gauge(std::string name, std::string documentation, Names labels = {}) {
  return {std::move(name), kGauge, std::move(documentation), std::move(labels), {}, false};
}

MetricDefinition seconds(std::string name, std::string documentation, Names labels) {
  return {std::move(name), kHistogram, std::move(documentation), std::move(labels), seconds_buckets(), false};
}

MetricDefinition of_worker(MetricDefinition definition) {
  definition.worker = true;
  return definition;
}

std::vector<MetricDefinition> make_definitions() {
  return {
      counter("kv_offload_hit_tokens_total", "Tokens loaded, by the tier that their bytes came from.",
              {"tier"}),
      counter("kv_offload_miss_tokens_total",
              "Tokens of prompts that were looked up and not loaded, by what was missing first: not_stored, "
              "evicted, recompute_cheaper, deadline, corrupt, "
              "io_error, pressure, disabled, incomplete.",
              {"reason"}),
      counter("kv_offload_lookup_tokens_total", "Tokens looked up beyond what the device cache had."),
      counter("kv_offload_stored_tokens_total", "Tokens whose blocks were stored in host memory."),
      counter("kv_offload_stored_bytes_total", "Bytes of KV cache stored in host memory."),
      gauge("kv_offload_tier_bytes", "Bytes resident on a tier (cpu: host memory).", {"tier"}),
      gauge("kv_offload_tier_capacity_bytes", "Bytes that a tier may hold.", {"tier"}),
      gauge("kv_offload_tier_capacity_tokens", "Tokens of this model that a tier may hold.", {"tier"}),
      gauge("kv_offload_tier_chunks", "Chunks resident on a tier.", {"tier"}),
      counter("kv_offload_read_bytes_total", "Bytes of KV cache read from a tier, after decoding.", {"tier"}),
      counter("kv_offload_write_bytes_total", "Bytes of KV cache written to a tier, before encoding.",
              {"tier"}),
      counter("kv_offload_read_record_bytes_total",
              "Bytes of the records read from a tier, as the tier stores them: encoded, with headers.",
              {"tier"}),
      counter("kv_offload_write_record_bytes_total",
              "Bytes of the records written to a tier, as the tier stores them: encoded, with headers.",
              {"tier"}),
      seconds("kv_offload_read_seconds", "Seconds from the submission of a read to its end.", {"tier"}),
      seconds("kv_offload_write_seconds", "Seconds from the submission of a write to its end.", {"tier"}),
      counter("kv_offload_evicted_bytes_total", "Bytes that left a tier to make room.", {"tier"}),
      counter("kv_offload_dropped_bytes_total",
              "Bytes of KV cache that were to be written to a tier and were not, before encoding, by reason "
              "(declined: worth less than the records they would replace; incomplete: vLLM offered chunks "
              "without some of their blocks).",
              {"tier", "reason"}),
      counter("kv_offload_failures_total",
              "Failed operations of a tier: corrupt, io, no_space, timeout, device.", {"tier", "op", "kind"}),
      gauge("kv_offload_queue_depth", "Operations of a tier that wait or run.", {"tier", "op"}),
      gauge("kv_offload_oldest_op_seconds", "Age of the oldest operation of a tier that waits or runs.",
            {"tier", "op"}),
      counter("kv_offload_io_ops_total", "Reads and writes of a tier that were direct or buffered.",
              {"tier", "mode"}),
      gauge("kv_offload_codec_on", "1: the next record of a tier is encoded (compress); 0: it is raw.",
            {"tier"}),
      gauge(
          "kv_offload_codec_ratio",
          "Bytes of the records that were encoded over the bytes that they take on a tier, since the start.",
          {"tier"}),
      counter("kv_offload_codec_saved_bytes_total",
              "Bytes that encoded records take less on a tier than raw ones.", {"tier"}),
      counter("kv_offload_codec_seconds_total",
              "Seconds of I/O threads that encoding records (write) and decoding them (read) took.",
              {"tier", "op"}),
      counter("kv_offload_tier_rebuilds_total",
              "Times that the directory of a tier, or a file that it needs, was made again because another "
              "program had removed it.",
              {"tier"}),
      counter("kv_offload_tier_lost_bytes_total",
              "Bytes of records that another program removed from the directory of a tier.", {"tier"}),
      counter("kv_offload_breaker_trips_total", "Times a tier was switched off for a while.", {"tier"}),
      counter(
          "kv_offload_decisions_total",
          "Decisions on what a tier has: load, partial (a part of it), recompute, give_up (a load was slower "
          "than estimated), probe (a read that nobody waits for).",
          {"choice"}),
      counter("kv_offload_estimated_seconds_total",
              "What the decisions were made on: estimated seconds of loading and of computing.",
              {"choice", "side"}),
      seconds("kv_offload_load_seconds",
              "Seconds of loads, from a request's first wait until its bytes were on the device.", {}),
      counter("kv_offload_saved_seconds_total",
              "Seconds of prefill that loads made unnecessary, less the seconds that they took."),
      counter("kv_offload_lost_seconds_total", "Seconds by which loads took longer than prefill would have."),
      gauge("kv_offload_prefill_tokens_per_second",
            "Estimated speed of computing a prompt of so many tokens on its own.", {"prompt_tokens"}),
      gauge("kv_offload_load_bytes_per_second",
            "Estimated speed of reading from a tier (cpu: of copying from host memory to the device).",
            {"tier"}),
      gauge("kv_offload_info", "1; the labels say what runs.",
            {"version", "namespace", "layout", "copier", "eviction_policy", "tiers"}),
      of_worker(counter("kv_offload_copy_bytes_total", "Bytes copied between the device and host memory.",
                        {"direction"})),
      of_worker(seconds("kv_offload_copy_seconds",
                        "Seconds of a copy job between the device and host memory.", {"direction"})),
      of_worker(counter("kv_offload_copy_segments_total", "Merged runs that copy jobs consisted of.",
                        {"direction"})),
      of_worker(gauge("kv_offload_copy_info",
                      "1; the label says which copier runs, and which path from which size.", {"copier"})),
      of_worker(counter("kv_offload_copy_failures_total", "Copy jobs that failed.", {"direction"})),
      of_worker(counter("kv_offload_copy_refused_batches_total",
                        "Batched copies that the CUDA driver refused and that were enqueued one by one.",
                        {"direction"})),
  };
}

}  // namespace

std::span<const MetricDefinition> metric_definitions() {
  static const std::vector<MetricDefinition> kDefinitions = make_definitions();
  return kDefinitions;
}

}  // namespace kv_offload
