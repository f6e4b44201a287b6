# SPDX-License-Identifier: Apache-2.0
# torch.ops.kv_offload: a library on libtorch's stable ABI, so that one binary works with torch 2.11 and
# newer. Built if the build's Python has torch. Any such version will do: only its headers are used, and its
# libtorch_cpu for linking.
set(KV_OFFLOAD_TORCH AUTO CACHE STRING "Build the torch operators: AUTO (when Python has torch), ON, OFF")
string(TOUPPER "${KV_OFFLOAD_TORCH}" torch_wanted)
if(torch_wanted STREQUAL "OFF" OR (torch_wanted STREQUAL "AUTO" AND NOT (SKBUILD OR KV_OFFLOAD_PYTHON)))
  return()
endif()
find_package(Python REQUIRED COMPONENTS Interpreter Development.Module)
execute_process(
  COMMAND ${Python_EXECUTABLE} -c
    "import importlib.util, pathlib; s = importlib.util.find_spec('torch'); print(pathlib.Path(s.origin).parent if s else '')"
  OUTPUT_VARIABLE torch_root OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
find_library(KV_OFFLOAD_TORCH_CPU torch_cpu PATHS "${torch_root}/lib" NO_DEFAULT_PATH)
if(NOT torch_root OR NOT KV_OFFLOAD_TORCH_CPU OR NOT EXISTS "${torch_root}/include/torch/csrc/stable/library.h")
  if(torch_wanted STREQUAL "ON")
    message(FATAL_ERROR "KV_OFFLOAD_TORCH=ON but ${Python_EXECUTABLE} has no torch 2.11 or newer: install it there, build without isolation (pip --no-build-isolation), or configure with KV_OFFLOAD_TORCH=AUTO or OFF")
  endif()
  message(STATUS "torch not found in ${Python_EXECUTABLE}: the torch operators are left out (KV_OFFLOAD_TORCH=AUTO)")
  return()
endif()

function(kv_offload_torch_library name)
  add_library(${name} SHARED ${ARGN})
  target_include_directories(${name} PRIVATE csrc)
  target_include_directories(${name} SYSTEM PRIVATE ${torch_root}/include)
  target_compile_definitions(${name} PRIVATE TORCH_TARGET_VERSION=0x020b000000000000)  # 2.11
  target_link_libraries(${name} PRIVATE kv_offload_core kv_offload_warnings ${KV_OFFLOAD_TORCH_CPU})
  target_link_options(${name} PRIVATE -Wl,--exclude-libs,ALL)
  # torch is loaded before this library, and its libraries are found by name.
  set_target_properties(${name} PROPERTIES SKIP_BUILD_RPATH ON)
  install(TARGETS ${name} LIBRARY DESTINATION kv_offload)
endfunction()

kv_offload_torch_library(kv_offload_torch csrc/bindings/torch_ops.cc)

if(TARGET kv_offload_cuda_objects)
  # The stream function is in libtorch_cuda, which a CPU build of torch lacks. Link against a stub with that
  # name; the stub is not installed.
  file(WRITE ${CMAKE_CURRENT_BINARY_DIR}/torch_cuda_stand_in.c
    "int aoti_torch_get_current_cuda_stream(int device, void** stream);\n"
    "int aoti_torch_get_current_cuda_stream(int device, void** stream) { (void)device; (void)stream; return 1; }\n")
  enable_language(C)
  add_library(torch_cuda_stand_in SHARED ${CMAKE_CURRENT_BINARY_DIR}/torch_cuda_stand_in.c)
  set_target_properties(torch_cuda_stand_in PROPERTIES OUTPUT_NAME torch_cuda
    LIBRARY_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/stand_in C_VISIBILITY_PRESET default)
  kv_offload_torch_library(kv_offload_torch_cuda csrc/bindings/torch_ops_cuda.cc)
  target_compile_definitions(kv_offload_torch_cuda PRIVATE USE_CUDA)  # makes torch's headers declare the function
  target_link_libraries(kv_offload_torch_cuda PRIVATE kv_offload_cuda_objects torch_cuda_stand_in)
endif()
