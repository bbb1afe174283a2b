# ctest's `consumer`, and the test of an archive: install Tessera, find it in all ways, compile each public header alone, configure and
# build this folder against it, run on one rank and on two.
# Input: BUILD (Tessera's build tree) or ARCHIVE (a file of `make archive`), SOURCE (this folder), WORK (scratch folder), TORCH, CXX, NINJA, PYTHON.
function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  message("${output}")
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "failed: ${ARGN}")
  endif()
endfunction()

file(REMOVE_RECURSE ${WORK}/prefix)
if(ARCHIVE)
  file(REMOVE_RECURSE ${WORK}/unpacked)
  file(MAKE_DIRECTORY ${WORK}/unpacked)
  run(${CMAKE_COMMAND} -E chdir ${WORK}/unpacked ${CMAKE_COMMAND} -E tar xzf ${ARCHIVE})
  file(GLOB unpacked ${WORK}/unpacked/*)
  file(RENAME ${unpacked} ${WORK}/prefix)
else()
  run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${WORK}/prefix --component devel)
endif()
if(EXISTS ${BUILD}/libtessera_cuda.so AND NOT EXISTS ${WORK}/prefix/lib/libtessera_cuda.so)  # where nvcc was found
  message(FATAL_ERROR "the CUDA kernels, which the library loads from beside itself, are not installed")
endif()

# What find_package says, in a folder of its own, without the variables of this run.
set(archive ${WORK}/libtorch)  # the LibTorch archive has no Python
file(REMOVE_RECURSE ${archive} ${WORK}/finds)
file(MAKE_DIRECTORY ${archive})
foreach(part include lib share)
  file(CREATE_LINK ${TORCH}/${part} ${archive}/${part} SYMBOLIC)
endforeach()
function(finds expected status)
  string(MD5 name "${ARGN}")
  set(no_python -DPython3_EXECUTABLE=/bin/false)
  execute_process(
    COMMAND ${CMAKE_COMMAND} -G Ninja -S ${SOURCE}/finds -B ${WORK}/finds/${name} -DCMAKE_CXX_COMPILER=${CXX}
      -DCMAKE_MAKE_PROGRAM=${NINJA} -DTessera_DIR=${WORK}/prefix/lib/cmake/Tessera ${no_python} ${ARGN}
    RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  string(REGEX REPLACE "[ \n]+" " " output "${output}")
  string(FIND "${output}" "${expected}" at)
  if(at LESS 0 OR (status STREQUAL "fails" AND result EQUAL 0) OR (status STREQUAL "works" AND NOT result EQUAL 0))
    message(FATAL_ERROR "find_package with ${ARGN}: expected '${expected}', which ${status}; it ended with ${result} and said ${output}")
  endif()
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
finds("not found" works -DHOW=QUIET)
finds("there is no torch: no TESSERA_TORCH_DIR" works)
finds("there is no torch: no TESSERA_TORCH_DIR" fails -DHOW=REQUIRED)
finds("where there is no torch" fails -DHOW=REQUIRED -DTESSERA_TORCH_DIR=/no/torch)
finds("Tessera has no components, and 'cuda' was asked for" fails -DHOW=REQUIRED -DPARTS=cuda -DTESSERA_TORCH_DIR=${TORCH})
finds("not found" works -DHOW=QUIET -DVERSION=99.1 -DTESSERA_TORCH_DIR=${TORCH})

find_program(pkg_config pkg-config)
if(pkg_config)
  set(ENV{PKG_CONFIG_PATH} ${WORK}/prefix/lib/pkgconfig)
  execute_process(COMMAND ${pkg_config} --define-variable=torch=${TORCH} --cflags --libs tessera OUTPUT_VARIABLE flags OUTPUT_STRIP_TRAILING_WHITESPACE
    COMMAND_ERROR_IS_FATAL ANY)
  separate_arguments(flags UNIX_COMMAND "${flags}")
  run(${CXX} ${SOURCE}/main.cpp -o ${WORK}/by_pkg_config ${flags})
  run(${CMAKE_COMMAND} -E env OMP_NUM_THREADS=1 ${WORK}/by_pkg_config)
endif()

# Warnings as a careful program has them: Tessera's headers are its own here, torch's the system's.
file(GLOB headers ${WORK}/prefix/include/tessera/*.h)
foreach(header IN LISTS headers)
  get_filename_component(name ${header} NAME)
  file(WRITE ${WORK}/header.cpp "#include \"tessera/${name}\"\n")
  run(${CXX} -std=c++20 -fsyntax-only -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Werror ${WORK}/header.cpp
    -I${WORK}/prefix/include -I${WORK}/prefix/include/tessera/detail -DUSE_DISTRIBUTED -DUSE_C10D_GLOO
    -isystem ${TORCH}/include -isystem ${TORCH}/include/torch/csrc/api/include)
endforeach()

run(${PYTHON} ${SOURCE}/pages.py ${WORK}/page)
set(options -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_PREFIX_PATH=${WORK}/prefix -DTESSERA_TORCH_DIR=${TORCH} -DCMAKE_CXX_COMPILER=${CXX}
    -DCMAKE_MAKE_PROGRAM=${NINJA})
run(${CMAKE_COMMAND} ${options} -S ${SOURCE} -B ${WORK}/build)
run(${CMAKE_COMMAND} --build ${WORK}/build)
run(${CMAKE_COMMAND} ${options} "-DCMAKE_CXX_FLAGS=-Wall -Wextra -Werror" -S ${WORK}/page -B ${WORK}/page/build)
run(${CMAKE_COMMAND} --build ${WORK}/page/build)

set(ENV{OMP_NUM_THREADS} 1)
run(${WORK}/build/consumer)
run(${WORK}/prefix/bin/tessera-run -n 2 ${WORK}/build/consumer)
run(${WORK}/build/plugin_host ${WORK}/build/libplugin.so)
file(STRINGS ${WORK}/page/functions.txt functions)
foreach(function IN LISTS functions)
  separate_arguments(words UNIX_COMMAND "${function}")
  list(POP_FRONT words name)
  foreach(ranks IN LISTS words)
    message("${name} on ${ranks} ranks")
    set(folder ${WORK}/runs/${name}_${ranks})
    run(${CMAKE_COMMAND} -E rm -rf ${folder})
    run(${CMAKE_COMMAND} -E make_directory ${folder})
    run(${CMAKE_COMMAND} -E chdir ${folder} ${WORK}/prefix/bin/tessera-run -n ${ranks} ${WORK}/page/build/train ${name})
  endforeach()
endforeach()

# The command, where the program of docs/cpp.md has left a checkpoint. An archive knows no torch.
if(ARCHIVE)
  set(ENV{LD_LIBRARY_PATH} ${TORCH}/lib)
endif()
foreach(line "--version" "report" "estimate 7B --ranks 8" "inspect run --verify" "export run weights --dtype bf16")
  string(REPLACE " " ";" line "${line}")
  run(${CMAKE_COMMAND} -E chdir ${WORK}/runs/cpp_2 ${WORK}/prefix/bin/tessera ${line})
endforeach()
