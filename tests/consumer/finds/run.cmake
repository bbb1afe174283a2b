# What find_package(Tessera) says, in a folder of its own, without the variables of the test that includes this.
# Input: that of tests/consumer/run.cmake, and what it has installed in WORK/prefix.
file(REMOVE_RECURSE ${WORK}/finds ${WORK}/site ${WORK}/libtorch ${WORK}/torches)

# Two layouts: a prefix, and a Python package with torch beside it.
set(prefix ${WORK}/prefix/lib/cmake/Tessera)
set(site ${WORK}/site/tessera/lib/cmake/Tessera)
file(COPY ${WORK}/prefix/include ${WORK}/prefix/lib DESTINATION ${WORK}/site/tessera)
file(CREATE_LINK ${TORCH} ${WORK}/site/torch SYMBOLIC)

set(archive ${WORK}/libtorch)  # the LibTorch archive has no Python
file(MAKE_DIRECTORY ${archive})
foreach(part include lib share)
  file(CREATE_LINK ${TORCH}/${part} ${archive}/${part} SYMBOLIC)
endforeach()

file(STRINGS ${prefix}/TesseraConfig.cmake minor REGEX "^set.Tessera_TORCH_VERSION ")
string(REGEX MATCH "[0-9]+[.][0-9]+" minor "${minor}")
file(STRINGS ${WORK}/prefix/include/tessera/detail/tessera/base/version.h version REGEX "define TESSERA_VERSION ")
string(REGEX MATCH "([0-9]+)[.]([0-9]+)[.]([0-9]+)" version "${version}")
set(numbers ${CMAKE_MATCH_1} ${CMAKE_MATCH_2} ${CMAKE_MATCH_3})

# Sets `output` and `result` to what a configuration says, without what differs between any two.
function(configure layout)
  string(MD5 name "${layout} ${ARGN}")
  execute_process(
    COMMAND ${CMAKE_COMMAND} -G Ninja -S ${SOURCE}/finds -B ${WORK}/finds/${name} -DCMAKE_CXX_COMPILER=${CXX} -Wno-unused-cli
      -DCMAKE_MAKE_PROGRAM=${NINJA} -DTessera_DIR=${layout} -DPython3_EXECUTABLE=/bin/false ${ARGN}
    RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  string(REPLACE "${name}" "" output "${output}")
  string(REGEX REPLACE "[(][0-9.]+s[)]|[ \n]+" " " output "${output}")
  set(output "${output}" PARENT_SCOPE)
  set(result "${result}" PARENT_SCOPE)
endfunction()

function(finds_at layout expected status)
  configure(${layout} ${ARGN})
  string(FIND "${output}" "${expected}" at)
  if(at LESS 0 OR (status STREQUAL "fails" AND result EQUAL 0) OR (status STREQUAL "works" AND NOT result EQUAL 0))
    message(FATAL_ERROR "find_package of ${layout} with ${ARGN}: expected '${expected}', which ${status}; it ended with ${result} and said ${output}")
  endif()
endfunction()
function(finds)
  finds_at(${prefix} ${ARGN})
  finds_at(${site} ${ARGN})
endfunction()

finds("at ${TORCH}, options" works -DTESSERA_TORCH_DIR=${TORCH})
finds("at ${archive}, options 'options-NOTFOUND' 'of_torch-NOTFOUND'" works -DCMAKE_PREFIX_PATH=${archive})
finds("at ${TORCH}, options" works -DCMAKE_PREFIX_PATH=${TORCH}/share/cmake)
set(ENV{CMAKE_PREFIX_PATH} /nothing:${archive})
finds("at ${archive}, options" works -DWITH=environment)
unset(ENV{CMAKE_PREFIX_PATH})
finds("at ${archive}, options" works -DTorch_DIR=${archive}/share/cmake/Torch)
if(NOT EXISTS ${TORCH}/lib/libtorch_cuda.so)  # that wants CUDA's toolkit
  finds("at ${TORCH}, options" works -DTORCH_FIRST=ON -DTorch_DIR=${TORCH}/share/cmake/Torch)
endif()
finds_at(${site} "at ${WORK}/site/torch, options" works)
finds_at(${prefix} "there is no torch: no TESSERA_TORCH_DIR" works)
finds_at(${prefix} "there is no torch: no TESSERA_TORCH_DIR" fails -DHOW=REQUIRED)
finds("where there is no torch" fails -DHOW=REQUIRED -DTESSERA_TORCH_DIR=/no/torch)
finds("Tessera has no components, and 'cuda' was asked for" fails -DHOW=REQUIRED -DPARTS=cuda -DTESSERA_TORCH_DIR=${TORCH})

# Torches that say their version in one file alone, and the versions that Tessera takes.
function(torch_of name file text)
  file(WRITE ${WORK}/torches/${name}/${file} "${text}\n")
  set(${name} ${WORK}/torches/${name} PARENT_SCOPE)
endfunction()
torch_of(zip build-version "${minor}.0+cpu")
torch_of(wheel version.py "__version__ = '${minor}.0+cpu'")
torch_of(other build-version "2.99.0+cu130")
torch_of(old build-version "2.9.1")
torch_of(cuda build-version "${minor}.0+cu130")
file(WRITE ${cuda}/lib/libtorch_cuda.so "")
finds("for torch ${minor} at ${zip}," works -DTESSERA_TORCH_DIR=${zip})
finds("for torch ${minor} at ${wheel}," works -DTESSERA_TORCH_DIR=${wheel})
finds("of a device: 'tessera::torch_cuda' is -Wl,--push-state,--no-as-needed;${cuda}/lib/libtorch_cuda.so;" works -DTESSERA_TORCH_DIR=${cuda})
finds("Tessera was built for torch ${minor}, but ${other} is 2.99" fails -DHOW=REQUIRED -DTESSERA_TORCH_DIR=${other})
finds("Tessera needs torch >= 2.11; ${old} is 2.9" fails -DHOW=REQUIRED -DTESSERA_TORCH_DIR=${old})

# A program's version is that of its minor version, up to the patch that is installed.
list(GET numbers 0 a)
list(GET numbers 1 b)
list(GET numbers 2 c)
math(EXPR next_major "${a} + 1")
math(EXPR next_minor "${b} + 1")
math(EXPR next_patch "${c} + 1")
set(others ${next_major}.${b} ${a}.${next_minor} ${a}.${b}.${next_patch})
if(b GREATER 0)
  math(EXPR before "${b} - 1")
  list(APPEND others ${a}.${before})
endif()
foreach(asked ${a}.${b} ${version})
  finds_at(${prefix} "found ${version} for torch ${minor}" works -DVERSION=${asked} -DTESSERA_TORCH_DIR=${TORCH})
endforeach()
foreach(asked IN LISTS others)
  finds_at(${prefix} "requested version \"${asked}\"" fails -DHOW=REQUIRED -DVERSION=${asked} -DTESSERA_TORCH_DIR=${TORCH})
endforeach()

# QUIET says nothing: the output is that of a project that does not look.
configure(${prefix} -DHOW=none -DSILENT=ON)
set(silence "${output}")
foreach(with "" -DTESSERA_TORCH_DIR=${TORCH} -DTESSERA_TORCH_DIR=/no/torch -DTESSERA_TORCH_DIR=${other} -DVERSION=${a}.${next_minor} -DPARTS=cuda)
  configure(${prefix} -DHOW=QUIET -DSILENT=ON ${with})
  if(NOT output STREQUAL silence)
    message(FATAL_ERROR "find_package with QUIET and '${with}' said ${output}, which without it is ${silence}")
  endif()
endforeach()
finds_at(${prefix} "not found" works -DHOW=QUIET)
