# A replica of a stage, with all engines. It is built in two variants, at the root of the repository:
#   stage-cpu:  --build-arg VARIANT=cpu
#   stage-cuda: --build-arg VARIANT=cuda
# The base needs a digest, because a tag can move: --build-arg BASE_DIGEST=sha256:…
ARG BASE=docker.io/library/debian:12.11-slim
ARG BASE_DIGEST=BASE_DIGEST-is-missing
ARG VARIANT=cpu

FROM ${BASE}@${BASE_DIGEST} AS cpu
# libnuma and libgomp are needed by vLLM for CPUs.
# The base fixes the release of Debian. A pinned version would disappear from it with the next security update.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates libgomp1 libnuma1 python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --user-group --home-dir /var/lib/stagemesh --create-home --shell /usr/sbin/nologin stagemesh

FROM cpu AS cuda
# Triton compiles launchers of its kernels at run time. The CUDA libraries are Python packages.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev python3-dev \
    && rm -rf /var/lib/apt/lists/*
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility

# hadolint ignore=DL3006
FROM ${VARIANT} AS dependencies
ARG VARIANT
# Where pip finds the CPU build of torch, if its index lacks it. Only files whose hashes are locked are installed.
ARG PIP_EXTRA_INDEX_URL
WORKDIR /build
COPY requirements/${VARIANT}.txt requirements/
RUN python3 -m venv /opt/stagemesh \
    && /opt/stagemesh/bin/pip install --no-cache-dir --require-hashes --no-deps \
        --requirement requirements/${VARIANT}.txt

FROM dependencies AS project
COPY . .
RUN /opt/stagemesh/bin/pip install --no-cache-dir --require-hashes --no-deps --requirement requirements/build.txt \
    && /opt/stagemesh/bin/pip install --no-cache-dir --no-deps --no-build-isolation --prefix /project .

# Stagemesh is a layer of its own, so that a new version does not transfer the dependencies again.
FROM dependencies
ARG BASE
ARG BASE_DIGEST
ARG VARIANT
ARG VERSION=0.1.0
ARG REVISION=unknown
ARG SOURCE=unknown
LABEL org.opencontainers.image.title="stagemesh-stage-${VARIANT}" \
      org.opencontainers.image.description="A replica of a stage of Stagemesh, with all engines" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.source="${SOURCE}" \
      org.opencontainers.image.base.name="${BASE}" \
      org.opencontainers.image.base.digest="${BASE_DIGEST}"
COPY --from=project /project /opt/stagemesh
ENV PATH=/opt/stagemesh/bin:/usr/local/bin:/usr/bin:/bin \
    HOME=/var/lib/stagemesh \
    STAGEMESH_HOME=/var/lib/stagemesh
WORKDIR /var/lib/stagemesh
USER 10001:10001
EXPOSE 50051
# `stagemesh serve` replaces itself with the server, which therefore is process 1 and receives SIGTERM.
ENTRYPOINT ["stagemesh"]
