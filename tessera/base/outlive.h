// Threads whose owner goes before their work is done.
#pragma once

#include <thread>

namespace tessera {

// Takes the thread over: its work goes on, and the process waits for it when it ends. Local, never waits.
void outlive(std::thread thread);

}  // namespace tessera
