// SPDX-License-Identifier: Apache-2.0
// Records to and from a bucket: the tier against libcurl alone, in the same run.
//
//   s3_bench --endpoint http://HOST:PORT --bucket NAME [--threads 1,4] [--sizes 512,2048,8192 (KiB)]
//   [--rounds 6] [--total MiB] [--ca-file PEM] [--signed 1]
//   s3_bench --endpoint http://HOST:PORT --bucket NAME --presence 4096 [--rounds 6]
//
// Keys are AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY. libcurl alone: PUT and GET in a loop on one
// connection per thread. The body of a PUT has no checksum (--signed 1: it has the SHA-256 of OpenSSL, which
// the store compares). The body of a GET is copied to the program's memory, as libcurl requires, and not
// inspected. Bodies are in as many buffers as the tier has rows, and cannot be compressed, because SeaweedFS
// compresses data that looks like text. The tier: the same number of records through submit and poll, with
// header and checksum, all looked up before like those of a prompt; for an http:// endpoint also with the
// SHA-256 in the signature, so compare it with --signed 1. With N threads, both write on N connections and
// read on 2 N, because a tier's writer threads read too. Prints JSON: GB/s of each, and the ratio of the
// medians. --presence: this number of keys of one prompt, of which the first half exists. Compares a binary
// search with HEADs of the library (the distance doubles until one is missing), for names as long as the
// tier's, with prefetch_presence() until contains() knows each key, and measures the CPU time of the calling
// thread. Each round writes under a new prefix that begins with "bench-" and is not removed: use a separate
// bucket.
#include <curl/curl.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <string>
#include <utility>
#include <vector>

#include "backends/s3/signature.h"
#include "backends/s3/tier.h"
#include "bench.h"
#include "remote_bench.h"

namespace {

using namespace kv_offload;
using bench::numbers;
using bench::Rates;

struct Options {
  s3::Bucket bucket;
  std::vector<std::size_t> threads{1, 4}, kibibytes{512, 2048, 8192};
  unsigned rounds = 6;
  std::size_t total_mebibytes = 256;
  bool signed_bodies = false;
  std::size_t presence = 0;
};

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "s3_bench: %s\n", what.c_str());
  std::exit(1);
}

std::string new_prefix() {
  static unsigned count = 0;
  return "bench-" + std::to_string(std::chrono::system_clock::now().time_since_epoch().count()) + "-" +
         std::to_string(++count);
}

// The part of a name between a tier's prefix and a key: namespace and epoch. Stores take longer for longer
// names.
std::string names_of_the_tier() { return "/" + std::string(64, 'a') + "/" + std::string(32, 'e') + "/"; }

// libcurl as used by a program that only transfers the bytes.
class Connection {
 public:
  Connection(const s3::Bucket& bucket, bool signed_bodies) : bucket_(bucket), signed_bodies_(signed_bodies) {}
  ~Connection() { curl_easy_cleanup(easy_); }
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  void put(const std::string& key, std::span<const std::byte> value) {
    at_ = {reinterpret_cast<const char*>(value.data()), value.size()};
    begin("PUT", key, signed_bodies_ ? s3::sha256_hex({&value, 1}) : "UNSIGNED-PAYLOAD");
    curl_easy_setopt(easy_, CURLOPT_UPLOAD, 1L);
    curl_easy_setopt(easy_, CURLOPT_UPLOAD_BUFFERSIZE, 2L << 20);
    curl_easy_setopt(easy_, CURLOPT_INFILESIZE_LARGE, static_cast<curl_off_t>(value.size()));
    curl_easy_setopt(easy_, CURLOPT_READFUNCTION, &Connection::on_read);
    curl_easy_setopt(easy_, CURLOPT_READDATA, this);
    end();
  }
  // Into memory that was used before.
  void get(const std::string& key, std::size_t bytes) {
    body_.resize(bytes);
    filled_ = 0;
    begin("GET", key, s3::sha256_hex({}));
    end();
    if (filled_ != bytes) fail("an answer is too short");
  }
  bool is_there(const std::string& key) {
    begin("HEAD", key, s3::sha256_hex({}));
    curl_easy_setopt(easy_, CURLOPT_NOBODY, 1L);
    curl_easy_setopt(easy_, CURLOPT_FAILONERROR, 0L);
    end();
    long status = 0;
    curl_easy_getinfo(easy_, CURLINFO_RESPONSE_CODE, &status);
    return status == 200;
  }

 private:
  void begin(const char* method, const std::string& key, const std::string& sum) {
    const std::string path = "/" + bucket_.name + "/" + key,
                      host = bucket_.endpoint.substr(bucket_.endpoint.find("://") + 3);
    s3::HeaderMap headers{{"host", host}};
    if (!s3::sign({method, path, "", sum, bucket_.region}, {bucket_.access_key, bucket_.secret_key, ""},
                  std::time(nullptr), &headers)) {
      fail("OpenSSL cannot sign");
    }
    for (const auto& [name, value] : headers)
      headers_ = curl_slist_append(headers_, (name + ": " + value).c_str());
    headers_ = curl_slist_append(headers_, "Expect:");  // which it would wait for
    curl_easy_reset(easy_);
    curl_easy_setopt(easy_, CURLOPT_URL, (bucket_.endpoint + path).c_str());
    curl_easy_setopt(easy_, CURLOPT_HTTPHEADER, headers_);
    curl_easy_setopt(easy_, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(easy_, CURLOPT_HTTP_VERSION, static_cast<long>(CURL_HTTP_VERSION_1_1));  // 2 is slower
    curl_easy_setopt(easy_, CURLOPT_BUFFERSIZE, static_cast<long>(CURL_MAX_READ_SIZE));
    curl_easy_setopt(easy_, CURLOPT_WRITEFUNCTION, &Connection::on_body);
    curl_easy_setopt(easy_, CURLOPT_WRITEDATA, this);
    curl_easy_setopt(easy_, CURLOPT_FAILONERROR, 1L);
    if (!bucket_.ca_file.empty()) curl_easy_setopt(easy_, CURLOPT_CAINFO, bucket_.ca_file.c_str());
  }
  void end() {
    if (const CURLcode code = curl_easy_perform(easy_); code != CURLE_OK) fail(curl_easy_strerror(code));
    curl_slist_free_all(std::exchange(headers_, nullptr));
  }
  static std::size_t on_body(char* data, std::size_t size, std::size_t count, void* self) {
    auto& to = *static_cast<Connection*>(self);
    const std::size_t bytes = std::min(size * count, to.body_.size() - to.filled_);
    std::memcpy(to.body_.data() + to.filled_, data, bytes);
    to.filled_ += bytes;
    return size * count;
  }
  static std::size_t on_read(char* data, std::size_t size, std::size_t count, void* self) {
    std::string_view& from = static_cast<Connection*>(self)->at_;
    const std::size_t part = std::min(size * count, from.size());
    std::memcpy(data, from.data(), part);
    from.remove_prefix(part);
    return part;
  }

  const s3::Bucket& bucket_;
  const bool signed_bodies_;
  CURL* const easy_ = curl_easy_init();
  curl_slist* headers_ = nullptr;
  std::string_view at_;
  std::string body_;
  std::size_t filled_ = 0;
};

Rates library_alone(const Options& options, std::size_t threads, std::size_t bytes, std::size_t records) {
  std::vector<std::unique_ptr<Connection>> connections;
  for (std::size_t t = 0; t < bench::readers(threads); ++t)
    connections.push_back(std::make_unique<Connection>(options.bucket, options.signed_bodies));
  const std::vector<AlignedBuffer> rows = bench::rows_for(threads, bytes, records);
  const std::string prefix = new_prefix() + names_of_the_tier();
  const double total = static_cast<double>(bytes * records) / 1e9;
  Rates rates;
  const double start = bench::cpu_seconds();
  rates.write = total / bench::timed_writes(threads, records, [&](std::size_t t, std::size_t i) {
                  connections[t]->put(prefix + bench::key_of(i).hex(), rows[i % rows.size()].span());
                });
  const double written = bench::cpu_seconds();
  rates.read = total / bench::timed_reads(threads, records, [&](std::size_t t, std::size_t i) {
                 connections[t]->get(prefix + bench::key_of(i).hex(), bytes);
               });
  rates.write_cpu = (written - start) / total;
  rates.read_cpu = (bench::cpu_seconds() - written) / total;
  return rates;
}

Rates through_the_tier(const Options& options, std::size_t threads, std::size_t bytes, std::size_t records) {
  S3TierOptions tier_options;
  tier_options.name = "s3";
  tier_options.bucket = options.bucket;
  tier_options.prefix = new_prefix();
  tier_options.n_read_threads = tier_options.n_write_threads = static_cast<unsigned>(threads);
  const auto tier = make_s3_tier(tier_options);
  return bench::write_and_read(*tier, threads, bytes, records);
}

void compare_presence(const Options& options) {
  S3TierOptions tier_options;
  tier_options.name = "s3";
  tier_options.bucket = options.bucket;
  tier_options.prefix = new_prefix();
  {
    const auto tier = make_s3_tier(tier_options);
    std::vector<AlignedBuffer> rows(4);
    for (AlignedBuffer& row : rows) row = AlignedBuffer(4096);
    (void)bench::pass(*tier, OpKind::kWrite, rows, 4096, options.presence / 2);
  }
  Connection connection(options.bucket, false);
  const std::string prefix = new_prefix() + names_of_the_tier();
  const std::vector<std::byte> value(4096);
  for (std::size_t i = 0; i < options.presence / 2; ++i)
    connection.put(prefix + bench::key_of(i).hex(), value);
  // The distance doubles until a key is missing; then a binary search between the last two.
  const auto alone = [&](const std::vector<ChunkKey>& keys) {
    const double start = bench::now();
    std::size_t there = 0, missing = 1;
    while (missing <= keys.size() && connection.is_there(prefix + keys[missing - 1].hex())) {
      there = missing;
      missing *= 2;
    }
    missing = std::min(missing, keys.size() + 1);
    while (missing - there > 1) {
      const std::size_t middle = there + (missing - there) / 2;
      (connection.is_there(prefix + keys[middle - 1].hex()) ? there : missing) = middle;
    }
    const double seconds = bench::now() - start;
    if (there != options.presence / 2) fail("the library finds another number of keys");
    return seconds;
  };
  bench::compare_presence(options.presence, options.rounds, alone,
                          [&] { return make_s3_tier(tier_options); });
}

Options parse(int count, char** words) {
  Options options;
  for (int i = 1; i + 1 < count; i += 2) {
    const std::string name = words[i], value = words[i + 1];
    if (name == "--endpoint") {
      options.bucket.endpoint = value;
    } else if (name == "--bucket") {
      options.bucket.name = value;
    } else if (name == "--threads") {
      options.threads = numbers(value);
    } else if (name == "--sizes") {
      options.kibibytes = numbers(value);
    } else if (name == "--rounds") {
      options.rounds = static_cast<unsigned>(std::stoul(value));
    } else if (name == "--ca-file") {
      options.bucket.ca_file = value;
    } else if (name == "--signed") {
      options.signed_bodies = value == "1";
    } else if (name == "--total") {
      options.total_mebibytes = std::stoul(value);
    } else if (name == "--presence") {
      options.presence = std::stoul(value);
    } else {
      fail("unknown option " + name);
    }
  }
  const char* access = std::getenv("AWS_ACCESS_KEY_ID");
  const char* secret = std::getenv("AWS_SECRET_ACCESS_KEY");
  if (options.bucket.endpoint.empty() || options.bucket.name.empty()) fail("give --endpoint and --bucket");
  if (access == nullptr || secret == nullptr) fail("set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY");
  options.bucket.path_style = true;
  options.bucket.access_key = access;
  options.bucket.secret_key = secret;
  return options;
}

}  // namespace

int main(int count, char** words) {
  const Options options = parse(count, words);
  if (options.presence > 0) {
    compare_presence(options);
    return 0;
  }
  std::printf("[");
  const char* separator = "\n";
  for (const std::size_t kib : options.kibibytes) {
    for (const std::size_t threads : options.threads) {
      const auto alone = [&](std::size_t bytes, std::size_t records) {
        return library_alone(options, threads, bytes, records);
      };
      const auto tier = [&](std::size_t bytes, std::size_t records) {
        return through_the_tier(options, threads, bytes, records);
      };
      std::printf("%s", separator);
      bench::compare(
          kib, threads, options.rounds, options.total_mebibytes, [] {}, alone, tier);
      separator = ",\n";
      std::fflush(stdout);
    }
  }
  std::printf("\n]\n");
}
