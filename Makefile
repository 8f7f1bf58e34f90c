# uSMC. `make demo` shows it, `make test` proves it; both install what they need on a fresh Debian 12.

CARGO ?= cargo
PREFIX ?= /usr/local
DESTDIR ?=

BUILD_DEPS := gcc:gcc libc6-dev:- binutils:nm
TEST_DEPS := liburing-dev:- python3:/usr/bin/python3 curl:curl redis-server:redis-server redis-tools:redis-cli \
	nginx-light:nginx wrk:wrk sockperf:sockperf memcached:memcached postgresql:- \
	rsync:rsync openssh-server:sshd openssh-client:ssh openssl:openssl nodejs:node default-jdk-headless:javac
DEMO_DEPS := python3:python3 redis-server:redis-server redis-tools:redis-benchmark \
	nginx-light:nginx wrk:wrk sockperf:sockperf

.PHONY: all build test test-loom test-tsan torture storm lint demo install test-deps demo-deps python-suite suites clean

# For `make torture`: how many random programs. For `make storm`: how many events. For both: the first seed.
PROGRAMS ?= 50000
EVENTS ?= 10000
SEED ?= $(shell date +%s)

all: build

build:
	$(CARGO) build --release --locked

# Unit, property and hostile-peer tests, the preloaded programs, and whole processes.
test: test-deps build
	$(CARGO) test --release --locked --workspace --no-fail-fast

# The models of the rings, doorbells, the handshake and the span switch: weak memory by loom, schedules at
# random by shuttle. About two minutes.
test-loom:
	RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=target/loom CARGO_PROFILE_RELEASE_LTO=off \
		$(CARGO) test --release --locked -p usmc-shm --test loom -- --test-threads=1
	RUSTFLAGS="--cfg shuttle" CARGO_TARGET_DIR=target/shuttle CARGO_PROFILE_RELEASE_LTO=off \
		$(CARGO) test --release --locked -p usmc-shm --test shuttle -- --test-threads=1

# The ring on real threads under ThreadSanitizer; says so and succeeds where there is no nightly toolchain.
test-tsan:
	crates/usmc-shm/tests/sanitize.sh tsan

# Random programs of socket operations, over TCP and under uSMC: what a program can observe is the same. A find is
# printed as the shortest program that shows it. `make test` runs two thousand.
torture: build
	USMC_TORTURE=$(PROGRAMS) USMC_TORTURE_SEED=$(SEED) $(CARGO) test --release --locked -p usmc-tests --test torture \
		random -- --nocapture

# Kills, stops, forks and execs at random among processes that move streams. `make test` has a storm of a thousand.
storm: build
	USMC_STORM=$(EVENTS) USMC_STORM_SEED=$(SEED) $(CARGO) test --release --locked -p usmc-tests --test storm -- --nocapture

lint:
	$(CARGO) fmt --all --check
	$(CARGO) clippy --release --locked --workspace --all-targets -- -D warnings

demo: demo-deps build
	python3 demo/demo.py

# CPython's own socket tests, with and without the library: same outcomes. MODULES: some of them only.
python-suite: test-deps build
	sh tests/python-suite.sh $(MODULES)

# libevent's, redis' and PostgreSQL's test suites, from Debian's source packages, likewise, and Go as a control. SUITES: some of them only.
suites: build
	sh tests/suites.sh $(SUITES)

install: build
	install -D -m 755 target/release/usmc $(DESTDIR)$(PREFIX)/bin/usmc
	install -D -m 755 target/release/libusmc_preload.so $(DESTDIR)$(PREFIX)/lib/libusmc_preload.so
	for page in docs/man/*.[1-8]; do \
		section=$${page##*.}; \
		install -D -m 644 $$page $(DESTDIR)$(PREFIX)/share/man/man$$section/$${page##*/}; \
	done

test-deps:
	@sh .ci/packages $(BUILD_DEPS) $(TEST_DEPS)

demo-deps:
	@sh .ci/packages $(BUILD_DEPS) $(DEMO_DEPS)

clean:
	$(CARGO) clean
