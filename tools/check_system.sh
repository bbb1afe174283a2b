#!/usr/bin/env bash
# Checks for the system packages that pip cannot provide; installs them with apt-get when run as root, else says what to
# install. Usage: check_system.sh base|system|tests|bench (system: base, for an environment without a pip of its own)
set -euo pipefail
need=()
python=${PYTHON:-python3} cxx=${CXX:-g++}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || {
  echo "[setup] Tessera needs Python >= 3.10; set PYTHON=/path/to/python3" >&2
  exit 1
}
[ "${1:-base}" = system ] || "$python" -c 'import venv, ensurepip' 2>/dev/null || need+=(python3-venv)
"$python" -c 'import os, sysconfig, sys
sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' || need+=(python3-dev)
command -v "$cxx" >/dev/null || need+=(g++)
if [ "${1:-base}" = tests ]; then
  echo '#include <gtest/gtest.h>' | "$cxx" -x c++ -E - >/dev/null 2>&1 || need+=(libgtest-dev)
  # What finds tessera.pc; without it that file is not tested.
  if ! command -v pkg-config >/dev/null; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
      need+=(pkg-config)
    else
      echo "[setup] no pkg-config: tessera.pc is not tested; as root run: apt-get install pkg-config" >&2
    fi
  fi
  # A test looks at pages in it; without one that test is skipped.
  if ! command -v chromium >/dev/null && ! command -v chromium-browser >/dev/null && ! command -v google-chrome >/dev/null; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
      echo "[setup] installing chromium"
      { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null; } ||
        echo "[setup] chromium cannot be had: the test of pages in a browser is skipped" >&2
    else
      echo "[setup] no chromium: the test of pages in a browser is skipped; as root run: apt-get install chromium" >&2
    fi
  fi
fi

if [ "${1:-base}" = bench ]; then
  echo '#include <benchmark/benchmark.h>' | "$cxx" -x c++ -E - >/dev/null 2>&1 || need+=(libbenchmark-dev)
fi

if [ ${#need[@]} -gt 0 ]; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "[setup] installing ${need[*]}"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "${need[@]}" >/dev/null
  elif [ "${need[*]}" = libgtest-dev ] || [ "${need[*]}" = libbenchmark-dev ]; then
    echo "[setup] ${need[*]} is not installed and apt-get needs root; CMake will try to fetch the sources" >&2
  else
    echo "[setup] missing system packages; as root run: apt-get install ${need[*]}" >&2
    exit 1
  fi
fi

version=$("$cxx" -dumpfullversion -dumpversion)
if [ "${version%%.*}" -lt 12 ] && ! "$cxx" --version | grep -q clang; then
  echo "[setup] Tessera needs g++ >= 12; found $version. Set CXX, or install a newer g++" >&2
  exit 1
fi
