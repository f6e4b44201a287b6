// SPDX-License-Identifier: Apache-2.0
// Random operations of several processes on one ledger page: they reserve, write, evict, count, reset, die
// and restart, and calls fail. After each step, every byte is used or reserved, and the bound holds.
#include <gtest/gtest.h>

#include <fcntl.h>

#include <map>
#include <optional>
#include <random>

#include "backends/fs/space_ledger.h"
#include "faulty_file_ops.h"
#include "fixture.h"
#include "process_ops.h"

namespace kv_offload {
namespace {

using namespace testing;

constexpr std::uint64_t kModelMost = 10'000;
constexpr std::size_t kProcesses = 4;
constexpr unsigned kLeaves = 4;

class SpaceModel : public ::testing::TestWithParam<unsigned> {
 protected:
  struct File {
    std::uint64_t bytes = 0, writer = 0;
    bool temporary = false;
  };
  struct Write {
    std::unique_ptr<Reservation> reservation;
    std::uint64_t bytes = 0, file = 0;  // 0: none yet
    bool named = false;
  };
  struct Count {
    std::uint64_t number = 0, sum = 0;
    unsigned leaf = 0;
    std::vector<std::uint64_t> writers;
  };
  struct Process {
    ProcessOps real;
    FaultyFileOps ops{real};
    std::unique_ptr<SpaceLedger> space;
    std::uint64_t writer = 0;
    std::optional<Write> write;
    std::optional<Count> count;
    std::vector<std::pair<std::uint64_t, SpaceLedger::Finished>> removed;  // not subtracted yet
    ~Process() {
      real.die();
      write.reset();
    }
  };

  void start(std::size_t at) {
    processes_[at] = std::make_unique<Process>();
    Process& process = *processes_[at];
    process.writer = next_writer_ += 2;
    process.space = std::make_unique<SpaceLedger>(process.ops, root_.get(), dir_.path(), kModelMost,
                                                  process.writer, process.writer);
  }
  std::uint64_t on_disk() const {
    std::uint64_t sum = 0;
    for (const auto& [id, file] : files_) sum += file.bytes;
    return sum;
  }
  // Returns a random file with a final name.
  std::map<std::uint64_t, File>::iterator victim() {
    if (files_.empty()) return files_.end();
    auto at = std::next(files_.begin(), static_cast<std::ptrdiff_t>(random_() % files_.size()));
    return at->second.temporary ? files_.end() : at;
  }
  void write(Process& process) {
    if (!process.write) {
      process.write = Write{};
      process.write->reservation = std::make_unique<Reservation>(*process.space);
      process.write->bytes = 100 + random_() % 900;
    }
    Write& write = *process.write;
    if (write.file == 0) {
      std::uint64_t missing = 0;
      if (write.reservation->grow_to(write.bytes + 100, &missing)) {
        files_[write.file = next_file_++] = {write.bytes, process.writer, true};
      } else if (const auto file = missing > 0 ? victim() : files_.end(); file != files_.end()) {
        write.reservation->adopt(file->second.bytes, process.space->finished());
        files_.erase(file);
        ++evicted_;
      } else if (random_() % 4 == 0) {
        process.write.reset();
      }
    } else if (!write.named) {
      const auto file = files_.find(write.file);
      write.named = true;
      if (random_() % 5 == 0) {
        files_.erase(file);  // the write failed
      } else {
        file->second.temporary = false;
        write.reservation->used = write.bytes;
      }
    } else {
      process.write.reset();
      ++written_;
    }
  }
  void count(Process& process) {
    if (!process.count) {
      SpaceFigures figures;
      if (!process.space->poll(Nanos{0}, &figures)) return;
      Count count;
      count.writers = figures.writers;
      if (process.space->begin_count(&count.number)) process.count = count;
      return;
    }
    Count& count = *process.count;
    if (count.leaf < kLeaves) {
      const unsigned leaf = count.leaf++;
      std::erase_if(files_, [&](const auto& entry) {
        const File& file = entry.second;
        if (entry.first % kLeaves != leaf) return false;
        const auto& known = count.writers;
        const bool lives = std::find(known.begin(), known.end(), file.writer) != known.end();
        const bool locked = std::any_of(processes_.begin(), processes_.end(),
                                        [&](const auto& other) { return other->writer == file.writer; });
        if (file.temporary && !lives && !locked) return true;  // swept
        if (!file.temporary || !lives) count.sum += file.bytes;
        return false;
      });
      return;
    }
    counted_ += process.space->finish_count(count.number, count.sum).is_ok();
    process.count.reset();
  }
  void remove(Process& process) {
    if (!process.removed.empty() && random_() % 2 == 0) {
      process.space->remove(process.removed.back().first, process.removed.back().second);
      process.removed.pop_back();
    } else if (const auto file = victim(); file != files_.end()) {
      process.removed.emplace_back(file->second.bytes, process.space->finished());
      files_.erase(file);
    }
  }
  void step() {
    const std::size_t at = random_() % kProcesses;
    Process& process = *processes_[at];
    if (random_() % 10 == 0) {
      const int error = random_() % 2 == 0 ? EIO : ENOSPC;
      process.ops.set_rule(
          [error, left = static_cast<int>(random_() % 4)](Call) mutable { return left-- == 0 ? -error : 0; });
    }
    switch (random_() % 40) {
      case 0:
        start(at);  // the previous process died
        return;
      case 1:
      case 2: {
        SpaceFigures figures;
        (void)process.space->poll(Nanos{0}, &figures);
        break;
      }
      case 3:
      case 4:
      case 5:
        remove(process);
        break;
      case 6:  // a reset: removes several files
        for (int i = 0; i < 3; ++i) remove(process);
        break;
      default:
        if (random_() % 4 == 0 || process.count) {
          count(process);
        } else {
          write(process);
        }
    }
    process.ops.clear();
  }
  void end() {
    for (const auto& process : processes_) {
      while (process->write) write(*process);
      while (!process->removed.empty()) {
        process->space->remove(process->removed.back().first, process->removed.back().second);
        process->removed.pop_back();
      }
      while (process->count) count(*process);
    }
    Process& last = *processes_[0];
    for (bool begun = false; !begun || last.count; begun = true) count(last);
  }

  TempDir dir_;
  int error_ = 0;
  Fd root_ = open_fd(posix_file_ops(), AT_FDCWD, dir_.path(), O_RDONLY | O_DIRECTORY, 0, &error_);
  std::mt19937_64 random_{GetParam()};
  std::uint64_t next_writer_ = 1, next_file_ = 1, written_ = 0, evicted_ = 0, counted_ = 0;
  std::map<std::uint64_t, File> files_;
  std::vector<std::unique_ptr<Process>> processes_{kProcesses};
};

TEST_P(SpaceModel, every_byte_is_used_or_reserved_after_each_step) {
  for (std::size_t at = 0; at < kProcesses; ++at) start(at);
  do count(*processes_[0]);
  while (processes_[0]->count);
  for (int i = 0; i < 4000; ++i) {
    step();
    const SpaceLedger page(posix_file_ops(), root_.get(), dir_.path());
    ASSERT_LE(on_disk(), page.total()) << "step " << i;
    ASSERT_LE(on_disk(), kModelMost) << "step " << i;
  }
  end();
  SpaceFigures figures;
  ASSERT_TRUE(processes_[0]->space->poll(Nanos{0}, &figures));
  EXPECT_EQ(figures.used, on_disk());
  EXPECT_EQ(figures.reserved, 0u);
  EXPECT_EQ(figures.doubt, 0u);
  EXPECT_GT(written_, 100u);
  EXPECT_GT(evicted_, 0u);
  EXPECT_GT(counted_, 20u);
}

INSTANTIATE_TEST_SUITE_P(seeds, SpaceModel, ::testing::Range(1u, 6u));

}  // namespace
}  // namespace kv_offload
