# Defines tessera_json: the headers of nlohmann-json from the folder that NLOHMANN_JSON names (-D, or the environment), from the
# system, or from the PyPI wheel in the environment. That folder has the headers, or the wheel as it was downloaded.
add_library(tessera_json INTERFACE)
if(NOT NLOHMANN_JSON AND DEFINED ENV{NLOHMANN_JSON})
  set(NLOHMANN_JSON $ENV{NLOHMANN_JSON} CACHE PATH "Folder with the headers or the wheel of nlohmann-json")
endif()
if(NLOHMANN_JSON)
  get_filename_component(NLOHMANN_JSON ${NLOHMANN_JSON} ABSOLUTE BASE_DIR ${CMAKE_SOURCE_DIR})
  file(GLOB _tessera_wheel ${NLOHMANN_JSON}/nlohmann_json-*.whl)
  if(_tessera_wheel)
    list(GET _tessera_wheel -1 _tessera_wheel)
    file(ARCHIVE_EXTRACT INPUT ${_tessera_wheel} DESTINATION ${CMAKE_BINARY_DIR}/nlohmann_json)
  endif()
  find_path(_tessera_json nlohmann/json.hpp NO_CACHE NO_DEFAULT_PATH
    PATHS ${NLOHMANN_JSON} ${CMAKE_BINARY_DIR}/nlohmann_json/nlohmann_json PATH_SUFFIXES include single_include)
  if(NOT _tessera_json)
    message(FATAL_ERROR "NLOHMANN_JSON: ${NLOHMANN_JSON} has neither nlohmann/json.hpp nor a wheel nlohmann_json-*.whl")
  endif()
  target_include_directories(tessera_json SYSTEM INTERFACE ${_tessera_json})
  return()
endif()

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
    message(FATAL_ERROR "nlohmann-json not found: pip install nlohmann-json, install the system package "
                        "(nlohmann-json3-dev), or set NLOHMANN_JSON to a folder with its headers or its wheel")
  endif()
  target_include_directories(tessera_json SYSTEM INTERFACE ${_tessera_json}/include)
endif()
