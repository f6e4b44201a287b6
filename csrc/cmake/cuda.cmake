# SPDX-License-Identifier: Apache-2.0
# The CUDA copier: a shared library next to the extension, loaded only when a CUDA cache is registered. cudart
# is linked statically, so that a node without CUDA imports and runs everything else.
string(TOUPPER "${KV_OFFLOAD_CUDA}" cuda_wanted)
if(cuda_wanted STREQUAL "OFF")
  return()
endif()
# One fat binary for sm_80 to sm_121. It has code for each GPU generation in use (code for X.0 runs on X.Y:
# 8.7, 10.3, 12.1), PTX of 8.0 for devices without code (11.0), and PTX of 12.0 for future ones. It must be
# set before the language is enabled, which would choose a default. nvcc 12.8 and 13.x support all of these.
# Releases are built with 12.8: its output runs on drivers of CUDA 12.0 and later (the kernels need 12.1, for
# their long parameters). The output of 13.x runs only on drivers of 13.0 and later.
if(NOT CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES 80 86-real 89-real 90-real 100-real 120)
endif()
include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  if(cuda_wanted STREQUAL "ON")
    message(FATAL_ERROR "KV_OFFLOAD_CUDA=ON but no nvcc was found: put it on PATH, set CUDACXX, or configure with KV_OFFLOAD_CUDA=AUTO or OFF")
  endif()
  message(STATUS "nvcc not found: the CUDA copier is left out (KV_OFFLOAD_CUDA=AUTO)")
  return()
endif()
set(CMAKE_CUDA_STANDARD 17)  # kernels include none of our headers that need C++20
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
enable_language(CUDA)
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.8)
  message(FATAL_ERROR "nvcc ${CMAKE_CUDA_COMPILER_VERSION} is too old: the CUDA copier needs 12.8 or newer, or configure with KV_OFFLOAD_CUDA=OFF")
endif()

file(GLOB cuda_sources CONFIGURE_DEPENDS csrc/copy/cuda_*.cc csrc/copy/*.cu)
add_library(kv_offload_cuda_objects OBJECT ${cuda_sources})
target_compile_options(kv_offload_cuda_objects PRIVATE
  $<$<AND:$<COMPILE_LANGUAGE:CUDA>,$<BOOL:${KV_OFFLOAD_DEVELOPER}>>:-Werror=all-warnings>
  $<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra>
  $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<BOOL:${KV_OFFLOAD_DEVELOPER}>>:-Werror>)
target_include_directories(kv_offload_cuda_objects SYSTEM PUBLIC ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
target_link_libraries(kv_offload_cuda_objects PUBLIC kv_offload_core Threads::Threads)
set_target_properties(kv_offload_cuda_objects PROPERTIES CUDA_VISIBILITY_PRESET hidden)

add_library(kv_offload_cuda SHARED)
target_link_libraries(kv_offload_cuda PRIVATE kv_offload_cuda_objects)
# Export only the four C symbols of copy/cuda_library.h.
target_link_options(kv_offload_cuda PRIVATE -Wl,--exclude-libs,ALL -Wl,-z,defs)
if(SKBUILD OR KV_OFFLOAD_PYTHON)
  install(TARGETS kv_offload_cuda LIBRARY DESTINATION kv_offload)
endif()

# Built wherever nvcc is available, so that they keep compiling. They skip without a device.
if(KV_OFFLOAD_DEVELOPER)
  enable_testing()
  file(GLOB_RECURSE gpu_tests CONFIGURE_DEPENDS tests/cpp/gpu_*.cc)
  add_executable(kv_offload_gpu_tests ${gpu_tests})
  target_include_directories(kv_offload_gpu_tests PRIVATE tests/cpp)
  target_link_libraries(kv_offload_gpu_tests PRIVATE kv_offload_cuda_objects kv_offload_warnings
    GTest::gtest GTest::gtest_main)
  add_test(NAME gpu COMMAND kv_offload_gpu_tests)
  # Streams that share a hardware connection wait for each other, and some tests block one stream while others
  # must proceed.
  set_tests_properties(gpu PROPERTIES LABELS gpu TIMEOUT 900 ENVIRONMENT CUDA_DEVICE_MAX_CONNECTIONS=32)

  file(GLOB gpu_benchmark CONFIGURE_DEPENDS benchmarks/gpu/*.cc benchmarks/gpu/*.cu)
  add_executable(copy_gpu ${gpu_benchmark})
  target_include_directories(copy_gpu PRIVATE benchmarks benchmarks/gpu)
  target_link_libraries(copy_gpu PRIVATE kv_offload_cuda_objects)
endif()
