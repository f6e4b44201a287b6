# SPDX-License-Identifier: Apache-2.0
# Record encryption (csrc/record/encryption.h), based on OpenSSL.
set(KV_OFFLOAD_ENCRYPTION AUTO CACHE STRING "Encryption of records: AUTO (when OpenSSL is found), ON, OFF")
string(TOUPPER "${KV_OFFLOAD_ENCRYPTION}" encryption_wanted)
add_library(kv_offload_encryption INTERFACE)
if(NOT encryption_wanted STREQUAL "OFF")
  find_package(OpenSSL 1.1.1 QUIET)
  if(OpenSSL_FOUND)
    target_link_libraries(kv_offload_encryption INTERFACE OpenSSL::Crypto)
    target_compile_definitions(kv_offload_encryption INTERFACE KV_OFFLOAD_ENCRYPTION)
  elseif(encryption_wanted STREQUAL "ON")
    message(FATAL_ERROR "KV_OFFLOAD_ENCRYPTION=ON but OpenSSL 1.1.1 or newer was not found: install its headers "
      "(Debian, Ubuntu: apt install libssl-dev; Red Hat: openssl-devel), or configure with KV_OFFLOAD_ENCRYPTION=AUTO or OFF")
  else()
    message(STATUS "Without OpenSSL records cannot be encrypted (on Debian or Ubuntu: apt install libssl-dev)")
  endif()
endif()
