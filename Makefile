# make demo | test | test-oldest | test-kernels | test-quantised | lint | clean
#
# TORCH is what pip is asked for; it can hold options too. On Linux a plain `torch` brings the CUDA build.
#   make demo TORCH="torch==2.11.0"
PYTHON ?= python3
TORCH  ?= torch==2.13.0
DEMO   ?=
PYTEST ?= -m "not slow"
XDIST  := -n auto --dist loadgroup
OLDEST ?= transformers==5.17.0
TRITON ?= triton==3.9.0
QUANTISED ?= torchao==0.18.0 bitsandbytes==0.50.2

VENV  := .venv
BIN   := $(VENV)/bin
PIP   := $(BIN)/python -m pip --disable-pip-version-check --quiet
WHEEL := $$(ls $(VENV)/wheel/*.whl)

.PHONY: demo test test-oldest test-kernels test-quantised lint clean wheel install-demo install-test FORCE
.DELETE_ON_ERROR:

demo: install-demo
	$(BIN)/hf-sparse-prr generate $(DEMO)

# `pytest`, not `python -m pytest`: the repository root must not be on sys.path, so that the installed wheel is tested.
# A process a core, each with one thread.
test: lint
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/pytest $(XDIST) $(PYTEST)

# The oldest transformers, with what it needs, lies over the newest one; the tests marked compat run on it.
test-oldest: install-test $(VENV)/oldest.stamp
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 PYTHONPATH=$(VENV)/oldest $(BIN)/pytest $(XDIST) -m "compat and not slow"

$(VENV)/oldest.stamp: pyproject.toml Makefile | $(BIN)/python
	rm -rf $(VENV)/oldest
	$(PIP) install --target $(VENV)/oldest $(OLDEST)
	@touch $@

# The Triton kernels, in Triton's interpreter: no GPU needed. Not beside torch, where it could take another one's place.
test-kernels: install-test $(VENV)/triton.stamp
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 PYTHONPATH=$(VENV)/triton $(BIN)/pytest $(XDIST) hub_kernels

$(VENV)/triton.stamp: Makefile | $(BIN)/python
	rm -rf $(VENV)/triton
	$(PIP) install --no-deps --target $(VENV)/triton $(TRITON)
	@touch $@

# Quantised weights, with the packages that make them. Apart, since transformers and peft import what they find.
test-quantised: install-test $(VENV)/quantised.stamp
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 PYTHONPATH=$(VENV)/quantised $(BIN)/pytest tests/test_quantised.py

$(VENV)/quantised.stamp: Makefile | $(BIN)/python
	rm -rf $(VENV)/quantised
	$(PIP) install --no-deps --target $(VENV)/quantised $(QUANTISED)
	@touch $@

# mypy runs in an empty folder, or it would find the sources instead of the installed wheel, where `patches` has its place.
lint: install-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	mkdir -p $(VENV)/empty
	cd $(VENV)/empty && ../bin/mypy -p hf_sparse_prr --config-file ../../pyproject.toml --cache-dir ../mypy_cache

clean:
	rm -rf $(VENV) build dist hf_sparse_prr.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The wheel is rebuilt each time (seconds): no list of prerequisites can tell that a source file was deleted.
install-demo install-test: install-%: wheel $(VENV)/%.stamp
	$(PIP) install --force-reinstall --no-deps $(WHEEL)

wheel: $(VENV)/torch.stamp
	rm -rf build hf_sparse_prr.egg-info $(VENV)/wheel
	$(PIP) wheel --no-deps --no-build-isolation --wheel-dir $(VENV)/wheel .
	rm -rf build hf_sparse_prr.egg-info

# What an extra needs, installed once for each pyproject.toml and torch.
$(VENV)/demo.stamp $(VENV)/test.stamp: $(VENV)/%.stamp: pyproject.toml $(VENV)/torch.stamp | wheel
	@echo "installing what [$*] needs: a minute or two"
	$(PIP) install $(TORCH) "$(WHEEL)[$*]"
	@touch $@

$(VENV)/torch.stamp: $(VENV)/torch.txt
	@echo "installing $(TORCH)"
	$(PIP) install $(TORCH) "setuptools>=77"
	@touch $@

# Holds the TORCH that is installed; only another one makes it newer.
$(VENV)/torch.txt: FORCE | $(BIN)/python
	@echo '$(TORCH)' | cmp -s - $@ || echo '$(TORCH)' > $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("expected Python 3.10 or newer, got " + sys.version)'
	$(PYTHON) -m venv $(VENV)
