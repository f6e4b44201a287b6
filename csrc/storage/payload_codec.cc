#include "storage/payload_codec.h"

namespace kv_offload {

// Nothing is encoded by this build, so nothing that is can be its own.
PayloadCodec::PayloadCodec() : contexts_(nullptr) {}
PayloadCodec::~PayloadCodec() = default;
std::uint64_t PayloadCodec::encoded_bytes_at_most(std::span<const Shard>) { return 0; }
Status PayloadCodec::encode(std::span<const Shard>, Element, std::span<std::byte>, std::uint64_t* bytes) {
  *bytes = 0;
  return Status::ok();
}
Status PayloadCodec::decode(std::span<const std::byte>, Element, std::span<const Shard>) {
  return Status::error(StatusKind::kCorrupt, "it is encoded, and this build has no codec");
}

}  // namespace kv_offload
