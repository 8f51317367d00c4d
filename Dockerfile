# For the CPU: docker build -t bitimely .
#              docker run --rm --user "$(id -u):$(id -g)" -v "$PWD:/data" bitimely demo
FROM python:3.11-slim AS build
WORKDIR /source
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY bitimely bitimely
COPY bitimely_cli bitimely_cli
COPY bitimely_core bitimely_core
COPY pipelines pipelines
# the second index has torch without CUDA, a tenth of the size
RUN python3 -m venv /opt/bitimely && \
    /opt/bitimely/bin/pip install --no-cache-dir --disable-pip-version-check --extra-index-url https://download.pytorch.org/whl/cpu -c constraints.txt .

FROM python:3.11-slim
COPY --from=build /opt/bitimely /opt/bitimely
# any user may write to the home folder, where libraries keep their caches
ENV PATH=/opt/bitimely/bin:$PATH HOME=/home/bitimely BITIMELY_WORKSPACE=/data/workspace
RUN useradd --create-home --uid 1000 bitimely && chmod 1777 /home/bitimely && install -d -o bitimely -g bitimely /data
USER bitimely
WORKDIR /data
ENTRYPOINT ["bitimely"]
CMD ["--help"]
