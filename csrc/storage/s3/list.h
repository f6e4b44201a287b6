// A page of names as a store lists them (ListObjectsV2), read without trust: nothing in it makes more memory
// than the page itself has.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace kv_offload::s3 {

struct Listed {
  std::string key;  // any bytes
  std::uint64_t bytes = 0;
  std::int64_t modified_unix_nanos = 0;  // 0: not told
};

struct ListPage {
  std::vector<Listed> objects;
  std::string next;  // the continuation token; empty: that was all
};

// Letters, digits and -_.~ as they are, all else as %XX.
std::string percent_encoded(std::string_view text);
// kIo: it is no whole list, or it has more than `most` objects.
Status parse_list(std::string_view xml, std::size_t most, ListPage* page);

}  // namespace kv_offload::s3
