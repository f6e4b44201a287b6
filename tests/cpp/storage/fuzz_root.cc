// libFuzzer on everything else that a root tells us: the byte account, the readable
// twins, file names. Whatever they hold, opening the root ends in an account that
// keeps the bound or in one sentence. Clang only (CMake: fuzz_root).
#include <fcntl.h>
#include <xxhash.h>

#include <cstdlib>
#include <cstring>

#include "storage/fs_layout.h"
#include "storage/fs_open.h"
#include "storage/fs_walk.h"
#include "storage/sim_disk.h"

namespace kv_offload {
namespace {

constexpr std::uint64_t kBound = std::uint64_t{4} << 20;
constexpr std::size_t kAccountBytes = 104;  // of ROOT/ledger, its checksum last

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

// The checksum is made right, so that the fuzzer gets past it.
void plant_account(testing::SimDisk& disk, const std::uint8_t* data, std::size_t size) {
  testing::SimDisk::Bytes page = disk.content("/root/ledger");
  if (page.size() != kAccountBytes) std::abort();
  std::memcpy(page.data() + 8, data, std::min(size, kAccountBytes - 16));
  const std::uint64_t checksum = XXH3_64bits(page.data(), kAccountBytes - 8);
  std::memcpy(page.data() + kAccountBytes - 8, &checksum, sizeof(checksum));
  disk.replace("/root/ledger", page);
}

void use(const FsTierOptions& options, testing::SimDisk& disk) {
  try {
    const OpenRoot open = open_root(options, disk);
    std::uint64_t missing = 0;
    const bool granted = open.ledger->reserve(kBound + 1, &missing).is_ok();
    if (granted) std::abort();  // more than the bound
    open.ledger->adjust(-4096);
    open.ledger->give_back(4096, open.ledger->epoch());
    (void)open.ledger->reserve(4096, &missing);
    (void)open.ledger->added_by_others();
    (void)open.ledger->take_room_requests();
    if (!open.lease->try_take()) std::abort();
    (void)open.ledger->trusted();
    if (!open.ledger->begin_recount(0) || !open.ledger->finish_recount(8192)) std::abort();
    if (open.ledger->total() != 8192) std::abort();
  } catch (const InvalidArgument&) {  // another format, another namespace
  } catch (const ResourceError&) {
  }
}

void parse_names(const std::string& name) {
  if (const auto record = layout::parse_record(name)) {
    if (layout::record_name(record->key, record->file_bytes) != name) std::abort();
  }
  if (const auto generation = layout::parse_generation(name)) {
    if (layout::generation_name(*generation) != name) std::abort();
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
  { const OpenRoot made = open_root(options, disk); }
  // With a second namespace the root is not counted anew as it is opened.
  if (disk.mkdir(AT_FDCWD, "/root/" + std::string(64, '2'), 0700) != 0) std::abort();
  const std::string space = "/root/" + layout::namespace_name(options.namespace_id);
  switch (data[0] % 4) {
    case 0:
      plant_account(disk, data + 1, size - 1);
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
