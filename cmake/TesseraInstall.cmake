# Installs Tessera for C++ users in two layouts made from one build:
#   default            bin/, include/, lib/, lib/cmake/Tessera/ under the prefix: cmake --install BUILD --prefix P
#   component `python` the same below tessera/, beside the Python package; what `pip install` puts into site-packages.
#                      A program then finds it with -DCMAKE_PREFIX_PATH=$(python -c
#                      "import tessera; print(tessera.cmake_prefix_path)")
# Both give find_package(Tessera) and the target tessera::tessera. The public headers are include/tessera/*.h; those that they include
# are in include/tessera/detail/.
include(CMakePackageConfigHelpers)

option(TESSERA_RELOCATABLE "What is installed names no folder of this machine" OFF)

# The library finds torch beside itself in site-packages, else where it was at the build; a program that links tessera::torch has
# loaded it already. $ORIGIN, also in the build tree, is for the libraries of device kernels, which it loads by name.
set(_runpath "$ORIGIN;$ORIGIN/../../torch/lib")
if(NOT SKBUILD AND NOT TESSERA_RELOCATABLE)
  list(APPEND _runpath "${TESSERA_TORCH_DIR}/lib")
endif()
# Minor versions have binary interfaces of their own, and may be installed side by side.
set(_interface ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})
set(_command_runpath "$ORIGIN/../lib")  # no wheel has it
if(NOT TESSERA_RELOCATABLE)
  list(APPEND _command_runpath "${TESSERA_TORCH_DIR}/lib")
endif()
set_target_properties(tessera-command PROPERTIES INSTALL_RPATH "${_command_runpath}")
set_target_properties(tessera PROPERTIES VERSION ${_interface} SOVERSION ${_interface} BUILD_RPATH "$ORIGIN" INSTALL_RPATH "${_runpath}")

write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/TesseraConfigVersion.cmake COMPATIBILITY SameMinorVersion)
# A range takes every version inside it, also of several minor ones: who writes it says so.
file(APPEND ${CMAKE_CURRENT_BINARY_DIR}/TesseraConfigVersion.cmake [=[
if(PACKAGE_FIND_VERSION_RANGE AND PACKAGE_VERSION VERSION_GREATER_EQUAL PACKAGE_FIND_VERSION_MIN AND
   (PACKAGE_VERSION VERSION_LESS PACKAGE_FIND_VERSION_MAX OR
    (PACKAGE_FIND_VERSION_RANGE_MAX STREQUAL "INCLUDE" AND PACKAGE_VERSION VERSION_EQUAL PACKAGE_FIND_VERSION_MAX)))
  set(PACKAGE_VERSION_COMPATIBLE TRUE)
endif()
]=])
configure_file(${CMAKE_CURRENT_LIST_DIR}/TesseraConfig.cmake.in ${CMAKE_CURRENT_BINARY_DIR}/TesseraConfig.cmake @ONLY)
set(TESSERA_PC_TORCH "${TESSERA_TORCH_DIR}")
if(TESSERA_RELOCATABLE)
  set(TESSERA_PC_TORCH "/set/it/by/--define-variable=torch=FOLDER")
endif()
set(TESSERA_PC_DEVICE "")
if(TARGET tessera::torch_cuda)
  set(TESSERA_PC_DEVICE " -ltorch_cuda -lc10_cuda")
endif()
configure_file(${CMAKE_CURRENT_LIST_DIR}/tessera.pc.in ${CMAKE_CURRENT_BINARY_DIR}/tessera.pc @ONLY)

# tessera_install(<root> <export> <NAMELINK_SKIP, or nothing> <component arguments>...): headers, library and CMake package below <root>.
function(tessera_install root export link)
  install(TARGETS tessera EXPORT ${export}
    LIBRARY DESTINATION ${root}lib ${ARGN} ${link} INCLUDES DESTINATION ${root}include ${root}include/tessera/detail)
  foreach(loaded tessera_cuda tessera_cuda_comm)  # never linked
    if(TARGET ${loaded})
      install(TARGETS ${loaded} LIBRARY DESTINATION ${root}lib ${ARGN})
      if(TARGET _core)  # a package is built by this target alone
        add_dependencies(_core ${loaded})
      endif()
    endif()
  endforeach()
  file(GLOB public CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/tessera/*.h)
  install(FILES ${public} DESTINATION ${root}include/tessera ${ARGN})
  install(DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR}/tessera DESTINATION ${root}include/tessera/detail ${ARGN}
    FILES_MATCHING PATTERN "*.h" PATTERN "*.inc.h" EXCLUDE PATTERN "kernels/cuda" EXCLUDE REGEX "/tessera/[^/]*[.]h$" EXCLUDE)
  install(EXPORT ${export} NAMESPACE tessera:: FILE TesseraTargets.cmake DESTINATION ${root}lib/cmake/Tessera ${ARGN})
  install(FILES
    ${CMAKE_CURRENT_BINARY_DIR}/TesseraConfig.cmake ${CMAKE_CURRENT_BINARY_DIR}/TesseraConfigVersion.cmake
    ${CMAKE_CURRENT_SOURCE_DIR}/cmake/TesseraTorch.cmake
    DESTINATION ${root}lib/cmake/Tessera ${ARGN})
endfunction()

tessera_install("" TesseraTargets "" COMPONENT devel)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/tessera.pc DESTINATION lib/pkgconfig COMPONENT devel)
install(TARGETS tessera-run tessera-command RUNTIME DESTINATION bin COMPONENT devel)
# A wheel has files only, so that a link would be the library once more.
tessera_install(tessera/ TesseraPythonTargets NAMELINK_SKIP COMPONENT python EXCLUDE_FROM_ALL)
if(SKBUILD)  # beside the command `tessera`
  install(TARGETS tessera-run RUNTIME DESTINATION ${SKBUILD_SCRIPTS_DIR} COMPONENT python EXCLUDE_FROM_ALL)
endif()
