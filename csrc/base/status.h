// Status: the one result of every operation that can fail at run time.
//
// A Status is a kind, the errno behind it (0 when there is none), the path or
// object it happened on and a sentence. It is cheap when ok (no allocation).
// Run-time failures travel as Status; exceptions are for construction and for
// mistakes of the caller (see InvalidArgument), and cross pybind11 as Python
// exceptions. Thread bodies never throw.
#pragma once

#include <fmt/format.h>

#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

namespace kv_offload {

enum class StatusKind : unsigned char {
  kOk,
  kNotFound,     // the record or object is not there (not a fault)
  kCorrupt,      // bytes are there and proven wrong
  kIo,           // the device or file system refused (EIO, EACCES, ...)
  kNoSpace,      // ENOSPC, EDQUOT, or our own bound
  kTimeout,      // it did not end in time
  kExpired,      // its deadline passed before it was begun (not a fault of what it was for)
  kCancelled,    // given up on purpose before it started
  kDevice,       // CUDA or another accelerator failed
  kUnavailable,  // switched off for now (breaker, closing)
  kDeclined,     // not worth what would have to go for it (no fault)
};

// The word used in metrics labels and messages, e.g. "no_space".
std::string_view to_string(StatusKind kind);

class [[nodiscard]] Status {
 public:
  Status() = default;
  static Status ok() { return {}; }
  static Status error(StatusKind kind, std::string message, int error_number = 0, std::string path = {});
  // Kind from errno: ENOENT -> not_found; ENOSPC, EDQUOT -> no_space;
  // ETIMEDOUT -> timeout; all else -> io. `what` is the verb ("open").
  static Status from_errno(int error_number, std::string_view what, std::string path = {});

  bool is_ok() const { return kind_ == StatusKind::kOk; }
  explicit operator bool() const { return is_ok(); }
  StatusKind kind() const { return kind_; }
  int error_number() const { return error_number_; }
  const std::string& message() const { return message_; }
  const std::string& path() const { return path_; }
  // "no_space: write: No space left on device (errno 28) [/root/ab/..]"
  std::string to_string() const;

 private:
  StatusKind kind_ = StatusKind::kOk;
  int error_number_ = 0;
  std::string message_;
  std::string path_;
};

// A caller's mistake or an impossible construction. The message names what was
// given, what is possible and what to change. ValueError in Python.
class InvalidArgument : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// A resource of the machine that is not there (shm, memory, directory). The
// message names asked, available and the setting. RuntimeError in Python.
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
