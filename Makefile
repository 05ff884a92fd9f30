# Two commands: `make run` reads streaming text from a real model, `make test` runs everything. Both set up what they need.
PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
PROMPT ?= What is the capital of France?
SOURCES = pyproject.toml CMakeLists.txt $(wildcard src/verbatim/backend/cpu/*.cpp src/verbatim/backend/cpu/*.h src/verbatim/backend/cpu/CMakeLists.txt)

.PHONY: run test soak lint format bench clean

run: $(VENV)/.installed
	@$(BIN)/verbatim run "$(PROMPT)"

test: $(VENV)/.dev lint
	$(BIN)/python -m pytest -m "not soak"

lint: $(VENV)/.dev
	$(BIN)/ruff check src tests bench examples
	$(BIN)/ruff format --check src tests bench examples
	$(BIN)/mypy

soak: $(VENV)/.dev
	$(BIN)/python -m pytest -m soak --timeout 7200

format: $(VENV)/.dev
	$(BIN)/ruff check --fix src tests bench examples
	$(BIN)/ruff format src tests bench examples

bench: $(VENV)/.installed
	@$(BIN)/verbatim bench

clean:
	rm -rf $(VENV) build

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python $(SOURCES)
	@echo "installing verbatim into $(VENV) (once; about a minute)"
	@$(BIN)/python -m pip install -q -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.installed
	@echo "installing what the tests need (once)"
	@$(BIN)/python -m pip install -q -e ".[dev]"
	@touch $@
