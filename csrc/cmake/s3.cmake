# libcurl for the s3 tier: transfers, and signatures (AWS SigV4; since 7.87 also of bodies, by x-amz-content-sha256,
# and of other headers: curl's lib/http_aws_sigv4.c of 7.85, 7.86 and 7.87). OpenSSL sums up what is
# sent without TLS. manylinux_2_28 has libcurl 7.61: AUTO leaves the tier out there.
set(KV_OFFLOAD_S3 AUTO CACHE STRING "The s3 tier: AUTO (when libcurl and OpenSSL are found), ON, OFF")
string(TOUPPER "${KV_OFFLOAD_S3}" s3_wanted)
add_library(kv_offload_s3 INTERFACE)
if(NOT s3_wanted STREQUAL "OFF")
  find_package(CURL 7.87 QUIET)
  find_package(OpenSSL 1.1.1 QUIET)
  if(CURL_FOUND AND OpenSSL_FOUND)
    target_link_libraries(kv_offload_s3 INTERFACE CURL::libcurl OpenSSL::Crypto)
    target_compile_definitions(kv_offload_s3 INTERFACE KV_OFFLOAD_S3)
    set(KV_OFFLOAD_S3_BUILT ON)
  elseif(s3_wanted STREQUAL "ON")
    message(FATAL_ERROR "KV_OFFLOAD_S3=ON but libcurl 7.87 or newer, or OpenSSL, was not found: install their headers "
      "(Debian, Ubuntu: apt install libcurl4-openssl-dev libssl-dev; Red Hat: libcurl-devel openssl-devel), or "
      "configure with KV_OFFLOAD_S3=AUTO or OFF")
  else()
    message(STATUS "Without libcurl 7.87 and OpenSSL there is no s3 tier (on Debian or Ubuntu: apt install libcurl4-openssl-dev libssl-dev)")
  endif()
endif()
