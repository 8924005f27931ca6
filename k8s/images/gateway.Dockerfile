# A gateway, which serves OpenAI's API, and the command line. It contains no torch, no shell and no package manager.
# Build it at the root of the repository. Both bases need a digest, because a tag can move:
#   --build-arg BUILD_BASE_DIGEST=sha256:… --build-arg BASE_DIGEST=sha256:…
# Both bases must have the same Python at the same path: the environment of the first is copied into the second.
ARG BUILD_BASE=docker.io/library/debian:12.11-slim
ARG BUILD_BASE_DIGEST=BUILD_BASE_DIGEST-is-missing
# This repository has no tags for versions. Only a digest pins it.
ARG BASE=gcr.io/distroless/python3-debian12:nonroot
ARG BASE_DIGEST=BASE_DIGEST-is-missing

FROM ${BUILD_BASE}@${BUILD_BASE_DIGEST} AS dependencies
# The base fixes the release of Debian. A pinned version would disappear from it with the next security update.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends binutils python3-pip python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /build
COPY requirements/gateway.txt requirements/
COPY k8s/images/remove_unused.py .
RUN python3 -m venv --without-pip /opt/stagemesh \
    && python3 -m pip --python /opt/stagemesh install --no-cache-dir --require-hashes --no-deps \
        --requirement requirements/gateway.txt \
    && python3 remove_unused.py /opt/stagemesh

# A layer of its own, so that a new version of Stagemesh does not transfer its dependencies again.
FROM dependencies AS project
COPY . .
RUN python3 -m pip --python /opt/stagemesh install --no-cache-dir --require-hashes --no-deps \
        --requirement requirements/build.txt \
    && python3 -m pip --python /opt/stagemesh install --no-cache-dir --no-deps --no-build-isolation --prefix /project .

FROM ${BASE}@${BASE_DIGEST}
ARG BASE
ARG BASE_DIGEST
ARG VERSION=0.1.0
ARG REVISION=unknown
ARG SOURCE=unknown
LABEL org.opencontainers.image.title="stagemesh-gateway" \
      org.opencontainers.image.description="A gateway of Stagemesh, which serves the API of OpenAI" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.source="${SOURCE}" \
      org.opencontainers.image.base.name="${BASE}" \
      org.opencontainers.image.base.digest="${BASE_DIGEST}"
COPY --from=dependencies /opt/stagemesh /opt/stagemesh
COPY --from=project /project /opt/stagemesh
ENV PATH=/opt/stagemesh/bin:/usr/local/bin:/usr/bin:/bin \
    HOME=/var/lib/stagemesh \
    STAGEMESH_HOME=/var/lib/stagemesh
WORKDIR /var/lib/stagemesh
USER 10001:10001
EXPOSE 8000
# `stagemesh gateway` replaces itself with the server, which therefore is process 1 and receives SIGTERM.
ENTRYPOINT ["stagemesh"]
