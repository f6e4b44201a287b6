// SPDX-License-Identifier: Apache-2.0
#include "cache/cache_types.h"

namespace kv_offload {

std::string_view to_string(MissReason reason) {
  switch (reason) {
    case MissReason::kNotStored:
      return "not_stored";
    case MissReason::kEvicted:
      return "evicted";
    case MissReason::kRecomputeCheaper:
      return "recompute_cheaper";
    case MissReason::kDeadline:
      return "deadline";
    case MissReason::kCorrupt:
      return "corrupt";
    case MissReason::kIoError:
      return "io_error";
    case MissReason::kPressure:
      return "pressure";
    case MissReason::kDisabled:
      return "disabled";
    case MissReason::kIncomplete:
      return "incomplete";
    case MissReason::kHostLost:
      return "host_lost";
  }
  return "unknown";
}

std::string_view to_string(HintOutcome outcome) {
  switch (outcome) {
    case HintOutcome::kAccepted:
      return "accepted";
    case HintOutcome::kClipped:
      return "clipped";
    case HintOutcome::kRejected:
      return "rejected";
    case HintOutcome::kMissing:
      return "missing";
  }
  return "unknown";
}

}  // namespace kv_offload
