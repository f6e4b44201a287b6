// SPDX-License-Identifier: Apache-2.0
// Reads a whole record for Python.
#pragma once

#include <cstdint>
#include <memory>
#include <tuple>
#include <utility>

#include "bindings/bindings.h"
#include "record/whole_record.h"

namespace kv_offload::bindings {

// Calls `read` without the GIL. Returns its status's kind and message, and the record; None unless it is ok.
// into: the record to read into, whose bytes are lost whatever the result; null: a new one.
template <typename Read>
py::tuple read_whole(std::shared_ptr<WholeRecord> into, Read&& read) {
  std::shared_ptr<WholeRecord> record = into ? std::move(into) : std::make_shared<WholeRecord>();
  Status status;
  {
    const py::gil_scoped_release release;
    status = read(record.get());
  }
  if (!status) record.reset();
  return py::make_tuple(to_string(status.kind()), status.message(), record);
}

// The facts about its payload that a header states: is lossy, raw bytes, stored bytes, and the relative
// errors: the keys', rms, and the values' (Loss in lossy_codec.h).
using StatedLoss = std::tuple<bool, std::uint64_t, std::uint64_t, float, float, float>;
inline StatedLoss stated_loss(const RecordHeader& header) {
  return {header.codec == Codec::kLossy,
          header.payload_bytes,
          header.padded_stored_bytes(),
          header.loss.keys,
          header.loss.rms,
          header.loss.values};
}

}  // namespace kv_offload::bindings
