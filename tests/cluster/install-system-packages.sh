#!/usr/bin/env bash
# Installs Debian packages that are missing, where we may; says what is missing where we may not.
#   install-system-packages.sh tests            what the cluster of network namespaces needs; never fails, tests that
#                                               need what is missing are skipped, and say so
#   install-system-packages.sh python PYTHON    a Python with venv, if PYTHON is empty; fails when there is none
set -euo pipefail

install() {
    if [ "$(id -u)" -ne 0 ]; then
        echo "not root, so not installed: apt-get install $*" >&2
        return 1
    fi
    if ! command -v apt-get >/dev/null; then
        echo "no apt-get here; wanted, under its Debian name: $*" >&2
        return 1
    fi
    echo "installing $*"
    local policy=/usr/sbin/policy-rc.d made='' log
    log="$(mktemp)"
    # Answering 101 keeps a package from starting its daemon on this machine.
    if [ ! -e "$policy" ]; then
        printf '#!/bin/sh\nexit 101\n' >"$policy"
        chmod 755 "$policy"
        made=1
    fi
    local status=0
    export DEBIAN_FRONTEND=noninteractive
    apt-get install -y --no-install-recommends "$@" </dev/null >"$log" 2>&1 || {
        apt-get update </dev/null >>"$log" 2>&1 && apt-get install -y --no-install-recommends "$@" </dev/null >>"$log" 2>&1
    } || status=$?
    if [ "$status" -ne 0 ]; then
        tail -n 20 "$log" >&2
        echo "apt-get could not install: $*" >&2
    fi
    rm -f "$log"
    [ -z "$made" ] || rm -f "$policy"
    return "$status"
}

case "${1:-}" in
tests)
    PATH="$PATH:/usr/sbin:/sbin"
    missing=()
    while read -r program package; do
        command -v "$program" >/dev/null || missing+=("$package")
    done <<'LIST'
sshd openssh-server
ssh openssh-client
ip iproute2
nft nftables
tmux tmux
zsh zsh
fish fish
clush clustershell
git git
etcd etcd-server
slurmctld slurmctld
slurmd slurmd
srun slurm-client
munged munge
spin spin
gcc gcc
podman podman
conmon conmon
runc runc
bwrap bubblewrap
LIST
    # Together is quicker; where one is not to be had, the others still are.
    if [ ${#missing[@]} -gt 0 ] && ! install "${missing[@]}"; then
        for package in "${missing[@]}"; do
            install "$package" || echo "without $package some tests will be skipped" >&2
        done
    fi
    ;;
python)
    if [ -z "${2:-}" ]; then
        install python3 python3-venv
        python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
            echo "Python 3.10 or newer is needed, here is $(python3 -V)" >&2
            exit 1
        }
    fi
    ;;
*)
    echo "usage: $0 tests | python PYTHON" >&2
    exit 2
    ;;
esac
