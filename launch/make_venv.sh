#!/bin/sh
# Makes a virtual environment if it is missing and installs this project into it, editable.
# usage: make_venv.sh PYTHON VENV REQUIREMENT     (REQUIREMENT is "." or ".[dev]")
set -eu
python=$1 venv=$2 requirement=$3

fail() {
    echo "k3jax: $1" >&2
    exit 1
}

if [ ! -x "$venv/bin/python" ] || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    command -v "$python" >/dev/null 2>&1 || fail "$python not found; install Python 3.11 or newer, or name one with PYTHON=..."
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        fail "$("$python" --version 2>&1) is too old; Python 3.11 or newer is needed, name one with PYTHON=..."
    "$python" -c 'import venv, ensurepip' 2>/dev/null ||
        fail "$python has no venv module; install it (Debian: apt install python3-venv)"
    echo "Making $venv from $("$python" --version)"
    "$python" -m venv "$venv"
fi
echo "Installing k3jax ($requirement) into $venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --editable "$requirement" ||
    fail "pip could not install $requirement; its message is above"
