#!/usr/bin/env bash
# Installs full pins into .venv: tools/setup.sh STAMP REQUIREMENTS...
# Makes .venv, system libraries, git and DVC where they are missing. Output goes to run/setup.log and
# is shown when something fails; .venv/STAMP is touched last, so a broken set-up is taken up again.
set -euo pipefail
cd "$(dirname "$0")/.."
stamp=$1
shift
python=${PYTHON:-python3}
log=run/setup.log
mkdir -p run/prefect
: >"$log"
started=$SECONDS

fail() {
    printf 'set-up: error: %s\n' "$1" >&2
    exit 1
}

step() { # step MESSAGE COMMAND...: runs it quietly; its output is shown when it fails
    printf 'set-up: %s\n' "$1"
    shift
    "$@" >>"$log" 2>&1 || {
        tail -n 25 "$log" >&2
        return 1
    }
}

install_debian() { # install_debian WHAT_FOR PACKAGE...
    local purpose=$1
    shift
    if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
        step "installing $* ($purpose)" apt-get update -q &&
            step "  ..." env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "$@" ||
            fail "apt-get could not install $* ($purpose); install them and run again"
    else
        fail "missing system packages ($purpose): install $* (Debian's names), for example with: sudo apt-get install $*"
    fi
}

command -v "$python" >/dev/null || fail "no $python on PATH; install Python 3.11 or set PYTHON=/path/to/python3.11"
"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' ||
    fail "the pins are for Python 3.11, found $("$python" --version); set PYTHON=/path/to/python3.11"

missing=()
libraries=$(PATH=$PATH:/sbin:/usr/sbin ldconfig -p 2>/dev/null || true)
for library in libibverbs.so.1:libibverbs1 librdmacm.so.1:librdmacm1 libnuma.so.1:libnuma1; do
    grep -q "${library%%:*}" <<<"$libraries" || missing+=("${library##*:}")
done
[ ${#missing[@]} -eq 0 ] || install_debian "Mooncake and vLLM load them" "${missing[@]}"
command -v git >/dev/null || install_debian "DVC needs it" git
"$python" -c 'import ensurepip, venv' 2>/dev/null || install_debian "makes .venv" python3-venv

[ -x .venv/bin/python ] || step "making .venv" "$python" -m venv .venv
arguments=()
for file in "$@"; do
    arguments+=(-r "$file")
done
# --no-deps: the pins are complete, and leave out what must not be there (torchvision for CUDA).
step "installing $(cat "$@" | grep -c '==') packages ($*)" \
    .venv/bin/python -m pip install --no-deps --no-compile --disable-pip-version-check --no-input --progress-bar off "${arguments[@]}" || {
    if grep -Eq '^ERROR:.* torch==[0-9.]+\+cpu' "$log"; then
        fail "pip finds no torch +cpu; add PyTorch's CPU wheel index to pip's configuration (extra-index-url) and run again"
    fi
    fail "pip could not install the pins; all of its output is in $log"
}
# Some packages carry files for other versions of Python, which do not compile: that is no fault.
printf 'set-up: compiling byte code\n'
.venv/bin/python -m compileall -q -j 0 .venv/lib >>"$log" 2>&1 || true

git rev-parse --git-dir >/dev/null 2>&1 || step "git init" git init
[ -d .dvc ] || step "dvc init" .venv/bin/dvc init -q
touch ".venv/$stamp"
printf 'set-up: %d s\n' $((SECONDS - started))
