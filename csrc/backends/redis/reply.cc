// SPDX-License-Identifier: Apache-2.0
#include "backends/redis/reply.h"

#include <algorithm>
#include <array>

namespace kv_offload::redis {
namespace {

struct ErrorMapping {
  std::string_view word;
  StatusKind kind;
  bool setting;
  std::string_view sentence;
};

constexpr std::array kErrorMappings{
    ErrorMapping{"OOM", StatusKind::kNoSpace, false,
                 "the server is full (maxmemory) and evicts nothing (maxmemory-policy noeviction)"},
    ErrorMapping{"WRONGTYPE", StatusKind::kCorrupt, false, "the key holds a value that is not a record"},
    ErrorMapping{
        "READONLY", StatusKind::kIo, false,
        "the server is a read-only replica: give the address of its primary, or write_policy read_only. "
        "After a failover behind one address, the next operation opens a new connection"},
    ErrorMapping{"LOADING", StatusKind::kIo, false, "the server is still loading its data"},
    ErrorMapping{"MASTERDOWN", StatusKind::kIo, false, "the server is a replica that has lost its primary"},
    ErrorMapping{"MISCONF", StatusKind::kIo, false,
                 "the server cannot save its data and therefore refuses writes"},
    ErrorMapping{"BUSY", StatusKind::kIo, false, "the server is busy with a script"},
    ErrorMapping{"NOAUTH", StatusKind::kIo, true,
                 "the server asks for a password: set password_env or password_file"},
    ErrorMapping{"WRONGPASS", StatusKind::kIo, true, "the server refuses the user name or the password"},
    ErrorMapping{
        "NOPERM", StatusKind::kIo, true,
        "the user lacks a permission: +ping +select +info +get +set +exists +expire +del +getrange +strlen "
        "+watch +unwatch +multi +exec on the keys of the prefix; in a cluster also +cluster|slots +asking; "
        "for KV events also +client|id +client|tracking +subscribe &__redis__:invalidate"},
    ErrorMapping{"MOVED", StatusKind::kIo, false, "another server has the key"},
    ErrorMapping{"ASK", StatusKind::kIo, false, "the key is moving to another server"},
    ErrorMapping{
        "CLUSTERDOWN", StatusKind::kIo, false,
        "the cluster is down: a slot has no node, or this node cannot reach a majority of the others "
        "(cluster-require-full-coverage no keeps the other slots in service)"},
    ErrorMapping{"TRYAGAIN", StatusKind::kIo, false, "the key's slot is being moved"},
};

const ErrorMapping* find_mapping(std::string_view text) {
  const std::string_view word = text.substr(0, text.find(' '));
  const auto found = std::find_if(kErrorMappings.begin(), kErrorMappings.end(),
                                  [&](const ErrorMapping& one) { return one.word == word; });
  return found == kErrorMappings.end() ? nullptr : &*found;
}

constexpr std::string_view kTooManyClients = "ERR max number of clients";

// Returns the error code, such as "WRONGTYPE", or "no code" if the first word does not look like one.
std::string_view code_of(std::string_view text) {
  const std::string_view word = text.substr(0, text.find(' '));
  const bool code =
      !word.empty() && word.size() <= 20 && word.find_first_not_of("ABCDEFGHIJKLMNOPQRSTUVWXYZ") == word.npos;
  return code ? word : "no code";
}

}  // namespace

Status unexpected_reply() { return Status::error(StatusKind::kIo, "unexpected reply to this command"); }

Status refusal(std::string_view text) {
  if (text.starts_with(kTooManyClients)) {
    return Status::error(StatusKind::kIo, "the server has reached its client limit (maxclients)");
  }
  if (const ErrorMapping* mapping = find_mapping(text)) {
    return Status::error(mapping->kind, std::string(mapping->sentence));
  }
  return Status::error(StatusKind::kIo, fmt::format("the server refused the command ({})", code_of(text)));
}

bool is_transient(std::string_view text) {
  return text.starts_with(kTooManyClients) || text.starts_with("LOADING ") || text.starts_with("BUSY ") ||
         text.starts_with("MASTERDOWN ");
}

bool refuses_only_writes(std::string_view text) { return text.starts_with("MISCONF "); }

bool is_configuration_error(std::string_view text) {
  const ErrorMapping* mapping = find_mapping(text);
  return mapping != nullptr && mapping->setting;
}

}  // namespace kv_offload::redis
