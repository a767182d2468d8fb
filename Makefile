# `make` alone lists the targets. All of them work in .venv, which is made when it is needed.

VENV := .venv
PY := $(VENV)/bin/python
SUITABLE := import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 13))
PYTHON ?= $(shell for p in python3.11 python3.12 python3; do \
	$$p -c '$(SUITABLE)' >/dev/null 2>&1 && echo $$p && break; done)

# The environment is complete for this content of the two files, in this folder: its name says so, not its date.
INSTALLED := $(VENV)/installed-$(shell { pwd; cat pyproject.toml environment.yml; } | cksum | tr ' ' '-')

PROFILE ?= wheels
WORKERS ?= 2
# what cwlib.chain gives its kernels, a test keeps the two alike
KERNEL_ENVIRONMENT := OMP_NUM_THREADS=2 SOURCE_DATE_EPOCH=1767225600 PYTHONHASHSEED=0 \
	TOKENIZERS_PARALLELISM=false HF_HUB_DISABLE_TELEMETRY=1 HF_HUB_DISABLE_PROGRESS_BARS=1 \
	TQDM_DISABLE=1 PYTHONWARNINGS=ignore:IProgress

# the pins of environment.yml, in the form that pip reads
CONSTRAINTS := mkdir -p build && sed -n 's/^ *- \([A-Za-z0-9._-]*\)\(\[[^]]*\]\)*==\(.*\)$$/\1==\3/p' environment.yml > build/constraints.txt

.DEFAULT_GOAL := help
.PHONY: help figures test compat study verify bench lab lint clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' Makefile

# What the notebooks open; fetched here for its progress bar, and so that no notebook's output tells of it.
LIVE := minilm-l6 smollm2-135m

figures: $(INSTALLED) ## Run the notebooks that are not current, rewrite figures/ (FRESH=1: all; UPDATE=1: keep outputs)
	$(PY) -m cwlib checkpoints fetch $(LIVE)
	$(PY) -m cwlib.chain $(if $(filter-out 0 no false,$(FRESH)),--fresh) $(if $(filter-out 0 no false,$(UPDATE)),--update)

test: $(INSTALLED) ## Run the unit tests, then compare every notebook with its committed outputs
	$(PY) -m pytest
	$(PY) -m cwlib checkpoints fetch $(LIVE)
	rm -rf build/figures
	mkdir -p build
	cp -R figures build/figures
	env -u MPLBACKEND $(KERNEL_ENVIRONMENT) CWLIB_FIGURES="$(CURDIR)/build/figures" \
		$(PY) -m pytest --nbval --nbval-current-env notebooks/*.ipynb

# The oldest transformers that pyproject.toml admits; the oldest torch, 2.11.0, comes from the index as a CUDA build, with
# 3 GB of GPU libraries, so it has to be asked for. All else is as pinned, but for what the old ones bound themselves.
TRANSFORMERS ?= 5.17.0
TORCH ?= 2.13.0
COMPAT := build/compat/transformers-$(TRANSFORMERS)-torch-$(TORCH)
COMPATIBLE := $(COMPAT)/$(notdir $(INSTALLED))

compat: $(COMPATIBLE) ## Run the unit tests with the oldest transformers, in build/compat (TORCH=2.11.0: and torch, 3 GB; TRANSFORMERS=..)
	$(COMPAT)/bin/python -c 'import torch, transformers; print("torch", torch.__version__, "transformers", transformers.__version__)'
	$(COMPAT)/bin/python -m pytest --ignore tests/test_bench.py

$(COMPATIBLE):
	rm -rf $(COMPAT)
	$(PYTHON) -m venv $(COMPAT)
	@$(CONSTRAINTS)
	grep -v -e '^torch==' -e '^transformers==' -e '^setuptools==' -e '^huggingface_hub==' build/constraints.txt > $(COMPAT)/constraints.txt
	printf 'torch==$(TORCH)\ntransformers==$(TRANSFORMERS)\n' >> $(COMPAT)/constraints.txt
	$(COMPAT)/bin/python -m pip install -c $(COMPAT)/constraints.txt 'setuptools>=77,<82'
	$(COMPAT)/bin/python -m pip install -c $(COMPAT)/constraints.txt --no-build-isolation -e '.[notebooks,dev,distributed]'
	touch $@

study: $(INSTALLED) ## Compute figures/data from the checkpoints (PROFILE=wheels|smoke|hub, FRESH=1: all rows, WORKERS=2, SCHEDULER=tcp://.., DEVICE=cuda)
	OMP_NUM_THREADS=1 $(PY) -m cwlib study --profile $(PROFILE) --workers $(WORKERS) \
		$(if $(SCHEDULER),--scheduler $(SCHEDULER)) $(if $(DEVICE),--device $(DEVICE)) \
		$(if $(filter-out 0 no false,$(FRESH)),--fresh)

verify: $(INSTALLED) ## Recompute a sample of the committed numbers and compare (FULL=1: all); exit status 1 if any differs
	OMP_NUM_THREADS=1 $(PY) -m cwlib verify $(if $(filter-out 0 no false,$(FULL)),--full)

bench: $(INSTALLED) ## Time cwlib beside other ways to the same numbers, into figures/data/bench.csv (DEVICE=cuda; twenty minutes)
	@$(CONSTRAINTS)
	$(PY) -m pip install -q -c build/constraints.txt --no-build-isolation -e '.[bench]'
	$(PY) -m cwlib bench --folder figures/data $(if $(DEVICE),--device $(DEVICE))

lab: $(INSTALLED) ## Open the notebooks in JupyterLab
	$(PY) -m jupyterlab --notebook-dir=notebooks

lint: $(INSTALLED) ## Check style and format of modules, tests and notebooks
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

clean: ## Delete build/ (executed notebooks, stamps, scratch figures, environments of compat)
	rm -rf build
	@echo "Kept: $(VENV), figures/, and the downloads in your cache folder."

# A marker stands while packages are being installed: an environment that still has it was interrupted, and is
# built anew; its bin/ goes first, so that what an interrupted deletion leaves is not taken for an environment.
# Without build isolation, an environment that has everything already needs no network.
$(INSTALLED):
	@if test -e $(VENV)/installing || ! $(PY) -c 'import pip; $(SUITABLE)' 2>/dev/null; then \
		if test -z "$(PYTHON)" || ! $(PYTHON) -c '$(SUITABLE)'; then \
			echo "$(or $(PYTHON),python3) will not do: Python 3.11 or 3.12 with its modules venv and ensurepip is" \
				"needed (on Debian: python3-venv). Install one, or name it: make PYTHON=/path/to/python3.11" >&2; \
			exit 1; \
		fi; \
		echo "Making $(VENV) with $(PYTHON)"; \
		rm -rf $(VENV)/bin && $(PYTHON) -m venv --clear $(VENV); \
	fi
	@rm -f $(VENV)/installed-*
	@touch $(VENV)/installing
	@$(CONSTRAINTS)
	$(PY) -m pip install -c build/constraints.txt setuptools
	$(PY) -m pip install -c build/constraints.txt --no-build-isolation -e '.[notebooks,dev,distributed]'
	@mv $(VENV)/installing $@

# removed, or its base Python is gone: the name alone is not to be trusted
ifneq ($(shell $(PY) -c 'print("works")' 2>/dev/null),works)
.PHONY: $(INSTALLED)
endif
