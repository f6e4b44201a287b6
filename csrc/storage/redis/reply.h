// What a Redis or Valkey server answers to a command, and what its refusals mean.
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
  long long integer = 0;             // kInteger; of kArray the number of elements
  std::string text;                  // kStatus, kString, kError
  std::vector<Reply> elements = {};  // kArray, of a command whose answer is one
};

// The failure of a command whose reply is of a kind or a form that the command cannot have.
Status unexpected_reply();
// The status that an error reply stands for: kCorrupt for a value of another type, kNoSpace (without an
// errno: the server's own bound) when it is full, else kIo. The message never repeats more of the reply than
// its first word and, of errors that cannot name what was sent, its text: some servers quote arguments, and
// those of AUTH are credentials.
Status refusal(std::string_view text);
// The kinds that a start does not get over by waiting: credentials, permissions.
bool is_setting(std::string_view text);
// The server answers and serves reads: what is refused is what writes, and PING.
bool is_only_of_writes(std::string_view text);
// Of the server's state, and not of what it was asked: no refusal of credentials or of a database.
bool is_passing(std::string_view text);

}  // namespace kv_offload::redis
