// Lists in SLURM's short forms.
#pragma once

#include <string>
#include <vector>

namespace tessera::comm {

// The hosts of a list in SLURM's short form: "node[003-005,07],other" are node003, node004, node005, node07, other. Value error
// for any other form, which begins with `name`.
std::vector<std::string> expand_hosts(const std::string& list, const char* name);

// How many tasks host number `host` has, by SLURM's numbers "2(x3),1"; 0 where there is none.
int tasks_of_host(const std::string& counts, int host);

}  // namespace tessera::comm
