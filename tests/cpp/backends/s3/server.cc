// SPDX-License-Identifier: Apache-2.0
#include "backends/s3/server.h"

#include <fmt/format.h>
#include <openssl/hmac.h>
#include <openssl/sha.h>

#include <algorithm>
#include <optional>

#include "backends/s3/list.h"

namespace kv_offload::testing {
namespace {

constexpr std::string_view kAccessKey = "AKIATEST", kRegion = "eu-test-1", kBucket = "bucket";

std::string hex(std::string_view bytes) {
  std::string text;
  for (const char byte : bytes) text += fmt::format("{:02x}", static_cast<unsigned char>(byte));
  return text;
}
std::string sha256(std::string_view text) {
  unsigned char sum[SHA256_DIGEST_LENGTH];
  SHA256(reinterpret_cast<const unsigned char*>(text.data()), text.size(), sum);
  return {reinterpret_cast<char*>(sum), sizeof sum};
}
std::string hmac(std::string_view key, std::string_view text) {
  unsigned char sum[EVP_MAX_MD_SIZE];
  unsigned length = 0;
  HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()),
       reinterpret_cast<const unsigned char*>(text.data()), text.size(), sum, &length);
  return {reinterpret_cast<char*>(sum), length};
}

// Parses "AWS4-HMAC-SHA256 Credential=..., SignedHeaders=..., Signature=...".
std::string part_of(const std::string& authorization, const std::string& name) {
  const std::size_t at = authorization.find(name + "=");
  if (at == std::string::npos) return {};
  const std::size_t from = at + name.size() + 1;
  return authorization.substr(from, authorization.find(',', from) - from);
}

bool is_signed(const S3Message& message) {
  const auto value = [&](const std::string& name) {
    const auto found = message.headers.find(name);
    return found == message.headers.end() ? std::string() : found->second;
  };
  const std::string authorization = value("authorization"), when = value("x-amz-date");
  const std::string names = part_of(authorization, "SignedHeaders"), sum = value("x-amz-content-sha256");
  const std::string scope = fmt::format("{}/{}/s3/aws4_request", when.substr(0, 8), kRegion);
  if (part_of(authorization, "Credential") != fmt::format("{}/{}", kAccessKey, scope)) return false;
  const std::size_t path_end = std::min(message.path.find('?'), message.path.size());
  const std::string query = message.path.substr(std::min(path_end + 1, message.path.size()));
  std::string canonical =
      fmt::format("{}\n{}\n{}\n", message.method, message.path.substr(0, path_end), query);
  std::set<std::string> seen;
  for (std::size_t at = 0; at <= names.size();) {
    const std::size_t end = std::min(names.find(';', at), names.size());
    const std::string name = names.substr(at, end - at);
    if (!message.headers.contains(name)) return false;  // signed, but not sent
    seen.insert(name);
    canonical += name + ":" + value(name) + "\n";
    at = end + 1;
  }
  for (const auto& [name, unused] : message.headers) {  // headers that S3 requires to be signed
    if ((name == "host" || name.starts_with("x-amz-")) && !seen.contains(name)) return false;
  }
  canonical += fmt::format("\n{}\n{}", names, sum);
  if (sum != hex(sha256(message.body))) return false;  // required without TLS
  const std::string text = fmt::format("AWS4-HMAC-SHA256\n{}\n{}\n{}", when, scope, hex(sha256(canonical)));
  std::string key = hmac(std::string("AWS4") + S3Server::kSecret, when.substr(0, 8));
  for (const std::string_view step : {kRegion, std::string_view("s3"), std::string_view("aws4_request")}) {
    key = hmac(key, step);
  }
  return part_of(authorization, "Signature") == hex(hmac(key, text));
}

std::string reply(std::string_view status, std::string_view body, std::string_view more = "",
                  bool head = false) {
  return fmt::format("HTTP/1.1 {}\r\nContent-Length: {}\r\n{}\r\n{}", status, body.size(), more,
                     head ? "" : body);
}
std::string error(std::string_view status, std::string_view code, bool head = false) {
  return reply(status, fmt::format("<?xml version=\"1.0\"?><Error><Code>{}</Code></Error>", code), "", head);
}

std::string decoded(std::string_view text) {
  std::string plain;
  for (std::size_t at = 0; at < text.size(); ++at) {
    if (text[at] != '%') {
      plain.push_back(text[at]);
      continue;
    }
    plain.push_back(static_cast<char>(std::stoi(std::string(text.substr(at + 1, 2)), nullptr, 16)));
    at += 2;
  }
  return plain;
}
std::string escaped(std::string_view text) {
  std::string xml;
  for (const char c : text) xml += c == '&' ? "&amp;" : c == '<' ? "&lt;" : std::string(1, c);
  return xml;
}

std::string lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return std::tolower(c); });
  return text;
}

std::optional<S3Message> next_message(int fd, std::string* buffer) {
  std::size_t end = 0;
  while ((end = buffer->find("\r\n\r\n")) == buffer->npos) {
    if (!receive(fd, buffer)) return std::nullopt;
  }
  S3Message message;
  const std::string head = buffer->substr(0, end + 2);
  buffer->erase(0, end + 4);
  const std::size_t space = head.find(' ');
  message.method = head.substr(0, space);
  message.path = head.substr(space + 1, head.find(' ', space + 1) - space - 1);
  for (std::size_t at = head.find("\r\n") + 2; at < head.size();) {
    const std::size_t line_end = head.find("\r\n", at), colon = head.find(':', at);
    std::string value = head.substr(colon + 1, line_end - colon - 1);
    value.erase(0, value.find_first_not_of(' '));
    message.headers[lower(head.substr(at, colon - at))] = value;
    at = line_end + 2;
  }
  // A client that waits for "100 Continue" gets no answer before the body arrived.
  const auto length = message.headers.find("content-length");
  const std::size_t bytes = length == message.headers.end() ? 0 : std::stoull(length->second);
  while (buffer->size() < bytes) {
    if (!receive(fd, buffer)) return std::nullopt;
  }
  message.body = buffer->substr(0, bytes);
  buffer->erase(0, bytes);
  return message;
}

}  // namespace

S3Server::S3Server() { start(); }

void S3Server::start() {
  acceptor_ =
      std::make_unique<Acceptor>(loopback_listener(&port_), [this](Acceptor&, int client) { serve(client); });
}

void S3Server::kill() {
  faults.release();
  acceptor_.reset();
  const std::lock_guard lock(mutex_);
  objects_.clear();
}

s3::Bucket S3Server::address() const {
  s3::Bucket bucket;
  bucket.endpoint = fmt::format("http://127.0.0.1:{}", port_);
  bucket.region = kRegion;
  bucket.name = kBucket;
  bucket.path_style = true;
  bucket.access_key = kAccessKey;
  bucket.secret_key = kSecret;
  return bucket;
}

void S3Server::serve(int client) {
  std::string buffer;
  for (;;) {
    const std::optional<S3Message> message = next_message(client, &buffer);
    if (!message || !answer_one(client, *message)) return;
  }
}

bool S3Server::answer_one(int client, const S3Message& message) {
  {
    const std::lock_guard lock(mutex_);
    last_[verb_of(message)] = message;
  }
  const Fate fate = faults.meet(verb_of(message));
  if (fate.lost) return false;
  if (!fate.instead.empty()) return send_all(client, fate.instead);
  bool more = true;
  std::string text;
  {
    const std::lock_guard lock(mutex_);
    text = answer_to(message, &more);
  }
  return send_answer(client, text, fate) && more;
}

std::string S3Server::answer_to(const S3Message& message, bool* more) {
  Lie& lie = lies_[verb_of(message)];
  std::string text = lie.times == 0 || lie.done ? act(message) : std::string();
  if (lie.times == 0) return text;
  --lie.times;
  *more = false;
  return lie.text;
}

std::string S3Server::act(const S3Message& message) {
  const bool head = message.method == "HEAD";
  if (!is_signed(message)) {
    ++wrong_signatures_;
    return error("403 Forbidden", "SignatureDoesNotMatch", head);
  }
  const std::string start = fmt::format("/{}/", kBucket);
  if (!message.path.starts_with(start)) return error("404 Not Found", "NoSuchBucket", head);
  const std::string key = message.path.substr(start.size());  // with its query: a test may store that object
  if (key.starts_with("?list-type=") || key.find("&list-type=2") != key.npos) return list(key);
  const std::string version = keeps_versions_ ? "x-amz-version-id: 3sL4kqtJlcpXroDTDmJ\r\n" : "";
  const auto found = objects_.find(key);
  const bool there = found != objects_.end();
  const auto etag = [](const std::string& value) { return "\"" + hex(sha256(value)).substr(0, 32) + "\""; };
  if (!ignores_conditions_) {
    const auto unless = message.headers.find("if-none-match"), only = message.headers.find("if-match");
    if ((unless != message.headers.end() && there) ||
        (only != message.headers.end() && (!there || etag(found->second) != only->second))) {
      return error("412 Precondition Failed", "PreconditionFailed");
    }
  }
  if (message.method == "PUT") {
    objects_[key] = message.body;
    return reply("200 OK", "", "ETag: " + etag(message.body) + "\r\n");
  }
  if (message.method == "DELETE") {
    objects_.erase(key);
    return "HTTP/1.1 204 No Content\r\n" + version + "\r\n";
  }
  if (!there) return error("404 Not Found", "NoSuchKey", head);
  return reply("200 OK", found->second, "ETag: " + etag(found->second) + "\r\n" + version, head);
}

// Lists in order, starting after the token, which is the last name of the previous page.
std::string S3Server::list(std::string_view query) const {
  const auto given = [&](std::string_view name) {
    const std::size_t at = query.find(fmt::format("{}=", name));
    if (at == query.npos) return std::string();
    const std::size_t from = at + name.size() + 1;
    return decoded(query.substr(from, std::min(query.find('&', from), query.size()) - from));
  };
  const std::string prefix = given("prefix"), token = given("continuation-token");
  const std::size_t most = std::stoul(given("max-keys"));
  std::string body = "<?xml version=\"1.0\"?>\n<ListBucketResult xmlns=\"http://s3\">";
  if (!lists_plainly_) body += "<EncodingType>url</EncodingType>";
  std::size_t count = 0;
  std::string last;
  bool truncated = false;
  for (auto at = token.empty() ? objects_.lower_bound(prefix) : objects_.upper_bound(token);
       at != objects_.end() && at->first.starts_with(prefix); ++at) {
    truncated = count == most;
    if (truncated) break;
    ++count;
    last = at->first;
    body += fmt::format(
        "<Contents><Key>{}</Key><LastModified>2026-11-23T10:02:03.000Z</LastModified><ETag>&quot;x&quot;</"
        "ETag>"
        "<Size>{}</Size></Contents>",
        lists_plainly_ ? escaped(last) : s3::percent_encoded(last), at->second.size());
  }
  body += fmt::format("<IsTruncated>{}</IsTruncated>", truncated);
  if (truncated) body += fmt::format("<NextContinuationToken>{}</NextContinuationToken>", escaped(last));
  return reply("200 OK", body + "</ListBucketResult>");
}

S3Server::Verb S3Server::verb_of(const S3Message& message) {
  if (message.path.ends_with("/epoch")) return Verb::kEpoch;
  if (message.path.ends_with("/conditions")) return Verb::kOther;
  if (message.path.find("list-type=2") != message.path.npos) return Verb::kList;
  if (message.method == "GET") return Verb::kRead;
  if (message.method == "PUT") return Verb::kWrite;
  if (message.method == "HEAD") return Verb::kLocate;
  return message.method == "DELETE" ? Verb::kRemove : Verb::kOther;
}

std::vector<std::string> S3Server::keys() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::string> names;
  for (const auto& [key, unused] : objects_) {
    if (!key.ends_with("/epoch") && !key.ends_with("/conditions")) names.push_back(key);
  }
  return names;
}
std::string S3Server::get(const std::string& key) const {
  const std::lock_guard lock(mutex_);
  const auto found = objects_.find(key);
  return found == objects_.end() ? std::string() : found->second;
}
void S3Server::set(const std::string& key, const std::string& value) {
  const std::lock_guard lock(mutex_);
  objects_[key] = value;
}
bool S3Server::remove(const std::string& key) {
  const std::lock_guard lock(mutex_);
  return objects_.erase(key) == 1;
}
bool S3Server::has(const std::string& key) const {
  const std::lock_guard lock(mutex_);
  return objects_.contains(key);
}
void S3Server::answer(Verb verb, std::string text, int times) {
  const std::lock_guard lock(mutex_);
  lies_[verb] = {std::move(text), times, false};
}
void S3Server::answer_after(Verb verb, std::string text, int times) {
  const std::lock_guard lock(mutex_);
  lies_[verb] = {std::move(text), times, true};
}
void S3Server::ignore_conditions(bool ignored) {
  const std::lock_guard lock(mutex_);
  ignores_conditions_ = ignored;
}
void S3Server::keep_versions(bool kept) {
  const std::lock_guard lock(mutex_);
  keeps_versions_ = kept;
}
void S3Server::list_as_it_is(bool plain) {
  const std::lock_guard lock(mutex_);
  lists_plainly_ = plain;
}
int S3Server::connections() const { return acceptor_ ? acceptor_->connections() : 0; }
std::size_t S3Server::wrong_signatures() const {
  const std::lock_guard lock(mutex_);
  return wrong_signatures_;
}
S3Message S3Server::last(Verb verb) const {
  const std::lock_guard lock(mutex_);
  const auto found = last_.find(verb);
  return found == last_.end() ? S3Message{} : found->second;
}

}  // namespace kv_offload::testing
