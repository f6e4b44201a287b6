// SPDX-License-Identifier: Apache-2.0
#include "base/status.h"

#include <cerrno>
#include <cstring>

namespace kv_offload {

std::string_view to_string(StatusKind kind) {
  // These words are metric label values: a change breaks dashboards and alerts.
  switch (kind) {
    case StatusKind::kOk:
      return "ok";
    case StatusKind::kNotFound:
      return "not_found";
    case StatusKind::kCorrupt:
      return "corrupt";
    case StatusKind::kIo:
      return "io";
    case StatusKind::kNoSpace:
      return "no_space";
    case StatusKind::kTimeout:
      return "timeout";
    case StatusKind::kExpired:
      return "expired";
    case StatusKind::kCancelled:
      return "cancelled";
    case StatusKind::kDevice:
      return "device";
    case StatusKind::kUnavailable:
      return "unavailable";
    case StatusKind::kDeclined:
      return "declined";
  }
  return "unknown";
}

bool is_failure(StatusKind kind) {
  switch (kind) {
    case StatusKind::kOk:
    case StatusKind::kNotFound:
    case StatusKind::kExpired:
    case StatusKind::kCancelled:
    case StatusKind::kUnavailable:
    case StatusKind::kDeclined:
      return false;
    default:
      return true;
  }
}

Status Status::error(StatusKind kind, std::string message, int error_number, std::string path) {
  Status status;
  status.kind_ = kind;
  status.error_number_ = error_number;
  status.message_ = std::move(message);
  status.path_ = std::move(path);
  return status;
}

Status Status::from_errno(int error_number, std::string_view what, std::string path) {
  StatusKind kind = StatusKind::kIo;
  switch (error_number) {
    case ENOENT:
      kind = StatusKind::kNotFound;
      break;
    case ENOSPC:
    case EDQUOT:
      kind = StatusKind::kNoSpace;
      break;
    case ETIMEDOUT:
      kind = StatusKind::kTimeout;
      break;
    default:
      break;
  }
  return error(kind, fmt::format("{}: {}", what, std::strerror(error_number)), error_number, std::move(path));
}

std::string Status::to_string() const {
  if (is_ok()) return "ok";
  std::string text = fmt::format("{}: {}", kv_offload::to_string(kind_), message_);
  if (error_number_ != 0) text += fmt::format(" (errno {})", error_number_);
  if (!path_.empty()) text += fmt::format(" [{}]", path_);
  return text;
}

}  // namespace kv_offload
