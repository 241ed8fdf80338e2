#!/usr/bin/env bash
# Installs what a node of the test cluster and the tests of pages need from Debian's archive, where it is missing. Needs root and apt.
set -euo pipefail
packages=(containerd runc containernetworking-plugins nftables iptables conntrack buildah debootstrap haproxy chromium)
missing=()
for package in "${packages[@]}"; do
    dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed || missing+=("$package")
done
if [ "${#missing[@]}" -eq 0 ]; then
    exit 0
fi
echo "installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
apt-get -o DPkg::Lock::Timeout=300 -qq update
apt-get -o DPkg::Lock::Timeout=300 -qq install --yes --no-install-recommends "${missing[@]}" >/dev/null
