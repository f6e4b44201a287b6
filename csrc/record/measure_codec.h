// SPDX-License-Identifier: Apache-2.0
// Measures the codec's speed on this machine and predicts the compression choice for a tier of a given speed.
// For commands that run before a server does.
#pragma once

#include <string>

#include "record/compression_choice.h"

namespace kv_offload {

// One thread, bf16 numbers that resemble K and V; takes some milliseconds. Returns 0 if memory runs out.
CodecSpeed measure_codec();

// Returns CompressionChoice::reason() for kAuto with bf16 K/V and this codec, on a tier with the given read
// and write speeds.
std::string advice(const CodecSpeed& codec, double read_bytes_per_second, double write_bytes_per_second);

}  // namespace kv_offload
