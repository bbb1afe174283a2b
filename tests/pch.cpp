// What CMake compiles the precompiled header of the tests with.
