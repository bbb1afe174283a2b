# Installs Tessera for C++ users: include/, lib/ and lib/cmake/Tessera/ below the prefix, as component `devel`.
#   cmake --install BUILD --prefix PREFIX --component devel     and then -DCMAKE_PREFIX_PATH=PREFIX
#   pip install .                                               the prefix is the Python package itself; then
#       -DCMAKE_PREFIX_PATH=$(python -c "import tessera; print(tessera.cmake_prefix_path)")
# Both give find_package(Tessera) and the target tessera::tessera.
include(CMakePackageConfigHelpers)

# In site-packages torch lies beside Tessera; elsewhere a program that links tessera::torch has loaded it already.
set_target_properties(tessera PROPERTIES INSTALL_RPATH "$ORIGIN/../../torch/lib")

set(_tessera_package ${CMAKE_INSTALL_LIBDIR}/cmake/Tessera)
install(TARGETS tessera EXPORT TesseraTargets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT devel)
install(DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR}/tessera DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT devel
  FILES_MATCHING PATTERN "*.h" PATTERN "*.inc.h" EXCLUDE)
install(EXPORT TesseraTargets NAMESPACE tessera:: DESTINATION ${_tessera_package} COMPONENT devel)

write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/TesseraConfigVersion.cmake COMPATIBILITY SameMinorVersion)
configure_file(${CMAKE_CURRENT_LIST_DIR}/TesseraConfig.cmake.in ${CMAKE_CURRENT_BINARY_DIR}/TesseraConfig.cmake @ONLY)
install(FILES
  ${CMAKE_CURRENT_BINARY_DIR}/TesseraConfig.cmake ${CMAKE_CURRENT_BINARY_DIR}/TesseraConfigVersion.cmake
  ${CMAKE_CURRENT_LIST_DIR}/TesseraTorch.cmake
  DESTINATION ${_tessera_package} COMPONENT devel)
