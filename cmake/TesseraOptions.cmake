# Warnings and sanitizers for our own targets; never exported.
add_library(tessera_options INTERFACE)
target_compile_options(tessera_options INTERFACE -Wall -Wextra -Wno-unused-parameter -Werror=return-type -Wno-deprecated-declarations)
# Torch's headers have loops of OpenMP. GCC's runtime is torch's own (tessera::torch); clang calls that of LLVM, beside it.
target_compile_options(tessera_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-fopenmp>)
target_link_options(tessera_options INTERFACE $<$<CXX_COMPILER_ID:Clang>:-fopenmp>)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # At -O1 GCC sees an optional of torch's that is empty as one that is read.
  target_compile_options(tessera_options INTERFACE -Wno-maybe-uninitialized)
endif()
if(TESSERA_SANITIZE)
  # The checks of every access for null (a crash without them) and alignment were half of the compile time.
  add_compile_options(-fsanitize=${TESSERA_SANITIZE} -fno-sanitize=null,alignment -fno-omit-frame-pointer -g1)
  add_link_options(-fsanitize=${TESSERA_SANITIZE})
endif()
