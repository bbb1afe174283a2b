# Defines tessera_json: the headers of nlohmann-json, from the system or from its PyPI wheel.
add_library(tessera_json INTERFACE)
find_package(nlohmann_json 3.11 QUIET)
if(nlohmann_json_FOUND)
  target_link_libraries(tessera_json INTERFACE nlohmann_json::nlohmann_json)
else()
  find_package(Python3 COMPONENTS Interpreter REQUIRED)
  execute_process(
    COMMAND ${Python3_EXECUTABLE} -c
      "import importlib.util as u, os; print(os.path.dirname(u.find_spec('nlohmann_json').origin))"
    OUTPUT_VARIABLE _tessera_json OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE _tessera_rc)
  if(NOT _tessera_rc EQUAL 0)
    message(FATAL_ERROR "nlohmann-json not found: pip install nlohmann-json, or install the system package "
                        "(nlohmann-json3-dev)")
  endif()
  target_include_directories(tessera_json SYSTEM INTERFACE ${_tessera_json}/include)
endif()
