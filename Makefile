# Every target prepares what it needs: system check, virtual environment, packages, build. A second run only does what
# changed. Variables: PYTHON (interpreter that makes the environment), JOBS (parallel compile jobs), ARGS (passed on to
# the demo, pytest or the benchmarks).
PYTHON ?= python3
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
# C++ tests at once: many of them wait, for ranks that do not come.
TEST_JOBS := $(shell echo $$((2 * $(JOBS))))
ARGS ?=

ROOT := $(CURDIR)
VENV := $(ROOT)/.venv
PY := $(VENV)/bin/python
CMAKE := $(VENV)/bin/cmake
CTEST := $(VENV)/bin/ctest
export PATH := $(VENV)/bin:$(PATH)
export VIRTUAL_ENV := $(VENV)

CMAKE_FILES := CMakeLists.txt CMakePresets.json $(wildcard cmake/*)
PACKAGE_FILES := $(shell find tessera python -name '__pycache__' -prune -o -type f -print 2>/dev/null) pyproject.toml $(CMAKE_FILES)
CXX_FILES := $(shell git ls-files '*.h' '*.cpp' '*.inc' 2>/dev/null)

.PHONY: help demo tables test test-cpp test-python test-tools test-peers test-clients bench docs lint tidy sanitize asan tsan format clean package
.DELETE_ON_ERROR:
help:
	@echo "make demo    train a small GPT on 2 ranks and compare it with plain PyTorch (output in demo-out/)"
	@echo "make tables  memory, time and loss of the low-precision modes beside plain PyTorch (long; a look: ARGS=--quick)"
	@echo "make test    build Tessera and run its tests"
	@echo "make test-tools  tests of the benchmark's runner and of the checks of the sources; the whole grid of devices"
	@echo "make test-peers  checkpoints exchanged with DeepSpeed itself, programs that run on both"
	@echo "make test-clients  Transformers, Accelerate, PEFT, TRL, Lightning and Ray Train on the deepspeed alias"
	@echo "make bench   build and run the benchmarks"
	@echo "make docs    API reference in build/docs (pdoc; with doxygen installed the C++ headers too)"
	@echo "make lint    layer rules, clang-format, ruff, mypy"
	@echo "make tidy    clang-tidy over the C++ sources"
	@echo "make sanitize  C++ tests of the layers with threads under the address, undefined-behaviour and thread sanitizers"
	@echo "make format  rewrite the sources in the house format"
	@echo "make clean   remove build/ and demo-out/ (the environment .venv stays)"

# ---- environment. One stamp per requirements file; a changed file installs again.
$(VENV)/bin/python:
	@bash tools/check_system.sh base
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/stamp-%: requirements/%.txt $(wildcard requirements/*.txt) | $(VENV)/bin/python
	$(PY) -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

# ---- build. One build tree per preset; the Python package is installed from the release tree.
build/release/stamp-configure: $(CMAKE_FILES) $(VENV)/stamp-build
	$(CMAKE) --preset release -DPython3_EXECUTABLE=$(PY) -DPython_EXECUTABLE=$(PY)
	@touch $@

build/release/stamp-configure-tests: build/release/stamp-configure
	@bash tools/check_system.sh tests
	$(CMAKE) --preset release -DTESSERA_BUILD_TESTS=ON -DTESSERA_BUILD_EXAMPLES=ON
	@touch $@

$(VENV)/stamp-package: $(PACKAGE_FILES) build/release/stamp-configure
	CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) $(PY) -m pip install --quiet --disable-pip-version-check --no-build-isolation \
	  --no-deps --force-reinstall -C build-dir=build/release .
	@touch $@

package: $(VENV)/stamp-package

# ---- what people call
demo: $(VENV)/stamp-demo $(VENV)/stamp-package
	$(PY) examples/python/demo.py $(ARGS)

# A report on any machine, quiet or not. DeepSpeed takes part where `make bench` has installed it.
tables: $(VENV)/stamp-demo $(VENV)/stamp-package
	$(PY) bench/run.py tables --noisy $(ARGS)

test: test-cpp test-python

# Python tests run in as many processes as there are cores, each of them a file at a time: many tests start ranks of their own.
WORKERS := -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder

test-cpp: $(VENV)/stamp-test build/release/stamp-configure-tests
	$(CMAKE) --build build/release -j $(JOBS)
	$(CTEST) --test-dir build/release -j $(TEST_JOBS) --output-on-failure

test-python: $(VENV)/stamp-test test-cpp $(VENV)/stamp-package
	$(PY) -m pytest $(WORKERS) tests/python $(ARGS)

# What only developers use: the benchmark's runner and pages, the checks of the sources; and the whole grid of which test-python
# has a sample. Two tests are skipped until test-cpp has built the stand-in accelerator.
test-tools: $(VENV)/stamp-test $(VENV)/stamp-package
	$(PY) -m pytest $(WORKERS) tests/tools $(ARGS)

# DeepSpeed in an environment of its own, which sees the packages of $(VENV) and is not seen by it.
PEERS := $(VENV)/peers
$(VENV)/stamp-ds: requirements/peers.txt $(VENV)/stamp-test
	$(PY) -m venv --without-pip $(PEERS)
	$(PY) -c "import site, sys; print(*site.getsitepackages(), sep='\n')" \
	  > $$($(PEERS)/bin/python -c "import site; print(site.getsitepackages()[0])")/packages.pth
	$(PY) -m pip install --quiet --disable-pip-version-check setuptools wheel
	DS_ACCELERATOR=cpu $(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation -r $<
	@touch $@

test-peers: $(VENV)/stamp-ds $(VENV)/stamp-test $(VENV)/stamp-package
	TESSERA_PEERS=$(PEERS)/bin/python $(PY) -m pytest $(WORKERS) tests/peers $(ARGS)

# The clients have environments of their own on top of .venv, whose torch and Tessera they see, and nothing of theirs is
# in .venv. The second one has the Transformers of .venv, an older one.
.PRECIOUS: $(ROOT)/.venv-%/stamp-packages
$(ROOT)/.venv-%/stamp-packages: requirements/%.txt $(VENV)/stamp-test
	$(PY) -m venv --without-pip $(@D)
	$(PY) -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
	  > $$($(@D)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/test-environment.pth
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

ALIAS_FILES := $(shell find python/deepspeed_alias -name '*.py' -o -name '*.toml' 2>/dev/null)

$(ROOT)/.venv-%/stamp-alias: $(ALIAS_FILES) $(ROOT)/.venv-%/stamp-packages
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --force-reinstall --no-deps ./python/deepspeed_alias
	@touch $@

test-clients: $(ROOT)/.venv-clients/stamp-alias $(ROOT)/.venv-clients-4/stamp-alias $(VENV)/stamp-package
	$(ROOT)/.venv-clients/bin/python -m pytest $(WORKERS:loadfile=load) tests/clients $(ARGS)
	$(ROOT)/.venv-clients-4/bin/python -m pytest $(WORKERS:loadfile=load) tests/clients -k trainer $(ARGS)

# DeepSpeed compiles against the installed torch, so it cannot be installed in isolation.
$(VENV)/stamp-bench: requirements/bench.txt $(VENV)/stamp-demo
	$(PY) -m pip install --quiet --disable-pip-version-check setuptools wheel
	$(PY) -m pip install --quiet --disable-pip-version-check --no-build-isolation -r $<
	@touch $@

$(VENV)/stamp-peers: $(VENV)/stamp-bench bench/peers.py
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
	$(VENV)/bin/clang-format --dry-run --Werror $(CXX_FILES)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# The wheel of clang-tidy has no omp.h: the compiler's serves.
tidy: $(VENV)/stamp-tidy build/release/stamp-configure-tests
	git ls-files "tessera/*.cpp" "python/src/*.cpp" | xargs -P $(JOBS) -n 1 $(VENV)/bin/clang-tidy -p build/release --quiet \
	  --extra-arg=-idirafter$$($(CXX) -print-file-name=include)

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
