// The precision mode that a configuration asks for.
#pragma once

#include "tessera/amp/precision.h"
#include "tessera/config/config.h"
#include "tessera/config/text.h"

namespace tessera::config {

// The policy of fp16, bf16, data_types.grad_accum_dtype and tessera.{state_bytes, rounding}; docs/precision.md has the table.
// Expects a validated configuration.
amp::PrecisionPolicy precision(const Config& config);

// Whether a section asks for a precision; otherwise the model keeps its own.
bool casts_model(const Config& config);

// Reports combinations that name no mode.
void check_precision(const Config& config, Report& report);

}  // namespace tessera::config
