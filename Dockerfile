# One build, a small target a process: broker, proxy, admin; and tidemill, which is all of them.
#
#     docker build -t tidemill:dev .                    # all processes in one image
#     docker build --target broker -t tidemill-broker:dev .
#
# The interpreter is the one of python:3.11-slim, which is built with profile-guided and link-time
# optimisation (--enable-optimizations --with-lto in its `sysconfig.get_config_var("CONFIG_ARGS")`,
# which is kept in /opt/tidemill/interpreter); another build of 3.11 was 12 % slower a send. It is
# copied onto Debian alone: an image that serves strangers needs neither pip nor headers.

ARG PYTHON_IMAGE=python:3.11-slim-bookworm
ARG DEBIAN_IMAGE=debian:bookworm-slim

# ---------------------------------------------------------------- what building needs, in no image

FROM ${PYTHON_IMAGE} AS tools
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
RUN apt-get update \
 && apt-get install -y --no-install-recommends binutils \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /build
COPY deploy/image/build.lock deploy/image/
RUN python -m venv /tools && /tools/bin/pip install --quiet --require-hashes -r deploy/image/build.lock
COPY deploy/image/interpreter deploy/image/install deploy/image/install-wheel deploy/image/
RUN deploy/image/interpreter /interpreter

FROM tools AS wheel
COPY pyproject.toml setup.py LICENSE README.md ./
COPY proto proto
COPY tools/generate_stubs.py tools/
COPY docs/runbooks docs/runbooks
COPY services services
RUN /tools/bin/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir /wheels .

# What a process needs lies below what changes every day, which is our package.
FROM tools AS files-broker
COPY deploy/image/broker.lock deploy/image/
RUN deploy/image/install broker
COPY --from=wheel /wheels /wheels
RUN deploy/image/install-wheel

FROM tools AS files-proxy
COPY deploy/image/proxy.lock deploy/image/
RUN deploy/image/install proxy
COPY --from=wheel /wheels /wheels
RUN deploy/image/install-wheel

FROM tools AS files-admin
COPY deploy/image/admin.lock deploy/image/
RUN deploy/image/install admin
COPY --from=wheel /wheels /wheels
RUN deploy/image/install-wheel

FROM tools AS files-tidemill
COPY deploy/image/tidemill.lock deploy/image/
RUN deploy/image/install tidemill
COPY --from=wheel /wheels /wheels
RUN deploy/image/install-wheel

# ---------------------------------------------------------------- what every image has

FROM ${DEBIAN_IMAGE} AS root
RUN apt-get update \
 && apt-get install -y --no-install-recommends \
    ca-certificates libbz2-1.0 libexpat1 libffi8 liblzma5 libsqlite3-0 libssl3 libuuid1 tzdata zlib1g \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/cache/debconf/*-old /var/log/* \
    /usr/share/info/* /usr/share/locale/* /usr/share/man/* /etc/pip.conf \
 && find /usr/share/doc ! -type d ! -name copyright -delete \
 && groupadd --gid 10001 tidemill \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /nonexistent tidemill
COPY --from=tools /interpreter /usr/local
# What the interpreter was linked with is there, or the build ends here.
RUN ldconfig && PYTHONDONTWRITEBYTECODE=1 python3 -c "import bz2, ctypes, lzma, pyexpat, sqlite3, ssl, uuid, zlib"

# One layer: what was removed above is in none.
FROM scratch AS base
COPY --from=root / /
# The root file system may be read-only: nothing is written but the data directory.
ENV PATH=/opt/tidemill/bin:/usr/local/bin:/usr/bin:/bin \
    LANG=C.UTF-8 PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1
ARG VERSION=0.2.0
ARG COMMIT=
ENV TIDEMILL_COMMIT=${COMMIT}
LABEL org.opencontainers.image.title="Tidemill" \
      org.opencontainers.image.description="A message broker for RocketMQ 5 clients" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${COMMIT}"
USER 10001:10001
WORKDIR /
# It is process 1, reaps what is left behind, and ends on SIGTERM from its first instant (ADR 0035).
ENTRYPOINT ["tidemill"]
STOPSIGNAL SIGTERM

FROM base AS broker
# The folder is for volumes. A VOLUME would be a writable folder in each pod of the image.
USER 0
RUN install -d -o 10001 -g 10001 -m 0750 /data
USER 10001:10001
COPY --from=files-broker /opt/tidemill /opt/tidemill
CMD ["broker", "--data-dir", "/data"]
EXPOSE 10911 5557

FROM base AS proxy
COPY --from=files-proxy /opt/tidemill /opt/tidemill
CMD ["proxy"]
EXPOSE 8081 5557

FROM base AS admin
COPY --from=files-admin /opt/tidemill /opt/tidemill
CMD ["admin"]
EXPOSE 8080 5557

# For skaffold: files may be copied into it, and what runs is started again when one has changed.
FROM base AS dev
USER 0
RUN install -d -o 10001 -g 10001 -m 0750 /data
USER 10001:10001
COPY --from=files-tidemill --chown=10001:10001 /opt/tidemill /opt/tidemill
# Bytecode is looked at for changes here, which it is nowhere else.
RUN find /opt/tidemill/lib/python3.11/site-packages/tidemill -name '*.pyc' -delete
COPY deploy/image/reload /opt/tidemill/bin/
ENTRYPOINT ["/opt/tidemill/bin/reload"]
CMD ["standalone", "--data-dir", "/data"]

FROM base AS tidemill
USER 0
RUN install -d -o 10001 -g 10001 -m 0750 /data
USER 10001:10001
COPY --from=files-tidemill /opt/tidemill /opt/tidemill
# On all addresses of the container, so that `docker run -p` reaches it, and decides who else does.
CMD ["standalone", "--data-dir", "/data", "--grpc-host", "0.0.0.0", "--admin-host", "0.0.0.0", \
     "--admin-open", "--admin-plain", "--metrics-host", "0.0.0.0"]
EXPOSE 8080 8081 10911 5557
