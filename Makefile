# Every target sets up what it needs. `make help` lists them.
PYTHON   ?= $(shell command -v python3.11 || command -v python3)
BUILD    := build
VENV     := $(BUILD)/venv
R3       := $(VENV)/bin/megatron-r3
SAMPLER  ?= transformers
# demo: the steps of each training; the table that it prints is about the first step
STEPS    ?= 6
# demo: how many prompts are sampled, 8 times each, and used in each step: 8 to 64, a multiple of 8
PROMPTS  ?= 64
# the Megatron-LM tree of apply, revert, status, check, fidelity, export, gpu, gpu-pack, image
MEGATRON ?=
# apply: with 1 a tree that is no release is taken too, if the group r3 of a line (or GROUPS) applies to it exactly
UNRELEASED ?=
# apply: the groups of patches to apply, as "r3 guests" (default: all that apply)
GROUPS   ?=
# the Megatron-LM clone of verify, trees, upstream, bump and matrix
REPO     ?=
# the release line of verify, upstream and matrix (default: all lines), of apply, revert, status and export (default:
# the line that fits) and of bump (default: named after the tag)
LINE     ?=
# bump: the line whose patches are carried, and the tag or commit that they are carried to
OLD      ?=
NEW      ?=
# export: with 1 nothing is written, and the exit status says whether a byte would change
CHECK    ?=
# mutants: with 1 only the unit tests run
UNIT     ?=
# fidelity, bench-*: run the cases with this in their name, for example EP2 full; mutants, check, upstream: the faults,
# checks, tests with this in their name; fuzz: one class; compare: one regime, or REGIME/ARM; clients: the tests that
# this expression of pytest -k chooses
ONLY     ?=
# fuzz: how many tries
TRIES    ?= 10000
# fuzz, online: the seed of the random choices
SEED     ?= 0
# online: how often rollouts are sampled and trained on
COLLECTIONS ?= 28
# online: 1 for an agent that may call a tool
AGENT    ?=
# test, test-all: how many processes share the tests, 16 at most (default: two more than there are cores, because many
# tests wait for processes of their own); compare, mutants, fuzz: how many runs, faults or tests at a time (default: the
# number of cores)
JOBS     ?=
# bench-dispatch, bench-store, bench-balance: the most rounds; a benchmark ends earlier if every ratio is known to
# differ from 1 (default: 256 for bench-dispatch, 32 for the others). bench-publish: the rounds
ROUNDS   ?=
# bench-store: tokens of a round
TOKENS   ?= 100000
# gpu: with 1 every step runs tiny, on the CPU
REHEARSE ?=
# gpu, gpu-pack: the folder that make demo made
DEMO     ?= $(BUILD)/demo
# gpu: the folder into which proof/gpu/unpack installed packages
SITE     ?=
# gpu: how long the call may take
MINUTES  ?=
# image, image-test and image-matrix: see docs/image.md
MEGATRON_SOURCE  ?= git
MEGATRON_VERSION ?=
MEGATRON_REPO    ?=
BASE_IMAGE       ?=
TAG              ?=
DOCKER           ?= docker
PIP_CONF         ?=
TESTS            ?=
IMAGE := PYTHONPATH=. $(PYTHON) docker/image.py --docker "$(DOCKER)" --source $(MEGATRON_SOURCE) \
	--version "$(MEGATRON_VERSION)" --repo "$(MEGATRON_REPO)" --base "$(BASE_IMAGE)" --tag "$(TAG)" --tests "$(TESTS)" \
	$(if $(MEGATRON),--megatron "$(MEGATRON)") $(if $(PIP_CONF),--pip-conf "$(PIP_CONF)")
# what `make clients` takes from PyPI (frameworks/verl.py knows no other versions of verl)
CLIENTS  := verl==0.8.0 verl==0.9.0 verl==0.9.1 ms-swift==4.6.0 mbridge==0.15.1 megatron-bridge==0.3.1
# clients: clones of what is not on PyPI, at the commits of tests/clients/client_workers.py; without a clone its tests
# are skipped
SKYRL    ?=
NEMO_RL  ?=
BRIDGE   ?=
# the default tree of patches/versions.toml
TREE     := $(BUILD)/megatron-core-$(shell sed -n 's/^default = "\(.*\)"/\1/p' patches/versions.toml)

.PHONY: help files setup megatron apply revert status check verify trees upstream export bump demo fidelity matrix \
	clients bench-dispatch bench-store bench-publish bench-scale bench-balance bench-gate gpu gpu-pack online compare image image-sampler image-vllm-cpu \
	image-test image-matrix test test-all mutants fuzz lint clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*##/\1:/p' $(MAKEFILE_LIST)

files:  ## what each file is about: its first line
	@git ls-files '*.py' | xargs grep -m1 '^"""' | sed 's/:"""/: /; s/"""$$//'

# Two makes at once: the second one waits, and finds what the first one installed.
setup:  ## install the development environment in build/venv
	@mkdir -p $(BUILD); flock -n $(BUILD) true || echo "waits for another make in this folder" >&2
	@flock -o $(BUILD) $(MAKE) --silent $(VENV)/.done

# What the first process compiles is kept for the next one, unless PYTHONDONTWRITEBYTECODE is set. If it is set, all is
# compiled here, on all cores; pip would compile one module at a time.
COMPILE  := test -z "$$PYTHONDONTWRITEBYTECODE" || $(VENV)/bin/python \
	-c 'import compileall, sys; compileall.compile_dir(sys.argv[1], quiet=2, workers=0)'

# $(VENV)/.done holds how many seconds the installation took; the demo prints this number.
$(VENV)/.done: pyproject.toml requirements.lock
	@echo "installs the packages of requirements.lock into $(VENV), once, in one to two minutes"
	date +%s > $(BUILD)/setup-start
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -r requirements.lock
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	$(COMPILE) $(VENV)/lib
	@echo $$(($$(date +%s) - $$(cat $(BUILD)/setup-start))) > $@

megatron: setup  ## fetch the default megatron-core sources from PyPI, as a git checkout in build/
	$(R3) megatron --out $(BUILD)

apply revert status: setup
	@test -n "$(MEGATRON)" || { echo "error: which tree? make $@ MEGATRON=DIR" >&2; exit 2; }
	@$(R3) $@ "$(MEGATRON)" $(if $(LINE),--line "$(LINE)") \
		$(if $(filter apply,$@),$(if $(UNRELEASED),--unreleased) $(if $(GROUPS),--groups $(GROUPS)))

apply:   ## put the patches into MEGATRON=DIR (UNRELEASED=1: between releases too, where they fit; GROUPS="r3 ..."; LINE=)
revert:  ## remove the patches from MEGATRON=DIR
status:  ## show which release MEGATRON=DIR is, or is close to, whether it is patched, and when it was checked

check: setup  ## test the patched MEGATRON=DIR itself: option off, replay, upstream's own router tests (ONLY=: some; not recorded)
	@test -n "$(MEGATRON)" || { echo "error: which tree? make $@ MEGATRON=DIR" >&2; exit 2; }
	@OMP_NUM_THREADS=1 $(VENV)/bin/python -m proof.fidelity.check "$(MEGATRON)" $(if $(ONLY),--only "$(ONLY)")

verify: setup  ## check the patches of every release line against the commits in REPO=CLONE (LINE=)
	@test -n "$(REPO)" || { echo "error: which clone? make $@ REPO=DIR" >&2; exit 2; }
	@$(VENV)/bin/python -m keepers.patches $@ "$(REPO)" $(if $(LINE),--line "$(LINE)")

export: setup  ## write the commits of MEGATRON=DIR as patches (LINE=; CHECK=1: only say whether they differ)
	@test -n "$(MEGATRON)" || { echo "error: which tree? make $@ MEGATRON=DIR" >&2; exit 2; }
	@$(VENV)/bin/python -m keepers.patches $@ "$(MEGATRON)" $(if $(LINE),--line "$(LINE)") $(if $(CHECK),--check)

trees: setup  ## try the patches on every tree that the docs name, and write docs/trees.json (REPO=CLONE)
	@test -n "$(REPO)" || { echo "error: which clone? make $@ REPO=DIR" >&2; exit 2; }
	@$(VENV)/bin/python -m proof.fidelity.pinned_trees --repo "$(REPO)"

upstream: setup  ## run Megatron's own tests, and tests of the patches that Megatron could take (REPO=CLONE, LINE=, ONLY=)
	@test -n "$(REPO)" || { echo "error: which clone? make $@ REPO=DIR" >&2; exit 2; }
	@OMP_NUM_THREADS=1 $(VENV)/bin/python -m proof.fidelity.upstream_fixes --repo "$(REPO)" \
		$(if $(LINE),--line $(LINE)) $(if $(ONLY),--only $(ONLY))

bump: setup  ## start a release line: carry the patches of OLD=LINE to NEW=TAG of REPO=CLONE (LINE=)
	@test -n "$(OLD)" && test -n "$(NEW)" && test -n "$(REPO)" || \
		{ echo "error: from which line to what? make $@ OLD=LINE NEW=TAG REPO=DIR" >&2; exit 2; }
	@$(VENV)/bin/python -m keepers.patches $@ "$(OLD)" "$(NEW)" --repo "$(REPO)" $(if $(LINE),--name "$(LINE)")

demo: megatron  ## sample a tiny model, then train on its rollouts, live and replayed (SAMPLER=transformers, vllm, sglang, megatron; STEPS=, PROMPTS=)
	$(R3) apply $(TREE)
	$(VENV)/bin/python -m demo.run --megatron $(TREE) --out $(BUILD)/demo --sampler $(SAMPLER) --steps $(STEPS) --prompts $(PROMPTS)

online: megatron  ## reinforcement learning in a loop: sample, train, publish, verify, again (SAMPLER=, SEED=, COLLECTIONS=; AGENT=1: with an agent)
	$(R3) apply $(TREE)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m demo.online --megatron $(TREE) --out $(BUILD)/online$(if $(AGENT),-agent) \
		--sampler $(SAMPLER) --seed $(SEED) --collections $(COLLECTIONS) $(if $(AGENT),--agent)

# A run takes about one core, and has a sampler, a collector and a trainer that wait for each other.
compare: megatron  ## run the loop live, with R3, R2, TIS and GSPO under four mismatches (ONLY=REGIME[/ARM], JOBS=)
	$(R3) apply $(TREE)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m proof.comparison.run --megatron $(TREE) --out $(BUILD)/comparison \
		--jobs $(or $(JOBS),$(shell nproc)) --only "$(ONLY)"

fidelity: megatron  ## compare every layout and schedule with one process (MEGATRON=DIR: on a real checkout; ONLY=)
	$(VENV)/bin/python -m proof.fidelity.run --out $(BUILD)/fidelity$(if $(ONLY),-only).json \
		$(if $(MEGATRON),--megatron "$(MEGATRON)") $(if $(ONLY),--only "$(ONLY)")

matrix: setup  ## test every release line: apply, export, option off, replay (REPO=CLONE: on the real commits; LINE=)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m proof.fidelity.matrix --out $(BUILD)/matrix.json \
		$(if $(REPO),--repo "$(REPO)") $(if $(LINE),--line "$(LINE)")

# The packages of CLIENTS require inference servers and CUDA kernels. So each wheel is installed without
# its requirements, in a folder of its own. site/ has what the Megatron parts of these packages import.
$(BUILD)/clients/.done: $(VENV)/.done tests/clients/requirements.lock
	rm -rf $(BUILD)/clients
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --target $(BUILD)/clients/site \
		-r tests/clients/requirements.lock
	for wheel in $(CLIENTS); do $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile \
		--target $(BUILD)/clients/$$(echo $$wheel | sed s/==/-/) $$wheel || exit 1; done
	$(COMPILE) $(BUILD)/clients
	touch $@

clients: megatron $(BUILD)/clients/.done  ## run the code of RL frameworks on megatron_r3 (SKYRL=, NEMO_RL=, BRIDGE=CLONE, ONLY=)
	OMP_NUM_THREADS=1 MEGATRON_R3_CLIENTS=$(BUILD)/clients SKYRL="$(SKYRL)" NEMO_RL="$(NEMO_RL)" BRIDGE="$(BRIDGE)" \
		$(VENV)/bin/python -m pytest tests/clients $(if $(ONLY),-k "$(ONLY)")

bench-dispatch: megatron  ## measure waits of a MoE layer and times of a step: live, replay, with a plan (ONLY=CASE)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m proof.benchmarks.dispatch --out $(BUILD)/bench/dispatch.json \
		$(if $(ROUNDS),--rounds $(ROUNDS)) --only "$(ONLY)"

bench-store: setup  ## measure routes on their way from a response to a rank, here and in other frameworks (TOKENS=)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m proof.benchmarks.store --out $(BUILD)/bench/store.json \
		$(if $(ROUNDS),--rounds $(ROUNDS)) --tokens $(TOKENS)

bench-balance: megatron  ## measure what guest experts do to the load and to a step (ONLY=CASE)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m proof.benchmarks.balance --out $(BUILD)/bench/balance.json \
		$(if $(ROUNDS),--rounds $(ROUNDS)) --only "$(ONLY)"

bench-gate: setup  ## compile the gate's kernels for an H100, and compare their instructions with its memory (ONLY=MODEL)
	$(VENV)/bin/python -m proof.benchmarks.gate --out $(BUILD)/bench/gate.json --only "$(ONLY)"

bench-scale: setup  ## count and time what opening, reading and planning cost as a job and its store grow (SHARDS=, STARTUP=)
	PYTHONPATH=. $(VENV)/bin/python -m proof.benchmarks.scale --out $(BUILD)/bench/scale.json \
		$(if $(SHARDS),--shards $(SHARDS)) $(if $(STARTUP),--startup $(STARTUP))

bench-publish: megatron  ## measure time and memory of writing a policy by the ranks of a training (ONLY=LAYOUT)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m proof.benchmarks.publish --out $(BUILD)/bench/publish.json \
		$(if $(ROUNDS),--rounds $(ROUNDS)) --only "$(ONLY)"

# make gpu uses PYTHON's own torch and packages, because the torch of build/venv may be built for CPUs.
gpu:  ## run on this machine's GPU what needs one (PYTHON=, MEGATRON=, DEMO=, SITE=, MINUTES=; REHEARSE=1: tiny, on the CPU)
	@$(if $(REHEARSE),$(VENV)/bin/python,$(PYTHON)) -m proof.gpu.run --megatron "$(or $(MEGATRON),$(TREE))" \
		--demo "$(DEMO)" --out $(BUILD)/gpu$(if $(REHEARSE),-rehearsal --rehearse) \
		$(if $(SITE),--site "$(SITE)") $(if $(MINUTES),--minutes $(MINUTES))

gpu-pack:  ## pack what a GPU machine without a network needs for make gpu, in parts (MEGATRON=, DEMO=)
	@proof/gpu/pack $(BUILD)/gpu-pack "$(or $(MEGATRON),$(TREE))" "$(DEMO)"

image:  ## build the image (BASE_IMAGE=, MEGATRON_SOURCE=git or pypi, MEGATRON_VERSION=, MEGATRON=DIR, TAG=)
	$(IMAGE) build

image-sampler:  ## add `megatron-r3 rl sampler` to an engine's image: BASE_IMAGE=vllm/vllm-openai:v0.30.0 (TAG=)
	$(IMAGE) build --target sampler

image-vllm-cpu:  ## build the image of a sampler that needs no GPU: vLLM for CPU (BASE_IMAGE=, TAG=)
	$(IMAGE) build --target vllm-cpu

image-test:  ## run the tests inside the image that was built last, or TAG= (TESTS=: arguments of pytest)
	$(IMAGE) test

image-matrix:  ## build and test the images of all release lines (BASE_IMAGE=, MEGATRON_SOURCE=)
	$(IMAGE) matrix

# Each process has one thread, since the tests fill the cores by themselves. A worker that has no test
# left takes tests from another one. Every worker holds two Megatron trees and the ranks of a test in
# memory (some 3 GB), so that there are at most 16 workers.
PYTEST   := OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n $(or $(JOBS),$(shell expr $$(nproc) + 2)) --maxprocesses 16 --dist worksteal
test: lint megatron  ## run lint, then the tests that a change of R3 can break (JOBS=)
	$(PYTEST) -m "not slow"

test-all: lint megatron  ## run lint, then all tests: those of the tools, of engines and of whole runs too (JOBS=)
	$(PYTEST)

mutants: megatron  ## put faults into the package, one at a time, and see which tests notice (ONLY=TEXT, UNIT=1, JOBS=)
	$(VENV)/bin/python -m proof.fidelity.mutants --jobs $(or $(JOBS),$(shell nproc)) --out $(BUILD)/mutants.json \
		$(if $(ONLY),--only "$(ONLY)") $(if $(UNIT),--unit)

fuzz: megatron  ## try bad input; fails if a result is neither right nor one clear line (TRIES=, SEED=, ONLY=CLASS)
	OMP_NUM_THREADS=1 FUZZ_TRIES=$(TRIES) FUZZ_ONLY="$(ONLY)" $(VENV)/bin/python -m pytest -q proof/fuzz/tries.py \
		-n $(or $(JOBS),$(shell nproc)) --hypothesis-seed=$(SEED) --hypothesis-show-statistics $(if $(ONLY),-k "$(ONLY)")

lint: setup  ## check formatting, style and types
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

clean:  ## remove build/
	rm -rf $(BUILD)
