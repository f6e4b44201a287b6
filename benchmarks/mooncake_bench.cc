// SPDX-License-Identifier: Apache-2.0
// Records to and from a Mooncake Store: the tier against Mooncake's own client in a loop, in the same run.
//
//   mooncake_bench --python PATH --alone benchmarks/mooncake_alone.py --master HOST:PORT  [--threads 1,2,4,8]
//   [--sizes 512,2048,8192 (KiB)] [--rounds 6] [--total MiB] [--calls plain|sessions]
//
// The client alone: put_from and get_into, or with --calls sessions the tier's own calls, in a loop on the
// threads of one Python process, from registered memory whose bytes are not inspected. The tier: the same
// number of records through submit and poll, with header, checksum, the copy to the memory of its client
// process, and an existence check before the first writes and some of the others. The order alternates, and
// the ratio is that of the medians. A tier's writer threads read too: with N threads, both write on N and
// read on 2 N. CPU time is that of all processes except Mooncake's master and memory node. Prints JSON: GB/s
// of each, and the ratio. Removes all objects of the store between rounds: use a separate store
// (benchmarks/remote_bench.py starts one, and this program).
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

#include "backends/mooncake/tier.h"
#include "bench.h"
#include "remote_bench.h"

namespace {

using namespace kv_offload;
using bench::numbers;
using bench::Rates;

struct Options {
  std::string python, alone, master, calls = "plain";
  std::vector<std::size_t> threads{1, 2, 4, 8}, kibibytes{512, 2048, 8192};
  unsigned rounds = 6;
  std::size_t total_mebibytes = 128;
};

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "mooncake_bench: %s\n", what.c_str());
  std::exit(1);
}

// The program prints four numbers. With no records, it only removes all objects.
Rates client_alone(const Options& options, std::size_t threads, std::size_t bytes, std::size_t records) {
  const std::string command =
      fmt::format("{} {} {} {} {} {} {} {}", options.python, options.alone, options.master, options.calls,
                  threads, bench::readers(threads), bytes, records);
  std::FILE* const output = ::popen(command.c_str(), "r");
  Rates rates;
  const bool all = output != nullptr && std::fscanf(output, "%lf %lf %lf %lf", &rates.write, &rates.read,
                                                    &rates.write_cpu, &rates.read_cpu) == 4;
  if (output == nullptr || ::pclose(output) != 0 || !all) fail("the client alone failed: " + command);
  return rates;
}

// Returns the user and system time of the running child processes, in steps of 10 ms: the client process.
double cpu_of_children() {
  double ticks = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::ifstream children(task.path() / "children");
    for (int pid = 0; children >> pid;) {
      std::ifstream stat(fmt::format("/proc/{}/stat", pid));
      const std::string words((std::istreambuf_iterator<char>(stat)), {});
      std::istringstream fields(words.substr(words.rfind(')') + 2));
      std::string field;
      for (int i = 3; fields >> field; ++i) {
        if (i == 14 || i == 15) ticks += std::stod(field);
      }
    }
  }
  return ticks / static_cast<double>(::sysconf(_SC_CLK_TCK));
}

Rates through_the_tier(const Options& options, std::size_t threads, std::size_t bytes, std::size_t records) {
  MooncakeTierOptions tier_options;
  tier_options.name = "mooncake";
  tier_options.place = options.master;
  tier_options.client.launch =
      mooncake::launch_of({options.python, "-m", "kv_offload.tiers.mooncake.client"});
  tier_options.client.setup =
      fmt::format(R"({{"master": "{}", "metadata": "P2PHANDSHAKE", "protocol": "tcp", "devices": "", )"
                  R"("local_host": ""}})",
                  options.master);
  tier_options.n_read_threads = tier_options.n_write_threads = static_cast<unsigned>(threads);
  const auto tier = make_mooncake_tier(tier_options);
  std::vector<AlignedBuffer> rows = bench::rows_for(threads, bytes, records);
  // Like the client alone: memory that is allocated and registered.
  const std::size_t others = 1 << 20;
  for (const OpKind kind : {OpKind::kWrite, OpKind::kRead, OpKind::kRead}) {
    bench::pass(*tier, kind, rows, bytes, 2 * rows.size(), others);
  }
  const auto used = [] { return bench::cpu_seconds() + cpu_of_children(); };
  Rates rates;
  const double total = static_cast<double>(bytes * records) / 1e9, start = used();
  rates.write = bench::pass(*tier, OpKind::kWrite, rows, bytes, records);
  const double written = used();
  rates.read = bench::pass(*tier, OpKind::kRead, rows, bytes, records);
  rates.write_cpu = (written - start) / total;
  rates.read_cpu = (used() - written) / total;
  return rates;
}

Options parse(int count, char** words) {
  Options options;
  for (int i = 1; i + 1 < count; i += 2) {
    const std::string name = words[i], value = words[i + 1];
    if (name == "--python") {
      options.python = value;
    } else if (name == "--alone") {
      options.alone = value;
    } else if (name == "--master") {
      options.master = value;
    } else if (name == "--calls") {
      options.calls = value;
    } else if (name == "--threads") {
      options.threads = numbers(value);
    } else if (name == "--sizes") {
      options.kibibytes = numbers(value);
    } else if (name == "--rounds") {
      options.rounds = static_cast<unsigned>(std::stoul(value));
    } else if (name == "--total") {
      options.total_mebibytes = std::stoul(value);
    } else {
      fail("unknown option " + name);
    }
  }
  if (options.python.empty() || options.alone.empty() || options.master.empty()) {
    fail("give --python, --alone and --master");
  }
  return options;
}

}  // namespace

int main(int count, char** words) {
  const Options options = parse(count, words);
  std::printf("[");
  const char* separator = "\n";
  for (const std::size_t kib : options.kibibytes) {
    for (const std::size_t threads : options.threads) {
      const auto before = [&] { client_alone(options, 1, 4096, 0); };
      const auto alone = [&](std::size_t bytes, std::size_t records) {
        return client_alone(options, threads, bytes, records);
      };
      const auto tier = [&](std::size_t bytes, std::size_t records) {
        return through_the_tier(options, threads, bytes, records);
      };
      std::printf("%s", separator);
      bench::compare(kib, threads, options.rounds, options.total_mebibytes, before, alone, tier);
      separator = ",\n";
      std::fflush(stdout);
    }
  }
  std::printf("\n]\n");
}
