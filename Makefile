# Every target prepares what it needs: system check, virtual environment, packages, build. A second run only does what
# changed. Variables: PYTHON (interpreter that makes the environment), JOBS (parallel compile jobs), ARGS (passed on to
# the demo, pytest or the benchmarks), PYTESTS (files and folders for `make test`), CMAKE_ARGS (passed on to CMake).
# TORCH: which torch, each with an environment and a build tree of its own. Empty: the version of requirements/torch.txt.
# A version, TORCH=2.15.0. "system": the one that $(PYTHON) has; then all that it has is used, and pip is asked for the rest.
PYTHON ?= python3
TORCH ?=
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
# C++ tests at once: many of them wait, for ranks that do not come.
TEST_JOBS := $(shell echo $$((2 * $(JOBS))))
ARGS ?=
PYTESTS ?= tests/python

ROOT := $(CURDIR)
VENV := $(ROOT)/.venv$(TORCH:%=-torch-%)
BUILD := build/$(if $(TORCH),torch-$(TORCH),release)
PY := $(VENV)/bin/python
# env, not make, looks into the PATH below.
CMAKE := env cmake
CTEST := env ctest
PIP_INSTALL := $(PY) -m pip install --quiet --disable-pip-version-check
ifeq ($(TORCH),system)
SCRIPTS := :$(shell $(PYTHON) -c "import sysconfig; print(sysconfig.get_path('scripts'))")
endif
export PATH := $(VENV)/bin$(SCRIPTS):$(PATH)
export VIRTUAL_ENV := $(VENV)
export TESSERA_BUILD_DIR := $(ROOT)/$(BUILD)
# What DeepSpeed compiles at its first use. torch's lock of a build that was killed is a file that stays, for which every later
# program waits without end; so runs begin without any.
export TORCH_EXTENSIONS_DIR := $(VENV)/extensions
UNLOCK = rm -f $(TORCH_EXTENSIONS_DIR)/*/lock

CMAKE_FILES := CMakeLists.txt CMakePresets.json $(wildcard cmake/*)
PACKAGE_FILES := $(shell find tessera python -name '__pycache__' -prune -o -type f -print 2>/dev/null) pyproject.toml $(CMAKE_FILES)
CXX_FILES := $(shell git ls-files '*.h' '*.cpp' '*.inc' 2>/dev/null)

.PHONY: help demo tables test test-cpp test-python test-long test-tools test-peers test-clients gpu gpu-kit bench docs lint tidy cuda sanitize asan tsan format clean package archive abi wheels
.DELETE_ON_ERROR:
help:
	@echo "make demo    train a small GPT on 2 ranks and compare it with plain PyTorch (output in demo-out/)"
	@echo "make tables  memory, time and loss of the low-precision modes beside plain PyTorch (long; a look: ARGS=--quick)"
	@echo "make test    build Tessera and run its tests, without the longest of Python's, which make test-long runs after it"
	@echo "make test-tools  tests of the benchmark's runner and of the checks of the sources; the whole grid of devices"
	@echo "make test-peers  checkpoints exchanged with DeepSpeed itself, programs that run on both"
	@echo "make test-clients  Transformers, Accelerate, PEFT, TRL, Lightning and Ray Train on the deepspeed alias"
	@echo "make gpu     whether Tessera is right and fast on this machine's GPU (KIT=folder: without a build; ARGS=--list: its stages)"
	@echo "make gpu-kit  what 'make gpu' takes along to a machine without a network (PYTHON: with that machine's torch)"
	@echo "make bench   build and run the benchmarks"
	@echo "make docs    API reference in build/docs (pdoc; with doxygen installed the C++ headers too)"
	@echo "make lint    layer rules, names of both front ends, clang-format, ruff, mypy, hadolint"
	@echo "make tidy    clang-tidy over the C++ sources"
	@echo "make cuda    the CUDA kernels by a compiler from PyPI: warnings, registers, machine code, the library without a driver"
	@echo "make sanitize  C++ tests of the layers with threads under the address, undefined-behaviour and thread sanitizers"
	@echo "make format  rewrite the sources in the house format"
	@echo "make abi      a release: the names that its library exports, which later ones of the interface keep"
	@echo "make archive  library, headers, CMake package and commands for C++ as one file in dist/, tested where it is unpacked"
	@echo "make wheels  sdist and wheel for $(PYTHON) and the torch of requirements/torch.txt, audited, installed and used elsewhere (ALL=1: all)"
	@echo "make clean   remove build/ and demo-out/ (the environment .venv stays)"

# ---- environment. One stamp per requirements file; a changed file installs again.
ifeq ($(TORCH),system)
# Another python3, or another torch in it, starts afresh.
SYSTEM := $(shell $(PYTHON) -c "import sys, importlib.metadata as m; print(sys.prefix, m.version('torch'))" 2>/dev/null)
$(if $(SYSTEM),,$(error TORCH=system: $(PYTHON) has no torch))
$(shell mkdir -p $(BUILD) && echo '$(SYSTEM)' | cmp -s - $(BUILD)/system || echo '$(SYSTEM)' > $(BUILD)/system)

$(VENV)/pyvenv.cfg: $(BUILD)/system
	@bash tools/check_system.sh system
	rm -rf $(VENV)
	$(PYTHON) tools/environment.py make $(VENV)
	@touch $@

$(VENV)/stamp-%: requirements/%.txt $(wildcard requirements/*.txt) $(VENV)/pyvenv.cfg
	$(PY) tools/environment.py need $<
	@touch $@
else
$(VENV)/pyvenv.cfg:
	@bash tools/check_system.sh base
	$(PYTHON) -m venv $(VENV)

$(VENV)/stamp-%: requirements/%.txt $(wildcard requirements/*.txt) | $(VENV)/pyvenv.cfg
	$(PIP_INSTALL) -r $< $(if $(TORCH),torch==$(TORCH),-r requirements/torch.txt)
	@touch $@
endif

# ---- build. One build tree per preset and torch; the Python package is installed from the release tree.
RELEASE := --preset release -B $(BUILD)
$(BUILD)/stamp-configure: $(CMAKE_FILES) $(VENV)/stamp-build
	$(CMAKE) $(RELEASE) -DPython3_EXECUTABLE=$(PY) -DPython_EXECUTABLE=$(PY) $(CMAKE_ARGS)
	@touch $@

$(BUILD)/stamp-configure-tests: $(BUILD)/stamp-configure
	@bash tools/check_system.sh tests
	$(CMAKE) $(RELEASE) -DTESSERA_BUILD_TESTS=ON -DTESSERA_BUILD_EXAMPLES=ON
	@touch $@

$(VENV)/stamp-package: $(PACKAGE_FILES) $(BUILD)/stamp-configure
	CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) $(PIP_INSTALL) --no-build-isolation --no-deps --force-reinstall \
	  --config-settings=build-dir=$(BUILD) .
	@touch $@

package: $(VENV)/stamp-package

# ---- what people call
demo: $(VENV)/stamp-demo $(VENV)/stamp-package
	$(PY) examples/python/demo.py $(ARGS)

# A report on any machine, quiet or not. DeepSpeed takes part where `make bench` has installed it.
tables: $(VENV)/stamp-demo $(VENV)/stamp-package
	$(PY) bench/run.py tables --noisy $(ARGS)

# As the C++ tests find an installed Tessera, but in a folder that this build has never seen.
ARCHIVE := tessera-$(shell sed -n 's/.*TESSERA_VERSION "\(.*\)".*/\1/p' tessera/base/version.h)-torch-$(or $(TORCH),$(shell sed -n 's/torch==//p' requirements/torch.txt))-$(shell uname -m)
archive: $(BUILD)/stamp-configure
	$(CMAKE) $(RELEASE) -DTESSERA_RELOCATABLE=ON
	$(CMAKE) --build $(BUILD) -j $(JOBS)
	$(PY) tools/abi.py $(BUILD)/libtessera.so
	$(CMAKE) -DBUILD=$(BUILD) -DOUT=$(ROOT)/dist -DNAME=$(ARCHIVE) "-DFOLDERS=$(ROOT);$(VENV)" -P cmake/archive.cmake
	$(CMAKE) -DARCHIVE=$(ROOT)/dist/$(ARCHIVE).tar.gz -DSOURCE=$(ROOT)/tests/consumer -DWORK=$(ROOT)/$(BUILD)/archive \
	  -DTORCH=$$($(PY) -c "import torch; print(torch.__path__[0])") -DCXX=$${CXX:-c++} -DNINJA=$(VENV)/bin/ninja -DPYTHON=$(PY) -P tests/consumer/run.cmake

# A release of an interface that has no list yet, and each later one of it: the names that programs were linked with.
abi: archive
	$(PY) tools/abi.py $(BUILD)/libtessera.so --write

# Each in environments of its own, of an sdist; nothing of .venv or of a build tree is used. ARGS: see the program.
wheels:
	@bash tools/check_system.sh base
	$(PYTHON) tools/wheels.py $(ALL:%=--all) --jobs $(JOBS) $(ARGS)

test: test-cpp test-python

# Python tests run in as many processes as there are cores, each of them a file at a time: many tests start ranks of their own.
# One that crashes is not started again, after which pytest-xdist waits without end.
WORKERS = $(if $(shell $(PY) -c "import xdist" 2>&1),,-n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder --max-worker-restart 0)

test-cpp: $(VENV)/stamp-test $(BUILD)/stamp-configure-tests
	$(CMAKE) --build $(BUILD) -j $(JOBS)
	$(CTEST) --test-dir $(BUILD) -j $(TEST_JOBS) --output-on-failure

test-python: $(VENV)/stamp-test test-cpp $(VENV)/stamp-package
	$(PY) -m pytest $(WORKERS) -m "not long" $(PYTESTS) $(ARGS)

# A test at a time, since some files have several. One is skipped until test-cpp has built the examples.
test-long: $(VENV)/stamp-test $(VENV)/stamp-package
	$(PY) -m pytest $(WORKERS:loadfile=load) -m long $(PYTESTS) $(ARGS)

# What only developers use: the benchmark's runner and pages, the checks of the sources; and the whole grid of which test-python
# has a sample. Two tests are skipped until test-cpp has built the stand-in accelerator.
test-tools: $(VENV)/stamp-test $(VENV)/stamp-package
	$(PY) -m pytest $(WORKERS) tests/tools $(ARGS)

# DeepSpeed in an environment of its own, which sees the packages of $(VENV) and is not seen by it.
PEERS := $(VENV)/peers
$(VENV)/stamp-ds: requirements/peers.txt $(VENV)/stamp-test
	$(PY) tools/environment.py make $(PEERS)
	$(PIP_INSTALL) setuptools wheel
	DS_ACCELERATOR=cpu $(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation -r $<
	@$(UNLOCK)
	DS_ACCELERATOR=cpu $(PEERS)/bin/python bench/peers.py ShareMemCommBuilder
	@touch $@

test-peers: $(VENV)/stamp-ds $(VENV)/stamp-test $(VENV)/stamp-package
	@$(UNLOCK)
	TESSERA_PEERS=$(PEERS)/bin/python $(PY) -m pytest $(WORKERS) tests/peers $(ARGS)

# The clients have environments of their own on top of .venv, whose torch and Tessera they see, and nothing of theirs is
# in .venv. The second one has the Transformers of .venv, an older one.
.PRECIOUS: $(VENV)-%/stamp-packages
$(VENV)-%/stamp-packages: requirements/%.txt $(VENV)/stamp-test
	$(PY) tools/environment.py make $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

ALIAS_FILES := $(shell find python/deepspeed_alias -name '*.py' -o -name '*.toml' 2>/dev/null)

$(VENV)-%/stamp-alias: $(ALIAS_FILES) $(VENV)-%/stamp-packages
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --force-reinstall --no-deps ./python/deepspeed_alias
	@touch $@

# Tests of models, which .venv runs with Transformers 4, with 5.
MODEL_TESTS := $(addprefix tests/python/,parallel sequence test_huggingface.py)
test-clients: $(VENV)-clients/stamp-alias $(VENV)-clients-4/stamp-alias $(VENV)/stamp-package
	$(VENV)-clients/bin/python -m pytest $(WORKERS:loadfile=load) tests/clients $(ARGS)
	$(VENV)-clients-4/bin/python -m pytest $(WORKERS:loadfile=load) tests/clients -k trainer $(ARGS)
	$(VENV)-clients/bin/python -m pytest $(WORKERS) $(MODEL_TESTS) $(ARGS)

# On a machine with a GPU (docs/gpu_tests.md). With a kit nothing is built or fetched, and the system's Python serves.
ifdef KIT
gpu:
	$(PYTHON) tests/gpu/run_stages.py --kit $(KIT) $(ARGS)
else
gpu: $(VENV)/stamp-test $(VENV)/stamp-package
	$(PY) tests/gpu/run_stages.py $(ARGS)
endif

gpu-kit:
	$(PYTHON) tests/gpu/prepare.py --jobs $(JOBS) $(ARGS) $(PYTHON)

# DeepSpeed compiles against the installed torch, so it cannot be installed in isolation.
$(VENV)/stamp-bench: requirements/bench.txt $(VENV)/stamp-demo
	$(PIP_INSTALL) setuptools wheel
	$(PIP_INSTALL) --no-build-isolation -r $<
	@touch $@

$(VENV)/stamp-peers: $(VENV)/stamp-bench bench/peers.py
	@$(UNLOCK)
	$(PY) bench/peers.py
	@touch $@

# Kernels against probes with the same streams, the engine against its peers; reports in bench/reports/ (docs/bench.md).
bench: $(VENV)/stamp-peers $(VENV)/stamp-package
	@bash tools/check_system.sh bench
	$(CMAKE) --preset bench -DPython3_EXECUTABLE=$(PY)
	$(CMAKE) --build build/bench -j $(JOBS)
	$(PY) bench/run.py all $(ARGS)

# The Python package by pdoc, the headers by doxygen where the system has it.
docs: $(VENV)/stamp-docs $(VENV)/stamp-package
	$(PY) -m pdoc --output-directory build/docs/python tessera $(PUBLIC_MODULES:%=tessera.%)
	@mkdir -p build/docs/cpp
	@if command -v doxygen > /dev/null; then doxygen docs/Doxyfile; \
	  else echo "no doxygen: the C++ reference is left out (apt install doxygen)"; fi
	@echo "build/docs/python/index.html, build/docs/cpp/index.html"

# What `import tessera` does not import.
PUBLIC_MODULES := checkpoints distributed errors estimate launch loss_scale report units

lint: $(VENV)/stamp-lint
	$(PY) tools/check_layers.py
	$(PY) tools/api_table.py --check
	$(VENV)/bin/clang-format --dry-run --Werror $(CXX_FILES)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/hadolint Dockerfile

# The wheel of clang-tidy has no omp.h: the compiler's serves.
tidy: $(VENV)/stamp-tidy $(BUILD)/stamp-configure-tests
	git ls-files "tessera/*.cpp" "commands/*.cpp" "python/src/*.cpp" | xargs -P $(JOBS) -n 1 $(VENV)/bin/clang-tidy -p $(BUILD) --quiet \
	  --extra-arg=-idirafter$$($(CXX) -print-file-name=include)

# The CUDA kernels where neither toolkit nor device is: nvcc is PyPI's, in an environment of its own.
CUDA := $(ROOT)/.venv-cuda
CUDA_ARCHS := sm_80 sm_90a sm_100
$(CUDA)/stamp-packages: requirements/cuda-check.txt requirements/cuda.txt
	$(PYTHON) -m venv $(CUDA)
	$(CUDA)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

cuda: $(VENV)/stamp-build $(CUDA)/stamp-packages
	@bash tools/check_system.sh tests
	CUDACXX=$$(echo $(CUDA)/lib/python3*/site-packages/nvidia/cu13/bin/nvcc) \
	  $(CUDA)/bin/cmake --preset cuda -DPython3_EXECUTABLE=$(PY)
	bash -o pipefail -c '$(CUDA)/bin/cmake --build build/cuda -j $(JOBS) --clean-first \
	  --target kernels_cuda_test kernels_device_table_test 2>&1 | $(PY) tools/check_ptxas.py $(CUDA_ARCHS)'
	$(PY) tools/check_sass.py $$(echo $(CUDA)/lib/python3*/site-packages/nvidia/cu13/bin/cuobjdump) \
	  build/cuda/libtessera_cuda.so $(CUDA_ARCHS)
	$(CUDA)/bin/ctest --test-dir build/cuda --output-on-failure -R "^kernels_(cuda|cuda_rounding|device_table)$$"

# The layers that have threads of their own; others: make asan LAYERS="io checkpoint".
LAYERS := comm zero engine nn

sanitize: asan tsan

asan tsan: $(VENV)/stamp-build
	@bash tools/check_system.sh tests
	$(CMAKE) --preset $@ -DPython3_EXECUTABLE=$(PY)
	$(CMAKE) --build --preset $@ -j $(JOBS) --target $(LAYERS:%=%_test)
	$(CTEST) --preset $@ -j $(TEST_JOBS) -R "^($$(echo $(LAYERS) | tr ' ' '|'))(_[0-9])?$$"

format: $(VENV)/stamp-lint
	$(VENV)/bin/clang-format -i $(CXX_FILES)
	$(VENV)/bin/ruff check --fix-only .
	$(VENV)/bin/ruff format .

clean:
	rm -rf build demo-out
