// Loads a plugin that is linked with Tessera, as an application does that is not.
#include <dlfcn.h>

#include <cstdio>

int main(int argc, char** argv) {
  void* const plugin = argc > 1 ? dlopen(argv[1], RTLD_NOW | RTLD_LOCAL) : nullptr;
  auto* const train = plugin != nullptr ? reinterpret_cast<int (*)()>(dlsym(plugin, "train")) : nullptr;
  if (train != nullptr) return train();
  std::fprintf(stderr, "%s\n", argc > 1 ? dlerror() : "plugin_host PLUGIN");
  return 3;
}
