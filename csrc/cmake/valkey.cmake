# SPDX-License-Identifier: Apache-2.0
# libvalkey 0.5, the client library of the redis tier (BSD-3-Clause). No current distribution packages it. Its
# C sources are part of the source distribution of the Python package libvalkey. pip downloads that from its
# configured index, pinned by hash (libvalkey.txt); without pip it comes from PyPI directly. It is compiled
# into the core with hidden symbols. Without a network:
# -DKV_OFFLOAD_LIBVALKEY=/path/to/libvalkey-4.2.1.tar.gz, or put it into .cache/.
enable_language(C)
set(KV_OFFLOAD_LIBVALKEY "" CACHE FILEPATH "Archive of libvalkey, where pip cannot download it")
set(KV_OFFLOAD_TLS AUTO CACHE STRING "Encrypted connections of the redis tier: AUTO (when OpenSSL is found), ON, OFF")

file(STRINGS ${CMAKE_CURRENT_LIST_DIR}/libvalkey.txt pin REGEX "^libvalkey==")
string(REGEX MATCH "==([0-9.]+)" unused "${pin}")
set(version ${CMAKE_MATCH_1})
string(REGEX MATCH "sha256:([0-9a-f]+)" unused "${pin}")
set(hash ${CMAKE_MATCH_1})
file(STRINGS ${CMAKE_CURRENT_LIST_DIR}/libvalkey.txt url REGEX "^# https:")
string(SUBSTRING "${url}" 2 -1 url)

set(archive ${KV_OFFLOAD_LIBVALKEY})
foreach(folder ${CMAKE_SOURCE_DIR}/.cache ${CMAKE_BINARY_DIR})
  if(NOT archive AND EXISTS ${folder}/libvalkey-${version}.tar.gz)
    set(archive ${folder}/libvalkey-${version}.tar.gz)
  endif()
endforeach()
if(NOT archive)
  # Prefer pip, which knows the user's index and proxies. pyproject.toml requires it, because an isolated
  # build environment has none.
  message(STATUS "Downloading libvalkey ${version}")
  set(archive ${CMAKE_BINARY_DIR}/libvalkey-${version}.tar.gz)
  find_package(Python QUIET COMPONENTS Interpreter)
  execute_process(COMMAND ${Python_EXECUTABLE} -m pip download --quiet --no-deps --no-binary libvalkey
    --require-hashes -r ${CMAKE_CURRENT_LIST_DIR}/libvalkey.txt -d ${CMAKE_BINARY_DIR}
    RESULT_VARIABLE result ERROR_VARIABLE output OUTPUT_VARIABLE output)
  if(NOT result EQUAL 0)
    file(DOWNLOAD ${url} ${archive} STATUS downloaded TIMEOUT 120)
    if(NOT downloaded MATCHES "^0;")
      file(REMOVE ${archive})
      message(FATAL_ERROR "libvalkey ${version} could not be downloaded, by pip:\n${output}\nfrom ${url}: ${downloaded}\n"
        "Give the archive: pip download --no-deps --no-binary libvalkey libvalkey==${version}, then configure with "
        "-DKV_OFFLOAD_LIBVALKEY=/path/to/libvalkey-${version}.tar.gz")
    endif()
  endif()
endif()
file(SHA256 ${archive} found)
if(NOT found STREQUAL hash)
  if(NOT archive STREQUAL KV_OFFLOAD_LIBVALKEY)
    file(REMOVE ${archive})  # otherwise every later build would stop here, too
  endif()
  message(FATAL_ERROR "${archive} is not libvalkey ${version}: its SHA-256 is ${found}, expected ${hash}")
endif()
set(sources ${CMAKE_BINARY_DIR}/libvalkey-${version}/vendor/libvalkey)
if(NOT EXISTS ${sources}/src/valkey.c)
  file(ARCHIVE_EXTRACT INPUT ${archive} DESTINATION ${CMAKE_BINARY_DIR})
endif()

# Excludes libvalkey's cluster, RDMA and Windows sources.
set(names adlist alloc async conn dict dns net read sds sockcompat timer valkey vkutil)
string(TOUPPER "${KV_OFFLOAD_TLS}" tls_wanted)
if(NOT tls_wanted STREQUAL "OFF")
  find_package(OpenSSL 1.1.1 QUIET)
endif()
if(OpenSSL_FOUND)
  list(APPEND names tls)
elseif(tls_wanted STREQUAL "ON")
  message(FATAL_ERROR "KV_OFFLOAD_TLS=ON but OpenSSL 1.1.1 or newer was not found: install its headers "
    "(Debian, Ubuntu: apt install libssl-dev; Red Hat: openssl-devel), or configure with KV_OFFLOAD_TLS=AUTO or OFF")
else()
  message(STATUS "Without OpenSSL the redis tier refuses rediss:// (on Debian or Ubuntu: apt install libssl-dev)")
endif()
list(TRANSFORM names PREPEND ${sources}/src/)
list(TRANSFORM names APPEND .c)
add_library(kv_offload_valkey STATIC ${names})
target_include_directories(kv_offload_valkey SYSTEM
  PUBLIC ${sources}/include PRIVATE ${sources}/include/valkey ${sources}/src)
# The last two definitions replace its visibility.h, which would export its functions from the extension.
target_compile_definitions(kv_offload_valkey PRIVATE VALKEY_USE_THREADS VALKEY_VISIBILITY_H LIBVALKEY_API=)
target_compile_options(kv_offload_valkey PRIVATE -w -O2)
set_target_properties(kv_offload_valkey PROPERTIES C_VISIBILITY_PRESET hidden POSITION_INDEPENDENT_CODE ON)
target_link_libraries(kv_offload_valkey PUBLIC Threads::Threads)
if(OpenSSL_FOUND)
  target_link_libraries(kv_offload_valkey PUBLIC OpenSSL::SSL)
  target_compile_definitions(kv_offload_valkey PUBLIC KV_OFFLOAD_TLS)
endif()
