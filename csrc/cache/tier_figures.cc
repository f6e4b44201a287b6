// SPDX-License-Identifier: Apache-2.0
#include "cache/tier_figures.h"

namespace kv_offload {

void TierFigures::publish(std::string_view tier, const TierStats& stats, Metrics& metrics) {
  metrics.set("kv_offload_tier_bytes", {tier}, static_cast<double>(stats.bytes));
  metrics.set("kv_offload_tier_capacity_bytes", {tier}, static_cast<double>(stats.capacity_bytes));
  metrics.set("kv_offload_tier_chunks", {tier}, static_cast<double>(stats.chunks));
  const auto queue = [&](std::string_view op, std::uint32_t depth, double oldest) {
    metrics.set("kv_offload_queue_depth", {tier, op}, depth);
    metrics.set("kv_offload_oldest_op_seconds", {tier, op}, oldest);
  };
  queue("read", stats.queued_reads, stats.oldest_read_seconds);
  queue("write", stats.queued_writes, stats.oldest_write_seconds);
  const auto count = [&](std::string_view metric, Metrics::Labels labels, std::uint64_t now,
                         std::uint64_t before) {
    if (now > before) metrics.add(metric, labels, static_cast<double>(now - before));
  };
  const TierStats& before = published_;
  count("kv_offload_evicted_bytes_total", {tier}, stats.evicted_bytes, before.evicted_bytes);
  count("kv_offload_read_record_bytes_total", {tier}, stats.read_record_bytes, before.read_record_bytes);
  count("kv_offload_write_record_bytes_total", {tier}, stats.written_record_bytes,
        before.written_record_bytes);
  count("kv_offload_io_ops_total", {tier, "direct"}, stats.direct_ops, before.direct_ops);
  count("kv_offload_io_ops_total", {tier, "buffered"}, stats.buffered_ops, before.buffered_ops);
  count("kv_offload_tier_rebuilds_total", {tier}, stats.rebuilds, before.rebuilds);
  count("kv_offload_tier_lost_bytes_total", {tier}, stats.lost_bytes, before.lost_bytes);
  count("kv_offload_breaker_trips_total", {tier}, stats.breaker_trips, before.breaker_trips);
  count("kv_offload_failures_total", {tier, "read", "timeout"}, stats.read_timeouts, before.read_timeouts);
  count("kv_offload_failures_total", {tier, "write", "timeout"}, stats.write_timeouts, before.write_timeouts);
  publish_codec(tier, stats, metrics);
  published_ = stats;
}

void TierFigures::publish(std::string_view tier, const std::vector<TierPart>& parts, Metrics& metrics) {
  published_parts_.resize(parts.size());
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const TierPart& part = parts[i];
    const TierPart& before = published_parts_[i];
    const std::string host = std::to_string(i);
    const auto set = [&](std::string_view metric, double value) { metrics.set(metric, {host, tier}, value); };
    set("kv_offload_host_tier_bytes", static_cast<double>(part.stats.bytes));
    set("kv_offload_host_tier_capacity_bytes", static_cast<double>(part.stats.capacity_bytes));
    set("kv_offload_host_tier_chunks", static_cast<double>(part.stats.chunks));
    if (part.read_bytes_per_second > 0)
      set("kv_offload_host_read_bytes_per_second", part.read_bytes_per_second);
    metrics.set("kv_offload_host_tier_usable", {host, tier, "read"}, part.stats.readable ? 1 : 0);
    metrics.set("kv_offload_host_tier_usable", {host, tier, "write"}, part.stats.writable ? 1 : 0);
    metrics.set("kv_offload_host_tier_usable", {host, tier, "epoch"}, part.epoch_differs ? 0 : 1);
    const auto count = [&](std::string_view metric, Metrics::Labels labels, std::uint64_t now,
                           std::uint64_t then) {
      if (now > then) metrics.add(metric, labels, static_cast<double>(now - then));
    };
    count("kv_offload_host_slowest_reads_total", {host, tier}, part.slowest_reads, before.slowest_reads);
    count("kv_offload_host_breaker_trips_total", {host, tier}, part.stats.breaker_trips,
          before.stats.breaker_trips);
    const std::string_view failures = "kv_offload_host_failures_total";
    for (std::size_t k = 0; k < kStatusKinds; ++k) {
      const auto kind = static_cast<StatusKind>(k);
      // A store that refuses removals (no permission) declines them.
      if (is_failure(kind) || kind == StatusKind::kDeclined)
        count(failures, {host, tier, "remove", to_string(kind)}, part.removals[k], before.removals[k]);
      if (!is_failure(kind)) continue;
      count(failures, {host, tier, "read", to_string(kind)}, part.reads[k], before.reads[k]);
      count(failures, {host, tier, "write", to_string(kind)}, part.writes[k], before.writes[k]);
    }
    count(failures, {host, tier, "read", "timeout"}, part.stats.read_timeouts, before.stats.read_timeouts);
    count(failures, {host, tier, "write", "timeout"}, part.stats.write_timeouts, before.stats.write_timeouts);
  }
  published_parts_ = parts;
}

void TierFigures::publish_codec(std::string_view tier, const TierStats& stats, Metrics& metrics) const {
  if (!stats.may_encode) return;
  const TierStats& before = published_;
  metrics.set("kv_offload_codec_on", {tier}, stats.encodes ? 1 : 0);
  if (stats.encoded_stored_bytes > 0) {
    metrics.set(
        "kv_offload_codec_ratio", {tier},
        static_cast<double>(stats.encoded_raw_bytes) / static_cast<double>(stats.encoded_stored_bytes));
  }
  const auto lost = [&](std::string_view part, double largest) {
    if (largest > 0) metrics.set("kv_offload_codec_largest_error", {tier, part}, largest);
  };
  lost("keys", stats.largest_key_error);
  lost("values", stats.largest_value_error);
  const auto count = [&](std::string_view metric, Metrics::Labels labels, double now, double then) {
    if (now > then) metrics.add(metric, labels, now - then);
  };
  const auto saved = [](const TierStats& of) {
    return static_cast<double>(of.encoded_raw_bytes - of.encoded_stored_bytes);
  };
  count("kv_offload_codec_saved_bytes_total", {tier}, saved(stats), saved(before));
  count("kv_offload_codec_seconds_total", {tier, "write"}, stats.encode_seconds, before.encode_seconds);
  count("kv_offload_codec_seconds_total", {tier, "read"}, stats.decode_seconds, before.decode_seconds);
}

}  // namespace kv_offload
