# SPDX-License-Identifier: Apache-2.0
# KV_OFFLOAD_SANITIZE=address,undefined | thread: applies to the whole build, core and tests.
if(KV_OFFLOAD_SANITIZE)
  string(REPLACE "," ";" kinds "${KV_OFFLOAD_SANITIZE}")
  foreach(kind IN LISTS kinds)
    if(NOT kind MATCHES "^(address|undefined|thread)$")
      message(FATAL_ERROR "KV_OFFLOAD_SANITIZE=${KV_OFFLOAD_SANITIZE}: '${kind}' is not one of address, undefined, thread")
    endif()
  endforeach()
  add_compile_options(-fsanitize=${KV_OFFLOAD_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  # These checks account for a fifth of clang's compile time. AddressSanitizer detects null dereferences and accesses
  # out of bounds without them; wrong dynamic types (vptr) are detected with --long only.
  if(CMAKE_CXX_COMPILER_ID STREQUAL "Clang" AND "undefined" IN_LIST kinds AND "address" IN_LIST kinds
      AND NOT KV_OFFLOAD_LONG)
    add_compile_options(-fno-sanitize=null,vptr,object-size)
  endif()
  # False positives of g++ 12 in its own <regex> and <functional>: sanitizers keep it from inlining them.
  add_compile_options($<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
    # Python loads the module, so clang's sanitizer runtime must be a shared library, as g++'s is by default.
    if(KV_OFFLOAD_PYTHON)
      add_link_options(-shared-libsan)
    endif()
    # The tests have their own operator new. ThreadSanitizer's runtime for C++ defines it, too, and nothing else; clang
    # does not link it in this mode.
    if("thread" IN_LIST kinds)
      add_link_options(--driver-mode=gcc)
      string(APPEND CMAKE_CXX_STANDARD_LIBRARIES " -lstdc++ -lm")
    endif()
  endif()
  add_link_options(-fsanitize=${KV_OFFLOAD_SANITIZE})
endif()
