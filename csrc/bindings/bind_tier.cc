#include <charconv>

#include "bindings/bindings.h"
#include "bindings/tier_spec.h"
#include "cache/key_memory.h"

namespace kv_offload::bindings {
namespace {

std::string write_policy_text(const TierSlotOptions& slot) {
  switch (slot.write_policy) {
    case WritePolicy::kThrough:
      return "through";
    case WritePolicy::kOnEvict:
      return "on_evict";
    case WritePolicy::kNever:
      return "never";
    case WritePolicy::kReuse:
      return fmt::format("reuse:{}", slot.reuse_threshold);
  }
  return "unknown";
}

}  // namespace

TierSlotOptions write_policy_of(std::string_view write_policy) {
  constexpr std::string_view kReuse = "reuse:";
  if (write_policy.starts_with(kReuse)) {
    const std::string_view digits = write_policy.substr(kReuse.size());
    std::uint32_t threshold = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), threshold);
    if (error == std::errc() && end == digits.data() + digits.size() && threshold > 0 &&
        threshold <= KeyMemory::kMaxUses) {
      return {WritePolicy::kReuse, threshold};
    }
    throw_invalid("write_policy={:?}: write reuse:N with N from 1 to {}", write_policy, KeyMemory::kMaxUses);
  }
  return {one_of<WritePolicy>("write_policy", write_policy,
                              {{"through", WritePolicy::kThrough},
                               {"on_evict", WritePolicy::kOnEvict},
                               {"reuse:N", WritePolicy::kReuse},
                               {"never", WritePolicy::kNever}})};
}

void bind_tier(py::module_& module) {
  py::class_<TierSpec, std::shared_ptr<TierSpec>>(module, "TierSpec")
      .def_property(
          "write_policy", [](const TierSpec& self) { return write_policy_text(self.slot); },
          [](TierSpec& self, std::string_view text) { self.slot = write_policy_of(text); })
      .def_readwrite("encryption_key_files", &TierSpec::encryption_key_files);
  module.def(
      "sealing_key_ids",
      [](const std::vector<std::string>& paths) {
        std::vector<std::string> ids;
        const auto keys = SealingKeys::from_files(paths);
        for (std::size_t i = 0; i < keys->size(); ++i) ids.push_back(hex_of(keys->id(i)));
        return ids;
      },
      py::arg("paths"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace kv_offload::bindings
