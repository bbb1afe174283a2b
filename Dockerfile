# Tessera's wheel, and an image where it is installed; for the CPU or for CUDA (docs/build.md#containers).
#   docker build --build-arg KIND=cuda -t tessera .
#   docker build --build-arg KIND=cuda --target wheels --output dist .
# The default image of the builder has the glibc of manylinux_2_28 and Python 3.11 and 3.12; one of manylinux has all.
ARG BUILDER=almalinux:8
ARG PYTHON=3.12

FROM ${BUILDER} AS builder
ARG PYTHON
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# hadolint ignore=DL3041
RUN dnf install -y git make gcc-toolset-14-gcc-c++ \
  && { test -d /opt/python || dnf install -y "python${PYTHON}-devel" "python${PYTHON}-pip"; } \
  && dnf clean all
COPY . /src
WORKDIR /src
# cpu or cuda; a version of requirements/matrix.txt, else that of requirements/torch.txt.
ARG KIND=cpu
ARG TORCH=
# Where pip finds torch for the CPU, which PyPI does not have.
ARG PIP_EXTRA_INDEX_URL=
RUN scl enable gcc-toolset-14 -- make wheels "PYTHON=python${PYTHON}" \
  ARGS="--kind ${KIND} --policy manylinux_2_28 ${TORCH:+--torch ${TORCH}}"

FROM scratch AS wheels
COPY --from=builder /src/dist/ /

FROM python:${PYTHON}-slim AS runtime
ARG PIP_EXTRA_INDEX_URL=
RUN --mount=type=bind,from=builder,source=/src/dist,target=/dist \
  pip install --no-cache-dir /dist/*.whl \
  && useradd --create-home --uid 1000 tessera
USER 1000
WORKDIR /data
CMD ["tessera", "report"]
