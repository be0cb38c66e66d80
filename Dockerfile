# Linnet for CPUs. Build: docker build -t linnet-lm . Use: docker run --rm linnet-lm verify. To serve a run: see compose.yaml.
FROM python:3.12-slim

ENV PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore

# As in `make setup`: the complete lock with its hashes, without a resolver. This layer is rebuilt only when the lock changes.
WORKDIR /opt/linnet
COPY requirements.lock scripts/install_lock.py ./
RUN python install_lock.py requirements.lock

COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN python -m pip install --quiet --no-build-isolation --no-deps . \
    && python -m pip check \
    && useradd --create-home --uid 1000 linnet \
    && install --directory --owner=linnet --group=linnet /home/linnet/.cache

USER 1000
WORKDIR /home/linnet
ENTRYPOINT ["linnet"]
