# Two commands: `make lab` opens the lab, `make test` proves it. Each makes .venv when it is missing.
# A stamp carries the checkout's place, since an editable install holds that path.

VENV  := .venv
RUN   := $(VENV)/bin/python
PLACE := $(shell pwd | cksum | cut -d' ' -f1)
LAB   := $(VENV)/.lab-$(PLACE)
TEST  := $(VENV)/.test-$(PLACE)

SUITABLE := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
# The first that is new enough and has venv: the usual one, else the newest. `make PYTHON=… lab` decides otherwise.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c '$(SUITABLE)' >/dev/null 2>&1 && { echo $$p; break; }; done)

# Two processes: of the tests each takes a half, and then what the other has left; of the notebooks one at a time.
BESIDE := --numprocesses=2
# So each has one core; ranks have a number of threads of their own.
test soak: export OMP_NUM_THREADS := 1
# Hundreds of processes import the lab: they compile it once (into __pycache__, which git ignores).
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help lab test lint soak notebooks clean
.DELETE_ON_ERROR:

help:
	@echo 'make lab        open the lab in JupyterLab'
	@echo 'make test       unit tests, then every notebook'
	@echo 'make lint       ruff and mypy'
	@echo 'make soak       the tests that repeat for minutes'
	@echo 'make notebooks  run every notebook again and save it'
	@echo 'make clean      remove .venv and caches (work/ stays)'

lab: $(LAB)
	$(RUN) -m labkit.cli lab

test: $(TEST)
	$(RUN) -m pytest $(BESIDE) --dist=worksteal -m 'not soak and not alone' --durations=15
	$(RUN) -m pytest -m 'alone and not soak' --durations=5 $$(grep -rl --include='*.py' 'mark\.alone' tests)
	LABKIT_STATIC=1 $(RUN) -m pytest $(BESIDE) --dist=loadfile --nbval --nbval-current-env --nbval-cell-timeout=120 --durations=5 notebooks

lint: $(TEST)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

soak: $(TEST)
	$(RUN) -m pytest $(BESIDE) --dist=worksteal -m 'soak and not alone' --durations=15
	$(RUN) -m pytest $(BESIDE) --dist=worksteal -m 'hypothesis and not soak and not alone' --hypothesis-profile=explore
	$(RUN) -m pytest -m 'soak and alone' --durations=15

notebooks: $(TEST)
	LABKIT_STATIC=1 $(RUN) -m labkit.execute notebooks

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find labkit tests notebooks -name __pycache__ -prune -exec rm -rf {} +
	find notebooks -name .ipynb_checkpoints -prune -exec rm -rf {} +

# `-m pip`, not `bin/pip`: a script in bin/ names its interpreter by a path that dies when the checkout moves.
$(LAB): $(RUN) pyproject.toml
	@echo 'Installing into $(VENV); the first time takes some minutes.'
	$(RUN) -m pip install -qq --editable .
	@touch $@

$(TEST): $(RUN) pyproject.toml
	@echo 'Installing into $(VENV); the first time takes some minutes.'
	$(RUN) -m pip install -qq --editable '.[test]'
	@touch $@ $(LAB)

# An order-only test would not see a link whose interpreter was uninstalled; make does, as a missing file.
$(RUN):
	@'$(PYTHON)' -c '$(SUITABLE)' 2>/dev/null || { \
		echo 'The lab needs Python 3.11 or newer with its venv module; found: '"$$($(or $(PYTHON),python3) -V 2>&1)."; \
		echo 'Install one (Debian, Ubuntu: apt install python3 python3-venv; macOS: brew install python@3.13),'; \
		echo 'or name it: make PYTHON=/path/to/python3.12 lab'; exit 1; } >&2
	@'$(PYTHON)' -m venv --clear $(VENV) || { rm -rf $(VENV); exit 1; }
	@$(RUN) -m pip install -qq --upgrade pip
