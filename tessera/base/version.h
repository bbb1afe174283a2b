// The version of Tessera: the macros are that of the headers, version() is that of the library in use. CMake and the Python package
// read theirs from here.
#pragma once

#define TESSERA_VERSION "0.1.0"

namespace tessera {

const char* version() noexcept;  // as TESSERA_VERSION

}  // namespace tessera
