// Note [Stand-in accelerator]
//   libtessera_privateuseone.so gives torch's spare device type, "privateuseone", four devices in the host's memory,
//   whose addresses the host cannot read (memory.h). So the path of tensors that are not the CPU's is tested where no
//   accelerator is, and host code that touches device memory crashes there too. Loading the library registers the
//   devices: link it, or call load() of stand_in.py.
//   Operators run on the CPU: at::native::cpu_fallback copies arguments to the host and results back, so the bits are
//   the CPU's. Random numbers are drawn from the CPU's generator. There are any number of streams and events. Work is done
//   when the call returns, copies that do not block excepted; that two pieces of work need an order and have none is found
//   all the same, and told by tessera_stand_in_races(): Note [Races] in clocks.h.
//   Four, because autograd has one thread for each device: ranks in one process whose hooks wait for each other need a
//   device each.
//   It is also the devices' library of kernels, tessera_device_table() of kernels/device_table.h. They run the
//   reference, refuse host pointers, pointers and streams of a device that is not current, and are counted.
#pragma once

#include <cstdint>

#include "tessera/kernels/device_table.h"

#pragma GCC visibility push(default)
extern "C" {
const tessera::kernels::DeviceTable* tessera_device_table();

int64_t tessera_stand_in_launches();                      // kernels of the table so far, empty ranges included
int64_t tessera_stand_in_launches_of(const char* entry);  // of one entry, "adam"; -1: no such entry
void tessera_stand_in_on_launch(
    void (*notice)(const char* entry));  // called before a kernel of the table; null: no more
// The current stream of the current device says that it is captured, though it does its work; no stream any more.
void tessera_stand_in_capture(bool on);
void tessera_stand_in_fail_next_launch();  // the next kernel throws std::runtime_error instead
int64_t tessera_stand_in_bytes();          // memory in use, of all devices
int64_t tessera_stand_in_pinned_bytes();   // page-locked memory, lent and kept by its allocator
// `notice` is called before every copy between host and device, by who asks for it; null: no more.
void tessera_stand_in_on_copy(void (*notice)(bool to_host, int64_t bytes));
void tessera_stand_in_set_capacity(int64_t bytes);                  // of each device; what is more is out of memory
void tessera_stand_in_fail_allocation(int device, int64_t number);  // that many from now on go well; -1: all
void tessera_stand_in_unusable(const char* why);  // said by a table that has not been asked for yet; the caller's text
void tessera_stand_in_fail(bool on);              // from now on all that the devices are asked for throws, or no longer
// `notice` is called when the host waits for a device: for an event, a stream, a copy that blocks, or one that torch would lead
// through memory that is not page-locked; null: no more.
void tessera_stand_in_on_wait(void (*notice)());
// The current stream of the memory's device is given work of this name, which reads or writes it. What it does is the
// caller's; the name lives as long as the process.
void tessera_stand_in_use(const char* work, const void* p, int64_t bytes, bool writes);
// torch's process group of this name, whose back end for tensors of the stand-in is Gloo, which takes those of the host alone, gets
// that of staged_backend.h. Throws where there is none.
void tessera_stand_in_stage(const char* group_name);
// Races found since the last call, a line each; "": none. The text is the calling thread's until it calls again.
const char* tessera_stand_in_races();
}
#pragma GCC visibility pop
