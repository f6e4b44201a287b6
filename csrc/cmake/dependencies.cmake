# Libraries by find_package or pkg-config. One that is missing stops the build
# with the name of the Debian package, or is fetched at a pinned hash when
# KV_OFFLOAD_FETCH is ON.
include(FetchContent)
find_package(Threads REQUIRED)
find_package(PkgConfig QUIET)

function(kv_offload_missing library package)
  message(FATAL_ERROR
    "${library} was not found. On Debian or Ubuntu: apt install ${package}. "
    "Or configure with -DKV_OFFLOAD_FETCH=ON to build a pinned version of it.")
endfunction()

find_package(fmt CONFIG QUIET)
if(NOT fmt_FOUND)
  if(NOT KV_OFFLOAD_FETCH)
    kv_offload_missing(fmt libfmt-dev)
  endif()
  FetchContent_Declare(fmt GIT_REPOSITORY https://github.com/fmtlib/fmt.git
    GIT_TAG a33701196adfad74917046096bf5a2aa0ab0bb50)  # 9.1.0
  FetchContent_MakeAvailable(fmt)
endif()

add_library(kv_offload_prometheus INTERFACE)
find_package(prometheus-cpp CONFIG QUIET)
if(prometheus-cpp_FOUND)
  target_link_libraries(kv_offload_prometheus INTERFACE prometheus-cpp::core prometheus-cpp::pull)
elseif(KV_OFFLOAD_FETCH)
  set(ENABLE_PUSH OFF)
  set(ENABLE_TESTING OFF)
  set(ENABLE_COMPRESSION OFF)
  FetchContent_Declare(prometheus-cpp GIT_REPOSITORY https://github.com/jupp0r/prometheus-cpp.git
    GIT_TAG c9ffcdda9086ffd9e1283ea7a0276d831f3c8a8d)  # 1.1.0
  FetchContent_MakeAvailable(prometheus-cpp)
  target_link_libraries(kv_offload_prometheus INTERFACE prometheus-cpp::core prometheus-cpp::pull)
else()
  kv_offload_missing(prometheus-cpp prometheus-cpp-dev)
endif()

add_library(kv_offload_xxhash INTERFACE)
find_path(KV_OFFLOAD_XXHASH_INCLUDE xxhash.h)
find_library(KV_OFFLOAD_XXHASH_LIBRARY xxhash)
if(KV_OFFLOAD_XXHASH_INCLUDE AND KV_OFFLOAD_XXHASH_LIBRARY)
  target_include_directories(kv_offload_xxhash INTERFACE ${KV_OFFLOAD_XXHASH_INCLUDE})
  target_link_libraries(kv_offload_xxhash INTERFACE ${KV_OFFLOAD_XXHASH_LIBRARY})
elseif(KV_OFFLOAD_FETCH)
  FetchContent_Declare(xxhash GIT_REPOSITORY https://github.com/Cyan4973/xxHash.git
    GIT_TAG bbb27a5efb85b92a0486cf361a8635715a53f6ba)  # 0.8.2
  FetchContent_MakeAvailable(xxhash)
  target_include_directories(kv_offload_xxhash INTERFACE ${xxhash_SOURCE_DIR})
  target_compile_definitions(kv_offload_xxhash INTERFACE XXH_INLINE_ALL)
else()
  kv_offload_missing(xxhash libxxhash-dev)
endif()

if(KV_OFFLOAD_DEVELOPER)
  find_package(GTest CONFIG QUIET)
  if(NOT GTest_FOUND)
    if(NOT KV_OFFLOAD_FETCH)
      kv_offload_missing(googletest "libgtest-dev libgmock-dev")
    endif()
    FetchContent_Declare(googletest GIT_REPOSITORY https://github.com/google/googletest.git
      GIT_TAG f8d7d77c06936315286eb55f8de22cd23c188571)  # 1.14.0
    FetchContent_MakeAvailable(googletest)
  endif()
endif()
