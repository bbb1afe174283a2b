# Installs Tessera for C++ users in two layouts made from one build:
#   default            include/, lib/, lib/cmake/Tessera/ under the prefix: cmake --install BUILD --prefix P
#   component `python` the same below tessera/, beside the Python package; what `pip install` puts into site-packages.
#                      A program then finds it with -DCMAKE_PREFIX_PATH=$(python -c
#                      "import tessera; print(tessera.cmake_prefix_path)")
# Both give find_package(Tessera) and the target tessera::tessera.
include(CMakePackageConfigHelpers)

# The library finds torch beside itself in site-packages; a program that links tessera::torch has loaded it already.
# $ORIGIN, also in the build tree, is for the libraries of device kernels, which it loads by name.
set_target_properties(tessera PROPERTIES BUILD_RPATH "$ORIGIN" INSTALL_RPATH "$ORIGIN;$ORIGIN/../../torch/lib")

write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/TesseraConfigVersion.cmake COMPATIBILITY SameMinorVersion)
configure_file(${CMAKE_CURRENT_LIST_DIR}/TesseraConfig.cmake.in ${CMAKE_CURRENT_BINARY_DIR}/TesseraConfig.cmake @ONLY)

# tessera_install(<root> <export> <component arguments>...): headers, library and CMake package below <root>.
function(tessera_install root export)
  install(TARGETS tessera EXPORT ${export}
    LIBRARY DESTINATION ${root}lib ${ARGN} INCLUDES DESTINATION ${root}include)
  if(TARGET tessera_cuda)  # loaded, never linked
    install(TARGETS tessera_cuda LIBRARY DESTINATION ${root}lib ${ARGN})
  endif()
  install(DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR}/tessera DESTINATION ${root}include ${ARGN}
    FILES_MATCHING PATTERN "*.h" PATTERN "*.inc.h" EXCLUDE PATTERN "kernels/cuda" EXCLUDE)
  install(EXPORT ${export} NAMESPACE tessera:: FILE TesseraTargets.cmake DESTINATION ${root}lib/cmake/Tessera ${ARGN})
  install(FILES
    ${CMAKE_CURRENT_BINARY_DIR}/TesseraConfig.cmake ${CMAKE_CURRENT_BINARY_DIR}/TesseraConfigVersion.cmake
    ${CMAKE_CURRENT_SOURCE_DIR}/cmake/TesseraTorch.cmake
    DESTINATION ${root}lib/cmake/Tessera ${ARGN})
endfunction()

tessera_install("" TesseraTargets COMPONENT devel)
tessera_install(tessera/ TesseraPythonTargets COMPONENT python EXCLUDE_FROM_ALL)
