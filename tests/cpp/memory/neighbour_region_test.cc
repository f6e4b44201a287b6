// SPDX-License-Identifier: Apache-2.0
#include "memory/neighbour_region.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <fstream>

#include "memory/child_process.h"
#include "memory/control_page.h"
#include "memory/sharing_engine.h"
#include "memory/shm_fixture.h"

namespace kv_offload {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::IsSupersetOf;
using testing::SharingEngine;
using ::testing::SizeIs;

class NeighbourRegionTest : public ShmTest {
 protected:
  std::unique_ptr<SharingEngine> engine(const std::string& id, const std::string& identity = "weights",
                                        std::uint64_t rows = SharingEngine::kRows) const {
    return std::make_unique<SharingEngine>(directory_, id, identity, rows);
  }
  std::string path_of(unsigned number) const {
    return SharedFile::shared_path_of(directory_, "model", number);
  }
};

TEST_F(NeighbourRegionTest, an_engine_reads_a_neighbours_row_where_it_is) {
  const auto owner = engine("owner"), reader = engine("reader");
  ASSERT_TRUE(owner->store(7, 42));
  EXPECT_THAT(reader->look_around(), IsEmpty());
  ASSERT_EQ(reader->neighbours.size(), 1u);
  const auto held = reader->pin(42);
  ASSERT_TRUE(held);
  EXPECT_TRUE(reader->is_right(*held));
  EXPECT_FALSE(owner->store(7, 43)) << "the row was reused while it was read";
  EXPECT_TRUE(reader->is_right(*held));
  reader->unpin(*held);
  EXPECT_TRUE(owner->store(7, 43));
  EXPECT_FALSE(reader->pin(42));
}

TEST_F(NeighbourRegionTest, a_neighbours_memory_cannot_be_written) {
  const auto owner = engine("owner"), reader = engine("reader");
  ASSERT_TRUE(owner->store(0, 1));
  reader->look_around();
  const auto held = *reader->pin(1);
  EXPECT_DEATH(reader->write(reader->worker->neighbour_row(held.slot, held.row), 2), "");
}

TEST_F(NeighbourRegionTest, three_engines_read_each_other) {
  const auto a = engine("a"), b = engine("b"), c = engine("c");
  SharingEngine* const all[] = {a.get(), b.get(), c.get()};
  for (std::uint32_t i = 0; i < 3; ++i) ASSERT_TRUE(all[i]->store(i, i));
  for (SharingEngine* one : all) EXPECT_THAT(one->look_around(), IsEmpty());
  for (std::uint32_t i = 0; i < 3; ++i) {
    for (std::uint32_t number = 0; number < 3; ++number) {
      const auto held = all[i]->pin(number);
      EXPECT_EQ(held.has_value(), i != number);
      EXPECT_TRUE(!held || all[i]->is_right(*held));
    }
  }
}

TEST_F(NeighbourRegionTest, an_engine_knows_the_number_under_which_others_know_it) {
  const auto a = engine("a"), b = engine("b");
  a->look_around();
  b->look_around();
  const auto seen_by = [](const SharingEngine& one) { return one.neighbours.begin()->second->number(); };
  EXPECT_EQ(shared_number(*a->scheduler), seen_by(*b));
  EXPECT_EQ(shared_number(*b->scheduler), seen_by(*a));
  EXPECT_EQ(shared_number(*b->worker), seen_by(*a));
  b->scheduler->stop_sharing();
  EXPECT_FALSE(shared_number(*b->scheduler));
  const auto alone = HostRegion::attach_scheduler(options(kMiB, 1, "alone"));
  EXPECT_FALSE(shared_number(*alone));
}

TEST_F(NeighbourRegionTest, two_readers_hold_a_row_until_both_have_released_it) {
  const auto owner = engine("owner"), a = engine("a"), b = engine("b");
  ASSERT_TRUE(owner->store(3, 5));
  a->look_around();
  b->look_around();
  const auto by_a = *a->pin(5), by_b = *b->pin(5);
  a->unpin(by_a);
  EXPECT_FALSE(owner->store(3, 6));
  EXPECT_TRUE(b->is_right(by_b));
  b->unpin(by_b);
  EXPECT_TRUE(owner->store(3, 6));
}

TEST_F(NeighbourRegionTest, the_pins_of_a_killed_reader_are_cleared) {
  const auto owner = engine("owner");
  ASSERT_TRUE(owner->store(3, 5));
  Signal pinned;
  Child reader([&] {
    SharingEngine dying(directory_, "reader");
    dying.look_around();
    if (!dying.pin(5)) throw std::runtime_error("no pin");
    pinned.raise();
    ::pause();
  });
  pinned.wait();
  owner->clear_dead_readers();
  EXPECT_FALSE(owner->store(3, 6)) << "the reader lives";
  reader.kill();
  reader.wait();
  owner->clear_dead_readers();
  EXPECT_TRUE(owner->store(3, 6));
}

// A worker may still copy when its scheduler has died.
TEST_F(NeighbourRegionTest, a_reader_is_alive_as_long_as_its_worker) {
  const auto owner = engine("owner"), reader = engine("reader");
  ASSERT_TRUE(owner->store(3, 5));
  reader->look_around();
  ASSERT_TRUE(reader->pin(5));
  reader->neighbours.clear();  // what the death of the scheduler's process closes
  owner->clear_dead_readers();
  EXPECT_FALSE(owner->store(3, 6));
  reader->worker.reset();
  owner->clear_dead_readers();
  EXPECT_TRUE(owner->store(3, 6));
}

TEST_F(NeighbourRegionTest, an_owner_knows_whether_any_process_has_a_reader_number) {
  const auto owner = engine("owner");
  auto reader = engine("reader");
  const auto has_none = [&] {
    bool was_called = false;
    const bool answer = owner->scheduler->if_no_reader_lives([&] { was_called = true; });
    EXPECT_EQ(was_called, answer);
    return answer;
  };
  EXPECT_TRUE(has_none());
  reader->look_around();
  EXPECT_FALSE(has_none());
  reader->neighbours.clear();
  EXPECT_FALSE(has_none()) << "its worker lives";
  reader.reset();
  EXPECT_TRUE(has_none());
}

TEST_F(NeighbourRegionTest, a_stopped_reader_keeps_its_row_and_blocks_nothing_else) {
  const auto owner = engine("owner");
  ASSERT_TRUE(owner->store(3, 5));
  Signal pinned;
  Child reader([&] {
    SharingEngine stopped(directory_, "reader");
    stopped.look_around();
    if (!stopped.pin(5)) throw std::runtime_error("no pin");
    pinned.raise();
    ::raise(SIGSTOP);
  });
  pinned.wait();
  owner->clear_dead_readers();
  EXPECT_FALSE(owner->store(3, 6));
  for (RowId row = 4; row < SharingEngine::kRows; ++row) EXPECT_TRUE(owner->store(row, row));
  const auto other = engine("other");
  EXPECT_THAT(other->look_around(), IsEmpty());
  const auto held = other->pin(10);
  ASSERT_TRUE(held);
  EXPECT_TRUE(other->is_right(*held));
  reader.kill();
}

TEST_F(NeighbourRegionTest, a_new_reader_clears_the_pins_of_a_killed_reader_with_its_number) {
  const auto owner = engine("owner");
  ASSERT_TRUE(owner->store(3, 5));
  {
    Signal pinned;
    Child reader([&] {
      SharingEngine dying(directory_, "reader");
      dying.look_around();
      if (!dying.pin(5)) throw std::runtime_error("no pin");
      pinned.raise();
      ::pause();
    });
    pinned.wait();
    reader.kill();
  }
  const auto next = engine("next");
  next->look_around();
  EXPECT_TRUE(owner->store(3, 6));
}

TEST_F(NeighbourRegionTest, a_killed_owner_is_read_until_it_is_released_and_then_leaves_nothing) {
  const auto reader = engine("reader");
  Signal stored;
  Child owner([&] {
    SharingEngine dying(directory_, "owner");
    if (!dying.store(3, 5)) throw std::runtime_error("no row");
    stored.raise();
    ::pause();
  });
  stored.wait();
  reader->look_around();
  const auto held = reader->pin(5);
  ASSERT_TRUE(held);
  owner.kill();
  owner.wait();
  reader->look_around();
  EXPECT_EQ(reader->neighbours.size(), 1u) << "a region with pinned rows was left";
  EXPECT_TRUE(reader->is_right(*held));
  reader->unpin(*held);
  reader->look_around();
  EXPECT_THAT(reader->neighbours, IsEmpty());
  EXPECT_EQ(names().size(), 1u) << "only the reader's own region may have a name";
  EXPECT_TRUE(reader->scheduler->has_unmapped(0));
}

TEST_F(NeighbourRegionTest, the_memory_of_a_killed_last_engine_is_listed_and_freed_by_the_next_start) {
  Signal stored;
  Child last([&] {
    SharingEngine dying(directory_, "last");
    if (!dying.store(3, 5)) throw std::runtime_error("no row");
    stored.raise();
    ::pause();
  });
  stored.wait();
  std::vector<RegionFile> files = region_files(directory_);
  ASSERT_EQ(files.size(), 1u);
  EXPECT_TRUE(files[0].is_held);
  last.kill();
  last.wait();
  files = region_files(directory_);
  ASSERT_EQ(files.size(), 1u);
  EXPECT_FALSE(files[0].is_held);
  EXPECT_THAT(files[0].name, HasSubstr("kv_offload-shared-"));
  EXPECT_GE(files[0].bytes, kPageBytes);
  // Also an engine of another model that shares nothing.
  const auto next = HostRegion::attach_scheduler(options(kMiB, 1, "next"));
  EXPECT_THAT(next->swept(), ElementsAre(files[0].name));
  EXPECT_EQ(names().size(), 1u) << "only the new region may have a name";
}

TEST_F(NeighbourRegionTest, an_owner_that_ends_keeps_the_rows_that_others_read) {
  const auto reader = engine("reader");
  auto owner = engine("owner");
  ASSERT_TRUE(owner->store(3, 5));
  reader->look_around();
  const auto held = *reader->pin(5);
  owner->rows().close();
  owner->scheduler->stop_sharing();
  owner.reset();
  EXPECT_TRUE(reader->is_right(held));
  EXPECT_FALSE(reader->pin(5)) << "a closed region still serves rows";
  reader->unpin(held);
}

TEST_F(NeighbourRegionTest, a_slot_is_reused_after_a_neighbour_has_ended) {
  const auto reader = engine("reader");
  for (std::uint32_t i = 0; i < 2 * HostRegion::kMostNeighbours; ++i) {
    const auto owner = engine("owner" + std::to_string(i));
    ASSERT_TRUE(owner->store(0, i));
    EXPECT_THAT(reader->look_around(), IsEmpty());
    const auto held = reader->pin(i);
    ASSERT_TRUE(held) << i;
    EXPECT_TRUE(reader->is_right(*held));
    reader->unpin(*held);
  }
}

TEST_F(NeighbourRegionTest, a_dismissal_during_a_slow_mapping_waits_until_the_area_is_unmapped) {
  const auto owner = engine("owner"), reader = engine("reader");
  reader->look_around();
  ASSERT_EQ(reader->neighbours.size(), 1u);
  const std::uint32_t slot = reader->neighbours.begin()->first;
  const NeighbourArea area = reader->neighbours.begin()->second->area();
  reader->scheduler->dismiss_neighbour(slot);
  reader->worker->map_neighbours();
  reader->scheduler->request_neighbour(slot, area);
  reader->worker->map_neighbours([&](std::span<std::byte>, bool mapped) {
    if (mapped) reader->scheduler->dismiss_neighbour(slot);
    return Status::ok();
  });
  EXPECT_FALSE(reader->scheduler->has_unmapped(slot)) << "it is still mapped";
  EXPECT_FALSE(reader->scheduler->has_mapped(slot));
  reader->worker->map_neighbours();
  EXPECT_TRUE(reader->scheduler->has_unmapped(slot));
}

TEST_F(NeighbourRegionTest, a_stop_ends_the_mapping_before_the_next_neighbour) {
  const auto one = engine("one"), other = engine("other"), reader = engine("reader");
  reader->attach_to_neighbours();
  ASSERT_EQ(reader->neighbours.size(), 2u);
  int mapped = 0;
  const auto count = [&](std::span<std::byte>, bool) {
    ++mapped;
    return Status::ok();
  };
  reader->worker->map_neighbours(count, [&] { return mapped > 0; });
  EXPECT_EQ(mapped, 1);
  reader->worker->map_neighbours(count);
  EXPECT_EQ(mapped, 2) << "a later call maps the others";
}

// True if the page is in the page tables of this process. Source of the format: Linux,
// admin-guide/mm/pagemap.rst.
bool is_entered(const std::byte* address) {
  const int fd = ::open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
  std::uint64_t entry = 0;
  const auto page = reinterpret_cast<std::uintptr_t>(address) / kPageBytes;
  EXPECT_EQ(::pread(fd, &entry, sizeof entry, static_cast<off_t>(page * sizeof entry)),
            ssize_t{sizeof entry});
  ::close(fd);
  return (entry >> 63 & 1) != 0;
}

// Returns the rows of the first neighbour that are in the page tables.
std::vector<RowId> entered_rows(const SharingEngine& reader) {
  const std::uint32_t slot = reader.neighbours.begin()->first;
  std::vector<RowId> found;
  for (RowId row = 0; row < SharingEngine::kRows; ++row) {
    if (is_entered(reader.worker->shard(0, reader.worker->neighbour_row(slot, row), kPageBytes).data())) {
      found.push_back(row);
    }
  }
  return found;
}

TEST_F(NeighbourRegionTest, memory_of_a_neighbour_is_entered_in_the_page_tables_in_pieces) {
  const auto owner = engine("owner"), reader = engine("reader");
  for (RowId row = 0; row < SharingEngine::kRows; ++row) ASSERT_TRUE(owner->store(row, row));
  reader->look_around();
  EXPECT_THAT(entered_rows(*reader), IsEmpty());
  EXPECT_EQ(reader->worker->fault_in_neighbours(3 * kPageBytes), 3 * kPageBytes);
  EXPECT_THAT(entered_rows(*reader), IsSupersetOf({0, 1, 2}));
  EXPECT_EQ(reader->worker->fault_in_neighbours(kMiB), (SharingEngine::kRows - 3) * kPageBytes);
  EXPECT_THAT(entered_rows(*reader), SizeIs(SharingEngine::kRows));
  EXPECT_EQ(reader->worker->fault_in_neighbours(kMiB), 0u);
}

TEST_F(NeighbourRegionTest, memory_that_a_neighbour_has_not_allocated_is_left_to_it) {
  const auto owner = engine("owner"), reader = engine("reader");
  ASSERT_TRUE(owner->store(0, 0));
  ASSERT_TRUE(owner->store(40, 40));
  reader->look_around();
  EXPECT_EQ(reader->worker->fault_in_neighbours(kMiB), kPageBytes);
  EXPECT_EQ(reader->worker->fault_in_neighbours(kMiB), 0u) << "row 1 has no memory";
  ASSERT_TRUE(owner->store(1, 1));
  EXPECT_EQ(reader->worker->fault_in_neighbours(kMiB), kPageBytes) << "row 2 has none";
}

TEST_F(NeighbourRegionTest, the_next_neighbour_in_a_slot_is_entered_from_its_start) {
  const auto reader = engine("reader");
  for (const char* name : {"first", "second"}) {
    const auto owner = engine(name);
    ASSERT_TRUE(owner->store(0, 7));
    reader->look_around();
    EXPECT_EQ(reader->worker->fault_in_neighbours(kMiB), kPageBytes) << name;
  }
}

// ---- regions that outlive their engines

class KeptNeighbourTest : public NeighbourRegionTest {
 protected:
  std::unique_ptr<SharingEngine> kept(const std::string& id, const std::string& identity = "weights",
                                      std::uint64_t shard_bytes = kPageBytes) const {
    return std::make_unique<SharingEngine>(directory_, id, identity, SharingEngine::kRows, true, shard_bytes);
  }
  // Runs an engine in another process until `use` has ended, and the rest of the test until it is killed.
  struct Killed {
    Killed(const KeptNeighbourTest& test, const std::string& id,
           const std::function<void(SharingEngine&)>& use)
        : child([&, id] {
            const auto dying = test.kept(id);
            use(*dying);
            ready.raise();
            go_on.wait();
            // The row is pinned now: it is withdrawn, and stays in use.
            if (dying->store(3, 6)) throw std::runtime_error("a row was reused while it was read");
            ready.raise();
            ::pause();
          }) {
      ready.wait();
    }
    void kill() {
      child.kill();
      child.wait();
    }
    Signal ready, go_on;
    Child child;
  };
  static std::vector<RowId> pinned_rows(SharingEngine& engine) {
    std::vector<RowId> rows;
    engine.rows().for_each_pinned([&](RowId row, std::uint32_t) { rows.push_back(row); });
    return rows;
  }
};

TEST_F(KeptNeighbourTest, a_region_with_a_reader_is_taken_over_and_read_again) {
  const auto reader = engine("reader");
  Killed owner(*this, "owner", [](SharingEngine& one) {
    for (RowId row = 0; row < 8; ++row) EXPECT_TRUE(one.store(row, 100 + row));
  });
  reader->look_around();
  const auto held = *reader->pin(103);
  owner.kill();
  const auto next = kept("next");
  EXPECT_EQ(next->taken_over.size(), 8u);
  for (const auto& [row, number] : next->taken_over) EXPECT_TRUE(next->has_bytes(row, number)) << row;
  EXPECT_FALSE(reader->pin(104)) << "the view of the earlier owner finds a row";
  EXPECT_FALSE(next->store(3, 7)) << "a row was reused while it was read";
  EXPECT_TRUE(reader->is_right(held));
  EXPECT_TRUE(next->store(4, 8));
  reader->unpin(held);
  EXPECT_TRUE(next->store(3, 7));
  EXPECT_THAT(reader->look_around(), IsEmpty());
  EXPECT_THAT(reader->look_around(), IsEmpty());
  for (const std::uint32_t number : {7u, 8u, 100u, 107u}) {
    const auto again = reader->pin(number);
    ASSERT_TRUE(again) << number;
    EXPECT_TRUE(reader->is_right(*again));
  }
  EXPECT_FALSE(reader->pin(104));
  EXPECT_EQ(names().size(), 3u) << "the reader's name, and two of the region that was taken over";
}

TEST_F(KeptNeighbourTest, a_row_that_was_withdrawn_while_it_was_read_is_not_reused_by_the_next_owner) {
  const auto reader = engine("reader");
  Killed owner(*this, "owner", [](SharingEngine& one) { EXPECT_TRUE(one.store(3, 5)); });
  reader->look_around();
  const auto held = *reader->pin(5);
  owner.go_on.raise();
  owner.ready.wait();
  owner.kill();
  for (const char* id : {"second", "third"}) {
    const auto next = kept(id);
    EXPECT_THAT(next->taken_over, IsEmpty());
    EXPECT_THAT(pinned_rows(*next), ElementsAre(3u));
    next->clear_dead_readers();
    EXPECT_FALSE(next->store(3, 7));
    EXPECT_TRUE(reader->is_right(held));
  }
  reader->unpin(held);
  const auto last = kept("last");
  EXPECT_THAT(pinned_rows(*last), IsEmpty());
  EXPECT_TRUE(last->store(3, 7));
}

TEST_F(KeptNeighbourTest, a_reader_finds_no_row_of_the_next_weights_in_its_old_view) {
  const auto reader = engine("reader");
  Killed owner(*this, "owner", [](SharingEngine& one) { EXPECT_TRUE(one.store(3, 5)); });
  reader->look_around();
  const auto held = *reader->pin(5);
  owner.kill();
  const auto next = kept("next", "other weights");
  EXPECT_THAT(next->taken_over, IsEmpty());
  ASSERT_TRUE(next->store(9, 9));
  EXPECT_FALSE(reader->pin(9));
  EXPECT_FALSE(next->store(3, 7));
  EXPECT_TRUE(reader->is_right(held));
  reader->unpin(held);
  EXPECT_THAT(reader->look_around(), ElementsAre(HasSubstr("another namespace")));
  EXPECT_FALSE(reader->pin(9));
}

// Its pins would be at other places.
TEST_F(KeptNeighbourTest, a_region_with_a_reader_is_not_taken_over_with_another_layout) {
  const auto reader = engine("reader");
  Killed owner(*this, "owner", [](SharingEngine& one) { EXPECT_TRUE(one.store(3, 5)); });
  reader->look_around();
  const auto held = *reader->pin(5);
  owner.kill();
  {
    const auto next = kept("next", "weights", kPageBytes / 2);
    EXPECT_THAT(next->taken_over, IsEmpty());
    EXPECT_TRUE(next->store(3, 7));
    EXPECT_TRUE(reader->is_right(held));
    EXPECT_EQ(next->scheduler->kept().origin, RegionOrigin::kReplaced);
  }
  // Without a reader the layout does not matter; the identity does.
  EXPECT_EQ(kept("last")->scheduler->kept().origin, RegionOrigin::kAdopted);
}

// A reader that is stopped at any instruction must not keep the next engine from the region.
TEST_F(KeptNeighbourTest, a_region_with_a_reader_is_not_taken_over_with_a_table_of_another_format) {
  const auto reader = engine("reader");
  Killed owner(*this, "owner", [](SharingEngine& one) { EXPECT_TRUE(one.store(3, 5)); });
  reader->look_around();
  const auto held = *reader->pin(5);
  owner.kill();
  // As a build with an earlier format would have left the region.
  const RankGeometry geometry{{kPageBytes}, "test"};
  const std::uint64_t now = ControlPage::layout_of(geometry);
  const std::uint64_t earlier = ControlPage::layout_of(geometry, SharedRows::kFormat - 1);
  const std::vector<std::string> files = names();
  const auto kept_name = std::find_if(files.begin(), files.end(),
                                      [](const auto& name) { return name.starts_with(kKeptNamePrefix); });
  ASSERT_NE(kept_name, files.end());
  std::fstream file(directory_ + "/" + *kept_name, std::ios::in | std::ios::out | std::ios::binary);
  std::array<std::uint64_t, kPageBytes / 8> header{};
  file.read(reinterpret_cast<char*>(header.data()), sizeof(header));
  ASSERT_EQ(std::ranges::count(header, now), 1);
  std::ranges::replace(header, now, earlier);
  file.seekp(0);
  file.write(reinterpret_cast<const char*>(header.data()), sizeof(header));
  file.close();
  const auto next = kept("next");
  EXPECT_EQ(next->scheduler->kept().origin, RegionOrigin::kReplaced);
  EXPECT_TRUE(reader->is_right(held));
}

TEST_F(KeptNeighbourTest, readers_of_a_killed_owner_neither_lock_the_file_nor_remove_its_names) {
  const auto reader = engine("reader");
  Killed owner(*this, "owner", [](SharingEngine& one) { EXPECT_TRUE(one.store(3, 5)); });
  reader->look_around();
  ASSERT_THAT(reader->neighbours, SizeIs(1));
  owner.kill();
  const std::string path = path_of(reader->neighbours.begin()->second->number());
  const int adopting = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_EQ(::flock(adopting, LOCK_SH | LOCK_NB), 0);
  reader->look_around();
  EXPECT_THAT(reader->neighbours, IsEmpty()) << "a lock of the next engine counts as one of the owner";
  ::close(adopting);
  reader->look_around();
  EXPECT_EQ(names().size(), 3u);
  for (const std::string& name : names()) {
    if (name.starts_with(kKeptNamePrefix)) std::filesystem::remove(directory_ + "/" + name);
  }
  reader->look_around();
  EXPECT_EQ(names().size(), 1u) << "memory that is not kept any more has a name";
}

TEST_F(KeptNeighbourTest, an_engine_that_does_not_share_leaves_a_region_that_others_may_read) {
  { EXPECT_TRUE(kept("first")->store(3, 5)); }
  RegionOptions alone = options(SharingEngine::kRows * kPageBytes, 1, "alone");
  alone.keep_for = "model";
  const auto worker = HostRegion::attach_worker(alone, 0, {{kPageBytes}, "test"});
  EXPECT_EQ(worker->kept().origin, RegionOrigin::kNew);
  EXPECT_EQ(kept("next")->taken_over.size(), 1u);
}

TEST_F(KeptNeighbourTest, a_region_with_two_names_is_listed_once) {
  auto one = kept("one");
  std::vector<RegionFile> files = region_files(directory_);
  ASSERT_EQ(files.size(), 1u);
  EXPECT_TRUE(files[0].is_held);
  EXPECT_THAT(files[0].name, HasSubstr("kv_offload-shared-"));
  one.reset();
  EXPECT_EQ(names().size(), 2u);
  files = region_files(directory_);
  ASSERT_EQ(files.size(), 1u);
  EXPECT_FALSE(files[0].is_held);
  EXPECT_THAT(files[0].name, HasSubstr("kv_offload-kept-"));
}

TEST_F(KeptNeighbourTest, each_of_several_engines_takes_over_one_region) {
  {
    const auto a = kept("a"), b = kept("b");
    EXPECT_TRUE(a->store(1, 1) && b->store(2, 2));
  }
  const auto first = kept("c");
  EXPECT_THAT(first->taken_over, SizeIs(1));
  EXPECT_EQ(names().size(), 3u) << "two names of the region in use, one of the other";
  const auto reader = engine("reader");
  EXPECT_THAT(reader->look_around(), IsEmpty());
  const std::uint32_t number = first->taken_over.begin()->second, other = 3 - number;
  EXPECT_TRUE(reader->pin(number));
  EXPECT_FALSE(reader->pin(other));
  const auto second = kept("d");
  ASSERT_THAT(second->taken_over, SizeIs(1));
  EXPECT_EQ(second->taken_over.begin()->second, other);
  EXPECT_THAT(reader->look_around(), IsEmpty());
  EXPECT_TRUE(reader->pin(other));
}

// ---- refused regions

TEST_F(NeighbourRegionTest, other_weights_are_not_read) {
  const auto owner = engine("owner", "new weights"), reader = engine("reader");
  ASSERT_TRUE(owner->store(0, 1));
  EXPECT_THAT(reader->look_around(), ElementsAre(HasSubstr("another namespace")));
  EXPECT_FALSE(reader->pin(1));
}

TEST_F(NeighbourRegionTest, a_region_of_another_size_is_not_read) {
  const auto owner = engine("owner", "weights", 32), reader = engine("reader");
  EXPECT_THAT(reader->look_around(), ElementsAre(HasSubstr("cpu_bytes_to_use")));
}

TEST_F(NeighbourRegionTest, a_file_that_others_may_access_is_not_read) {
  const auto owner = engine("owner"), reader = engine("reader");
  ASSERT_EQ(::chmod(path_of(0).c_str(), 0640), 0);
  EXPECT_THAT(reader->look_around(), ElementsAre(HasSubstr("mode must be 0600")));
}

TEST_F(NeighbourRegionTest, another_users_file_is_not_read) {
  const auto owner = engine("owner"), reader = engine("reader");
  if (::chown(path_of(0).c_str(), 12345, 12345) != 0) GTEST_SKIP() << "needs root";
  EXPECT_THAT(reader->look_around(), ElementsAre(HasSubstr("not a file of user")));
}

TEST_F(NeighbourRegionTest, a_link_or_a_pipe_in_place_of_a_region_is_not_read) {
  const auto owner = engine("owner"), reader = engine("reader");
  ASSERT_EQ(::symlink(path_of(0).c_str(), path_of(2).c_str()), 0);
  ASSERT_EQ(::mkfifo(path_of(3).c_str(), 0600), 0);
  EXPECT_EQ(reader->look_around().size(), 2u);
  EXPECT_EQ(reader->neighbours.size(), 1u);
}

TEST_F(NeighbourRegionTest, short_and_damaged_files_are_not_read) {
  const auto reader = engine("reader");
  unsigned number = 1;
  for (const std::string& content :
       {std::string(), std::string(100, 'x'), std::string(kPageBytes, '\0'), std::string(1 << 20, '\xFF')}) {
    const int fd = ::open(path_of(number++).c_str(), O_CREAT | O_RDWR, 0600);
    ASSERT_EQ(::write(fd, content.data(), content.size()), static_cast<ssize_t>(content.size()));
    ::close(fd);
  }
  EXPECT_EQ(reader->look_around().size(), 4u);
  EXPECT_THAT(reader->neighbours, IsEmpty());
}

// Every byte of the page with the sizes, and of the table's header, one at a time.
TEST_F(NeighbourRegionTest, no_damage_to_the_headers_leads_outside_of_the_file) {
  const auto owner = engine("owner"), reader = engine("reader");
  ASSERT_TRUE(owner->store(0, 1));
  const int fd = ::open(path_of(0).c_str(), O_RDWR);
  const auto size = static_cast<std::uint64_t>(::lseek(fd, 0, SEEK_END));
  auto* file = static_cast<std::byte*>(::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
  ::close(fd);
  const std::uint64_t table =
      size - SharedRowsLayout::of(SharingEngine::kRows * kPageBytes, kPageBytes).bytes;
  for (const std::uint64_t start : {std::uint64_t{0}, table}) {
    for (std::uint64_t at = start; at < start + 128; ++at) {
      file[at] ^= std::byte{0xFF};
      reader->look_around();
      if (const auto held = reader->pin(1)) {
        EXPECT_TRUE(reader->is_right(*held));
        reader->unpin(*held);
      }
      for (auto& [slot, neighbour] : reader->neighbours) reader->scheduler->dismiss_neighbour(slot);
      reader->neighbours.clear();
      reader->worker->map_neighbours();
      file[at] ^= std::byte{0xFF};
    }
  }
  ::munmap(file, size);
}

TEST_F(NeighbourRegionTest, a_shortened_file_is_not_read) {
  const auto owner = engine("owner"), reader = engine("reader");
  ASSERT_EQ(::truncate(path_of(0).c_str(), 2 * static_cast<off_t>(kMiB) + 100 * 1024), 0);
  EXPECT_THAT(reader->look_around(), ElementsAre(HasSubstr("is not inside its")));
}

TEST_F(NeighbourRegionTest, the_window_of_each_rank_begins_with_its_own_area) {
  for (const std::string& share_for : {std::string(), std::string("model")}) {
    RegionOptions two = options(kMiB, 2, "engine" + share_for);
    two.share_for = share_for;
    const auto first = HostRegion::attach_worker(two, 0, some_geometry(0));
    const auto second = HostRegion::attach_worker(two, 1, some_geometry(1));
    const auto scheduler = HostRegion::attach_scheduler(two);
    first->window()[0] = std::byte{1};
    second->window()[0] = std::byte{2};
    EXPECT_EQ(scheduler->area(0)[0], std::byte{1});
    EXPECT_EQ(scheduler->area(1)[0], std::byte{2});
    EXPECT_EQ(second->area(1).data(), second->window().data());
    EXPECT_EQ(second->window().size() > second->area_bytes(), !share_for.empty());
  }
}

}  // namespace
}  // namespace kv_offload
