// SPDX-License-Identifier: Apache-2.0
#include "record/payload_codec.h"

#include <array>
#include <cstring>
#include <memory>
#include <utility>

#include "record/context_pool.h"
#include "record/shard_blocks.h"
#include "record/split_planes.h"
#include "record/zstd_frames.h"

namespace kv_offload {
namespace {

// Raw bytes of a block. The working set stays in the L2 cache; much smaller blocks lose to the code table
// that each frame carries. Part of the format: another length is another codec.
constexpr std::size_t kBlockBytes = 128 << 10;
constexpr std::size_t kLengthBytes = 4;

// Returns how many bytes of a block are entropy-coded; the rest is stored unchanged.
std::size_t coded_bytes(Element element, std::size_t block_bytes) {
  return is_16_bit(element) ? block_bytes / 2 : block_bytes;
}

bool gains(std::uint64_t raw, std::uint64_t encoded) {
  return static_cast<double>(encoded) * PayloadCodec::kMinRatio <= static_cast<double>(raw);
}

Status damaged(std::uint64_t at, const char* what) {
  return Status::error(StatusKind::kCorrupt,
                       fmt::format("compressed payload, block at byte {}: {}", at, what));
}

// The working memory of one call.
struct Context {
  ZstdFrames frames;
  std::unique_ptr<Context> next;  // list of idle contexts
  std::array<std::byte, kBlockBytes> block;
  std::array<std::byte, kBlockBytes / 2> upper;

  // Encodes one block into `out`, which has room for the block and kLengthBytes more. Returns the bytes used;
  // 0 if the library fails.
  std::size_t encode(const SplitPlanes& planes, Element element, std::span<const std::byte> raw,
                     std::byte* out);
  // `coded` follows the block's length; its last `frame_bytes` are the frame. Returns null, or what is wrong.
  const char* decode(const SplitPlanes& planes, Element element, std::span<const std::byte> coded,
                     std::size_t frame_bytes, std::span<std::byte> raw);
};

std::size_t Context::encode(const SplitPlanes& planes, Element element, std::span<const std::byte> raw,
                            std::byte* out) {
  const std::size_t coded = coded_bytes(element, raw.size());
  const std::size_t kept = raw.size() - coded;
  std::byte* const rest = out + kLengthBytes;
  const std::byte* plane = raw.data();
  if (is_16_bit(element)) {
    planes.split(raw.data(), coded, upper.data(), rest);
    if (raw.size() % 2 != 0) rest[kept - 1] = raw.back();
    plane = upper.data();
  }
  std::size_t frame = 0;
  if (coded > 0) {
    const auto made = frames.encode({plane, coded}, {rest + kept, coded});
    if (!made) return 0;
    frame = *made;
  }
  if (frame == 0 || !gains(raw.size(), kLengthBytes + kept + frame)) {
    store_u32(out, 0);
    std::memcpy(rest, raw.data(), raw.size());
    return kLengthBytes + raw.size();
  }
  store_u32(out, frame);
  return kLengthBytes + kept + frame;
}

const char* Context::decode(const SplitPlanes& planes, Element element, std::span<const std::byte> coded,
                            std::size_t frame_bytes, std::span<std::byte> raw) {
  const std::size_t plane_bytes = coded_bytes(element, raw.size());
  const std::size_t kept = raw.size() - plane_bytes;
  const auto frame = coded.last(frame_bytes);
  std::byte* const plane = is_16_bit(element) ? upper.data() : raw.data();
  if (const char* wrong = frames.decode(frame, {plane, plane_bytes})) return wrong;
  if (is_16_bit(element)) {
    planes.join(plane, coded.data(), plane_bytes, raw.data());
    if (raw.size() % 2 != 0) raw.back() = coded[kept - 1];
  }
  return nullptr;
}

// Reads the block at *at of `in` and moves *at past it.
Status decode_block(Context& context, const SplitPlanes& planes, Element element,
                    std::span<const std::byte> in, std::uint64_t* at, std::span<std::byte> raw) {
  const auto left = in.subspan(*at);
  if (left.size() < kLengthBytes) return damaged(*at, "truncated in its length field");
  const std::size_t frame_bytes = load_u32(left.data());
  const std::size_t coded = coded_bytes(element, raw.size());
  if (frame_bytes > coded) return damaged(*at, "its frame is longer than the decompressed bytes");
  const std::size_t bytes = frame_bytes == 0 ? raw.size() : raw.size() - coded + frame_bytes;
  if (left.size() - kLengthBytes < bytes) return damaged(*at, "truncated");
  const auto stored = left.subspan(kLengthBytes, bytes);
  if (frame_bytes == 0) {
    std::memcpy(raw.data(), stored.data(), bytes);
  } else if (const char* wrong = context.decode(planes, element, stored, frame_bytes, raw)) {
    return damaged(*at, wrong);
  }
  *at += kLengthBytes + bytes;
  return {};
}

Status no_memory() {
  return Status::error(StatusKind::kUnavailable, "cannot compress or decompress a record: out of memory");
}

}  // namespace

struct PayloadCodec::Contexts {
  SplitPlanes planes;
  ContextPool<Context> pool;
};

PayloadCodec::PayloadCodec() : contexts_(new Contexts) {
  SplitPlanes ways[kMostSplitPlanes];
  (void)split_planes_known(ways);
  contexts_->planes = ways[0];
}

PayloadCodec::~PayloadCodec() { delete contexts_; }

std::uint64_t PayloadCodec::encoded_bytes_at_most(std::span<const Shard> shards) {
  const std::uint64_t bytes = unpadded_bytes(shards);
  return bytes + (bytes + kBlockBytes - 1) / kBlockBytes * kLengthBytes;
}

Status PayloadCodec::encode(std::span<const Shard> shards, Element element, std::span<std::byte> out,
                            std::uint64_t* bytes) {
  *bytes = 0;
  auto context = contexts_->pool.take();
  if (context == nullptr || !context->frames.can_encode()) return no_memory();
  std::uint64_t used = 0;
  Status status;
  for (ShardBlocks blocks(shards, kBlockBytes, context->block.data()); blocks.bytes() > 0; blocks.next()) {
    blocks.gather();
    const std::size_t block =
        context->encode(contexts_->planes, element, {blocks.place(), blocks.bytes()}, out.data() + used);
    if (block == 0) {
      status = no_memory();
      break;
    }
    used += block;
  }
  contexts_->pool.give_back(std::move(context));
  if (status && used > 0 && gains(unpadded_bytes(shards), used)) *bytes = used;
  return status;
}

Status PayloadCodec::decode(std::span<const std::byte> in, Element element, std::span<const Shard> shards) {
  auto context = contexts_->pool.take();
  if (context == nullptr || !context->frames.can_decode()) return no_memory();
  std::uint64_t at = 0;
  Status status;
  for (ShardBlocks blocks(shards, kBlockBytes, context->block.data()); status && blocks.bytes() > 0;
       blocks.next()) {
    status = decode_block(*context, contexts_->planes, element, in, &at, {blocks.place(), blocks.bytes()});
    if (status) blocks.scatter();
  }
  contexts_->pool.give_back(std::move(context));
  if (status && at != in.size()) return damaged(at, "extra bytes after the last block");
  return status;
}

}  // namespace kv_offload
