# syntax=docker/dockerfile:1
# One image for every process: docker build -t promptmill .            (CPU)
#                              docker build -t promptmill --build-arg TORCH=cuda .
# CUDA needs nothing but the host's driver and the NVIDIA container toolkit: the wheels bring their libraries.
ARG PYTHON=3.11

FROM python:${PYTHON}-slim-bookworm AS build
ARG TORCH=cpu
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python -m venv /opt/promptmill
ENV PATH=/opt/promptmill/bin:$PATH
WORKDIR /src
COPY constraints.txt .
# PyPI's own torch is the CUDA build; the CPU build, a tenth of its size, has an index of its own.
RUN if [ "$TORCH" = cpu ]; then pip install --constraint constraints.txt torch --index-url https://download.pytorch.org/whl/cpu; fi
COPY pyproject.toml README.md LICENSE ./
COPY promptmill promptmill
COPY api api
COPY workers workers
COPY batching batching
COPY storage storage
# The wheel without its source: with both on the path Celery and the console script would take different copies.
RUN pip install --constraint constraints.txt .

FROM python:${PYTHON}-slim-bookworm
RUN useradd --system --uid 10001 --create-home --home-dir /var/lib/promptmill promptmill \
    && install --directory --owner promptmill --group promptmill /var/lib/promptmill/models
COPY --from=build /opt/promptmill /opt/promptmill
COPY config /etc/promptmill
ENV PATH=/opt/promptmill/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PROMPTMILL_CONFIG_DIR=/etc/promptmill \
    PROMPTMILL_DATA_DIR=/var/lib/promptmill \
    PROMPTMILL_HOST=0.0.0.0
USER promptmill
WORKDIR /var/lib/promptmill
EXPOSE 8000
# No pid 1 of our own and no shell: signals reach the process that `promptmill <name>` becomes.
CMD ["promptmill", "api"]
