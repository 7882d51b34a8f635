# make demo     everything from nothing: sets up .venv, runs FedAvg and FPL, prints the table
# make test     sets up, checks style and types, runs the tests
# make help     the rest

# ends with the name of an extra that pyproject.toml does not have
KNOWN := import sys, tomllib; \
  has = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]; \
  wrong = [name for name in sys.argv[1].split(",") if name and name not in has]; \
  sys.exit(f"EXTRAS: there is no {wrong[0]!r}; separated by commas alone, there are " + " ".join(sorted(has)) if wrong else 0)
# the first interpreter that fits: the active one (python3) before others
FITS := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))
PYTHON ?= $(shell for name in python3 python3.11 python3.12 python3.13 python3.14; do "$$name" -c '$(FITS)' 2>/dev/null && { command -v "$$name"; break; }; done)
# Ray starts its workers by a shell line without quotes: the path of its environment must not have a blank
ifeq ($(words $(CURDIR)),1)
VENV := .venv
else
VENV := $(HOME)/.cache/goldfinch/venv-$(firstword $(shell printf %s "$(CURDIR)" | cksum))
endif
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
EXTRAS ?= server,simulation,tensorboard,privacy,export,tune,table,dev
comma := ,
VERSION := import sys; print("python%d.%d" % sys.version_info[:2])
# what the environment has already, a word each: its extras and its Python. What is asked for and missing sets it up again.
HAS := $(shell cat $(VENV)/.ready 2>/dev/null)
ifneq ($(filter command environment,$(origin PYTHON)),)
OTHER_PYTHON := $(filter-out $(HAS),$(shell "$(PYTHON)" -c '$(VERSION)' 2>/dev/null))
endif
KEPT := $(if $(OTHER_PYTHON),,$(filter-out python%,$(HAS)))
ifeq ($(filter certificates doctor,$(MAKECMDGOALS)),)
ifneq ($(filter-out $(KEPT),$(subst $(comma), ,$(EXTRAS))),)
.PHONY: $(STAMP)
endif
endif
# pip compiles one file after the other: what it installs is compiled afterwards, on all cores
LOG := $(VENV)/pip.log
PIP := $(BIN)/python -m pip --log $(LOG) install --disable-pip-version-check --no-compile --constraint requirements.txt
# without an NVIDIA driver PyTorch's CPU build is taken, where pip finds it: its version has +cpu
ifeq ($(shell uname -s),Linux)
DRIVER := $(firstword $(wildcard /proc/driver/nvidia/version /dev/nvidiactl /dev/dxg) $(shell command -v nvidia-smi))
CPU_BUILD := $(if $(DRIVER)$(TORCH_INDEX)$(CHECK_HASHES),,$(shell sed -nE 's/^(torch|torchvision)==([^ ;]+).*/\1==\2+cpu/p' requirements.txt))
endif
WITH_CUDA := there is no NVIDIA driver here, and pip finds no $(firstword $(CPU_BUILD)): PyTorch brings CUDA, 4.3 GB more. \
  TORCH_INDEX=<index of PyTorch's CPU wheels> leaves it out.
# CHECK_HASHES=1: what was installed must have the hashes of docker/hashes.txt
ifneq ($(and $(CHECK_HASHES),$(wildcard $(BIN)/python)),)
$(error what is installed already cannot be compared with its hashes: remove $(VENV), or leave out CHECK_HASHES=1)
endif
REPORT := $(if $(CHECK_HASHES),--report $(VENV)/installed.json)
CHECKED := $(if $(CHECK_HASHES),$(BIN)/python docker/check_archives.py $(VENV)/installed.json docker/hashes.txt)
# kB that must be free: torch, with the CUDA libraries unless an index without them is given, and the other extras
FREE := $(shell echo $$(($(if $(TORCH_INDEX),2000000,5500000) + $(if $(filter-out device,$(subst $(comma), ,$(EXTRAS))),2000000,0))))
FREE_GB := $(shell awk 'BEGIN {print $(FREE) / 1000000}')
export OMP_NUM_THREADS ?= 1

.PHONY: help setup lock demo deployment-demo compose-demo certificates test test-fast test-long test-without-data test-portable test-times test-slow test-faults soak test-compose bench measure docs lint format doctor clean

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

setup: $(STAMP) ## the virtual environment, pinned; EXTRAS=device for a device, TORCH_INDEX=<index of CPU wheels> without CUDA

$(STAMP): requirements.txt pyproject.toml
	@"$(PYTHON)" -c '$(FITS)' || { echo "Goldfinch needs Python 3.11 to 3.14, and $(if $(PYTHON),$(PYTHON) is not one,found none); set PYTHON=/path/to/python3.11"; exit 1; }
	@"$(PYTHON)" -c '$(KNOWN)' '$(EXTRAS)'
	@echo "Setting up $(VENV), up to $(FREE_GB) GB, with EXTRAS=$(EXTRAS); pip shows what it fetches."
	@test -e $(VENV) || test "$$(df -Pk . | awk 'NR == 2 {print $$4}')" -gt $(FREE) || { df -h .; echo "$(FREE_GB) GB must be free here before the environment is made."; exit 1; }
	@mkdir -p $(dir $(VENV))
	$(if $(OTHER_PYTHON),"$(PYTHON)" -m venv --clear $(VENV),test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV))
	$(if $(filter .venv,$(VENV)),,test -e .venv || ln -s "$(VENV)" .venv)
	@rm -f $(LOG)
	$(if $(TORCH_INDEX),$(PIP) --index-url "$(TORCH_INDEX)" torch torchvision)
	$(if $(CPU_BUILD),$(PIP) --quiet $(CPU_BUILD) 2>/dev/null || echo "$(WITH_CUDA)")
	$(PIP) $(REPORT) setuptools || { echo "pip could not fetch setuptools: is this machine on a network, or is pip's index set?"; exit 1; }
	$(CHECKED)
	$(PIP) $(REPORT) --no-build-isolation --config-settings editable_mode=compat --editable '.[$(EXTRAS)]'
	$(CHECKED)
	@began=$$(date +%s); $(BIN)/python -m compileall -q -j 0 $(VENV)/lib >/dev/null 2>&1; \
	$(BIN)/python docker/set_up_times.py $(LOG) $$(($$(date +%s) - began)); rm -f $(LOG)
	@# a plain `flwr run` in this environment must not install dependencies again, nor call home
	@$(BIN)/python -c 'import sysconfig, pathlib; pathlib.Path(sysconfig.get_paths()["purelib"], "goldfinch_flower.pth").write_text("import os; [os.environ.setdefault(name, value) for name, value in ((\"FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION\", \"1\"), (\"FLWR_TELEMETRY_ENABLED\", \"0\"), (\"FLWR_DISABLE_UPDATE_CHECK\", \"1\"))]\n")'
	@echo $(KEPT) $(subst $(comma), ,$(EXTRAS)) "$$($(BIN)/python -c '$(VERSION)')" >$@

demo: $(STAMP) ## FedAvg and FPL through Flower on Ray, side by side; offline; again each time, in outputs/demo
	@$(BIN)/goldfinch demo overwrite=true

deployment-demo: $(STAMP) ## a SuperLink and four SuperNodes as real processes, FPL for three rounds
	@$(BIN)/goldfinch demo --deployment overwrite=true

compose-demo: ## the same in containers (needs Docker): a node is killed on the way, then everything is taken down
	@covered=$$(python3 docker/last_run.py covered) && docker/demo.sh \
	&& python3 docker/last_run.py record 'make compose-demo' "$$covered"

certificates: $(STAMP) ## FOLDER=keys HOSTS="fl.example.org" NODES="ward-a ward-b": authority, server certificate, device keys
	@$(BIN)/goldfinch devices certificates "$(or $(FOLDER),certificates)" $(addprefix --host=,$(HOSTS)) $(addprefix --node=,$(NODES))

test: lint test-fast ## style, types, and the quick tests: 7-11 minutes on two cores

PYTEST := $(BIN)/python -m pytest
# a worker more than there are cores: tests of real processes wait more than they compute. Shared things are made once a file.
PARALLEL := -n $(or $(JOBS),$(shell echo $$(($$(getconf _NPROCESSORS_ONLN) + 1)))) --maxprocesses 4 --dist loadfile --no-loadscope-reorder

test-fast: $(STAMP)
	$(PYTEST) -m "not slow and not long" $(PARALLEL) $(LISTED)

test-long: test-portable ## what make test leaves out: every method's conformance, real processes
	$(PYTEST) -m "long and not slow" $(PARALLEL) $(LISTED)

test-without-data: $(STAMP) ## the tests of commands, reports and data as on a machine without data sets
	env -u GOLDFINCH_DATA $(PYTEST) -m "not slow and not processes" tests/commands tests/data tests/python \
		tests/report tests/reproduce tests/study $(PARALLEL) $(LISTED)

test-portable: $(STAMP) ## conformance where arithmetic decides, one method of each kind, as on a processor without AVX
	ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 $(PYTEST) tests/conformance -m each_kind $(PARALLEL) --dist load $(LISTED)

test-times: LISTED = --durations=20 --durations-min=0.5
test-times: test-fast test-portable ## the same tests, and the slowest twenty of each part

test-slow: $(STAMP) ## the tests that take minutes
	$(BIN)/python -m pytest -m slow

test-faults: $(STAMP) ## what is killed, filled and torn, TRIALS=30 times each (hours on two cores)
	GOLDFINCH_TRIALS=$(or $(TRIALS),30) $(BIN)/python -m pytest tests/faults -s --timeout 21600

soak: $(STAMP) ## MINUTES=30 METHOD=fpl STORE=sqlite|memory SEED=0: a real deployment under injected faults
	GOLDFINCH_SOAK_MINUTES=$(or $(MINUTES),30) GOLDFINCH_SOAK_METHOD=$(or $(METHOD),fpl) \
	GOLDFINCH_SOAK_STORE=$(or $(STORE),sqlite) GOLDFINCH_SOAK_SEED=$(or $(SEED),0) \
	$(BIN)/python -m pytest tests/faults/test_injected_faults.py -m slow -s

test-compose: $(STAMP) ## the containers for real (needs Docker, minutes)
	@covered=$$(python3 docker/last_run.py covered) \
	&& GOLDFINCH_COMPOSE=1 $(BIN)/python -m pytest tests/deployment/test_compose.py -s --timeout 3600 \
	&& python3 docker/last_run.py record 'make test-compose' "$$covered"

bench: $(STAMP) ## every benchmark of the whole, on an idle machine, into bench/results/system.csv; long
	$(BIN)/python bench/data_path.py
	$(BIN)/python bench/aggregation.py --clients 10 30 100
	$(BIN)/python bench/efficiency.py --engines inline startup ray
	$(BIN)/python bench/round_overhead.py
	$(BIN)/python bench/scale.py
	$(BIN)/python bench/scale.py --plot

measure: $(STAMP) ## lines, files of a round, circles of imports, and what should exist once
	@$(BIN)/python bench/measure.py

docs: $(STAMP) ## the documentation as a searchable site in outputs/site; needs no network but for its tools, once
	@$(BIN)/python -c 'import mkdocstrings' 2>/dev/null || $(PIP) --quiet --config-settings editable_mode=compat --editable '.[docs]'
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "wrote outputs/site/index.html"

lock: $(STAMP) ## write requirements.txt anew from pyproject.toml, for every platform, keeping the pins that still fit
	{ head -1 requirements.txt; $(BIN)/uv pip compile --quiet pyproject.toml $(foreach extra,$(subst $(comma), ,$(EXTRAS)) docs timm heif,--extra $(extra)) \
	  --universal --python-version 3.11 --no-annotate --no-header --constraint requirements.txt; } >requirements.new
	mv requirements.new requirements.txt
	{ head -1 docker/hashes.txt; $(BIN)/uv pip compile --quiet requirements.txt --generate-hashes --no-deps \
	  --universal --python-version 3.11 --no-annotate --no-header; } >hashes.new
	mv hashes.new docker/hashes.txt

lint: $(STAMP) ## ruff, mypy, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP) ## rewrite the source in the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

doctor: $(STAMP) ## what works on this machine
	@$(BIN)/goldfinch doctor

clean: ## remove what was built and run here, but not the virtual environment
	rm -rf outputs .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache *.egg-info
