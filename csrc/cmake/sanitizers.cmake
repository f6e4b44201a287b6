# KV_OFFLOAD_SANITIZE=address,undefined | thread: the whole build, core and tests.
if(KV_OFFLOAD_SANITIZE)
  string(REPLACE "," ";" kinds "${KV_OFFLOAD_SANITIZE}")
  foreach(kind IN LISTS kinds)
    if(NOT kind MATCHES "^(address|undefined|thread)$")
      message(FATAL_ERROR "KV_OFFLOAD_SANITIZE=${KV_OFFLOAD_SANITIZE}: '${kind}' is not one of address, undefined, thread")
    endif()
  endforeach()
  add_compile_options(-fsanitize=${KV_OFFLOAD_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  # g++ 12 sees uninitialised members inside its own <regex> and <functional> when
  # sanitizers keep it from inlining.
  add_compile_options($<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>)
  # Python loads the module: the runtime of clang has to be a library then, as that of g++ is.
  if(CMAKE_CXX_COMPILER_ID STREQUAL "Clang" AND KV_OFFLOAD_PYTHON)
    add_link_options(-shared-libsan)
  endif()
  add_link_options(-fsanitize=${KV_OFFLOAD_SANITIZE})
endif()
