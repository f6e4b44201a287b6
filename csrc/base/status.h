// SPDX-License-Identifier: Apache-2.0
// Status: the result of every operation that can fail at run time.
//
// A Status holds a kind, the errno that caused it (0 if none), the path or object concerned, and a sentence.
// An ok Status is cheap (no allocation). Run-time failures are returned as Status. Exceptions are for
// construction and caller mistakes (see InvalidArgument), and pass through pybind11 as Python exceptions.
// Thread bodies never throw.
#pragma once

#include <fmt/format.h>

#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

namespace kv_offload {

enum class StatusKind : unsigned char {
  kOk,
  kNotFound,     // the record or object is missing (not a fault)
  kCorrupt,      // the bytes exist and are proven wrong
  kIo,           // the device or file system refused (EIO, EACCES, ...)
  kNoSpace,      // ENOSPC, EDQUOT, or our own bound
  kTimeout,      // the operation did not end in time
  kExpired,      // the deadline passed before the start (not a fault of the tier)
  kCancelled,    // given up on purpose before it started
  kDevice,       // CUDA or another accelerator failed
  kUnavailable,  // out of service for now (circuit breaker, closing)
  kDeclined,     // worth less than the records it would replace (not a fault)
};
inline constexpr std::size_t kStatusKinds = static_cast<std::size_t>(StatusKind::kDeclined) + 1;

// Returns the word used in metric labels and messages, e.g. "no_space".
std::string_view to_string(StatusKind kind);

// Returns true if operations that end like this count as failed. Not failures: cancelled before it was tried
// (counted where it is cancelled); expired before it was tried (counted as a miss); refused by a disabled
// tier (counted as the failure that disabled it); declined as not worth its place; not found.
bool is_failure(StatusKind kind);

class [[nodiscard]] Status {
 public:
  Status() = default;
  static Status ok() { return {}; }
  static Status error(StatusKind kind, std::string message, int error_number = 0, std::string path = {});
  // Derives the kind from errno: ENOENT -> not_found; ENOSPC, EDQUOT -> no_space; ETIMEDOUT -> timeout; all
  // others -> io. `what` is the verb ("open").
  static Status from_errno(int error_number, std::string_view what, std::string path = {});

  bool is_ok() const { return kind_ == StatusKind::kOk; }
  explicit operator bool() const { return is_ok(); }
  StatusKind kind() const { return kind_; }
  int error_number() const { return error_number_; }
  const std::string& message() const { return message_; }
  const std::string& path() const { return path_; }
  // Returns e.g. "no_space: write: No space left on device (errno 28) [/root/ab/..]".
  std::string to_string() const;

 private:
  StatusKind kind_ = StatusKind::kOk;
  int error_number_ = 0;
  std::string message_;
  std::string path_;
};

// A caller's mistake or an impossible construction. The message names the given value, the possible values
// and what to change. ValueError in Python.
class InvalidArgument : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// A missing machine resource (shm, memory, directory). The message names requested and available amounts and
// the setting. RuntimeError in Python.
class ResourceError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

template <typename... Args>
[[noreturn]] void throw_invalid(fmt::format_string<Args...> format, Args&&... args) {
  throw InvalidArgument(fmt::format(format, std::forward<Args>(args)...));
}

template <typename... Args>
[[noreturn]] void throw_resource(fmt::format_string<Args...> format, Args&&... args) {
  throw ResourceError(fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace kv_offload
