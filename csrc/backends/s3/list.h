// SPDX-License-Identifier: Apache-2.0
// Parses a page of object names (ListObjectsV2). The page is untrusted: parsing never uses more memory than
// the page itself has.
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
  std::int64_t modified_unix_nanos = 0;  // 0: not reported
};

struct ListPage {
  std::vector<Listed> objects;
  std::string next;  // the continuation token; empty: this was the last page
};

// Keeps letters, digits and -_.~ and encodes all other bytes as %XX.
std::string percent_encoded(std::string_view text);
// kIo: the list is incomplete or malformed, or has more than `most` objects.
Status parse_list(std::string_view xml, std::size_t most, ListPage* page);

}  // namespace kv_offload::s3
