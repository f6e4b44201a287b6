# SPDX-License-Identifier: Apache-2.0
# Finds libraries with find_package or find_library. A missing library stops the build with the name of its
# Debian package. With KV_OFFLOAD_FETCH=ON (as in pip's builds, see pyproject.toml), git fetches it at a
# pinned commit and checks the hash.
include(CheckCXXSourceCompiles)
include(FetchContent)
find_package(Threads REQUIRED)

function(kv_offload_missing library package)
  message(FATAL_ERROR
    "${library} was not found. On Debian or Ubuntu: apt install ${package}. "
    "Or configure with -DKV_OFFLOAD_FETCH=ON to build a pinned version of it.")
endfunction()

# Fetches a library and adds its targets without its install rules, so that a wheel contains only what is
# linked. Extra arguments are passed to FetchContent_Declare. Sets <name>_SOURCE_DIR.
macro(kv_offload_fetch name repository commit)
  find_package(Git QUIET)
  if(NOT GIT_FOUND)
    message(FATAL_ERROR "${name} was not found and cannot be fetched, as there is no git. "
      "Install git, or on Debian or Ubuntu: apt install libfmt-dev prometheus-cpp-dev libxxhash-dev libzstd-dev")
  endif()
  message(STATUS "Fetching ${name} at ${commit}")
  # SOURCE_SUBDIR names no directory on purpose: add_subdirectory is called below.
  FetchContent_Declare(${name} GIT_REPOSITORY ${repository} GIT_TAG ${commit} SOURCE_SUBDIR not_there
    ${ARGN})
  FetchContent_MakeAvailable(${name})
  if(EXISTS ${${name}_SOURCE_DIR}/CMakeLists.txt)
    add_subdirectory(${${name}_SOURCE_DIR} ${${name}_BINARY_DIR} EXCLUDE_FROM_ALL)
  endif()
endmacro()

find_package(fmt 9 CONFIG QUIET)  # 8 is untested
if(NOT fmt_FOUND)
  if(NOT KV_OFFLOAD_FETCH)
    kv_offload_missing(fmt libfmt-dev)
  endif()
  kv_offload_fetch(fmt https://github.com/fmtlib/fmt.git a33701196adfad74917046096bf5a2aa0ab0bb50)  # 9.1.0
endif()

add_library(kv_offload_prometheus INTERFACE)
find_package(prometheus-cpp CONFIG QUIET)
if(NOT prometheus-cpp_FOUND)
  if(NOT KV_OFFLOAD_FETCH)
    kv_offload_missing(prometheus-cpp prometheus-cpp-dev)
  endif()
  set(ENABLE_PUSH OFF)
  set(ENABLE_TESTING OFF)
  set(ENABLE_COMPRESSION OFF)
  kv_offload_fetch(prometheus-cpp https://github.com/jupp0r/prometheus-cpp.git
    c9ffcdda9086ffd9e1283ea7a0276d831f3c8a8d GIT_SUBMODULES 3rdparty/civetweb)  # 1.1.0
endif()
target_link_libraries(kv_offload_prometheus INTERFACE prometheus-cpp::core prometheus-cpp::pull)

add_library(kv_offload_xxhash INTERFACE)
find_path(KV_OFFLOAD_XXHASH_INCLUDE xxhash.h)
find_library(KV_OFFLOAD_XXHASH_LIBRARY xxhash)
if(KV_OFFLOAD_XXHASH_INCLUDE AND KV_OFFLOAD_XXHASH_LIBRARY)
  target_include_directories(kv_offload_xxhash INTERFACE ${KV_OFFLOAD_XXHASH_INCLUDE})
  target_link_libraries(kv_offload_xxhash INTERFACE ${KV_OFFLOAD_XXHASH_LIBRARY})
  if(NOT KV_OFFLOAD_XXHASH_LIBRARY STREQUAL "${KV_OFFLOAD_XXHASH_LOOKED_AT}")
    unset(KV_OFFLOAD_XXHASH_HAS_DISPATCH CACHE)  # it was the result for another library
  endif()
  set(KV_OFFLOAD_XXHASH_LOOKED_AT ${KV_OFFLOAD_XXHASH_LIBRARY} CACHE INTERNAL "")
  set(CMAKE_REQUIRED_INCLUDES ${KV_OFFLOAD_XXHASH_INCLUDE})
  set(CMAKE_REQUIRED_LIBRARIES ${KV_OFFLOAD_XXHASH_LIBRARY})
  check_cxx_source_compiles("#include <xxh_x86dispatch.h>
    int main() { return static_cast<int>(XXH3_64bits(\"\", 0)); }" KV_OFFLOAD_XXHASH_HAS_DISPATCH)
  unset(CMAKE_REQUIRED_INCLUDES)
  unset(CMAKE_REQUIRED_LIBRARIES)
  if(KV_OFFLOAD_XXHASH_HAS_DISPATCH)
    target_compile_definitions(kv_offload_xxhash INTERFACE KV_OFFLOAD_XXHASH_DISPATCH)
  endif()
elseif(KV_OFFLOAD_FETCH)
  kv_offload_fetch(xxhash https://github.com/Cyan4973/xxHash.git
    bbb27a5efb85b92a0486cf361a8635715a53f6ba)  # 0.8.2
  target_include_directories(kv_offload_xxhash INTERFACE ${xxhash_SOURCE_DIR})
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64)$")
    # Dispatches to SSE2, AVX2 or AVX-512 at run time. The headers alone would use SSE2.
    enable_language(C)
    add_library(kv_offload_xxhash_x86 STATIC ${xxhash_SOURCE_DIR}/xxhash.c ${xxhash_SOURCE_DIR}/xxh_x86dispatch.c)
    target_compile_options(kv_offload_xxhash_x86 PRIVATE -w -O3)
    set_target_properties(kv_offload_xxhash_x86 PROPERTIES C_VISIBILITY_PRESET hidden POSITION_INDEPENDENT_CODE ON)
    target_link_libraries(kv_offload_xxhash INTERFACE kv_offload_xxhash_x86)
    target_compile_definitions(kv_offload_xxhash INTERFACE KV_OFFLOAD_XXHASH_DISPATCH)
  else()
    target_compile_definitions(kv_offload_xxhash INTERFACE XXH_INLINE_ALL)
  endif()
else()
  kv_offload_missing(xxhash libxxhash-dev)
endif()

# A static library with hidden symbols. zstd_frames.cc uses zstd's static-only API, and other parts of the
# process may load another zstd.
add_library(kv_offload_zstd INTERFACE)
find_path(KV_OFFLOAD_ZSTD_INCLUDE zstd.h)
find_library(KV_OFFLOAD_ZSTD_LIBRARY libzstd.a)
if(KV_OFFLOAD_ZSTD_INCLUDE AND KV_OFFLOAD_ZSTD_LIBRARY)
  file(STRINGS ${KV_OFFLOAD_ZSTD_INCLUDE}/zstd.h zstd_minor REGEX "^#define ZSTD_VERSION_MINOR")
  string(REGEX MATCH "[0-9]+" zstd_minor "${zstd_minor}")
endif()
if(zstd_minor GREATER_EQUAL 5)
  target_include_directories(kv_offload_zstd SYSTEM INTERFACE ${KV_OFFLOAD_ZSTD_INCLUDE})
  target_link_libraries(kv_offload_zstd INTERFACE ${KV_OFFLOAD_ZSTD_LIBRARY})
elseif(KV_OFFLOAD_FETCH)
  set(ZSTD_BUILD_PROGRAMS OFF)
  set(ZSTD_BUILD_SHARED OFF)
  set(ZSTD_BUILD_TESTS OFF)
  set(ZSTD_LEGACY_SUPPORT OFF)
  kv_offload_fetch(zstd https://github.com/facebook/zstd.git
    63779c798237346c2b245c546c40b72a5a5913fe)  # 1.5.5; its CMakeLists.txt is in a subdirectory
  add_subdirectory(${zstd_SOURCE_DIR}/build/cmake ${zstd_BINARY_DIR} EXCLUDE_FROM_ALL)
  target_include_directories(kv_offload_zstd SYSTEM INTERFACE ${zstd_SOURCE_DIR}/lib)
  target_link_libraries(kv_offload_zstd INTERFACE libzstd_static)
else()
  kv_offload_missing("zstd 1.5 as a static library" libzstd-dev)
endif()
target_link_options(kv_offload_zstd INTERFACE LINKER:--exclude-libs,libzstd.a)

if(KV_OFFLOAD_DEVELOPER)
  find_package(GTest CONFIG QUIET)
  if(NOT TARGET GTest::gmock)
    if(NOT KV_OFFLOAD_FETCH)
      kv_offload_missing(googletest "libgtest-dev libgmock-dev")
    endif()
    kv_offload_fetch(googletest https://github.com/google/googletest.git
      f8d7d77c06936315286eb55f8de22cd23c188571)  # 1.14.0
  endif()
endif()
