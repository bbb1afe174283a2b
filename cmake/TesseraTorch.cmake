# Defines tessera::torch, an interface target over the LibTorch inside an installed torch wheel.
# find_package(Torch) is not used: with a CUDA wheel it demands a CUDA toolkit that Tessera does not need.
# Input: TESSERA_TORCH_DIR (folder of the torch package) or a Python interpreter that can find torch.
if(NOT TESSERA_TORCH_DIR)
  find_package(Python3 COMPONENTS Interpreter REQUIRED)
  execute_process(
    COMMAND ${Python3_EXECUTABLE} -c
      "import importlib.util as u, os; print(os.path.dirname(u.find_spec('torch').origin))"
    OUTPUT_VARIABLE _tessera_torch OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE _tessera_rc)
  if(NOT _tessera_rc EQUAL 0)
    message(FATAL_ERROR "No torch found by ${Python3_EXECUTABLE}. Install it (pip install torch) or set "
                        "TESSERA_TORCH_DIR to the folder of the torch package.")
  endif()
  set(TESSERA_TORCH_DIR ${_tessera_torch} CACHE PATH "Folder of the torch package" FORCE)
endif()

if(NOT EXISTS "${TESSERA_TORCH_DIR}/version.py")
  message(FATAL_ERROR "Tessera: TESSERA_TORCH_DIR is ${TESSERA_TORCH_DIR}, where there is no torch (no version.py). It is the "
                      "folder of the torch package: python -c 'import torch; print(torch.__path__[0])'")
endif()
file(STRINGS ${TESSERA_TORCH_DIR}/version.py _tessera_version REGEX "^__version__ *=")
string(REGEX MATCH "[0-9]+\\.[0-9]+" TESSERA_TORCH_VERSION "${_tessera_version}")
if(TESSERA_TORCH_VERSION VERSION_LESS 2.11)
  message(FATAL_ERROR "Tessera needs torch >= 2.11; ${TESSERA_TORCH_DIR} is ${TESSERA_TORCH_VERSION}")
endif()

if(NOT TARGET tessera::torch)
  # The wheel ships its own libgomp; executables must link exactly that one.
  file(GLOB _tessera_gomp ${TESSERA_TORCH_DIR}/lib/libgomp*.so*)
  add_library(tessera::torch INTERFACE IMPORTED GLOBAL)
  set_target_properties(tessera::torch PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES "${TESSERA_TORCH_DIR}/include;${TESSERA_TORCH_DIR}/include/torch/csrc/api/include"
    INTERFACE_SYSTEM_INCLUDE_DIRECTORIES "${TESSERA_TORCH_DIR}/include;${TESSERA_TORCH_DIR}/include/torch/csrc/api/include"
    INTERFACE_COMPILE_DEFINITIONS "USE_DISTRIBUTED;USE_C10D_GLOO"
    INTERFACE_COMPILE_OPTIONS "-fopenmp;-Wno-deprecated-declarations"
    # GCC's runtime is torch's own, below; clang calls that of LLVM, beside it.
    INTERFACE_LINK_OPTIONS "$<$<CXX_COMPILER_ID:Clang>:-fopenmp>"
    INTERFACE_LINK_LIBRARIES
      "${TESSERA_TORCH_DIR}/lib/libtorch_cpu.so;${TESSERA_TORCH_DIR}/lib/libc10.so;${_tessera_gomp}")
endif()
message(STATUS "Tessera: torch ${TESSERA_TORCH_VERSION} at ${TESSERA_TORCH_DIR}")
