// Placeholder of the interface the engine builders read; filled by config.cpp. See docs/config.md.
#pragma once
