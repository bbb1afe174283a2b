# What is installed, as files: headers, the library and the commands.
# Input: that of tests/consumer/run.cmake, and what it has installed in WORK/prefix; `version`, which finds/run.cmake has read of version.h.
function(check_equal what found expected)
  if(NOT found STREQUAL expected)
    message(FATAL_ERROR "${what} is '${found}', and must be '${expected}'")
  endif()
endfunction()

# Sets `output` to the value of an entry of a file's dynamic section, empty where it has none.
find_program(readelf readelf REQUIRED)  # of binutils, as the linker
function(read_entry output file entry)
  execute_process(COMMAND ${readelf} -d ${file} OUTPUT_VARIABLE text COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCH "[(]${entry}[)][^\n]*\\[([^\n]*)\\]" found "${text}")
  set(${output} "${CMAKE_MATCH_1}" PARENT_SCOPE)
endfunction()
set(of_torch ":${TORCH}/lib")
if(BUILD)
  file(STRINGS ${BUILD}/CMakeCache.txt relocatable REGEX "^TESSERA_RELOCATABLE:BOOL=ON")
endif()
if(ARCHIVE OR relocatable)
  set(of_torch "")
endif()
string(REGEX MATCH "^[0-9]+[.][0-9]+" interface ${version})
read_entry(soname ${WORK}/prefix/lib/libtessera.so SONAME)
check_equal("the library's SONAME" "${soname}" libtessera.so.${interface})
read_entry(runpath ${WORK}/prefix/lib/libtessera.so RUNPATH)
check_equal("the library's RUNPATH" "${runpath}" "$ORIGIN:$ORIGIN/../../torch/lib${of_torch}")
read_entry(runpath ${WORK}/prefix/bin/tessera RUNPATH)
check_equal("the command's RUNPATH" "${runpath}" "$ORIGIN/../lib${of_torch}")
read_entry(runpath ${WORK}/prefix/bin/tessera-run RUNPATH)
check_equal("the RUNPATH of tessera-run, which needs no library of these" "${runpath}" "")

# Warnings as a careful program has them: Tessera's headers are its own here, torch's the system's.
set(includes -I${WORK}/prefix/include -I${WORK}/prefix/include/tessera/detail -DUSE_DISTRIBUTED -DUSE_C10D_GLOO
  -isystem ${TORCH}/include -isystem ${TORCH}/include/torch/csrc/api/include)
file(GLOB headers ${WORK}/prefix/include/tessera/*.h)
foreach(header IN LISTS headers)
  get_filename_component(name ${header} NAME)
  file(WRITE ${WORK}/header.cpp "#include \"tessera/${name}\"\n")
  run(${CXX} -std=c++20 -fsyntax-only -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Werror ${WORK}/header.cpp
    ${includes})
endforeach()


# The umbrella has them all; and none needs the library that reads JSON here, which a program may have in another version.
file(READ ${WORK}/prefix/include/tessera/tessera.h umbrella)
foreach(header IN LISTS headers)
  get_filename_component(name ${header} NAME)
  if(NOT name STREQUAL "tessera.h" AND NOT umbrella MATCHES "\n#include \"tessera/${name}\"")
    message(FATAL_ERROR "tessera/tessera.h does not include tessera/${name}, which is public")
  endif()
endforeach()
file(WRITE ${WORK}/header.cpp "#include \"tessera/tessera.h\"\n")
execute_process(COMMAND ${CXX} -std=c++20 -M ${WORK}/header.cpp ${includes} OUTPUT_VARIABLE needed COMMAND_ERROR_IS_FATAL ANY)
if(needed MATCHES "[^ ]*nlohmann[^ ]*")
  message(FATAL_ERROR "a public header includes ${CMAKE_MATCH_0}")
endif()
execute_process(COMMAND nm --dynamic --defined-only ${WORK}/prefix/lib/libtessera.so OUTPUT_VARIABLE exported COMMAND_ERROR_IS_FATAL ANY)
if(exported MATCHES "_Z[A-Z]*N?K?8nlohmann[^\n]*")
  message(FATAL_ERROR "the library exports ${CMAKE_MATCH_0} of the library that reads JSON")
endif()
