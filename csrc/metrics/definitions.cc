// SPDX-License-Identifier: Apache-2.0
// The list of metrics. Names and labels are a public interface: alerts and dashboards (examples/monitoring)
// use them.
#include "metrics/metrics.h"

namespace kv_offload {
namespace {

using enum MetricType;
using Names = std::vector<std::string>;

// From 100 us (a page from a fast disk) to 30 s (longer than every deadline), in steps of 1, 2.5, 5 per
// decade.
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
      counter("kv_offload_hit_tokens_total",
              "Tokens loaded, by the tier that their bytes came from (neighbour: host memory of another "
              "engine of "
              "this host).",
              {"tier"}),
      counter(
          "kv_offload_neighbour_hit_tokens_total",
          "Tokens loaded from the host memory of another engine of this host, by the number of its region "
          "(kv_offload-shared-*-NUMBER in /dev/shm). Part of kv_offload_hit_tokens_total.",
          {"neighbour"}),
      gauge("kv_offload_neighbours", "Engines of this host whose memory this engine reads."),
      gauge(
          "kv_offload_shared_memory_info",
          "1 while other engines of this host may load from this engine's memory, 0 after a reset has ended "
          "that. The label is the number by which they count hits in it "
          "(kv_offload_neighbour_hit_tokens_total).",
          {"neighbour"}),
      gauge("kv_offload_borrowed_chunks", "Chunks of neighbours that are pinned for this engine."),
      gauge("kv_offload_lost_hosts",
            "Hosts of this engine's ranks that are not connected. Unless it is 0, nothing is loaded or "
            "stored."),
      gauge("kv_offload_host_connected",
            "1 if a host of this engine's ranks is connected to the scheduler, 0 if it is lost.", {"host"}),
      gauge("kv_offload_host_tier_bytes", "Bytes of a host's part of a tier.", {"host", "tier"}),
      gauge("kv_offload_host_tier_capacity_bytes", "Bytes that a host's part of a tier may hold.",
            {"host", "tier"}),
      gauge("kv_offload_host_tier_chunks", "Chunks whose part a host has on a tier.", {"host", "tier"}),
      gauge("kv_offload_host_tier_usable",
            "With op read or write: 1 if a host's part of a tier takes them, 0 if it is out of service or "
            "the host is lost. With op epoch: 0 if this host's store responds and the stores have different "
            "epochs, so the tier is out of service. Otherwise 1. This value stays while the host is lost.",
            {"host", "tier", "op"}),
      gauge("kv_offload_host_read_bytes_per_second",
            "Estimated speed of reading a host's part of a tier, as the scheduler sees it.",
            {"host", "tier"}),
      counter("kv_offload_host_slowest_reads_total", "Reads of chunks for which this host was the slowest.",
              {"host", "tier"}),
      counter("kv_offload_host_failures_total",
              "Failed operations (read, write, remove) of a host's part of a tier, by kind as in "
              "kv_offload_failures_total. A store that refuses removals counts as remove, declined.",
              {"host", "tier", "op", "kind"}),
      counter("kv_offload_host_breaker_trips_total",
              "Times that the circuit breaker took a host's part of a tier out of service.",
              {"host", "tier"}),
      gauge("kv_offload_lent_chunks",
            "Chunks that would be evicted, or were forgotten, and that a neighbour still reads."),
      counter("kv_offload_miss_tokens_total",
              "Tokens that were looked up and not loaded, by the reason of the first miss: not_stored, "
              "evicted, recompute_cheaper, deadline, corrupt, "
              "io_error, pressure, disabled, incomplete, host_lost.",
              {"reason"}),
      counter("kv_offload_lookup_tokens_total",
              "Tokens looked up that the device's prefix cache did not have."),
      counter("kv_offload_stored_tokens_total", "Tokens whose blocks were stored in host memory."),
      counter("kv_offload_stored_bytes_total", "Bytes of KV cache stored in host memory."),
      gauge("kv_offload_tier_bytes", "Bytes resident on a tier (cpu: host memory).", {"tier"}),
      gauge("kv_offload_tier_capacity_bytes", "Bytes that a tier may hold.", {"tier"}),
      gauge("kv_offload_tier_capacity_tokens", "Tokens of this model that a tier may hold.", {"tier"}),
      gauge("kv_offload_tier_chunks", "Chunks resident on a tier.", {"tier"}),
      counter("kv_offload_read_bytes_total",
              "Raw bytes of KV cache read from a tier, after decryption and decompression.", {"tier"}),
      counter("kv_offload_write_bytes_total",
              "Raw bytes of KV cache written to a tier, before compression and encryption.", {"tier"}),
      counter("kv_offload_read_record_bytes_total",
              "Bytes of the records read from a tier, as stored: with compression, encryption and headers.",
              {"tier"}),
      counter("kv_offload_write_record_bytes_total",
              "Bytes of the records written to a tier, as stored: with compression, encryption and headers.",
              {"tier"}),
      seconds("kv_offload_read_seconds", "Seconds from the submission of a read to its end.", {"tier"}),
      seconds("kv_offload_write_seconds", "Seconds from the submission of a write to its end.", {"tier"}),
      counter("kv_offload_evicted_bytes_total", "Bytes evicted from a tier to make room.", {"tier"}),
      counter(
          "kv_offload_dropped_bytes_total",
          "Raw bytes of KV cache that were not written to a tier, by reason (declined: worth less than the "
          "records they would replace; incomplete: vLLM offered chunks without some of their blocks).",
          {"tier", "reason"}),
      counter("kv_offload_hints_total",
              "Hints of requests about sessions, by type and outcome: accepted; clipped: accepted with a "
              "smaller amount; rejected: invalid, not allowed or over a limit; missing: the target has no "
              "chunk in host memory.",
              {"type", "outcome"}),
      gauge("kv_offload_hint_pinned_bytes", "Bytes of host memory that hints of requests pin."),
      // The label tenant is a configured name or "other", so at most 32 values are possible.
      gauge("kv_offload_tenant_bytes", "Bytes of host memory that are charged to a tenant.", {"tenant"}),
      gauge("kv_offload_tenant_share_bytes", "Bytes of host memory that are guaranteed to a tenant.",
            {"tenant"}),
      gauge("kv_offload_tenant_tier_bytes",
            "Bytes that a tenant's records take on a tier that divides its space.", {"tenant", "tier"}),
      gauge("kv_offload_tenant_tier_share_bytes",
            "A tenant's share of a tier's size. Other models and other files in the directory reduce it.",
            {"tenant", "tier"}),
      counter("kv_offload_tenant_hit_tokens_total",
              "Tokens loaded for a tenant's requests, by the tier that their bytes came from.",
              {"tenant", "tier"}),
      counter("kv_offload_tenant_miss_tokens_total",
              "Tokens of a tenant's requests that were looked up and not loaded.", {"tenant"}),
      counter("kv_offload_tenant_evicted_bytes_total",
              "Bytes charged to a tenant that were evicted from host memory.", {"tenant"}),
      counter("kv_offload_tenant_read_bytes_total",
              "Raw bytes of KV cache read from a tier for a tenant, after decryption and decompression.",
              {"tenant", "tier"}),
      counter("kv_offload_tenant_write_bytes_total",
              "Raw bytes of KV cache charged to a tenant and written to a tier, before compression and "
              "encryption.",
              {"tenant", "tier"}),
      counter(
          "kv_offload_prefetched_bytes_total",
          "Raw bytes of KV cache read from tiers before the return of their sessions, by outcome: used: by "
          "the next request; unused: evicted or expired before.",
          {"outcome"}),
      counter("kv_offload_failures_total",
              "Failed operations of a tier, by kind: corrupt, io, no_space, timeout, device, exception.",
              {"tier", "op", "kind"}),
      gauge("kv_offload_queue_depth", "Operations of a tier that wait or run.", {"tier", "op"}),
      gauge("kv_offload_oldest_op_seconds", "Age of the oldest operation of a tier that waits or runs.",
            {"tier", "op"}),
      counter("kv_offload_io_ops_total", "Reads and writes of a tier that were direct or buffered.",
              {"tier", "mode"}),
      gauge("kv_offload_codec_on", "1 if the next record of a tier is compressed, 0 if it is stored raw.",
            {"tier"}),
      gauge("kv_offload_codec_ratio",
            "Raw bytes of the compressed records divided by their bytes on a tier, since the start.",
            {"tier"}),
      gauge("kv_offload_codec_largest_error",
            "Largest relative error of 64 neighbouring elements in the records that this process stored with "
            "loss. part=values: groups of values only; part=keys: all other groups.",
            {"tier", "part"}),
      counter("kv_offload_codec_saved_bytes_total", "Bytes saved on a tier by compression.", {"tier"}),
      counter("kv_offload_codec_seconds_total",
              "Seconds that I/O threads spent compressing (write) and decompressing (read) records.",
              {"tier", "op"}),
      counter("kv_offload_tier_rebuilds_total",
              "Times that the directory of a tier, or a file that it needs, was created again after another "
              "program had removed it.",
              {"tier"}),
      counter("kv_offload_tier_lost_bytes_total",
              "Bytes of records that another program removed from the directory of a tier.", {"tier"}),
      counter("kv_offload_breaker_trips_total", "Times that a tier was taken out of service after failures.",
              {"tier"}),
      counter("kv_offload_decisions_total",
              "Decisions about chunks on a tier: load, partial (load a part), recompute, give_up (end a load "
              "that "
              "is slower than estimated), probe (a read without a waiting request).",
              {"choice"}),
      counter("kv_offload_estimated_seconds_total",
              "Estimated seconds of loading and of computing that the decisions were based on.",
              {"choice", "side"}),
      seconds("kv_offload_load_seconds",
              "Seconds of a load, from the first wait of its request until its bytes were on the device.",
              {}),
      counter("kv_offload_saved_seconds_total",
              "Net seconds of prefill saved: compute avoided minus load time."),
      counter("kv_offload_lost_seconds_total",
              "Seconds by which loads took longer than the prefill that they replaced."),
      gauge("kv_offload_prefill_tokens_per_second",
            "Estimated speed of computing a single prompt of that many tokens.", {"prompt_tokens"}),
      gauge("kv_offload_load_bytes_per_second",
            "Estimated speed of reading from a tier (cpu: of copying from host memory to the device).",
            {"tier"}),
      counter("kv_offload_dropped_traces_total",
              "Finished requests without spans, because the queue of the tracing thread was full."),
      gauge("kv_offload_info", "Always 1; the labels describe the version and the configuration.",
            {"version", "namespace", "layout", "copier", "eviction_policy", "tiers"}),
      of_worker(counter("kv_offload_copy_bytes_total", "Bytes copied between the device and host memory.",
                        {"direction"})),
      of_worker(seconds("kv_offload_copy_seconds",
                        "Seconds of a copy job between the device and host memory.", {"direction"})),
      of_worker(
          counter("kv_offload_copy_segments_total", "Contiguous runs of bytes in copy jobs.", {"direction"})),
      of_worker(gauge("kv_offload_copy_info",
                      "Always 1; the label names the copier and its path for each size.", {"copier"})),
      of_worker(counter("kv_offload_copy_failures_total", "Copy jobs that failed.", {"direction"})),
      of_worker(counter("kv_offload_copy_refused_batches_total",
                        "Batched copies that the CUDA driver refused; they were enqueued one by one.",
                        {"direction"})),
  };
}

}  // namespace

std::span<const MetricDefinition> metric_definitions() {
  static const std::vector<MetricDefinition> kDefinitions = make_definitions();
  return kDefinitions;
}

}  // namespace kv_offload
