# `make demo` or `make test` is the only command that a fresh machine needs: each makes .venv first.
# PYTHON=python3.12 chooses the interpreter; ARGS="..." is handed to the demo, the tests or the benchmark.

PYTHON ?=
BIN := .venv/bin
STAMP := .venv/.lorashard-installed
TORCH := $(shell grep '^torch==' constraints.txt)
# For tests alone, 190 MB, and in a folder of its own: what can import Triton chooses other code. Torch's CUDA build
# brings its own version, which constraints.txt leaves to it.
TRITON := triton==3.7.1
TRITON_STAMP := .venv/triton/.installed-$(subst triton==,,$(TRITON))

.PHONY: help setup demo test screenshots check bench clean

help:  ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' Makefile

setup: $(STAMP)  ## make .venv and install what is missing

demo: $(STAMP)  ## fine-tune the tiny model of examples/demo on two CPU ranks
	$(BIN)/python examples/demo/run.py $(ARGS)

test: ARGS ?= -m "not slow"
test: $(STAMP) $(TRITON_STAMP)  ## run the tests, all but the slow ones
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder $(ARGS)

screenshots: $(STAMP)  ## make docs/img/*.png anew: the pictures of the web UI's pages
	LORASHARD_SCREENSHOTS=1 $(BIN)/python -m pytest $(addprefix tests/browser/test_,looks.py chat_page.py story.py) $(ARGS)

check: $(STAMP)  ## check format, lint, spelling, import order and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell -D - -D docs/words.txt
	$(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/mypy

bench: $(STAMP)  ## time lorashard and its peers on one model
	$(BIN)/python benchmarks/peers.py $(ARGS)

clean:  ## delete caches and build leftovers; .venv and runs/ stay
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

$(TRITON_STAMP): | $(STAMP)
	@rm -rf .venv/triton
	$(BIN)/python -m pip install --no-deps --target .venv/triton $(TRITON) && touch $@ || \
	    echo "Triton cannot be installed here: the tests of its kernels skip." >&2

$(STAMP): pyproject.toml constraints.txt
	@set -e; \
	if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	    for python in $(or $(PYTHON),python3 python3.13 python3.12 python3.11) none; do \
	        if [ $$python = none ]; then \
	            echo "lorashard needs Python 3.11 or newer; found $$($(or $(PYTHON),python3) --version 2>&1 || true)." >&2; \
	            echo "Install one, or name it: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)" >&2; \
	            exit 1; \
	        fi; \
	        if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then break; fi; \
	    done; \
	    $$python -m venv --clear .venv || { \
	        rm -rf .venv; \
	        echo "$$python cannot make .venv; on Debian and Ubuntu: apt install python3-venv" >&2; \
	        exit 1; \
	    }; \
	fi
	$(BIN)/python -m pip install $(TORCH) -c constraints.txt
	$(BIN)/python -m pip install -e '.[dev,quant,ui]' -c constraints.txt
	@touch $@
