// SPDX-License-Identifier: Apache-2.0
// libFuzzer target for the other files of a root: the ledger page, the readable description files, file
// names. Whatever they contain, opening the root ends in a usage total that keeps the bound, or in one error
// message. Clang only (CMake: fuzz_root).
#include <fcntl.h>
#include <xxhash.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "backends/fs/layout.h"
#include "backends/fs/open.h"
#include "backends/fs/sim_disk.h"
#include "backends/fs/walk.h"

namespace kv_offload {
namespace {

constexpr std::uint64_t kBound = std::uint64_t{4} << 20;

testing::SimDisk::Bytes bytes_of(const std::uint8_t* data, std::size_t size) {
  testing::SimDisk::Bytes bytes(size);
  if (size > 0) std::memcpy(bytes.data(), data, size);
  return bytes;
}

FsTierOptions options_on(testing::SimDisk& disk) {
  FsTierOptions options;
  options.root_dir = "/root";
  options.max_bytes = kBound;
  options.namespace_json = "{\"model\": \"tiny\"}\n";
  options.file_ops = &disk;
  return options;
}

// Corrects the checksum, so that the fuzzer gets past it.
void plant_page(testing::SimDisk& disk, const std::uint8_t* data, std::size_t size) {
  testing::SimDisk::Bytes bytes = disk.content("/root/ledger");
  if (bytes.size() != LedgerPage::kBytes) std::abort();
  LedgerPage page;
  std::memcpy(&page, bytes.data(), sizeof(page));
  std::memcpy(reinterpret_cast<char*>(&page) + sizeof(page.magic), data,
              std::min(size, offsetof(LedgerPage, checksum) - sizeof(page.magic)));
  std::memcpy(page.magic, bytes.data(), sizeof(page.magic));
  page.checksum = XXH3_64bits(&page, offsetof(LedgerPage, checksum));
  if (!page.valid()) std::abort();
  std::memcpy(bytes.data(), &page, sizeof(page));
  disk.replace("/root/ledger", bytes);
}

void use(const FsTierOptions& options, testing::SimDisk& disk) {
  try {
    std::shared_ptr<FsEpoch> epoch;
    const OpenRoot open = open_root(options, disk, &epoch);
    SpaceLedger& space = *open.space;
    {
      Reservation reservation(space);
      std::uint64_t missing = 0;
      if (reservation.grow_to(kBound + 1, &missing)) std::abort();  // more than the bound
      reservation.adopt(4096, space.finished());
      (void)reservation.grow_to(4096, &missing);
      reservation.used = 4096;
    }
    space.remove(4096, space.finished());
    space.add(4096);
    SpaceFigures figures;
    std::uint64_t number = 0;
    // A page full of slots has no slot for us until the dead owners are detected.
    if (!space.poll(Nanos{0}, &figures) || !space.poll(SpaceLedger::kDeadAfter, &figures)) std::abort();
    if (!space.begin_count(&number) || !space.finish_count(number, 8192)) std::abort();
    if (space.total() < 8192 || figures.state == SpaceState::kNotExclusive) std::abort();
  } catch (const InvalidArgument&) {  // another format, another namespace
  } catch (const ResourceError&) {
  }
}

void parse_names(const std::string& name) {
  if (const auto record = layout::parse_record(name)) {
    if (layout::record_name(record->key, record->file_bytes) != name) std::abort();
  }
  if (const auto epoch = layout::parse_epoch(name)) {
    if (layout::epoch_directory_name(*epoch) != name) std::abort();
  }
  (void)layout::is_temporary(name);
  (void)layout::is_namespace_name(name);
}

}  // namespace
}  // namespace kv_offload

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kv_offload;
  if (size == 0) return 0;
  const std::string text(reinterpret_cast<const char*>(data) + 1, size - 1);
  parse_names(text);
  testing::SimDisk disk;
  const FsTierOptions options = options_on(disk);
  {
    std::shared_ptr<FsEpoch> epoch;
    const OpenRoot made = open_root(options, disk, &epoch);
  }
  // With a second namespace, opening does not count the root.
  if (disk.mkdir(AT_FDCWD, "/root/" + std::string(64, '2'), 0700) != 0) std::abort();
  const std::string space = "/root/" + layout::namespace_name(options.namespace_id);
  switch (data[0] % 4) {
    case 0:
      plant_page(disk, data + 1, size - 1);
      break;
    case 1:
      disk.replace("/root/ledger", bytes_of(data + 1, size - 1));
      break;
    case 2:
      disk.replace("/root/kv_offload.json", bytes_of(data + 1, size - 1));
      break;
    case 3:
      disk.replace(space + "/namespace.json", bytes_of(data + 1, size - 1));
      break;
  }
  use(options, disk);
  return 0;
}
