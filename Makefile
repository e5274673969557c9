# Two commands: `make demo` and `make test`. Both make the environment first.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
DEMO := .demo

.PHONY: demo test lint format lock clean

demo: $(VENV)/installed  ## Train, export, evaluate and report one policy, in a folder of its own.
	$(BIN)/quarl run --algo dqn --env CartPole-v1 --seed 0 --root $(DEMO)

test: $(VENV)/installed  ## Run the whole test suite.
	$(BIN)/pytest

lint: $(VENV)/installed  ## Check style, format and types.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/installed  ## Put the code in order.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The marker comes last: a half-made environment is made again.
$(VENV)/installed: requirements.txt setup.cfg pyproject.toml
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/pip install --quiet --requirement requirements.txt
	$(BIN)/pip install --quiet --no-deps --editable .
	touch $@

lock:  ## Resolve setup.cfg anew into requirements.txt.
	$(PYTHON) -m venv --clear .lock
	.lock/bin/pip install --quiet --editable '.[train,dev]'
	.lock/bin/pip freeze --exclude-editable > requirements.txt
	rm -rf .lock

clean:
	rm -rf $(VENV) $(DEMO) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
