# ctest's `consumer`: install Tessera, configure and build this folder against it, run on one rank and on two.
# Input: BUILD (Tessera's build tree), SOURCE (this folder), WORK (scratch folder), TORCH, CXX, NINJA.
function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  message("${output}")
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "failed: ${ARGN}")
  endif()
endfunction()

file(REMOVE_RECURSE ${WORK}/prefix)
run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${WORK}/prefix --component devel)
if(EXISTS ${BUILD}/libtessera_cuda.so AND NOT EXISTS ${WORK}/prefix/lib/libtessera_cuda.so)  # where nvcc was found
  message(FATAL_ERROR "the CUDA kernels, which the library loads from beside itself, are not installed")
endif()
run(${CMAKE_COMMAND} -G Ninja -S ${SOURCE} -B ${WORK}/build -DCMAKE_BUILD_TYPE=Release -DCMAKE_PREFIX_PATH=${WORK}/prefix
    -DTESSERA_TORCH_DIR=${TORCH} -DCMAKE_CXX_COMPILER=${CXX} -DCMAKE_MAKE_PROGRAM=${NINJA})
run(${CMAKE_COMMAND} --build ${WORK}/build)

set(ENV{OMP_NUM_THREADS} 1)
run(${WORK}/build/consumer)

string(RANDOM LENGTH 4 ALPHABET 0123456789 port)
math(EXPR port "20000 + ${port}")
set(ENV{WORLD_SIZE} 2)
set(ENV{MASTER_ADDR} 127.0.0.1)
set(ENV{MASTER_PORT} ${port})
run(sh -c "RANK=1 '${WORK}/build/consumer' & RANK=0 '${WORK}/build/consumer' && wait $!")
