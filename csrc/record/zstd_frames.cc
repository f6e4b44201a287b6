// SPDX-License-Identifier: Apache-2.0
#include "record/zstd_frames.h"

// Needed for ZSTD_c_literalCompressionMode, whose name may change in any release. Therefore the library is
// linked statically (dependencies.cmake). The frames are readable by every zstd since 1.0.
#define ZSTD_STATIC_LINKING_ONLY
#include <zstd.h>
#include <zstd_errors.h>

#include <new>
#include <utility>

namespace kv_offload {
namespace {

constexpr std::size_t kLeastFrame = 4;  // its magic number

struct FreeZstd {
  void operator()(ZSTD_CCtx* context) const { ZSTD_freeCCtx(context); }
  void operator()(ZSTD_DCtx* context) const { ZSTD_freeDCtx(context); }
};

// True for exactly one frame that states the required content size. Anything else could lead the library into
// its legacy formats, or on to further frames.
bool is_one_frame(std::span<const std::byte> frame, std::size_t content_bytes) {
  return frame.size() >= kLeastFrame && load_u32(frame.data()) == ZSTD_MAGICNUMBER &&
         ZSTD_getFrameContentSize(frame.data(), frame.size()) == content_bytes &&
         ZSTD_findFrameCompressedSize(frame.data(), frame.size()) == frame.size();
}

}  // namespace

struct ZstdFrames::Library {
  std::unique_ptr<ZSTD_CCtx, FreeZstd> to;
  std::unique_ptr<ZSTD_DCtx, FreeZstd> from;
};

ZstdFrames::ZstdFrames() : library_(new (std::nothrow) Library) {}
ZstdFrames::~ZstdFrames() = default;

bool ZstdFrames::can_encode() {
  if (library_ == nullptr) return false;
  if (library_->to != nullptr) return true;
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
  library_->to = std::move(made);
  return true;
}

bool ZstdFrames::can_decode() {
  if (library_ == nullptr) return false;
  if (library_->from == nullptr) library_->from.reset(ZSTD_createDCtx());
  return library_->from != nullptr;
}

std::optional<std::size_t> ZstdFrames::encode(std::span<const std::byte> content, std::span<std::byte> out) {
  const std::size_t frame =
      ZSTD_compress2(library_->to.get(), out.data(), out.size(), content.data(), content.size());
  if (!ZSTD_isError(frame)) return frame;
  if (ZSTD_getErrorCode(frame) != ZSTD_error_dstSize_tooSmall) return std::nullopt;
  return content.size();
}

const char* ZstdFrames::decode(std::span<const std::byte> frame, std::span<std::byte> out) {
  if (!is_one_frame(frame, out.size())) return "not exactly one frame of the expected size";
  if (ZSTD_decompressDCtx(library_->from.get(), out.data(), out.size(), frame.data(), frame.size()) !=
      out.size()) {
    return "the frame cannot be decompressed";
  }
  return nullptr;
}

std::uint32_t load_u32(const std::byte* at) {
  std::uint32_t value = 0;
  for (int i = 3; i >= 0; --i) value = value << 8 | std::to_integer<std::uint32_t>(at[i]);
  return value;
}

void store_u32(std::byte* at, std::size_t value) {
  for (int i = 0; i < 4; ++i) at[i] = static_cast<std::byte>(value >> 8 * i);
}

}  // namespace kv_offload
