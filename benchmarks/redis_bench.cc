// SPDX-License-Identifier: Apache-2.0
// Records to and from a Redis or Valkey server: the tier against the client library alone, in the same run.
//
//   redis_bench --socket PATH | --port N  [--threads 1,2,4] [--sizes 512,2048,8192 (KiB)] [--rounds 6]
//   [--total MiB]
//   redis_bench --socket PATH | --port N  --presence 4096 [--rounds 6]
//
// The library alone: SET and GET in a loop on one connection per thread, with values from as many buffers as
// the tier has rows. Replies are freed and not inspected. The tier: the same number of records through submit
// and poll, with header, checksum and, before the first writes and some of the others, an existence check.
// The order alternates, and the ratio is that of the medians. A tier's writer threads read too: with N
// threads, both write on N connections and read on 2 N. Prints JSON: GB/s of each, and the ratio. --presence:
// this number of keys of one prompt, half of which exist. Compares one pipeline of EXISTS of the library with
// prefetch_presence() until contains() knows each key, and measures the CPU time of the calling thread.
// Removes the server's data between rounds (FLUSHALL): use a separate server.
#include <valkey/valkey.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "backends/redis/tier.h"
#include "bench.h"
#include "remote_bench.h"

namespace {

using namespace kv_offload;
using bench::numbers;
using bench::Rates;

struct Options {
  redis::Server server;
  std::vector<std::size_t> threads{1, 2, 4}, kibibytes{512, 2048, 8192};
  unsigned rounds = 6;
  std::size_t total_mebibytes = 128;
  std::size_t presence = 0;
};

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "redis_bench: %s\n", what.c_str());
  std::exit(1);
}

valkeyContext* connect(const redis::Server& server) {
  valkeyContext* context = server.host.empty() ? valkeyConnectUnix(server.unix_socket.c_str())
                                               : valkeyConnect(server.host.c_str(), server.port);
  if (context == nullptr || context->err != 0) fail("no connection");
  return context;
}

void flush(const redis::Server& server) {
  valkeyContext* context = connect(server);
  freeReplyObject(valkeyCommand(context, "FLUSHALL"));
  valkeyFree(context);
}

Rates library_alone(const Options& options, std::size_t threads, std::size_t bytes, std::size_t records) {
  std::vector<valkeyContext*> contexts;
  for (std::size_t t = 0; t < bench::readers(threads); ++t) contexts.push_back(connect(options.server));
  const std::vector<AlignedBuffer> rows = bench::rows_for(threads, bytes, records);
  std::vector<std::string_view> values;
  for (const AlignedBuffer& row : rows)
    values.emplace_back(reinterpret_cast<const char*>(row.data()), row.size());
  const auto command = [&](std::size_t thread, std::vector<std::string_view> words, int expected) {
    std::vector<const char*> data;
    std::vector<std::size_t> sizes;
    for (const std::string_view word : words) {
      data.push_back(word.data());
      sizes.push_back(word.size());
    }
    auto* reply = static_cast<valkeyReply*>(
        valkeyCommandArgv(contexts[thread], static_cast<int>(words.size()), data.data(), sizes.data()));
    if (reply == nullptr || reply->type != expected) fail("the library was refused");
    freeReplyObject(reply);
  };
  Rates rates;
  const double total = static_cast<double>(bytes * records) / 1e9;
  rates.write = total / bench::timed_writes(threads, records, [&](std::size_t t, std::size_t i) {
                  command(t, {"SET", bench::key_of(i).hex(), values[i % values.size()]}, VALKEY_REPLY_STATUS);
                });
  rates.read = total / bench::timed_reads(threads, records, [&](std::size_t t, std::size_t i) {
                 command(t, {"GET", bench::key_of(i).hex()}, VALKEY_REPLY_STRING);
               });
  for (valkeyContext* context : contexts) valkeyFree(context);
  return rates;
}

Rates through_the_tier(const Options& options, std::size_t threads, std::size_t bytes, std::size_t records) {
  RedisTierOptions tier_options;
  tier_options.name = "redis";
  tier_options.server = options.server;
  tier_options.n_read_threads = tier_options.n_write_threads = static_cast<unsigned>(threads);
  const auto tier = make_redis_tier(tier_options);
  return bench::write_and_read(*tier, threads, bytes, records);
}

// The names are as long as the tier's.
double ask_alone(valkeyContext* context, const std::vector<ChunkKey>& keys) {
  const std::string prefix(80, 'p');
  const double start = bench::now();
  for (const ChunkKey& key : keys) {
    const std::string name = prefix + key.hex();
    if (valkeyAppendCommand(context, "EXISTS %b", name.data(), name.size()) != VALKEY_OK) fail("refused");
  }
  for (std::size_t i = 0; i < keys.size(); ++i) {
    void* reply = nullptr;
    if (valkeyGetReply(context, &reply) != VALKEY_OK) fail("no reply");
    freeReplyObject(reply);
  }
  return bench::now() - start;
}

void compare_presence(const Options& options) {
  flush(options.server);
  RedisTierOptions tier_options;
  tier_options.name = "redis";
  tier_options.server = options.server;
  {
    const auto tier = make_redis_tier(tier_options);
    std::vector<AlignedBuffer> rows(4);
    for (AlignedBuffer& row : rows) row = AlignedBuffer(4096);
    (void)bench::pass(*tier, OpKind::kWrite, rows, 4096, options.presence / 2);
  }
  valkeyContext* context = connect(options.server);
  bench::compare_presence(
      options.presence, options.rounds, [&](const auto& keys) { return ask_alone(context, keys); },
      [&] { return make_redis_tier(tier_options); });
  valkeyFree(context);
}

Options parse(int count, char** words) {
  Options options;
  for (int i = 1; i + 1 < count; i += 2) {
    const std::string name = words[i], value = words[i + 1];
    if (name == "--socket") {
      options.server.unix_socket = value;
    } else if (name == "--port") {
      options.server.host = "127.0.0.1";
      options.server.port = static_cast<std::uint16_t>(std::stoul(value));
    } else if (name == "--threads") {
      options.threads = numbers(value);
    } else if (name == "--sizes") {
      options.kibibytes = numbers(value);
    } else if (name == "--rounds") {
      options.rounds = static_cast<unsigned>(std::stoul(value));
    } else if (name == "--total") {
      options.total_mebibytes = std::stoul(value);
    } else if (name == "--presence") {
      options.presence = std::stoul(value);
    } else {
      fail("unknown option " + name);
    }
  }
  if (options.server.unix_socket.empty() && options.server.host.empty())
    fail("give --socket PATH or --port N");
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
      const auto before = [&] { flush(options.server); };
      const auto alone = [&](std::size_t bytes, std::size_t records) {
        return library_alone(options, threads, bytes, records);
      };
      const auto tier = [&](std::size_t bytes, std::size_t records) {
        return through_the_tier(options, threads, bytes, records);
      };
      std::printf("%s", separator);
      bench::compare(kib, threads, options.rounds, options.total_mebibytes, before, alone, tier);
      flush(options.server);
      separator = ",\n";
      std::fflush(stdout);
    }
  }
  std::printf("\n]\n");
}
