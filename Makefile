# make quickstart   sets up, trains a small K3-shaped model on text of the Python installation, shows the result
# make test         sets up, then lint and the fast tests
# PYTHON=... chooses the interpreter that .venv is made from.

PYTHON ?= python3
VENV ?= .venv
RUN ?= runs/quickstart
WORKERS ?= 2
BIN := $(VENV)/bin

.PHONY: quickstart test test-slow lint clean-venv

quickstart: $(VENV)/.core
	$(BIN)/k3 train --gin_file=experiments/quickstart.gin --workdir=$(RUN)
	$(BIN)/k3 eval --workdir=$(RUN)
	$(BIN)/k3 generate --workdir=$(RUN) --prompt="def " --max_tokens=200

test: lint
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow" tests

test-slow: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m slow tests

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean-venv:
	rm -rf $(VENV)

$(VENV)/.core: setup.cfg pyproject.toml
	@sh launch/make_venv.sh "$(PYTHON)" "$(VENV)" .
	@touch $@

$(VENV)/.dev: setup.cfg pyproject.toml
	@sh launch/make_venv.sh "$(PYTHON)" "$(VENV)" ".[dev]"
	@touch $(VENV)/.core $@
