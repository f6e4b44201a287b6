// SPDX-License-Identifier: Apache-2.0
// Replies of a Redis or Valkey server, and the meaning of its error replies.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace kv_offload::redis {

struct Reply {
  // kWrongLength is not part of the protocol: Connection::get() returns it for a value that does not fit.
  enum class Kind : std::uint8_t { kNil, kStatus, kInteger, kString, kArray, kError, kWrongLength };
  Kind kind = Kind::kNil;
  long long integer = 0;             // kInteger: the value; kArray: the number of elements
  std::string text;                  // kStatus, kString, kError
  std::vector<Reply> elements = {};  // kArray only
};

// Returns the failure for a reply whose kind or form does not fit its command.
Status unexpected_reply();
// Returns the status that an error reply stands for: kCorrupt for a value of another type, kNoSpace (without
// an errno: the server's own limit) when the server is full, otherwise kIo. The message never repeats more of
// the reply than its first word: some servers quote arguments, and the arguments of AUTH are credentials.
Status refusal(std::string_view text);
// True for errors that waiting does not fix at startup: credentials, permissions.
bool is_configuration_error(std::string_view text);
// True if the server responds and serves reads, but refuses writes and PING.
bool refuses_only_writes(std::string_view text);
// True for errors caused by the server's state and not by the command, its credentials or its database.
bool is_transient(std::string_view text);

}  // namespace kv_offload::redis
