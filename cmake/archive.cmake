# `make archive`: the library, its headers and CMake package and the commands as OUT/NAME.tar.gz, for any folder of any machine.
# Input: BUILD (configured with TESSERA_RELOCATABLE, and built), OUT, NAME, FOLDERS (of this machine, none of which may be in it).
set(made ${OUT}/${NAME})
file(REMOVE_RECURSE ${made} ${made}.tar.gz)
execute_process(COMMAND ${CMAKE_COMMAND} --install ${BUILD} --prefix ${made} --component devel --strip
  OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
file(GLOB_RECURSE files ${made}/*)
foreach(file IN LISTS files)
  file(STRINGS ${file} lines REGEX "/")  # also of libraries: where they look for torch, texts of their errors
  foreach(folder IN LISTS FOLDERS)
    string(FIND "${lines}" "${folder}/" at)
    if(NOT at LESS 0)
      message(FATAL_ERROR "${file} names ${folder}, a folder of this machine")
    endif()
  endforeach()
endforeach()
execute_process(COMMAND ${CMAKE_COMMAND} -E tar czf ${NAME}.tar.gz ${NAME} WORKING_DIRECTORY ${OUT} COMMAND_ERROR_IS_FATAL ANY)
file(REMOVE_RECURSE ${made})
message("${made}.tar.gz")
