# virtshim: each pod is a virtual machine. All targets want root on Debian 12 or Ubuntu.
PYTHON := .venv/bin/python
DIR ?= /var/lib/virtshim-up

.PHONY: demo test test-all test-machine install-machine soak bench bench-compare setup lock guest cloud-init debian-guest vfio-machine release dashboard-assets dashboard-picture up down deb deb-packages e2e-install e2e-release-upgrade image image-base deb-base docs lint house clean

demo: guest            ## a VM pod through the CRI socket, step by step
	$(PYTHON) deploy/demo.py

# Which tests; with the default, the minutes of a run that passes go to build/test_minutes.json.
TESTS ?= tests
BEGAN := $(shell date +%s.%N)
gate = $(PYTHON) -m pytest -p tests.gate --apart $(if $(filter-out tests,$(TESTS)),,--began=$(BEGAN)) $(1) $(PYTEST_ARGS) $(TESTS)

test: test-machine     ## what a change has to pass: every area, sampled where it is long. TESTS="tests/e2e tests/faults": some of it
	$(call gate)

test-all: MACHINES += install-machine image-base deb-base
test-all: test-machine ## every test, every kill point, the package on a real Debian: before a release
	$(call gate,--all)

MACHINES := vfio-machine debian-guest cloud-init deb-packages
test-machine:          # what the tests need of this machine; two builds at a time, in one make: what they share is made once
	+@$(MAKE) -j 2 --output-sync=line $(MACHINES)

install-machine: guest # the real Debian that the package is installed on: build/install
	tests/install/machine/build.sh build/install

e2e-install: install-machine ## the package on a real Debian, emulated: installed, upgraded under a VM, rebooted, purged; some minutes
	$(PYTHON) -m tests.install

e2e-release-upgrade: setup ## a Debian 12 with the package becomes a Debian 13, by real apt in a directory; asks Debian's archive
	tests/install/release_upgrade.sh

soak: guest            ## pod cycles with random kills; SOAK_ARGS="--minutes 60"
	$(PYTHON) -m tests.soak $(SOAK_ARGS)

bench: guest           ## measures the promises; writes bench/results.json
	$(PYTHON) -m tests.bench $(BENCH_ARGS)

bench-compare: guest   ## the same of revision REV and of this checkout, in turns; writes bench/compare.json
	$(PYTHON) -m tests.bench.compare $(BENCH_ARGS) $(REV)

LOCK := .venv/bin/pip-compile --quiet --generate-hashes --allow-unsafe --strip-extras --no-header --no-emit-index-url \
  --no-emit-find-links --no-emit-trusted-host --no-emit-options

lock:                  ## the locks, of what pyproject.toml and requirements-build.in ask for; asks the package index
	$(LOCK) --extra dev --output-file requirements.lock pyproject.toml
	$(LOCK) --constraint requirements.lock --output-file requirements-run.lock pyproject.toml
	$(LOCK) --constraint requirements.lock --output-file requirements-build.lock requirements-build.in

setup:                 ## system packages, machine preparation, .venv
	deploy/setup.sh

guest: setup           ## the small guests: build/guest.qcow2, build/null.qcow2
	deploy/guest/build.sh build/guest.qcow2
	deploy/guest/build-null.sh build/null.qcow2

cloud-init: setup      # what tests read our network-config with: build/cloud-init
	tests/integration/guest/cloudinit/fetch.sh build/cloud-init

debian-guest: guest    ## a Debian of Debian's own packages: build/debian.qcow2
	tests/e2e/debian/build.sh build/debian.qcow2

vfio-machine: guest    ## what the passthrough tests boot: build/vfio
	tests/vfio/machine/build.sh build/vfio

deb: setup             ## a node's Debian package, in dist; FOR="bookworm trixie noble": for other distributions; VERSION=... for another one
	$(if $(FOR),for suite in $(FOR); do deploy/deb/elsewhere.sh $$suite dist $(VERSION) || exit 1; done,deploy/deb/build.sh dist $(VERSION))

deb-base: setup        # what the package for the other Debian is built in: its test has no network either
	deploy/deb/elsewhere.sh trixie --packages

image-base: setup      # what the image takes from Debian: its tests have no network either
	deploy/image/build.sh --base

deb-packages: setup    # what the package brings of the package index: its tests have no network
	deploy/deb/build.sh --packages

OWN_VERSION = $(shell sed -n 's/^version = "\(.*\)"$$/\1/p' pyproject.toml)
image: deb             ## an image that puts virtshim onto nodes (deploy/kustomize/overlays/mixed): dist/virtshim-image_VERSION.tar
	deploy/image/build.sh dist/$$(deploy/deb/build.sh --name $(VERSION)) dist/virtshim-image_$(or $(VERSION),$(OWN_VERSION)).tar

release: setup         ## all that a release publishes, in a new directory: dist/release; URL=https://... FOR="bookworm trixie noble"
	FOR="$(FOR)" deploy/release/build.sh dist/release $(URL)

dashboard-assets:      ## the dashboard's page: build/dashboard
	deploy/dashboard.sh

dashboard-picture: setup ## docs/dashboard.png, of a node that is made up
	PYTHONPATH=.:tests:deploy $(PYTHON) tests/integration/operator/dashboard/picture.py docs/dashboard.png

up: setup              ## a node for trying things, in the foreground below DIR
	.venv/bin/virtshim up --dir $(DIR)

down:                  ## removes all that `make up` made
	.venv/bin/virtshim down --dir $(DIR)

docs: setup            ## the documentation site: build/site/index.html
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict --config-file deploy/docs_site/mkdocs.yml

lint: setup            ## formats, then checks style, types and import contracts
	.venv/bin/ruff format . && $(PYTHON) -m pytest tests/policy

house:                 ## how large it is: files and lines of Python, of the product (criproto is generated) and of the tests
	@for part in "virtshim tapmanager vmwrapper" tests; do \
	  find $$part -name '*.py' -print0 | sort -z | xargs -0 cat | wc -l | \
	    xargs printf '%-28s %5d files %7d lines\n' "$$part" "$$(find $$part -name '*.py' | wc -l)"; \
	done

clean:
	rm -rf build dist bench/results.json
