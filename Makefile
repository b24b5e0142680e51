# Every target sets up what it needs. `make help` lists them.
PYTHON   ?= $(shell command -v python3.11 || command -v python3)
BUILD    := build
VENV     := $(BUILD)/venv
R3       := $(VENV)/bin/megatron-r3
SAMPLER  ?= transformers
# the Megatron-LM tree of apply, revert, status, fidelity, export
MEGATRON ?=
# the Megatron-LM clone of verify, bump and matrix
REPO     ?=
# the release line of verify, matrix, export and bump (default: all; the one that fits; as the tag says)
LINE     ?=
# bump: from the patches of which line, to which tag or commit
OLD      ?=
NEW      ?=
# export: 1 writes nothing and says whether a byte would change
CHECK    ?=
# cases of fidelity whose name has this in it; one class of fuzz
ONLY     ?=
# fuzz: how many tries, and which ones
TRIES    ?= 10000
SEED     ?= 0
# test: how many processes share the tests
JOBS     ?= $(shell nproc)
# steps of each way in bench-dispatch
ROUNDS   ?= 10
# tokens of all rollouts in bench-store
TOKENS   ?= 1000000
# bench-gpu: 1 runs it tiny, on the CPU
REHEARSE ?=
# image, image-test and image-matrix: see docs/image.md
MEGATRON_SOURCE  ?= git
MEGATRON_VERSION ?=
MEGATRON_REPO    ?=
BASE_IMAGE       ?=
TAG              ?=
DOCKER           ?= docker
PIP_CONF         ?=
TESTS            ?=
IMAGE := PYTHONPATH=. $(PYTHON) -m docker.image --docker "$(DOCKER)" --source $(MEGATRON_SOURCE) \
	--version "$(MEGATRON_VERSION)" --repo "$(MEGATRON_REPO)" --base "$(BASE_IMAGE)" --tag "$(TAG)" --tests "$(TESTS)" \
	$(if $(MEGATRON),--megatron "$(MEGATRON)") $(if $(PIP_CONF),--pip-conf "$(PIP_CONF)")
# the default tree of patches/versions.toml
TREE     := $(BUILD)/megatron-core-$(shell sed -n 's/^default = "\(.*\)"/\1/p' patches/versions.toml)

.PHONY: help setup megatron apply revert status verify export bump demo fidelity matrix bench-dispatch bench-store \
	bench-gpu image image-vllm-cpu image-test image-matrix test fuzz lint clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*##/\1:/p' $(MAKEFILE_LIST)

setup: $(VENV)/.done  ## the development environment, in build/venv

# the file holds how many seconds it took
$(VENV)/.done: pyproject.toml requirements.lock
	@mkdir -p $(BUILD); date +%s > $(BUILD)/setup-start
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@echo $$(($$(date +%s) - $$(cat $(BUILD)/setup-start))) > $@

megatron: setup  ## fetch the default megatron-core sources, as a git tree in build/
	$(R3) megatron --out $(BUILD)

apply revert status: setup
	@test -n "$(MEGATRON)" || { echo "error: which tree? make $@ MEGATRON=DIR" >&2; exit 2; }
	@$(R3) $@ "$(MEGATRON)"

apply:   ## put the patches into MEGATRON=DIR
revert:  ## take them out again
status:  ## say which they are

verify: setup  ## check every series against the commits in REPO=CLONE (LINE=)
	@test -n "$(REPO)" || { echo "error: which clone? make $@ REPO=DIR" >&2; exit 2; }
	@$(R3) $@ "$(REPO)" $(if $(LINE),--line "$(LINE)")

export: setup  ## write the commits of MEGATRON=DIR as patches (LINE=, CHECK=1)
	@test -n "$(MEGATRON)" || { echo "error: which tree? make $@ MEGATRON=DIR" >&2; exit 2; }
	@$(R3) $@ "$(MEGATRON)" $(if $(LINE),--line "$(LINE)") $(if $(CHECK),--check)

bump: setup  ## start a release line: OLD=LINE NEW=TAG REPO=CLONE (LINE=)
	@test -n "$(OLD)" && test -n "$(NEW)" && test -n "$(REPO)" || \
		{ echo "error: from which line to what? make $@ OLD=LINE NEW=TAG REPO=DIR" >&2; exit 2; }
	@$(R3) $@ "$(OLD)" "$(NEW)" --repo "$(REPO)" $(if $(LINE),--name "$(LINE)")

demo: megatron  ## a real rollout to a replayed training step (SAMPLER=transformers or vllm)
	$(R3) apply $(TREE)
	$(VENV)/bin/python -m demo.run --megatron $(TREE) --out $(BUILD)/demo --sampler $(SAMPLER)

fidelity: megatron  ## every layout and schedule against one process (MEGATRON=DIR: a real checkout)
	$(VENV)/bin/python -m fidelity.run --out $(BUILD)/fidelity$(if $(ONLY),-only).json \
		$(if $(MEGATRON),--megatron "$(MEGATRON)") $(if $(ONLY),--only "$(ONLY)")

matrix: setup  ## every release line: apply, export, off, replay (REPO=CLONE: the real commits; LINE=)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m fidelity.matrix --out $(BUILD)/matrix.json \
		$(if $(REPO),--repo "$(REPO)") $(if $(LINE),--line "$(LINE)")

bench-dispatch: megatron  ## what a MoE layer waits for and a step costs: live, replay, replay with a plan
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m benchmarks.dispatch --out $(BUILD)/bench/dispatch.json \
		--rounds $(ROUNDS)

bench-store: setup  ## routes from a response to a rank's slice, and as peers move them (TOKENS=)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m benchmarks.store --out $(BUILD)/bench/store.json \
		--tokens $(TOKENS)

# on a GPU with $(PYTHON), which needs torch and triton and what Megatron imports, and MEGATRON=DIR, patched
bench-gpu: $(if $(REHEARSE),megatron)  ## the replayed gate and a MoE stack on a GPU (MEGATRON=DIR, REHEARSE=1)
	$(if $(REHEARSE),$(R3) apply $(TREE))
	PYTHONPATH=. $(if $(REHEARSE),$(VENV)/bin/python,$(PYTHON)) -m benchmarks.gate \
		--out $(if $(REHEARSE),$(BUILD)/bench/gate.json --device cpu --rehearse,benchmarks/results) \
		$(if $(MEGATRON),--megatron "$(MEGATRON)")
	PYTHONPATH=. $(if $(REHEARSE),$(VENV)/bin/python,$(PYTHON)) -m benchmarks.layers \
		--megatron "$(if $(MEGATRON),$(MEGATRON),$(TREE))" \
		--out $(if $(REHEARSE),$(BUILD)/bench/layers.json --device cpu --rehearse,benchmarks/results)

image:  ## build the image (BASE_IMAGE=, MEGATRON_SOURCE=git or pypi, MEGATRON_VERSION=, MEGATRON=DIR, TAG=)
	$(IMAGE) build

image-vllm-cpu:  ## build the sampler of a run without a GPU: vLLM for CPU (BASE_IMAGE=)
	$(IMAGE) build --target vllm-cpu

image-test:  ## run the tests inside the image built last, or TAG= (TESTS=: what pytest is given)
	$(IMAGE) test

image-matrix:  ## build and test the images of all release lines (BASE_IMAGE=, MEGATRON_SOURCE=)
	$(IMAGE) matrix

# Each process has one thread, since the tests fill the cores by themselves. A worker that has no test
# left takes tests from another one. Every worker holds two Megatron trees and the ranks of a test in
# memory (some 3 GB), so that there are at most 16 workers.
test: lint megatron  ## lint, then all tests, in as many processes as there are cores (JOBS=)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n $(JOBS) --maxprocesses 16 --dist worksteal

fuzz: megatron  ## bad input, thousands of times; fails on what is neither right nor one clear line (TRIES=, SEED=, ONLY=CLASS)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m fuzz.run --tries $(TRIES) --seed $(SEED) $(if $(ONLY),--only "$(ONLY)")

lint: setup  ## formatting, style, types
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

clean:  ## remove build/
	rm -rf $(BUILD)
