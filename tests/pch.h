// Precompiled for all tests; not a header of the project.
#pragma once
#include <ATen/ATen.h>
#include <gtest/gtest.h>
