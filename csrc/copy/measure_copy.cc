// SPDX-License-Identifier: Apache-2.0
#include "copy/measure_copy.h"

#include <algorithm>
#include <vector>

#include "base/aligned_buffer.h"
#include "base/clock.h"
#include "copy/block_copier.h"

namespace kv_offload {
namespace {

constexpr std::uint64_t kBlockBytes = 2 << 20;
constexpr int kPasses = 4;

CopyJob store_of(std::uint64_t blocks, std::uint64_t block_bytes) {
  CopyJob job;
  job.group_sizes = {static_cast<std::uint32_t>(blocks)};
  job.block_indices = {0};
  job.group_rows = {static_cast<std::uint32_t>(blocks)};
  for (std::uint64_t block = 0; block < blocks; ++block) {
    job.block_ids.push_back(static_cast<std::int64_t>(block));
    job.rows.push_back(static_cast<RowId>(block * (block_bytes / kPageBytes)));
  }
  return job;
}

}  // namespace

double measure_copy(std::uint64_t total_bytes, unsigned threads) {
  if (total_bytes == 0) throw_invalid("total_bytes=0: give the size of the buffers to copy between");
  const std::uint64_t block_bytes = std::min<std::uint64_t>(kBlockBytes, round_up(total_bytes, kPageBytes));
  const std::uint64_t blocks = std::max<std::uint64_t>(1, total_bytes / block_bytes);
  const AlignedBuffer cache(blocks * block_bytes);
  const AlignedBuffer area(blocks * block_bytes);
  CopierOptions options;
  options.layout.tensors = {{cache.data(), blocks, block_bytes}};
  options.layout.groups = {{{0, block_bytes}}};
  options.area = area.span();
  options.threads = threads;
  const auto copier = make_host_copier(options);

  const SteadyClock clock;
  double best = 0;
  for (std::uint64_t pass = 0; pass < kPasses; ++pass) {
    CopyJob job = store_of(blocks, block_bytes);
    job.id = pass + 1;
    const Nanos start = clock.now();
    copier->submit(std::move(job));
    copier->wait(std::vector<std::uint64_t>{pass + 1});
    const double seconds = to_seconds(clock.now() - start);
    for (const CopyResult& result : copier->poll()) {
      if (!result.status.is_ok()) throw ResourceError(result.status.to_string());
      if (pass > 0) best = std::max(best, static_cast<double>(result.bytes) / std::max(seconds, 1e-9));
    }
  }
  return best;
}

}  // namespace kv_offload
