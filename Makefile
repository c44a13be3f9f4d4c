SHELL := /bin/bash
.DEFAULT_GOAL := help

GOLANGCI := v2.15.0
BIN := $(CURDIR)/.bin

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: ## watch a read model stay exact while deliveries are doubled and processes killed (SQLite, nothing to install)
	@mkdir -p $(BIN)
	go build -o $(BIN)/reviews ./examples/reviews
	$(BIN)/reviews demo $(ARGS)

# What is missing and can be installed is installed. The servers of the fault suite are always its own. If Redis, pgbouncer or a browser is missing and cannot be installed, its
# tests are skipped, and reported as skipped.
test: $(if $(RACE),gcc) postgres ## every test, and each fault for some seconds; says where it is, and ends with what passed, failed and was skipped (RACE=1: with the race detector)
	@mkdir -p $(BIN)
	@for tool in redis pgbouncer browser; do $(MAKE) -s $$tool || KINORA_SKIP="$$KINORA_SKIP,$$tool"; done; export KINORA_SKIP; \
	case ",$$KINORA_SKIP," in *,postgres,*) ;; *) KINORA_POSTGRES= $(MAKE) -s postgres || exit 1;; esac; \
	go run ./internal/testrun $(if $(RACE),-race) $(ARGS)

steady: ## make test ten times from clean clones of a commit: six times warm, twice cold, twice next to busy loops; continues, and writes tests/steady.json (ARGS="-commit C -runs warm,cold")
	go run ./internal/steady $(ARGS)

# apt installs Debian packages, if it may.
apt = [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null && echo "installing $(1)" && \
	apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(1) > /dev/null

gcc: # the race detector needs cgo
	@command -v gcc > /dev/null || { $(call apt,gcc libc6-dev); } || \
	{ echo "the race detector needs a C compiler: install gcc"; exit 1; }

# Tests start private servers of their own from the installed binaries, unless KINORA_POSTGRES names one.
postgres:
	@[ -n "$$KINORA_POSTGRES" ] || ls /usr/lib/postgresql/*/bin/postgres > /dev/null 2>&1 || command -v postgres > /dev/null || \
	case ",$$KINORA_SKIP," in *,postgres,*) true;; *) false;; esac || \
	{ $(call apt,postgresql-common) && mkdir -p /etc/postgresql-common && \
	echo "create_main_cluster = false" >> /etc/postgresql-common/createcluster.conf && $(call apt,postgresql); } || \
	{ echo "the tests need PostgreSQL: install the package postgresql, or name a server in KINORA_POSTGRES (the fault suite needs the package), or set KINORA_SKIP=postgres"; exit 1; }

# Some tests go through a pooler in transaction mode, private ones as well. The package would start a service of its own.
pgbouncer:
	@command -v pgbouncer > /dev/null || [ -x /usr/sbin/pgbouncer ] || \
	case ",$$KINORA_SKIP," in *,pgbouncer,*|*,postgres,*) true;; *) false;; esac || \
	{ $(call apt,pgbouncer) && { [ ! -d /run/systemd/system ] || systemctl disable --now pgbouncer > /dev/null 2>&1 || true; }; } || \
	{ echo "the tests need pgbouncer: install the package pgbouncer, or set KINORA_SKIP=pgbouncer"; exit 1; }

# Tests start private servers. The package would start a service: on systemd it is masked until the package is there.
redis:
	@command -v redis-server > /dev/null || \
	case ",$$KINORA_SKIP," in *,redis,*) true;; *) false;; esac || \
	{ systemd() { [ ! -d /run/systemd/system ] || systemctl "$$@" redis-server > /dev/null 2>&1 || true; } && \
	systemd mask && $(call apt,redis-server) && systemd unmask && systemd disable; } || \
	{ echo "the tests need Redis: install the package redis-server, or set KINORA_SKIP=redis"; exit 1; }

# One test drives the page of the example in a headless browser.
browser:
	@command -v chromium > /dev/null || command -v chromium-browser > /dev/null || command -v google-chrome > /dev/null || \
	case ",$$KINORA_SKIP," in *,browser,*) true;; *) false;; esac || \
	{ $(call apt,chromium); } || \
	{ echo "the tests need a browser: install the package chromium, or set KINORA_SKIP=browser"; exit 1; }

# These three take an hour and more. Each writes its record after each entry, and goes on where it was interrupted: an entry of the
# present code that is ok does not run again (ARGS=-again runs all).
fault: server ## every fault on real processes, in an hour (CELL=kill,zombie for some, SEED=7 again); writes tests/fault/report.json
	go run ./tests/fault -cell "$(CELL)" -seed "$(or $(SEED),0)" $(ARGS)

long: server pgbouncer ## the long form of the tests that have one (see internal/longtest); writes tests/fault/long.json
	go run ./tests/fault -long $(ARGS)

fault-short: ## each fault for some seconds, in three minutes (CELL=, SEED=)
	@mkdir -p $(BIN)
	@case ",$$KINORA_SKIP," in *,postgres,*) echo "skipped: the fault suite"; exit 0;; esac; \
	$(MAKE) -s server && go run ./tests/fault -short -report $(BIN)/fault-short.json -cell "$(CELL)" -seed "$(or $(SEED),0)" $(ARGS)

mutants: server pgbouncer ## every mechanism taken out: its tests, and its cells of the fault suite, must fail; writes tests/fault/mutants.json
	go run ./tests/fault -mutants -seed "$(or $(SEED),0)" $(ARGS)

# The fault suite stops and fills up servers: they are always its own. KINORA_SKIP=redis skips its cell with Redis.
server:
	@KINORA_POSTGRES= KINORA_SKIP= $(MAKE) -s postgres
	@$(MAKE) -s redis

bench: postgres ## measure against peers and hand-written limits (ONLY=append for a part); writes bench/results.json, and figures
	cd bench && go run . -only "$(ONLY)"
	$(MAKE) -s figures

figures: ## write the figures and plots of the documents again, from bench/results.json, tests/fault/report.json and tests/fault/mutants.json
	go run ./internal/figures
	cd bench && go run ./plot

evidence: ## write docs/evidence.md: the tests, cells of the fault suite and mutants of each promise
	go run ./internal/promises

screenshots: browser postgres ## make the pictures of the operators' page in docs/images again, in four minutes
	cd cmd/kinora && KINORA_SCREENSHOTS=$(CURDIR)/docs/images go test -count=1 -run TestAPoisonedServiceIsRepairedFromThePage ./commands

# What an application can link: without kits and suites for tests, and the tools of this repository.
size: ## count the lines of the library, by directory
	@git ls-files '*.go' '*.sql' '*.lua' '*.html' '*.css' '*.js' | \
	grep -vE '_test\.go$$|^(bench|docs|examples|tests)/|/(goldentest|projectortest|providertest|postgrestest)/' | \
	grep -E '^[^/]*$$|^[^i]|^internal/(check|crash|errclass|eventtype|filters|pauses|presence|pulse|sweep|taskrow)/' | xargs wc -l | \
	awk '$$2 == "total" { next } { n = split($$2, p, "/"); d = n == 1 ? "." : p[1] (n > 2 ? "/" p[2] : ""); lines[d] += $$1; all += $$1 } \
	END { for (d in lines) printf "%6d %s\n", lines[d], d; printf "%6d in all\n", all }' | sort -k2

# The direct requirements of the root module, which every application inherits. A new one is a decision: see
# docs/adr/0017-the-root-module-is-the-library.md. What only examples, tests/bolt, tests/fault, tests/sqlkits or bench use belongs in their own go.mod.
REQUIRES := github.com/ThreeDotsLabs/watermill github.com/ThreeDotsLabs/watermill-sql/v3 github.com/go-json-experiment/json \
	github.com/google/uuid github.com/jackc/pgx/v5 github.com/redis/go-redis/v9 \
	github.com/stretchr/testify go.uber.org/goleak google.golang.org/protobuf modernc.org/libc modernc.org/sqlite

lint: $(BIN)/golangci-lint-$(GOLANGCI) ## formatting, vet, import arrows, the short list in .golangci.yaml, exported names, plain English, what each module requires
	$(BIN)/golangci-lint-$(GOLANGCI) run $$(go list -m -f '{{.Dir}}/...')
	go run ./internal/exported -max 509 $$(git ls-files '*.go' | grep -E '^(eventstore|outbox|projector|marker|claim|task)/' | grep -v internal/ | xargs -n1 dirname | sort -u)
	go run ./internal/plainwords
	@more=$$(GOWORK=off go list -m -f '{{if not (or .Main .Indirect)}}{{.Path}}{{end}}' all | grep -vxF "$$(printf '%s\n' '' $(REQUIRES))"); \
	[ -z "$$more" ] || { echo "go.mod requires modules that are not in REQUIRES of the Makefile:"; echo "$$more"; exit 1; }
	@for dir in $$(go list -m -f '{{.Dir}}'); do (cd $$dir && export GOWORK=off && go mod tidy -diff && go build -o /dev/null ./...) || exit 1; done
	@long=$$(git ls-files '*.go' | xargs wc -l | awk '$$2 != "total" && $$1 > 700'); \
	[ -z "$$long" ] || { echo "files past 700 lines:"; echo "$$long"; exit 1; }

$(BIN)/golangci-lint-$(GOLANGCI):
	GOBIN=$(BIN) GOFLAGS=-mod=mod go install github.com/golangci/golangci-lint/v2/cmd/golangci-lint@$(GOLANGCI)
	mv $(BIN)/golangci-lint $@

.PHONY: help demo test steady gcc postgres server redis pgbouncer browser fault long fault-short mutants bench figures evidence screenshots size lint
