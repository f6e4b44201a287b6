# KV_OFFLOAD_UNITY: compiles the sources of a folder a few at a time as one file, after headers that are
# compiled once (kv_offload_unity(TARGET [HEADER...])).
# The headers are read and the templates made once for all of them: a third of the
# processor time of a whole build, and more to compile again after a change. So it
# is for machines that build everything once. Names in anonymous namespaces have to
# differ between the files of a folder. TESTS: only of the tests, for who changes the core again and again.
set(KV_OFFLOAD_UNITY OFF CACHE STRING "Compile the sources of a folder together: ON, OFF, TESTS")
set(KV_OFFLOAD_UNITY_FILES 6 CACHE STRING "How many at once")

function(kv_offload_unity target)
  if(NOT KV_OFFLOAD_UNITY OR (KV_OFFLOAD_UNITY STREQUAL "TESTS" AND NOT target STREQUAL "kv_offload_tests"))
    return()
  endif()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP
    # Tests say testing::Test inside kv_offload, where another file may have made a testing of ours.
    UNITY_BUILD_CODE_BEFORE_INCLUDE "namespace testing {}\nnamespace kv_offload::testing { using namespace ::testing; }")
  target_precompile_headers(${target} PRIVATE ${ARGN})
  # g++ takes a source for a header here, and warns of types that others cannot name.
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-subobject-linkage>)
  get_target_property(sources ${target} SOURCES)
  foreach(source IN LISTS sources)
    get_filename_component(folder ${source} DIRECTORY)
    string(MAKE_C_IDENTIFIER "${folder}" folder)
    math(EXPR batch "0${count_${folder}} / ${KV_OFFLOAD_UNITY_FILES}")
    math(EXPR count_${folder} "0${count_${folder}} + 1")
    set_source_files_properties(${source} PROPERTIES UNITY_GROUP ${folder}_${batch})
  endforeach()
endfunction()
