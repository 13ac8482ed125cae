# One image for a whole service on one machine, or for each node of a Ray cluster of yours.
# It needs no rights and writes to /state and /tmp only, so it runs with a read-only root file system and a network of its own:
# docs/how-to/deploy.md has the command. Nothing secret is built in: tokens, keys and the service file are mounted.

FROM python:3.11-slim-bookworm AS build
# The CPU build of torch; for GPUs the index of the CUDA version of the machine.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /source
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY placement placement
COPY moe_serve moe_serve
RUN python -m venv /opt/moe-serve \
 && /opt/moe-serve/bin/pip install --no-cache-dir --extra-index-url "$TORCH_INDEX" -c constraints.txt .
# Kernels are compiled now: later nobody may write beside them. From elsewhere, so that the installed package is what is imported.
WORKDIR /
RUN /opt/moe-serve/bin/python -m moe_serve.warm_kernels

FROM python:3.11-slim-bookworm
RUN useradd --uid 10001 --home-dir /state --no-create-home --shell /usr/sbin/nologin moe \
 && install --directory --owner 10001 --group 10001 --mode 0700 /state
COPY --from=build /opt/moe-serve /opt/moe-serve
ENV PATH=/opt/moe-serve/bin:$PATH \
    HOME=/state \
    XDG_STATE_HOME=/state \
    PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
VOLUME ["/state"]
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=30s --timeout=20s --start-period=300s CMD ["moe-serve", "status", "--check"]
ENTRYPOINT ["moe-serve"]
CMD ["up", "--keep", "-f", "/etc/moe-serve/service.yaml"]
