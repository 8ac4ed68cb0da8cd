#!/usr/bin/env bash
# Installs the system packages that the tests use on Debian and Ubuntu. They are optional: what needs one that
# is missing says so, and runs slower or is skipped.
#
#   libopenblas0   the fast BLAS: MLX's CPU wheel links a reference BLAS, five times slower a training step
#   chromium       opens the HTML pages that a report writes
#
# On macOS nothing is needed. Without root, run it with sudo, or go on without the packages.
set -euo pipefail

command -v apt-get >/dev/null || { echo "system packages: no apt-get here, going on without"; exit 0; }

missing=()
for package in libopenblas0 chromium; do
    [[ "$(dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null)" == installed ]] ||
        missing+=("$package")
done
((${#missing[@]})) || { echo "system packages: all there"; exit 0; }
[[ "$(id -u)" == 0 ]] || { echo "system packages: not root, going on without ${missing[*]}"; exit 0; }

export DEBIAN_FRONTEND=noninteractive
apt-get update -qq || echo "system packages: no new package lists"
for package in "${missing[@]}"; do
    apt-get install -y -qq --no-install-recommends "$package" >/dev/null ||
        echo "system packages: could not install $package, going on without"
done
