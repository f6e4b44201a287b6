// SPDX-License-Identifier: Apache-2.0
#include "backends/redis/reply.h"

#include <algorithm>
#include <array>

namespace kv_offload::redis {
namespace {

struct Meaning {
  std::string_view word;
  StatusKind kind;
  bool setting;
  std::string_view sentence;
};

constexpr std::array kMeanings{
    Meaning{"OOM", StatusKind::kNoSpace, false,
            "the server is full (maxmemory) and evicts nothing (maxmemory-policy noeviction)"},
    Meaning{"WRONGTYPE", StatusKind::kCorrupt, false, "the key holds a value that is not a record"},
    Meaning{"READONLY", StatusKind::kIo, false,
            "the server is a read-only replica: give the address of its primary, or write_policy read_only. "
            "After a failover behind one address, the next operation opens a new connection"},
    Meaning{"LOADING", StatusKind::kIo, false, "the server is still loading its data"},
    Meaning{"MASTERDOWN", StatusKind::kIo, false, "the server is a replica that has lost its primary"},
    Meaning{"MISCONF", StatusKind::kIo, false,
            "the server cannot save its data and therefore refuses writes"},
    Meaning{"BUSY", StatusKind::kIo, false, "the server is busy with a script"},
    Meaning{"NOAUTH", StatusKind::kIo, true,
            "the server asks for a password: set password_env or password_file"},
    Meaning{"WRONGPASS", StatusKind::kIo, true, "the server refuses the user name or the password"},
    Meaning{
        "NOPERM", StatusKind::kIo, true,
        "the user lacks a permission: +ping +select +info +get +set +exists +expire +del +getrange +strlen "
        "+watch +unwatch +multi +exec on the keys of the prefix; in a cluster also +cluster|slots +asking"},
    Meaning{"MOVED", StatusKind::kIo, false, "another server has the key"},
    Meaning{"ASK", StatusKind::kIo, false, "the key is moving to another server"},
    Meaning{"CLUSTERDOWN", StatusKind::kIo, false,
            "the cluster is down: a slot has no node, or this node cannot reach a majority of the others "
            "(cluster-require-full-coverage no keeps the other slots in service)"},
    Meaning{"TRYAGAIN", StatusKind::kIo, false, "the key's slot is being moved"},
};

const Meaning* meaning_of(std::string_view text) {
  const std::string_view word = text.substr(0, text.find(' '));
  const auto found =
      std::find_if(kMeanings.begin(), kMeanings.end(), [&](const Meaning& one) { return one.word == word; });
  return found == kMeanings.end() ? nullptr : &*found;
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
  if (const Meaning* meaning = meaning_of(text)) {
    return Status::error(meaning->kind, std::string(meaning->sentence));
  }
  return Status::error(StatusKind::kIo, fmt::format("the server refused the command ({})", code_of(text)));
}

bool is_transient(std::string_view text) {
  return text.starts_with(kTooManyClients) || text.starts_with("LOADING ") || text.starts_with("BUSY ") ||
         text.starts_with("MASTERDOWN ");
}

bool refuses_only_writes(std::string_view text) { return text.starts_with("MISCONF "); }

bool is_configuration_error(std::string_view text) {
  const Meaning* meaning = meaning_of(text);
  return meaning != nullptr && meaning->setting;
}

}  // namespace kv_offload::redis
