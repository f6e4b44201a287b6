// SPDX-License-Identifier: Apache-2.0
#include "record/payload_codec.h"

// Needed for ZSTD_c_literalCompressionMode, whose name may change in any release. Therefore the library is
// linked statically (dependencies.cmake). The frames are readable by every zstd since 1.0.
#define ZSTD_STATIC_LINKING_ONLY
#include <zstd.h>
#include <zstd_errors.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <new>
#include <utility>

#include "base/thread_annotations.h"
#include "record/split_planes.h"

namespace kv_offload {
namespace {

// Raw bytes of a block. The working set stays in the L2 cache; much smaller blocks lose to the code table
// that each frame carries. Part of the format: another length is another codec.
constexpr std::size_t kBlockBytes = 128 << 10;
constexpr std::size_t kLengthBytes = 4;

struct FreeZstd {
  void operator()(ZSTD_CCtx* context) const { ZSTD_freeCCtx(context); }
  void operator()(ZSTD_DCtx* context) const { ZSTD_freeDCtx(context); }
};

std::uint64_t bytes_of(std::span<const Shard> shards) {
  std::uint64_t bytes = 0;
  for (const Shard& shard : shards) bytes += shard.size();
  return bytes;
}

// Returns how many bytes of a block are entropy-coded; the rest is stored unchanged.
std::size_t coded_bytes(Element element, std::size_t block_bytes) {
  return element == Element::kBytes ? block_bytes : block_bytes / 2;
}

bool gains(std::uint64_t raw, std::uint64_t encoded) {
  return static_cast<double>(encoded) * PayloadCodec::kMinRatio <= static_cast<double>(raw);
}

std::uint32_t load_u32(const std::byte* at) {
  std::uint32_t value = 0;
  for (int i = 3; i >= 0; --i) value = value << 8 | std::to_integer<std::uint32_t>(at[i]);
  return value;
}

void store_u32(std::byte* at, std::size_t value) {
  for (int i = 0; i < 4; ++i) at[i] = static_cast<std::byte>(value >> 8 * i);
}

// Iterates over shards in blocks. A block that spans several shards is gathered or scattered.
class Blocks {
 public:
  Blocks(std::span<const Shard> shards, std::byte* scratch)
      : shards_(shards), left_(bytes_of(shards)), scratch_(scratch) {
    skip_empty();
  }

  std::size_t bytes() const { return static_cast<std::size_t>(std::min<std::uint64_t>(left_, kBlockBytes)); }
  // Returns the block in its shard, or the scratch buffer for one that spans shards.
  std::byte* place() const { return in_one_shard() ? shards_[shard_].data() + at_ : scratch_; }
  void gather() const {
    if (!in_one_shard())
      each_part([](std::byte* part, std::byte* there, std::size_t n) { std::memcpy(there, part, n); });
  }
  void scatter() const {
    if (!in_one_shard())
      each_part([](std::byte* part, std::byte* there, std::size_t n) { std::memcpy(part, there, n); });
  }
  void next() {
    std::size_t remaining = bytes();
    left_ -= remaining;
    while (remaining > 0) {
      const std::size_t part = std::min(remaining, shards_[shard_].size() - at_);
      at_ += part;
      remaining -= part;
      skip_empty();
    }
  }

 private:
  bool in_one_shard() const { return shards_[shard_].size() - at_ >= bytes(); }
  void skip_empty() {
    while (shard_ < shards_.size() && at_ == shards_[shard_].size()) {
      ++shard_;
      at_ = 0;
    }
  }
  template <typename Copy>
  void each_part(const Copy& copy) const {
    std::size_t shard = shard_, at = at_, done = 0;
    while (done < bytes()) {
      const std::size_t part = std::min(bytes() - done, shards_[shard].size() - at);
      copy(shards_[shard].data() + at, scratch_ + done, part);
      done += part;
      ++shard;
      at = 0;
    }
  }

  std::span<const Shard> shards_;
  std::size_t shard_ = 0, at_ = 0;
  std::uint64_t left_;
  std::byte* scratch_;
};

Status damaged(std::uint64_t at, const char* what) {
  return Status::error(StatusKind::kCorrupt,
                       fmt::format("compressed payload, block at byte {}: {}", at, what));
}

// True for exactly one frame that states the required content size. Anything else could lead the library into
// its legacy formats, or on to further frames.
bool is_one_frame(std::span<const std::byte> frame, std::size_t content_bytes) {
  return frame.size() >= kLengthBytes && load_u32(frame.data()) == ZSTD_MAGICNUMBER &&
         ZSTD_getFrameContentSize(frame.data(), frame.size()) == content_bytes &&
         ZSTD_findFrameCompressedSize(frame.data(), frame.size()) == frame.size();
}

// The working memory of one call.
struct Context {
  std::unique_ptr<ZSTD_CCtx, FreeZstd> to;
  std::unique_ptr<ZSTD_DCtx, FreeZstd> from;
  std::unique_ptr<Context> next;  // list of idle contexts
  std::array<std::byte, kBlockBytes> block;
  std::array<std::byte, kBlockBytes / 2> upper;

  // Return false if memory runs out or the library lacks a parameter.
  bool can_encode();
  bool can_decode();
  // Encodes one block into `out`, which has room for the block and kLengthBytes more. Returns the bytes used;
  // 0 if the library fails.
  std::size_t encode(const SplitPlanes& planes, Element element, std::span<const std::byte> raw,
                     std::byte* out);
  // `coded` follows the block's length; its last `frame_bytes` are the frame. Returns null, or what is wrong.
  const char* decode(const SplitPlanes& planes, Element element, std::span<const std::byte> coded,
                     std::size_t frame_bytes, std::span<std::byte> raw);
};

bool Context::can_encode() {
  if (to != nullptr) return true;
  std::unique_ptr<ZSTD_CCtx, FreeZstd> made(ZSTD_createCCtx());
  if (made == nullptr) return false;
  // Exponents repeat, but not in sequences worth finding. The fastest level searches hardly any and would
  // then store the bytes uncompressed, so literal compression is forced on.
  for (const auto& [parameter, value] :
       {std::pair<ZSTD_cParameter, int>{ZSTD_c_compressionLevel, ZSTD_minCLevel()},
        {ZSTD_c_hashLog, ZSTD_HASHLOG_MIN},
        {ZSTD_c_literalCompressionMode, ZSTD_ps_enable}}) {
    if (ZSTD_isError(ZSTD_CCtx_setParameter(made.get(), parameter, value))) return false;
  }
  to = std::move(made);
  return true;
}

bool Context::can_decode() {
  if (from == nullptr) from.reset(ZSTD_createDCtx());
  return from != nullptr;
}

std::size_t Context::encode(const SplitPlanes& planes, Element element, std::span<const std::byte> raw,
                            std::byte* out) {
  const std::size_t coded = coded_bytes(element, raw.size());
  const std::size_t kept = raw.size() - coded;
  std::byte* const rest = out + kLengthBytes;
  const std::byte* plane = raw.data();
  if (element != Element::kBytes) {
    planes.split(raw.data(), coded, upper.data(), rest);
    if (raw.size() % 2 != 0) rest[kept - 1] = raw.back();
    plane = upper.data();
  }
  std::size_t frame = 0;
  if (coded > 0) {
    frame = ZSTD_compress2(to.get(), rest + kept, coded, plane, coded);
    if (ZSTD_isError(frame)) {
      if (ZSTD_getErrorCode(frame) != ZSTD_error_dstSize_tooSmall) return 0;
      frame = coded;
    }
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
  if (!is_one_frame(frame, plane_bytes)) return "not exactly one frame of the expected size";
  std::byte* const plane = element == Element::kBytes ? raw.data() : upper.data();
  if (ZSTD_decompressDCtx(from.get(), plane, plane_bytes, frame.data(), frame.size()) != plane_bytes) {
    return "the frame cannot be decompressed";
  }
  if (element != Element::kBytes) {
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
  Mutex mutex;
  std::unique_ptr<Context> idle GUARDED_BY(mutex);

  // Returns null if memory runs out.
  std::unique_ptr<Context> take() {
    MutexLock lock(mutex);
    if (idle == nullptr) return std::unique_ptr<Context>(new (std::nothrow) Context);
    auto context = std::move(idle);
    idle = std::move(context->next);
    return context;
  }
  void give_back(std::unique_ptr<Context> context) {
    MutexLock lock(mutex);
    context->next = std::move(idle);
    idle = std::move(context);
  }
};

PayloadCodec::PayloadCodec() : contexts_(new Contexts) {
  SplitPlanes ways[kMostSplitPlanes];
  (void)split_planes_known(ways);
  contexts_->planes = ways[0];
}

PayloadCodec::~PayloadCodec() { delete contexts_; }

std::uint64_t PayloadCodec::encoded_bytes_at_most(std::span<const Shard> shards) {
  const std::uint64_t bytes = bytes_of(shards);
  return bytes + (bytes + kBlockBytes - 1) / kBlockBytes * kLengthBytes;
}

Status PayloadCodec::encode(std::span<const Shard> shards, Element element, std::span<std::byte> out,
                            std::uint64_t* bytes) {
  *bytes = 0;
  auto context = contexts_->take();
  if (context == nullptr || !context->can_encode()) return no_memory();
  std::uint64_t used = 0;
  Status status;
  for (Blocks blocks(shards, context->block.data()); blocks.bytes() > 0; blocks.next()) {
    blocks.gather();
    const std::size_t block =
        context->encode(contexts_->planes, element, {blocks.place(), blocks.bytes()}, out.data() + used);
    if (block == 0) {
      status = no_memory();
      break;
    }
    used += block;
  }
  contexts_->give_back(std::move(context));
  if (status && used > 0 && gains(bytes_of(shards), used)) *bytes = used;
  return status;
}

Status PayloadCodec::decode(std::span<const std::byte> in, Element element, std::span<const Shard> shards) {
  auto context = contexts_->take();
  if (context == nullptr || !context->can_decode()) return no_memory();
  std::uint64_t at = 0;
  Status status;
  for (Blocks blocks(shards, context->block.data()); status && blocks.bytes() > 0; blocks.next()) {
    status = decode_block(*context, contexts_->planes, element, in, &at, {blocks.place(), blocks.bytes()});
    if (status) blocks.scatter();
  }
  contexts_->give_back(std::move(context));
  if (status && at != in.size()) return damaged(at, "extra bytes after the last block");
  return status;
}

}  // namespace kv_offload
