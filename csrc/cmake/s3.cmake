# SPDX-License-Identifier: Apache-2.0
# The s3 tier: OpenSSL signs requests. libcurl transfers them; it is loaded at run time
# (csrc/backends/s3/libcurl.h), so the build does not need it.
set(KV_OFFLOAD_S3 AUTO CACHE STRING "The s3 tier: AUTO (when OpenSSL is found), ON, OFF")
string(TOUPPER "${KV_OFFLOAD_S3}" s3_wanted)
add_library(kv_offload_s3 INTERFACE)
if(NOT s3_wanted STREQUAL "OFF")
  find_package(OpenSSL 1.1.1 QUIET)
  if(OpenSSL_FOUND)
    target_link_libraries(kv_offload_s3 INTERFACE OpenSSL::Crypto)
    target_compile_definitions(kv_offload_s3 INTERFACE KV_OFFLOAD_S3)
    set(KV_OFFLOAD_S3_BUILT ON)
  elseif(s3_wanted STREQUAL "ON")
    message(FATAL_ERROR "KV_OFFLOAD_S3=ON but OpenSSL 1.1.1 or newer was not found: install its headers "
      "(Debian, Ubuntu: apt install libssl-dev; Red Hat: openssl-devel), or configure with KV_OFFLOAD_S3=AUTO or OFF")
  else()
    message(STATUS "Without OpenSSL there is no s3 tier (on Debian or Ubuntu: apt install libssl-dev)")
  endif()
endif()
