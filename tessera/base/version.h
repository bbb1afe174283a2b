// The version of Tessera: the macros are the version of the headers, version() that of the library in use. CMake and the Python
// package read theirs from here.
#pragma once

#define TESSERA_VERSION "0.1.0"

namespace tessera {

const char* version() noexcept;  // the library's, as TESSERA_VERSION

}  // namespace tessera
