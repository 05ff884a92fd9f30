# Two commands: `make run` reads streaming text from a real model, `make test` runs everything. Both set up what they need,
# once: the second `make run` needs no network and starts at once.
PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
PIP     = $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt
PROMPT ?= What is the capital of France?
export PROMPT  # through the environment: a quote or a backtick in it is text
CPU     = src/verbatim/backend/cpu
NATIVE  = pyproject.toml CMakeLists.txt $(wildcard src/verbatim/observe/probe/* $(CPU)/CMakeLists.txt $(CPU)/*.cpp $(CPU)/*.h $(CPU)/*.inc $(CPU)/*/*.cpp $(CPU)/*/*.h)
CHECKED = src tests bench examples

.PHONY: run chat test lint format soak clients bench clean config-keys

run: $(VENV)/.installed
	@$(BIN)/verbatim run "$$PROMPT"

chat: $(VENV)/.installed
	@$(BIN)/verbatim chat

test: lint
	$(BIN)/python -m pytest -m "not soak" -n 2 --dist loadfile

lint: $(VENV)/.dev
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/ruff format --check $(CHECKED)
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix $(CHECKED)
	$(BIN)/ruff format $(CHECKED)

soak: $(VENV)/.dev
	$(BIN)/python -m pytest -m soak --timeout 7200

clients: $(VENV)/.dev
	$(BIN)/python tests/server/client_setup.py

# docs/config-keys.md from the key tables; a test checks that it is current
config-keys: $(VENV)/.installed
	$(BIN)/python -m verbatim.model.keys_doc > docs/config-keys.md

bench: $(VENV)/.installed
	@$(BIN)/verbatim bench

clean:
	rm -rf $(VENV) build

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "verbatim needs Python 3.11 or later; say which with PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# The C++ sources are prerequisites: an edited kernel is rebuilt, an edited Python file needs nothing (the install is editable).
$(VENV)/.installed: $(NATIVE) constraints.txt | $(BIN)/python
	@echo "installing verbatim into $(VENV) (once; a minute or two)"
	@$(PIP) -e .
	@touch $@

# torch first and alone: transformers would otherwise be free to ask for another build of it, which is gigabytes.
$(VENV)/.dev: $(VENV)/.installed
	@echo "installing what the tests need into $(VENV) (once; a few minutes)"
	@$(PIP) torch==2.13.0
	@$(PIP) -e ".[dev]"
	@touch $@
