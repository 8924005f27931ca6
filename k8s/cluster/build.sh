#!/bin/sh
# Builds Kubernetes 1.20 from Debian's source package into FOLDER/bin. Takes about 15 minutes on 2 cores.
# Usage: build.sh FOLDER
set -eu
mkdir -p "$1"
folder=$(realpath "$1")
own=$(realpath "$(dirname "$0")")/go
version=v1.20.2
commands="kube-apiserver kube-controller-manager kube-scheduler kubelet kube-proxy kubectl pause probe"
work=$folder/build

rm -rf "$work"
mkdir -p "$work/sources" "$work/lists/partial"
sed 's/^Types: deb$/Types: deb-src/' /etc/apt/sources.list.d/debian.sources >"$work/sources/debian.sources"
apt() { apt-get -q -o Dir::Etc::sourcelist=/dev/null -o Dir::Etc::sourceparts="$work/sources" -o Dir::State::lists="$work/lists" "$@"; }
cd "$work"
apt update
apt source --download-only kubernetes
dpkg-source --no-check -x kubernetes_*.dsc kubernetes
cd kubernetes

# The vendored reflect2 1.0.1 reads fields of the runtime that Go 1.18 removed.
rm -r vendor/github.com/modern-go/reflect2
cp -r /usr/share/gocode/src/github.com/modern-go/reflect2 vendor/github.com/modern-go/reflect2

# Our own programs use Kubernetes' libraries.
cp -r "$own/pause" "$own/probe" cmd/

cat >version <<END
KUBE_GIT_COMMIT='debian'
KUBE_GIT_TREE_STATE='archive'
KUBE_GIT_VERSION='$version'
KUBE_GIT_MAJOR='1'
KUBE_GIT_MINOR='20'
END
export PATH="/usr/lib/go-1.19/bin:$PATH" GOCACHE="$work/cache" GOFLAGS=-buildvcs=false CGO_ENABLED=0 KUBE_GIT_VERSION_FILE="$PWD/version"
what=""
for command in $commands; do what="$what cmd/$command"; done
make WHAT="$what"

mkdir -p "$folder/bin"
for command in $commands; do install -s "_output/bin/$command" "$folder/bin/$command"; done

rm -rf "$work"
