// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <charconv>
#include <optional>

#include "bindings/bindings.h"
#include "bindings/tier_spec.h"
#include "cache/key_history.h"
#include "record/idle_cores.h"
#include "record/measure_codec.h"

namespace kv_offload::bindings {
namespace {

std::string write_policy_text(const TierSlotOptions& slot) {
  switch (slot.write_policy) {
    case WritePolicy::kWriteThrough:
      return "write_through";
    case WritePolicy::kOnEvict:
      return "on_evict";
    case WritePolicy::kReadOnly:
      return "read_only";
    case WritePolicy::kReuse:
      return fmt::format("reuse:{}", slot.reuse_threshold);
  }
  return "unknown";
}

// By shard and by group of a block: factor and row of the weights; the weights.
using GroupFactors = std::pair<std::vector<std::vector<std::pair<float, std::uint32_t>>>, std::string>;

// Throws InvalidArgument like BoundFactors.
std::shared_ptr<const BoundFactors> bound_factors_of(const GroupFactors& factors) {
  std::vector<std::vector<BoundFactors::OfGroup>> shards;
  for (const auto& block : factors.first) {
    std::vector<BoundFactors::OfGroup>& groups = shards.emplace_back();
    for (const auto& [factor, row] : block) {
      if (row > kMostWeightRows) throw_invalid("row {} of the weights: at most {}", row, kMostWeightRows);
      groups.push_back({factor, static_cast<std::uint16_t>(row)});
    }
  }
  return std::make_shared<const BoundFactors>(
      std::move(shards), std::vector<std::uint8_t>(factors.second.begin(), factors.second.end()));
}

constexpr std::string_view kLossy = "lossy:";

std::optional<double> error_of(std::string_view digits) {
  double error = 0;
  const auto [end, failed] = std::from_chars(digits.data(), digits.data() + digits.size(), error);
  const bool is_possible = failed == std::errc() && end == digits.data() + digits.size() &&
                           error >= LossyCodec::kLeastError && error <= LossyCodec::kMostError;
  return is_possible ? std::optional(error) : std::nullopt;
}

// Parses the bounds of "lossy:E" or "lossy:KEYS:VALUES". Throws InvalidArgument that states the possible
// values.
ErrorBounds bounds_of(std::string_view text) {
  const std::string_view digits = text.substr(kLossy.size());
  const std::size_t colon = digits.find(':');
  const auto keys = error_of(digits.substr(0, colon));
  const auto values = colon == std::string_view::npos ? keys : error_of(digits.substr(colon + 1));
  if (keys && values && *values >= *keys) return {*keys, *values};
  throw_invalid("compress={:?}: expected lossy:E or lossy:KEYS:VALUES, errors from {} to {}, VALUES >= KEYS",
                text, double{LossyCodec::kLeastError}, double{LossyCodec::kMostError});
}

std::string text_of(const ErrorBounds& bounds) {
  return bounds.keys == bounds.values ? fmt::format("{}{}", kLossy, bounds.keys)
                                      : fmt::format("{}{}:{}", kLossy, bounds.keys, bounds.values);
}

// Returns torch's name of the type.
const char* name_of(Element element) {
  switch (element) {
    case Element::kBytes:
      return "bytes";
    case Element::kBf16:
      return "bfloat16";
    case Element::kFp16:
      return "float16";
    case Element::kE4m3:
      return "float8_e4m3fn";
    case Element::kE5m2:
      return "float8_e5m2";
  }
  return "unknown";
}

}  // namespace

RecordFormOptions TierSpec::form() const {
  RecordFormOptions form{
      .keys = keys_from(encryption_key_files, tenant_key_files),
      .bounds = {std::max(accepted.keys, bounds.keys), std::max(accepted.values, bounds.values)},
      .runs = runs};
  if (compress == Compress::kNone) return form;
  CompressionOptions options{.compress = compress,
                             .bounds = bounds,
                             .factors = factors,
                             .exact = exact_groups,
                             .elements = elements};
  // Called by I/O threads, one at a time: CompressionChoice serialises the calls.
  struct Cores {
    SteadyClock clock;
    IdleCores idle{clock};
  };
  options.idle_cores = [cores = std::make_shared<Cores>()] { return cores->idle.now(); };
  form.compression = std::make_shared<CompressionChoice>(options);
  return form;
}

std::vector<std::unique_ptr<Tier>> open_all(const std::vector<std::shared_ptr<TierSpec>>& tiers,
                                            const std::vector<EpochChoice>& epochs) {
  std::vector<std::unique_ptr<Tier>> opened;
  for (std::size_t i = 0; i < tiers.size(); ++i) {
    tiers[i]->epoch = epochs.empty() ? EpochChoice{} : epochs[i];
    opened.push_back(tiers[i]->open());
  }
  return opened;
}

TierSlotOptions write_policy_of(std::string_view write_policy) {
  constexpr std::string_view kReuse = "reuse:";
  if (write_policy.starts_with(kReuse)) {
    const std::string_view digits = write_policy.substr(kReuse.size());
    std::uint32_t threshold = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), threshold);
    if (error == std::errc() && end == digits.data() + digits.size() && threshold > 0 &&
        threshold <= KeyHistory::kMaxUses) {
      return {WritePolicy::kReuse, threshold};
    }
    throw_invalid("write_policy={:?}: write reuse:N with N from 1 to {}", write_policy, KeyHistory::kMaxUses);
  }
  return {one_of<WritePolicy>("write_policy", write_policy,
                              {{"write_through", WritePolicy::kWriteThrough},
                               {"on_evict", WritePolicy::kOnEvict},
                               {"reuse:N", WritePolicy::kReuse},
                               {"read_only", WritePolicy::kReadOnly}})};
}

void bind_tier(py::module_& module) {
  module.attr("tier_interface") = tier_interface();
  py::class_<TierSpec, std::shared_ptr<TierSpec>>(module, "TierSpec")
      .def_property(
          "write_policy", [](const TierSpec& self) { return write_policy_text(self.slot); },
          [](TierSpec& self, std::string_view text) { self.slot = write_policy_of(text); })
      .def_readwrite("encryption_key_files", &TierSpec::encryption_key_files)
      .def_readwrite("tenant_key_files", &TierSpec::tenant_key_files)
      .def_readwrite("memory_outlives", &TierSpec::memory_outlives)
      .def_readwrite("watch_removals", &TierSpec::watch_removals)
      .def_property(
          "compress",
          [](const TierSpec& self) {
            return self.compress == Compress::kLossy ? text_of(self.bounds)
                                                     : std::string(to_string(self.compress));
          },
          [](TierSpec& self, std::string_view text) {
            // Parses everything before it changes a member: a text that is refused changes nothing.
            const bool loses = text.starts_with(kLossy);
            const ErrorBounds bounds = loses ? bounds_of(text) : ErrorBounds{};
            self.compress =
                loses
                    ? Compress::kLossy
                    : one_of<Compress>(
                          "compress", text,
                          {{"auto", Compress::kAuto}, {"none", Compress::kNone}, {"zstd", Compress::kZstd}});
            self.bounds = bounds;
          })
      .def_property(
          "accepted_errors",
          [](const TierSpec& self) { return std::pair(self.accepted.keys, self.accepted.values); },
          [](TierSpec& self, const std::pair<double, double>& errors) {
            self.accepted = {errors.first, errors.second};
          })
      .def_property(
          "kv_runs",
          [](const TierSpec& self) {
            std::vector<std::pair<std::uint32_t, std::uint32_t>> found;
            for (const KvRuns& runs : self.runs) found.emplace_back(runs.key_bytes, runs.value_bytes);
            return found;
          },
          [](TierSpec& self, const std::vector<std::pair<std::uint32_t, std::uint32_t>>& found) {
            self.runs.clear();
            for (const auto& [keys, values] : found) self.runs.push_back({keys, values});
          })
      .def(
          "set_bound_factors",
          [](TierSpec& self, const std::vector<std::optional<GroupFactors>>& by_group) {
            std::vector<std::shared_ptr<const BoundFactors>> made;
            for (const std::optional<GroupFactors>& factors : by_group)
              made.push_back(factors ? bound_factors_of(*factors) : nullptr);
            self.factors = std::move(made);
          },
          py::arg("factors"))
      .def_readwrite("exact_groups", &TierSpec::exact_groups)
      .def_property(
          "elements",
          [](const TierSpec& self) {
            std::vector<std::string> names;
            for (const Element element : self.elements) names.emplace_back(name_of(element));
            return names;
          },
          [](TierSpec& self, const std::vector<std::string>& names) {
            std::vector<Element> elements;
            for (const std::string& name : names) {
              elements.push_back(one_of<Element>("elements", name,
                                                 {{name_of(Element::kBytes), Element::kBytes},
                                                  {name_of(Element::kBf16), Element::kBf16},
                                                  {name_of(Element::kFp16), Element::kFp16},
                                                  {name_of(Element::kE4m3), Element::kE4m3},
                                                  {name_of(Element::kE5m2), Element::kE5m2}}));
            }
            self.elements = std::move(elements);
          });
  module.def(
      "measure_codec",
      [] {
        const CodecSpeed speed = measure_codec();
        return std::pair(speed.encode, speed.decode);
      },
      py::call_guard<py::gil_scoped_release>());
  module.def(
      "codec_advice",
      [](double encode, double decode, double read, double write) {
        return advice({encode, decode}, read, write);
      },
      py::kw_only(), py::arg("encode_bytes_per_second"), py::arg("decode_bytes_per_second"),
      py::arg("read_bytes_per_second"), py::arg("write_bytes_per_second"));
  module.def(
      "encryption_key_ids",
      [](const std::vector<std::string>& paths) {
        std::vector<std::string> ids;
        const auto keys = EncryptionKeys::from_files(paths);
        for (std::size_t i = 0; i < keys->size(); ++i) ids.push_back(hex_of(keys->id(i)));
        return ids;
      },
      py::arg("paths"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace kv_offload::bindings
