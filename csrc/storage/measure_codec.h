// How fast the codec is on this machine, and what a choice would make of a tier of a given speed: for
// commands, before a server runs.
#pragma once

#include <string>

#include "storage/compression_choice.h"

namespace kv_offload {

// One thread, numbers that look like K and V in bf16; some milliseconds. 0: there is no memory for it.
CodecSpeed measure_codec();

// What kAuto decides for K/V in bf16 on a tier that reads and writes so many bytes a second, with this codec:
// CompressionChoice::reason().
std::string advice(const CodecSpeed& codec, double read_bytes_per_second, double write_bytes_per_second);

}  // namespace kv_offload
