// Draft: a record in the making. One thread's, from the reservation of its bytes until it has its name.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "storage/fs/file_ops.h"
#include "storage/fs/generation.h"

namespace kv_offload {

struct Draft {
  std::shared_ptr<Generation> generation;
  std::uint32_t leaf = 0;
  std::uint64_t file_bytes = 0;   // what is written
  std::uint64_t named_bytes = 0;  // what a raw record of its shards would have: its name says these
  bool direct = false;
  // Not 0: it is declined rather than take the place of a record of this request.
  std::uint32_t spared_request = 0;
  // Its temporary, once there is one: a new file, or that of an evicted record of the same size.
  Fd fd;
  std::string path;
  bool published = false;  // it has its name, or another wrote the same record: no temporary is left
};

}  // namespace kv_offload
