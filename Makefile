# Every target works in a fresh clone: it first makes .venv ready (deploy/prepare.sh), which costs nothing once done.
SHELL := bash
.DEFAULT_GOAL := help
.PHONY: help demo test check format lint types imports wheel contracts setup clean distclean \
	test-vllm setup-vllm bench-e2e bench-engine bench-patch bench-sampler bench-scoring bench-trust lab-broadcast \
	lab-flood attack-lab attack-lab-slow attack-lab-sleeper bench-cheats

PY := .venv/bin/python
# Another stamp for other dependencies: the next target then installs them.
READY := .venv/.ready-$(shell cat pyproject.toml constraints.txt deploy/prepare.sh | cksum | cut -d ' ' -f 1)
# vLLM settles the versions of half of what we use, so it has an environment of its own, with Rollmesh in it.
PY_VLLM := .venv-vllm/bin/python
READY_VLLM := .venv-vllm/.ready-$(shell cat pyproject.toml constraints-vllm.txt deploy/prepare.sh | cksum | cut -d ' ' -f 1)
# The engine of the demo's nodes and of bench-engine: transformers or vllm, as in: make demo BACKEND=vllm
BACKEND ?= transformers
ifeq ($(BACKEND),vllm)
READY_ENGINE := $(READY_VLLM)
PY_ENGINE := $(PY_VLLM)
else
READY_ENGINE := $(READY)
PY_ENGINE := $(PY)
endif
# Folders that hold such tests; others need what .venv-vllm lacks.
VLLM_TESTS := tests/engines tests/unit/engine $(wildcard tests/vllm tests/integration/test_vllm*.py)
# Arguments for pytest, as in: make test TESTS="tests/unit -k manifest"
TESTS ?=
# Test files that run side by side.
JOBS ?= 2

help: ## Show this list
	@sed -n 's/^\([a-z][a-z0-9-]*\):.*## \(.*\)/  make \1	\2/p' $(MAKEFILE_LIST) | expand -t 20

demo: $(READY) $(READY_ENGINE) ## Train SmolLM2 with a learner and two nodes on this machine (about ten minutes); results in runs/demo
	@$(PY) -m rollmesh_learner.demo --out runs/demo --backend $(BACKEND)

test: $(READY) ## Run all tests (those that need vLLM are skipped)
	@$(PY) -m pytest -n $(JOBS) --dist loadfile $(TESTS)

test-vllm: $(READY) $(READY_VLLM) ## Run the tests that need vLLM, in .venv-vllm (3.7 GB)
	@timeout --foreground 2100 $(PY_VLLM) -m pytest -m vllm $(or $(TESTS),$(VLLM_TESTS))

check: format lint types imports wheel contracts ## Check style, types, structure and the wheel
	@echo "check: all passed"

bench-e2e: $(READY) ## Seconds per step of Rollmesh, a plain loop and TRL on the same job
	@$(PY) -m tests.bench.e2e --out runs/bench-e2e

bench-engine: $(READY) $(READY_ENGINE) ## Tokens/s through the daemon against the bare engine, sampler, swaps, restart
	@$(PY_ENGINE) -m tests.bench.bench_engine --backend $(BACKEND) --out runs/bench-engine

bench-patch: $(READY) ## Size and speed of weight patches of real steps, against the entropy bound
	@$(PY) -m tests.bench.bench_patch --out runs/bench-patch

bench-sampler: $(READY) ## Statistics of the seeded noise over ten million draws, and the cost of a sampled token
	@OMP_NUM_THREADS=1 $(PY) -m tests.bench.bench_sampler

bench-scoring: $(READY) ## Cost of a score in the sandbox, against calling the scorer directly
	@$(PY) -m tests.bench.bench_scoring

bench-trust: $(READY) ## What the sampling audit refuses of honest work, and how soon it finds each cheat (half an hour)
	@$(PY) -m tests.bench.bench_trust --out runs/bench-trust

lab-broadcast: $(READY) ## Time for a new version to reach 4 to 32 nodes over shaped links (root; some twenty minutes)
	@$(PY) -m tests.lab.broadcast --out runs/lab

lab-flood: $(READY) ## What honest nodes notice while 50 others flood each stream (some ten minutes)
	@$(PY) -m tests.lab.flood --out tests/bench/results/flood.json

attack-lab: $(READY) ## Every attack of the list against a real learner, with what became of each (some twelve minutes)
	@$(PY) -m tests.attacks.lab --out runs/attack-lab --results tests/bench/results/attacks.json

attack-lab-slow: $(READY) ## The attacks nearest to honest noise, with calibrated thresholds, every rollout audited (half an hour)
	@$(PY) -m tests.attacks.lab --out runs/attack-lab --only 0.9 top-p "among ties" padding int8 "base model" \
		--tokens 12000 --minutes 15 --calibrate 1536 --set audit.rate_probation=1.0 --set audit.rate_steady=1.0 \
		--results tests/bench/results/attacks-slow.json

# Its own run, so that the shorter way into full standing (24 audits passed, not 50) touches no other attack.
attack-lab-sleeper: $(READY) ## The attacker that is honest until it is in full standing (some ten minutes)
	@$(PY) -m tests.attacks.lab --out runs/attack-lab --only sleeper --minutes 8 \
		--set audit.probation_rollouts=24 --set rollouts.max_new_tokens=16 \
		--results tests/bench/results/attacks-sleeper.json

bench-cheats: $(READY) ## The reward curve with 30 % of the work by cheats, checks on and off, on three seeds (some 70 minutes)
	@$(PY) -m tests.attacks.curve --out runs/bench-cheats

setup: $(READY) ## Only make .venv ready

setup-vllm: $(READY) $(READY_VLLM) ## Only make .venv and .venv-vllm ready

clean: ## Remove what checks, tests and builds leave behind; keeps .venv and runs
	@rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find protocol node learner tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## The same, and both environments
	@rm -rf .venv .venv-vllm

# --- the parts of check ----------------------------------------------------------------------------------------------
format: $(READY)
	@echo "check: format" && $(PY) -m ruff format --check .

lint: $(READY)
	@echo "check: lint" && $(PY) -m ruff check --quiet .

types: $(READY)
	@echo "check: types" && $(PY) -m mypy --no-error-summary

imports: $(READY)
	@echo "check: imports" && log=$$(.venv/bin/lint-imports --no-logo 2>&1) || { echo "$$log"; exit 1; }

wheel: $(READY)
	@echo "check: wheel" && $(PY) -m pytest -q --no-header tests/contracts/test_wheel.py

contracts: $(READY)
	@echo "check: contracts" && $(PY) -m pytest -q --no-header tests/contracts --ignore tests/contracts/test_wheel.py

$(READY) $(READY_VLLM):
	@PYTHON="$(PYTHON)" bash deploy/prepare.sh $@
