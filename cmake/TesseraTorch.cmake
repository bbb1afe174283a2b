# tessera::torch, an interface target over the LibTorch that Tessera is built against, or that a program uses with it: the one
# in a torch wheel, or the LibTorch archive. find_package(Torch) is not called: with a CUDA build it demands a CUDA toolkit that
# Tessera does not need.
# Input, the first that there is:
#   TESSERA_TORCH_DIR   its folder, with include/ and lib/: torch.__path__[0] of a wheel, or the unpacked archive
#   tessera::torch      of an earlier call in this configuration
#   target `torch`      of a find_package(Torch) that the project has made
#   Torch_DIR           share/cmake/Torch of one
#   CMAKE_PREFIX_PATH   with one; that of the environment, which the next configuration may be without, is remembered
#   _tessera_beside     the one beside an installed Python package of Tessera
#   Python3_EXECUTABLE  or the first Python: the one that it imports
# What is not said is looked for in every configuration, so that a build tree follows what is changed in it.
#   _tessera_built_for  the version (major.minor) that it must be of; empty: any that Tessera can be built with
# Output: TESSERA_TORCH_DIR, TESSERA_TORCH_VERSION (major.minor); TESSERA_TORCH_PROBLEM: why there is none, else empty.
function(_tessera_folder_of_target output)
  set(_location "")
  get_target_property(_configurations torch IMPORTED_CONFIGURATIONS)  # a torch of today has no location but these
  foreach(_configuration "" ${_configurations})
    if(NOT _location)
      string(REGEX REPLACE "(.+)" "_\\1" _configuration "${_configuration}")
      get_target_property(_location torch IMPORTED_LOCATION${_configuration})  # its lib/libtorch.so
    endif()
  endforeach()
  string(REGEX REPLACE "/lib/[^/]*$" "" _location "${_location}")
  set(${output} "${_location}" PARENT_SCOPE)
endfunction()

function(_tessera_look_for_torch)
  unset(_found)
  if(TARGET tessera::torch)
    get_target_property(_found tessera::torch TESSERA_TORCH_DIR)
  elseif(TARGET torch)
    _tessera_folder_of_target(_found)
  endif()
  if(NOT _found AND Torch_DIR)
    get_filename_component(_found "${Torch_DIR}/../../.." ABSOLUTE)
  endif()
  foreach(_of CMAKE_PREFIX_PATH environment)
    if(NOT _found)
      set(_folders "${CMAKE_PREFIX_PATH}")
      if(_of STREQUAL "environment")
        string(REPLACE ":" ";" _folders "$ENV{CMAKE_PREFIX_PATH}")
      endif()
      find_path(_found TorchConfig.cmake PATHS ${_folders} PATH_SUFFIXES share/cmake/Torch Torch NO_DEFAULT_PATH NO_CACHE)
      if(_found)
        get_filename_component(_found "${_found}/../../.." ABSOLUTE)
        set(_tessera_found_in ${_of} PARENT_SCOPE)
      endif()
    endif()
  endforeach()
  if(NOT _found AND EXISTS "${_TESSERA_TORCH_OF_ENVIRONMENT}")
    set(_found "${_TESSERA_TORCH_OF_ENVIRONMENT}")
  endif()
  if(NOT _found AND EXISTS "${_tessera_beside}/version.py")
    set(_found "${_tessera_beside}")
  endif()
  if(NOT _found)
    find_package(Python3 QUIET COMPONENTS Interpreter)
    execute_process(
      COMMAND "${Python3_EXECUTABLE}" -c
        "import importlib.util as u, os; print(os.path.dirname(u.find_spec('torch').origin))"
      OUTPUT_VARIABLE _found OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE _status)
    if(NOT _status EQUAL 0)
      set(TESSERA_TORCH_PROBLEM
        "there is no torch: no TESSERA_TORCH_DIR, no find_package(Torch) before, no Torch_DIR, none in CMAKE_PREFIX_PATH, and \
'${Python3_EXECUTABLE}' has none. Install it (pip install torch), or set TESSERA_TORCH_DIR to the folder of the torch package or of \
the unpacked LibTorch archive" PARENT_SCOPE)
      return()
    endif()
  endif()
  set(TESSERA_TORCH_DIR "${_found}" PARENT_SCOPE)
endfunction()

# In the header since torch 2.11; a wheel says it in version.py, too, the archive in build-version.
function(_tessera_read_torch_version)
  foreach(_file include/torch/headeronly/version.h include/torch/csrc/api/include/torch/version.h version.py build-version)
    if(EXISTS "${TESSERA_TORCH_DIR}/${_file}")
      file(STRINGS "${TESSERA_TORCH_DIR}/${_file}" _lines REGEX
        "TORCH_VERSION_M[AI][JN]OR +[0-9]+$|^__version__ *=|^[0-9]+[.][0-9]+[.]")
      string(REGEX REPLACE "[^0-9]+" "." _numbers "${_lines}")
      if(_numbers MATCHES "([0-9]+)[.]([0-9]+)")
        set(TESSERA_TORCH_VERSION "${CMAKE_MATCH_1}.${CMAKE_MATCH_2}" PARENT_SCOPE)
        return()
      endif()
    endif()
  endforeach()
  set(TESSERA_TORCH_PROBLEM
    "TESSERA_TORCH_DIR is ${TESSERA_TORCH_DIR}, where there is no torch that says its version. It is the folder of the torch \
package (python -c 'import torch; print(torch.__path__[0])') or of the unpacked LibTorch archive" PARENT_SCOPE)
endfunction()

set(TESSERA_TORCH_PROBLEM "")
set(TESSERA_TORCH_VERSION "")
set(_tessera_found_in "")
set(_tessera_looked FALSE)
if(NOT TESSERA_TORCH_DIR)
  set(_tessera_looked TRUE)
  _tessera_look_for_torch()
endif()
if(NOT TESSERA_TORCH_PROBLEM)
  _tessera_read_torch_version()
endif()
if(NOT TESSERA_TORCH_PROBLEM AND TESSERA_TORCH_VERSION VERSION_LESS 2.11)
  set(TESSERA_TORCH_PROBLEM "Tessera needs torch >= 2.11; ${TESSERA_TORCH_DIR} is ${TESSERA_TORCH_VERSION}")
endif()
if(NOT TESSERA_TORCH_PROBLEM AND _tessera_built_for AND NOT TESSERA_TORCH_VERSION VERSION_EQUAL _tessera_built_for)
  set(TESSERA_TORCH_PROBLEM
    "Tessera was built for torch ${_tessera_built_for}, but ${TESSERA_TORCH_DIR} is ${TESSERA_TORCH_VERSION}")
endif()
if(TESSERA_TORCH_PROBLEM AND _tessera_looked)
  unset(TESSERA_TORCH_DIR)  # the next call looks again
elseif(_tessera_found_in STREQUAL "environment")
  set(_TESSERA_TORCH_OF_ENVIRONMENT "${TESSERA_TORCH_DIR}" CACHE INTERNAL "What Tessera found by the environment's CMAKE_PREFIX_PATH")
endif()

if(NOT TESSERA_TORCH_PROBLEM AND NOT TARGET tessera::torch)
  # LibTorch ships its own libgomp; executables must link exactly that one.
  file(GLOB _tessera_gomp "${TESSERA_TORCH_DIR}/lib/libgomp*.so*")
  add_library(tessera::torch INTERFACE IMPORTED GLOBAL)
  set_target_properties(tessera::torch PROPERTIES
    TESSERA_TORCH_DIR "${TESSERA_TORCH_DIR}"
    INTERFACE_INCLUDE_DIRECTORIES "${TESSERA_TORCH_DIR}/include;${TESSERA_TORCH_DIR}/include/torch/csrc/api/include"
    INTERFACE_SYSTEM_INCLUDE_DIRECTORIES "${TESSERA_TORCH_DIR}/include;${TESSERA_TORCH_DIR}/include/torch/csrc/api/include"
    INTERFACE_COMPILE_DEFINITIONS "USE_DISTRIBUTED;USE_C10D_GLOO"
    INTERFACE_LINK_LIBRARIES
      "${TESSERA_TORCH_DIR}/lib/libtorch_cpu.so;${TESSERA_TORCH_DIR}/lib/libc10.so;${_tessera_gomp}")
endif()

# Of a torch for CUDA a program needs the library that registers the device, though it calls nothing of it.
if(NOT TESSERA_TORCH_PROBLEM AND EXISTS "${TESSERA_TORCH_DIR}/lib/libtorch_cuda.so" AND NOT TARGET tessera::torch_cuda)
  add_library(tessera::torch_cuda INTERFACE IMPORTED GLOBAL)
  set_target_properties(tessera::torch_cuda PROPERTIES INTERFACE_LINK_LIBRARIES
    "-Wl,--push-state,--no-as-needed;${TESSERA_TORCH_DIR}/lib/libtorch_cuda.so;${TESSERA_TORCH_DIR}/lib/libc10_cuda.so;-Wl,--pop-state")
endif()
