// SPDX-License-Identifier: Apache-2.0
// Finds and loads the library with the CUDA copier. It is in the directory of the binary that contains this
// code. Nothing of CUDA is loaded before the first use.
#include <dlfcn.h>

#include <array>
#include <filesystem>

#include "base/aligned_buffer.h"
#include "copy/block_copier.h"
#include "copy/cuda_library.h"

namespace kv_offload {
namespace {

// Loaded once per process and never unloaded: a copier's code must outlive the copier.
struct CudaLibrary {
  CudaMakeCopier make = nullptr;
  CudaReason reason = nullptr;
  CudaNumaNode numa_node = nullptr;
  std::string error;
};

std::string own_directory() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<const void*>(&make_cuda_copier), &info) == 0 || info.dli_fname == nullptr)
    return ".";
  return std::filesystem::absolute(info.dli_fname).parent_path().string();
}

CudaLibrary load() {
  CudaLibrary library;
  const std::string path = (std::filesystem::path(own_directory()) / kCudaLibraryName).string();
  if (!std::filesystem::exists(path)) {
    library.error = fmt::format(
        "{} does not exist: this build has no CUDA copier (build it with nvcc on PATH and "
        "KV_OFFLOAD_CUDA=ON)",
        path);
    return library;
  }
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    library.error = fmt::format("{} cannot be loaded: {}", path, dlerror());
    return library;
  }
  const auto interface = reinterpret_cast<CudaInterface>(dlsym(handle, kCudaInterfaceSymbol));
  library.make = reinterpret_cast<CudaMakeCopier>(dlsym(handle, kCudaMakeCopierSymbol));
  library.reason = reinterpret_cast<CudaReason>(dlsym(handle, kCudaReasonSymbol));
  library.numa_node = reinterpret_cast<CudaNumaNode>(dlsym(handle, kCudaNumaNodeSymbol));
  if (interface == nullptr || library.make == nullptr || library.reason == nullptr ||
      library.numa_node == nullptr || interface() != kCudaInterface) {
    library.error = fmt::format("{} comes from a different build; install both from the same build", path);
  }
  return library;
}

const CudaLibrary& cuda_library() {
  static const CudaLibrary library = load();
  return library;
}

}  // namespace

std::string cuda_unavailable_reason() {
  const CudaLibrary& library = cuda_library();
  if (!library.error.empty()) return library.error;
  std::array<char, kCudaMessageBytes> message{};
  library.reason(message.data(), message.size());
  return message.data();
}

std::unique_ptr<BlockCopier> make_cuda_copier(const CopierOptions& options) {
  const CudaLibrary& library = cuda_library();
  if (!library.error.empty()) throw_resource("no CUDA copier: {}", library.error);
  std::array<char, kCudaMessageBytes> message{};
  bool callers_mistake = false;
  std::unique_ptr<BlockCopier> copier(
      library.make(&options, &callers_mistake, message.data(), message.size()));
  if (copier == nullptr && callers_mistake) throw InvalidArgument(message.data());
  if (copier == nullptr) throw_resource("no CUDA copier: {}", message.data());
  return copier;
}

int cuda_numa_node(int device) {
  const CudaLibrary& library = cuda_library();
  return library.error.empty() ? library.numa_node(device) : -1;
}

std::string describe_cuda_copier(int device) {
  AlignedBuffer area(2 << 20);
  CopierOptions options;
  options.layout.groups.emplace_back();
  options.area = area.span();
  options.device = device;
  return make_cuda_copier(options)->describe();
}

}  // namespace kv_offload
