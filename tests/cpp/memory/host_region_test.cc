// SPDX-License-Identifier: Apache-2.0
#include "memory/host_region.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/file.h>
#include <sys/inotify.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <stdexcept>
#include <thread>

#include "base/refused_chunks.h"
#include "base/xxh3.h"
#include "memory/child_process.h"
#include "memory/shared_file.h"
#include "memory/shm_fixture.h"

namespace kv_offload {
namespace {

class HostRegionTest : public ShmTest {};

TEST_F(HostRegionTest, scheduler_and_worker_see_the_same_bytes) {
  const auto scheduler = HostRegion::attach_scheduler(options(8 * kMiB, 1));
  const auto worker = HostRegion::attach_worker(options(8 * kMiB, 1), 0, some_geometry());
  worker->shard(0, 3, 5)[4] = std::byte{42};
  EXPECT_EQ(scheduler->area(0)[3 * kPageBytes + 4], std::byte{42});
  EXPECT_EQ(scheduler->area_bytes(), 8 * kMiB);
  EXPECT_EQ(scheduler->area(0)[0], std::byte{0});
}

TEST_F(HostRegionTest, areas_are_equal_parts_on_page_boundaries) {
  EXPECT_EQ(HostRegion::attach_scheduler(options(10 * kMiB + 5, 3))->area_bytes(),
            10 * kMiB / 3 / 4096 * 4096);
  const auto large = HostRegion::attach_scheduler(options(130 * kMiB + 5, 2, "large"));
  EXPECT_EQ(large->area_bytes(), 64 * kMiB);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(large->area(0).data()) % (2 * kMiB), 0u);
  EXPECT_EQ(large->area(1).data(), large->area(0).data() + 64 * kMiB);
  EXPECT_THROW(large->area(2), InvalidArgument);
}

TEST_F(HostRegionTest, a_shard_stays_inside_its_area) {
  const auto region = HostRegion::attach_scheduler(options(8 * kMiB, 2));
  EXPECT_EQ(region->shard(1, 1023, 4096).data(), region->area(1).data() + 1023 * kPageBytes);
  EXPECT_THROW(region->shard(0, 1023, 4097), std::logic_error);
  EXPECT_THROW(region->shard(0, kNoRow, 1), std::logic_error);
}

TEST_F(HostRegionTest, impossible_options_are_refused) {
  const auto refused = [&](auto change) {
    RegionOptions changed = options(8 * kMiB, 2);
    change(changed);
    EXPECT_THROW(HostRegion::attach_scheduler(changed), InvalidArgument);
  };
  refused([](RegionOptions& o) { o.engine_id.clear(); });
  refused([](RegionOptions& o) { o.bytes = 4095; });
  refused([](RegionOptions& o) { o.num_workers = 0; });
  refused([](RegionOptions& o) { o.num_workers = o.num_areas = 65; });
  refused([](RegionOptions& o) { o.num_areas = 3; });
  EXPECT_THROW(HostRegion::attach_worker(options(8 * kMiB, 2), 2, some_geometry()), InvalidArgument);
  EXPECT_THROW(HostRegion::attach_worker(options(8 * kMiB, 2), 0, {{}, std::string(4096, 'x')}),
               InvalidArgument);
  EXPECT_TRUE(names().empty());
}

TEST_F(HostRegionTest, only_the_owner_may_open_the_file) {
  const auto region = HostRegion::attach_scheduler(options(8 * kMiB, 1));
  struct stat figures {};
  ASSERT_EQ(::stat((directory_ + "/" + names().at(0)).c_str(), &figures), 0);
  EXPECT_EQ(figures.st_mode & 0777, 0600u);
}

TEST_F(HostRegionTest, the_file_is_unlinked_once_all_processes_attached) {
  const auto worker_1 = HostRegion::attach_worker(options(8 * kMiB, 2), 1, some_geometry());
  const auto scheduler = HostRegion::attach_scheduler(options(8 * kMiB, 2));
  EXPECT_EQ(names().size(), 1u);
  const auto worker_0 = HostRegion::attach_worker(options(8 * kMiB, 2), 0, some_geometry());
  EXPECT_TRUE(names().empty());
}

TEST_F(HostRegionTest, the_file_is_unlinked_when_all_attached_processes_detach) {
  auto scheduler = HostRegion::attach_scheduler(options(8 * kMiB, 2));
  auto worker = HostRegion::attach_worker(options(8 * kMiB, 2), 1, some_geometry());
  scheduler.reset();
  EXPECT_EQ(names().size(), 1u);
  worker.reset();
  EXPECT_TRUE(names().empty());
}

TEST_F(HostRegionTest, wait_for_ranks_names_the_missing_ranks) {
  const auto scheduler = HostRegion::attach_scheduler(options(8 * kMiB, 4));
  const auto worker = HostRegion::attach_worker(options(8 * kMiB, 4), 2, some_geometry());
  const Status status = scheduler->wait_for_ranks(std::chrono::nanoseconds(0));
  EXPECT_EQ(status.kind(), StatusKind::kTimeout);
  EXPECT_TRUE(has(status.message(), ": 0, 1, 3")) << status.to_string();
  EXPECT_THROW(scheduler->geometry(0), InvalidArgument);
}

TEST_F(HostRegionTest, the_scheduler_reads_the_geometry_that_ranks_published) {
  const auto scheduler = HostRegion::attach_scheduler(options(8 * kMiB, 2));
  const RankGeometry full{std::vector<std::uint64_t>(kMostGroups, 7), std::string(4095, 'f')};
  const auto worker_0 = HostRegion::attach_worker(options(8 * kMiB, 2), 0, full);
  const auto worker_1 = HostRegion::attach_worker(options(8 * kMiB, 2), 1, {{}, ""});
  ASSERT_TRUE(scheduler->wait_for_ranks(std::chrono::seconds(0)).is_ok());
  EXPECT_EQ(scheduler->geometry(0).shard_bytes, full.shard_bytes);
  EXPECT_EQ(scheduler->geometry(0).fingerprint, full.fingerprint);
  EXPECT_TRUE(scheduler->geometry(1).shard_bytes.empty());
}

TEST_F(HostRegionTest, different_options_are_refused_with_both_values) {
  const auto scheduler = HostRegion::attach_scheduler(options(8 * kMiB, 2));
  const std::string sizes = message_of<InvalidArgument>(
      [&] { HostRegion::attach_worker(options(16 * kMiB, 2), 0, some_geometry()); });
  EXPECT_TRUE(has(sizes, "cpu_bytes_to_use") && has(sizes, "8388608") && has(sizes, "16777216")) << sizes;
  const std::string workers = message_of<InvalidArgument>(
      [&] { HostRegion::attach_worker(options(8 * kMiB, 4), 0, some_geometry()); });
  EXPECT_TRUE(has(workers, "workers") && has(workers, "2") && has(workers, "4")) << workers;
  EXPECT_EQ(names().size(), 1u);
  EXPECT_NO_THROW(HostRegion::attach_worker(options(8 * kMiB, 2), 0, some_geometry()));
}

TEST_F(HostRegionTest, a_second_attach_of_a_rank_is_refused) {
  const auto worker = HostRegion::attach_worker(options(8 * kMiB, 2), 1, some_geometry(1));
  EXPECT_THROW(HostRegion::attach_worker(options(8 * kMiB, 2), 1, some_geometry(9)), ResourceError);
  EXPECT_EQ(worker->geometry(1).fingerprint, "rank 1") << "the second attach changed the geometry";
}

TEST_F(HostRegionTest, a_region_above_available_memory_is_refused_without_a_file) {
  const std::string text =
      message_of<ResourceError>([&] { HostRegion::attach_scheduler(options(1ull << 50, 1)); });
  EXPECT_TRUE(has(text, "1.0 PiB") && has(text, "available") && has(text, "cpu_bytes_to_use")) << text;
  EXPECT_TRUE(names().empty());
}

TEST_F(HostRegionTest, a_missing_shm_directory_is_named_in_the_error) {
  RegionOptions elsewhere = options(8 * kMiB, 1);
  elsewhere.shm_directory += "/none";
  const std::string text = message_of<ResourceError>([&] { HostRegion::attach_scheduler(elsewhere); });
  EXPECT_TRUE(has(text, elsewhere.shm_directory)) << text;
}

TEST_F(HostRegionTest, a_symlink_at_the_region_name_is_not_followed) {
  const std::string victim = directory_ + "/victim";
  std::ofstream(victim) << "precious";
  std::filesystem::create_symlink(victim, SharedFile::path_of(directory_, "engine"));
  const std::string text =
      message_of<ResourceError>([&] { HostRegion::attach_scheduler(options(8 * kMiB, 1)); });
  EXPECT_TRUE(has(text, "cannot be opened")) << text;
  EXPECT_EQ(std::filesystem::file_size(victim), 8u);
}

TEST_F(HostRegionTest, concurrent_engines_have_separate_regions) {
  const auto a = HostRegion::attach_scheduler(options(8 * kMiB, 1, "a"));
  const auto b = HostRegion::attach_scheduler(options(16 * kMiB, 1, "b"));
  EXPECT_TRUE(b->swept().empty()) << "b swept the region of a running engine";
  a->area(0)[0] = std::byte{1};
  EXPECT_EQ(b->area(0)[0], std::byte{0});
  const auto worker = HostRegion::attach_worker(options(8 * kMiB, 1, "a"), 0, some_geometry());
  EXPECT_EQ(worker->area(0)[0], std::byte{1});
  EXPECT_EQ(names().size(), 1u) << "b waits for its worker";
}

TEST_F(HostRegionTest, areas_are_excluded_from_core_dumps) {
  const auto region = HostRegion::attach_scheduler(options(8 * kMiB, 1));
  const std::string start = fmt::format("{:x}-", reinterpret_cast<std::uintptr_t>(region->area(0).data()));
  std::ifstream smaps("/proc/self/smaps");
  std::string line, flags;
  while (std::getline(smaps, line) && !line.starts_with(start)) {
  }
  while (std::getline(smaps, line) && !line.starts_with("VmFlags:")) {
  }
  EXPECT_TRUE(has(line, " dd")) << line;
}

// ---- regions that outlive their engine

class KeptRegion : public ShmTest {
 protected:
  RegionOptions kept(const std::string& engine, std::uint64_t bytes = 8 * kMiB) const {
    RegionOptions made = options(bytes, 1, engine);
    made.keep_for = "model";
    return made;
  }
  struct Engine {
    explicit Engine(const RegionOptions& options)
        : worker(HostRegion::attach_worker(options, 0, some_geometry())),
          scheduler(HostRegion::attach_scheduler(options)) {}
    std::unique_ptr<HostRegion> worker, scheduler;
  };
};

TEST_F(KeptRegion, the_next_engine_gets_the_bytes_but_no_process_state) {
  {
    Engine engine(kept("first"));
    engine.worker->area(0)[7] = std::byte{7};
    engine.scheduler->memory_after_areas(4096)[5] = std::byte{5};
    engine.worker->report(0, 1, 0);
    engine.scheduler->set_fetching(true);
    EXPECT_TRUE(engine.worker->is_fetching());
    EXPECT_TRUE(engine.scheduler->keep());
  }
  ASSERT_EQ(names().size(), 1u);
  EXPECT_TRUE(names()[0].starts_with(kKeptNamePrefix));
  EXPECT_TRUE(sweep_leftovers(directory_).empty());
  const auto worker = HostRegion::attach_worker(kept("second"), 0, {{}, "another"});
  const auto scheduler = HostRegion::attach_scheduler(kept("second"));
  EXPECT_EQ(scheduler->area(0)[7], std::byte{7});
  EXPECT_EQ(scheduler->memory_after_areas(4096)[5], std::byte{5});
  EXPECT_EQ(scheduler->geometry(0).fingerprint, "another");
  std::uint64_t failed = 0;
  EXPECT_EQ(scheduler->result(1, &failed), TicketResult::kPending);
  EXPECT_FALSE(worker->is_fetching());
}

TEST_F(KeptRegion, a_region_without_keep_is_removed_with_its_engine) {
  { Engine engine(kept("first")); }
  EXPECT_TRUE(names().empty());
}

TEST_F(KeptRegion, a_kept_region_survives_engines_that_end_before_keep) {
  {
    Engine engine(kept("first"));
    engine.worker->area(0)[7] = std::byte{7};
    EXPECT_TRUE(engine.scheduler->keep());
  }
  { Engine engine(kept("second")); }
  EXPECT_EQ(Child([&] {
              Engine engine(kept("third"));
              ::kill(::getpid(), SIGKILL);
            }).wait(),
            SIGKILL);
  Engine engine(kept("fourth"));
  EXPECT_EQ(engine.scheduler->area(0)[7], std::byte{7});
  EXPECT_TRUE(engine.scheduler->keep());
  EXPECT_EQ(names().size(), 1u) << "the region has too many names";
}

TEST_F(KeptRegion, a_region_of_another_size_or_version_is_removed) {
  EXPECT_TRUE(Engine(kept("first")).scheduler->keep());
  EXPECT_TRUE(Engine(kept("larger", 16 * kMiB)).scheduler->keep());
  EXPECT_EQ(names().size(), 1u);
  std::fstream(directory_ + "/" + names()[0], std::ios::in | std::ios::out).write("older...", 8);
  Engine engine(kept("next", 16 * kMiB));
  EXPECT_EQ(engine.scheduler->area(0)[0], std::byte{0});
  EXPECT_TRUE(engine.scheduler->keep());
  EXPECT_EQ(names().size(), 1u);
}

// A directory on a disk outlives a power failure, which leaves some pages older than others.
TEST_F(KeptRegion, a_region_from_before_a_reboot_is_removed) {
  std::ifstream boot_id("/proc/sys/kernel/random/boot_id");
  const std::string id{std::istreambuf_iterator<char>(boot_id), {}};
  {
    Engine engine(kept("first"));
    engine.worker->area(0)[7] = std::byte{7};
    EXPECT_TRUE(engine.scheduler->keep());
  }
  {
    std::fstream file(directory_ + "/" + names()[0], std::ios::in | std::ios::out);
    std::string page(kPageBytes, 0);
    file.read(page.data(), static_cast<std::streamsize>(page.size()));
    const std::uint64_t boot = XXH3_64bits(id.data(), id.size());
    const std::size_t at = page.find(std::string(reinterpret_cast<const char*>(&boot), sizeof boot));
    ASSERT_NE(at, std::string::npos);
    file.seekp(static_cast<std::streamoff>(at)).put(static_cast<char>(page[at] ^ 1));
  }
  Engine engine(kept("next"));
  EXPECT_EQ(engine.scheduler->area(0)[7], std::byte{0});
  EXPECT_EQ(engine.scheduler->kept().origin, RegionOrigin::kReplaced);
  EXPECT_TRUE(engine.scheduler->keep());
  EXPECT_EQ(names().size(), 1u);
}

TEST_F(KeptRegion, a_region_kept_for_another_model_stays) {
  EXPECT_TRUE(Engine(kept("first")).scheduler->keep());
  RegionOptions other = kept("second");
  other.keep_for = "another model";
  Engine engine(other);
  EXPECT_TRUE(engine.scheduler->keep());
  EXPECT_EQ(names().size(), 2u);
}

TEST_F(KeptRegion, a_region_of_a_running_engine_is_not_adopted) {
  Engine running(kept("running"));
  EXPECT_TRUE(running.scheduler->keep());
  running.worker->area(0)[0] = std::byte{1};
  Engine beside(kept("beside"));
  EXPECT_EQ(beside.scheduler->area(0)[0], std::byte{0});
  EXPECT_TRUE(beside.scheduler->keep());
  EXPECT_EQ(names().size(), 2u);
}

TEST_F(KeptRegion, a_symlink_at_the_kept_name_is_not_followed) {
  EXPECT_TRUE(Engine(kept("first")).scheduler->keep());
  const std::string name = directory_ + "/" + names()[0];
  std::filesystem::rename(name, directory_ + "/elsewhere");
  std::filesystem::create_symlink(directory_ + "/elsewhere", name);
  Engine engine(kept("second"));
  engine.worker->area(0)[0] = std::byte{9};
  EXPECT_EQ(std::filesystem::hard_link_count(directory_ + "/elsewhere"), 1u);
}

TEST_F(KeptRegion, later_ranks_wait_for_the_first_rank) {
  RegionOptions two = options(8 * kMiB, 2, "engine");
  two.keep_for = "model";
  Signal attached;
  Child second([&] {
    const auto region = HostRegion::attach_worker(two, 1, some_geometry(1));
    EXPECT_TRUE(region->wait_for_ranks(std::chrono::seconds(60)).is_ok());
    attached.raise();
  });
  const auto first = HostRegion::attach_worker(two, 0, some_geometry(0));
  attached.wait();
  EXPECT_EQ(second.wait(), 0);
}

TEST_F(KeptRegion, a_kept_region_is_removed_when_a_start_needs_its_memory) {
  ASSERT_EQ(::mount("tmpfs", directory_.c_str(), "tmpfs", 0, "size=24m"), 0) << "needs root";
  {
    Engine engine(kept("first", 16 * kMiB));
    std::ranges::fill(engine.worker->area(0), std::byte{1});  // populates all of it
    EXPECT_TRUE(engine.scheduler->keep());
  }
  const std::vector<std::string> before = names();
  {
    const auto small = HostRegion::attach_worker(options(2 * kMiB, 1, "small"), 0, some_geometry());
    EXPECT_TRUE(small->swept().empty()) << "there was room next to the kept region";
  }
  const auto large = HostRegion::attach_worker(options(16 * kMiB, 1, "large"), 0, some_geometry());
  EXPECT_EQ(large->swept(), before);
  ::umount2(directory_.c_str(), MNT_DETACH);
}

// An engine that was killed holds its region until it has exited.
TEST_F(KeptRegion, a_kept_region_is_removed_as_soon_as_a_start_that_needs_its_memory_can) {
  ASSERT_EQ(::mount("tmpfs", directory_.c_str(), "tmpfs", 0, "size=24m"), 0) << "needs root";
  {
    Engine engine(kept("first", 16 * kMiB));
    std::ranges::fill(engine.worker->area(0), std::byte{1});  // populates all of it
    EXPECT_TRUE(engine.scheduler->keep());
  }
  const std::vector<std::string> before = names();
  const std::string name = directory_ + "/" + before.at(0);
  Signal held;
  Child ending([&] {
    const int file = ::open(name.c_str(), O_RDONLY | O_CLOEXEC), watch = ::inotify_init1(IN_CLOEXEC);
    EXPECT_EQ(::flock(file, LOCK_SH), 0);
    EXPECT_GE(::inotify_add_watch(watch, name.c_str(), IN_OPEN | IN_CLOSE), 0);
    held.raise();
    // The start opens the region three times before it waits: for leftovers, and twice when memory is short.
    for (int left = 6; left > 0; --left) {
      ::inotify_event event{};
      ::pollfd ready{watch, POLLIN, 0};
      if (::poll(&ready, 1, 10'000) != 1) break;
      ASSERT_EQ(::read(watch, &event, sizeof(event)), ssize_t{sizeof(event)});
    }
  });
  held.wait();
  RegionOptions large = options(16 * kMiB, 1, "large");
  large.share_for = "model";
  std::unique_ptr<HostRegion> started;
  EXPECT_NO_THROW(started = HostRegion::attach_worker(large, 0, some_geometry()));
  EXPECT_EQ(ending.wait(), 0);
  EXPECT_EQ(started ? started->swept() : std::vector<std::string>(), before);
  started.reset();
  ::umount2(directory_.c_str(), MNT_DETACH);
}

// The engine of the first region was killed before it had touched all of its memory.
TEST_F(KeptRegion, adopting_a_partly_populated_region_needs_memory_for_the_rest) {
  ASSERT_EQ(::mount("tmpfs", directory_.c_str(), "tmpfs", 0, "size=24m"), 0) << "needs root";
  EXPECT_TRUE(Engine(kept("first", 16 * kMiB)).scheduler->keep());
  const std::vector<std::string> first = names();
  RegionOptions other = kept("other", 16 * kMiB);
  other.keep_for = "another model";
  {
    Engine engine(other);
    std::ranges::fill(engine.worker->area(0), std::byte{1});  // populates all of it
    EXPECT_TRUE(engine.scheduler->keep());
    const std::string text = message_of<ResourceError>([&] { Engine{kept("second", 16 * kMiB)}; });
    EXPECT_TRUE(has(text, "cpu_bytes_to_use") && has(text, "available")) << text;
    EXPECT_EQ(names().size(), 2u);
  }
  {
    Engine engine(kept("third", 16 * kMiB));
    EXPECT_EQ(engine.worker->swept().size(), 1u) << "the other region's memory was available";
    std::ranges::fill(engine.worker->area(0), std::byte{1});  // SIGBUS if there is no memory
    EXPECT_TRUE(engine.scheduler->keep());
  }
  EXPECT_EQ(names(), first);
  ::umount2(directory_.c_str(), MNT_DETACH);
}

// ---- several processes

class HostRegionProcesses : public ShmTest {
 protected:
  std::unique_ptr<HostRegion> attach(int who, std::uint64_t bytes = 8 * kMiB) {
    if (who < 0) return HostRegion::attach_scheduler(options(bytes, 2));
    const auto rank = static_cast<std::uint32_t>(who);
    return HostRegion::attach_worker(options(bytes, 2), rank, some_geometry(rank));
  }
};

TEST_F(HostRegionProcesses, processes_share_bytes_in_any_attach_order) {
  std::vector<int> order{-1, 0, 1};
  do {
    Signal may_attach[3], attached, may_write, written, may_check;
    std::vector<Child> children;
    for (const int who : order) {
      children.emplace_back([&, who] {
        may_attach[who + 1].wait();
        const auto region = attach(who);
        attached.raise();
        may_write.wait();
        if (who >= 0) region->area(static_cast<std::uint32_t>(who))[77] = std::byte(10 + who);
        written.raise();
        may_check.wait();
        EXPECT_EQ(region->area(0)[77], std::byte{10});
        EXPECT_EQ(region->area(1)[77], std::byte{11});
      });
    }
    for (int i = 0; i < 3; ++i) {
      may_attach[order[i] + 1].raise();
      attached.wait();
      EXPECT_EQ(names().size(), i < 2 ? 1u : 0u);
    }
    may_write.raise(3);
    written.wait(3);
    may_check.raise(3);
    for (Child& child : children) EXPECT_EQ(child.wait(), 0);
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST_F(HostRegionProcesses, concurrent_starts_share_one_region_while_others_sweep) {
  for (int round = 0; round < 50; ++round) {
    std::ofstream(SharedFile::path_of(directory_, "engine")) << "left by a crash under the same name";
    Signal start, attached, leave;
    std::vector<Child> children;
    for (const int who : {-1, 0, 1}) {
      children.emplace_back([&, who] {
        start.wait();
        const auto region = attach(who);
        EXPECT_TRUE(region->wait_for_ranks(std::chrono::seconds(240)).is_ok());
        EXPECT_EQ(region->geometry(1).fingerprint, "rank 1");
        attached.raise();
        leave.wait();
      });
    }
    children.emplace_back([&] {
      start.wait();
      for (int i = 0; i < 30; ++i) (void)sweep_leftovers(directory_);
      attached.raise();
      leave.wait();
    });
    start.raise(4);
    attached.wait(4);
    EXPECT_TRUE(names().empty());
    leave.raise(4);
    for (Child& child : children) ASSERT_EQ(child.wait(), 0) << "round " << round;
  }
}

TEST_F(HostRegionProcesses, the_file_of_a_killed_process_is_swept_at_start) {
  Signal attached, never;
  Child child([&] {
    const auto region = attach(0);
    attached.raise();
    never.wait();
  });
  attached.wait();
  EXPECT_TRUE(sweep_leftovers(directory_).empty()) << "the process is alive";
  child.kill();
  child.wait();
  const std::vector<std::string> left = names();
  ASSERT_EQ(left.size(), 1u);
  const auto region = attach(0);
  EXPECT_EQ(region->swept(), left);
  EXPECT_EQ(region->area(0)[0], std::byte{0});
}

TEST_F(HostRegionProcesses, an_incomplete_region_file_is_swept) {
  std::ofstream(directory_ + "/kv_offload-0123.99.7f") << "half";
  std::ofstream(directory_ + "/somebody-elses") << "stays";
  EXPECT_EQ(sweep_leftovers(directory_), std::vector<std::string>{"kv_offload-0123.99.7f"});
  EXPECT_EQ(names(), std::vector<std::string>{"somebody-elses"});
}

TEST_F(HostRegionProcesses, no_file_remains_when_attached_processes_are_killed) {
  Signal attached, never;
  std::vector<Child> children;
  for (const int who : {-1, 0, 1}) {
    children.emplace_back([&, who] {
      const auto region = attach(who);
      attached.raise();
      never.wait();
    });
  }
  attached.wait(3);
  for (Child& child : children) child.kill();
  for (Child& child : children) child.wait();
  EXPECT_TRUE(names().empty());
}

TEST_F(HostRegionProcesses, a_forked_child_does_not_release_its_parents_region) {
  auto region = attach(-1);
  EXPECT_EQ(Child([&] { region.reset(); }).wait(), 0);
  EXPECT_TRUE(sweep_leftovers(directory_).empty());
  EXPECT_EQ(names().size(), 1u);
}

TEST_F(HostRegionProcesses, tickets_are_reported_across_processes) {
  const auto scheduler = attach(-1);
  const auto reporting = [&](int rank, std::uint64_t failed) {
    return Child([&, rank, failed] { attach(rank)->report(static_cast<std::uint32_t>(rank), 5, failed); })
        .wait();
  };
  std::uint64_t failed = 0;
  EXPECT_EQ(reporting(0, 0b001), 0);
  EXPECT_EQ(scheduler->result(5, &failed), TicketResult::kPending);
  EXPECT_EQ(reporting(1, 0b100), 0);
  EXPECT_EQ(scheduler->result(5, &failed), TicketResult::kDone);
  EXPECT_EQ(failed, 0b101u);
}

}  // namespace
}  // namespace kv_offload
