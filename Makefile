# One word a check. Every word sets up what it needs first; CI calls the same words.
#
#   make demo      train a small GPT with a generated attention op      (two minutes on two cores, uses a GPU if there is one)
#   make test      tests that need no GPU, a part of their cases
#   make test-all  these, and more variants and widths of the same       (half an hour)
#   make near FILE=ir/expr.py      tests that cover a file, in under a minute
#   make lint      ruff and mypy                                        make format   rewrite in the project's format
#   make prove     z3 proves the tiles of masks sound, and explain says of which (a quarter of an hour; JOBS= processes,
#                  RANDOM= masks besides those of the library)
#   make bench     benchmarks/attention.py, BENCH="..." for its options
#   make bench-cpu benchmarks/cpu.py, beside SDPA and FlexAttention         BENCH="..." likewise
#   make gpu-test  tests that need a GPU: two and a half minutes on 16 cores, then the benchmark
#   make gpu-test-all  these, and more of the same: ten minutes
#   make gpu-sanitize  kernels on small operands under compute-sanitizer: TOOLS=memcheck,synccheck,initcheck
#   make fuzz      random declarations and calls: CASES=2000 SEED=0 TARGET=cpu,interpret; MUTANTS=1 plants defects instead
#   make same      what a change of structure must leave as it is: texts of 394 calls, beside those recorded (two minutes);
#                  SAME="--machine-code" compiles kernels too, SAME="--record" writes what is compared with
#   make clean     remove what the words above made, except .venv
#
# Settings: PYTHON=python3.12; SLOWEST= (lists no slow tests); WORKERS= and GPU_WORKERS= (no pytest-xdist); WEFT_SYSTEM_PYTHON=1 (use $(PYTHON) itself, make no .venv).

PYTHON ?= python3
WORKERS ?= -n 2 --dist worksteal
# seconds of one test: what hangs is a failure
TIMEOUT ?= 900
# those that took longest, last: where a change made tests slow it shows
SLOWEST ?= --durations 20 --durations-min 1
CASES ?= 2000
SEED ?= 0
TARGET ?= cpu,cpu,cpu,cpu,interpret
GPU_WORKERS ?= -n 16 --dist worksteal
# no GPU test uses them, and importing the second takes each worker a second
GPU_PLUGINS := -p no:benchmark -p no:hypothesispytest
JOBS ?= 1
RANDOM ?= 500
TOOLS ?= memcheck,synccheck,initcheck
VENV := .venv

# A machine whose own torch already sees a GPU keeps that torch, and the Triton that came with it: no .venv there.
ifndef WEFT_SYSTEM_PYTHON
ifeq ($(wildcard $(VENV)/bin/python),)
WEFT_SYSTEM_PYTHON := $(shell $(PYTHON) -c 'import torch; print(int(torch.cuda.is_available()))' 2>/dev/null || echo 0)
endif
endif

ifeq ($(WEFT_SYSTEM_PYTHON),1)
RUN := $(PYTHON)
READY := build/system-python-is-ready
else
RUN := $(VENV)/bin/python
READY := $(VENV)/is-ready
endif

# Tests start many processes: each reads Weft compiled, also where Python is told to write no bytecode.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-all near lint format same prove fuzz bench bench-cpu gpu-test gpu-test-all gpu-sanitize clean
.DELETE_ON_ERROR:

demo: $(READY)
	$(RUN) examples/demo.py

test: $(READY)
	OMP_NUM_THREADS=1 $(RUN) -m pytest $(WORKERS) --timeout $(TIMEOUT) $(SLOWEST) -m "not thorough" --ignore tests/gpu tests

test-all: $(READY)
	OMP_NUM_THREADS=1 $(RUN) -m pytest $(WORKERS) --timeout $(TIMEOUT) $(SLOWEST) --ignore tests/gpu tests

near: $(READY)
	$(RUN) -m tests.near $(FILE)

lint: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy -p weft

format: $(READY)
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

prove: $(READY)
	$(RUN) -m tests.prove --record --jobs $(JOBS) --random $(RANDOM)

same: $(READY)
	$(RUN) -m tests.same $(SAME)

bench: $(READY)
	$(RUN) benchmarks/attention.py $(BENCH)

bench-cpu: $(READY)
	$(RUN) benchmarks/cpu.py $(BENCH)

fuzz: $(READY)
ifdef MUTANTS
	OMP_NUM_THREADS=1 $(RUN) -m tests.fuzz.mutants
else
	OMP_NUM_THREADS=1 $(RUN) -m tests.fuzz --cases $(CASES) --seed $(SEED) --target $(TARGET)
endif

gpu-test: $(READY)
	$(RUN) -m pytest $(GPU_WORKERS) $(GPU_PLUGINS) -m "gpu and not thorough" tests/gpu
	$(RUN) benchmarks/attention.py $(BENCH)

gpu-test-all: $(READY)
	$(RUN) -m pytest $(GPU_WORKERS) $(GPU_PLUGINS) -m gpu tests/gpu

gpu-sanitize: $(READY)
	$(RUN) -m tests.gpu.sanitize --tools $(TOOLS) --jobs 16

clean:
	rm -rf build out .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

$(VENV)/is-ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("weft needs Python 3.11 or newer: make PYTHON=..." if sys.version_info < (3, 11) else 0)'
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip uninstall --quiet --yes weft 2>/dev/null  # its name before; a folder made then has it
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[kernels,directories,dev]'
	touch $@

build/system-python-is-ready: pyproject.toml
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	mkdir -p build && touch $@
