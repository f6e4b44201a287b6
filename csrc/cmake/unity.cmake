# SPDX-License-Identifier: Apache-2.0
# KV_OFFLOAD_UNITY compiles several sources of a folder as one file, with precompiled headers:
# kv_offload_unity(TARGET [HEADER...]).
#
# A full build takes a third of the CPU time, but a rebuild after a change takes longer. Therefore it is for
# machines that build everything once. Names in anonymous namespaces must be unique within a folder. TESTS
# applies it to the tests only, for frequent changes to the core.
set(KV_OFFLOAD_UNITY OFF CACHE STRING "Compile the sources of a folder together: ON, OFF, TESTS")
set(KV_OFFLOAD_UNITY_FILES 12 CACHE STRING "How many at once")

function(kv_offload_unity target)
  if(NOT KV_OFFLOAD_UNITY OR (KV_OFFLOAD_UNITY STREQUAL "TESTS" AND NOT target STREQUAL "kv_offload_tests"))
    return()
  endif()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP
    # Tests use testing::Test inside kv_offload, where another file of the unit may have declared
    # kv_offload::testing.
    UNITY_BUILD_CODE_BEFORE_INCLUDE "namespace testing {}\nnamespace kv_offload::testing { using namespace ::testing; }")
  target_precompile_headers(${target} PRIVATE ${ARGN})
  # g++ treats a unity source as a header and warns about types with internal linkage.
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-subobject-linkage>)
  get_target_property(sources ${target} SOURCES)
  foreach(source IN LISTS sources)
    get_source_file_property(group ${source} UNITY_GROUP)
    if(group)  # of another target
      continue()
    endif()
    get_filename_component(folder ${source} DIRECTORY)
    string(MAKE_C_IDENTIFIER "${folder}" folder)
    math(EXPR batch "0${count_${folder}} / ${KV_OFFLOAD_UNITY_FILES}")
    math(EXPR count_${folder} "0${count_${folder}} + 1")
    set_source_files_properties(${source} PROPERTIES UNITY_GROUP ${folder}_${batch})
  endforeach()
endfunction()
