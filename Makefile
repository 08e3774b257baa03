# `make eval` runs the main job and `make test` the checks; both set up .venv first.
PYTHON ?= python3
VENV ?= .venv

BIN := $(VENV)/bin

.PHONY: eval test lint

eval: $(VENV)/installed
	$(BIN)/oretrofit eval --seeds 3

test: lint
	$(BIN)/python -m pytest -q --numprocesses 2 --dist loadfile

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	MYPYPATH=$(VENV)/typing $(BIN)/mypy -p oretrofit

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -e ".[dev]"
	# The root is the package, whatever its folder is called: give the type checker its name.
	mkdir -p $(VENV)/typing && ln -sfn "$(CURDIR)" $(VENV)/typing/oretrofit
	touch $@
