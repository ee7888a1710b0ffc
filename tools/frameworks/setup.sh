#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Sets up the environment in which the adapters are tested: the real frameworks next to a CPU torch.
#
#     sh tools/frameworks/setup.sh DIR [PYTHON]
#
# About a minute and 1.3 GB. Does nothing where DIR was set up by this very script already.
set -eu

dir=$1
python=${2:-python3}
here=$(cd "$(dirname "$0")" && pwd)
stamp="$dir/frameworks.stamp"
wanted=$(cat "$here/setup.sh" "$here/no_triton.py" "$here/constraints.txt" | cksum)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
    exit 0
fi

"$python" -m venv "$dir"
install() {
    "$dir/bin/pip" --disable-pip-version-check install --quiet -c "$here/constraints.txt" "$@"
}
install torch numpy setuptools wheel packaging pytest hypothesis
install transformers
# from_pretrained(distributed_config=..) asks for accelerate.
install --no-deps accelerate psutil
# The metadata says Python 3.12 or newer, but there is a wheel for 3.11.
install --no-deps --ignore-requires-python megatron-core
# Without their dependencies: torchtitan's would bring data sets, loggers and another torch.
install --no-deps torchtitan spmd_types einops tyro docstring-parser typeguard
# Its ops are built when they are used, and none is here.
DS_BUILD_OPS=0 install --no-deps --no-build-isolation deepspeed
install --no-deps hjson ninja py-cpuinfo msgpack
# megatron-core and torchtitan import triton kernels that the CPU does not need; triton is 1 GB.
site=$("$dir/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
cp "$here/no_triton.py" "$site/"
echo 'import no_triton; no_triton.install()' > "$site/no_triton.pth"
echo "$wanted" > "$stamp"
