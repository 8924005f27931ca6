#!/bin/sh
# Generates the Go code of the API into gen/, and builds the programs into bin/, with the packages of Debian.
set -eu
cd "$(dirname "$0")"
export GO111MODULE=off GOPATH="$PWD/gen:/usr/share/gocode"
rm -rf gen bin
mkdir -p gen/src bin
protoc -I ../../protos --go_out=paths=source_relative:gen/src --go-grpc_out=paths=source_relative:gen/src \
    ../../protos/stagemesh/v1/*.proto
go vet ./hello ./reattach
go build -o bin/ ./hello ./reattach
